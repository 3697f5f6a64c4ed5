//! Settings of the engine, and its start.
//!
//! **Invariant:** an engine that could not be started whole leaves nothing behind.

use std::{
    fmt,
    sync::{
        Arc, Condvar, Mutex, RwLock,
        atomic::{AtomicBool, AtomicU64},
    },
    time::{Duration, Instant},
};

use rustix::event::epoll;
use ucm_data::Token;

use super::{super::bell, Counters, Ends, Inner, TcpEngine, peer::LaneRules, thread};
use crate::{ErrorKind, RegionTable, TransferError};

/// Settings of a [`TcpEngine`].
#[derive(Clone, Debug)]
#[must_use = "call `build`"]
pub struct TcpEngineBuilder {
    max_in_flight: usize,
    timeout: Duration,
    connect_timeout: Duration,
    exchange_bytes: u64,
    failures: u32,
    rules: LaneRules,
}

impl TcpEngineBuilder {
    /// Plans and calls accepted but not yet polled; one more is refused as `Busy`. Default 4096.
    pub fn max_in_flight(mut self, plans: usize) -> Self {
        self.max_in_flight = plans.max(1);
        self
    }

    /// How long a plan may take that was given no deadline. Default 30 s.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How long connecting and greeting may take. Default 2 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Most bytes of one exchange; longer plans are split. Default 32 MiB, and never more than a
    /// peer grants.
    pub fn exchange_bytes(mut self, bytes: u64) -> Self {
        self.exchange_bytes = bytes.max(1);
        self
    }

    /// Connections to one peer at most. Default 4.
    pub fn max_lanes(mut self, lanes: usize) -> Self {
        self.rules.max_lanes = lanes.max(1);
        self
    }

    /// A further lane is opened when each one has several exchanges of more bytes than this to do.
    /// Default 4 MiB.
    pub fn spread_bytes(mut self, bytes: u64) -> Self {
        self.rules.spread_bytes = bytes;
        self
    }

    /// Lanes that were idle for longer are replaced before they are used. Default 5 s.
    pub fn max_idle(mut self, idle: Duration) -> Self {
        self.rules.max_idle = idle;
        self
    }

    /// Failures in a row after which a peer is left alone for a while. Default 2.
    pub fn breaker(mut self, failures: u32) -> Self {
        self.failures = failures;
        self
    }

    /// Starts the engine: one thread, which sleeps while nothing is due.
    ///
    /// # Errors
    /// `Failed` when the operating system refuses the thread or a descriptor.
    pub fn build(self) -> Result<TcpEngine, TransferError> {
        let failed = |what: &str, error: &dyn fmt::Display| {
            TransferError::new(ErrorKind::Failed, format!("{what}: {error}"))
        };
        let os = |error: std::io::Error| failed("no descriptor for the tcp engine", &error);
        let boot = Token::random().map_err(|error| failed("no boot token", &error))?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| os(e.into()))?;
        let bell = bell::new().map_err(os)?;
        let lead_bell = bell::new().map_err(os)?;
        let data = epoll::EventData::new_u64(thread::BELL);
        epoll::add(&epoll, &bell, data, epoll::EventFlags::IN).map_err(|e| os(e.into()))?;
        let epoll_of_thread = epoll.try_clone().map_err(os)?;
        let inner = Arc::new(Inner {
            boot,
            began: Instant::now(),
            max_in_flight: self.max_in_flight,
            timeout: self.timeout,
            connect_timeout: self.connect_timeout,
            failures: self.failures,
            rules: self.rules,
            exchange_bytes: AtomicU64::new(self.exchange_bytes),
            max_ranges: AtomicU64::new(u64::from(u32::MAX)),
            max_frame: AtomicU64::new(u64::from(u32::MAX)),
            regions: RegionTable::default(),
            peers: RwLock::default(),
            lanes: Mutex::default(),
            busy: Mutex::default(),
            next_lane: AtomicU64::new(thread::BELL + 1),
            ends: Mutex::new(Ends { next_ticket: 1, ..Ends::default() }),
            ended: Condvar::new(),
            threaded: AtomicBool::new(false),
            leading: AtomicBool::new(false),
            poisoned: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            earliest: AtomicU64::new(u64::MAX),
            epoll,
            bell,
            lead_bell,
            stats: Counters::default(),
        });
        let weak = Arc::downgrade(&inner);
        let thread = std::thread::Builder::new()
            .name("ucm-tcp".into())
            .spawn(move || thread::run(&weak, &epoll_of_thread))
            .map_err(|error| failed("no thread for the tcp engine", &error))?;
        Ok(TcpEngine { inner, thread: Some(thread) })
    }
}

impl TcpEngine {
    /// Default settings.
    pub fn builder() -> TcpEngineBuilder {
        TcpEngineBuilder {
            max_in_flight: 4096,
            timeout: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(2),
            exchange_bytes: 32 << 20,
            failures: 2,
            rules: LaneRules {
                max_lanes: 4,
                spread_bytes: 4 << 20,
                max_idle: Duration::from_secs(5),
            },
        }
    }
}
