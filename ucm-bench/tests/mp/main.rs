//! Whole commands, as a user runs them: the real program, its rank processes, its exit codes.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod ctrl;
mod directory;
mod net;
mod replay;
mod suite;

use std::{
    path::Path,
    process::{Command, Output},
};

use serde_json::Value;

/// Runs the program with a generated trace, whatever lies in folders above.
fn bench(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ucm-bench"))
        .args(words)
        .env("UCM_TRACES", "/nonexistent")
        .output()
        .unwrap()
}

fn text(output: &Output) -> String {
    format!(
        "{}\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// The results of a command that must end well.
fn results(words: &[&str]) -> Value {
    let output = bench(&[words, &["--json", "--quiet"]].concat());
    assert!(output.status.success(), "{words:?}: {}", text(&output));
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    document["results"].clone()
}

fn number(results: &Value, name: &str) -> u64 {
    let value = &results[name];
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count")]
    let number = value.as_f64().unwrap_or_else(|| panic!("{name} is {value}")) as u64;
    number
}

fn written(dir: &Path, name: &str, content: &str) -> String {
    let path = dir.join(name);
    std::fs::write(&path, content).unwrap();
    path.display().to_string()
}
