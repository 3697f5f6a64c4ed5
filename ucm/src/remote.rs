//! A peer of the remote pool, and a visitor of it.
//!
//! Who holds the lock beside the socket is the node's agent; it falls to the next one that waits for it
//! when its process has ended, however that was.
//!
//! **Invariant:** only the holder of the lock touches the socket's file.

mod visitor;

use std::{
    fmt,
    net::{SocketAddr, ToSocketAddrs as _},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use ucm_data::{PageTier, Segments, SegmentsConfig, SharedFd};
use ucm_remote::{
    Agent, AgentStats, ByHash, Directory, DirectoryClient, DirectoryServer, EmbeddedDirectory,
    EmbeddedLimits, HostMedium, LocalFirst, MostFree, PagedLimits, PeerId, PlacementStrategy,
};
use ucm_transport::Secret;

pub use self::visitor::{Fetched, PoolVisitor};
use crate::{
    Config, Error, ErrorKind, PlacementKind, RemoteConfig,
    metrics::{self, MetricsServer},
};

/// How long memory of the peer before is waited for: far longer than its ranks need to hear of its end.
const FREED: Duration = Duration::from_secs(10);

/// Serves this node's memory to the ranks of the node and to other nodes. Dropping it leaves the pool.
pub struct Peer {
    // In this order: the agent says goodbye to the directory, the lock goes last.
    metrics: Option<MetricsServer>,
    agent: Arc<Agent>,
    directory: Option<DirectoryServer>,
    /// Dead in a forked child: it keeps no seat.
    _lock: Option<SharedFd>,
}

impl Peer {
    /// Starts the peer of this node. When another process is that already, with `standby` it waits until
    /// that one has ended, and takes over with an empty memory; without, it is `Refused`.
    ///
    /// # Errors
    /// `Config` for settings that make no sense, `Environment` when memory, the socket or the lock cannot be
    /// had, `Io` when an address cannot be listened on.
    pub fn start(config: &Config, standby: bool) -> Result<Self, Error> {
        let remote = &config.remote;
        let secret = secret(remote)?;
        let nobody = remote.listen.is_empty() && remote.socket.as_os_str().is_empty();
        if nobody && remote.serve_directory.is_empty() {
            return Err(Error::Config(
                "nobody would be served: set remote.listen, remote.socket or remote.serve_directory"
                    .into(),
            ));
        }
        let lock = match remote.socket.as_os_str().is_empty() {
            true => None,
            false => Some(take_over(&remote.socket, standby)?),
        };
        let (lock, patience) = lock.unzip();
        let until = Instant::now() + patience.unwrap_or_default();
        let (directory, server) = directory(remote, &secret)?;
        let medium = when_free(until, || shared("remote.bytes", remote.bytes, remote.page_bytes))?;
        let medium = HostMedium::shared(&medium, PagedLimits::new(remote.page_bytes))
            .map_err(|error| Error::Config(format!("remote.page_bytes, remote.bytes: {error}")))?;
        let me = PeerId::new(&name(remote));
        let mut builder =
            Agent::builder(me.clone(), medium, directory, secret).prefetch(remote.prefetch);
        if remote.arena_bytes > 0 {
            let bytes = remote.arena_bytes;
            let arena = when_free(until, || shared("remote.arena_bytes", bytes, bytes))?;
            builder = builder.shared_arena(arena);
        }
        if !remote.listen.is_empty() {
            builder = builder.listen(address("remote.listen", &remote.listen)?);
        }
        if !remote.advertise.is_empty() {
            let told = address("remote.advertise", &remote.advertise)?;
            builder = builder.advertise(told.to_string());
        }
        if remote.copies > 0 {
            builder = builder.placement(strategy(remote, me), remote.copies);
        }
        let mut agent = builder.start().map_err(refused)?;
        if !remote.socket.as_os_str().is_empty() {
            // Of a peer that was killed: we have its lock.
            let _ = std::fs::remove_file(&remote.socket);
            agent.serve_ranks(&remote.socket).map_err(refused)?;
        }
        let agent = Arc::new(agent);
        let server_of_metrics = match remote.metrics.is_empty() {
            true => None,
            false => {
                let at = address("remote.metrics", &remote.metrics)?;
                let agent = Arc::downgrade(&agent);
                let read = move || Some(metrics::of_agent(&agent.upgrade()?.stats()));
                let text = move || read().map(metrics::text);
                Some(MetricsServer::start("remote.metrics", at, text)?)
            }
        };
        Ok(Self { metrics: server_of_metrics, agent, directory: server, _lock: lock })
    }

    /// Where it serves other nodes.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.agent.address()
    }

    /// Where it serves its directory.
    #[must_use]
    pub fn directory_address(&self) -> Option<SocketAddr> {
        self.directory.as_ref().map(DirectoryServer::address)
    }

    /// Where its metrics can be read.
    #[must_use]
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(MetricsServer::address)
    }

    /// What it has done, and how things stand.
    #[must_use]
    pub fn stats(&self) -> AgentStats {
        self.agent.stats()
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer").field("agent", &self.agent).finish_non_exhaustive()
    }
}

fn refused(error: ucm_remote::AgentError) -> Error {
    match error {
        ucm_remote::AgentError::Transfer(error) => Error::Transfer(error),
        other => Error::Remote { kind: ErrorKind::Environment, what: other.to_string() },
    }
}

/// Memory of the peer before goes when its ranks have heard of its end, which takes them a moment.
fn when_free(
    until: Instant,
    make: impl Fn() -> Result<Segments, Error>,
) -> Result<Segments, Error> {
    loop {
        match make() {
            Err(error) if !matches!(error, Error::Config(_)) && Instant::now() < until => {
                tracing::debug!(%error, "memory is not free yet");
                thread::sleep(Duration::from_millis(20));
            }
            made => return made,
        }
    }
}

