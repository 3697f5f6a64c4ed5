//! F6: a partition, in which each half of the nodes has a directory of its own, and its end.
//!
//! Mutants, each seen to fail the test: a directory of a lower epoch is believed, or told; a peer that finds
//! another directory does not tell it what it has.

use std::{sync::Arc, time::Duration};

use ucm_remote::{
    Directory as _, DirectoryClient, DirectoryServer, EmbeddedDirectory, GetOutcome, Medium as _,
    PeerId, PutOutcome, RemotePool as _,
};

use crate::kit::{
    Node, PAGE, Proxy, Setup, directory, eventually, idle, key, loopback, range, secret, soon,
};

const LEN: u64 = 3 * PAGE + 77;
const KEYS: u64 = 12;

/// A directory as one process serves it.
struct Served {
    directory: Arc<EmbeddedDirectory>,
    server: DirectoryServer,
}

fn serve() -> Served {
    let directory = directory();
    let ttl = Duration::from_secs(600);
    let server = DirectoryServer::start(directory.clone(), loopback(), secret(), ttl).unwrap();
    Served { directory, server }
}

/// A node that finds its directory at the other end of a proxy.
struct Half {
    node: Node,
    way: Proxy,
    client: Arc<DirectoryClient>,
}

fn node(name: &'static str, of: &Served) -> Half {
    let way = Proxy::new();
    way.lead_to(of.server.address());
    let client = Arc::new(DirectoryClient::new(way.address, secret()).unwrap());
    let setup = Setup::new(name, 128)
        .with(|b| b.prefetch(false).heartbeat(Duration::from_millis(2)).negative(Duration::ZERO));
    Half { node: setup.start_with(client.clone()), way, client }
}

impl Half {
    fn goes_over_to(&self, other: &Served) {
        self.way.lead_to(other.server.address());
        self.way.cut(false);
    }

    /// A part of a key, as some storing has it; which one.
    fn read(&self, number: u64, offset: u64, len: u64) -> Option<u64> {
        let reading = self.node.reading(number, LEN, &[range(offset, len)]);
        let outcome = self.node.read(std::slice::from_ref(&reading), soon())[0];
        if !outcome.is_served() {
            return None;
        }
        let which = (1..=2).find(|version| reading.is(number, *version));
        assert!(which.is_some(), "key {number}: bytes of both storings, or of none");
        which
    }
}

#[test]
fn f6_two_directories_after_a_partition_become_one_and_no_byte_is_wrong() {
    let old = serve();
    let (left, left_reader) = (node("left", &old), node("left reader", &old));
    let new = serve();
    assert!(new.directory.epoch(soon()).unwrap() > old.directory.epoch(soon()).unwrap());
    let (right, right_reader) = (node("right", &new), node("right reader", &new));
    // Both halves store the same keys: other bytes, the same lengths, the same generations even.
    for number in 0..KEYS {
        left.node.publish(&old.directory, number, 1, LEN);
        right.node.publish(&new.directory, number, 2, LEN);
    }
    for number in 0..KEYS {
        assert_eq!(left_reader.read(number, 100, 2000), Some(1));
        assert_eq!(right_reader.read(number, 100, 2000), Some(2));
    }

    // It heals: those who had the older directory find the other, and tell it what they have.
    left.goes_over_to(&new);
    left_reader.goes_over_to(&new);
    for number in 0..KEYS {
        left.node.wait_told(&new.directory, number);
        let told = new.directory.locate(&[key(number)], soon()).unwrap();
        assert_eq!(told[0].len(), 2, "{told:?}");
    }
    let third = node("third", &new);
    for number in 0..KEYS {
        // What was begun with one storing goes on with it.
        assert_eq!(left_reader.read(number, 1500, 7000), Some(1));
        assert_eq!(right_reader.read(number, 1500, 7000), Some(2));
        let first = third.read(number, 0, 5000).unwrap();
        assert_eq!(third.read(number, 3000, LEN - 3000), Some(first));
    }
    // One of the storings goes: the other one is found.
    let fourth = node("fourth", &new);
    for number in 0..KEYS {
        for half in [&left, &third] {
            let _ = half.node.agent.medium().medium().remove(&key(number));
        }
        assert_eq!(fourth.read(number, 7, 4000), Some(2));
    }

    // The older directory comes back for one node, which has heard of the newer one.
    let outdated = right.client.outdated();
    right.goes_over_to(&old);
    eventually("it is not believed", || right.client.outdated() > outdated);
    let there = old.directory.members(soon()).unwrap();
    assert!(there.iter().all(|member| member.peer != PeerId::new("right")), "{there:?}");
    assert_eq!(right.node.put(99, 2, LEN), PutOutcome::Created);
    assert_eq!(right.node.get(500, 0, LEN, &[range(0, 1)]), GetOutcome::PeerDown, "not a miss");
    assert_eq!(old.directory.locate(&[key(99)], soon()), Ok(vec![vec![]]));
    right.goes_over_to(&new);
    // What was stored meanwhile is told.
    right.node.wait_told(&new.directory, 99);
    eventually("the others find it", || third.read(99, 0, LEN) == Some(2));
    for half in [left, left_reader, right, right_reader, third, fourth] {
        idle(&half.node);
    }
}

/// Many peers have each of many objects: the answer stays within a frame, and leads to all of them. Mutant,
/// seen to fail here: all places are told.
#[test]
fn of_many_places_a_few_are_told() {
    let mut limits = ucm_remote::EmbeddedLimits::default();
    limits.records = 200_000;
    let directory = Arc::new(EmbeddedDirectory::new(limits));
    let ttl = crate::kit::WATCHDOG;
    let server = DirectoryServer::start(directory.clone(), loopback(), secret(), ttl).unwrap();
    let keys: Vec<_> = (0..1000).map(key).collect();
    for peer in 0..100_u8 {
        let name = ucm_remote::PeerId::new(&format!("{peer:0>200}"));
        let boot = ucm_remote::Token([peer; 16]);
        let member = ucm_remote::Member::new(name.clone(), boot, "10.0.0.1:9");
        directory.register(&member, soon()).unwrap();
        let generation = ucm_remote::Generation(1);
        let record = ucm_remote::Record::new(name, boot, generation, 77);
        let records: Vec<_> = keys.iter().map(|key| (*key, record.clone())).collect();
        directory.announce(&records, soon()).unwrap();
    }
    let client = DirectoryClient::new(server.address(), secret()).unwrap();
    let told = client.locate(&keys, soon()).unwrap();
    assert!(told.iter().all(|places| places.len() == 8));
    let peers: std::collections::HashSet<_> = told.iter().flatten().map(|r| r.boot).collect();
    assert_eq!(peers.len(), 100, "each is somebody's");
}

/// Mutant: a removal takes away only what it was told of at first.
#[test]
fn what_is_removed_is_gone_from_more_places_than_are_told_at_once() {
    let of = serve();
    let names = ["n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8", "n9"];
    let halves: Vec<_> = names.iter().map(|name| node(name, &of)).collect();
    assert_eq!(halves[0].node.put(1, 1, LEN), PutOutcome::Created);
    for half in &halves[1..] {
        eventually("its place is known", || half.read(1, 0, LEN) == Some(1));
    }
    let places = || of.directory.locate(&[key(1)], soon()).unwrap()[0].len();
    eventually("all have it", || places() == names.len());
    let removed = halves[3].node.client.remove(&[key(1)], soon());
    assert_eq!(removed, [ucm_remote::RemoveOutcome::Removed]);
    assert!(halves.iter().all(|half| !half.node.is_resident(1)));
    assert_eq!(places(), 0);
}
