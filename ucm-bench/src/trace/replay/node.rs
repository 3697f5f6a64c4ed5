//! Several ranks: whole requests from cache and files, cold and warm.
//!
//! Owns: the order of a run. The parent is the scheduler: it joins the cache without mapping bytes,
//! asks what of a request is there, and tells all ranks to serve it. Each run starts with an empty
//! store. In the first pass known blocks are loaded and new ones computed and dumped; in the second,
//! everything exists and is loaded, partly from the cache, partly from files.
//!
//! **Invariant:** only loads, dumps and floors are timed: from the first rank's start to the last
//! rank's end; computing and verifying happen in between.

use std::{collections::HashSet, fs};

use ucm::{Config, Node, PoolId, Presence, Scheduler};

use super::{
    super::{Args, parse::Request},
    WORKLOAD, node_report,
    scale::{Limits, SHARD_BYTES, Scale},
    slice::{self, Slice},
    spec::{Keys, Order, Reply, Shards, Spec},
};
use crate::{
    cli::Common, document::Document, env::Env, error::BenchError, progress::Progress, ranks::Ranks,
    scratch::Scratch, trace::TraceSource,
};

/// Cache size when none is given, in percent of the blocks of the slice.
const DEFAULT_CAPACITY: f64 = 30.0;
/// In the warm pass every so-manieth request is followed by the memcpy floor.
const FLOOR_EVERY: usize = 2;

/// What is replayed, and in which cache.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) source: String,
    pub(super) slice: Slice,
    pub(super) scale: Scale,
    pub(super) ranks: u32,
    pub(super) max_blocks: u32,
    pub(super) capacity_pct: f64,
    pub(super) capacity_blocks: usize,
}

/// One pass over all requests.
#[derive(Debug, Default)]
pub(super) struct Pass {
    /// Block references, and how many were resident as a whole when their request came.
    pub(super) references: u64,
    pub(super) hits: u64,
    /// Time of loads and dumps.
    pub(super) load_ns: u64,
    pub(super) dump_ns: u64,
    pub(super) loaded_bytes: u64,
    pub(super) dumped_bytes: u64,
    pub(super) request_us: Vec<f64>,
    pub(super) shards: Shards,
    pub(super) backend_loads: u64,
    pub(super) checked_bytes: u64,
    pub(super) floor_ns: u64,
    pub(super) floor_bytes: u64,
}

/// One run: cold, then warm.
#[derive(Debug, Default)]
pub(super) struct Run {
    pub(super) cold: Pass,
    pub(super) warm: Pass,
}

/// What all runs together found wrong.
#[derive(Debug, Default)]
pub(super) struct Wrong {
    pub(super) bytes: u64,
    pub(super) first: Option<String>,
}

pub(super) fn run(args: &Args, common: &Common) -> Result<Document, BenchError> {
    let scratch = Scratch::new(args.replay.dir.as_deref())?;
    let job = job(args, &scratch)?;
    let mut document = Document::new("trace", Env::collect());
    node_report::describe(&mut document, args, common, &job);
    let requests = job.slice.trace.requests();
    let steps = u64::from(common.runs) * 2 * requests.len() as u64;
    let progress = Progress::new("replay", steps, common.quiet);
    let mut runs = Vec::new();
    let mut wrong = Wrong::default();
    for run in 0..common.runs {
        progress.label(&format!("replay, run {} of {}", run + 1, common.runs));
        let store = scratch.path(&format!("objects-{run}"));
        let cache = scratch.path(&format!("cache-{run}"));
        let mut replay = Replay::start(args, &job, &store, &cache, &mut document)?;
        let cold = replay.pass(requests, true, &progress)?;
        let warm = replay.pass(requests, false, &progress)?;
        wrong.bytes += replay.wrong.bytes;
        wrong.first = wrong.first.or_else(|| replay.wrong.first.take());
        runs.push(Run { cold, warm });
        // The next run's page cache shall hold its own files.
        drop(replay);
        fs::remove_dir_all(&store).map_err(|e| BenchError::path("remove", &store, e))?;
    }
    drop(progress);
    node_report::report(&mut document, args, &job, &runs, &wrong)?;
    Ok(document)
}

fn job(args: &Args, scratch: &Scratch) -> Result<Job, BenchError> {
    let source = TraceSource::find(&args.trace)?;
    let trace = source.load(args.seed)?.first(args.requests.unwrap_or(usize::MAX));
    if trace.unique_blocks() == 0 {
        return Err(BenchError::Usage(format!("{source} has no blocks")));
    }
    let limits = Limits::read(&scratch.path("."))?;
    let options = &args.replay;
    let scale = Scale::choose(limits, SHARD_BYTES, options.layers, options.working_set_bytes)?;
    let most = options.max_blocks as usize;
    let slice = slice::conversations(&trace, most, scale.blocks, args.seed);
    let capacity_pct = match args.capacity_pct.as_deref() {
        None => DEFAULT_CAPACITY,
        Some([one]) => *one,
        Some(many) => {
            return Err(BenchError::Usage(format!(
                "--replay with several ranks takes one --capacity-pct, not {}",
                many.len()
            )));
        }
    };
    let unique = slice.trace.unique_blocks();
    let capacity_blocks = super::super::capacities(&[capacity_pct], unique)?.first().copied();
    Ok(Job {
        source: source.to_string(),
        slice,
        scale,
        ranks: options.ranks,
        max_blocks: options.max_blocks,
        capacity_pct,
        capacity_blocks: capacity_blocks.unwrap_or(1),
    })
}

/// The processes of one run, and the parent's own stay in their cache.
struct Replay<'a> {
    job: &'a Job,
    // Leaves before the ranks do.
    scheduler: Scheduler,
    ranks: Ranks,
    keys: Keys,
    stored: HashSet<u32>,
    wrong: Wrong,
}

