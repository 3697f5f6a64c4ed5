//! One rank, every reference: the cache against the model.
//!
//! Owns: the runs at each capacity and their comparison with the model of the same policy.
//! **Invariant:** the cache is as large as the model, to the slot, and starts as empty.

use serde_json::json;

use super::{
    super::{Args, capacities, parse::Trace},
    WORKLOAD,
    spec::{Order, Reply, Shards, Spec},
};
use crate::{
    cli::Common,
    document::Document,
    env::Env,
    error::BenchError,
    figure::Figure,
    plot::Plot,
    progress::Progress,
    ranks::Ranks,
    scratch::Scratch,
    table::Table,
    trace::{PolicyKind, TraceSource, optimal_next_use, simulate},
};

/// Requests of one order: often enough for the progress bar.
const REQUESTS: usize = 64;

/// What one capacity gave.
struct Row {
    percent: f64,
    capacity: usize,
    model_hits: u64,
    reply: Reply,
}

pub(super) fn run(args: &Args, common: &Common) -> Result<Document, BenchError> {
    let source = TraceSource::find(&args.trace)?;
    let trace = source.load(args.seed)?.first(args.requests.unwrap_or(usize::MAX));
    let unique = trace.unique_blocks();
    if unique == 0 {
        return Err(BenchError::Usage(format!("{source} has no blocks")));
    }
    let percents = args.percents();
    let capacities = capacities(percents, unique)?;
    let next_use = optimal_next_use(&trace);
    let orders = trace.requests().len().div_ceil(REQUESTS) as u64;
    let progress = Progress::new("replay", orders * capacities.len() as u64, common.quiet);
    let mut rows = Vec::new();
    let mut env = Env::collect();
    for (percent, capacity) in percents.iter().zip(capacities) {
        progress.label(&format!("replay at {percent} %"));
        let mut model = PolicyKind::ClockCache.build(capacity, unique);
        let model_hits = simulate(&trace, &next_use, model.as_mut()).hits;
        let reply = replay(args, &trace, capacity, &mut env, &progress)?;
        rows.push(Row { percent: *percent, capacity, model_hits, reply });
    }
    drop(progress);
    let mut document = Document::new("trace", env);
    describe(&mut document, args, &source.to_string(), &trace, percents);
    report(&mut document, &trace, &rows)?;
    Ok(document)
}

/// The whole trace through a fresh cache of `capacity` slots.
fn replay(
    args: &Args,
    trace: &Trace,
    capacity: usize,
    env: &mut Env,
    progress: &Progress,
) -> Result<Reply, BenchError> {
    let usage = |e: &dyn std::fmt::Display| BenchError::Usage(e.to_string());
    let scratch = Scratch::new(None)?;
    let shard_bytes = args.replay.replay_shard_bytes;
    let settings = [
        format!("cache.dir={}", scratch.path("cache").display()),
        format!("cache.pages={}", args.replay.pages),
        "pool.0.name=kv".to_owned(),
        format!("pool.0.shard_bytes={shard_bytes}"),
        format!("pool.0.slots={capacity}"),
    ];
    let config = ucm::Config::load(None, [], &settings).map_err(|e| usage(&e))?;
    let longest = trace.requests().iter().map(|request| request.blocks.len()).max();
    let spec = Spec {
        config: config.to_toml().map_err(|e| usage(&e))?,
        ranks: 1,
        shard_bytes,
        shards_per_block: 1,
        max_blocks: u32::try_from(longest.unwrap_or(1)).map_err(|e| usage(&e))?.max(1),
        store: None,
    };
    let mut ranks = Ranks::start(WORKLOAD, 1)?;
    let open = Order::Open { rank: 0, spec: Box::new(spec) };
    let opened: Reply = ranks.ask_one(0, &open)?;
    env.page_tier = Some(opened.page_tier);
    env.engine = Some(opened.engine);

    let mut sum = Reply::default();
    for requests in trace.requests().chunks(REQUESTS) {
        let requests = requests.iter().map(|request| request.blocks.clone()).collect();
        let reply: Reply = ranks.ask_one(0, &Order::Follow { requests })?;
        sum.end_ns += reply.end_ns;
        sum.bytes += reply.bytes;
        sum.hits += reply.hits;
        sum.shards.add(reply.shards);
        sum.backend_loads += reply.backend_loads;
        sum.checked_bytes += reply.checked_bytes;
        sum.wrong_bytes += reply.wrong_bytes;
        sum.first_wrong = sum.first_wrong.or(reply.first_wrong);
        progress.advance(1);
    }
    Ok(sum)
}

