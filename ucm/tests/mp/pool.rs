//! The remote pool by the command: peers are processes, and so is who asks them.
//!
//! Mutants, each seen to fail a test here: a second peer does not look at the lock; a rank that is given a
//! socket does not ask the pool; what is not there ends as 0.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use ucm::{Addr, BackendKind, Key, Memory, Node, Outcome, PoolId, Rank, RegionId};
use ucm_store::{fill_pattern, verify_pattern};

const WATCHDOG: Duration = Duration::from_secs(60);

struct Pool {
    folder: tempfile::TempDir,
}

/// `ucm peer`; killed when dropped.
struct Peer {
    child: Child,
    said: Value,
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Peer {
    fn at(&self, what: &str) -> String {
        self.said[what].as_str().unwrap().to_owned()
    }

    fn metrics(&self) -> String {
        let mut stream = TcpStream::connect(self.at("metrics")).unwrap();
        stream.set_read_timeout(Some(WATCHDOG)).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
        text
    }

    fn metric(&self, name: &str) -> u64 {
        let text = self.metrics();
        let of = |name: String| text.lines().find_map(move |line| line.strip_prefix(&name));
        let line =
            of(format!("ucm_remote_{name} ")).or_else(|| of(format!("ucm_remote_{name}_total ")));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap()
    }
}

fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let until = Instant::now() + WATCHDOG;
    while !is() {
        assert!(Instant::now() < until, "{what}: not within the watchdog");
        std::thread::sleep(Duration::from_millis(5));
    }
}

impl Pool {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("secret"), "a secret for tests only\n").unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, settings: &[(&str, &str)]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ucm"));
        let secret = self.path("secret").display().to_string();
        for (key, value) in [("secret_file", secret.as_str())].iter().chain(settings) {
            command.arg("--set").arg(format!("remote.{key}={value}"));
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn spawn_peer(&self, name: &str, more: &[(&str, &str)], arguments: &[&str]) -> Child {
        let socket = self.path(name).display().to_string();
        let mut settings = vec![
            ("name", name),
            ("socket", socket.as_str()),
            ("bytes", "16777216"),
            ("page_bytes", "4096"),
            ("arena_bytes", "1048576"),
            ("listen", "127.0.0.1:0"),
            ("metrics", "127.0.0.1:0"),
        ];
        settings.extend_from_slice(more);
        let mut command = self.command(&settings);
        command.args(["peer", "--json"]).args(arguments).stderr(Stdio::inherit());
        command.spawn().unwrap()
    }

    fn peer(&self, name: &str, more: &[(&str, &str)]) -> Peer {
        ready(self.spawn_peer(name, more, &[]))
    }

    /// `ucm pool`: exit code, and what it wrote.
    fn pool(&self, directory: &str, arguments: &[&str]) -> (i32, Vec<u8>) {
        let Output { status, stdout, .. } =
            self.command(&[("directory", directory)]).arg("pool").args(arguments).output().unwrap();
        (status.code().unwrap(), stdout)
    }
}

/// Waits until it says where it serves.
fn ready(mut child: Child) -> Peer {
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let said = serde_json::from_str(&line).unwrap_or_else(|_| panic!("it said {line:?}"));
    Peer { child, said }
}

