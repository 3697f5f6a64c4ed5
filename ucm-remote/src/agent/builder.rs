//! Settings of an agent, and its start.
//!
//! **Invariant:** an agent that could not be started whole leaves nothing behind.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, atomic::AtomicUsize},
    task::Waker,
    time::Duration,
};

use ucm_data::Segments;
use ucm_transport::{
    Memory, RegionId, Secret, ShmEngine, TcpEngine, TcpServerConfig, TransferEngine, TransferError,
};

use super::{
    Agent, Counters, Inner, Shared, Woken,
    announce::{self, Announcer},
    arena::Arena,
    lock,
    pull::{self, Puller},
    routes::Routes,
    source::Ended,
    table::Table,
    touch::{self, Toucher},
};
use crate::{Directory, HostMedium, PeerId, PlacementStrategy, Token, service::Links};

/// Why an agent could not be started.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// An engine or the server was refused something.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// The operating system refused something.
    #[error("the remote pool's agent: {0}")]
    System(String),
    /// Other processes cannot map its memory.
    #[error(
        "the memory cannot be passed to other processes; make the medium of `HostMedium::shared` and give \
         the builder a `shared_arena` of one segment"
    )]
    Memory,
}

#[derive(Clone, Debug)]
pub(super) struct Options {
    pub(super) me: PeerId,
    pub(super) listen: Option<SocketAddr>,
    pub(super) advertise: Option<String>,
    pub(super) server: TcpServerConfig,
    pub(super) prefetch: bool,
    pub(super) batch_bytes: u64,
    pub(super) piece_bytes: u64,
    pub(super) objects: usize,
    pub(super) fetch_timeout: Duration,
    pub(super) connect_timeout: Duration,
    pub(super) heartbeat: Duration,
    pub(super) negative: Duration,
    pub(super) pulls: usize,
    pub(super) withdrawals: usize,
    pub(super) lend: Duration,
    pub(super) arena_page_bytes: u64,
    /// Where objects are put, and on how many peers; here only, without.
    pub(super) placement: Option<(Arc<dyn PlacementStrategy>, usize)>,
}

/// Settings of an [`Agent`].
#[derive(Clone, Debug)]
#[must_use = "call `start`"]
pub struct AgentBuilder {
    medium: HostMedium,
    directory: Arc<dyn Directory>,
    secret: Secret,
    arena: Option<Memory>,
    shared_arena: Option<Segments>,
    options: Options,
}

impl Agent {
    /// An agent of this name, which keeps objects in `medium` and finds others by `directory`. Peers
    /// must know the secret.
    pub fn builder(
        me: PeerId,
        medium: HostMedium,
        directory: Arc<dyn Directory>,
        secret: Secret,
    ) -> AgentBuilder {
        let options = Options {
            me,
            listen: None,
            advertise: None,
            server: TcpServerConfig::new(secret.clone()),
            prefetch: true,
            batch_bytes: 1 << 20,
            piece_bytes: 1 << 20,
            objects: 4096,
            fetch_timeout: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(2),
            heartbeat: Duration::from_millis(500),
            negative: Duration::from_millis(20),
            pulls: 4096,
            withdrawals: 65_536,
            lend: Duration::from_secs(30),
            arena_page_bytes: 4096,
            placement: None,
        };
        AgentBuilder { medium, directory, secret, arena: None, shared_arena: None, options }
    }
}

impl AgentBuilder {
    /// Serves the medium at this address; port 0 takes a free one. Without it, nobody is served.
    pub fn listen(mut self, address: SocketAddr) -> Self {
        self.options.listen = Some(address);
        self
    }

    /// The address that others are told, when it is not the one that is listened on.
    pub fn advertise(mut self, address: impl Into<String>) -> Self {
        self.options.advertise = Some(address.into());
        self
    }

    /// Limits of the service.
    pub fn server(mut self, config: TcpServerConfig) -> Self {
        self.options.server = config;
        self
    }

    /// Memory for what finds no place in the medium, mapped by all ranks. Without it, such reads are
    /// `TooLarge`.
    pub fn arena(mut self, memory: Memory) -> Self {
        self.arena = Some(memory);
        self
    }

    /// As [`arena`](Self::arena), of one segment that ranks in other processes can map.
    pub fn shared_arena(mut self, segments: Segments) -> Self {
        self.shared_arena = Some(segments);
        self
    }

    /// Whether objects are completed in the background. Default: yes.
    pub fn prefetch(mut self, prefetch: bool) -> Self {
        self.options.prefetch = prefetch;
        self
    }

    /// Bytes of one plan of several fetches, and of one background pull. Default 1 MiB.
    pub fn batch_bytes(mut self, bytes: u64) -> Self {
        self.options.batch_bytes = bytes.max(1);
        self
    }

    /// Bytes of one fetch at most: readers can begin when the first ones are there. Default 1 MiB.
    pub fn piece_bytes(mut self, bytes: u64) -> Self {
        self.options.piece_bytes = bytes.max(1);
        self
    }

    /// Objects on their way or partly here at a time. Default 4,096.
    pub fn objects(mut self, objects: usize) -> Self {
        self.options.objects = objects.max(1);
        self
    }

    /// Objects that wait to be completed in the background; more are dropped and counted. Default 4,096.
    pub fn pulls(mut self, objects: usize) -> Self {
        self.options.pulls = objects;
        self
    }

