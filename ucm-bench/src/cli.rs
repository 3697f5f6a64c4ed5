//! The command line.
//!
//! Owns: the list of subcommands, the options they share, and what happens to a finished document.
//!
//! To add a workload: a module with `Args` and `run`, a variant of `Command`, a line in `measure`.
//! **Invariant:** with `--json`, stdout carries exactly one JSON document.

use std::{
    io::{self, Write as _},
    path::PathBuf,
    process::ExitCode,
};

use clap::{CommandFactory as _, Parser, Subcommand};

use crate::{
    assertion::Assertion,
    compare, crash, ctrl, directory,
    document::Document,
    error::{BenchError, exit_code},
    file, load, net, ranges, report, staging, suite, trace,
};

/// Options of all subcommands.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Common {
    /// Print one JSON document instead of tables
    #[arg(long, global = true)]
    pub json: bool,
    /// Also write the JSON document to this file
    #[arg(long, global = true, value_name = "FILE")]
    pub json_file: Option<PathBuf>,
    /// How often each figure is measured; the median counts
    #[arg(long, global = true, value_name = "N", default_value_t = 5,
          value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub runs: u32,
    /// Check every byte after timing
    #[arg(long, global = true)]
    pub verify: bool,
    /// Fail (exit code 1) unless a result keeps a bound, for example 'hit_ns<=60'; may be repeated
    #[arg(long = "assert", global = true, value_name = "FIELD OP VALUE")]
    pub asserts: Vec<Assertion>,
    /// No progress bar
    #[arg(long, short, global = true)]
    pub quiet: bool,
}

#[derive(Debug, Parser)]
#[command(name = "ucm-bench", version, about = "Workloads, comparisons and reports for ucm")]
#[command(
    after_help = "Exit codes: 0 done, 1 an --assert failed, 2 usage, 3 environment missing, \
                        4 IO or peer, 5 wrong bytes"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Hits, misses, wake-ups of the control plane
    Ctrl(ctrl::Args),
    /// Rank processes load the same tasks through one cache
    Load(load::Args),
    /// Ranks are killed and stopped at random moments while all work
    Crash(crash::Args),
    /// Requests through staging buffers onto a simulated device
    Staging(staging::Args),
    /// Reads from another process, by an engine and by the barest way there is
    Net(net::Args),
    /// Ranks restore cold requests from another peer, layer by layer
    Ranges(ranges::Args),
    /// Who has what: routes, announcements, and a peer that goes
    Directory(directory::Args),
    /// Objects in files, against a bare loop over a ring
    File(file::Args),
    /// Request traces against cache policies
    Trace(trace::Args),
    /// The standard set, its tables, run.json and report.html
    Suite(suite::Args),
    /// Turn a run into one HTML page
    Report(report::Args),
    /// Two runs side by side, with a significance test
    Compare(compare::Args),
    /// A process of a measurement; started by the others
    #[command(hide = true)]
    Rank {
        /// Which measurement
        workload: String,
    },
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() {
                exit_code::USAGE
            } else {
                exit_code::DONE
            });
        }
    };
    match measure(&cli) {
        Ok(()) => ExitCode::from(exit_code::DONE),
        Err(error) => {
            let _ = writeln!(io::stderr().lock(), "ucm-bench: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn measure(cli: &Cli) -> Result<(), BenchError> {
    let common = &cli.common;
    match &cli.command {
        Command::Suite(args) => suite::run(args, common),
        Command::Report(args) => report::run(args),
        Command::Compare(args) => compare::run(args, common),
        Command::Rank { workload } => rank(workload),
        workload => finish(&document(workload, common)?, common),
    }
}

fn document(workload: &Command, common: &Common) -> Result<Document, BenchError> {
    match workload {
        Command::Crash(args) => crash::run(args, common),
        Command::Ctrl(args) => ctrl::run(args, common),
        Command::Load(args) => load::run(args, common),
        Command::Net(args) => net::run(args, common),
        Command::Directory(args) => directory::run(args, common),
        Command::File(args) => file::run(args, common),
        Command::Ranges(args) => ranges::run(args, common),
        Command::Staging(args) => staging::run(args, common),
        Command::Trace(args) => trace::run(args, common),
        _ => Err(BenchError::Usage("this subcommand measures nothing".to_owned())),
    }
}

/// Does the command line have this subcommand?
pub(crate) fn has_subcommand(name: &str) -> bool {
    Cli::command().find_subcommand(name).is_some()
}

/// Are these words a command line?
#[cfg(test)]
pub(crate) fn parses(words: &[&str]) -> Result<(), String> {
    let line = std::iter::once("ucm-bench").chain(words.iter().copied());
    Cli::try_parse_from(line).map(drop).map_err(|error| error.to_string())
}

/// Measures what the words of a command line say, prints nothing. The asserts among them are
/// returned unchecked.
pub(crate) fn measure_line(
    words: &[&str],
    quiet: bool,
) -> Result<(Document, Vec<Assertion>), BenchError> {
    let line = std::iter::once("ucm-bench").chain(words.iter().copied());
    let mut cli =
        Cli::try_parse_from(line).map_err(|error| BenchError::Usage(error.to_string()))?;
    cli.common.quiet |= quiet;
    Ok((document(&cli.command, &cli.common)?, cli.common.asserts))
}

fn rank(workload: &str) -> Result<(), BenchError> {
    match workload {
        "crash" => crash::run_rank(),
        "ctrl" => ctrl::run_rank(),
        "load" => load::run_rank(),
        "net" => net::run_rank(),
        "ranges" => ranges::run_rank(),
        "trace" => trace::run_rank(),
        other => Err(BenchError::Usage(format!("there is no measurement {other:?}"))),
    }
}

/// Prints a document, then checks it: wrong bytes first, then each assertion.
fn finish(document: &Document, common: &Common) -> Result<(), BenchError> {
    let json = || {
        serde_json::to_string(document)
            .map_err(|error| BenchError::io("cannot form JSON", error.into()))
    };
    if let Some(path) = &common.json_file {
        std::fs::write(path, json()? + "\n").map_err(|e| BenchError::path("write", path, e))?;
    }
    if common.json {
        print(&json()?)?;
    } else {
        document.tables().iter().try_for_each(|table| print(&table.to_string()))?;
    }
    judge(document, &common.asserts)
}

/// Wrong bytes first, then each assertion.
pub(crate) fn judge(document: &Document, asserts: &[Assertion]) -> Result<(), BenchError> {
    let wrong = document.results().field("wrong_bytes").and_then(serde_json::Value::as_f64);
    if let Some(count) = wrong.filter(|count| *count > 0.0) {
        let text = document.results().field("first_wrong_byte").and_then(|v| v.as_str());
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a positive count; `as` saturates"
        )]
        let count = count as u64;
        return Err(BenchError::WrongBytes { count, first: text.unwrap_or("unknown").to_owned() });
    }
    check_all(asserts, document)
}

