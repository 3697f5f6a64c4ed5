//! The embedded directory against a plain map, and the same by way of a server.
//!
//! Mutants, each seen to fail a test here: an older generation replaces a newer one; a withdrawal that
//! does not look at the generation; records of an ended run are told; a removed run registers again;
//! a chain that loses what follows a removed record; a run's list that loses its head; a server of a lower
//! epoch is believed.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use proptest::prelude::*;
use ucm_remote::{
    Directory, DirectoryClient, DirectoryError, DirectoryServer, EmbeddedDirectory, EmbeddedLimits,
    Generation, Member, ObjectKey, PeerId, Record, Token,
};
use ucm_transport::Secret;

fn later() -> Instant {
    Instant::now() + Duration::from_secs(600)
}

fn key(number: u64) -> ObjectKey {
    let mut block = [0; 16];
    block[..8].copy_from_slice(&number.to_le_bytes());
    ObjectKey { block, identity: [7; 32] }
}

fn boot(number: u8) -> Token {
    Token([number; 16])
}

fn peer(number: u8) -> PeerId {
    PeerId::new(&format!("peer-{number}"))
}

fn member(number: u8, run: u8) -> Member {
    Member::new(peer(number), boot(run), "host:1")
}

fn record(number: u8, run: u8, generation: u64) -> Record {
    Record::new(peer(number), boot(run), Generation(generation), generation * 10 + 1)
}

#[derive(Clone, Debug)]
enum Step {
    Register(u8, u8),
    Remove(u8, u8),
    Announce(u8, u8, Vec<(u64, u64)>),
    Withdraw(u8, u8, u64, u64),
}

fn step() -> impl Strategy<Value = Step> {
    let records = prop::collection::vec((0_u64..12, 0_u64..4), 0..8);
    prop_oneof![
        2 => (0_u8..3, 0_u8..5).prop_map(|(p, run)| Step::Register(p, run)),
        1 => (0_u8..3, 0_u8..5).prop_map(|(p, run)| Step::Remove(p, run)),
        6 => (0_u8..3, 0_u8..5, records).prop_map(|(p, run, r)| Step::Announce(p, run, r)),
        3 => (0_u8..3, 0_u8..5, 0_u64..12, 0_u64..4)
            .prop_map(|(p, run, key, generation)| Step::Withdraw(p, run, key, generation)),
    ]
}

#[derive(Default)]
struct Model {
    current: BTreeMap<u8, u8>,
    ended: Vec<(u8, u8)>,
    records: BTreeMap<(u64, u8), u64>,
}

impl Model {
    fn end(&mut self, number: u8) {
        if let Some(run) = self.current.remove(&number) {
            self.ended.push((number, run));
            self.records.retain(|(_, of), _| *of != number);
        }
    }

    fn step(&mut self, directory: &dyn Directory, step: Step) {
        let refused = |result: Result<(), DirectoryError>| {
            matches!(
                result.map_err(|error| assert!(matches!(error, DirectoryError::Refused(_)))),
                Err(())
            )
        };
        match step {
            Step::Register(number, run) => {
                let result = directory.register(&member(number, run), later()).map(drop);
                let bad = self.ended.contains(&(number, run));
                assert_eq!(refused(result), bad);
                if !bad && self.current.get(&number) != Some(&run) {
                    self.end(number);
                    self.current.insert(number, run);
                }
            }
            Step::Remove(number, run) => {
                directory.remove_peer(&peer(number), boot(run), later()).unwrap();
                if self.current.get(&number) == Some(&run) {
                    self.end(number);
                }
            }
            Step::Announce(number, run, records) => {
                let announced: Vec<_> =
                    records.iter().map(|(k, g)| (key(*k), record(number, run, *g))).collect();
                let bad = self.current.get(&number) != Some(&run) && !records.is_empty();
                assert_eq!(refused(directory.announce(&announced, later())), bad);
                for (key, generation) in records.into_iter().filter(|_| !bad) {
                    let newest = self.records.entry((key, number)).or_insert(generation);
                    *newest = generation.max(*newest);
                }
            }
            Step::Withdraw(number, run, k, generation) => {
                let what = [(key(k), record(number, run, generation))];
                let bad = self.current.get(&number) != Some(&run);
                assert_eq!(refused(directory.withdraw(&what, later())), bad);
                if !bad && self.records.get(&(k, number)) == Some(&generation) {
                    self.records.remove(&(k, number));
                }
            }
        }
    }

