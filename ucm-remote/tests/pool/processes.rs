//! Peers and ranks in processes of their own, killed and stopped under load.
//!
//! The directory is served by the test; the node whose ranks read is an agent of the test, so that its
//! gauges can be looked at; two peers own the objects, and each new run of one stores them with other bytes.
//! How many faults there are says `UCM_POOL_FAULTS` (default 60).
//!
//! Mutants, each seen to fail a test here: an assembly is given up while its readers copy. (What is told
//! of a peer's earlier run is believed: `faults`.)

use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use ucm_remote::{
    ByHash, DirectoryClient, DirectoryServer, EmbeddedDirectory, GetOutcome, PoolClient,
    PutOutcome, PutRequest, RemotePool as _, Source,
};
use ucm_transport::{Addr, HostEngine, Memory, TransferEngine as _};

use crate::kit::{
    Node, PAGE, Random, Setup, WATCHDOG, bytes, directory, eventually, idle, key, loopback, range,
    reading_of, secret, soon,
};

/// Set for children: what they are, and whom they find where.
const MARK: &str = "UCM_REMOTE_PROCESS";
const KEYS: u64 = 24;
const LEN: u64 = 5 * PAGE + 123;
/// Keys that ranks put; their bytes are always the same.
const PUTS: u64 = 1000;

/// A process of this binary. Killed when dropped.
pub(crate) struct Process {
    child: Child,
    input: ChildStdin,
    lines: mpsc::Receiver<String>,
    handle: Arc<OwnedFd>,
}

impl Process {
    pub(crate) fn start(what: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["processes::entry", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env(MARK, what)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, out) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (tx, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if let Some((_, text)) = line.split_once("@@")
                    && tx.send(text.to_owned()).is_err()
                {
                    return;
                }
            }
        });
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        let handle = Arc::new(pidfd_open(pid, PidfdFlags::empty()).unwrap());
        Self { child, input, lines, handle }
    }

    pub(crate) fn say(&mut self, order: &str) -> bool {
        writeln!(self.input, "{order}").is_ok()
    }

    /// Waits until it takes orders.
    pub(crate) fn ready(&self) {
        assert_eq!(self.lines.recv_timeout(WATCHDOG).unwrap(), "ready");
    }

    pub(crate) fn kill(&self) {
        signal(&self.handle, Signal::KILL);
    }

    /// What it answers; `None` when it was killed. Anything else that ends it fails the test.
    pub(crate) fn ask(&mut self, order: &str) -> Option<String> {
        let said = self.say(order);
        match self.lines.recv_timeout(WATCHDOG) {
            Ok(line) if said => return Some(line),
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("{order}: no answer"),
            _ => {}
        }
        let status = self.child.wait().unwrap();
        let signal = std::os::unix::process::ExitStatusExt::signal(&status);
        assert_eq!(signal, Some(9), "{order}: ended as {status}");
        None
    }
}

