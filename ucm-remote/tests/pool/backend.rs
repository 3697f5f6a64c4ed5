//! The pool as a storage backend, alone and as a tier of the stack, in processes of their own.
//!
//! Mutants, each seen to fail a test here: the shard is not part of the key; a copy through the arena
//! begins at the object's first byte in every round; an object of another length is taken for a miss.

use std::{
    path::Path,
    sync::{Arc, mpsc},
    time::Duration,
};

use ucm_remote::{PoolBackend, PoolBackendOptions};
use ucm_store::{
    Backend, Completed, ErrorKind, IoMemory, MemoryBackend, Op, Presence, Promotion, Sink, Stack,
    Tier,
    testing::{Collector, Keeps, conformance},
    verify_pattern,
};

use crate::{
    kit::{Node, PAGE, Setup, directory, eventually, idle, soon},
    processes::{Process, orders},
};

const IDENTITY: [u8; 32] = [0x5a; 32];
const SHARDS: u32 = 3;
const LEN: usize = 9 * 4096 + 100;

fn options() -> PoolBackendOptions {
    PoolBackendOptions::new(IDENTITY, SHARDS)
}

fn block(number: u64) -> [u8; 16] {
    let mut block = *b"........a-block.";
    block[..8].copy_from_slice(&number.to_le_bytes());
    block
}

#[test]
fn it_keeps_what_every_backend_promises() {
    // The backend outlives its node's client side by its own reference; the agent must live, too.
    let nodes = std::sync::Mutex::new(Vec::new());
    conformance(Keeps::Patterns(20_003), || {
        let node = Setup::new("node", 1200).start(&directory());
        let backend = Arc::new(node.agent.backend(options()).unwrap());
        nodes.lock().unwrap().push(node);
        backend
    });
    nodes.lock().unwrap().iter().for_each(idle);
}

/// Without a place in the medium it is brought round by round through the arena.
#[test]
fn an_object_that_finds_no_place_is_loaded_through_the_arena() {
    let directory = directory();
    let owner = Setup::new("owner", 300).start(&directory);
    let reader = Setup { arena: 64 * PAGE + 4096, ..Setup::new("reader", 2) }.start(&directory);
    let (from, to) =
        (owner.agent.backend(options()).unwrap(), reader.agent.backend(options()).unwrap());
    let len = (700 << 10) + 77;
    let mut bytes = vec![0; len];
    ucm_store::fill_pattern(&mut bytes, &block(1), 2, 0, 0);
    let sink = Collector::new();
    from.dump(vec![sink.op_with(block(1), 2, &bytes).1]);
    assert_eq!(sink.wait_one().0, Ok(()));
    eventually("it is told of", || reader_sees(&to, 1, 2));
    to.load(vec![sink.op(block(1), 2, len).1]);
    let (result, seen) = sink.wait_one();
    assert_eq!((result, seen == bytes), (Ok(()), true));
    let stats = reader.agent.stats();
    assert_eq!((stats.arena_bytes, stats.wire_bytes), (len as u64, len as u64));
    // Larger than anybody's memory.
    from.dump(vec![sink.op(block(3), 0, 301 * 4096).1]);
    assert_eq!(sink.wait_one().0, Err(ErrorKind::NoSpace));
    drop((from, to));
    idle(&reader);
    idle(&owner);
}

fn reader_sees(backend: &PoolBackend, number: u64, shard: u32) -> bool {
    backend.contains(&[(block(number), shard)]) == [Presence::There]
}

/// Set up in children: the pool above a home of their own.
fn stack(socket: &Path) -> (Stack, Arc<MemoryBackend>) {
    let pool = Arc::new(PoolBackend::connect(socket, options()).unwrap());
    let home = Arc::new(MemoryBackend::new());
    let tiers = vec![
        Tier::new("pool", pool).promotion(Promotion::Always),
        Tier::new("home", Arc::clone(&home) as Arc<dyn Backend>),
    ];
    (Stack::new(tiers).unwrap(), home)
}

struct Channel(mpsc::Sender<Completed>);

impl Sink for Channel {
    fn complete(&self, completed: Completed) {
        let _ = self.0.send(completed);
    }
}

