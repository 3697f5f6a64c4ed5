//! Who may share a cache with whom, and what the others are told.

use serde_json::{Value, json};

use crate::parent::{Instance, Proc};

/// D8: another geometry is refused with both named; once all have left, it starts.
#[test]
fn d8_another_geometry_is_refused_with_both_named_until_all_have_left() {
    let instance = Instance::new();
    let mut first = Proc::start();
    first.join(&instance.rank(0, 2, 4));
    let mut other = Proc::start();
    let mut join = instance.rank(1, 2, 4);
    join["slots"] = 65.into();
    join["do"] = "join".into();
    let answer = other.ask(&join);
    let text = answer["error"].as_str().unwrap();
    assert!(text.contains("64+0 slots") && text.contains("65+0 slots"), "{text}");
    assert_eq!(answer["error_kind"], "Incompatible");
    // The one inside is not disturbed.
    first.load(1, &[1]);
    assert_eq!(first.started(), 1);
    first.release(1);
    first.loaded(1);
    first.ask(&json!({"do": "leave"}));
    join["do"] = Value::Null;
    assert_eq!(other.join(&join)["created"], true);
}

/// 8 ranks attach at the same moment, again and again: one creates, nobody fails.
#[test]
fn d7_eight_ranks_attach_at_once_a_hundred_times() {
    let instance = Instance::new();
    let mut procs: Vec<Proc> = (0..8).map(|_| Proc::start()).collect();
    for round in 0..100 {
        for (device, proc) in (0..).zip(&mut procs) {
            let mut join = instance.rank(device, 8, 1);
            join["do"] = "join".into();
            proc.tell(&join);
        }
        let answers: Vec<Value> = procs.iter_mut().map(|proc| proc.expect("answer")).collect();
        let created = answers.iter().filter(|answer| answer["created"] == true).count();
        assert!(
            answers.iter().all(|answer| answer["error"].is_null()),
            "round {round}: {answers:?}"
        );
        assert_eq!(created, 1, "round {round}: {answers:?}");
        let inspection = procs[0].ask(&json!({"do": "inspect"}));
        assert_eq!(
            (&inspection["members"], &inspection["problems"]),
            (&json!(8), &json!([])),
            "round {round}"
        );
        for proc in &mut procs {
            proc.tell(&json!({"do": "leave"}));
        }
        for proc in &mut procs {
            proc.expect("answer");
        }
    }
}

/// An instance directory that cannot be made is named, with what to do.
#[test]
fn an_unusable_directory_is_a_typed_error_with_the_path() {
    let instance = Instance::new();
    std::fs::write(instance.path().join("file"), b"x").unwrap();
    let mut proc = Proc::start();
    let mut join = instance.rank(0, 1, 4);
    join["dir"] = instance.path().join("file").join("cache").to_str().unwrap().into();
    join["do"] = "join".into();
    let answer = proc.ask(&join);
    assert!(answer["error"].as_str().unwrap().contains("file"), "{answer}");
    assert_eq!(answer["error_kind"], "Environment");
}

/// More memory than there is: an error with the numbers, not a killed process.
#[test]
fn m3_too_little_memory_is_an_error_with_wanted_and_available() {
    let instance = Instance::new();
    let mut proc = Proc::start();
    let mut join = instance.rank(0, 1, 4);
    join["shard_bytes"] = (1_u64 << 30).into();
    join["slots"] = 100_000.into();
    join["do"] = "join".into();
    let answer = proc.ask(&join);
    let text = answer["error"].as_str().unwrap();
    assert!(text.contains("available") && text.contains("want"), "{text}");
    assert_eq!(answer["error_kind"], "Environment");
    // The control region is memory, too: many tiny slots.
    join["shard_bytes"] = 1.into();
    join["slots"] = (1_u64 << 30).into();
    let answer = proc.ask(&join);
    let text = answer["error"].as_str().unwrap();
    assert!(text.contains("control region") && text.contains("available"), "{text}");
    assert_eq!(answer["error_kind"], "Environment");
}
