//! `cargo xtask ci`: what continuous integration runs, in its order.
//!
//! Owns: the list of steps.
//! **Invariant:** every step runs even when an earlier one failed; one failed step fails the whole;
//! a step that cannot run here is named in the closing report, never passed over.

use std::time::Instant;

use crate::{
    bench, crash, demo, features, fuzz, loom,
    rdma_vm::{self, Ran},
    shell::{Failure, Shell, fail, print, say},
    summary::Summary,
    test, tidy,
    workspace::Workspace,
};

/// Options of `cargo xtask ci`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Leave the tests out, because `cargo xtask test` ran just before
    #[arg(long)]
    skip_test: bool,
    /// Stop at the first failed step
    #[arg(long)]
    fail_fast: bool,
    /// Only these steps
    #[arg(value_name = "STEP", value_parser = STEPS)]
    only: Vec<String>,
}

const STEPS: [&str; 13] = [
    "fmt", "tidy", "clippy", "test", "crash", "doc", "features", "loom", "shuttle", "rdma-vm",
    "fuzz", "examples", "bench",
];

enum Outcome {
    Done,
    /// Tests ran that `cargo xtask test` does not know of.
    Tests(Summary),
    CannotRun(String),
}

/// Runs the steps and reports which failed.
pub(crate) fn run(args: &Args, workspace: &Workspace) -> Result<(), Failure> {
    let mut failed = Vec::new();
    let mut skipped = 0;
    let mut more = Summary::default();
    for step in STEPS {
        let named = args.only.iter().any(|only| only == step);
        let chosen = named || args.only.is_empty();
        if !chosen || (step == "test" && args.skip_test) {
            continue;
        }
        say(&format!("== {step}"));
        let begun = Instant::now();
        let outcome = run_step(step, workspace);
        say(&format!("== {step}: {} s", begun.elapsed().as_secs()));
        match outcome {
            Ok(Outcome::Done) => {}
            Ok(Outcome::Tests(counts)) => more.add(&counts),
            Ok(Outcome::CannotRun(why)) => {
                print(&format!("SKIP step {step}: {why}"));
                skipped += 1;
            }
            Err(Failure { message, .. }) => {
                say(&format!("== {step} failed {message}"));
                failed.push(step);
                if args.fail_fast {
                    break;
                }
            }
        }
    }
    let good = failed.is_empty();
    print(&if good {
        "ci: all steps good".to_owned()
    } else {
        format!("ci: failed steps: {failed:?}")
    });
    // Failed tests are counted one by one already; other failed steps count as one failure each.
    let mut summary = test::last_summary(workspace).unwrap_or_default();
    let other = failed.iter().filter(|step| **step != "test").count();
    summary.add(&more);
    summary.add_steps(u64::try_from(other).unwrap_or(u64::MAX), skipped);
    print(&summary.to_string());
    if good { Ok(()) } else { fail("") }
}

fn run_step(step: &str, workspace: &Workspace) -> Result<Outcome, Failure> {
    match step {
        "fmt" => {
            if Shell::cargo(&["fmt", "--version"]).quiet().is_none() {
                return Ok(Outcome::CannotRun(
                    "install it with: rustup component add rustfmt".into(),
                ));
            }
            Shell::cargo(&["fmt", "--all", "--check"]).run()?;
        }
        "tidy" => tidy::run(&tidy::Args::default(), workspace)?,
        "clippy" => {
            if !features::has_clippy() {
                return Ok(Outcome::CannotRun(
                    "install it with: rustup component add clippy".into(),
                ));
            }
            Shell::cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])
                .run()?;
        }
        "test" => test::run(&test::Args::default(), workspace)?,
        "doc" => Shell::cargo(&["doc", "--workspace", "--no-deps"])
            .env("RUSTDOCFLAGS", "-D warnings")
            .run()?,
        "features" => features::run(&features::Args::standard(), workspace)?,
        "loom" => loom::run(&loom::Args::default(), workspace)?,
        "shuttle" => loom::run_shuttle(&loom::ShuttleArgs::default(), workspace)?,
        "rdma-vm" => match rdma_vm::run_counted(&rdma_vm::Args::standard(), workspace)? {
            Ran::Tests(counts) => return Ok(Outcome::Tests(counts)),
            Ran::CannotRun(reason) => return Ok(Outcome::CannotRun(reason)),
        },
        "crash" => crash::run(&crash::Args::default())?,
        "fuzz" => {
            if let Some(remedy) = fuzz::install(workspace) {
                return Ok(Outcome::CannotRun(remedy.into()));
            }
            fuzz::run(&fuzz::Args::standard(), workspace)?;
        }
        "examples" => {
            Shell::cargo(&["build", "--workspace", "--examples"]).run()?;
            demo::run(&demo::Args::standard(), workspace)?;
        }
        _ => bench::run(&bench::Args::smoke(), workspace)?,
    }
    Ok(Outcome::Done)
}
