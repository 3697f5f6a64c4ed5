//! Ranks in processes of their own: this binary starts itself again.
//!
//! Mutants, each seen to fail a test here: a rank does not watch for the end of its agent; a client, or a
//! neighbour, keeps the regions of one that has ended; an operation of the backend that has waited too long
//! is begun; what is touched on other nodes is told by who touches.

use std::{
    collections::HashSet,
    io::{BufRead as _, BufReader, Write as _},
    os::unix::net::UnixStream,
    path::PathBuf,
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Arc, mpsc},
    thread,
};

use ucm_remote::{
    ByteRange, GetOutcome, PoolBackend, PoolBackendOptions, PoolClient, PutOutcome, PutRequest,
    RemotePool as _, Source,
};
use ucm_store::Backend as _;
use ucm_transport::{Addr, HostEngine, Memory, TransferEngine};

use crate::kit::{
    Gated, Node, PAGE, Setup, WATCHDOG, bytes, directory, eventually, idle, key, range, reading_of,
    soon,
};

/// Set for children: the socket of their agent.
const MARK: &str = "UCM_REMOTE_RANK";

/// A rank process. Killed when dropped.
struct Rank {
    child: Child,
    input: ChildStdin,
    lines: mpsc::Receiver<String>,
}

impl Rank {
    fn start(path: &std::path::Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["ranks::entry", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env(MARK, path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, out) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (tx, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                // The harness prints "test … " without a line end before the first answer.
                if let Some((_, text)) = line.split_once("@@")
                    && tx.send(text.to_owned()).is_err()
                {
                    return;
                }
            }
        });
        let mut rank = Self { child, input, lines };
        assert_eq!(rank.hear(), "ready");
        rank
    }

    fn say(&mut self, order: &str) {
        writeln!(self.input, "{order}").unwrap();
    }

    fn hear(&mut self) -> String {
        self.lines.recv_timeout(WATCHDOG).expect("the rank says nothing")
    }

    fn ask(&mut self, order: &str) -> String {
        self.say(order);
        self.hear()
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The child: one order a line, one answer a line.
#[test]
#[ignore = "entry of child processes"]
fn entry() {
    let Some(path) = std::env::var_os(MARK).map(PathBuf::from) else { return };
    let engine = Arc::new(HostEngine::builder().build().unwrap());
    let client = PoolClient::connect(&path, engine.clone() as _).unwrap();
    println!("@@ready");
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let numbers: Vec<u64> = words[1..].iter().map(|word| word.parse().unwrap()).collect();
        let answer = match words[0] {
            // first key, keys, storing, length, offset, bytes
            "get" => {
                let [first, count, version, len, offset, part] = numbers[..] else {
                    panic!("{line}")
                };
                let mut readings: Vec<_> = (first..first + count)
                    .map(|n| reading_of(&*engine, n, len, &[range(offset, part)]))
                    .collect();
                let requests: Vec<_> = readings.iter().map(|r| r.request.clone()).collect();
                let outcomes = client.get(&requests, soon());
                for (reading, number) in readings.iter_mut().zip(first..) {
                    if outcomes.iter().all(|o| o.is_served()) {
                        reading.check(number, version);
                    }
                    reading.free(&*engine);
                }
                format!("{outcomes:?}")
            }
            // key, storing, length
            "put" => {
                let [number, version, len] = numbers[..] else { panic!("{line}") };
                format!("{:?}", put(&client, &*engine, number, version, len))
            }
            "exists" => format!("{:?}", client.exists(&[key(numbers[0])], soon())),
            "remove" => format!("{:?}", client.remove(&[key(numbers[0])], soon())),
            // Begins to copy, and never ends: key, length.
            "hang" => {
                let gate = Arc::new(Gated::default());
                let client = PoolClient::connect(&path, gate.clone() as _).unwrap();
                let (number, len) = (numbers[0], numbers[1]);
                let of_thread = gate.clone();
                thread::spawn(move || {
                    let reading = reading_of(&*of_thread, number, len, &[range(0, len)]);
                    client.get(&[reading.request], soon())
                });
                eventually("it copies", || gate.waiting() == 1);
                "hanging".to_owned()
            }
            other => panic!("no order {other:?}"),
        };
        println!("@@{answer}");
    }
    std::process::exit(0);
}

