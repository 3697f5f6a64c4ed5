//! Several ranks load the same shards.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use serde_json::json;

use crate::parent::{Instance, Proc};

fn node(instance: &Instance, ranks: u32, depth: usize) -> Vec<Proc> {
    let mut procs: Vec<Proc> = (0..ranks).map(|_| Proc::start()).collect();
    for (device, proc) in (0..).zip(&mut procs) {
        proc.join(&instance.rank(device, ranks, depth));
    }
    procs
}

/// Scenario A as written: 4 ranks, 12 shards, one load per rank in flight. Step 0 is {0,1,2,3},
/// then {4..7}, {8..11}; every shard is loaded once; each rank owns 3.
#[test]
fn r3_scenario_a_rotation_keeps_four_loads_in_flight_in_three_steps() {
    let instance = Instance::new();
    let mut procs = node(&instance, 4, 1);
    let keys: Vec<u64> = (0..12).collect();
    for proc in &mut procs {
        proc.load(1, &keys);
    }
    for step in 0..3_u64 {
        let started: Vec<u64> = procs.iter_mut().map(Proc::started).collect();
        // Rank r is first in its own stride: r, r + 4, r + 8.
        let expected: Vec<u64> = (0..4).map(|rank| rank + 4 * step).collect();
        assert_eq!(started, expected, "step {step}");
        // Four are in flight and nobody has started a fifth.
        assert!(procs.iter_mut().all(|proc| proc.drain("started").is_empty()), "step {step}");
        for (proc, key) in procs.iter_mut().zip(started) {
            proc.release(key);
        }
    }
    for proc in &mut procs {
        proc.loaded(1);
        assert!(proc.drain("started").is_empty(), "a shard was loaded twice");
    }
    let inspection = procs[0].ask(&json!({"do": "inspect"}));
    assert_eq!(inspection["problems"], json!([]));
    assert_eq!((&inspection["owners"], &inspection["ready"]), (&json!(12), &json!(12)));
    assert_eq!(inspection["pinned"], json!(0));
}

/// R5: one rank alone drives the backend at full depth, also beyond its own stride; a rank that
/// comes later takes what is unclaimed, and joins the rest as a waiter.
#[test]
fn r5_ranks_claim_only_what_can_start_at_once() {
    let instance = Instance::new();
    let mut procs = node(&instance, 2, 2);
    let keys: Vec<u64> = (0..8).collect();
    procs[0].load(1, &keys);
    assert_eq!([procs[0].started(), procs[0].started()], [0, 2]);
    // Nothing beyond its depth is claimed: the other rank's stride is free, and so is 4.
    procs[1].load(1, &keys);
    assert_eq!([procs[1].started(), procs[1].started()], [1, 3]);
    procs[1].release(1);
    procs[1].release(3);
    assert_eq!([procs[1].started(), procs[1].started()], [5, 7]);
    procs[1].release(5);
    procs[1].release(7);
    // Its own stride is done: it helps with the other's, which has 0 and 2 in flight only.
    assert_eq!([procs[1].started(), procs[1].started()], [4, 6]);
    for (rank, key) in [(1, 4), (1, 6), (0, 0), (0, 2)] {
        procs[rank].release(key);
    }
    for proc in &mut procs {
        proc.loaded(1);
        assert!(proc.drain("started").is_empty());
    }
}

/// F9, A08: all waiters hear of the owner's failure at once, one of them retries, and a later task
/// can load the shard again.
#[test]
fn f9_waiters_of_a_failed_owner_hear_at_once_and_can_retry() {
    let instance = Instance::new();
    let mut procs = node(&instance, 3, 4);
    procs[0].load(1, &[5]);
    assert_eq!(procs[0].started(), 5);
    procs[1].load(1, &[5]);
    procs[2].load(1, &[5]);
    procs[0].ask(&json!({"do": "fail", "key": 5}));
    let ended = procs[0].expect("ended");
    assert_eq!(ended["outcome"], "Recompute { shards: [0], kind: Io }");
    // Exactly one of the two waiters becomes the owner; the other waits for it.
    let owner = first_to_start(&mut procs, 1..3);
    procs[owner].release(5);
    for waiter in &mut procs[1..3] {
        waiter.loaded(1);
        assert!(waiter.drain("started").is_empty());
    }
    procs[0].load(2, &[5]);
    procs[0].loaded(2);
}

/// Which of these ranks is the first to reach its backend.
pub(crate) fn first_to_start(procs: &mut [Proc], ranks: std::ops::Range<usize>) -> usize {
    let watchdog = Instant::now() + Duration::from_secs(60);
    while Instant::now() < watchdog {
        for rank in ranks.clone() {
            if !procs[rank].drain("started").is_empty() {
                return rank;
            }
        }
        std::thread::yield_now();
    }
    panic!("nobody retried");
}

/// A task with more distinct shards than slots, on four ranks at once, and an empty task.
#[test]
fn q16_a_task_larger_than_the_cache_and_an_empty_task_complete() {
    let instance = Instance::new();
    let mut procs: Vec<Proc> = (0..4).map(|_| Proc::start()).collect();
    for (device, proc) in (0..).zip(&mut procs) {
        let mut join = instance.rank(device, 4, 4);
        join["backend"] = "pattern".into();
        join["slots"] = 8.into();
        proc.join(&join);
    }
    let keys: Vec<u64> = (0..200).collect();
    for proc in &mut procs {
        proc.load(1, &keys);
    }
    for proc in &mut procs {
        proc.loaded(1);
        proc.load(2, &[]);
        proc.loaded(2);
    }
    let inspection = procs[0].ask(&json!({"do": "inspect"}));
    assert_eq!((&inspection["problems"], &inspection["pinned"]), (&json!([]), &json!(0)));
}

/// Several rounds with a file tier would hide a lost update; the pattern tells.
#[test]
fn many_ranks_and_overlapping_tasks_never_see_a_wrong_byte() {
    let instance = Instance::new();
    let mut procs: Vec<Proc> = (0..6).map(|_| Proc::start()).collect();
    for (device, proc) in (0..).zip(&mut procs) {
        let mut join = instance.rank(device, 6, 3);
        join["backend"] = "pattern".into();
        join["slots"] = 24.into();
        proc.join(&join);
    }
    for round in 0..30_u64 {
        let mut asked = BTreeSet::new();
        for (rank, proc) in (0_u64..).zip(&mut procs) {
            let keys: Vec<u64> = (0..40)
                .map(|i| (i * (rank + 3) + round * 11) % 64)
                .collect::<BTreeSet<_>>()
                .into_iter()
                .collect();
            asked.extend(keys.iter().copied());
            proc.load(round, &keys);
        }
        for proc in &mut procs {
            proc.loaded(round);
        }
        assert!(asked.len() > 24);
    }
    let inspection = procs[0].ask(&json!({"do": "inspect"}));
    assert_eq!((&inspection["problems"], &inspection["pinned"]), (&json!([]), &json!(0)));
}
