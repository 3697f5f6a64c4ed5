//! `ucm-bench trace --replay`: requests of a trace through the real cache.
//!
//! Owns: the options of a replay. With one rank every reference of the trace is loaded in the order
//! of the models, and the cache's hits must be the model's ([`exact`]). With several, rank processes
//! serve whole requests from cache and files, cold and warm ([`node`]).
//!
//! **Invariant:** every byte that a replay loads is compared with what it must be.

mod exact;
mod node;
mod node_report;
mod rank;
mod scale;
mod slice;
mod spec;

use std::path::PathBuf;

use super::Args;
use crate::{cli::Common, document::Document, error::BenchError};

pub(crate) use rank::run as run_rank;

/// The workload's name among rank processes.
const WORKLOAD: &str = "trace";

/// Options of a replay.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Replay")]
pub(crate) struct ReplayArgs {
    /// Replay the trace through the real cache instead of modelling it
    #[arg(long)]
    pub(super) replay: bool,
    /// Rank processes of a replay: with 1 its hits must equal the model's; with more, every rank
    /// loads every block of its requests, new blocks are stored in files
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// Bytes of a block with one rank
    #[arg(long, value_name = "N", default_value_t = 4096,
          value_parser = clap::value_parser!(u64).range(1..))]
    replay_shard_bytes: u64,
    /// Layers of a block, each a shard of 524,288 bytes, with several ranks (default: as many of
    /// qwen3-8b's 36 as the working set has room for)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    layers: Option<u32>,
    /// Bytes of all different blocks with several ranks (default: an eighth of the available
    /// memory, a quarter of the free disk, at most 4 GiB)
    #[arg(long, value_name = "N")]
    working_set_bytes: Option<u64>,
    /// Requests are cut to this many blocks with several ranks
    #[arg(long, value_name = "N", default_value_t = 32,
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    max_blocks: u32,
    /// How fast the prompt would be computed instead: assumed, to say what loading saves
    #[arg(long, value_name = "TOKENS", default_value_t = 10_000,
          value_parser = clap::value_parser!(u64).range(1..))]
    prefill_tokens_per_s: u64,
    /// Directory of the files (default: a new one in the temporary directory, removed afterwards)
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Best page tier to try: 1g, 2m, thp, 4k
    #[arg(long, default_value = "2m")]
    pages: String,
}

/// Replays.
pub(super) fn run(args: &Args, common: &Common) -> Result<Document, BenchError> {
    if args.replay.ranks == 1 { exact::run(args, common) } else { node::run(args, common) }
}