fn put(
    client: &PoolClient,
    engine: &dyn TransferEngine,
    number: u64,
    version: u64,
    len: u64,
) -> PutOutcome {
    let memory = Memory::host(usize::try_from(len).unwrap()).unwrap();
    memory.write(0, &bytes(number, version, range(0, len))).unwrap();
    let region = engine.register(memory).unwrap();
    let ranges = vec![Source { range: range(0, len), from: Addr { region, offset: 0 } }];
    let outcome = client.put(&[PutRequest { key: key(number), len, ranges }], soon())[0];
    engine.deregister(region).unwrap();
    outcome
}

/// An owner, and a node whose ranks are processes.
struct World {
    directory: Arc<ucm_remote::EmbeddedDirectory>,
    owner: Node,
    node: Node,
    socket: PathBuf,
    _folder: tempfile::TempDir,
}

fn world(pages: u64) -> World {
    let directory = directory();
    let owner = Setup::new("owner", 256).start(&directory);
    let setup = Setup { shared: true, ..Setup::new("node", pages) };
    let mut node = setup.with(|b| b.piece_bytes(5000).batch_bytes(20_000)).start(&directory);
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("pool.sock");
    node.agent.serve_ranks(&socket).unwrap();
    World { directory, owner, node, socket, _folder: folder }
}

/// I8 with processes: every byte crosses the wire once for all of them.
#[test]
fn i8_processes_share_every_byte() {
    for groups in [1, 8, 61] {
        let world = world(256);
        let (keys, len) = (6, 61 * 500);
        (0..keys).for_each(|number| world.owner.publish(&world.directory, number, 4, len));
        let mut ranks: Vec<Rank> = (0..3).map(|_| Rank::start(&world.socket)).collect();
        let mut from = 0;
        for group in 0..groups {
            let to = len * (group + 1) / groups;
            for rank in &mut ranks {
                rank.say(&format!("get 0 {keys} 4 {len} {from} {}", to - from));
            }
            for rank in &mut ranks {
                let said = rank.hear();
                assert!(!said.contains("Timeout") && said.matches(',').count() == 5, "{said}");
                let served = ["Local", "Remote", "Joined"].map(|o| said.matches(o).count());
                assert_eq!(served.iter().sum::<usize>(), 6, "{said}");
            }
            from = to;
        }
        assert_eq!(world.node.agent.stats().wire_bytes, keys * len, "{groups} groups");
        assert!(world.node.agent.stats().route_calls <= 3, "later groups are not looked for");
        drop(ranks);
        idle(&world.node);
    }
}

#[test]
fn ranks_store_ask_and_remove() {
    let world = world(64);
    let (mut one, mut two) = (Rank::start(&world.socket), Rank::start(&world.socket));
    assert_eq!(one.ask("put 7 2 9000"), "Created");
    assert_eq!(one.ask("put 7 2 9000"), "AlreadyExists");
    assert_eq!(two.ask("put 7 2 9001"), "Conflict");
    assert_eq!(two.ask("get 7 1 2 9000 100 8000"), "[Local]");
    assert_eq!(two.ask("exists 7"), "[Ok(Some(9000))]");
    world.node.wait_told(&world.directory, 7);
    assert_eq!(world.owner.get(7, 2, 9000, &[range(0, 9000)]), GetOutcome::Remote);
    // A copy that nobody was told of would outlive the removal.
    world.owner.wait_told(&world.directory, 7);
    assert_eq!(one.ask("remove 7"), "[Removed]");
    assert_eq!(two.ask("exists 7"), "[Ok(None)]");
    assert_eq!(two.ask("get 7 1 2 9000 0 1"), "[Miss]");
    // Larger than the whole medium, and than nothing.
    assert_eq!(one.ask(&format!("put 8 1 {}", 65 * PAGE)), "TooLarge");
    drop((one, two));
    idle(&world.node);
}

