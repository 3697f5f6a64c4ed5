//! What a replay with several ranks reports.
//!
//! Owns: settings, results, table and plots.
//! **Invariant:** what is assumed (prefill speed, layers left out) stands beside what was measured.

use serde_json::json;

use super::{
    super::Args,
    node::{Job, Run, Wrong},
    scale::{BLOCK_TOKENS, LAYERS, SHARD_BYTES},
};
use crate::{
    cli::Common,
    document::Document,
    error::BenchError,
    figure::Figure,
    plot::Plot,
    stats::percentile,
    table::Table,
    trace::{PolicyKind, Trace, optimal_next_use, simulate},
};

pub(super) fn describe(document: &mut Document, args: &Args, common: &Common, job: &Job) {
    let trace = &job.slice.trace;
    let size = |blocks: usize| {
        let bytes = blocks as u64 * SHARD_BYTES * u64::from(job.scale.layers);
        Table::human("_bytes", &bytes.into())
    };
    document.about(
        "Trace replay on one node",
        &format!(
            "{} rank processes serve {} requests of a conversation trace from one shared cache ({}) \
             and a directory of files ({}): cold, when everything must be computed and stored first, \
             then warm. Blocks are those of qwen3-8b, {} of its {LAYERS} layers. Every byte that \
             reaches a rank is verified.",
            job.ranks,
            trace.requests().len(),
            size(job.capacity_blocks),
            size(trace.unique_blocks()),
            job.scale.layers,
        ),
    );
    document.config("replay", true);
    document.config("ranks", job.ranks);
    document.config("trace", args.trace.clone());
    document.config("source", job.source.clone());
    document.config("seed", args.seed);
    document.config("model", "qwen3-8b");
    document.config("shard_bytes", SHARD_BYTES);
    document.config("layers", job.scale.layers);
    document.config("layers_of_model", LAYERS);
    document.config("block_tokens", BLOCK_TOKENS);
    document.config("max_blocks", job.max_blocks);
    document.config("working_set_blocks", job.scale.blocks);
    document.config("capacity_pct", job.capacity_pct);
    document.config("prefill_tokens_per_s", args.replay.prefill_tokens_per_s);
    document.config("runs", common.runs);
}

/// Hit ratios of the cache's policy in both passes, if one rank used blocks as a whole.
fn model(job: &Job) -> (f64, f64) {
    let trace = &job.slice.trace;
    let requests = trace.requests();
    let hits = |trace: &Trace| {
        let mut policy = PolicyKind::ClockCache.build(job.capacity_blocks, trace.unique_blocks());
        simulate(trace, &optimal_next_use(trace), policy.as_mut()).hits
    };
    let twice = Trace::from_numbered([requests, requests].concat());
    let references = trace.references().max(1) as f64;
    let cold = hits(trace);
    (cold as f64 / references, (hits(&twice) - cold) as f64 / references)
}

