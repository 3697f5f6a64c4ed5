//! The owner's side: memory that peers reach without its processor.
//!
//! **Invariant:** a peer reaches a region only between its export and the end of its revocation; a
//! queue pair lives as long as the control connection that made it, and no longer.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use ucm_data::Token;

use super::{
    absent::VerbError,
    device::RdmaDevice,
    pieces::Pieces,
    random, route,
    sys::QpCap,
    verbs::{QueuePair, Registered, Rights},
    wire::{self, Ask, BEACON_BYTES, Connected, Endpoint, FarRegion},
};
use crate::{
    Access, ErrorKind, Location, Memory, Pieces as TcpPieces, Refusal, RefusalKind, Request, Serve,
    Served, Session, TransferError,
};

/// Settings of an [`RdmaOwner`].
#[derive(Clone, Debug)]
#[must_use = "call `build`"]
pub struct RdmaOwnerBuilder {
    device: RdmaDevice,
    piece_bytes: usize,
    max_connections: usize,
}

impl RdmaOwnerBuilder {
    /// Most bytes registered by one call: devices refuse very big ones. Default 1 GiB, multiples of
    /// 2 MiB.
    pub fn piece_bytes(mut self, bytes: usize) -> Self {
        self.piece_bytes = bytes;
        self
    }

    /// Peers connected at once; further ones are refused as `Busy`. Default 1024.
    pub fn max_connections(mut self, connections: usize) -> Self {
        self.max_connections = connections.max(1);
        self
    }

    /// Makes the owner.
    ///
    /// # Errors
    /// `Registration` when the device refuses even a page.
    pub fn build(self) -> Result<RdmaOwner, TransferError> {
        let beacon: [u8; BEACON_BYTES] = random()?;
        let memory = Memory::host(4096)?;
        memory.write(0, &beacon)?;
        let domain = &self.device.opened.domain;
        let beacon_at = Registered::new(domain, memory, Rights::Read)
            .map_err(|error| TransferError::verb(ErrorKind::Registration, error))?;
        let shared = Shared {
            device: self.device,
            piece_bytes: self.piece_bytes,
            max_connections: self.max_connections,
            name: Token(random()?),
            beacon,
            beacon_at,
            state: Mutex::default(),
            connections: AtomicU64::new(0),
        };
        Ok(RdmaOwner { shared: Arc::new(shared) })
    }
}

/// What an owner has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RdmaOwnerStats {
    /// Peers connected now.
    pub connected: usize,
    /// Peers connected since it began.
    pub connections: u64,
    /// Regions exported now.
    pub exports: usize,
    /// Queue pairs that the device did not take back yet.
    pub undead: usize,
}

/// Regions of this process that peers read, or write, by RDMA. Thread-safe; cheap to clone.
///
/// Peers meet it over a [`TcpServer`](crate::TcpServer), whose service is [`service`](Self::service);
/// from then on nothing here runs when they move bytes, so the owner does not know who reads what.
/// Memory whose bytes may change needs a protocol above (a lease, a generation), or
/// [`revoke`](Self::revoke), after which no peer reaches it.
#[derive(Clone)]
pub struct RdmaOwner {
    shared: Arc<Shared>,
}

struct Shared {
    device: RdmaDevice,
    piece_bytes: usize,
    max_connections: usize,
    name: Token,
    beacon: [u8; BEACON_BYTES],
    beacon_at: Registered,
    state: Mutex<State>,
    connections: AtomicU64,
}

#[derive(Default)]
struct State {
    exports: HashMap<[u8; 16], Export>,
    /// By the number of the session that asked for it.
    connected: HashMap<u64, QueuePair>,
    /// Not destroyed at the first try.
    undead: Vec<QueuePair>,
}

struct Export {
    len: u64,
    access: Access,
    pieces: Pieces,
    /// Being revoked.
    leaving: bool,
}

impl RdmaOwner {
    /// Default settings.
    pub fn builder(device: &RdmaDevice) -> RdmaOwnerBuilder {
        RdmaOwnerBuilder { device: device.clone(), piece_bytes: 1 << 30, max_connections: 1024 }
    }