/// What a rank reads stays while it lives, and goes when it is killed.
#[test]
fn a_killed_rank_leaves_no_pin() {
    let world = world(2);
    world.owner.publish(&world.directory, 1, 0, 2 * PAGE);
    world.owner.publish(&world.directory, 2, 0, 2 * PAGE);
    let mut rank = Rank::start(&world.socket);
    assert_eq!(rank.ask(&format!("hang 1 {}", 2 * PAGE)), "hanging");
    let stats = world.node.agent.stats();
    assert_eq!(stats.medium.leases, 1, "{stats:?}");
    let whole: [ByteRange; 1] = [range(0, 2 * PAGE)];
    for _ in 0..3 {
        assert_eq!(world.node.get(2, 0, 2 * PAGE, &whole), GetOutcome::Remote);
        assert!(world.node.is_resident(1) && !world.node.is_resident(2), "it is being read");
    }
    drop(rank);
    eventually("its pins are gone", || {
        world.node.agent.stats().holds == 0 && world.node.agent.stats().medium.leases == 0
    });
    assert_eq!(world.node.get(2, 0, 2 * PAGE, &whole), GetOutcome::Remote);
    assert!(world.node.is_resident(2));
    idle(&world.node);
}

#[test]
fn ranks_of_an_agent_that_ends_are_told() {
    let mut world = world(64);
    world.owner.publish(&world.directory, 1, 0, 8192);
    let mut rank = Rank::start(&world.socket);
    assert_eq!(rank.ask("get 1 1 0 8192 0 100"), "[Remote]");
    let other = Setup::new("other", 4).start(&world.directory);
    let Node { agent, .. } = std::mem::replace(&mut world.node, other);
    drop(agent);
    assert!(!world.socket.exists());
    assert_eq!(rank.ask("get 1 1 0 8192 0 100"), "[PeerDown]");
    assert_eq!(rank.ask("put 3 0 100"), "PeerDown");
    assert_eq!(rank.ask("exists 3"), "[Err(PeerDown)]");
    assert_eq!(rank.ask("remove 3"), "[PeerDown]");
}

/// Another agent at the same place has other memory, also when neither serves other nodes. Fails when a
/// rank takes the second agent for the first: the pages that it tells of are read in the first one's memory.
#[test]
fn an_agent_that_takes_over_is_not_taken_for_the_first() {
    let directory = directory();
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("pool.sock");
    let start = |version| {
        let setup = Setup { shared: true, serves: false, ..Setup::new("node", 64) };
        let mut node = setup.start(&directory);
        node.agent.serve_ranks(&socket).unwrap();
        (0..4).for_each(|number| assert_eq!(node.put(number, version, 9000), PutOutcome::Created));
        node
    };
    let first = start(1);
    let options = PoolBackendOptions::new([3; 32], 1);
    let backend = PoolBackend::connect(&socket, options).unwrap();
    let load = |number: u64| {
        let sink = ucm_store::testing::Collector::new();
        backend.load(vec![sink.op(key(number).block, 0, 9000).1]);
        let (result, seen) = sink.wait_one();
        result.map(|()| (1..=2).find(|version| seen == bytes(number, *version, range(0, 9000))))
    };
    assert_eq!(load(0), Ok(Some(1)));
    let mut rank = Rank::start(&socket);
    assert_eq!(rank.ask("get 0 1 1 9000 0 9000"), "[Local]");
    drop(first);
    assert_eq!(rank.ask("get 0 1 1 9000 0 9000"), "[PeerDown]");
    assert_eq!(load(1), Err(ucm_store::ErrorKind::Unavailable));
    let second = start(2);
    assert_eq!(rank.ask("get 0 1 2 9000 0 9000"), "[PeerDown]", "it has the first one's memory");
    // A backend maps the memory anew by itself.
    eventually("the backend has found the second", || match load(2) {
        Ok(version) => {
            assert_eq!(version, Some(2));
            true
        }
        Err(kind) => {
            assert_eq!(kind, ucm_store::ErrorKind::Unavailable);
            false
        }
    });
    let mut rank = Rank::start(&socket);
    assert_eq!(rank.ask("get 0 1 2 9000 0 9000"), "[Local]");
    drop((rank, backend));
    idle(&second);
}

