//! `cargo xtask test`: every test of the workspace, and an honest closing line.
//!
//! Owns: the choice of runner and the sum over runs.
//! **Invariant:** the last line is `N passed, N failed, N skipped`, also when nothing could be
//! built (which counts as one failure).

use std::fs;

use crate::{
    servers,
    shell::{Failure, Shell, fail, print, say},
    summary::{LibtestReader, Summary, from_junit},
    workspace::Workspace,
};

/// nextest writes below the workspace root, wherever the target folder is.
const JUNIT: &str = "target/nextest/default/junit.xml";
/// Tests that want features which an ordinary build does not have: package, features, test target.
const WITH_FEATURES: [(&str, &str, &str); 3] = [
    ("ucm-transport", "cuda,rocm,testing", "gpu"),
    ("ucm-remote", "redis", "redis"),
    ("ucm-store", "object-store,testing", "object"),
];
const CLOSING_LINE: &str = "xtask/tests.txt";

/// Options of `cargo xtask test`.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Args {
    /// Only these packages (default: all)
    #[arg(short, long = "package", value_name = "NAME")]
    packages: Vec<String>,
    /// Leave the doctests out
    #[arg(long)]
    no_doc: bool,
    /// Use `cargo test` even when cargo-nextest is installed
    #[arg(long)]
    no_nextest: bool,
    /// Only tests whose name contains one of these
    #[arg(value_name = "FILTER")]
    filters: Vec<String>,
    /// Arguments handed to the test runner as they are
    #[arg(last = true, value_name = "RUNNER ARGS")]
    rest: Vec<String>,
}

/// Runs the tests, then the doctests; prints why tests were skipped and the closing line.
pub(crate) fn run(args: &Args, workspace: &Workspace) -> Result<(), Failure> {
    let mut summary = Summary::default();
    let nextest = !args.no_nextest && Shell::cargo(&["nextest", "--version"]).quiet().is_some();
    let good = if nextest {
        with_nextest(args, workspace, &mut summary)?
    } else {
        say("cargo-nextest is not in use: cargo test runs the tests");
        with_libtest(args, &mut summary)?
    };
    let good = with_features(args, workspace, nextest, &mut summary)? && good;
    let docs_good = args.no_doc || doctests(args, workspace, &mut summary)?;
    if !(good && docs_good) {
        summary.broken_run();
    }
    if let Err(error) = summary.store(&workspace.target().join(CLOSING_LINE)) {
        say(&format!("cannot keep the closing line for later: {error}"));
    }
    summary.reasons().for_each(|reason| print(&reason));
    print(&summary.to_string());
    if summary.total() == 0 {
        return fail("no test matches");
    }
    if summary.failed() > 0 { fail("") } else { Ok(()) }
}

/// The counts of the last run of `test`, if there was one.
pub(crate) fn last_summary(workspace: &Workspace) -> Option<Summary> {
    Summary::parse(&fs::read_to_string(workspace.target().join(CLOSING_LINE)).ok()?)
}

fn with_nextest(
    args: &Args,
    workspace: &Workspace,
    summary: &mut Summary,
) -> Result<bool, Failure> {
    nextest_run(args, &selection(args), workspace, summary)
}

fn nextest_run(
    args: &Args,
    selection: &[String],
    workspace: &Workspace,
    summary: &mut Summary,
) -> Result<bool, Failure> {
    let junit = workspace.root().join(JUNIT);
    match fs::remove_file(&junit) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return fail(format!("cannot remove the old {}: {error}", junit.display()));
        }
        _ => {}
    }
    let good = Shell::cargo(&["nextest", "run", "--no-fail-fast", "--no-tests", "pass"])
        .args(selection)
        .args(&args.filters)
        .args(&args.rest)
        .status()?;
    if let Ok(xml) = fs::read_to_string(&junit) {
        summary.add(&from_junit(&xml));
    }
    if !good {
        summary.broken_run();
    }
    Ok(good)
}

/// The tests of [`WITH_FEATURES`], as far as their packages are chosen.
fn with_features(
    args: &Args,
    workspace: &Workspace,
    nextest: bool,
    summary: &mut Summary,
) -> Result<bool, Failure> {
    let mut good = true;
    for (package, features, target) in WITH_FEATURES {
        if !args.packages.is_empty() && !args.packages.iter().any(|chosen| chosen == package) {
            continue;
        }
        if features == "redis" {
            servers::redis();
        }
        let wanted = ["-p", package, "--features", features, "--test", target];
        let wanted: Vec<String> = wanted.map(str::to_owned).to_vec();
        good &= if nextest {
            nextest_run(args, &wanted, workspace, summary)?
        } else {
            libtest_run(args, &wanted, summary)?
        };
    }
    Ok(good)
}

fn with_libtest(args: &Args, summary: &mut Summary) -> Result<bool, Failure> {
    let mut wanted = selection(args);
    wanted.push("--all-targets".to_owned());
    libtest_run(args, &wanted, summary)
}

fn libtest_run(args: &Args, selection: &[String], summary: &mut Summary) -> Result<bool, Failure> {
    let mut reader = LibtestReader::default();
    let good = Shell::cargo(&["test", "--no-fail-fast"])
        .args(selection)
        .args(&["--", "--show-output"])
        .args(&args.filters)
        .args(&args.rest)
        .watch(|line| reader.line(line))?;
    let mut counts = reader.finish();
    if !good {
        counts.broken_run();
    }
    summary.add(&counts);
    Ok(good)
}

fn doctests(args: &Args, workspace: &Workspace, summary: &mut Summary) -> Result<bool, Failure> {
    let mut wanted = Vec::new();
    for package in workspace.packages() {
        let name = package.name.as_str();
        let chosen = args.packages.is_empty() || args.packages.iter().any(|p| p == name);
        if chosen && workspace.has_library(name) {
            wanted.extend(["-p".to_owned(), name.to_owned()]);
        }
    }
    if wanted.is_empty() {
        return Ok(true);
    }
    let mut reader = LibtestReader::default();
    let good = Shell::cargo(&["test", "--doc", "--no-fail-fast"])
        .args(&wanted)
        .args(&["--", "--show-output"])
        .args(&args.filters)
        .watch(|line| reader.line(line))?;
    let mut counts = reader.finish();
    if !good {
        counts.broken_run();
    }
    summary.add(&counts);
    Ok(good)
}

fn selection(args: &Args) -> Vec<String> {
    if args.packages.is_empty() {
        return vec!["--workspace".to_owned()];
    }
    args.packages.iter().flat_map(|name| ["-p".to_owned(), name.clone()]).collect()
}
