//! The `load` workload: rank processes load the same tasks through one cache.
//!
//! Owns: the command line of `ucm-bench load`, the order of its measurements and its results.
//! **Invariant:** each run is cold load, then warm loads and memcpy floors in turn, on the same keys
//! in the same processes.

mod rank;
mod spec;

use std::path::PathBuf;

use serde_json::json;

pub(crate) use rank::run as run_rank;
use spec::{BackendChoice, FileIoChoice, Order, OrderChoice, Reply, Spec};

use crate::{
    cli::Common, clock, document::Document, env::Env, error::BenchError, figure::Figure,
    plot::Plot, progress::Progress, ranks::Ranks, stats::percentile,
};

/// Options of `ucm-bench load`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Rank processes
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) ranks: u32,
    /// Blocks of the working set
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) blocks: u32,
    /// Shards of a block; task s loads shard s of every block
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) shards_per_block: u32,
    /// Bytes of a shard
    #[arg(long, default_value_t = 1 << 20, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) shard_bytes: u64,
    /// What lies below the cache
    #[arg(long, value_enum, default_value = "file")]
    pub(crate) backend: BackendChoice,
    /// How files are read
    #[arg(long, value_enum, default_value = "buffered")]
    pub(crate) file_io: FileIoChoice,
    /// Latency of the slow backend
    #[arg(long, default_value_t = 2000)]
    pub(crate) latency_us: u64,
    /// Loads in flight in the backend, per rank
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) backend_depth: u32,
    /// Order in which ranks visit the shards of a task
    #[arg(long, value_enum, default_value = "rotated")]
    pub(crate) order: OrderChoice,
    /// Ranks start up to this much apart
    #[arg(long, default_value_t = 0)]
    pub(crate) jitter_us: u64,
    /// Warm loads and floors per run
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) warm_rounds: u32,
    /// Best page tier to try: 1g, 2m, thp, 4k
    #[arg(long, default_value = "2m")]
    pub(crate) pages: String,
    /// Directory of the file backend (default: a new one in the temporary directory, removed
    /// afterwards)
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
    /// Measure the lockstep baseline too (the default with the slow backend)
    #[arg(long)]
    pub(crate) lockstep: Option<bool>,
}

#[derive(Default)]
struct Samples {
    cold_wall_us: Vec<f64>,
    cold_cpu_ms: Vec<f64>,
    warm_wall_us: Vec<f64>,
    floor_wall_us: Vec<f64>,
    lockstep_wall_us: Vec<f64>,
    backend_loads: Vec<f64>,
    inflight_max: Vec<f64>,
    inflight_mean: Vec<f64>,
    task_us: Vec<f64>,
    cpu_s: f64,
    owned: Vec<u64>,
    wrong_bytes: u64,
    first_wrong: Option<String>,
}

/// Measures.
pub(crate) fn run(args: &Args, common: &Common) -> Result<Document, BenchError> {
    let scratch = crate::scratch::Scratch::new(args.dir.as_deref())?;
    let spec = spec(args, common, &scratch)?;
    let mut ranks = Ranks::start("load", args.ranks)?;
    let opened: Vec<Reply> =
        ranks.ask(|rank| Order::Open { rank, spec: Box::new(spec.clone()) })?;
    let mut document = Document::new("load", Env::collect());
    describe(&mut document, &spec, common, opened.first());

    let lockstep = args
        .lockstep
        .unwrap_or(spec.backend == BackendChoice::Slow && spec.order != OrderChoice::Lockstep);
    let rounds = u64::from(args.warm_rounds);
    let progress = Progress::new("load", u64::from(common.runs) * (2 + 2 * rounds), common.quiet);
    let mut samples = Samples { owned: vec![0; args.ranks as usize], ..Samples::default() };
    for run in 0..common.runs {
        // The first run's pages are touched for the first time; it is measured like the others.
        if spec.backend == BackendChoice::File {
            let _: Reply = ranks.ask_one(0, &Order::Store { run })?;
        }
        progress.advance(1);
        cold(&mut ranks, &spec, run, &mut samples)?;
        progress.advance(1);
        for _ in 0..args.warm_rounds {
            warm(&mut ranks, run, &mut samples)?;
            progress.advance(1);
            floor(&mut ranks, run, &mut samples)?;
            progress.advance(1);
        }
        let _: Reply = ranks.ask_one(0, &Order::Clear { run })?;
        if lockstep {
            // The baseline takes long: once per measurement says enough.
            if samples.lockstep_wall_us.is_empty() {
                baseline(&mut ranks, run, &mut samples)?;
            }
            let _: Reply = ranks.ask_one(0, &Order::Clear { run })?;
        }
    }
    drop(progress);
    drop(ranks);
    report(&mut document, &spec, &samples)?;
    Ok(document)
}

