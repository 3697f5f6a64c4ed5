//! `cargo xtask crash`: death, stop and expulsion at every failpoint.
//!
//! Owns: which tests that is, and the feature they need.
//! **Invariant:** a run in which no test was executed is a failure; a random choice names its seed.

use crate::{
    shell::{Failure, Shell, fail},
    summary::LibtestReader,
};

/// The packages with failpoints, the test binary, and what its tests' names contain.
const SUITES: [(&str, &str); 2] = [("ucm-ctrl", "crash::"), ("ucm", "crash::")];

/// Options of `cargo xtask crash`.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Args {
    /// The whole matrix (minutes) instead of a random slice (within a minute)
    #[arg(long)]
    full: bool,
    /// Only runs at points whose name contains this
    #[arg(long, value_name = "TEXT", conflicts_with = "full")]
    point: Option<String>,
    /// Repeat the choice of an earlier run
    #[arg(long)]
    seed: Option<u64>,
}

/// Runs the matrix.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let choice = if args.full { "full" } else { args.point.as_deref().unwrap_or_default() };
    for (package, filter) in SUITES {
        let mut shell =
            Shell::cargo(&["test", "-p", package, "--features", "failpoints", "--test", "mp"])
                .args(&["--", filter, "--nocapture", "--test-threads=1"])
                .env("UCM_CRASH", choice);
        if let Some(seed) = args.seed {
            shell = shell.env("UCM_CRASH_SEED", &seed.to_string());
        }
        let mut reader = LibtestReader::default();
        let good = shell.watch(|line| reader.line(line))?;
        let summary = reader.finish();
        if !good {
            return fail(format!("crash: {package}: {summary}"));
        }
        if summary.total() == 0 {
            return fail(format!("crash: {package} has no test `{filter}`"));
        }
    }
    Ok(())
}
