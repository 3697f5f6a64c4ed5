//! The `staging` workload: requests through staging buffers onto a simulated device.
//!
//! Owns: the command line of `ucm-bench staging`, the order of its measurements and its results.
//! **Invariant:** storage and device keep to their rates whatever the queue does, so the floor (the
//! slower of the two, always busy) is known exactly and nothing but the queue can miss it.

mod lane;
mod pipeline;
mod storm;

use serde_json::json;

use crate::{
    cli::Common, document::Document, env::Env, error::BenchError, figure::Figure, plot::Plot,
    progress::Progress, scratch::Scratch, table::Table,
};
use lane::Lane;

/// Options of `ucm-bench staging`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Requests of a makespan
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) requests: u32,
    /// Requests submitted and not ended
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) concurrency: u32,
    /// Staging buffers of loads, and at the same time the limit of requests in flight
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8",
          value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) depth: Vec<u32>,
    /// Shards of a request
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) shards: u32,
    /// Bytes of a shard
    #[arg(long, default_value_t = 256 << 10, value_parser = clap::value_parser!(u64).range(64..))]
    pub(crate) shard_bytes: u64,
    /// Bytes of a depth's buffers together (default: each holds one request)
    #[arg(long)]
    pub(crate) budget_bytes: Option<u64>,
    /// Rate of the device
    #[arg(long, default_value_t = 1_200_000_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) restore_bytes_per_s: u64,
    /// Rate of the storage
    #[arg(long, default_value_t = 1_000_000_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) read_bytes_per_s: u64,
    /// Shards of the request that a small one is behind
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) big_shards: u32,
    /// Requests that are cancelled, or given a deadline, at random
    #[arg(long, default_value_t = 100_000)]
    pub(crate) cancels: u64,
    /// How long the queue is watched while it has nothing to do
    #[arg(long, default_value_t = 1000)]
    pub(crate) idle_ms: u64,
}

impl Args {
    fn request_bytes(&self) -> u64 {
        u64::from(self.shards) * self.shard_bytes
    }

    fn buffer_bytes(&self, depth: u32) -> u64 {
        self.budget_bytes
            .map_or_else(|| self.request_bytes(), |budget| budget / u64::from(depth))
            .max(self.shard_bytes)
    }

    /// The longer of all reads and all copies.
    fn floor_us(&self) -> f64 {
        let bytes = u64::from(self.requests) * self.request_bytes();
        let slower = self.read_bytes_per_s.min(self.restore_bytes_per_s);
        bytes as f64 * 1e6 / slower as f64
    }

    /// To fill a buffer and to empty it.
    fn turn_us(&self, depth: u32) -> f64 {
        let bytes = self.buffer_bytes(depth) as f64 * 1e6;
        bytes / self.read_bytes_per_s as f64 + bytes / self.restore_bytes_per_s as f64
    }
}

/// The samples of one depth.
#[derive(Default)]
struct Samples {
    makespan_us: Vec<f64>,
    small_alone_us: Vec<f64>,
    small_behind_big_us: Vec<f64>,
    inflight_max: u64,
    idle_polls: u64,
    wrong_bytes: u64,
}

/// Measures.
pub(crate) fn run(args: &Args, common: &Common) -> Result<Document, BenchError> {
    let scratch = Scratch::new(None)?;
    let mut document = Document::new("staging", Env::collect());
    describe(&mut document, args, common);
    let steps = u64::from(common.runs) * args.depth.len() as u64 + 1;
    let progress = Progress::new("staging", steps, common.quiet);
    let mut all = Vec::with_capacity(args.depth.len());
    for depth in &args.depth {
        let lane = Lane::open(args, *depth, &scratch.path(&format!("depth-{depth}")))?;
        let mut samples = Samples::default();
        for run in 0..common.runs {
            pipeline::measure(&lane, args, run, common.verify, &mut samples)?;
            progress.advance(1);
        }
        pipeline::idle(&lane, args, &mut samples);
        all.push((*depth, samples));
    }
    let storm = storm::run(args.cancels, &scratch.path("storm"))?;
    progress.advance(1);
    drop(progress);
    report(&mut document, args, &all, &storm)?;
    Ok(document)
}