fn spec(
    args: &Args,
    common: &Common,
    scratch: &crate::scratch::Scratch,
) -> Result<Spec, BenchError> {
    let shards = u64::from(args.blocks) * u64::from(args.shards_per_block);
    let slots = u32::try_from(shards)
        .map_err(|_| BenchError::Usage(format!("{shards} shards are too many")))?;
    let settings = [
        format!("cache.dir={}", scratch.path("cache").display()),
        format!("cache.ranks={}", args.ranks),
        format!("cache.pages={}", args.pages),
        "pool.0.name=kv".into(),
        format!("pool.0.shard_bytes={}", args.shard_bytes),
        format!("pool.0.shards_per_block={}", args.shards_per_block),
        format!("pool.0.slots={slots}"),
        format!("queue.backend_depth={}", args.backend_depth),
        format!(
            "queue.order={}",
            if args.order == OrderChoice::Rotated { "rotated" } else { "natural" }
        ),
    ];
    let config =
        ucm::Config::load(None, [], &settings).map_err(|e| BenchError::Usage(e.to_string()))?;
    Ok(Spec {
        config: config.to_toml().map_err(|e| BenchError::Usage(e.to_string()))?,
        ranks: args.ranks,
        blocks: args.blocks,
        shards_per_block: args.shards_per_block,
        shard_bytes: args.shard_bytes,
        backend: args.backend,
        backend_dir: scratch.path("objects").display().to_string(),
        file_io: args.file_io,
        latency_us: args.latency_us,
        backend_depth: args.backend_depth,
        order: args.order,
        jitter_us: args.jitter_us,
        verify: common.verify,
    })
}

fn describe(document: &mut Document, spec: &Spec, common: &Common, opened: Option<&Reply>) {
    let (title, from) = match spec.backend {
        BackendChoice::File => {
            let from = match spec.file_io {
                FileIoChoice::Buffered => "files, which lie in the page cache",
                FileIoChoice::Auto | FileIoChoice::Threads => "files, past the page cache",
            };
            ("Loads from files", from.to_owned())
        }
        BackendChoice::Slow => (
            "Loads from a slow device",
            format!("a device that takes {} us for a shard", spec.latency_us),
        ),
        BackendChoice::Memory => ("Loads from memory", "a backend as fast as memory".to_owned()),
    };
    document.about(
        title,
        &format!(
            "{} rank processes load the same {} shards through one shared cache: cold from {from}, \
             then warm, next to plain memcpy of the same bytes in the same processes.",
            spec.ranks,
            spec.shards()
        ),
    );
    document.config("ranks", spec.ranks);
    document.config("blocks", spec.blocks);
    document.config("shards_per_block", spec.shards_per_block);
    document.config("shard_bytes", spec.shard_bytes);
    document.config("backend", json!(spec.backend));
    document.config("file_io", json!(spec.file_io));
    document.config("latency_us", spec.latency_us);
    document.config("backend_depth", spec.backend_depth);
    document.config("order", json!(spec.order));
    document.config("jitter_us", spec.jitter_us);
    document.config("runs", common.runs);
    document.config("verify", spec.verify);
    if let Some(reply) = opened {
        document.config("backend_mode", reply.backend.clone());
        document.env_mut().page_tier = Some(reply.page_tier.clone());
        document.env_mut().engine = Some(reply.engine.clone());
    }
}

