//! A peer's service and its clients, over real connections.
//!
//! Mutants, each seen to fail a test here: memory of a client that is gone stays pending; a read of another
//! generation. (A commit while a write is in flight: `sessions`.)

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use ucm_transport::{
    Addr, ErrorKind, Memory, RegionId, Secret, TcpEngine, TcpPeer, TcpServer, TcpServerConfig,
    Transfer, TransferEngine as _, TransferPlan,
};

use super::*;
use crate::{Member, PagedLimits, PeerId};

const PAGE: u64 = 4096;

fn secret() -> Secret {
    Secret::new(b"a secret for tests only").unwrap()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn key(number: u8) -> ObjectKey {
    ObjectKey { block: [number; 16], identity: [1; 32] }
}

fn owner(pages: u64) -> (HostMedium, TcpServer) {
    let memory = Memory::host(usize::try_from(pages * PAGE).unwrap()).unwrap();
    let medium = HostMedium::new(vec![memory], PagedLimits::new(PAGE)).unwrap();
    let address: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let service = Arc::new(PeerService::new(medium.clone()));
    let server = TcpServer::bind(address, TcpServerConfig::new(secret()), service).unwrap();
    (medium, server)
}

struct Client {
    engine: Arc<TcpEngine>,
    links: Links,
    link: Link,
    memory: Memory,
    region: RegionId,
}

fn client(server: &TcpServer) -> Client {
    let engine = Arc::new(TcpEngine::builder().build().unwrap());
    let links = Links::new(Arc::clone(&engine), secret(), Duration::from_secs(10));
    let member = Member::new(PeerId::new("owner"), server.boot(), server.address().to_string());
    let link = links.link(&member, soon()).unwrap();
    let memory = Memory::host(usize::try_from(4 * PAGE).unwrap()).unwrap();
    memory.write(0, &vec![7; memory.len()]).unwrap();
    let region = engine.register(memory.clone()).unwrap();
    Client { engine, links, link, memory, region }
}

impl Client {
    fn write(&self, pending: Pending, len: u64, ranges: &[(u64, u64)]) -> Result<(), ErrorKind> {
        let far = self.link.attach_write(pending, len).unwrap();
        let items = ranges.iter().map(|(offset, len)| Transfer {
            src: Addr { region: self.region, offset: *offset },
            dst: Addr { region: far, offset: *offset },
            len: *len,
        });
        let plan = TransferPlan { items: items.collect(), holds: vec![] };
        self.engine.transfer(plan, soon()).unwrap().result.map(drop).map_err(|e| e.kind())
    }

    fn read(&self, generation: Generation, len: u64, range: (u64, u64)) -> Result<(), ErrorKind> {
        let far = self.link.attach_read(&key(1), generation, len).unwrap();
        let items = vec![Transfer {
            src: Addr { region: far, offset: range.0 },
            dst: Addr { region: self.region, offset: 0 },
            len: range.1,
        }];
        let plan = TransferPlan { items, holds: vec![] };
        self.engine.transfer(plan, soon()).unwrap().result.map(drop).map_err(|e| e.kind())
    }

    fn allocate(&self, number: u8, len: u64) -> Result<Pending, PutOutcome> {
        self.link.allocate(&[(key(number), len)], soon()).unwrap()[0]
    }

    fn commit(&self, pending: Pending) -> PutOutcome {
        self.link.end(&[pending], true, soon()).unwrap()[0]
    }
}

fn eventually(mut is: impl FnMut() -> bool) {
    let until = soon();
    while !is() {
        assert!(Instant::now() < until, "not within the watchdog");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn what_was_written_is_read_and_nothing_else_is() {
    let (medium, server) = owner(8);
    let client = client(&server);
    let pending = client.allocate(1, 5000).unwrap();
    assert_eq!(client.allocate(1, 5000), Err(PutOutcome::Busy));
    assert_eq!(client.link.resolve(&[key(1)], soon()), Ok(vec![Err(GetOutcome::Busy)]));
    client.write(pending, 5000, &[(0, 4000)]).unwrap();
    assert_eq!(client.commit(pending), PutOutcome::Invalid, "a gap");
    assert_eq!(client.write(pending, 5000, &[(3999, 2)]), Err(ErrorKind::Invalid), "twice");
    client.write(pending, 5000, &[(4000, 1000)]).unwrap();
    assert_eq!(client.commit(pending), PutOutcome::Created);
    assert_eq!(client.commit(pending), PutOutcome::Stale);
    let (generation, _) = medium.medium().find(&key(1)).unwrap();
    assert_eq!(client.link.resolve(&[key(1)], soon()), Ok(vec![Ok((generation, 5000))]));
    assert_eq!(client.allocate(1, 5000), Err(PutOutcome::AlreadyExists));
    assert_eq!(client.allocate(1, 4999), Err(PutOutcome::Conflict));
    client.memory.write(0, &[0; 5000]).unwrap();
    client.read(generation, 5000, (100, 4900)).unwrap();
    let mut seen = vec![0; 4901];
    client.memory.read(0, &mut seen).unwrap();
    assert!(seen[..4900].iter().all(|byte| *byte == 7) && seen[4900] == 0);
    assert_eq!(client.read(generation, 5001, (0, 1)), Err(ErrorKind::Stale));
    assert_eq!(client.read(Generation(generation.0 + 1), 5000, (0, 1)), Err(ErrorKind::Stale));
    // Beyond the end, the engine itself refuses; a longer one is another object.
    client.link.remove(&[key(1)], soon()).unwrap();
    assert_eq!(client.read(generation, 5000, (0, 1)), Err(ErrorKind::Stale));
    assert_eq!(client.link.resolve(&[key(1)], soon()), Ok(vec![Err(GetOutcome::Miss)]));
    let usage = client.link.usage(soon()).unwrap();
    assert_eq!((usage.medium, usage.objects), (medium.medium().usage(), 0));
    assert_eq!(usage.medium.leases + usage.medium.pending_bytes, 0);
}

/// F7: a client that goes at each step of a put.
#[test]
fn f7_a_client_that_goes_leaves_no_object_and_no_memory() {
    for step in 0..4 {
        let (medium, server) = owner(2);
        let gone = client(&server);
        let other = client(&server);
        let pending = gone.allocate(1, 2 * PAGE).unwrap();
        if step > 0 {
            gone.write(pending, 2 * PAGE, &[(0, PAGE)]).unwrap();
        }
        if step > 1 {
            gone.write(pending, 2 * PAGE, &[(PAGE, PAGE)]).unwrap();
        }
        if step > 2 {
            assert_eq!(gone.commit(pending), PutOutcome::Created);
        }
        // Nobody else can end or write it.
        assert_eq!(other.commit(pending), PutOutcome::Stale);
        assert_eq!(other.write(pending, 2 * PAGE, &[(0, 1)]), Err(ErrorKind::Stale));
        if step < 3 {
            assert_eq!(other.allocate(1, 2 * PAGE), Err(PutOutcome::Busy));
        }
        gone.links.close();
        eventually(|| server.stats().connections == 1);
        assert_eq!(medium.medium().usage().pending_bytes, 0);
        assert_eq!(medium.medium().usage().quarantine_bytes, 0);
        assert_eq!(medium.medium().find(&key(1)).is_some(), step == 3, "absent, or whole");
        let again = other.allocate(1, 2 * PAGE);
        assert_eq!(again.is_ok(), step < 3);
    }
}

/// Regression: leases went with the last connection, while their holder read what it had mapped.
/// Mutant: they do.
#[test]
fn f4_leases_outlast_the_connection() {
    let (medium, server) = owner(2);
    let (gone, other) = (client(&server), client(&server));
    let pending = other.allocate(1, 2 * PAGE).unwrap();
    other.write(pending, 2 * PAGE, &[(0, 2 * PAGE)]).unwrap();
    assert_eq!(other.commit(pending), PutOutcome::Created);
    let lent = gone.link.lease(&[key(1), key(2)], soon()).unwrap();
    assert_eq!(lent[1].clone().unwrap_err(), GetOutcome::Miss);
    let lent = lent[0].clone().unwrap();
    assert_eq!((lent.pages.len, lent.pages.pages.len()), (2 * PAGE, 2));
    let asked = Instant::now();
    assert!(lent.good_until(asked) < asked + Duration::from_secs(30));
    // Somebody else's cannot be given back.
    other.link.release(&[lent.lease], soon()).unwrap();
    assert_eq!(medium.medium().usage().leases, 1);
    assert_eq!(other.allocate(2, PAGE), Err(PutOutcome::NoSpace), "lent pages stay");
    gone.links.close();
    let connections = || server.stats().connections;
    eventually(|| connections() == 1);
    assert_eq!(medium.medium().usage().leases, 1);
    assert_eq!(other.allocate(2, PAGE), Err(PutOutcome::NoSpace), "lent pages stay");
}

/// F8: what is no call is refused, and costs nothing.
#[test]
fn f8_garbage_is_refused() {
    let (medium, server) = owner(2);
    let client = client(&server);
    let peer: TcpPeer = client.engine.connect(server.address(), &secret(), soon()).unwrap();
    let mut good = wire::call(Op::Allocate, 1);
    wire::put_key(&mut good, &key(1));
    good.extend_from_slice(&100_u64.to_le_bytes());
    let mut calls = vec![Vec::new(), b"hello".to_vec(), vec![0xff; 5000]];
    calls.extend((0..good.len()).map(|end| good[..end].to_vec()));
    for at in 0..12 {
        let mut other = good.clone();
        other[at] ^= 0x55;
        calls.push(other);
    }
    for call in calls {
        let refused = client.engine.call(&peer, &call, soon()).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{call:?}");
    }
    assert_eq!(medium.medium().usage().pending_bytes, 0);
    for descriptor in [&b""[..], b"x", &[1; 72], &[2; 24], &[0; 24]] {
        let far = client.engine.attach(&peer, descriptor, 100).unwrap();
        let items = vec![Transfer {
            src: Addr { region: far, offset: 0 },
            dst: Addr { region: client.region, offset: 0 },
            len: 10,
        }];
        let plan = TransferPlan { items, holds: vec![] };
        let ended = client.engine.transfer(plan, soon()).unwrap().result.unwrap_err();
        assert_eq!(ended.kind(), ErrorKind::Invalid);
    }
    assert!(client.engine.call(&peer, &good, soon()).is_ok());
}