    /// Objects that went while the directory could not be told, and that are withdrawn when it can. When
    /// there were more, this peer begins a new run, which takes all that it had announced away. Default
    /// 65,536, at 72 bytes each.
    pub fn withdrawals(mut self, objects: usize) -> Self {
        self.options.withdrawals = objects;
        self
    }

    /// How long pages are lent to neighbours that read them by themselves. Default 30 s.
    pub fn lend_for(mut self, time: Duration) -> Self {
        self.options.lend = time;
        self
    }

    /// How long a peer may take for what one plan brings. Default 5 s.
    pub fn fetch_timeout(mut self, timeout: Duration) -> Self {
        self.options.fetch_timeout = timeout;
        self
    }

    /// How long connecting to a peer may take. Default 2 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.options.connect_timeout = timeout;
        self
    }

    /// How often this peer reports to the directory. Default 500 ms.
    pub fn heartbeat(mut self, every: Duration) -> Self {
        self.options.heartbeat = every;
        self
    }

    /// How long it is remembered that nobody has a key. Default 20 ms.
    pub fn negative(mut self, life: Duration) -> Self {
        self.options.negative = life;
        self
    }

    /// Where objects are put, and on how many peers. By default they stay on this node.
    pub fn placement(mut self, strategy: Arc<dyn PlacementStrategy>, copies: usize) -> Self {
        self.options.placement = Some((strategy, copies.max(1)));
        self
    }

    /// Starts the agent: three threads of its own, and those of its engine and server. When this returns,
    /// the directory has been told of it once, if it answers.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub fn start(self) -> Result<Agent, AgentError> {
        let Self { medium, directory, secret, arena, shared_arena, options } = self;
        let arena = match (&shared_arena, arena) {
            (Some(segments), _) => {
                let mut memory = Memory::of_segments(segments)?;
                if memory.len() != 1 {
                    return Err(AgentError::Memory);
                }
                memory.pop()
            }
            (None, arena) => arena,
        };
        // All of it, or none: ranks name segments by their number.
        let passed_on = shared_arena.is_some() || arena.is_none();
        let shared = medium
            .shared_segments()
            .filter(|_| passed_on)
            .map(|medium| Shared { medium: medium.clone(), arena: shared_arena });
        let tcp = Arc::new(
            TcpEngine::builder()
                .max_in_flight(options.objects.saturating_mul(64).max(4096))
                .connect_timeout(options.connect_timeout)
                .build()?,
        );
        let shm = ShmEngine::builder().build()?;
        let mut segments: Vec<Memory> = medium.segments().to_vec();
        let number = u32::try_from(segments.len()).unwrap_or(u32::MAX);
        let bytes = arena.as_ref().map_or(0, |memory| memory.len() as u64);
        segments.extend(arena);
        let register = |engine: &dyn TransferEngine| -> Result<Vec<RegionId>, TransferError> {
            segments.iter().map(|memory| engine.register(memory.clone())).collect()
        };
        let (tcp_segments, shm_segments) = (register(&*tcp)?, register(&shm)?);
        let table = Table::new(Arc::clone(medium.medium()), options.objects, options.piece_bytes);
        let lives = (Duration::from_secs(60), options.negative);
        let inner = Arc::new(Inner {
            links: Links::new(Arc::clone(&tcp), secret, options.connect_timeout),
            routes: Routes::new(directory, options.objects.saturating_mul(16), lives),
            arena: Arena::new(number, bytes, options.arena_page_bytes),
            puller: Puller::new(options.pulls),
            toucher: Toucher::default(),
            announcer: Arc::new(Announcer::default()),
            options,
            run: Token::random().map_err(|error| AgentError::System(error.to_string()))?,
            medium,
            segments: segments.into(),
            shared,
            tcp,
            shm,
            tcp_segments,
            shm_segments,
            mapped: Mutex::default(),
            neighbours: Mutex::default(),
            ended: Arc::new(Ended::default()),
            table: Mutex::new(table),
            server: Mutex::new(None),
            foreground: AtomicUsize::new(0),
            bells: Mutex::default(),
            stopping: false.into(),
            counters: Counters::default(),
        });
        // A partly started agent is stopped by its drop.
        let mut agent = Agent { ranks: Vec::new(), inner: Arc::clone(&inner), threads: Vec::new() };
        let waker = || Waker::from(Arc::new(Woken(Arc::downgrade(&inner))));
        inner.tcp.set_waker(Some(waker()));
        inner.shm.set_waker(Some(waker()));
        if let Some(address) = inner.options.listen {
            *lock(&inner.server) = Some(inner.serve(address)?);
        }
        let mut told = announce::Told::default();
        inner.announce(&mut told);
        let spawn = |name: &str, run: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new()
                .name(name.into())
                .spawn(run)
                .map_err(|error| AgentError::System(format!("no thread: {error}")))
        };
        let of_thread = Arc::clone(&inner);
        agent
            .threads
            .push(spawn("ucm-announce", Box::new(move || announce::run(&of_thread, told)))?);
        let of_thread = Arc::clone(&inner);
        agent.threads.push(spawn("ucm-pull", Box::new(move || pull::run(&of_thread)))?);
        let of_thread = Arc::clone(&inner);
        agent.threads.push(spawn("ucm-touch", Box::new(move || touch::run(&of_thread)))?);
        Ok(agent)
    }
}