/// When the ranks start together: time enough for all to hear of it.
fn soon() -> u64 {
    clock::now_ns() + 20_000_000
}

fn wall_us(replies: &[Reply]) -> f64 {
    let start = replies.iter().map(|r| r.start_ns).min().unwrap_or(0);
    let end = replies.iter().map(|r| r.end_ns).max().unwrap_or(0);
    end.saturating_sub(start) as f64 / 1e3
}

fn cold(ranks: &mut Ranks, spec: &Spec, run: u32, samples: &mut Samples) -> Result<(), BenchError> {
    let at_ns = soon();
    let replies: Vec<Reply> = ranks.ask(|_| Order::Load { run, at_ns, order: spec.order })?;
    samples.cold_wall_us.push(wall_us(&replies));
    let cpu_ns: u64 = replies.iter().map(|r| r.cpu_ns).sum();
    samples.cold_cpu_ms.push(cpu_ns as f64 / 1e6);
    samples.backend_loads.push(replies.iter().map(|r| r.backend_loads).sum::<u64>() as f64);
    for (total, reply) in samples.owned.iter_mut().zip(&replies) {
        *total += reply.backend_loads;
    }
    let (max, mean) = in_flight(&replies);
    samples.inflight_max.push(max);
    samples.inflight_mean.push(mean);
    samples.task_us.extend(replies.iter().flat_map(|r| r.task_us.iter().copied()));
    samples.note(&replies);
    Ok(())
}

fn warm(ranks: &mut Ranks, run: u32, samples: &mut Samples) -> Result<(), BenchError> {
    let at_ns = soon();
    let replies: Vec<Reply> =
        ranks.ask(|_| Order::Load { run, at_ns, order: OrderChoice::Rotated })?;
    if let Some(loads) = replies.iter().map(|r| r.backend_loads).find(|loads| *loads > 0) {
        return Err(BenchError::Peer(format!("a warm load went {loads} times to the backend")));
    }
    samples.warm_wall_us.push(wall_us(&replies));
    samples.note(&replies);
    Ok(())
}

fn floor(ranks: &mut Ranks, run: u32, samples: &mut Samples) -> Result<(), BenchError> {
    let at_ns = soon();
    let replies: Vec<Reply> = ranks.ask(|_| Order::Copy { run, at_ns })?;
    samples.floor_wall_us.push(wall_us(&replies));
    Ok(())
}

fn baseline(ranks: &mut Ranks, run: u32, samples: &mut Samples) -> Result<(), BenchError> {
    let at_ns = soon();
    let replies: Vec<Reply> =
        ranks.ask(|_| Order::Load { run, at_ns, order: OrderChoice::Lockstep })?;
    samples.lockstep_wall_us.push(wall_us(&replies));
    samples.note(&replies);
    Ok(())
}

impl Samples {
    fn note(&mut self, replies: &[Reply]) {
        for reply in replies {
            self.cpu_s += reply.cpu_ns as f64 / 1e9;
            self.wrong_bytes += reply.wrong_bytes;
            if self.first_wrong.is_none() {
                self.first_wrong.clone_from(&reply.first_wrong);
            }
        }
    }
}

/// Most loads in flight at once over all ranks, and their mean while there was at least one.
fn in_flight(replies: &[Reply]) -> (f64, f64) {
    let mut changes: Vec<(u64, usize, u64)> = Vec::new();
    for (rank, reply) in replies.iter().enumerate() {
        changes.extend(reply.timeline.iter().map(|(at, n)| (*at, rank, *n)));
    }
    changes.sort_unstable_by_key(|(at, ..)| *at);
    let mut current = vec![0_u64; replies.len()];
    let (mut max, mut area, mut busy, mut last) = (0_u64, 0_f64, 0_f64, None);
    for (at, rank, n) in changes {
        let total: u64 = current.iter().sum();
        if let (Some(last), true) = (last, total > 0) {
            let passed = (at - last) as f64;
            area += passed * total as f64;
            busy += passed;
        }
        if let Some(slot) = current.get_mut(rank) {
            *slot = n;
        }
        max = max.max(current.iter().sum());
        last = Some(at);
    }
    (max as f64, if busy > 0.0 { area / busy } else { 0.0 })
}

