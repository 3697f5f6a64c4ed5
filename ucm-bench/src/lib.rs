//! Workloads, comparisons and reports for ucm.
//!
//! Owns: the `ucm-bench` command, the one JSON document every measurement becomes, the HTML report
//! and the comparison of two runs.
//!
//! A workload is a module with `Args` (clap) and `fn run(&Args, &Common) -> Result<Document,
//! BenchError>`, plus one line in `cli.rs`. It fills a [`Document`]; printing, JSON, `--assert` and
//! exit codes are done for it.
//!
//! **Invariant:** a figure is never a single number: it has its samples, median, min and max.
//! **Invariant:** this crate contains no unsafe code.

#![forbid(unsafe_code)]

mod assertion;
mod cli;
mod clock;
mod compare;
mod crash;
mod ctrl;
mod directory;
mod document;
mod env;
mod error;
mod figure;
mod file;
mod load;
mod net;
mod plot;
mod progress;
mod ranges;
mod ranks;
mod report;
mod rng;
mod run_file;
mod scratch;
mod simulation;
mod staging;
mod stats;
mod suite;
mod table;
mod trace;

pub use assertion::Assertion;
pub use cli::{Common, main};
pub use compare::{Change, Comparison, Verdict, compare};
pub use document::{Document, Fields};
pub use env::Env;
pub use error::{BenchError, exit_code};
pub use figure::Figure;
pub use plot::{Line, Plot, PlotKind};
pub use progress::Progress;
pub use report::report_html;
pub use rng::Rng;
pub use run_file::RunFile;
pub use stats::rank_sum_p;
pub use table::Table;
pub use trace::{
    Generator, Policy, PolicyKind, Request, Simulation, Trace, TraceSource, optimal_next_use,
    simulate,
};
