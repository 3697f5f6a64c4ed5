//! S4: a process is killed while it dumps; what it leaves in the backend is absent or whole.

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    sync::Arc,
};

use ucm_ctrl::FailKind;
use ucm_queue::{DumpRef, DumpTask, Outcome};
use ucm_store::{FileBackend, FileConfig};

use crate::support::*;

const BYTES: u64 = 64 << 10;
const KEYS: u64 = 64;
const DIR: &str = "UCM_QUEUE_CRASH_DIR";

fn files(dir: &Path) -> Arc<FileBackend> {
    Arc::new(FileBackend::open(FileConfig::new(dir, b"crash test".to_vec())).unwrap())
}

/// The child: dumps for ever, and says when each round is durable.
#[test]
#[ignore = "the child of s4"]
fn s4_child() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    let node = Node::new(128, BYTES);
    let rank = node.rank();
    let queue = rank.builder(files(Path::new(&dir))).dump_depth(8).start().unwrap();
    let buffer = Buffer::of(&queue, KEYS, BYTES);
    (0..KEYS).for_each(|i| buffer.fill(key(i), i));
    for round in 0.. {
        let keys = (0..8).map(|i| (round * 8 + i) % KEYS);
        let shards =
            keys.map(|i| DumpRef { key: key(i), src: buffer.addr(i), len: None }).collect();
        let task = DumpTask { shards, durable: true, ..DumpTask::default() };
        let handle = queue.dump(task).unwrap();
        assert!(handle.wait_durable(watchdog()).unwrap().iter().all(Result::is_ok));
        println!("durable {round}");
    }
}

#[test]
fn s4_a_crash_at_any_point_leaves_objects_absent_or_whole() {
    let mut random = Random(4);
    let (mut whole, mut absent) = (0, 0);
    for _ in 0..12 {
        let dir = tempfile::tempdir().unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["crash::s4_child", "--exact", "--ignored", "--nocapture"])
            .env(DIR, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // Killed some time after a random round: in the middle of anything.
        let rounds = usize::try_from(random.below(6)).unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        let durable = lines.filter(|line| line.contains("durable")).take(rounds).count() as u64;
        assert_eq!(durable, rounds as u64);
        for _ in 0..random.below(200_000) {
            std::hint::spin_loop();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let node = Node::new(128, BYTES);
        let rank = node.rank();
        let queue = rank.builder(files(dir.path())).start().unwrap();
        let buffer = Buffer::of(&queue, KEYS, BYTES);
        let handle = queue.submit(task_of(&buffer, (0..KEYS).map(key))).unwrap();
        for (i, outcome) in (0..).zip(outcomes(&handle)) {
            match outcome {
                Outcome::Loaded => {
                    buffer.assert_holds(key(i), i);
                    whole += 1;
                }
                Outcome::Recompute { kind: FailKind::Missing, .. } => {
                    assert!(i >= durable * 8, "shard {i} was durable");
                    absent += 1;
                }
                other => panic!("shard {i}: {other:?}"),
            }
        }
    }
    assert!(whole > 0 && absent > 0, "{whole} whole, {absent} absent: the kills prove nothing");
}