    /// Registers host memory for peers; the token is what clients attach.
    ///
    /// # Errors
    /// `Unsupported` for memory that is not the host's, `Invalid` for none at all, `Registration`
    /// when the device refuses a piece; nothing stays registered then.
    pub fn export(&self, memory: Memory, access: Access) -> Result<Token, TransferError> {
        if !matches!(memory.location(), Location::Host | Location::PinnedHost) {
            return Err(TransferError::unsupported(format!(
                "{:?} is exported by its dmabuf",
                memory.location()
            )));
        }
        if memory.is_empty() {
            return Err(TransferError::invalid("an export of zero bytes"));
        }
        let (domain, most) = (&self.shared.device.opened.domain, self.shared.piece_bytes);
        let pieces = Pieces::of(domain, &memory, most, rights(access))?;
        self.add(memory.len() as u64, access, pieces)
    }

    /// Registers memory of another device, which begins at `offset` of the dmabuf.
    ///
    /// # Errors
    /// `Unsupported` where library, kernel or adapter cannot, `Registration` when they refuse.
    pub fn export_dmabuf(
        &self,
        memory: Memory,
        dmabuf: std::os::fd::BorrowedFd<'_>,
        offset: u64,
        access: Access,
    ) -> Result<Token, TransferError> {
        let len = memory.len() as u64;
        let domain = &self.shared.device.opened.domain;
        let pieces = Pieces::of_dmabuf(domain, memory, (dmabuf, offset), rights(access))?;
        self.add(len, access, pieces)
    }

    fn add(&self, len: u64, access: Access, pieces: Pieces) -> Result<Token, TransferError> {
        let count = pieces.for_peers().len();
        if count > wire::MAX_PIECES {
            return Err(TransferError::invalid(format!(
                "a region of {count} pieces; at most {} can be told: make pieces longer",
                wire::MAX_PIECES
            )));
        }
        let token = Token(random()?);
        let export = Export { len, access, pieces, leaving: false };
        self.shared.lock().exports.insert(token.0, export);
        Ok(token)
    }

    /// Ends an export. When this returns well, no peer reaches the memory any more: what peers have
    /// under way there ends for them as `Stale`, and their connection is made anew.
    ///
    /// # Errors
    /// `StaleRegion` for an unknown token; `Stuck` when the device does not give the memory back: it
    /// must not be used for anything else yet. Ask again.
    pub fn revoke(&self, token: Token) -> Result<(), TransferError> {
        let mut state = self.shared.lock();
        let unknown = || TransferError::new(ErrorKind::StaleRegion, "the token names no export");
        let mut export = state.exports.remove(&token.0).ok_or_else(unknown)?;
        // Not under the lock: the device waits for what is under way.
        drop(state);
        if let Err(error) = export.pieces.end() {
            export.leaving = true;
            self.shared.lock().exports.insert(token.0, export);
            return Err(TransferError::new(ErrorKind::Stuck, error.to_string()));
        }
        Ok(())
    }

    /// A service for a [`TcpServer`](crate::TcpServer): peers of this owner are answered here,
    /// everything else by `rest`.
    #[must_use]
    pub fn service(&self, rest: Arc<dyn Serve>) -> Arc<dyn Serve> {
        Arc::new(Service { shared: Arc::clone(&self.shared), rest })
    }

    /// What it has done.
    #[must_use]
    pub fn stats(&self) -> RdmaOwnerStats {
        let state = self.shared.lock();
        RdmaOwnerStats {
            connected: state.connected.len(),
            connections: self.shared.connections.load(Ordering::Relaxed),
            exports: state.exports.len(),
            undead: state.undead.len(),
        }
    }
}

impl fmt::Debug for RdmaOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaOwner")
            .field("device", self.shared.device.info())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

