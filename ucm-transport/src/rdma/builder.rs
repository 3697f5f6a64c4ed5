//! Settings of an engine, and what is made from them.
//!
//! **Invariant:** an engine asks its device for no more than the device has once given.

use std::{
    os::fd::BorrowedFd,
    sync::{
        Arc, RwLock,
        atomic::{AtomicBool, AtomicU64},
    },
    time::{Duration, Instant},
};

use rustix::event::epoll;
use ucm_data::Token;

use super::{
    device::RdmaDevice,
    dial::Dialer,
    ends::Ends,
    engine::RdmaEngine,
    inner::{Inner, MAX_OPERATION_BYTES},
    random,
    sys::QpCap,
    thread,
    verbs::{Channel, Registered, Rights},
    work::Limits,
};
use crate::{ErrorKind, Memory, RegionTable, TransferError, tcp::bell};

/// Settings of an [`RdmaEngine`].
#[derive(Clone, Debug)]
#[must_use = "call `build`"]
pub struct RdmaEngineBuilder {
    pub(super) device: RdmaDevice,
    pub(super) max_in_flight: usize,
    pub(super) timeout: Duration,
    pub(super) connect_timeout: Duration,
    pub(super) piece_bytes: usize,
    pub(super) queue: u32,
    pub(super) pieces: u32,
    pub(super) inline_bytes: u32,
    pub(super) spin: Duration,
    pub(super) failures: u32,
}

impl RdmaEngineBuilder {
    /// Plans accepted but not yet polled; one more is refused as `Busy`. Default 4096.
    pub fn max_in_flight(mut self, plans: usize) -> Self {
        self.max_in_flight = plans.max(1);
        self
    }

    /// How long a plan may take that was given no deadline. Default 30 s.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How long connecting may take. Default 2 s.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// Most bytes registered by one call: devices refuse very big ones. Default 1 GiB, multiples of
    /// 2 MiB.
    pub fn piece_bytes(mut self, bytes: usize) -> Self {
        self.piece_bytes = bytes;
        self
    }

    /// Operations that a connection may have posted. Default 256; less if the device allows less.
    pub fn queue(mut self, operations: u32) -> Self {
        self.queue = operations.max(2);
        self
    }

    /// Pieces of our memory in one operation. Default 16; less if the device allows less.
    pub fn pieces(mut self, pieces: u32) -> Self {
        self.pieces = pieces.max(1);
        self
    }

    /// Bytes up to which a write goes to the device with its request. Default 128; less if the device
    /// allows less.
    pub fn inline_bytes(mut self, bytes: u32) -> Self {
        self.inline_bytes = bytes;
        self
    }

    /// How long the engine's thread looks for completions without a pause after the last one, before
    /// it lets itself be woken. Default 20 µs.
    pub fn spin(mut self, time: Duration) -> Self {
        self.spin = time;
        self
    }

    /// Failures to connect in a row after which a peer is left alone for a while. Default 2.
    pub fn breaker(mut self, failures: u32) -> Self {
        self.failures = failures;
        self
    }

    /// Starts the engine: one thread, which sleeps while nothing is under way.
    ///
    /// # Errors
    /// `Failed` when the device refuses a queue or the operating system a thread or a descriptor.
    pub fn build(self) -> Result<RdmaEngine, TransferError> {
        let os = |error: std::io::Error| {
            TransferError::new(ErrorKind::Failed, format!("no thread for the rdma engine: {error}"))
        };
        let verb = |error| TransferError::verb(ErrorKind::Failed, error);
        let opened = &self.device.opened;
        let wish = QpCap {
            max_send_wr: self.queue,
            max_send_sge: self.pieces,
            max_inline_data: self.inline_bytes,
            ..QpCap::default()
        };
        // What the device really gives is known only when it has given it.
        let probe = opened.queue_pair(wish, None).map_err(verb)?;
        let cap = QpCap { max_recv_wr: 0, max_recv_sge: 0, ..probe.cap };
        let cap = QpCap {
            max_send_sge: cap.max_send_sge.min(self.pieces.min(opened.info.max_pieces)),
            max_inline_data: cap.max_inline_data.min(self.inline_bytes),
            ..cap
        };
        drop(probe);
        let channel = Channel::new(opened.context()).map_err(verb)?;
        let byte =
            Registered::new(&opened.domain, Memory::host(4096)?, Rights::Own).map_err(verb)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|e| os(e.into()))?;
        let bell = bell::new().map_err(os)?;
        let watch = |fd: BorrowedFd<'_>, number| {
            let data = epoll::EventData::new_u64(number);
            epoll::add(&epoll, fd, data, epoll::EventFlags::IN).map_err(|e| os(e.into()))
        };
        watch(std::os::fd::AsFd::as_fd(&bell), thread::BELL)?;
        watch(std::os::fd::AsFd::as_fd(&*channel), thread::CHANNEL)?;
        let limits = Limits {
            elements: usize::try_from(cap.max_send_sge).unwrap_or(1),
            bytes: opened.info.max_message_bytes.min(MAX_OPERATION_BYTES),
        };
        let dialer = Dialer {
            device: self.device.clone(),
            boot: Token(random()?),
            cap,
            channel,
            byte: Arc::new(byte),
            timeout: self.connect_timeout,
        };
        let inner = Arc::new(Inner {
            dialer,
            limits,
            ends: Ends::new(self.max_in_flight),
            settings: self,
            began: Instant::now(),
            regions: RegionTable::default(),
            peers: RwLock::default(),
            next_conn: AtomicU64::new(thread::FIRST),
            threaded: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            earliest: AtomicU64::new(u64::MAX),
            sleeps: AtomicU64::new(0),
            epoll,
            bell,
        });
        let of_thread = Arc::clone(&inner);
        let thread = std::thread::Builder::new()
            .name("ucm-rdma".into())
            .spawn(move || thread::run(&of_thread))
            .map_err(os)?;
        Ok(RdmaEngine { inner, thread: Some(thread) })
    }
}