impl Process {
    /// Whether no thread of it runs: a signal returns before.
    fn is_stopped(&self) -> bool {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        tasks.map_while(Result::ok).all(|task| {
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('T'))
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn signal(handle: &OwnedFd, signal: Signal) {
    // It may have ended.
    let _ = pidfd_send_signal(handle, signal);
}

/// The child: `peer NAME DIRECTORY`, `rank SOCKET` or `stack SOCKET`, then one order a line, one answer a line.
#[test]
#[ignore = "entry of child processes"]
fn entry() {
    let Ok(what) = std::env::var(MARK) else { return };
    match what.split(' ').collect::<Vec<_>>()[..] {
        ["peer", name, at] => peer(name, at),
        ["rank", socket] => rank(Path::new(socket)),
        ["stack", socket] => crate::backend::rank(Path::new(socket)),
        _ => panic!("{what}"),
    }
    std::process::exit(0);
}

#[expect(clippy::print_stdout, reason = "the parent reads it")]
pub(crate) fn orders(mut obey: impl FnMut(&str, &[u64]) -> String) {
    println!("@@ready");
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let mut words = line.split(' ');
        let order = words.next().unwrap();
        let numbers: Vec<u64> = words.map(|word| word.parse().unwrap()).collect();
        let answer = obey(order, &numbers);
        println!("@@{answer}");
    }
}

fn peer(name: &str, at: &str) {
    let name: &'static str = name.to_owned().leak();
    let client = DirectoryClient::new(at.parse().unwrap(), secret()).unwrap();
    let node = Setup::new(name, 300)
        .with(|b| b.prefetch(false).heartbeat(Duration::from_millis(50)))
        .start_with(Arc::new(client));
    orders(|order, numbers| match (order, numbers) {
        ("fill", [first, step, version, len]) => {
            let outcomes = (*first..KEYS).step_by(usize::try_from(*step).unwrap());
            let bad = outcomes.filter(|n| !node.put(*n, *version, *len).is_stored()).count();
            format!("{bad} failed")
        }
        ("idle", []) => {
            idle(&node);
            "idle".to_owned()
        }
        other => panic!("no order {other:?}"),
    });
}

fn rank(socket: &Path) {
    let engine = Arc::new(HostEngine::builder().build().unwrap());
    let client = PoolClient::connect(socket, engine.clone() as _).unwrap();
    orders(|order, numbers| match (order, numbers) {
        // Reads and puts at random; which storings there may be.
        ("storm", [seed, count, versions]) => {
            let (mut random, mut served) = (Random(seed * 77 + 1), 0);
            for _ in 0..*count {
                if random.below(8) == 0 {
                    served += u64::from(put(&client, &engine, PUTS + random.below(16)).is_stored());
                    continue;
                }
                let pick = |random: &mut Random| match random.below(6) {
                    0 => PUTS + random.below(16),
                    _ => random.below(KEYS),
                };
                let picks: Vec<u64> = (0..=random.below(4)).map(|_| pick(&mut random)).collect();
                let ranges: Vec<_> = picks.iter().map(|_| random.ranges(LEN)).collect();
                let readings = picks.iter().zip(&ranges);
                let readings: Vec<_> =
                    readings.map(|(n, ranges)| reading_of(&*engine, *n, LEN, ranges)).collect();
                let limit = Duration::from_millis(20 + random.below(200));
                let requests: Vec<_> = readings.iter().map(|r| r.request.clone()).collect();
                let outcomes = client.get(&requests, Instant::now() + limit);
                for ((reading, number), outcome) in readings.iter().zip(&picks).zip(outcomes) {
                    if outcome.is_served() {
                        assert!(
                            (0..=*versions).any(|version| reading.is(*number, version)),
                            "key {number}: bytes of no storing, or of several"
                        );
                        served += 1;
                    }
                    reading.free(&*engine);
                }
            }
            format!("{served}")
        }
        other => panic!("no order {other:?}"),
    });
}

fn put(client: &PoolClient, engine: &HostEngine, number: u64) -> PutOutcome {
    let memory = Memory::host(usize::try_from(LEN).unwrap()).unwrap();
    memory.write(0, &bytes(number, 0, range(0, LEN))).unwrap();
    let region = engine.register(memory).unwrap();
    let ranges = vec![Source { range: range(0, LEN), from: Addr { region, offset: 0 } }];
    let limit = Instant::now() + Duration::from_millis(300);
    let outcome = client.put(&[PutRequest { key: key(number), len: LEN, ranges }], limit)[0];
    engine.deregister(region).unwrap();
    outcome
}

struct World {
    directory: Arc<EmbeddedDirectory>,
    server: DirectoryServer,
    node: Node,
    socket: PathBuf,
    _folder: tempfile::TempDir,
}

/// The node's medium is too small for the keys.
fn world(pages: u64) -> World {
    let directory = directory();
    let ttl = Duration::from_secs(2);
    let server = DirectoryServer::start(directory.clone(), loopback(), secret(), ttl).unwrap();
    let setup = Setup { shared: true, arena: 16 * PAGE, ..Setup::new("node", pages) };
    let mut node = setup
        .with(|b| {
            b.fetch_timeout(Duration::from_millis(80))
                .connect_timeout(Duration::from_millis(200))
                .placement(Arc::new(ByHash), 1)
                .piece_bytes(6000)
                .batch_bytes(10_000)
        })
        .start(&directory);
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("pool.sock");
    node.agent.serve_ranks(&socket).unwrap();
    World { directory, server, node, socket, _folder: folder }
}

impl World {
    fn peer(&self, name: &str) -> Process {
        let peer = Process::start(&format!("peer {name} {}", self.server.address()));
        peer.ready();
        peer
    }

    fn rank(&self) -> Process {
        Process::start(&format!("rank {}", self.socket.display()))
    }
}

/// A process that is started anew whenever it was killed, and what it is asked.
struct Place {
    /// Of the process that runs now.
    handle: Mutex<Option<Arc<OwnedFd>>>,
    over: AtomicBool,
}

impl Place {
    fn new() -> Self {
        Self { handle: Mutex::new(None), over: AtomicBool::new(false) }
    }

    fn signal(&self, what: Signal) {
        if let Some(handle) = &*self.handle.lock().unwrap() {
            signal(handle, what);
        }
    }
}

/// Ends all places when it goes: also when a thread fails, so that the others do not wait for ever.
struct End<'a>(&'a [Place], &'a [Place]);

impl Drop for End<'_> {
    fn drop(&mut self) {
        let everybody = || self.0.iter().chain(self.1);
        everybody().for_each(|place| place.over.store(true, Ordering::SeqCst));
        everybody().for_each(|place| place.signal(Signal::CONT));
    }
}

/// The same when its thread fails.
struct Failing<'a>(&'a [Place], &'a [Place]);

impl Drop for Failing<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            drop(End(self.0, self.1));
        }
    }
}