/// A neighbour's memory comes by its socket.
#[test]
fn a_neighbour_is_read_without_its_service() {
    let world = world(64);
    assert_eq!(world.node.put(5, 1, 20_000), PutOutcome::Created);
    world.node.wait_told(&world.directory, 5);
    let reader = Setup::new("reader", 64).start(&world.directory);
    reader.agent.attach_neighbour_at(&world.socket).unwrap();
    assert_eq!(reader.get(5, 1, 20_000, &[range(3, 19_000)]), GetOutcome::Remote);
    let exchanges = reader.agent.stats().exchanges;
    assert_eq!(reader.get(5, 1, 20_000, &[range(19_000, 1000)]), GetOutcome::Remote);
    assert_eq!(reader.agent.stats().exchanges, exchanges, "no further question");
    idle(&reader);
}

/// A6, F8: nonsense on the socket ends that connection and nothing else.
#[test]
fn nonsense_ends_its_connection_only() {
    let world = world(16);
    world.owner.publish(&world.directory, 1, 0, 8192);
    let mut rank = Rank::start(&world.socket);
    let hello = [&[10, 0, 0, 0, 1][..], b"UCMRANK2", &[0]].concat();
    for nonsense in [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0; 64],
        vec![0xff; 64],
        [&hello[..], &[5, 0, 0, 0, 3, 1, 2, 3, 4]].concat(),
        [&hello[..], &[1, 0, 0, 0, 99]].concat(),
        [&hello[..], &[0xff; 4]].concat(),
    ] {
        let mut stream = UnixStream::connect(&world.socket).unwrap();
        stream.set_read_timeout(Some(WATCHDOG)).unwrap();
        stream.write_all(&nonsense).unwrap();
        let mut said = Vec::new();
        // At most a welcome, then the end; a reset when it did not read everything.
        let _ = std::io::Read::read_to_end(&mut stream, &mut said);
        assert!(said.len() < 100);
    }
    assert_eq!(rank.ask("get 1 1 0 8192 0 8192"), "[Remote]");
    drop(rank);
    idle(&world.node);
}

/// Names of the shared memory that is mapped here.
fn mapped() -> HashSet<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let memory = maps.lines().filter(|line| line.contains("memfd:"));
    memory.map(|line| line.split_whitespace().nth(4).unwrap().to_owned()).collect()
}

/// Whoever uses an agent lets go of its memory when it has ended, also without asking for anything: the next
/// one needs the room.
#[test]
fn the_memory_of_an_agent_that_has_ended_goes() {
    let before = mapped();
    let world = world(16);
    let options = PoolBackendOptions::new([3; 32], 1);
    let backend = PoolBackend::connect(&world.socket, options).unwrap();
    let engine = Arc::new(HostEngine::builder().build().unwrap());
    let client = PoolClient::connect(&world.socket, Arc::clone(&engine) as _).unwrap();
    let neighbour = Setup::new("neighbour", 16).start(&world.directory);
    neighbour.agent.attach_neighbour_at(&world.socket).unwrap();
    let its: HashSet<String> = mapped().difference(&before).cloned().collect();
    assert!(!its.is_empty());
    drop(world);
    eventually("it is mapped nowhere", || mapped().is_disjoint(&its));
    let reading = reading_of(&*engine, 1, 100, &[range(0, 100)]);
    assert_eq!(client.get(&[reading.request], soon()), [GetOutcome::PeerDown]);
    drop((backend, neighbour));
}

#[test]
fn what_has_waited_too_long_is_not_begun() {
    let node = Setup::new("node", 16).start(&directory());
    let mut options = PoolBackendOptions::new([3; 32], 1);
    options.patience = std::time::Duration::ZERO;
    let backend = node.agent.backend(options).unwrap();
    assert_eq!(node.put(1, 0, 9000), PutOutcome::Created);
    let sink = ucm_store::testing::Collector::new();
    backend.load(vec![sink.op(key(1).block, 0, 9000).1]);
    assert_eq!(sink.wait_one().0, Err(ucm_store::ErrorKind::Unavailable));
    let asked = node.agent.stats().asked_bytes;
    assert_eq!(asked, 0);
    backend.dump(vec![sink.op(key(2).block, 0, 9000).1]);
    assert_eq!(sink.wait_one().0, Err(ucm_store::ErrorKind::Unavailable));
    assert!(!node.is_resident(2));
}