/// Checks every assertion, so that one run names all that failed.
fn check_all(asserts: &[Assertion], document: &Document) -> Result<(), BenchError> {
    let mut failed = Vec::new();
    for assert in asserts {
        match assert.check(document.results()) {
            Err(BenchError::Assertion(text)) => failed.push(text),
            other => other?,
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(BenchError::Assertion(failed.join("\n"))) }
}

/// Prints one line on stdout.
pub(crate) fn print(line: &str) -> Result<(), BenchError> {
    writeln!(io::stdout().lock(), "{line}").map_err(|error| BenchError::io("stdout", error))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::{Cli, Common, check_all, finish};
    use crate::{document::Document, env::Env};

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn wrong_bytes_have_their_own_exit_code() {
        let mut document = Document::new("load", Env::default());
        document.result("wrong_bytes", 0);
        let common = Common { json: true, ..Common::default() };
        finish(&document, &common).unwrap();
        document.result("wrong_bytes", 3);
        let error = finish(&document, &common).unwrap_err();
        assert_eq!(error.exit_code(), 5);
        assert!(error.to_string().starts_with("3 wrong bytes"), "{error}");
    }

    #[test]
    fn all_failed_assertions_are_named() {
        let mut document = Document::new("ctrl", Env::default());
        document.result("hit_ns", 70);
        document.result("wake_ratio", 2.0);
        let asserts = ["hit_ns<=60", "hit_ns>0", "wake_ratio<=1.25"].map(|a| a.parse().unwrap());
        let error = check_all(&asserts, &document).unwrap_err();
        assert_eq!(error.exit_code(), 1);
        let text = error.to_string();
        assert!(text.contains("hit_ns is 70") && text.contains("wake_ratio is 2"), "{text}");
    }
}