/// Its exit code, once it has ended.
fn ended(child: &mut Child) -> Option<i32> {
    let until = Instant::now() + WATCHDOG;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        if Instant::now() > until {
            let _ = child.kill();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn signal(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    // The child has not been waited for: the number is its own.
    kill_process(pid, signal).unwrap();
}

#[test]
fn objects_are_put_got_and_removed_by_the_command() {
    let pool = Pool::new();
    let one = pool.peer("one", &[("serve_directory", "127.0.0.1:0")]);
    let directory = one.at("directory");
    let mut two = pool.peer("two", &[("directory", &directory)]);
    let bytes: Vec<u8> = (0..1_500_000_u32).flat_map(|n| n.to_le_bytes()).collect();
    let (file, longer) = (pool.path("file"), pool.path("longer"));
    std::fs::write(&file, &bytes[..2_500_000]).unwrap();
    std::fs::write(&longer, &bytes).unwrap();
    let (file, longer) = (file.to_str().unwrap(), longer.to_str().unwrap());
    let ask = |arguments: &[&str]| pool.pool(&directory, arguments);

    assert_eq!(ask(&["get", "an object"]).0, 1, "not there yet");
    assert_eq!(ask(&["put", "an object", file]).0, 0);
    eventually("it is told of", || ask(&["get", "an object"]).0 == 0);
    assert_eq!(ask(&["get", "an object"]), (0, bytes[..2_500_000].to_vec()));
    let part = ask(&["get", "an object", "--offset", "1048000", "--length", "1100001"]);
    assert_eq!(part, (0, bytes[1_048_000..2_148_001].to_vec()));
    let out = pool.path("out");
    assert_eq!(ask(&["get", "an object", "--output", out.to_str().unwrap()]), (0, Vec::new()));
    assert_eq!(std::fs::read(out).unwrap(), &bytes[..2_500_000]);
    assert_eq!(ask(&["get", "an object", "--offset", "2500000", "--length", "1"]), (2, Vec::new()));
    assert_eq!(ask(&["put", "an object", longer]).0, 8, "another length");
    assert_eq!(ask(&["put", "an object", "/nowhere/at/all"]).0, 4);
    assert_eq!(ask(&["put", "nothing", "/dev/null"]).0, 2);

    let stat = || -> Vec<Value> {
        let (code, text) = ask(&["stat", "--json"]);
        assert_eq!(code, 0);
        let document: Value = serde_json::from_slice(&text).unwrap();
        document["peers"].as_array().unwrap().clone()
    };
    let peers = stat();
    assert_eq!(peers.len(), 2, "{peers:?}");
    assert!(peers.iter().all(|peer| peer["answers"] == true), "{peers:?}");
    let objects: u64 = peers.iter().map(|peer| peer["objects"].as_u64().unwrap()).sum();
    assert_eq!(objects, 1, "{peers:?}");
    let (code, text) = ask(&["stat"]);
    assert!(code == 0 && String::from_utf8(text).unwrap().contains("one"));
    // A stopped peer does not keep the command.
    signal(&two.child, Signal::STOP);
    assert_eq!(pool.pool(&directory, &["stat", "--timeout-ms", "300"]).0, 0);
    signal(&two.child, Signal::CONT);

    assert_eq!(ask(&["rm", "an object"]).0, 0);
    eventually("nobody tells of it", || ask(&["get", "an object"]).0 == 1);
    assert_eq!(ask(&["rm", "an object"]).0, 1);
    assert!(one.metric("capacity_bytes") == 16 << 20);

    // Who leaves in order is gone at once.
    signal(&two.child, Signal::TERM);
    assert_eq!(ended(&mut two.child), Some(0));
    assert_eq!(stat().len(), 1);
    // What makes no sense, who knows nothing, and who is away.
    assert_eq!(pool.pool("", &["stat"]).0, 2);
    assert_eq!(pool.pool("nonsense", &["stat"]).0, 2);
    std::fs::write(pool.path("secret"), "not the secret of those peers").unwrap();
    assert_eq!(ask(&["stat"]).0, 4);
    assert_eq!(ask(&["get", "an object"]).0, 4, "not a miss");
    drop(one);
    assert_eq!(ask(&["stat"]).0, 4);
}

/// The lock of a peer that was killed falls to the one that waits, at the same socket.
#[test]
fn a_standby_takes_over_from_a_peer_that_is_killed() {
    let pool = Pool::new();
    let directory = pool.peer("directory", &[("serve_directory", "127.0.0.1:0")]);
    let at = directory.at("directory");
    let first = pool.peer("node", &[("directory", &at)]);
    let mut refused = pool.spawn_peer("node", &[("directory", &at)], &[]);
    assert_eq!(ended(&mut refused), Some(8));
    let mut idle = pool.spawn_peer("node", &[("directory", &at)], &["--standby"]);
    let waiting = pool.spawn_peer("node", &[("directory", &at)], &["--standby"]);
    // Who waits can be asked to end.
    std::thread::sleep(Duration::from_millis(100));
    signal(&idle, Signal::TERM);
    assert_eq!(ended(&mut idle), Some(0));
    let file = pool.path("file");
    std::fs::write(&file, vec![7; 100_000]).unwrap();
    let address = first.at("address");
    drop(first);
    let second = ready(waiting);
    assert_ne!(second.at("address"), address);
    assert_eq!(pool.pool(&at, &["put", "object", file.to_str().unwrap()]).0, 0);
    eventually("the second is in the directory", || {
        let stat = pool.pool(&at, &["stat", "--json"]).1;
        let stat: Value = serde_json::from_slice(&stat).unwrap();
        let known = |peer: &Value| {
            peer["address"] == second.at("address").as_str() && peer["answers"] == true
        };
        stat["peers"].as_array().unwrap().iter().any(known)
    });
}

const SHARD: usize = 20_000;
const KEYS: usize = 30;

fn rank(pool: &Pool, name: &str, kind: BackendKind) -> (Rank, Memory, RegionId) {
    let node = Node::builder(name)
        .dir(pool.path(&format!("cache of {name}")))
        .pool(SHARD as u64, 2, 64)
        .configure(|config| {
            config.cache.pages = ucm::Pages::Small;
            config.remote.socket = pool.path(name);
            config.backend.kind = kind;
            config.backend.dir = pool.path(&format!("files of {name}"));
            config.namespace.model = "a model".into();
        })
        .build()
        .unwrap();
    let rank = node.rank(0).start().unwrap();
    let memory = Memory::host(SHARD * KEYS).unwrap();
    let region = rank.register(memory.clone()).unwrap();
    (rank, memory, region)
}

fn key(number: usize) -> Key {
    Key::new((number as u128 / 2).to_le_bytes(), u32::from(number % 2 == 1))
}

fn shards(region: RegionId) -> Vec<(Key, Addr)> {
    (0..KEYS).map(|n| (key(n), Addr { region, offset: (n * SHARD) as u64 })).collect()
}

fn verify(memory: &Memory) {
    let mut bytes = vec![0; SHARD];
    for n in 0..KEYS {
        memory.read(n * SHARD, &mut bytes).unwrap();
        let key = key(n);
        verify_pattern(&bytes, &key.block.0, key.shard, 0, 5)
            .unwrap_or_else(|error| panic!("key {n}: {error}"));
    }
}

fn load(rank: &Rank, memory: &Memory, region: RegionId) -> Vec<Outcome> {
    memory.write(0, &vec![0xEE; memory.len()]).unwrap();
    rank.load(PoolId(0), &shards(region)).unwrap().wait(None).unwrap()
}

/// What the rank of one node dumps, the rank of another loads: its cache misses, its node's peer fetches,
/// each byte once. A third node, with files below the pool, has its own copy after that.
#[test]
fn what_one_node_dumps_the_cache_of_another_loads() {
    let pool = Pool::new();
    let left_peer = pool.peer("left", &[("serve_directory", "127.0.0.1:0")]);
    let directory = left_peer.at("directory");
    let right_peer = pool.peer("right", &[("directory", &directory)]);
    let (left, left_memory, left_region) = rank(&pool, "left", BackendKind::None);
    let mut bytes = vec![0; SHARD];
    for n in 0..KEYS {
        fill_pattern(&mut bytes, &key(n).block.0, key(n).shard, 0, 5);
        left_memory.write(n * SHARD, &bytes).unwrap();
    }
    let dumped = left.dump(PoolId(0), &shards(left_region), true).unwrap();
    let results = dumped.wait_durable(None).unwrap();
    assert!(results.iter().all(Result::is_ok), "{results:?}");
    let total = (KEYS * SHARD) as u64;
    // Whole pages.
    assert_eq!(left_peer.metric("committed_bytes"), (KEYS * SHARD.next_multiple_of(4096)) as u64);
    let (right, memory, region) = rank(&pool, "right", BackendKind::File);
    eventually("the directory is told of everything", || {
        load(&right, &memory, region) == [Outcome::Loaded]
    });
    verify(&memory);
    assert_eq!(right_peer.metric("wire_bytes"), total, "each byte once");
    // From the cache, then from the node's own copy when the others are gone.
    assert_eq!(load(&right, &memory, region), [Outcome::Loaded]);
    verify(&memory);
    assert_eq!(right_peer.metric("wire_bytes"), total);
    drop(left);
    drop(left_peer);
    assert_eq!(load(&right, &memory, region), [Outcome::Loaded]);
    verify(&memory);
    assert_eq!(right.inspect().problems, Vec::<String>::new());
    for gauge in ["pending_bytes", "leases", "waiting", "fetches_in_flight"] {
        eventually("everything has ended", || right_peer.metric(gauge) == 0);
    }
    assert!(Path::new(&pool.path("right")).exists());
}