impl<'a> Replay<'a> {
    fn start(
        args: &Args,
        job: &'a Job,
        store: &std::path::Path,
        cache: &std::path::Path,
        document: &mut Document,
    ) -> Result<Self, BenchError> {
        let usage = |e: &dyn std::fmt::Display| BenchError::Usage(e.to_string());
        let slots = job.capacity_blocks as u64 * u64::from(job.scale.layers);
        let settings = [
            format!("cache.dir={}", cache.display()),
            format!("cache.ranks={}", job.ranks),
            format!("cache.pages={}", args.replay.pages),
            "pool.0.name=kv".to_owned(),
            format!("pool.0.shard_bytes={SHARD_BYTES}"),
            format!("pool.0.shards_per_block={}", job.scale.layers),
            format!("pool.0.slots={slots}"),
        ];
        let config = Config::load(None, [], &settings).map_err(|e| usage(&e))?;
        let spec = Spec {
            config: config.to_toml().map_err(|e| usage(&e))?,
            ranks: job.ranks,
            shard_bytes: SHARD_BYTES,
            shards_per_block: job.scale.layers,
            max_blocks: job.max_blocks,
            store: Some(store.display().to_string()),
        };
        let mut ranks = Ranks::start(WORKLOAD, job.ranks)?;
        let opened: Vec<Reply> =
            ranks.ask(|rank| Order::Open { rank, spec: Box::new(spec.clone()) })?;
        if let Some(first) = opened.first() {
            document.env_mut().page_tier = Some(first.page_tier.clone());
            document.env_mut().engine = Some(first.engine.clone());
            document.config("backend_mode", first.backend.clone());
        }
        let scheduler = Node::new(config)
            .and_then(|node| node.scheduler())
            .map_err(|e| BenchError::Environment(format!("the scheduler cannot join: {e}")))?;
        Ok(Self {
            job,
            scheduler,
            ranks,
            keys: Keys::new(),
            stored: HashSet::new(),
            wrong: Wrong::default(),
        })
    }

    fn pass(
        &mut self,
        requests: &[Request],
        cold: bool,
        progress: &Progress,
    ) -> Result<Pass, BenchError> {
        let mut pass = Pass::default();
        for (number, request) in requests.iter().enumerate() {
            // From the deepest block to the root, which so becomes the most recently used.
            let mut blocks = request.blocks.clone();
            blocks.reverse();
            pass.references += blocks.len() as u64;
            pass.hits += self.resident(&blocks)?;
            let (known, new): (Vec<u32>, Vec<u32>) =
                blocks.into_iter().partition(|block| self.stored.contains(block));
            self.load(&known, &mut pass)?;
            if !new.is_empty() {
                self.dump(&new, &mut pass)?;
            }
            if !cold && number % FLOOR_EVERY == 0 {
                self.floor(&known, &mut pass)?;
            }
            progress.advance(1);
        }
        Ok(pass)
    }

    /// Blocks of which every shard is in the cache, as a scheduler sees it.
    fn resident(&self, blocks: &[u32]) -> Result<u64, BenchError> {
        let layers = self.job.scale.layers;
        let keys: Vec<_> = blocks.iter().flat_map(|block| self.keys.of(*block, layers)).collect();
        let there = self
            .scheduler
            .lookup(PoolId(0), &keys)
            .map_err(|e| BenchError::Peer(format!("lookup: {e}")))?;
        let whole = |shards: &&[Presence]| shards.iter().all(|shard| *shard == Presence::Ready);
        Ok(there.chunks(layers as usize).filter(whole).count() as u64)
    }

    fn load(&mut self, blocks: &[u32], pass: &mut Pass) -> Result<(), BenchError> {
        let replies: Vec<Reply> = self.ranks.ask(|_| Order::Load { blocks: blocks.to_vec() })?;
        let spent = wall_ns(&replies);
        pass.load_ns += spent;
        pass.request_us.push(spent as f64 / 1e3);
        for reply in replies {
            pass.loaded_bytes += reply.bytes;
            pass.shards.add(reply.shards);
            pass.backend_loads += reply.backend_loads;
            pass.checked_bytes += reply.checked_bytes;
            self.wrong.bytes += reply.wrong_bytes;
            self.wrong.first = self.wrong.first.take().or(reply.first_wrong);
        }
        Ok(())
    }

    fn dump(&mut self, blocks: &[u32], pass: &mut Pass) -> Result<(), BenchError> {
        let _: Vec<Reply> = self.ranks.ask(|_| Order::Compute { blocks: blocks.to_vec() })?;
        let replies: Vec<Reply> = self.ranks.ask(|_| Order::Dump)?;
        pass.dump_ns += wall_ns(&replies);
        pass.dumped_bytes += replies.iter().map(|reply| reply.bytes).sum::<u64>();
        self.stored.extend(blocks);
        Ok(())
    }

    fn floor(&mut self, blocks: &[u32], pass: &mut Pass) -> Result<(), BenchError> {
        let replies: Vec<Reply> = self.ranks.ask(|_| Order::Copy { blocks: blocks.to_vec() })?;
        let bytes: u64 = replies.iter().map(|reply| reply.bytes).sum();
        if bytes > 0 {
            pass.floor_ns += wall_ns(&replies);
            pass.floor_bytes += bytes;
        }
        Ok(())
    }
}

/// From the first rank's start to the last rank's end.
fn wall_ns(replies: &[Reply]) -> u64 {
    let start = replies.iter().map(|reply| reply.start_ns).min().unwrap_or(0);
    let end = replies.iter().map(|reply| reply.end_ns).max().unwrap_or(0);
    end.saturating_sub(start)
}
