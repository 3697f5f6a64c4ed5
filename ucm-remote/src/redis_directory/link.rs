//! Connections to the server or cluster.
//!
//! **Invariant:** a connection is used again only after an exchange that was answered whole.

use std::{
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use redis::{
    Client, Cmd, Connection, ErrorKind, Pipeline, RedisError, RedisResult, Value,
    cluster::{ClusterClient, ClusterConnection, cluster_pipe},
};

use crate::DirectoryError;

/// Idle connections kept.
const KEPT: usize = 8;

pub(super) struct Link {
    server: Server,
    idle: Mutex<Vec<Open>>,
}

enum Server {
    Single(Client),
    Cluster(ClusterClient),
}

enum Open {
    Single(Connection),
    Cluster(Box<ClusterConnection>),
}

impl Link {
    pub(super) fn single(address: &str) -> Result<Self, DirectoryError> {
        let client = Client::open(address).map_err(|error| told(&error))?;
        Ok(Self { server: Server::Single(client), idle: Mutex::default() })
    }

    pub(super) fn cluster(
        addresses: &[String],
        patience: Duration,
    ) -> Result<Self, DirectoryError> {
        let client = ClusterClient::builder(addresses.iter().map(String::as_str))
            .connection_timeout(patience)
            .response_timeout(patience)
            .retries(1)
            .build()
            .map_err(|error| told(&error))?;
        Ok(Self { server: Server::Cluster(client), idle: Mutex::default() })
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Open>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the commands in one go (to each node of a cluster that has one of them) and returns an
    /// answer for each.
    pub(super) fn ask(
        &self,
        commands: Vec<Cmd>,
        deadline: Instant,
    ) -> Result<Vec<Value>, DirectoryError> {
        let count = commands.len();
        if count == 0 {
            return Ok(Vec::new());
        }
        let kept = self.idle().pop();
        let first = kept.is_some();
        let mut open = match kept {
            Some(open) => open,
            None => self.open(deadline)?,
        };
        let mut answer = open.ask(&commands, deadline);
        // One that was kept may have been closed by a server that restarted: all these commands may be
        // sent twice.
        if first && answer.as_ref().is_err_and(|error| error.is_io_error() && !error.is_timeout()) {
            self.idle().clear();
            open = self.open(deadline)?;
            answer = open.ask(&commands, deadline);
        }
        match answer {
            Ok(values) if values.len() == count => {
                let mut idle = self.idle();
                if idle.len() < KEPT {
                    idle.push(open);
                }
                Ok(values)
            }
            Ok(values) => {
                let got = values.len();
                Err(DirectoryError::Corrupt(format!("{got} answers to {count} commands")))
            }
            Err(error) => Err(told(&error)),
        }
    }

    fn open(&self, deadline: Instant) -> Result<Open, DirectoryError> {
        let left = left(deadline)?;
        let open = match &self.server {
            Server::Single(client) => client.get_connection_with_timeout(left).map(Open::Single),
            Server::Cluster(client) => {
                client.get_connection().map(|open| Open::Cluster(Box::new(open)))
            }
        };
        open.map_err(|error| told(&error))
    }
}

impl Open {
    fn ask(&mut self, commands: &[Cmd], deadline: Instant) -> RedisResult<Vec<Value>> {
        let left = left(deadline)
            .map_err(|_| RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut)))?;
        match self {
            Self::Single(open) => {
                open.set_read_timeout(Some(left))?;
                open.set_write_timeout(Some(left))?;
                let mut pipe = Pipeline::with_capacity(commands.len());
                for command in commands {
                    pipe.add_command(command.clone());
                }
                pipe.query(open)
            }
            Self::Cluster(open) => {
                open.set_read_timeout(Some(left))?;
                open.set_write_timeout(Some(left))?;
                let mut pipe = cluster_pipe();
                for command in commands {
                    pipe.add_command(command.clone());
                }
                pipe.query(open)
            }
        }
    }
}

fn left(deadline: Instant) -> Result<Duration, DirectoryError> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(DirectoryError::Timeout) } else { Ok(left) }
}

fn told(error: &RedisError) -> DirectoryError {
    let text = error.to_string();
    if error.is_timeout() {
        return DirectoryError::Timeout;
    }
    match error.kind() {
        ErrorKind::AuthenticationFailed | ErrorKind::InvalidClientConfig => {
            DirectoryError::Refused(text)
        }
        ErrorKind::Parse | ErrorKind::UnexpectedReturnType => DirectoryError::Corrupt(text),
        _ if ["NOAUTH", "WRONGPASS", "NOPERM"].iter().any(|code| text.contains(code)) => {
            DirectoryError::Refused(text)
        }
        _ => DirectoryError::Unavailable(text),
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Addresses may hold a password.
        let kind = match self.server {
            Server::Single(_) => "single",
            Server::Cluster(_) => "cluster",
        };
        f.debug_struct("Link").field("kind", &kind).finish_non_exhaustive()
    }
}
