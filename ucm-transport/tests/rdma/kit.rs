//! Owners, engines, and bytes that tell where they came from.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use ucm_data::Token;
use ucm_transport::{
    Access, Addr, Exports, Memory, Quiesce, RdmaChoice, RdmaDevice, RdmaEngine, RdmaEngineBuilder,
    RdmaOwner, RdmaPeer, RegionId, Secret, TcpServer, TcpServerConfig, Transfer, TransferEngine,
    TransferError, TransferPlan, testing::WATCHDOG,
};

/// The first device, or the reason why the case is skipped.
#[expect(clippy::print_stdout, reason = "the runner counts this line")]
pub(crate) fn device() -> Option<RdmaDevice> {
    match RdmaDevice::open(&RdmaChoice::default()) {
        Ok(device) => Some(device),
        Err(absent) => {
            println!("SKIP {absent}");
            None
        }
    }
}

pub(crate) fn secret() -> Secret {
    Secret::new(b"a secret for tests only").unwrap()
}

pub(crate) fn soon() -> Instant {
    Instant::now() + WATCHDOG
}

/// An owner and its server.
pub(crate) struct Far {
    pub(crate) owner: RdmaOwner,
    pub(crate) server: TcpServer,
}

impl Far {
    pub(crate) fn new(device: &RdmaDevice) -> Self {
        Self::at(device, "127.0.0.1:0".parse().unwrap())
    }

    pub(crate) fn at(device: &RdmaDevice, address: SocketAddr) -> Self {
        let owner = RdmaOwner::builder(device).piece_bytes(4 << 20).build().unwrap();
        let service = owner.service(Arc::new(Exports::default()));
        let config = TcpServerConfig::new(secret());
        let server = TcpServer::bind(address, config, service).unwrap();
        Self { owner, server }
    }
}

/// An engine with one peer.
pub(crate) struct Near {
    pub(crate) engine: RdmaEngine,
    pub(crate) peer: RdmaPeer,
}

impl Near {
    pub(crate) fn new(device: &RdmaDevice, address: SocketAddr) -> Self {
        Self::with(RdmaEngine::builder(device), address)
    }

    pub(crate) fn with(builder: RdmaEngineBuilder, address: SocketAddr) -> Self {
        let engine = builder.build().unwrap();
        let peer = engine.connect(address, &secret(), soon()).unwrap();
        Self { engine, peer }
    }

    pub(crate) fn local(&self, len: usize) -> (Memory, RegionId) {
        let memory = Memory::host(len).unwrap();
        (memory.clone(), self.engine.register(memory).unwrap())
    }

    pub(crate) fn attach(&self, token: Token) -> RegionId {
        self.engine.attach(&self.peer, token, soon()).unwrap()
    }

    /// Runs items to their end.
    pub(crate) fn run(&self, items: Vec<Transfer>) -> Result<u64, TransferError> {
        let plan = TransferPlan { items, holds: vec![] };
        let ticket = self.engine.submit(plan).map_err(|rejected| rejected.error)?;
        self.engine.quiesce(Quiesce::Ticket(ticket), soon()).unwrap();
        let mut ends = Vec::new();
        self.engine.poll(&mut ends);
        let at = ends.iter().position(|end| end.ticket == ticket).unwrap();
        ends.swap_remove(at).result
    }
}

pub(crate) fn item(src: (RegionId, usize), dst: (RegionId, usize), len: usize) -> Transfer {
    let at = |(region, offset): (RegionId, usize)| Addr { region, offset: offset as u64 };
    Transfer { src: at(src), dst: at(dst), len: len as u64 }
}

/// Bytes that depend on their place.
pub(crate) fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| u8::try_from((i * 7 + i / 251) % 251).unwrap().wrapping_add(seed)).collect()
}

pub(crate) fn filled(bytes: &[u8]) -> Memory {
    let memory = Memory::host(bytes.len()).unwrap();
    memory.write(0, bytes).unwrap();
    memory
}

pub(crate) fn read(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

/// Exports these bytes, and attaches them.
pub(crate) fn exported(far: &Far, near: &Near, bytes: &[u8], access: Access) -> (Memory, RegionId) {
    let memory = filled(bytes);
    let token = far.owner.export(memory.clone(), access).unwrap();
    (memory, near.attach(token))
}

/// Waits, looking now and then, until something is so.
pub(crate) fn eventually(what: &str, so: impl Fn() -> bool) {
    let until = soon();
    while !so() {
        assert!(Instant::now() < until, "{what} does not come true");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        usize::try_from((x ^ (x >> 31)) % end as u64).unwrap()
    }
}