fn report(document: &mut Document, spec: &Spec, samples: &Samples) -> Result<(), BenchError> {
    let missing = || BenchError::Peer("no samples".into());
    let of = |values: &[f64]| Figure::of(values.iter().copied()).ok_or_else(missing);
    let moved = spec.bytes() as f64 * f64::from(spec.ranks);
    let rate = |wall_us: &[f64]| {
        Figure::of(wall_us.iter().map(|us| moved / (us / 1e6))).ok_or_else(missing)
    };

    let cold = of(&samples.cold_wall_us)?;
    let (warm, floor) = (rate(&samples.warm_wall_us)?, rate(&samples.floor_wall_us)?);
    document.figure("cold_wall_us", &cold);
    document.figure("cold_cpu_ms", &of(&samples.cold_cpu_ms)?);
    document.figure("cold_bytes_per_s", &rate(&samples.cold_wall_us)?);
    document.figure("warm_bytes_per_s", &warm);
    document.figure("memcpy_floor_bytes_per_s", &floor);
    document.figure("warm_ratio", &warm.ratio_to(&floor).ok_or_else(missing)?);
    document.figure("backend_loads", &of(&samples.backend_loads)?);
    document.result("unique_shards", spec.shards());
    document.figure("backend_inflight_max", &of(&samples.inflight_max)?);
    document.figure("backend_inflight_mean", &of(&samples.inflight_mean)?);
    let owned: u64 = samples.owned.iter().sum();
    let share: Vec<f64> = samples.owned.iter().map(|n| *n as f64 / owned.max(1) as f64).collect();
    document.result("owner_share", json!(share));
    document.result("owner_share_min", share.iter().copied().fold(f64::INFINITY, f64::min));
    document.result("owner_share_max", share.iter().copied().fold(0.0, f64::max));
    let mut tasks = samples.task_us.clone();
    tasks.sort_by(f64::total_cmp);
    document.result("task_us_p50", percentile(&tasks, 0.5));
    document.result("task_us_p99", percentile(&tasks, 0.99));
    document.result("cpu_s", samples.cpu_s);
    document.result("wrong_bytes", samples.wrong_bytes);
    if let Some(first) = &samples.first_wrong {
        document.result("first_wrong_byte", first.clone());
    }
    if let Some(lockstep) = Figure::of(samples.lockstep_wall_us.iter().copied()) {
        document.result("lockstep_wall_us", lockstep.median());
        document.result("speedup_vs_lockstep", lockstep.median() / cold.median());
    }
    document.highlight(["cold_wall_us", "warm_bytes_per_s", "warm_ratio"]);
    if document.results().field("speedup_vs_lockstep").is_some() {
        document.highlight(["speedup_vs_lockstep"]);
    }
    document.highlight(["backend_loads"]);
    plots(document, &warm, &floor, &share);
    Ok(())
}

fn plots(document: &mut Document, warm: &Figure, floor: &Figure, share: &[f64]) {
    let mut rates = Plot::lines(
        "Bytes delivered to all ranks, all hits",
        "measurement, in the order taken",
        "GB/s",
    );
    for (name, figure) in [("through the cache", warm), ("plain memcpy (floor)", floor)] {
        let points = figure.samples().iter().enumerate();
        rates.line(name, points.map(|(at, rate)| (at as f64 + 1.0, rate / 1e9)));
    }
    document.plot(rates);
    let names = (0..share.len()).map(|rank| format!("rank {rank}"));
    let mut owners = Plot::bars("Who loaded the shards", "share of backend loads (%)", names);
    owners.heights("owned", share.iter().map(|part| 100.0 * part));
    document.plot(owners);
}
