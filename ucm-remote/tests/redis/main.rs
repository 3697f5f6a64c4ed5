//! The directory in a real server: killed, stopped, restarted empty, full of nonsense, a cluster.
//!
//! Mutants, each seen to fail a test here: an older generation replaces a newer one; a withdrawal that
//! does not look at the generation; records of ended runs are told; a run that ran out registers again.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test may panic, and says why it is skipped"
)]

mod server;

use std::time::{Duration, Instant};

use rustix::process::Signal;
use ucm_remote::{
    Directory, DirectoryError, Epoch, Generation, Member, ObjectKey, PeerId, Record,
    RedisDirectory, RedisOptions, Tier, Token,
};

use self::server::Server;

/// Runs a test against one server, or skips it.
fn with_server(test: impl FnOnce(Server)) {
    match server::program() {
        Ok(program) => test(Server::start(program, false)),
        Err(why) => println!("SKIP {why}"),
    }
}

fn later() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn key(number: u64) -> ObjectKey {
    let mut block = [0; 16];
    block[..8].copy_from_slice(&number.to_le_bytes());
    ObjectKey { block, identity: [0xff; 32] }
}

fn member(name: &str, run: u8) -> Member {
    let mut member = Member::new(PeerId::new(name), Token([run; 16]), "10.0.0.1:9");
    (member.capacity_bytes, member.free_bytes) = (1000, 10 * u64::from(run));
    member
}

fn record(name: &str, run: u8, generation: u64) -> Record {
    Record::new(PeerId::new(name), Token([run; 16]), Generation(generation), 77)
}

fn options() -> RedisOptions {
    let mut options = RedisOptions::new("test");
    options.members_for = Duration::ZERO;
    options
}

fn refused<T: std::fmt::Debug>(result: Result<T, DirectoryError>) {
    assert!(matches!(result, Err(DirectoryError::Refused(_))), "{result:?}");
}

/// What every directory promises, on any kind of server.
fn keeps_its_promises(directory: &RedisDirectory) {
    let locate = |n| directory.locate(&[key(n)], later()).unwrap().remove(0);
    let announce = |n, record: &Record| directory.announce(&[(key(n), record.clone())], later());
    let withdraw = |n, record: &Record| directory.withdraw(&[(key(n), record.clone())], later());
    assert_eq!(directory.epoch(later()), Ok(Epoch(0)));
    refused(announce(1, &record("a", 1, 1)));
    let epoch = directory.register(&member("a", 1), later()).unwrap();
    assert_eq!(directory.register(&member("b", 2), later()), Ok(epoch));
    assert_eq!(directory.epoch(later()), Ok(epoch));
    assert_eq!(directory.members(later()).unwrap(), [member("a", 1), member("b", 2)]);

    // Newer replaces older, never the other way round, beyond what a number of the server holds.
    let (old, new) = (record("a", 1, (1 << 60) + 255), record("a", 1, (1 << 60) + 256));
    announce(1, &new).unwrap();
    announce(1, &old).unwrap();
    assert_eq!(locate(1), std::slice::from_ref(&new));
    withdraw(1, &old).unwrap();
    assert_eq!(locate(1), std::slice::from_ref(&new), "only exactly this generation goes");
    let mut other = record("b", 2, 5);
    other.tier = Tier::Device;
    announce(1, &other).unwrap();
    let mut both = locate(1);
    both.sort_by(|a, b| a.peer.cmp(&b.peer));
    assert_eq!(both, [new.clone(), other.clone()]);
    withdraw(1, &new).unwrap();
    assert_eq!(locate(1), [other.clone()]);

    // A batch over many keys, in order.
    let many: Vec<_> = (100..400).map(|n| (key(n), record("a", 1, n))).collect();
    directory.announce(&many, later()).unwrap();
    let keys: Vec<_> = (100..401).map(key).collect();
    let told = directory.locate(&keys, later()).unwrap();
    for (n, told) in (100..400).zip(&told) {
        assert_eq!(*told, [record("a", 1, n)]);
    }
    assert_eq!(told.last(), Some(&vec![]));

    // A new run: what the old one announced is told no longer, and it never comes back.
    directory.register(&member("a", 3), later()).unwrap();
    assert_eq!(directory.locate(&keys, later()).unwrap().concat(), []);
    refused(directory.register(&member("a", 1), later()));
    refused(announce(2, &record("a", 1, 1)));
    assert_eq!(locate(2), []);
    directory.remove_peer(&PeerId::new("b"), Token([9; 16]), later()).unwrap();
    assert_eq!(locate(1), [other], "another run's removal");
    directory.remove_peer(&PeerId::new("b"), Token([2; 16]), later()).unwrap();
    assert_eq!(locate(1), []);
    refused(directory.register(&member("b", 2), later()));
    assert_eq!(directory.members(later()).unwrap(), [member("a", 3)]);
    let places = directory.place(&[(key(1), 1000), (key(1), 1001)], later()).unwrap();
    assert_eq!(places.iter().map(|place| place.0.len()).collect::<Vec<_>>(), [1, 0]);
    assert_eq!(directory.locate(&[], later()), Ok(vec![]));
    assert_eq!(directory.unreadable(), 0);
}

#[test]
fn a_server_keeps_the_promises() {
    with_server(|server| {
        keeps_its_promises(&RedisDirectory::single(&server.address(), options()).unwrap());
    });
}

#[test]
fn a_cluster_keeps_the_promises() {
    let Ok(program) = server::program() else { return println!("SKIP no server program on PATH") };
    let servers = server::cluster(program);
    let addresses: Vec<String> = servers.iter().map(Server::address).collect();
    keeps_its_promises(&RedisDirectory::cluster(&addresses[..1], options()).unwrap());
    // The records are spread.
    for server in &servers {
        assert_ne!(server.ask(&["DBSIZE"]).unwrap().trim(), ":0");
    }
}

