//! tcp between processes: a peer that is killed, stopped, and restarted at the same address.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use ucm_data::Token;
use ucm_transport::{
    Access, Addr, ErrorKind, Exports, Memory, RegionId, Secret, TcpEngine, TcpPeer, TcpServer,
    TcpServerConfig, Transfer, TransferEngine, TransferPlan, testing::WATCHDOG,
};

use crate::{child::say, parent::Proc, pattern};

const LEN: usize = 8 << 20;

fn secret() -> Secret {
    Secret::new(b"a secret for tests only").unwrap()
}

/// The owner: serves one region at this address, whose bytes are of this generation.
pub(crate) fn peer(argument: &str) -> impl FnMut(&str) + use<> {
    let (address, generation) = argument.split_once(' ').unwrap();
    let memory = Memory::host(LEN).unwrap();
    let mut bytes = vec![0; LEN];
    pattern::fill(&mut bytes, 0, generation.parse().unwrap(), 0);
    memory.write(0, &bytes).unwrap();
    let exports = Exports::default();
    let token = exports.export(memory, Access::Read).unwrap();
    let config = TcpServerConfig::new(secret());
    let server = TcpServer::bind(address.parse().unwrap(), config, Arc::new(exports)).unwrap();
    let hex: String = token.0.iter().map(|byte| format!("{byte:02x}")).collect();
    move |_| say(&format!("serving {} {hex}", server.address()))
}

struct Far {
    process: Proc,
    address: SocketAddr,
    token: Token,
}

fn start(address: &str, generation: u64) -> Far {
    let mut process = Proc::start("tcp", &format!("{address} {generation}"));
    process.expect("ready");
    let said = process.ask("where", "serving");
    let (address, hex) = said.split_once(' ').unwrap();
    let byte = |at: usize| u8::from_str_radix(&hex[at * 2..at * 2 + 2], 16).unwrap();
    let token = Token(std::array::from_fn(byte));
    Far { process, address: address.parse().unwrap(), token }
}

struct Near {
    engine: TcpEngine,
    peer: TcpPeer,
    src: RegionId,
    target: Memory,
    to: RegionId,
}

impl Near {
    fn new(far: &Far) -> Self {
        let engine = TcpEngine::builder().build().unwrap();
        let soon = Instant::now() + WATCHDOG;
        let peer = engine.connect(far.address, &secret(), soon).unwrap();
        let src = engine.attach(&peer, &far.token.0, LEN as u64).unwrap();
        let target = Memory::host(LEN).unwrap();
        let to = engine.register(target.clone()).unwrap();
        Self { engine, peer, src, target, to }
    }

    fn plan(&self) -> TransferPlan {
        let src = Addr { region: self.src, offset: 0 };
        let dst = Addr { region: self.to, offset: 0 };
        TransferPlan { items: vec![Transfer { src, dst, len: LEN as u64 }], holds: vec![] }
    }

    fn read(&self, limit: Duration) -> Result<u64, ErrorKind> {
        let end = self.engine.transfer(self.plan(), Instant::now() + limit).unwrap();
        end.result.map_err(|error| error.kind())
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        self.target.read(0, &mut bytes).unwrap();
        bytes
    }
}

#[test]
fn a_killed_peer_is_typed_and_its_successor_is_another() {
    let far = start("127.0.0.1:0", 1);
    let near = Near::new(&far);
    assert_eq!(near.read(WATCHDOG), Ok(LEN as u64));
    assert!(pattern::is(&near.bytes(), 0, 1, 0));
    let address = far.address.to_string();
    // Killed while replies are under way.
    let tickets: Vec<_> = (0..8).map(|_| near.engine.submit(near.plan())).collect();
    far.process.kill();
    near.engine.quiesce(ucm_transport::Quiesce::All, Instant::now() + WATCHDOG).unwrap();
    let mut ends = Vec::new();
    while ends.len() < tickets.len() {
        near.engine.poll(&mut ends);
    }
    for end in ends {
        match end.result {
            Ok(bytes) => assert_eq!(bytes, LEN as u64),
            Err(error) => assert_eq!(error.kind(), ErrorKind::PeerDown, "{error}"),
        }
    }
    assert_eq!(near.read(WATCHDOG), Err(ErrorKind::PeerDown));
    // Another run at the same address, with other bytes: never taken for the first.
    let far = start(&address, 2);
    let mut seen = near.read(WATCHDOG);
    let until = Instant::now() + WATCHDOG;
    while seen == Err(ErrorKind::PeerDown) && Instant::now() < until {
        // The circuit is open for a while.
        std::thread::sleep(Duration::from_millis(20));
        seen = near.read(WATCHDOG);
    }
    assert_eq!(seen, Err(ErrorKind::Stale));
    near.engine.disconnect(near.peer);
    let again = Near::new(&far);
    assert_eq!(again.read(WATCHDOG), Ok(LEN as u64));
    assert!(pattern::is(&again.bytes(), 0, 2, 0));
}

/// The late-write test with a real process that stands still and goes on.
#[test]
fn a_stopped_peer_keeps_nobody_waiting_and_writes_nothing_when_it_goes_on() {
    let far = start("127.0.0.1:0", 3);
    let near = Near::new(&far);
    assert_eq!(near.read(WATCHDOG), Ok(LEN as u64));
    for round in 0..10_u8 {
        let ticket = near.engine.submit(near.plan()).unwrap();
        // Somewhere in the middle, or before, or after.
        std::thread::sleep(Duration::from_micros(u64::from(round) * 150));
        near.engine.poll(&mut Vec::new());
        far.process.signal(Signal::STOP);
        near.engine.cancel(ticket);
        let fresh = vec![round; LEN];
        near.target.write(0, &fresh).unwrap();
        let stuck = near.read(Duration::from_millis(100));
        near.target.write(0, &fresh).unwrap();
        far.process.signal(Signal::CONT);
        assert!(matches!(stuck, Err(ErrorKind::Timeout | ErrorKind::PeerDown)), "{stuck:?}");
        for _ in 0..20 {
            near.engine.poll(&mut Vec::new());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(near.bytes() == fresh, "a byte of the old read in round {round}");
        // It answers again, and right.
        let until = Instant::now() + WATCHDOG;
        let mut seen = near.read(WATCHDOG);
        while seen.is_err() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
            seen = near.read(WATCHDOG);
        }
        assert_eq!(seen, Ok(LEN as u64));
        assert!(pattern::is(&near.bytes(), 0, 3, 0));
    }
}
