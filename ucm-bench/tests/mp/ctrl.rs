//! `ctrl`: its fields, and the promises that hold on any machine, however busy.

use serde_json::Value;

use crate::{bench, text};

/// All fields that scripts rely on; waiting (W2) and idling cost nothing.
#[test]
fn w2_a_small_run_has_all_fields_and_waiting_costs_nothing() {
    let small = ["--slots", "1024", "--keys", "1000", "--scaling", "1000,3000"];
    let short = ["--runs", "2", "--wakes", "20", "--wait-ms", "100", "--idle-seconds", "1"];
    let bounds = ["--assert", "waiter_cpu_ms_per_s<10", "--assert", "idle_wakeups<=0"];
    let args: Vec<&str> = ["ctrl", "--json", "--quiet", "--ranks", "1,2"]
        .into_iter()
        .chain(small)
        .chain(short)
        .chain(bounds)
        .chain(["--assert", "waiting_wakeups<=0"])
        .collect();
    let output = bench(&args);
    assert!(output.status.success(), "{}", text(&output));
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    let results = &document["results"];
    for name in [
        "hit_ns",
        "hit_floor_ns",
        "hit_over_floor_ns",
        "hit_chase_floor_ns",
        "hit_over_chase_ns",
        "hit_pin_floor_ns",
        "lookup_ns_per_block",
        "prefix_lookup_ns_per_block",
        "miss_ns",
        "prealloc_acquire_ns",
        "unprepared_acquire_ns",
        "prealloc_saved_ns",
        "wake_us_p50",
        "wake_us_p99",
        "futex_floor_us_p50",
        "futex_floor_us_p99",
        "wake_ratio",
        "waiters_cpu_ms",
        "waiter_cpu_ms_per_s",
        "hit_growth",
    ] {
        for field in [name.to_owned(), format!("{name}_min"), format!("{name}_max")] {
            assert!(results[&field].as_f64().is_some_and(f64::is_finite), "{field}: {results:#}");
        }
        assert_eq!(document["samples"][name].as_array().unwrap().len(), 2, "{name}");
    }
    let slots: Vec<_> =
        results["scaling"].as_array().unwrap().iter().map(|size| &size["slots"]).collect();
    assert_eq!(slots, [1000, 3000]);
    assert!(results["scaling"][1]["lookup_ns_per_block"].as_f64().unwrap() > 0.0);
    assert_eq!(results["hit_ns_ranks"][1]["ranks"], 2);
    assert!(results["hit_ns_ranks"][1]["hit_ns"].as_f64().unwrap() > 0.0);
    assert!(results["bytes_per_slot"].as_f64().unwrap() > 64.0);
    assert!(results["watched_threads"].as_u64().unwrap() > 2);
    assert_eq!(document["plots"].as_array().unwrap().len(), 2);
}

#[test]
fn more_keys_than_slots_are_refused_with_both_numbers() {
    let output = bench(&["ctrl", "--slots", "2000", "--keys", "2001"]);
    assert_eq!(output.status.code(), Some(2));
    let text = text(&output);
    assert!(text.contains("2001") && text.contains("2000"), "{text}");
}
