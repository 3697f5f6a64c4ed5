//! The scheduler's role.

use serde_json::{Value, json};

use crate::parent::{Instance, Proc};

fn scheduler(instance: &Instance) -> Value {
    let mut join = instance.rank(0, 2, 4);
    join["role"] = "scheduler".into();
    join
}

/// D12: a scheduler may come first and creates; the rank joins it.
#[test]
fn d12_a_scheduler_may_come_first() {
    let instance = Instance::new();
    let mut first = Proc::start();
    assert_eq!(first.join(&scheduler(&instance))["created"], true);
    let mut rank = Proc::start();
    assert_eq!(rank.join(&instance.rank(0, 2, 4))["created"], false);
    rank.load(1, &[1]);
    assert_eq!(rank.started(), 1);
    let lookup = json!({"do": "lookup", "keys": [1, 2]});
    assert_eq!(first.ask(&lookup)["there"], json!(["Filling", "Absent"]));
    rank.release(1);
    rank.loaded(1);
    assert_eq!(first.ask(&lookup)["there"], json!(["Ready", "Absent"]));
}

/// D12: or it waits for a rank; nobody coming is a typed error, never "no such file".
#[test]
fn d12_a_scheduler_may_wait() {
    let instance = Instance::new();
    let mut waits = Proc::start();
    let mut join = scheduler(&instance);
    join["first"] = "wait".into();
    join["do"] = "join".into();
    join["timeout_ms"] = 50.into();
    let answer = waits.ask(&join);
    assert_eq!(answer["error_kind"], "Environment", "{answer}");
    assert!(!answer["error"].as_str().unwrap().contains("No such file"), "{answer}");
    join["timeout_ms"] = 30_000.into();
    waits.tell(&join);
    let mut rank = Proc::start();
    assert_eq!(rank.join(&instance.rank(0, 2, 4))["created"], true);
    assert_eq!(waits.expect("answer")["created"], false);
}

/// S1: a scheduler maps no bytes of the data plane, however large; also when it created it.
#[test]
fn s1_a_scheduler_never_maps_the_data_plane() {
    let mut seen = Vec::new();
    for slots in [64, 16_384] {
        let instance = Instance::new();
        let mut proc = Proc::start();
        let mut join = scheduler(&instance);
        join["slots"] = slots.into();
        join["shard_bytes"] = 65_536.into();
        proc.join(&join);
        let memory = proc.ask(&json!({"do": "memory"}));
        let kib = |name: &str| memory[name].as_u64().unwrap();
        seen.push((kib("shmem_kib") + kib("huge_kib"), kib("virtual_kib")));
    }
    let control_kib = 16_384 * 128 / 1024;
    assert!(seen[1].0 <= seen[0].0 + control_kib, "resident shared memory grew: {seen:?} KiB");
    // Addresses grow with allocator arenas too (64 MiB for a thread that gets one of its own).
    let data_kib = 16_384 * 65_536 / 1024;
    assert!(seen[1].1 <= seen[0].1 + data_kib / 4, "the data plane was mapped: {seen:?} KiB");
}

/// S2, S3: what a lease promised survives any pressure until it was consumed exactly n times.
#[test]
fn s3_a_lease_holds_until_consumed_by_each_rank() {
    let instance = Instance::new();
    let mut ranks: Vec<Proc> = (0..2).map(|_| Proc::start()).collect();
    for (device, rank) in (0..).zip(&mut ranks) {
        let mut join = instance.rank(device, 2, 4);
        join["backend"] = "pattern".into();
        join["slots"] = 16.into();
        rank.join(&join);
    }
    let mut join = scheduler(&instance);
    join["slots"] = 16.into();
    let mut holder = Proc::start();
    holder.join(&join);
    ranks[0].load(1, &[1, 2, 3]);
    ranks[0].loaded(1);
    let lease =
        holder.ask(&json!({"do": "lease", "keys": [1, 2, 3, 99], "consumers": 2, "seconds": 3600}));
    assert_eq!(lease["covered"], 3, "{lease}");
    let pressure: Vec<u64> = (100..200).collect();
    ranks[1].load(2, &pressure);
    ranks[1].loaded(2);
    let lookup = json!({"do": "lookup", "keys": [1, 2, 3]});
    assert_eq!(holder.ask(&lookup)["prefix"], 3, "a leased shard was evicted");
    let redeem = json!({"do": "redeem", "ticket": lease["ticket"]});
    assert_eq!(ranks[0].ask(&redeem)["left"], 1);
    assert_eq!(holder.ask(&lookup)["prefix"], 3);
    assert_eq!(ranks[1].ask(&redeem)["left"], 0);
    assert_eq!(ranks[0].ask(&redeem)["gone"], true);
    // The pins go without waiting for the deadline, an hour from now.
    while ranks[0].ask(&json!({"do": "inspect"}))["pinned"] != 0 {
        std::thread::yield_now();
    }
    ranks[1].load(3, &pressure);
    ranks[1].loaded(3);
    assert_eq!(holder.ask(&lookup)["prefix"], 0);
}

/// S3: the death of its holder releases a lease whole.
#[test]
fn s3_a_lease_falls_with_its_holder() {
    let instance = Instance::new();
    let mut rank = Proc::start();
    let mut join = instance.rank(0, 2, 4);
    join["backend"] = "pattern".into();
    rank.join(&join);
    rank.load(1, &[1, 2, 3]);
    rank.loaded(1);
    let mut holder = Proc::start();
    holder.join(&scheduler(&instance));
    let lease =
        holder.ask(&json!({"do": "lease", "keys": [1, 2, 3], "consumers": 1, "seconds": 3600}));
    assert_eq!(rank.ask(&json!({"do": "inspect"}))["pinned"], 3);
    holder.kill();
    // The record is freed last: by then the pins and the lease are gone.
    while rank.ask(&json!({"do": "inspect"}))["members"] != 1 {
        std::thread::yield_now();
    }
    assert_eq!(rank.ask(&json!({"do": "inspect"}))["pinned"], 0);
    assert_eq!(rank.ask(&json!({"do": "redeem", "ticket": lease["ticket"]}))["gone"], true);
    let inspection = rank.ask(&json!({"do": "inspect"}));
    assert_eq!((&inspection["problems"], &inspection["members"]), (&json!([]), &json!(1)));
}