/// The lock of the node's agent, and how long its memory may take to become free.
fn take_over(socket: &Path, standby: bool) -> Result<(SharedFd, Duration), Error> {
    let mut path = socket.as_os_str().to_owned();
    path.push(".lock");
    let path = PathBuf::from(path);
    let failed = |error: rustix::io::Errno| {
        Error::os(format!("lock {}", path.display()), std::io::Error::from(error))
    };
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
    let fd = SharedFd::from(open(&path, flags, Mode::RUSR | Mode::WUSR).map_err(failed)?);
    match flock(&fd, FlockOperation::NonBlockingLockExclusive) {
        // The socket of a clean end is not there any more.
        Ok(()) if !socket.exists() => return Ok((fd, Duration::ZERO)),
        Ok(()) => return Ok((fd, FREED)),
        Err(rustix::io::Errno::WOULDBLOCK) if standby => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let what = format!(
                "another process is the peer behind {}; end it, or start this one with --standby",
                socket.display()
            );
            return Err(Error::Remote { kind: ErrorKind::Refused, what });
        }
        Err(error) => return Err(failed(error)),
    }
    tracing::info!(path = %path.display(), "waits until the peer of this node has ended");
    loop {
        match flock(&fd, FlockOperation::LockExclusive) {
            Ok(()) => return Ok((fd, FREED)),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(failed(error)),
        }
    }
}

fn strategy(remote: &RemoteConfig, me: PeerId) -> Arc<dyn PlacementStrategy> {
    match remote.placement {
        PlacementKind::Local => Arc::new(LocalFirst { me, then: MostFree }),
        PlacementKind::Free => Arc::new(MostFree),
        PlacementKind::Hash => Arc::new(ByHash),
    }
}

fn name(remote: &RemoteConfig) -> String {
    if remote.name.is_empty() {
        rustix::system::uname().nodename().to_string_lossy().into_owned()
    } else {
        remote.name.clone()
    }
}

fn secret(remote: &RemoteConfig) -> Result<Secret, Error> {
    let path = &remote.secret_file;
    if path.as_os_str().is_empty() {
        return Err(Error::Config(
            "remote.secret_file is empty: peers know each other by the secret in it".into(),
        ));
    }
    let bytes = std::fs::read(path).map_err(|source| {
        Error::os(format!("read remote.secret_file {}", path.display()), source)
    })?;
    // An editor's last line end is no part of it.
    let bytes = bytes.strip_suffix(b"\n").unwrap_or(&bytes);
    Secret::new(bytes).map_err(|error| Error::Config(format!("{}: {error}", path.display())))
}

fn address(what: &str, text: &str) -> Result<SocketAddr, Error> {
    let bad = |why: String| Error::Config(format!("{what} is {text:?}: {why}"));
    let mut found =
        text.to_socket_addrs().map_err(|error| bad(format!("host:port is needed ({error})")))?;
    found.next().ok_or_else(|| bad("the name has no address".into()))
}

/// The directory in force, and its server if this process has it.
fn directory(
    remote: &RemoteConfig,
    secret: &Secret,
) -> Result<(Arc<dyn Directory>, Option<DirectoryServer>), Error> {
    let at = &remote.directory;
    if !remote.serve_directory.is_empty() {
        if !at.is_empty() {
            return Err(Error::Config(
                "remote.directory and remote.serve_directory are both set: a peer that serves a \
                 directory uses that one"
                    .into(),
            ));
        }
        let own = Arc::new(EmbeddedDirectory::new(EmbeddedLimits::default()));
        let listen = address("remote.serve_directory", &remote.serve_directory)?;
        let ttl = Duration::from_millis(remote.member_ttl_ms.max(1));
        let server = DirectoryServer::start(Arc::clone(&own) as _, listen, secret.clone(), ttl)?;
        return Ok((own, Some(server)));
    }
    if at.is_empty() {
        return Ok((Arc::new(EmbeddedDirectory::new(EmbeddedLimits::default())), None));
    }
    if at.contains("://") {
        return Ok((redis(remote)?, None));
    }
    Ok((Arc::new(DirectoryClient::new(address("remote.directory", at)?, secret.clone())?), None))
}

#[cfg(feature = "redis")]
fn redis(remote: &RemoteConfig) -> Result<Arc<dyn Directory>, Error> {
    let mut options = ucm_remote::RedisOptions::new(&remote.directory_namespace);
    options.member_ttl = Duration::from_millis(remote.member_ttl_ms.max(1));
    let directory = ucm_remote::RedisDirectory::single(&remote.directory, options)
        .map_err(|error| Error::Config(format!("remote.directory: {error}")))?;
    Ok(Arc::new(directory))
}

#[cfg(not(feature = "redis"))]
fn redis(remote: &RemoteConfig) -> Result<Arc<dyn Directory>, Error> {
    Err(Error::Config(format!(
        "remote.directory is {:?}: this program was built without the feature `redis`",
        remote.directory
    )))
}

/// Memory that others can map.
fn shared(what: &str, bytes: u64, page: u64) -> Result<Segments, Error> {
    let pages = bytes.checked_div(page).unwrap_or(0);
    let pages = u32::try_from(pages).ok().filter(|pages| *pages > 0);
    let Some(pages) = pages else {
        return Err(Error::Config(format!(
            "{what} is {bytes}: with pages of {page} bytes, 1 to {} pages are possible",
            u32::MAX
        )));
    };
    let mut config = SegmentsConfig::new(page, pages);
    config.segment_bytes = config.segment_bytes.max(page.saturating_mul(u64::from(pages)));
    config.prefer = PageTier::Transparent;
    Ok(Segments::create(&config)?)
}
