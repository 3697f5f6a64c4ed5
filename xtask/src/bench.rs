//! `cargo xtask bench`: the standard benchmark set, or a comparison of two runs.
//!
//! Owns: where results go: `target/bench/`, in a folder named by the UTC time, `run.json` and `report.html`.
//! **Invariant:** measurements are made with release builds only.

use std::{
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use crate::{
    shell::{Failure, Shell, print},
    workspace::Workspace,
};

/// Options of `cargo xtask bench`.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Args {
    /// Benchmarks to run (default: the standard set)
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Small sizes and few repeats: shows that everything works, its figures mean little
    #[arg(long)]
    quick: bool,
    /// Where to write (default: target/bench/ and the UTC time)
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Compare two runs (each a run.json or its folder) instead of measuring
    #[arg(long, num_args = 2, value_names = ["A", "B"], conflicts_with_all = ["names", "quick", "out"])]
    compare: Vec<PathBuf>,
    /// Arguments handed to ucm-bench as they are
    #[arg(last = true, value_name = "UCM-BENCH ARGS")]
    rest: Vec<String>,
}

impl Args {
    /// What `ci` runs.
    pub(crate) fn smoke() -> Self {
        Self { quick: true, ..Self::default() }
    }
}

/// Builds ucm-bench and runs it.
pub(crate) fn run(args: &Args, workspace: &Workspace) -> Result<(), Failure> {
    Shell::cargo(&["build", "--release", "-p", "ucm-bench"]).run()?;
    let program = workspace.target().join("release/ucm-bench");
    if let [first, second] = args.compare.as_slice() {
        let paths = [run_file(first), run_file(second)];
        return Shell::program(program).args(&["compare"]).args(&paths).args(&args.rest).run();
    }
    let out = args.out.clone().unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        workspace.target().join("bench").join(utc(now))
    });
    let mut shell = Shell::program(program).args(&["suite"]).args(&args.names);
    if args.quick {
        shell = shell.args(&["--quick"]);
    }
    // A suite with failures has written its results all the same.
    let done = shell.args(&["--out", &out.to_string_lossy()]).args(&args.rest).run();
    for (what, file) in [("results", "run.json"), ("report", "report.html")] {
        let path = out.join(file);
        if path.is_file() {
            print(&format!("{what}: {}", path.display()));
        }
    }
    done
}

fn run_file(path: &Path) -> String {
    let file = if path.is_dir() { path.join("run.json") } else { path.to_path_buf() };
    file.to_string_lossy().into_owned()
}

/// Seconds since 1970 as `2026-01-31T12-00-59Z` (no colons: it names a folder).
fn utc(seconds: u64) -> String {
    let (mut days, rest) = (seconds / 86_400, seconds % 86_400);
    let mut year = 1970;
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{:02}T{hour:02}-{minute:02}-{second:02}Z", days + 1)
}

#[cfg(test)]
mod tests {
    use super::utc;

    #[test]
    fn folder_names_are_utc_times() {
        assert_eq!(utc(0), "1970-01-01T00-00-00Z");
        assert_eq!(utc(951_782_400), "2000-02-29T00-00-00Z");
        assert_eq!(utc(1_735_689_599), "2024-12-31T23-59-59Z");
        assert_eq!(utc(1_735_689_600), "2025-01-01T00-00-00Z");
        assert_eq!(utc(1_772_323_199), "2026-02-28T23-59-59Z");
    }
}