fn describe(document: &mut Document, args: &Args, common: &Common) {
    document.about(
        "Loads through staging buffers",
        &format!(
            "{} requests of {} shards, {} at a time, are read by a storage of {} bytes/s and copied \
             by a simulated device of {} bytes/s, through 1 to many staging buffers. The cache is \
             full, so nothing takes another way.",
            args.requests,
            args.shards,
            args.concurrency,
            args.read_bytes_per_s,
            args.restore_bytes_per_s,
        ),
    );
    document.config("requests", args.requests);
    document.config("concurrency", args.concurrency);
    document.config("depth", json!(args.depth));
    document.config("shards", args.shards);
    document.config("shard_bytes", args.shard_bytes);
    document.config("budget_bytes", json!(args.budget_bytes));
    document.config("restore_bytes_per_s", args.restore_bytes_per_s);
    document.config("read_bytes_per_s", args.read_bytes_per_s);
    document.config("big_shards", args.big_shards);
    document.config("cancels", args.cancels);
    document.config("idle_ms", args.idle_ms);
    document.config("runs", common.runs);
    document.env_mut().engine = Some("simulated".into());
}

fn report(
    document: &mut Document,
    args: &Args,
    all: &[(u32, Samples)],
    storm: &storm::Storm,
) -> Result<(), BenchError> {
    let missing = || BenchError::Peer("no samples".into());
    let of = |values: &[f64]| Figure::of(values.iter().copied()).ok_or_else(missing);
    let floor = args.floor_us();
    let head = ["depth", "makespan_us", "overlap_ratio", "inflight_max", "small_alone_us"];
    let mut table = Table::new(head.into_iter().chain(["small_behind_big_us", "turn_us"]));
    let mut by_depth = Vec::new();
    let mut ratios = Vec::new();
    let mut worst: Option<Figure> = None;
    for (depth, samples) in all {
        let makespan = of(&samples.makespan_us)?;
        let ratio =
            Figure::of(makespan.samples().iter().map(|us| us / floor)).ok_or_else(missing)?;
        let alone = of(&samples.small_alone_us)?;
        let behind = of(&samples.small_behind_big_us)?;
        let turn = args.turn_us(*depth);
        by_depth.push(json!({
            "depth": depth,
            "buffer_bytes": args.buffer_bytes(*depth),
            "makespan_us": makespan.median(),
            "overlap_ratio": ratio.median(),
            "inflight_max": samples.inflight_max,
            "small_alone_us": alone.median(),
            "small_behind_big_us": behind.median(),
            "small_behind_big_turns": behind.median() / turn,
            "turn_us": turn,
            "idle_polls": samples.idle_polls,
        }));
        table.row([
            depth.to_string(),
            format!("{:.0}", makespan.median()),
            format!("{:.3}", ratio.median()),
            samples.inflight_max.to_string(),
            format!("{:.0}", alone.median()),
            format!("{:.0}", behind.median()),
            format!("{turn:.0}"),
        ]);
        ratios.push((f64::from(*depth), ratio.median()));
        // The figures of the document are those of the worst depth that can overlap at all.
        if *depth >= 2 && worst.as_ref().is_none_or(|worst| worst.median() < ratio.median()) {
            document.figure("makespan_us", &makespan);
            document.figure("overlap_ratio", &ratio);
            worst = Some(ratio);
        }
    }
    let Some((depth, last)) = all.last() else { return Err(missing()) };
    document.result("overlap_floor_us", floor);
    document.result("inflight_max", last.inflight_max);
    document.result("inflight_limit", *depth);
    document.figure("small_alone_us", &of(&last.small_alone_us)?);
    document.figure("small_behind_big_us", &of(&last.small_behind_big_us)?);
    document.result("turn_us", args.turn_us(*depth));
    document.result("idle_polls", all.iter().map(|(_, s)| s.idle_polls).sum::<u64>());
    document.result("cancels", storm.requests);
    document.result("cancel_lost", storm.lost);
    document.result("cancel_outcomes", json!(storm.outcomes));
    let wrong = storm.wrong_bytes + all.iter().map(|(_, s)| s.wrong_bytes).sum::<u64>();
    document.result("wrong_bytes", wrong);
    document.result("depths", json!(by_depth));
    document.highlight(["overlap_ratio", "small_behind_big_us", "idle_polls", "cancel_lost"]);
    document.table(table);
    let mut plot =
        Plot::lines("Makespan over its floor", "staging buffers", "makespan / floor").x_log();
    plot.line("measured", ratios);
    document.plot(plot);
    let results = document.results_table();
    document.table(results);
    Ok(())
}