/// The child of [`processes::entry`](crate::processes): a rank whose cache asks a stack.
pub(crate) fn rank(socket: &Path) {
    let (stack, home) = stack(socket);
    let run = |load: bool, first: u64, count: u64| {
        let (sender, ends) = mpsc::channel();
        let sink: Arc<dyn Sink> = Arc::new(Channel(sender));
        let ops = (first..first + count).flat_map(|n| (0..SHARDS).map(move |shard| (n, shard)));
        let ops: Vec<Op> = ops
            .map(|(number, shard)| {
                let memory = IoMemory::private(LEN).unwrap();
                if !load {
                    let mut bytes = vec![0; LEN];
                    ucm_store::fill_pattern(&mut bytes, &block(number), shard, 0, 0);
                    memory.write(0, &bytes).unwrap();
                }
                let token = number * u64::from(SHARDS) + u64::from(shard);
                Op::new(block(number), shard, token, memory, Arc::clone(&sink))
            })
            .collect();
        drop(sink);
        let total = ops.len();
        if load {
            stack.load(ops)
        } else {
            stack.dump(ops)
        }
        let mut good = 0;
        for ended in ends {
            if ended.result.is_err() {
                continue;
            }
            good += 1;
            if load {
                let (number, shard) =
                    (ended.token / u64::from(SHARDS), ended.token % u64::from(SHARDS));
                let mut bytes = vec![0; LEN];
                ended.memory.read(0, &mut bytes).unwrap();
                let shard = u32::try_from(shard).unwrap();
                verify_pattern(&bytes, &block(number), shard, 0, 0).unwrap();
            }
        }
        format!("{good} of {total}")
    };
    orders(|order, numbers| match (order, numbers) {
        ("load", [first, count]) => run(true, *first, *count),
        ("dump", [first, count]) => run(false, *first, *count),
        // In the home only.
        ("keep", [first, count]) => {
            for number in *first..first + count {
                for shard in 0..SHARDS {
                    let mut bytes = vec![0; LEN];
                    ucm_store::fill_pattern(&mut bytes, &block(number), shard, 0, 0);
                    home.insert(&block(number), shard, bytes.into()).unwrap();
                }
            }
            "kept".to_owned()
        }
        ("home", []) => format!("{}", home.len()),
        ("reports", []) => {
            let hits: Vec<u64> = stack.report().iter().map(|tier| tier.hits).collect();
            format!("{hits:?}")
        }
        other => panic!("no order {other:?}"),
    });
}

fn node(name: &'static str, directory: &Arc<ucm_remote::EmbeddedDirectory>, at: &Path) -> Node {
    let setup = Setup { shared: true, arena: 16 * PAGE, ..Setup::new(name, 512) };
    let mut node = setup.with(|b| b.negative(Duration::ZERO)).start(directory);
    node.agent.serve_ranks(at).unwrap();
    node
}

/// What ranks of one node dump, ranks of another load, each byte over the wire once for all of them; what
/// only one rank's home has is found by others after that rank has read it; a rank that is killed
/// costs the others nothing.
#[test]
fn a_miss_of_the_cache_goes_to_the_pool_and_a_dump_is_kept_there() {
    let directory = directory();
    let folder = tempfile::tempdir().unwrap();
    let (left_at, right_at) = (folder.path().join("left"), folder.path().join("right"));
    let (left, right) = (node("left", &directory, &left_at), node("right", &directory, &right_at));
    let start = |at: &Path| {
        let rank = Process::start(&format!("stack {}", at.display()));
        rank.ready();
        rank
    };
    let (mut writer, mut one, mut two) = (start(&left_at), start(&right_at), start(&right_at));
    let mut victim = start(&right_at);
    let ask = |rank: &mut Process, order: &str| rank.ask(order).unwrap();
    assert_eq!(ask(&mut writer, "dump 0 10"), "30 of 30");
    assert_eq!(ask(&mut writer, "home"), "30", "the dump went to both");
    let told = |first: u64, count: u64, by: &Node| {
        let keys: Vec<_> = (first..first + count).map(block).collect();
        eventually("the directory is told of all shards", || {
            let boot = by.agent.boot().unwrap();
            let all = keys.len() * usize::try_from(SHARDS).unwrap();
            directory_of(&directory, &keys, boot) == all
        });
    };
    told(0, 10, &left);
    victim.say("load 0 10");
    let (a, b) = std::thread::scope(|scope| {
        let one = scope.spawn(|| ask(&mut one, "load 0 10"));
        let two = scope.spawn(|| ask(&mut two, "load 0 10"));
        victim.kill();
        (one.join().unwrap(), two.join().unwrap())
    });
    assert_eq!((a.as_str(), b.as_str()), ("30 of 30", "30 of 30"));
    assert_eq!(right.agent.stats().wire_bytes, (30 * LEN) as u64, "each byte once");
    assert_eq!(ask(&mut one, "reports"), "[30, 0]");
    // Nobody has it.
    assert_eq!(ask(&mut one, "load 500 2"), "0 of 6");
    // One rank's home has it, and the pool after that.
    assert_eq!(ask(&mut two, "keep 20 4"), "kept");
    assert_eq!(ask(&mut one, "load 20 4"), "0 of 12");
    assert_eq!(ask(&mut two, "load 20 4"), "12 of 12");
    told(20, 4, &right);
    assert_eq!(ask(&mut one, "load 20 4"), "12 of 12");
    assert_eq!(ask(&mut writer, "load 20 4"), "12 of 12");
    assert_eq!(left.agent.stats().wire_bytes, (12 * LEN) as u64);
    drop((writer, one, two, victim));
    idle(&left);
    idle(&right);
}

fn directory_of(
    directory: &ucm_remote::EmbeddedDirectory,
    blocks: &[[u8; 16]],
    boot: ucm_remote::Token,
) -> usize {
    let keys = blocks.iter().flat_map(|block| {
        (0..SHARDS).map(|shard| {
            let mut identity = IDENTITY;
            for (byte, mixed) in identity.iter_mut().zip(shard.to_le_bytes()) {
                *byte ^= mixed;
            }
            ucm_remote::ObjectKey { block: *block, identity }
        })
    });
    let keys: Vec<_> = keys.collect();
    let told = ucm_remote::Directory::locate(directory, &keys, soon()).unwrap();
    told.iter().filter(|records| records.iter().any(|record| record.boot == boot)).count()
}
