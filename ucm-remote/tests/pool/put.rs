//! A: who stores what, who may, and where.
//!
//! Mutant, seen to fail a test here: self as a source.

use std::{sync::Arc, thread};

use ucm_remote::{
    Agent, AgentBuilder, ByHash, Directory as _, Generation, GetOutcome, GetRequest, HostMedium,
    Member, MostFree, ObjectKey, PagedLimits, PeerId, PutOutcome, PutRequest, Record,
    RemotePool as _, RemoveOutcome, Source,
};
use ucm_transport::{Addr, HostEngine, Memory, Secret, TransferEngine as _};

use crate::kit::{
    PAGE, Setup, directory, each_way, eventually, idle, key, poisoned, range, soon, touched,
};

#[test]
fn a1_self_is_never_a_source() {
    let directory = directory();
    let node = Setup::new("node", 4).start(&directory);
    // The directory says that we have what we have not, in this run and in another.
    let boot = node.agent.boot().unwrap();
    let stale = Record::new(PeerId::new("node"), boot, Generation(77), 4096);
    directory.announce(&[(key(1), stale)], soon()).unwrap();
    assert_eq!(node.get(1, 0, 4096, &[range(0, 10)]), GetOutcome::Miss);
    assert_eq!(node.agent.stats().exchanges, 0);
}

#[test]
fn a2_a_put_with_a_gap_or_an_overlap_publishes_nothing() {
    let directory = directory();
    let node = Setup::new("node", 4).start(&directory);
    let memory = Memory::host(8192).unwrap();
    let region = node.engine.register(memory).unwrap();
    let put = |ranges: &[(u64, u64)], len| {
        let source = |(offset, len): &(u64, u64)| Source {
            range: range(*offset, *len),
            from: Addr { region, offset: *offset },
        };
        let ranges = ranges.iter().map(source).collect();
        node.client.put(&[PutRequest { key: key(1), len, ranges }], soon())[0]
    };
    for bad in [
        vec![],
        vec![(0, 4000), (4001, 4191)],
        vec![(0, 4000), (3999, 4193)],
        vec![(0, 8193)],
        vec![(0, 8192), (0, 1)],
        vec![(0, 8192), (10, 0)],
    ] {
        assert_eq!(put(&bad, 8192), PutOutcome::Invalid, "{bad:?}");
        assert!(!node.is_resident(1));
    }
    assert_eq!(touched(&node.memory), 0);
    // A source that is not there: as if nothing had been asked.
    let gone = Source { range: range(0, 8192), from: Addr { region, offset: 1 } };
    let request = PutRequest { key: key(1), len: 8192, ranges: vec![gone] };
    assert_eq!(node.client.put(&[request], soon()), [PutOutcome::Failed]);
    idle(&node);
    assert_eq!(put(&[(5000, 3192), (0, 5000)], 8192), PutOutcome::Created);
    assert_eq!(put(&[(0, 8192)], 8192), PutOutcome::AlreadyExists);
    assert_eq!(put(&[(0, 8191)], 8191), PutOutcome::Conflict);
    idle(&node);
}

#[test]
fn a3_of_concurrent_puts_one_creates() {
    let directory = directory();
    let node = Setup::new("node", 64).start(&directory);
    for number in 0..20 {
        let outcomes: Vec<PutOutcome> = thread::scope(|scope| {
            let puts: Vec<_> = (0..4).map(|_| scope.spawn(|| node.put(number, 3, 8192))).collect();
            puts.into_iter().map(|put| put.join().unwrap()).collect()
        });
        let created = outcomes.iter().filter(|o| **o == PutOutcome::Created).count();
        assert_eq!(created, 1, "{outcomes:?}");
        let others = |o: &PutOutcome| {
            matches!(o, PutOutcome::AlreadyExists | PutOutcome::Busy | PutOutcome::Created)
        };
        assert!(outcomes.iter().all(others), "{outcomes:?}");
        assert_eq!(node.get(number, 3, 8192, &[range(0, 8192)]), GetOutcome::Local);
        assert_eq!(node.put(number, 3, 8000), PutOutcome::Conflict);
    }
    idle(&node);
}

#[test]
fn a4_what_nobody_can_hold_is_refused_at_once() {
    let directory = directory();
    let node = Setup::new("node", 2).start(&directory);
    assert_eq!(node.put(1, 0, 3 * PAGE), PutOutcome::TooLarge);
    let placed =
        Setup::new("placed", 8).with(|b| b.placement(Arc::new(MostFree), 1)).start(&directory);
    assert_eq!(placed.put(1, 0, 9 * PAGE), PutOutcome::TooLarge);
    idle(&node);
}

#[test]
fn a5_namespaces_are_apart_for_every_verb() {
    each_way(|way| {
        let directory = directory();
        let owner = Setup::new("owner", 8).start(&directory);
        let reader = Setup::new("reader", 8).start(&directory);
        reader.reach(&owner, way);
        owner.publish(&directory, 1, 0, 4096);
        let other = ObjectKey { identity: [9; 32], ..key(1) };
        for node in [&owner, &reader] {
            assert_eq!(node.client.exists(&[other, key(1)], soon()), [Ok(None), Ok(Some(4096))]);
            let mut reading = node.reading(1, 4096, &[range(0, 4096)]);
            reading.request.key = other;
            assert_eq!(node.read(&[reading], soon()), [GetOutcome::Miss]);
            assert_eq!(node.client.remove(&[other], soon()), [RemoveOutcome::Miss]);
            node.client.touch(&[other]);
        }
        assert!(owner.is_resident(1));
        assert!(reader.get(1, 0, 4096, &[range(0, 4096)]).is_served());
        reader.wait_told(&directory, 1);
        assert_eq!(reader.client.remove(&[key(1)], soon()), [RemoveOutcome::Removed]);
        assert!(!owner.is_resident(1) && !reader.is_resident(1), "removed everywhere");
        assert_eq!(reader.get(1, 0, 4096, &[range(0, 1)]), GetOutcome::Miss);
    });
}

