//! The serving side: listens, lets clients in, and moves what their owner names.
//!
//! **Invariant:** idle connections cost no wake-up; every connection is bounded in memory, and all
//! of them in number.

mod conn;
mod exports;
mod serve;

use std::{
    collections::HashMap,
    fmt, io,
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::{
    buffer::spare_capacity,
    event::{Timespec, epoll},
};
use ucm_data::Token;

use self::conn::{Connection, Over, Wants};
use super::{Secret, bell, socket::Socket, tls::TlsServer, wire::Grant};
use crate::{ErrorKind, TransferError};

pub(super) use serve::refused;
pub use {
    exports::Exports,
    serve::{Pieces, Refusal, RefusalKind, Request, Serve, Served, Session},
};

/// Limits and rules of a [`TcpServer`].
#[derive(Clone, Debug)]
pub struct TcpServerConfig {
    /// What clients must know.
    pub secret: Secret,
    /// Threads that move bytes. Default 2.
    pub threads: usize,
    /// Connections at once; further ones are closed on arrival. Default 1024.
    pub max_connections: usize,
    /// Bytes a client may have asked for on one lane and not got. Default 64 MiB.
    pub window_bytes: u64,
    /// Bytes of a request's body, and of the reply to a call. Default 1 MiB.
    pub frame_bytes: u32,
    /// Ranges of one request. Default 65,536.
    pub max_ranges: u32,
    /// Requests a client may have open on one lane. Default 256.
    pub max_requests: u32,
    /// A connection that owes or is owed bytes and moves none for so long is closed. Default 10 s.
    pub stall: Duration,
}

impl TcpServerConfig {
    /// Defaults.
    #[must_use]
    pub fn new(secret: Secret) -> Self {
        Self {
            secret,
            threads: 2,
            max_connections: 1024,
            window_bytes: 64 << 20,
            frame_bytes: 1 << 20,
            max_ranges: 1 << 16,
            max_requests: 256,
            stall: Duration::from_secs(10),
        }
    }

    pub(super) fn grant(&self) -> Grant {
        Grant {
            window: self.window_bytes.max(1),
            frame: self.frame_bytes.max(4096),
            requests: self.max_requests.max(1),
            ranges: self.max_ranges.max(1),
        }
    }
}

/// What a server has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TcpServerStats {
    /// Connections now.
    pub connections: usize,
    /// Connections closed on arrival because there were too many.
    pub turned_away: u64,
    /// Connections closed for breaking the protocol, not knowing the secret, or stalling.
    pub expelled: u64,
    /// Requests begun.
    pub requests: u64,
    /// Payload bytes of those.
    pub bytes: u64,
}

/// Serves the memory that a [`Serve`] names to clients that know the secret. Dropping it closes all
/// connections; when that has returned, nothing of it touches any memory.
pub struct TcpServer {
    state: Arc<ServerState>,
    address: SocketAddr,
    threads: Vec<JoinHandle<()>>,
}

pub(super) struct ServerState {
    pub(super) config: TcpServerConfig,
    tls: Option<TlsServer>,
    pub(super) boot: Token,
    pub(super) service: Arc<dyn Serve>,
    workers: Vec<Worker>,
    stopping: AtomicBool,
    sessions: AtomicU64,
    connections: AtomicUsize,
    turned_away: AtomicU64,
    expelled: AtomicU64,
    requests: AtomicU64,
    bytes: AtomicU64,
}

/// What a thread of the server waits on.
struct Worker {
    epoll: OwnedFd,
    bell: OwnedFd,
    arrivals: Mutex<Vec<(TcpStream, SocketAddr)>>,
}

const BELL: u64 = 0;
const LISTENER: u64 = 1;
const FIRST: u64 = 2;

impl TcpServer {
    /// Listens on exactly this address; port 0 takes a free one.
    ///
    /// # Errors
    /// `Registration` when the system refuses the address, a thread or a descriptor.
    pub fn bind(
        address: SocketAddr,
        config: TcpServerConfig,
        service: Arc<dyn Serve>,
    ) -> Result<Self, TransferError> {
        Self::bind_with(address, config, None, service)
    }

    /// As [`bind`](Self::bind), but talks with TLS only.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    #[cfg(feature = "tls")]
    pub fn bind_tls(
        address: SocketAddr,
        config: TcpServerConfig,
        tls: TlsServer,
        service: Arc<dyn Serve>,
    ) -> Result<Self, TransferError> {
        Self::bind_with(address, config, Some(tls), service)
    }