fn describe(document: &mut Document, args: &Args, source: &str, trace: &Trace, percents: &[f64]) {
    document.about(
        "Replay with one rank",
        "Every block reference of the trace is one load through the real cache, in the order of the \
         CLOCK model; the cache must hit exactly where the model hits. Every byte is verified.",
    );
    document.config("replay", true);
    document.config("ranks", 1);
    document.config("trace", args.trace.clone());
    document.config("source", source);
    document.config("requests", trace.requests().len());
    document.config("seed", args.seed);
    document.config("replay_shard_bytes", args.replay.replay_shard_bytes);
    document.config("capacity_pct", json!(percents));
}

fn report(document: &mut Document, trace: &Trace, rows: &[Row]) -> Result<(), BenchError> {
    let references = trace.references();
    let ratio = |hits: u64| hits as f64 / references.max(1) as f64;
    let hits = |row: &Row| row.reply.shards.hit;
    // What the queue counted and what the lookup had announced must both be the model's.
    let difference =
        |row: &Row| hits(row).abs_diff(row.model_hits) + row.reply.hits.abs_diff(row.model_hits);
    let list = |value: &dyn Fn(&Row) -> serde_json::Value| {
        json!(rows.iter().map(value).collect::<Vec<_>>())
    };
    document.result("requests", trace.requests().len());
    document.result("references", references);
    document.result("unique_blocks", trace.unique_blocks());
    document.result("capacity_blocks", list(&|row| row.capacity.into()));
    document.result("model_hits", list(&|row| row.model_hits.into()));
    document.result("replay_hits", list(&|row| hits(row).into()));
    document.result("hit_difference", rows.iter().map(difference).sum::<u64>());
    document.result("hit_ratio", list(&|row| ratio(hits(row)).into()));
    document.result("backend_loads", list(&|row| row.reply.backend_loads.into()));
    let mut shards = Shards::default();
    rows.iter().for_each(|row| shards.add(row.reply.shards));
    document.result("shards", json!(shards));
    let rate = |row: &Row| row.reply.bytes as f64 / (row.reply.end_ns.max(1) as f64 / 1e9);
    let rates = Figure::of(rows.iter().map(rate))
        .ok_or_else(|| BenchError::Peer("no capacity was replayed".into()))?;
    document.figure("bytes_per_s", &rates);
    document.result("verified_bytes", rows.iter().map(|r| r.reply.checked_bytes).sum::<u64>());
    document.result("wrong_bytes", rows.iter().map(|r| r.reply.wrong_bytes).sum::<u64>());
    if let Some(first) = rows.iter().find_map(|row| row.reply.first_wrong.as_ref()) {
        document.result("first_wrong_byte", first.clone());
    }

    document.highlight(["hit_difference", "verified_bytes", "wrong_bytes"]);
    let mut table =
        Table::new(["capacity", "blocks", "model hits", "replay hits", "hit ratio %", "seconds"]);
    for row in rows {
        table.row([
            format!("{} %", row.percent),
            row.capacity.to_string(),
            row.model_hits.to_string(),
            hits(row).to_string(),
            format!("{:.2}", 100.0 * ratio(hits(row))),
            format!("{:.1}", row.reply.end_ns as f64 / 1e9),
        ]);
    }
    document.table(table);
    let names = rows.iter().map(|row| format!("{} %", row.percent));
    let mut plot = Plot::bars("Hits of cache and model", "hit ratio (% of references)", names);
    plot.heights("model", rows.iter().map(|row| 100.0 * ratio(row.model_hits)));
    plot.heights("cache", rows.iter().map(|row| 100.0 * ratio(hits(row))));
    document.plot(plot);
    Ok(())
}
