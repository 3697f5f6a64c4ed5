//! `directory`: its fields, and that all answers are right while a peer goes.

use serde_json::Value;

use crate::{bench, text};

#[test]
fn answers_are_right_and_all_fields_are_reported() {
    let args = "directory --json --quiet --keys 5000 --questions 50 --runs 2 --clients 2";
    let output = bench(&args.split(' ').collect::<Vec<_>>());
    assert!(output.status.success(), "{}", text(&output));
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    let results = &document["results"];
    assert_eq!(results["wrong_records"], 0);
    let fields = [
        "route_us_p50",
        "route_us_p99",
        "route_during_removal_us_p99",
        "announce_per_s",
        "bytes_per_key",
        "node_removal_ms",
    ];
    for field in fields {
        assert!(results[field].as_f64().is_some_and(|v| v > 0.0), "{field}: {results:#}");
    }
}

#[test]
fn a_server_that_is_not_there_is_an_error_of_a_peer() {
    let args = "directory --backend redis --address redis://127.0.0.1:1 --keys 64";
    let output = bench(&args.split(' ').collect::<Vec<_>>());
    assert_eq!(output.status.code(), Some(4), "{}", text(&output));
}