/// SIGKILL and SIGSTOP for peers and for ranks, at random, while ranks read and put.
#[test]
fn f11_processes_are_killed_and_stopped_and_no_byte_is_wrong() {
    let faults: u64 =
        std::env::var("UCM_POOL_FAULTS").ok().and_then(|text| text.parse().ok()).unwrap_or(60);
    let world = world(40);
    let peers: Vec<Place> = (0..2).map(|_| Place::new()).collect();
    let ranks: Vec<Place> = (0..3).map(|_| Place::new()).collect();
    let (peers, ranks) = (&peers[..], &ranks[..]);
    let (versions, served, restarts) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        let _end = End(peers, ranks);
        for (number, place) in (0_u64..).zip(peers) {
            let (world, versions, restarts) = (&world, &versions, &restarts);
            scope.spawn(move || {
                let _end = Failing(peers, ranks);
                while !place.over.load(Ordering::SeqCst) {
                    let mut process = world.peer(["left", "right"][usize::from(number == 1)]);
                    *place.handle.lock().unwrap() = Some(process.handle.clone());
                    let version = versions.fetch_add(1, Ordering::SeqCst) + 1;
                    let filled = process.ask(&format!("fill {number} 2 {version} {LEN}"));
                    assert!(filled.is_none_or(|text| text == "0 failed"));
                    // Until it is killed, or asked at the end.
                    eventually_for_ever(|| {
                        place.over.load(Ordering::SeqCst)
                            || process.child.try_wait().unwrap().is_some()
                    });
                    if place.over.load(Ordering::SeqCst) {
                        place.signal(Signal::CONT);
                        let said = process.ask("idle");
                        assert!(said.is_none_or(|text| text == "idle"));
                    }
                    restarts.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        for (number, place) in (0_u64..).zip(ranks) {
            let (world, versions, served, restarts) = (&world, &versions, &served, &restarts);
            scope.spawn(move || {
                let _end = Failing(peers, ranks);
                let mut seed = number;
                while !place.over.load(Ordering::SeqCst) {
                    let mut process = world.rank();
                    *place.handle.lock().unwrap() = Some(process.handle.clone());
                    let ready = process.lines.recv_timeout(WATCHDOG);
                    let mut alive = ready.is_ok();
                    while alive && !place.over.load(Ordering::SeqCst) {
                        seed += 10;
                        // Storings that begin while it reads are read, too.
                        let known = versions.load(Ordering::SeqCst) + 50;
                        match process.ask(&format!("storm {seed} 40 {known}")) {
                            Some(count) => {
                                served.fetch_add(count.parse().unwrap(), Ordering::SeqCst);
                            }
                            None => alive = false,
                        }
                    }
                    restarts.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        let mut random = Random(4711);
        let everybody = || peers.iter().chain(ranks);
        for fault in 0..faults {
            if fault % 20 == 0 {
                // Whatever happened, it does not stay.
                everybody().for_each(|place| place.signal(Signal::CONT));
                let before = served.load(Ordering::SeqCst);
                eventually("reads are served again", || {
                    served.load(Ordering::SeqCst) > before + 50
                });
            }
            let place = everybody().nth(usize::try_from(random.below(5)).unwrap()).unwrap();
            match random.below(8) {
                0..=1 => place.signal(Signal::KILL),
                2..=4 => place.signal(Signal::STOP),
                _ => everybody().for_each(|place| place.signal(Signal::CONT)),
            }
            thread::sleep(Duration::from_micros(random.below(60_000)));
        }
    });
    idle(&world.node);
    println!(
        "{faults} faults, {} runs of processes, {} keys served",
        restarts.load(Ordering::SeqCst),
        served.load(Ordering::SeqCst)
    );
    assert!(world.directory.records() < 10_000);
}

/// Waits without the watchdog: the test's own end decides.
fn eventually_for_ever(mut is: impl FnMut() -> bool) {
    while !is() {
        thread::sleep(Duration::from_millis(2));
    }
}

/// F2 with a process that is really stopped: the deadline is kept, others are served, and nothing is
/// written late into memory that has another object meanwhile.
#[test]
fn f2_a_stopped_peer_process_keeps_nobody() {
    let world = world(6);
    let (mut hung, mut alive) = (world.peer("hung"), world.peer("alive"));
    assert_eq!(hung.ask(&format!("fill 0 2 1 {LEN}")).unwrap(), "0 failed");
    assert_eq!(alive.ask(&format!("fill 1 2 2 {LEN}")).unwrap(), "0 failed");
    let whole = [range(0, LEN)];
    eventually("both are told of", || {
        (0..KEYS).all(|n| {
            ucm_remote::Directory::locate(&*world.directory, &[key(n)], soon()).unwrap()[0].len()
                == 1
        })
    });
    assert!(world.node.get(0, 1, LEN, &[range(0, 10)]).is_served(), "connected");
    world.node.agent.forget_parts();
    signal(&hung.handle, Signal::STOP);
    eventually("all its threads have stopped", || hung.is_stopped());
    for round in 0..5 {
        let reading = world.node.reading(round * 2, LEN, &whole);
        let begun = Instant::now();
        let outcome = world.node.read(&[reading], begun + Duration::from_millis(300))[0];
        assert!(matches!(outcome, GetOutcome::Timeout | GetOutcome::PeerDown), "{outcome:?}");
        assert!(begun.elapsed() < WATCHDOG / 2);
        // The memory it had is used for what others have.
        let got = world.node.get(round * 2 + 1, 2, LEN, &whole);
        assert_eq!(got, GetOutcome::Remote, "round {round}");
    }
    idle(&world.node);
    signal(&hung.handle, Signal::CONT);
    eventually("it answers again", || world.node.get(2, 1, LEN, &[range(9, 8000)]).is_served());
    assert!(world.node.get(9, 2, LEN, &whole).is_served());
    idle(&world.node);
    for peer in [&mut hung, &mut alive] {
        assert_eq!(peer.ask("idle").unwrap(), "idle");
    }
}