    fn check(&self, directory: &dyn Directory) {
        let keys: Vec<_> = (0..12).map(key).collect();
        let told = directory.locate(&keys, later()).unwrap();
        for (number, mut told) in (0..).zip(told) {
            told.sort_by(|a, b| a.peer.cmp(&b.peer));
            let of_key = self.records.range((number, 0)..=(number, u8::MAX));
            let expected: Vec<_> =
                of_key.map(|((_, of), g)| record(*of, self.current[of], *g)).collect();
            assert_eq!(told, expected, "key {number}");
        }
        let members = directory.members(later()).unwrap();
        let expected: Vec<_> = self.current.iter().map(|(p, run)| member(*p, *run)).collect();
        assert_eq!(members, expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(3000) })]

    #[test]
    fn it_tells_what_a_plain_map_would(steps in prop::collection::vec(step(), 1..80)) {
        let directory = EmbeddedDirectory::new(EmbeddedLimits::default());
        let mut model = Model::default();
        for step in steps {
            model.step(&directory, step);
            model.check(&directory);
            prop_assert_eq!(directory.records(), model.records.len());
        }
    }
}

fn secret() -> Secret {
    Secret::new(b"a secret for tests only").unwrap()
}

fn served(directory: Arc<EmbeddedDirectory>) -> (DirectoryServer, DirectoryClient) {
    let address = "127.0.0.1:0".parse().unwrap();
    let ttl = Duration::from_secs(600);
    let server = DirectoryServer::start(directory, address, secret(), ttl).unwrap();
    let client = DirectoryClient::new(server.address(), secret()).unwrap();
    (server, client)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(60) })]

    /// By way of a server nothing is different.
    #[test]
    fn a_served_one_tells_the_same(steps in prop::collection::vec(step(), 1..40)) {
        let directory = Arc::new(EmbeddedDirectory::new(EmbeddedLimits::default()));
        let (_server, client) = served(directory.clone());
        let mut model = Model::default();
        for step in steps {
            model.step(&client, step);
            model.check(&client);
            prop_assert_eq!(directory.records(), model.records.len());
        }
        prop_assert_eq!(client.epoch(later()), directory.epoch(later()));
    }
}

