//! The `trace` workload: request traces against cache policies.
//!
//! Owns: the command line of `ucm-bench trace` and the results of the models; `replay` sends the same
//! requests through the real cache.
//! **Invariant:** all figures of the models are exact counts: the same trace gives the same document.

mod admitted;
mod clock;
mod generate;
mod lru;
mod optimal;
mod parse;
mod replay;
mod simulate;

use clap::ValueEnum as _;
use serde_json::{Value, json};

pub use generate::Generator;
pub use parse::{Request, Trace, TraceSource};
pub(crate) use replay::run_rank;
pub use simulate::{Policy, PolicyKind, Simulation, optimal_next_use, simulate};

use crate::{
    cli::Common, document::Document, env::Env, error::BenchError, plot::Plot, progress::Progress,
    table::Table,
};

/// Options of `ucm-bench trace`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A trace file (Mooncake jsonl), or `conversation` or `synthetic`: these are looked up in
    /// $UCM_TRACES or a `shared/traces` folder above the current one; a generated trace with the
    /// statistics of `conversation` stands in when it is not there
    #[arg(long, value_name = "FILE", default_value = "conversation")]
    trace: String,
    /// Cache sizes in percent of the trace's unique blocks
    /// (default: 1,5,10,30; with several ranks one size: 30)
    #[arg(long, value_name = "PCT,…", value_delimiter = ',')]
    capacity_pct: Option<Vec<f64>>,
    /// Policies to model
    #[arg(
        long,
        value_name = "NAME,…",
        value_delimiter = ',',
        default_value = "clock,clock-cache,lru,optimal"
    )]
    policy: Vec<PolicyKind>,
    /// Bytes of one block, to say how much memory a capacity means (default: qwen3-8b, 512 tokens)
    #[arg(long, value_name = "N", default_value_t = 75_497_472)]
    block_bytes: u64,
    /// Use only the first N requests
    #[arg(long, value_name = "N")]
    requests: Option<usize>,
    /// Seed of a generated trace
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    replay: replay::ReplayArgs,
}

const DEFAULT_CAPACITIES: [f64; 4] = [1.0, 5.0, 10.0, 30.0];

/// Runs the models, or the replay.
pub(crate) fn run(args: &Args, common: &Common) -> Result<Document, BenchError> {
    if args.replay.replay {
        return replay::run(args, common);
    }
    let source = TraceSource::find(&args.trace)?;
    let trace = source.load(args.seed)?.first(args.requests.unwrap_or(usize::MAX));
    let unique = trace.unique_blocks();
    if unique == 0 {
        return Err(BenchError::Usage(format!("{source} has no blocks")));
    }
    let capacities = capacities(args.percents(), unique)?;
    let mut document = Document::new("trace", Env::collect());
    describe(&mut document, args, &source, &trace);

    let steps = (args.policy.len() * capacities.len()) as u64;
    let progress = Progress::new("policies", steps, common.quiet);
    let next_use = optimal_next_use(&trace);
    let mut outcomes = Vec::new();
    for policy in &args.policy {
        progress.label(policy.name());
        let mut row = Vec::new();
        for capacity in &capacities {
            let mut model = policy.build(*capacity, unique);
            row.push(simulate(&trace, &next_use, model.as_mut()));
            progress.advance(1);
        }
        outcomes.push((*policy, row));
    }
    drop(progress);
    report(&mut document, args, &source, &trace, &capacities, &outcomes);
    Ok(document)
}

impl Args {
    fn percents(&self) -> &[f64] {
        self.capacity_pct.as_deref().unwrap_or(&DEFAULT_CAPACITIES)
    }
}

fn capacities(percents: &[f64], unique: usize) -> Result<Vec<usize>, BenchError> {
    let blocks = |percent: &f64| {
        if !(*percent > 0.0 && *percent <= 100.0) {
            let text = format!("--capacity-pct {percent}: must be above 0 and at most 100");
            return Err(BenchError::Usage(text));
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "between 0 and the number of blocks"
        )]
        let blocks = (unique as f64 * percent / 100.0) as usize;
        Ok(blocks.max(1))
    };
    percents.iter().map(blocks).collect()
}