fn rights(access: Access) -> Rights {
    match access {
        Access::Read => Rights::Read,
        Access::ReadWrite => Rights::ReadWrite,
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No foreign code runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, session: &Session, question: &[u8]) -> Result<Vec<u8>, Refusal> {
        let ask = Ask::decode(question)
            .map_err(|error| Refusal::new(RefusalKind::Invalid, error.to_string()))?;
        match ask {
            Ask::Connect(peer) => self.connect(session, &peer).map(|said| said.encode()),
            Ask::Attach(token) => self.find(token).map(|said| said.encode()),
        }
    }

    fn connect(&self, session: &Session, peer: &Endpoint) -> Result<Connected, Refusal> {
        let mut state = self.lock();
        state.bury();
        if state.connected.contains_key(&session.id) {
            let text = "this control connection has made its connection";
            return Err(Refusal::new(RefusalKind::Invalid, text));
        }
        let count = state.connected.len() + state.undead.len();
        if count >= self.max_connections {
            let text =
                format!("{count} peers are connected, the limit is {}", self.max_connections);
            return Err(Refusal::new(RefusalKind::Busy, text));
        }
        drop(state);
        let (made, end) = self.queue_pair(peer)?;
        let mut state = self.lock();
        state.connected.insert(session.id, made);
        self.connections.fetch_add(1, Ordering::Relaxed);
        Ok(Connected {
            end,
            owner: self.name,
            beacon_addr: self.beacon_at.addr,
            beacon_rkey: self.beacon_at.rkey,
            beacon: self.beacon,
        })
    }

    /// A queue pair that answers this peer.
    fn queue_pair(&self, peer: &Endpoint) -> Result<(QueuePair, Endpoint), Refusal> {
        let failed = |error: VerbError| Refusal::new(RefusalKind::Failed, error.to_string());
        let opened = &self.device.opened;
        // It asks for nothing itself.
        let wish = QpCap { max_send_wr: 1, max_send_sge: 1, ..QpCap::default() };
        let mut made = opened.queue_pair(wish, None).map_err(failed)?;
        made.init(opened.info.port, Rights::ReadWrite).map_err(failed)?;
        let end = opened.endpoint(&made, psn()?);
        let route = route(opened, &end, peer)
            .map_err(|error| Refusal::new(RefusalKind::Invalid, error.to_string()))?;
        made.connect(&route).map_err(failed)?;
        Ok((made, end))
    }

    fn find(&self, token: Token) -> Result<FarRegion, Refusal> {
        let state = self.lock();
        let export = state.exports.get(&token.0).filter(|export| !export.leaving);
        let gone = || Refusal::new(RefusalKind::Stale, "the token names no export any more");
        let export = export.ok_or_else(gone)?;
        Ok(FarRegion {
            owner: self.name,
            access: export.access,
            len: export.len,
            pieces: export.pieces.for_peers(),
        })
    }
}

fn psn() -> Result<u32, Refusal> {
    let bytes: [u8; 4] = random().map_err(Refusal::from)?;
    Ok(u32::from_le_bytes(bytes) & 0xff_ffff)
}

#[cfg(test)]
impl RdmaOwner {
    /// The memory of the beacon.
    pub(super) fn beacon(&self) -> &Memory {
        self.shared.beacon_at.memory()
    }

    /// Does something with all queue pairs.
    pub(super) fn with_pairs(&self, act: impl FnMut(&mut QueuePair)) {
        self.shared.lock().connected.values_mut().for_each(act);
    }
}

impl State {
    /// Tries again to destroy what was not destroyed.
    fn bury(&mut self) {
        self.undead.retain_mut(|dead| dead.destroy().is_err());
    }
}

/// What the server asks.
struct Service {
    shared: Arc<Shared>,
    rest: Arc<dyn Serve>,
}

impl Serve for Service {
    fn opened(&self, session: &Session) {
        self.rest.opened(session);
    }

    fn closed(&self, session: &Session) {
        let mut state = self.shared.lock();
        let gone = state.connected.remove(&session.id);
        drop(state);
        if let Some(mut gone) = gone
            && let Err(error) = gone.destroy()
        {
            tracing::warn!("a peer's queue pair is destroyed later: {error}");
            self.shared.lock().undead.push(gone);
        }
        self.rest.closed(session);
    }

    fn read(&self, request: &Request<'_>, pieces: &mut TcpPieces) -> Result<Served, Refusal> {
        self.rest.read(request, pieces)
    }

    fn write(&self, request: &Request<'_>, pieces: &mut TcpPieces) -> Result<Served, Refusal> {
        self.rest.write(request, pieces)
    }

    fn call(&self, session: &Session, request: &[u8], reply: &mut Vec<u8>) -> Result<(), Refusal> {
        if wire::is_ours(request) {
            *reply = self.shared.answer(session, request)?;
            return Ok(());
        }
        self.rest.call(session, request, reply)
    }
}