    fn bind_with(
        address: SocketAddr,
        config: TcpServerConfig,
        tls: Option<TlsServer>,
        service: Arc<dyn Serve>,
    ) -> Result<Self, TransferError> {
        let failed = |error: io::Error| {
            TransferError::new(ErrorKind::Registration, format!("cannot serve {address}: {error}"))
        };
        let boot = Token::random().map_err(|e| failed(io::Error::other(e.to_string())))?;
        let listener = TcpListener::bind(address).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let bound = listener.local_addr().map_err(failed)?;
        let count = config.threads.clamp(1, 64);
        let workers =
            (0..count).map(|_| Worker::new()).collect::<Result<_, _>>().map_err(failed)?;
        let state = Arc::new(ServerState {
            config,
            tls,
            boot,
            service,
            workers,
            stopping: AtomicBool::new(false),
            sessions: AtomicU64::new(1),
            connections: AtomicUsize::new(0),
            turned_away: AtomicU64::new(0),
            expelled: AtomicU64::new(0),
            requests: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        });
        // A partly started server is stopped by its drop.
        let mut server = Self { state, address: bound, threads: Vec::with_capacity(count) };
        let mut listener = Some(listener);
        for number in 0..count {
            let (state, listener) = (Arc::clone(&server.state), listener.take());
            let thread = thread::Builder::new()
                .name(format!("ucm-tcp-srv-{number}"))
                .spawn(move || Turn::new(&state, number, listener).run())
                .map_err(failed)?;
            server.threads.push(thread);
        }
        Ok(server)
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Names this run of the server.
    #[must_use]
    pub fn boot(&self) -> Token {
        self.state.boot
    }

    /// What it has done.
    #[must_use]
    pub fn stats(&self) -> TcpServerStats {
        let state = &self.state;
        TcpServerStats {
            connections: state.connections.load(Ordering::Relaxed),
            turned_away: state.turned_away.load(Ordering::Relaxed),
            expelled: state.expelled.load(Ordering::Relaxed),
            requests: state.requests.load(Ordering::Relaxed),
            bytes: state.bytes.load(Ordering::Relaxed),
        }
    }
}

impl Drop for TcpServer {
    fn drop(&mut self) {
        self.state.stopping.store(true, Ordering::SeqCst);
        self.state.workers.iter().for_each(|worker| bell::ring(&worker.bell));
        let me = thread::current().id();
        for thread in self.threads.drain(..) {
            // The owner's code may hold the last reference to the server.
            if thread.thread().id() != me && thread.join().is_err() {
                tracing::error!("a thread of the tcp server ended by a panic");
            }
        }
    }
}

impl fmt::Debug for TcpServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpServer")
            .field("address", &self.address)
            .field("boot", &self.state.boot)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

impl ServerState {
    fn next_session(&self) -> u64 {
        self.sessions.fetch_add(1, Ordering::Relaxed)
    }

    fn count_request(&self, payload: u64) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(payload, Ordering::Relaxed);
    }
}

impl Worker {
    fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let bell = bell::new()?;
        epoll::add(&epoll, &bell, epoll::EventData::new_u64(BELL), epoll::EventFlags::IN)?;
        Ok(Self { epoll, bell, arrivals: Mutex::default() })
    }
}

/// A thread of the server and its connections.
struct Turn<'a> {
    state: &'a ServerState,
    worker: &'a Worker,
    listener: Option<TcpListener>,
    /// Which thread gets the next connection.
    next_worker: usize,
    connections: HashMap<u64, Connection>,
    next_token: u64,
    /// Connections that stopped with work left.
    more: Vec<u64>,
    /// No later than this, stalls are looked for.
    look: Option<Instant>,
}

impl<'a> Turn<'a> {
    fn new(state: &'a ServerState, number: usize, listener: Option<TcpListener>) -> Self {
        let worker = state.workers.get(number).unwrap_or(&state.workers[0]);
        Self {
            state,
            worker,
            listener,
            next_worker: 0,
            connections: HashMap::new(),
            next_token: FIRST,
            more: Vec::new(),
            look: None,
        }
    }

    fn run(mut self) {
        if let Some(listener) = &self.listener
            && let Err(error) = self.watch(listener, LISTENER, epoll::EventFlags::IN)
        {
            tracing::error!(%error, "the tcp server cannot watch its listener");
        }
        let mut events = Vec::with_capacity(64);
        while !self.state.stopping.load(Ordering::SeqCst) {
            events.clear();
            let timeout = self.timeout();
            if let Err(error) =
                epoll::wait(&self.worker.epoll, spare_capacity(&mut events), timeout.as_ref())
                && error != rustix::io::Errno::INTR
            {
                tracing::error!(%error, "a thread of the tcp server cannot wait any more");
                break;
            }
            let now = Instant::now();
            for event in &events {
                let event: &epoll::Event = event;
                match event.data.u64() {
                    BELL => {
                        bell::hush(&self.worker.bell);
                        self.take_arrivals(now);
                    }
                    LISTENER => self.accept(),
                    token => self.drive(token, now),
                }
            }
            for token in std::mem::take(&mut self.more) {
                self.drive(token, now);
            }
            self.expel_stalled(now);
        }
        let tokens: Vec<u64> = self.connections.keys().copied().collect();
        tokens.into_iter().for_each(|token| self.end(token, &Over::Left));
        // Those that arrived and were never taken.
        let late = std::mem::take(&mut *lock(&self.worker.arrivals));
        self.state.connections.fetch_sub(late.len(), Ordering::Relaxed);
    }

