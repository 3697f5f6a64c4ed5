//! `suite`: what is written, and what it says when something fails.

use std::fs;

use serde_json::Value;

use crate::{bench, text};

#[test]
fn results_are_written_and_printed() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("deep/out").display().to_string();
    let jobs = ["replay-model", "load-memory", "trace"];
    let output = bench(&[&["suite", "--quick", "--out", &out][..], &jobs].concat());
    let all = text(&output);
    assert!(output.status.success(), "{all}");
    for part in [
        "== replay-model",
        "== load-memory",
        "== trace-conversation",
        "SKIP trace-synth",
        "suite 2/4: load-memory",
    ] {
        assert!(all.contains(part), "{part}: {all}");
    }
    let run: Value =
        serde_json::from_slice(&fs::read(dir.path().join("deep/out/run.json")).unwrap()).unwrap();
    let commands: Vec<&str> = run["documents"]
        .as_array()
        .unwrap()
        .iter()
        .map(|d| d["command"].as_str().unwrap())
        .collect();
    assert_eq!(commands, ["trace", "load", "trace"]);
    let page = fs::read_to_string(dir.path().join("deep/out/report.html")).unwrap();
    assert_eq!(page.matches("<section").count(), 3);
}

#[test]
fn json_is_one_document() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().display().to_string();
    let output = bench(&[
        "suite",
        "--quick",
        "--json",
        "--out",
        &out,
        "trace-conversation",
        "trace-synthetic",
    ]);
    assert!(output.status.success(), "{}", text(&output));
    let run: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(run["documents"].as_array().unwrap().len(), 1);
}

#[test]
fn jobs_that_do_not_exist_are_named() {
    let output = bench(&["suite", "--quick", "--out", "/nonexistent", "flux"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output).contains("flux") && text(&output).contains("load-slow"));
}