/// A batch of more than a call holds, placements, a stranger, and a directory that is restarted: at once
/// the next question goes to the new one, and one whose epoch is lower is not believed.
#[test]
fn a_served_one_is_asked_in_batches_and_survives_its_restart() {
    let first = Arc::new(EmbeddedDirectory::new(EmbeddedLimits::default()));
    let (server, client) = served(first.clone());
    let mut owner = member(0, 0);
    (owner.capacity_bytes, owner.free_bytes) = (1000, 500);
    assert_eq!(client.register(&owner, later()), first.epoch(later()));
    let records: Vec<_> = (0..9000).map(|n| (key(n), record(0, 0, n))).collect();
    client.announce(&records, later()).unwrap();
    let keys: Vec<_> = (0..9001).map(key).collect();
    let told = client.locate(&keys, later()).unwrap();
    assert_eq!(told.len(), 9001);
    for (n, told) in (0..9000).zip(&told) {
        assert_eq!(*told, [record(0, 0, n)]);
    }
    assert_eq!(told[9000], []);
    let places = client.place(&[(key(1), 1000), (key(2), 1001)], later()).unwrap();
    assert_eq!(places.iter().map(|place| place.0.len()).collect::<Vec<_>>(), [1, 0]);
    let stranger = Secret::new(b"another secret, not ours").unwrap();
    let stranger = DirectoryClient::new(server.address(), stranger).unwrap();
    let refused = stranger.locate(&[key(1)], later());
    assert!(matches!(refused, Err(DirectoryError::Unavailable(_))), "{refused:?}");
    let long = Member::new(PeerId::new(&"x".repeat(600)), boot(1), "host:1");
    assert!(matches!(client.register(&long, later()), Err(DirectoryError::Refused(_))));

    let address = server.address();
    drop(server);
    let gone = client.locate(&[key(1)], later());
    assert!(matches!(gone, Err(DirectoryError::Unavailable(_))), "{gone:?}");
    let second = Arc::new(EmbeddedDirectory::new(EmbeddedLimits::default()));
    let ttl = Duration::from_secs(600);
    let server = DirectoryServer::start(second.clone(), address, secret(), ttl).unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    let told = loop {
        // It is left alone for a moment after it could not be reached.
        match client.locate(&[key(1)], later()) {
            Ok(told) => break told,
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(told, [vec![]]);
    assert_eq!(client.epoch(later()), second.epoch(later()));
    drop(server);
    let server = DirectoryServer::start(first, address, secret(), ttl).unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while client.outdated() == 0 {
        assert!(matches!(client.locate(&[key(1)], later()), Err(DirectoryError::Unavailable(_))));
        assert!(Instant::now() < until);
        thread::sleep(Duration::from_millis(5));
    }
    assert!(client.register(&owner, later()).is_err() && client.members(later()).is_err());
    drop(server);
}

#[test]
fn what_does_not_fit_is_dropped_and_counted() {
    let mut limits = EmbeddedLimits::default();
    (limits.records, limits.peers) = (64, 2);
    let directory = EmbeddedDirectory::new(limits);
    directory.register(&member(0, 0), later()).unwrap();
    let records: Vec<_> = (0..1000).map(|n| (key(n), record(0, 0, 1))).collect();
    directory.announce(&records, later()).unwrap();
    assert!(directory.records() <= 64);
    assert_eq!(directory.dropped(), 1000 - directory.records() as u64);
    directory.register(&member(1, 0), later()).unwrap();
    let error = directory.register(&member(2, 0), later()).unwrap_err();
    assert_eq!(error.to_string(), "the directory refused: there are 2 peers already");
    directory.remove_peer(&peer(0), boot(0), later()).unwrap();
    directory.register(&member(2, 0), later()).unwrap();
    assert_eq!(directory.records(), 0);
    assert_eq!(directory.locate(&[], Instant::now()), Err(DirectoryError::Timeout));
}

/// Runs come and go while others announce and ask: nothing of an ended run is told, nothing is left.
#[test]
fn runs_may_end_while_others_announce_and_ask() {
    let directory = EmbeddedDirectory::new(EmbeddedLimits::default());
    directory.register(&member(0, 0), later()).unwrap();
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for thread in 0..2_u64 {
            let (directory, done) = (&directory, &done);
            scope.spawn(move || {
                let keys: Vec<_> = (thread * 500..thread * 500 + 500).map(key).collect();
                while !done.load(Ordering::Relaxed) {
                    for run in 0..=255 {
                        let records: Vec<_> =
                            keys.iter().map(|key| (*key, record(1, run, 1))).collect();
                        let _ = directory.announce(&records, later());
                    }
                    let current = directory.members(later()).unwrap();
                    for record in directory.locate(&keys, later()).unwrap().into_iter().flatten() {
                        let known = |m: &Member| m.peer == record.peer && m.boot <= record.boot;
                        assert!(record.peer == peer(1));
                        assert!(
                            !current.iter().any(|m| m.peer == record.peer)
                                || current.iter().any(known)
                        );
                    }
                }
            });
        }
        for run in 0..=255 {
            directory.register(&member(1, run), later()).unwrap();
            thread::yield_now();
        }
        done.store(true, Ordering::Relaxed);
    });
    directory.remove_peer(&peer(1), boot(255), later()).unwrap();
    assert_eq!(directory.records(), 0);
    assert_eq!(directory.members(later()).unwrap(), [member(0, 0)]);
}

/// Not a time, but what it is made of: a record costs a bounded number of bytes.
#[test]
fn a_record_takes_about_a_hundred_bytes() {
    let directory = EmbeddedDirectory::new(EmbeddedLimits::default());
    directory.register(&member(0, 0), later()).unwrap();
    let records: Vec<_> = (0..200_000).map(|n| (key(n), record(0, 0, 1))).collect();
    directory.announce(&records, later()).unwrap();
    // Growing doubles the tables.
    assert!(directory.bytes() / 200_000 < 240, "{}", directory.bytes() / 200_000);
}