    fn timeout(&self) -> Option<Timespec> {
        if !self.more.is_empty() {
            return Some(Timespec { tv_sec: 0, tv_nsec: 0 });
        }
        let left = self.look?.saturating_duration_since(Instant::now());
        Timespec::try_from(left + Duration::from_millis(1)).ok()
    }

    fn accept(&mut self) {
        loop {
            let Some(listener) = &self.listener else { return };
            let (stream, address) = match listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    // Out of descriptors, or the client left again. Nothing to do but go on; the
                    // pause keeps a full process from spinning.
                    tracing::warn!(%error, "a connection could not be accepted");
                    thread::sleep(Duration::from_millis(5));
                    return;
                }
            };
            let before = self.state.connections.fetch_add(1, Ordering::Relaxed);
            if before >= self.state.config.max_connections {
                self.state.connections.fetch_sub(1, Ordering::Relaxed);
                self.state.turned_away.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            let workers = &self.state.workers;
            self.next_worker = (self.next_worker + 1) % workers.len();
            if let Some(worker) = workers.get(self.next_worker) {
                lock(&worker.arrivals).push((stream, address));
                bell::ring(&worker.bell);
            }
        }
    }

    fn take_arrivals(&mut self, now: Instant) {
        let arrivals = std::mem::take(&mut *lock(&self.worker.arrivals));
        for (stream, address) in arrivals {
            let token = self.next_token;
            self.next_token += 1;
            let tls = self.state.tls.as_ref().map(TlsServer::start).transpose();
            let watched = tls.and_then(|tls| Socket::new(stream, tls)).and_then(|socket| {
                let connection = Connection::new(socket, address, now);
                self.watch(connection.fd(), token, epoll::EventFlags::IN)?;
                self.connections.insert(token, connection);
                Ok(())
            });
            match watched {
                Ok(()) => self.drive(token, now),
                Err(error) => {
                    tracing::warn!(%error, %address, "a connection could not be watched");
                    self.state.connections.fetch_sub(1, Ordering::Relaxed);
                }
            }
        }
    }

    fn drive(&mut self, token: u64, now: Instant) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        let wants = match connection.drive(self.state, now) {
            Ok(wants) => wants,
            Err(over) => return self.end(token, &over),
        };
        if !connection.is_idle() {
            let look = connection.moved + self.state.config.stall;
            self.look = Some(self.look.map_or(look, |known| known.min(look)));
        }
        if wants == Wants::Turn {
            self.more.push(token);
        } else if wants != connection.wants {
            connection.wants = wants;
            let flags =
                if wants == Wants::Out { epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
            let data = epoll::EventData::new_u64(token);
            if let Err(error) = epoll::modify(&self.worker.epoll, connection.fd(), data, flags) {
                self.end(token, &Over::Io(error.into()));
            }
        }
    }

    /// Closes connections that have owed or been owed bytes for too long.
    fn expel_stalled(&mut self, now: Instant) {
        if self.look.is_none_or(|look| look > now) {
            return;
        }
        let stall = self.state.config.stall;
        let mut stalled = Vec::new();
        self.look = None;
        for (token, connection) in self.connections.iter().filter(|(_, c)| !c.is_idle()) {
            let look = connection.moved + stall;
            if look <= now {
                stalled.push(*token);
            } else {
                self.look = Some(self.look.map_or(look, |known| known.min(look)));
            }
        }
        stalled.into_iter().for_each(|token| self.end(token, &Over::Stalled));
    }

    fn end(&mut self, token: u64, over: &Over) {
        let Some(connection) = self.connections.remove(&token) else { return };
        match over {
            Over::Left => {}
            Over::Io(error) => tracing::debug!(%error, "a tcp connection ended"),
            other => {
                self.state.expelled.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(reason = %other, "a tcp connection was closed");
            }
        }
        // Closing the descriptor takes it out of the poller.
        connection.end(self.state);
        self.state.connections.fetch_sub(1, Ordering::Relaxed);
    }

    fn watch(
        &self,
        fd: impl std::os::fd::AsFd,
        token: u64,
        flags: epoll::EventFlags,
    ) -> io::Result<()> {
        let data = epoll::EventData::new_u64(token);
        Ok(epoll::add(&self.worker.epoll, fd, data, flags)?)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