/// F5: down: typed, in time; restarted empty: owners register and announce again, nothing is told before.
#[test]
fn f5_killed_and_restarted_empty() {
    with_server(|mut server| {
        let directory = RedisDirectory::single(&server.address(), options()).unwrap();
        let first = directory.register(&member("a", 1), later()).unwrap();
        let records = [(key(1), record("a", 1, 1))];
        directory.announce(&records, later()).unwrap();
        server.kill();
        for _ in 0..2 {
            let answer = directory.locate(&[key(1)], later());
            assert!(matches!(answer, Err(DirectoryError::Unavailable(_))), "{answer:?}");
        }
        server.restart();
        assert_eq!(directory.locate(&[key(1)], later()), Ok(vec![vec![]]));
        refused(directory.announce(&records, later()));
        let second = directory.register(&member("a", 1), later()).unwrap();
        assert!(second > first, "{second:?} after {first:?}");
        directory.announce(&records, later()).unwrap();
        assert_eq!(directory.locate(&[key(1)], later()), Ok(vec![vec![record("a", 1, 1)]]));
    });
}

/// A connection that broke between two calls costs nothing but a new one.
#[test]
fn a_restart_between_two_calls_is_not_an_error() {
    with_server(|mut server| {
        let directory = RedisDirectory::single(&server.address(), options()).unwrap();
        directory.members(later()).unwrap();
        server.kill();
        server.restart();
        assert_eq!(directory.members(later()), Ok(vec![]));
    });
}

/// A stopped server: the deadline is kept, and an answer that comes later is not taken for another's.
#[test]
fn f5_a_stopped_server_costs_the_deadline() {
    with_server(|server| {
        let directory = RedisDirectory::single(&server.address(), options()).unwrap();
        directory.register(&member("a", 1), later()).unwrap();
        directory.announce(&[(key(1), record("a", 1, 1))], later()).unwrap();
        server.signal(Signal::STOP);
        let soon = Instant::now() + Duration::from_millis(100);
        assert_eq!(directory.locate(&[key(1)], soon), Err(DirectoryError::Timeout));
        assert_eq!(directory.locate(&[key(1)], Instant::now()), Err(DirectoryError::Timeout));
        server.signal(Signal::CONT);
        assert_eq!(directory.locate(&[key(2)], later()), Ok(vec![vec![]]));
        assert_eq!(directory.locate(&[key(1)], later()), Ok(vec![vec![record("a", 1, 1)]]));
    });
}

/// By the server's clock: a member that does not register again is gone, and its run does not return;
/// records run out.
#[test]
fn what_is_not_refreshed_runs_out() {
    with_server(|server| {
        let mut options = options();
        (options.member_ttl, options.record_ttl) =
            (Duration::from_millis(300), Duration::from_millis(300));
        let directory = RedisDirectory::single(&server.address(), options).unwrap();
        directory.register(&member("a", 1), later()).unwrap();
        directory.announce(&[(key(1), record("a", 1, 1))], later()).unwrap();
        let begun = Instant::now();
        while !directory.members(later()).unwrap().is_empty() {
            assert!(begun.elapsed() < Duration::from_secs(30));
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(begun.elapsed() > Duration::from_millis(200), "too early");
        refused(directory.register(&member("a", 1), later()));
        directory.register(&member("a", 2), later()).unwrap();
        // The same when nobody has asked for the members meanwhile.
        directory.register(&member("b", 7), later()).unwrap();
        std::thread::sleep(Duration::from_millis(400));
        refused(directory.register(&member("b", 7), later()));
        while !server.ask(&["KEYS", "*:o:*"]).unwrap().starts_with("*0") {
            assert!(begun.elapsed() < Duration::from_secs(30));
            std::thread::sleep(Duration::from_millis(20));
        }
    });
}

#[test]
fn nonsense_is_left_out_and_counted() {
    with_server(|server| {
        let directory = RedisDirectory::single(&server.address(), options()).unwrap();
        directory.register(&member("a", 1), later()).unwrap();
        server
            .ask(&["HSET", "{ucm:test}:members", "x", "not a member", "y", "99999999999999 short"])
            .unwrap();
        assert_eq!(directory.members(later()).unwrap(), [member("a", 1)]);
        assert_eq!(directory.unreadable(), 1, "the first had run out");
        // Another type under a name of ours.
        server.ask(&["DEL", "{ucm:test}:members"]).unwrap();
        server.ask(&["SET", "{ucm:test}:members", "text"]).unwrap();
        directory.members(later()).unwrap_err();
        server.ask(&["SET", "{ucm:test}:epoch", "soon"]).unwrap();
        assert!(matches!(directory.epoch(later()), Err(DirectoryError::Corrupt(_))));
    });
}

#[test]
fn bad_settings_and_passwords_are_refused() {
    for (namespace, address) in [("", "redis://h"), ("a b", "redis://h"), ("a", "nowhere")] {
        refused(RedisDirectory::single(address, RedisOptions::new(namespace)));
    }
    let mut options = options();
    options.member_ttl = Duration::ZERO;
    refused(RedisDirectory::single("redis://h", options));
    with_server(|server| {
        server.ask(&["CONFIG", "SET", "requirepass", "secret"]).unwrap();
        let open = |address: &str| {
            RedisDirectory::single(address, self::options()).unwrap().members(later())
        };
        refused(open(&server.address()));
        refused(open(&server.address().replace("//", "//:wrong@")));
        assert_eq!(open(&server.address().replace("//", "//:secret@")), Ok(vec![]));
        let shown = format!("{:?}", RedisDirectory::single("redis://:secret@h", self::options()));
        assert!(!shown.contains("secret"), "{shown}");
    });
}