pub(super) fn report(
    document: &mut Document,
    args: &Args,
    job: &Job,
    runs: &[Run],
    wrong: &Wrong,
) -> Result<(), BenchError> {
    let figure = |of: &dyn Fn(&Run) -> f64| {
        Figure::of(runs.iter().map(of)).ok_or_else(|| BenchError::Peer("no samples".into()))
    };
    let per_s = |bytes: u64, ns: u64| bytes as f64 / (ns.max(1) as f64 / 1e9);
    let ratio = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
    let (model_cold, model_warm) = model(job);
    let trace = &job.slice.trace;
    let block_bytes = SHARD_BYTES * u64::from(job.scale.layers);

    document.result("requests", trace.requests().len());
    document.result("references", trace.references());
    document.result("unique_blocks", trace.unique_blocks());
    document.result("conversations", job.slice.conversations);
    document.result("working_set_bytes", trace.unique_blocks() as u64 * block_bytes);
    document.result("capacity_blocks", job.capacity_blocks);
    document.result("capacity_bytes", job.capacity_blocks as u64 * block_bytes);

    let hits = figure(&|run| run.warm.hits as f64)?;
    document.figure("replay_hits", &hits);
    document.figure("hit_ratio", &figure(&|run| ratio(run.warm.hits, run.warm.references))?);
    document.result("model_hit_ratio", model_warm);
    document.figure("cold_hit_ratio", &figure(&|run| ratio(run.cold.hits, run.cold.references))?);
    document.result("cold_model_hit_ratio", model_cold);

    let us = |ns: u64| ns as f64 / 1e3;
    document.figure("cold_wall_us", &figure(&|run| us(run.cold.load_ns + run.cold.dump_ns))?);
    document.figure("warm_wall_us", &figure(&|run| us(run.warm.load_ns))?);
    let rate = figure(&|run| per_s(run.warm.loaded_bytes, run.warm.load_ns))?;
    let floor = figure(&|run| per_s(run.warm.floor_bytes, run.warm.floor_ns))?;
    document.figure("bytes_per_s", &rate);
    document.figure("memcpy_floor_bytes_per_s", &floor);
    if let Some(floor_ratio) = rate.ratio_to(&floor) {
        document.figure("floor_ratio", &floor_ratio);
    }
    document.figure(
        "dump_bytes_per_s",
        &figure(&|run| per_s(run.cold.dumped_bytes, run.cold.dump_ns))?,
    );
    document.figure("dumped_bytes", &figure(&|run| run.cold.dumped_bytes as f64)?);
    document.figure("delivered_bytes", &figure(&|run| run.warm.loaded_bytes as f64)?);

    let requests = |share: f64| {
        figure(&|run| {
            let mut sorted = run.warm.request_us.clone();
            sorted.sort_by(f64::total_cmp);
            percentile(&sorted, share)
        })
    };
    document.figure("request_us_p50", &requests(0.5)?);
    document.figure("request_us_p99", &requests(0.99)?);

    // What loading saves: the time to compute the same tokens, less the time to load all layers.
    let tokens = trace.references() * BLOCK_TOKENS;
    let prefill_s = tokens as f64 / args.replay.prefill_tokens_per_s as f64;
    let whole = f64::from(LAYERS) / f64::from(job.scale.layers);
    let restore_s = |run: &Run| run.warm.load_ns as f64 / 1e9 * whole;
    document.result("prefill_s", prefill_s);
    document.figure("restore_s", &figure(&restore_s)?);
    document.figure("ttft_saved_s", &figure(&|run| prefill_s - restore_s(run))?);

    document.figure("backend_loads", &figure(&|run| run.warm.backend_loads as f64)?);
    let counted = |pass: &dyn Fn(&Run) -> super::spec::Shards| {
        let mut sum = super::spec::Shards::default();
        runs.iter().for_each(|run| sum.add(pass(run)));
        sum
    };
    let (cold, warm) = (counted(&|run| run.cold.shards), counted(&|run| run.warm.shards));
    document.result("cold_shards", json!(cold));
    document.result("warm_shards", json!(warm));
    document.result(
        "verified_bytes",
        runs.iter().map(|run| run.cold.checked_bytes + run.warm.checked_bytes).sum::<u64>(),
    );
    document.result("wrong_bytes", wrong.bytes);
    if let Some(first) = &wrong.first {
        document.result("first_wrong_byte", first.clone());
    }
    document.highlight([
        "bytes_per_s",
        "floor_ratio",
        "hit_ratio",
        "request_us_p50",
        "ttft_saved_s",
    ]);
    tables(document, job, block_bytes);
    plots(document, runs);
    Ok(())
}

fn tables(document: &mut Document, job: &Job, block_bytes: u64) {
    let human = |name: &str, value: u64| Table::human(name, &value.into());
    let trace = &job.slice.trace;
    let mut chosen = Table::text(["chosen for this machine", ""]);
    let bytes = |blocks: usize| human("_bytes", blocks as u64 * block_bytes);
    let rows = [
        ("trace", job.source.clone()),
        (
            "slice",
            format!(
                "{} requests, all of {} of {} conversations, cut to {} blocks each",
                trace.requests().len(),
                job.slice.conversations,
                job.slice.conversations_in_trace,
                job.max_blocks
            ),
        ),
        (
            "geometry",
            format!(
                "qwen3-8b, {} of {LAYERS} layers: {} shards of {} a block of {BLOCK_TOKENS} tokens",
                job.scale.layers,
                job.scale.layers,
                human("_bytes", SHARD_BYTES)
            ),
        ),
        (
            "working set",
            format!("{} blocks, {}", trace.unique_blocks(), bytes(trace.unique_blocks())),
        ),
        (
            "cache",
            format!(
                "{} blocks, {}, shared by {} ranks",
                job.capacity_blocks,
                bytes(job.capacity_blocks),
                job.ranks
            ),
        ),
    ];
    for (name, text) in rows {
        chosen.row([name.to_owned(), text]);
    }
    let results = document.results_table();
    document.table(chosen);
    document.table(results);
}

fn plots(document: &mut Document, runs: &[Run]) {
    let Some(run) = runs.last() else { return };
    let share = |part: u64, of: super::spec::Shards| 100.0 * part as f64 / of.total().max(1) as f64;
    let mut sources = Plot::bars(
        "Where the shards of each rank came from",
        "share of shards (%)",
        ["in the cache", "another rank loads it", "own file read", "around a full cache"],
    );
    for (name, shards) in [("cold", run.cold.shards), ("warm", run.warm.shards)] {
        let parts = [shards.hit, shards.waited, shards.owned, shards.bypass];
        sources.heights(name, parts.map(|part| share(part, shards)));
    }
    document.plot(sources);

    let mut sorted = run.warm.request_us.clone();
    sorted.sort_by(f64::total_cmp);
    let mut latency = Plot::lines(
        "Time to restore a request in the warm pass",
        "requests (%)",
        "until the last rank has every byte (ms)",
    );
    let points = (0..=100_u32).map(|percent| {
        let share = f64::from(percent) / 100.0;
        (f64::from(percent), percentile(&sorted, share.max(1e-9)) / 1e3)
    });
    latency.line("warm", points);
    document.plot(latency);
}