fn describe(document: &mut Document, args: &Args, source: &TraceSource, trace: &Trace) {
    let title = format!("Cache policies on {source}");
    document.about(
        &title,
        "How many of the blocks that requests ask for a cache of a given size would hold: CLOCK (with \
         and without the bit set on load), LRU, and the best possible policy. Models, no bytes move.",
    );
    document.config("trace", args.trace.clone());
    document.config("source", source.to_string());
    document.config("requests", trace.requests().len());
    document.config("seed", args.seed);
    document.config("block_bytes", args.block_bytes);
    document.config("capacity_pct", json!(args.percents()));
    document.config("policies", json!(args.policy.iter().map(|p| p.name()).collect::<Vec<_>>()));
}

fn report(
    document: &mut Document,
    args: &Args,
    source: &TraceSource,
    trace: &Trace,
    capacities: &[usize],
    outcomes: &[(PolicyKind, Vec<Simulation>)],
) {
    let references = trace.references();
    let best = (references - trace.unique_blocks() as u64) as f64 / references as f64;
    let bytes = |blocks: &usize| (*blocks as u64).saturating_mul(args.block_bytes);
    document.result("block_references", references);
    document.result("unique_blocks", trace.unique_blocks());
    document.result("never_used_again_ratio", trace.never_used_again_ratio());
    document.result("max_hit_ratio", best);
    document.result("capacity_pct", json!(args.percents()));
    document.result("capacity_blocks", json!(capacities));
    document.result("capacity_bytes", json!(capacities.iter().map(bytes).collect::<Vec<_>>()));

    let hit = |row: &[Simulation]| row.iter().map(Simulation::hit_ratio).collect::<Vec<_>>();
    let prefix =
        |row: &[Simulation]| row.iter().map(Simulation::prefix_hit_ratio).collect::<Vec<_>>();
    if let Some((_, row)) = outcomes.first() {
        document.result("hit_ratio", json!(hit(row)));
        document.result("prefix_hit_ratio", json!(prefix(row)));
    }
    for (policy, row) in outcomes {
        if matches!(policy, PolicyKind::Lru | PolicyKind::Optimal) {
            document.result(policy.name(), json!(hit(row)));
        }
    }
    let all = outcomes.iter().map(|(policy, row)| {
        let hits = row.iter().map(|outcome| outcome.hits).collect::<Vec<_>>();
        let writes = row.iter().map(Simulation::write_ratio).collect::<Vec<_>>();
        let value = json!({
            "hit_ratio": hit(row), "prefix_hit_ratio": prefix(row), "hits": hits, "write_ratio": writes,
        });
        (policy.name().to_owned(), value)
    });
    document.result("policies", Value::Object(all.collect()));

    let percents = args.percents().iter().map(|percent| format!("{percent} %"));
    let mut table = Table::new(["policy: hits % (kept %)".to_owned()].into_iter().chain(percents));
    let mut plot =
        Plot::lines("Hit ratio", "capacity (% of unique blocks)", "hit ratio (%)").x_log();
    for (policy, row) in outcomes {
        let cell = |outcome: &Simulation| {
            let (hits, writes) = (100.0 * outcome.hit_ratio(), 100.0 * outcome.write_ratio());
            format!("{hits:.2} ({writes:.1})")
        };
        let cells = row.iter().map(cell);
        table.row([policy.name().to_owned()].into_iter().chain(cells));
        let points = args.percents().iter().zip(hit(row));
        plot.line(policy.name(), points.map(|(percent, ratio)| (*percent, 100.0 * ratio)));
    }
    let mut about = Table::new(["source", "requests", "references", "unique", "best hit ratio %"]);
    about.row([
        source.to_string(),
        trace.requests().len().to_string(),
        references.to_string(),
        trace.unique_blocks().to_string(),
        format!("{:.2}", 100.0 * best),
    ]);
    document.table(about);
    document.table(table);
    document.plot(plot);
}

impl PolicyKind {
    /// The name on the command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Clock => "clock",
            Self::ClockCache => "clock-cache",
            Self::Lru => "lru",
            Self::Admission => "admission",
            Self::SecondUse => "second-use",
            Self::Optimal => "optimal",
        }
    }

    /// All policies.
    pub fn all() -> &'static [Self] {
        Self::value_variants()
    }
}

#[cfg(test)]
mod tests;