#[test]
fn a6_a_stranger_reads_writes_and_pins_nothing() {
    let directory = directory();
    let owner = Setup::new("owner", 8).start(&directory);
    owner.publish(&directory, 1, 0, 4096);
    let medium = HostMedium::new(vec![poisoned(8 * PAGE)], PagedLimits::new(PAGE)).unwrap();
    let wrong = Secret::new(b"not the same secret").unwrap();
    let stranger = Agent::builder(PeerId::new("stranger"), medium, directory.clone(), wrong)
        .placement(Arc::new(ByHash), 8)
        .start()
        .unwrap();
    let engine = Arc::new(HostEngine::builder().build().unwrap());
    let client = stranger.client(engine.clone()).unwrap();
    let memory = poisoned(4096);
    let region = engine.register(memory.clone()).unwrap();
    let to = Addr { region, offset: 0 };
    let ranges = vec![ucm_remote::Destination { range: range(0, 4096), to }];
    let request = GetRequest { key: key(1), len: 4096, ranges, will_read_all: true };
    assert_eq!(client.get(&[request], soon()), [GetOutcome::PeerDown]);
    assert_eq!(touched(&memory), 0);
    let ranges = vec![Source { range: range(0, 4096), from: to }];
    let request = PutRequest { key: key(2), len: 4096, ranges };
    assert_eq!(client.put(&[request], soon()), [PutOutcome::PeerDown]);
    assert_eq!(client.remove(&[key(1)], soon()), [RemoveOutcome::PeerDown]);
    assert!(owner.is_resident(1) && !owner.is_resident(2));
    idle(&owner);
}

/// An object goes where it was placed, as often as it should, and is whole everywhere.
#[test]
fn puts_go_where_they_are_placed() {
    let directory = directory();
    let build = |b: AgentBuilder| b.placement(Arc::new(ByHash), 2);
    let nodes: Vec<_> = ["a", "b", "c", "d"]
        .map(|name| Setup::new(name, 64).with(build).start(&directory))
        .into_iter()
        .collect();
    for number in 0..24_u64 {
        let putter = &nodes[usize::try_from(number % 4).unwrap()];
        assert_eq!(putter.put(number, 5, 5000), PutOutcome::Created);
        let holders = nodes.iter().filter(|node| node.is_resident(number)).count();
        assert_eq!(holders, 2);
        for node in nodes.iter().filter(|node| node.is_resident(number)) {
            node.wait_told(&directory, number);
        }
    }
    for node in &nodes {
        for number in 0..24 {
            assert!(node.get(number, 5, 5000, &[range(100, 4900)]).is_served());
        }
        assert_eq!(node.agent.stats().lost_copies, 0);
    }
    let peers = nodes[0].agent.peers(soon()).unwrap();
    assert!(peers.len() == 4 && peers.iter().all(|(_, usage)| usage.is_some()), "{peers:?}");
    let objects: u64 = peers.iter().map(|(_, usage)| usage.unwrap().objects).sum();
    assert!(objects >= 48, "{objects}");
    nodes.iter().for_each(idle);
}

/// Only a copy that was written as a whole is seen; a client that goes leaves nothing.
#[test]
fn what_is_not_whole_is_never_seen() {
    let directory = directory();
    let owner = Setup::new("owner", 8).start(&directory);
    let putter = Setup::new("putter", 8).with(|b| b.placement(Arc::new(Elsewhere), 1));
    let putter = putter.start(&directory);
    assert_eq!(putter.put(1, 2, 8192), PutOutcome::Created);
    assert!(owner.is_resident(1) && !putter.is_resident(1));
    assert_eq!(putter.put(1, 2, 8192), PutOutcome::AlreadyExists);
    assert_eq!(putter.put(1, 2, 8191), PutOutcome::Conflict);
    assert_eq!(owner.get(1, 2, 8192, &[range(0, 8192)]), GetOutcome::Local);
    idle(&putter);
    drop(putter);
    idle(&owner);
}

/// On the owner, always.
#[derive(Debug)]
struct Elsewhere;

impl ucm_remote::PlacementStrategy for Elsewhere {
    fn place(&self, _: &ObjectKey, _: u64, _: &[Member], _: usize) -> ucm_remote::Placement {
        ucm_remote::Placement(vec![PeerId::new("owner")])
    }
}

/// A run whose registration has run out begins a new one by itself, at the same address.
#[test]
fn a_run_that_was_removed_comes_back_as_another() {
    let directory = directory();
    let owner = Setup::new("owner", 8)
        .with(|b| b.heartbeat(std::time::Duration::from_millis(2)))
        .start(&directory);
    let reader = Setup::new("reader", 8).with(|b| b.prefetch(false)).start(&directory);
    owner.publish(&directory, 1, 0, 8192);
    assert!(reader.get(1, 0, 8192, &[range(0, 10)]).is_served());
    let (boot, address) = (owner.agent.boot().unwrap(), owner.agent.address());
    directory.remove_peer(&PeerId::new("owner"), boot, soon()).unwrap();
    eventually("another run", || owner.agent.boot().is_some_and(|now| now != boot));
    owner.wait_told(&directory, 1);
    assert_eq!(owner.agent.address(), address);
    let other = Setup::new("other", 8).start(&directory);
    for node in [&reader, &other] {
        assert!(node.get(1, 0, 8192, &[range(20, 8000)]).is_served());
    }
}
