//! The idle window: preallocation, and no work at all.

use std::time::Duration;

use ucm_ctrl::{Acquired, Key};

use crate::support::*;

const BYTES: u64 = 4096;

fn block(n: u8, shard: u32) -> Key {
    Key::new([n; 16], shard)
}

#[test]
fn p1_scenario_e() {
    let node = Node::with_reserved(8, 4, BYTES);
    let rank = node.rank();
    let queue = rank.builder(Script::new()).start().unwrap();
    let buffer = Buffer::of(&queue, 8, BYTES);
    // {B0.1, B1.1, B2.1}, and B3.3, which has no next shard.
    let keys = [block(0, 1), block(1, 1), block(2, 1), block(3, 3)];
    assert_all_loaded(&queue.submit(task_of(&buffer, keys)).unwrap());
    eventually("the idle window", || queue.stats().preallocated == 3);
    let before = node.inspect();
    assert_eq!(before.pools[0].idle, 3);
    let Acquired::Owner(fill) = rank.pool.acquire(&block(0, 2)).unwrap() else { panic!() };
    let other = node.rank();
    assert!(matches!(other.pool.acquire(&block(0, 2)).unwrap(), Acquired::Waiter(_)));
    let after = node.inspect();
    assert_eq!(after.statistics.victim_searches, before.statistics.victim_searches);
    assert_eq!(after.statistics.takeovers, before.statistics.takeovers + 1);
    // Nothing was reserved for a block that was not asked for, or beyond the last shard.
    assert_eq!(queue.stats().preallocated, 3);
    drop(fill);
    // The next layer of the task takes the reserved slots.
    let next = [block(0, 2), block(1, 2), block(2, 2)];
    assert_all_loaded(&queue.submit(task_of(&buffer, next)).unwrap());
    (0..3_u8).for_each(|i| buffer.assert_holds(block(i, 2), u64::from(i)));
}

#[test]
fn q15_a_new_task_ends_the_idle_window() {
    // In simulated time: the window is a step per key, and a submission between two steps ends it.
    let mut world = World::new(
        Node::new(64, BYTES),
        1,
        64,
        |_| Box::new(|_, _| (Duration::ZERO, Fate::Good)),
        |_, builder| builder.backend_depth(64),
    );
    let now = world.now;
    let rank = &mut world.ranks[0];
    let submit = |rank: &SimRank| {
        let keys = (0..10).map(|n| block(n, 0));
        rank.queue.submit(task_of(&rank.buffer, keys), now).unwrap()
    };
    let first = submit(rank);
    while !first.is_done() {
        rank.backend.advance(now);
        rank.device.advance(now);
        rank.queue.turn(now);
    }
    assert!(rank.queue.prewarm_step() && rank.queue.prewarm_step());
    assert_eq!(rank.queue.stats().preallocated, 2);
    let second = submit(rank);
    rank.queue.turn(now);
    assert!(rank.device.next_due().is_some(), "the task's copies came first");
    assert_eq!(rank.queue.stats().preallocated, 2);
    world.settle();
    assert_all_loaded(&second);
    let stats = world.ranks[0].queue.stats();
    assert_eq!((stats.preallocated, stats.prealloc_skipped), (10, 2), "the new task's window");
}

/// Context switches of the thread with this name, by the kernel's count.
fn switches_of(name: &str) -> u64 {
    for entry in std::fs::read_dir("/proc/self/task").unwrap() {
        let path = entry.unwrap().path();
        let Ok(comm) = std::fs::read_to_string(path.join("comm")) else { continue };
        if comm.trim() != name {
            continue;
        }
        let status = std::fs::read_to_string(path.join("status")).unwrap();
        return status
            .lines()
            .filter(|line| line.contains("ctxt_switches"))
            .map(|line| line.rsplit(char::is_whitespace).next().unwrap().parse::<u64>().unwrap())
            .sum();
    }
    panic!("no thread {name}");
}

#[test]
fn q9_an_idle_queue_never_wakes_up() {
    let node = Node::new(64, BYTES);
    let rank = node.rank();
    // A rank number of its own makes the thread's name unique.
    let queue = rank.builder(Script::new()).rank(77, 78).start().unwrap();
    let buffer = Buffer::of(&queue, 40, BYTES);
    let mut task = task_of(&buffer, (0..40).map(key));
    // A deadline that is met must not wake it up later.
    task.requests[0].deadline = Some(ucm_queue::Deadline::After(Duration::from_millis(300)));
    assert_all_loaded(&queue.submit(task).unwrap());
    let name = "ucm-queue-77";
    let mut quiet = switches_of(name);
    eventually("the thread's sleep", || {
        std::thread::sleep(Duration::from_millis(20));
        let now = switches_of(name);
        std::mem::replace(&mut quiet, now) == now
    });
    let turns = queue.stats().turns;
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(switches_of(name), quiet, "two idle seconds without a wake-up");
    assert_eq!(queue.stats().turns, turns);
    assert_all_loaded(&queue.submit(task_of(&buffer, (0..40).map(key))).unwrap());
}
