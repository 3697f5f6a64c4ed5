//! The `ranges` workload: ranks restore the cache of cold requests from another peer, layer by layer.
//!
//! Owns: the command line of `ucm-bench ranges`, the agent, and its results.
//! **Invariant:** a rank is a process, and so is the owner; every restore is of keys that are nowhere on
//! the node; bytes on the wire are counted by the agent, not computed.

mod owner;
mod pull;
mod rank;
mod spec;

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use serde_json::json;
use ucm_remote::{
    Agent, AgentStats, Directory as _, EmbeddedDirectory, EmbeddedLimits, Generation, HostMedium,
    Medium as _, Member, PagedLimits, PeerId, Record, Token,
};
use ucm_transport::Secret;

use self::spec::{Order, Pool, Reply, Shape, Spec, key};
use crate::{
    cli::Common, clock, document::Document, env::Env, error::BenchError, figure::Figure,
    progress::Progress, ranks::Ranks, scratch::Scratch, stats::percentile, table::Table,
};

pub(crate) use rank::run as run_rank;

const SECRET: &[u8] = b"only for one measurement";

/// Options of `ucm-bench ranges`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Ranks that read the same keys, one after the other
    #[arg(long, value_delimiter = ',', default_value = "1,2,4",
          value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: Vec<u32>,
    /// A known shape instead of --layers and --layer-bytes
    #[arg(long, value_enum, conflicts_with_all = ["pools", "layers", "layer_bytes"])]
    shape: Option<Shape>,
    /// Layers of an object
    #[arg(long, default_value_t = 61, value_parser = clap::value_parser!(u32).range(1..=4096))]
    layers: u32,
    /// Bytes of a layer, a multiple of 8
    #[arg(long, default_value_t = 73_728)]
    layer_bytes: u64,
    /// A pool, NAME:LAYERS:BYTES[:FIRST/STRIDE|:L1,L2,…]; may be repeated
    #[arg(long)]
    pools: Vec<Pool>,
    /// Layers that are asked for at once
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=4096))]
    layer_group: u32,
    /// Layers that are read, from the first; all by default
    #[arg(long, default_value_t = u32::MAX, hide_default_value = true,
          value_parser = clap::value_parser!(u32).range(1..))]
    read_layers: u32,
    /// Objects of each pool that a request reads
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    pages: u64,
    /// Requests, each of other keys
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1024))]
    requests: u64,
    /// Time that a layer takes to compute; it hides reading
    #[arg(long, default_value_t = 150)]
    compute_us_per_layer: u64,
    /// Do not complete objects in the background
    #[arg(long)]
    no_prefetch: bool,
    /// The node's medium has no place: everything goes through the arena, and nothing stays
    #[arg(long)]
    full_medium: bool,
    /// Read a group of all requests before the next group
    #[arg(long)]
    interleave_groups: bool,
    /// How the node reaches the owner
    #[arg(long, value_enum, default_value = "tcp")]
    engine: Engine,
    /// Bytes of the arena
    #[arg(long, default_value_t = 256 << 20, value_parser = clap::value_parser!(u64).range(1 << 20..))]
    arena_bytes: u64,
    /// Bytes of a page of the media
    #[arg(long, default_value_t = 65_536, value_parser = clap::value_parser!(u64).range(4096..))]
    page_bytes: u64,
    /// One fetch for the node, or a pull by each rank
    #[arg(long, value_enum, default_value = "ucm")]
    policy: Policy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Engine {
    /// Its service sends the bytes
    Tcp,
    /// Its memory is mapped
    Shm,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Policy {
    /// The pool of this workspace
    Ucm,
    /// What others do: see `pull.rs`
    Pull,
}

pub(crate) fn peer_error(error: impl std::fmt::Display) -> BenchError {
    BenchError::Peer(error.to_string())
}

pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(600)
}

impl Args {
    fn spec(&self) -> Result<Spec, BenchError> {
        let pools = match self.shape {
            Some(shape) => shape.pools(),
            None if !self.pools.is_empty() => self.pools.clone(),
            None => {
                let text = format!("layers:{}:{}", self.layers, self.layer_bytes);
                vec![text.parse().map_err(BenchError::Usage)?]
            }
        };
        if self.policy == Policy::Pull && self.engine == Engine::Shm {
            return Err(BenchError::Usage("--policy pull reads over tcp".into()));
        }
        Ok(Spec {
            pools,
            pages: self.pages,
            requests: self.requests,
            group: self.layer_group,
            read: self.read_layers,
            interleave: self.interleave_groups,
            arena_bytes: self.arena_bytes,
            prefetch: !self.no_prefetch,
            page_bytes: self.page_bytes,
        })
    }
}

/// One value a run.
#[derive(Default)]
struct Samples {
    restore: Vec<f64>,
    restore_p99: Vec<f64>,
    ttfl: Vec<f64>,
    ttfl_p99: Vec<f64>,
    stall: Vec<f64>,
    rate: Vec<f64>,
    wait: Vec<f64>,
    /// Of the time in calls.
    wait_share: Vec<f64>,
    /// The worst run.
    counted: Counted,
}

#[derive(Clone, Copy, Default)]
struct Counted {
    wire: u64,
    whole: u64,
    repeat: u64,
    install: u64,
    calls: u64,
    exchanges: u64,
    copied: u64,
    unique: u64,
}

/// Measures.
pub(crate) fn run(args: &Args, common: &Common) -> Result<Document, BenchError> {
    let spec = args.spec()?;
    let scratch = Scratch::new(None)?;
    let mut owner = Ranks::start("ranges", 1)?;
    let neighbour = (args.engine == Engine::Shm).then(|| scratch.path("owner.sock"));
    let baseline = args.policy == Policy::Pull;
    let own = Order::Own {
        spec: spec.clone(),
        secret: SECRET.to_vec(),
        socket: neighbour.clone(),
        baseline,
    };
    let owned: Reply = owner.ask_one(0, &own)?;
    let mut node = match args.policy {
        Policy::Pull => None,
        Policy::Ucm => {
            Some(Node::start(&spec, &owned, &scratch, neighbour.as_deref(), args.full_medium)?)
        }
    };
    let mut document = Document::new("ranges", Env::collect());
    describe(&mut document, args, common, &spec);
    let progress =
        Progress::new("ranges", u64::from(common.runs) * args.ranks.len() as u64, common.quiet);
    let (mut wrong, mut first_wrong) = (0, None);
    let mut all = Vec::new();
    for count in &args.ranks {
        let mut ranks = Ranks::start("ranges", *count)?;
        let _: Vec<Reply> = ranks.ask(|_| match &node {
            Some(node) => Order::Join { spec: spec.clone(), socket: node.socket.clone() },
            None => Order::Pull {
                spec: spec.clone(),
                secret: SECRET.to_vec(),
                server: owned.baseline.unwrap_or_else(|| ([127, 0, 0, 1], 0).into()),
                token: owned.token,
            },
        })?;
        let mut samples = Samples::default();
        for run in 0..=common.runs {
            let _: Vec<Reply> = ranks.ask(|_| Order::Clear)?;
            if let Some(node) = &mut node {
                node.clear(&spec)?;
            }
            // The first one warms: page tables, connections, what the kernel keeps.
            let warm = run == 0;
            restore(args, &spec, &mut ranks, node.as_ref(), (!warm).then_some(&mut samples))?;
            if common.verify && !warm {
                let said: Vec<Reply> = ranks.ask(|_| Order::Verify)?;
                for (number, reply) in said.into_iter().enumerate() {
                    wrong += reply.wrong_bytes;
                    if let Some(text) = reply.first_wrong {
                        first_wrong.get_or_insert_with(|| format!("rank {number}, {text}"));
                    }
                }
            }
            if !warm {
                progress.advance(1);
            }
        }
        all.push((*count, samples));
    }
    drop(progress);
    document.result("wrong_bytes", wrong);
    document.result("verified", common.verify);
    if let Some(text) = first_wrong {
        document.result("first_wrong_byte", text);
    }
    report(&mut document, &spec, &all)?;
    Ok(document)
}

fn restore(
    args: &Args,
    spec: &Spec,
    ranks: &mut Ranks,
    node: Option<&Node>,
    samples: Option<&mut Samples>,
) -> Result<(), BenchError> {
    let start = node.map(Node::stats);
    let at_ns = clock::now_ns() + 30_000_000;
    let compute_ns = args.compute_us_per_layer * 1000;
    let told: Vec<Reply> = ranks.ask(|_| Order::Restore { at_ns, compute_ns })?;
    if let Some(node) = node {
        node.settle();
    }
    let end = node.map(Node::stats);
    let again: Vec<Reply> = ranks.ask(|_| Order::Repeat)?;
    let last = node.map(Node::stats);
    let Some(samples) = samples else { return Ok(()) };
    let sorted = |of: fn(&Reply) -> &Vec<f64>| {
        let mut all: Vec<f64> = told.iter().flat_map(|reply| of(reply).clone()).collect();
        all.sort_by(f64::total_cmp);
        all
    };
    let (restores, firsts) = (sorted(|r| &r.restore_us), sorted(|r| &r.ttfl_us));
    samples.restore.push(percentile(&restores, 0.5));
    samples.restore_p99.push(percentile(&restores, 0.99));
    samples.ttfl.push(percentile(&firsts, 0.5));
    samples.ttfl_p99.push(percentile(&firsts, 0.99));
    samples.stall.push(percentile(&sorted(|r| &r.stall_us), 0.5));
    let began = told.iter().map(|reply| reply.began_ns).min().unwrap_or(0);
    let ended = told.iter().map(|reply| reply.ended_ns).max().unwrap_or(1);
    let bytes = spec.asked_bytes() * told.len() as u64;
    let wall = ended.saturating_sub(began).max(1) as f64 / 1e9;
    samples.rate.push(bytes as f64 / wall);
    let mut counted = Counted { unique: spec.asked_bytes(), ..Counted::default() };
    if let (Some(start), Some(end), Some(last)) = (start, end, last) {
        counted.wire = end.wire_bytes - start.wire_bytes;
        counted.whole = end.pulled_bytes - start.pulled_bytes;
        counted.repeat = last.wire_bytes - end.wire_bytes;
        counted.install = end.medium.committed_bytes;
        counted.calls = end.remote_calls - start.remote_calls + end.route_calls - start.route_calls;
        counted.exchanges = end.exchanges - start.exchanges;
        counted.copied = bytes;
        samples.wait.push((end.arena_wait_ns - start.arena_wait_ns) as f64 / 1e3);
        if counted.whole > 0 {
            // What is pulled is wanted, too.
            counted.unique = spec.all().iter().map(|(_, _, len)| len).sum();
        }
    } else {
        let sum = |of: fn(&Reply) -> u64, all: &[Reply]| all.iter().map(of).sum::<u64>();
        counted.wire = sum(|r| r.wire_bytes, &told);
        counted.whole = sum(|r| r.whole_bytes, &told);
        counted.repeat = sum(|r| r.wire_bytes, &again) - counted.wire;
        counted.calls = sum(|r| r.remote_calls, &told);
        counted.copied = sum(|r| r.copy_bytes, &told);
        counted.install = counted.whole;
        samples.wait.push(sum(|r| r.arena_wait_ns, &told) as f64 / 1e3);
    }
    let calls: f64 = told.iter().map(|reply| (reply.ended_ns - reply.began_ns) as f64 / 1e3).sum();
    samples.wait_share.push(samples.wait.last().copied().unwrap_or(0.0) / calls.max(1.0));
    if counted.wire >= samples.counted.wire {
        samples.counted = counted;
    }
    Ok(())
}

/// The node under test: its agent.
struct Node {
    agent: Agent,
    socket: std::path::PathBuf,
    _directory: Arc<EmbeddedDirectory>,
}

impl Node {
    fn start(
        spec: &Spec,
        owned: &Reply,
        scratch: &Scratch,
        neighbour: Option<&std::path::Path>,
        full: bool,
    ) -> Result<Self, BenchError> {
        let directory = Arc::new(EmbeddedDirectory::new(EmbeddedLimits::default()));
        let (peer, boot) = (PeerId::new(owner::NAME), Token(owned.boot));
        let address = owned.address.ok_or_else(|| peer_error("the owner serves nobody"))?;
        let member = Member::new(peer.clone(), boot, address.to_string());
        directory.register(&member, soon()).map_err(peer_error)?;
        let records: Vec<_> = spec
            .all()
            .into_iter()
            .zip(&owned.generations)
            .map(|((number, _, len), generation)| {
                (key(number), Record::new(peer.clone(), boot, Generation(*generation), len))
            })
            .collect();
        directory.announce(&records, soon()).map_err(peer_error)?;
        let pages = if full { 1 } else { owner::pages(spec) };
        let segments = owner::shared(spec.page_bytes, pages)?;
        let medium =
            HostMedium::shared(&segments, PagedLimits::new(spec.page_bytes)).map_err(peer_error)?;
        let arena = owner::shared(spec.arena_bytes, 1)?;
        let secret = Secret::new(SECRET).map_err(peer_error)?;
        let mut agent =
            Agent::builder(PeerId::new("node"), medium, Arc::clone(&directory) as _, secret)
                .shared_arena(arena)
                .prefetch(spec.prefetch)
                .objects(usize::try_from(spec.objects()).unwrap_or(usize::MAX).max(4096))
                .start()
                .map_err(peer_error)?;
        let socket = scratch.path("node.sock");
        agent.serve_ranks(&socket).map_err(peer_error)?;
        if let Some(neighbour) = neighbour {
            agent.attach_neighbour_at(neighbour).map_err(peer_error)?;
        }
        Ok(Self { agent, socket, _directory: directory })
    }

    fn stats(&self) -> AgentStats {
        self.agent.stats()
    }

    /// Nothing is fetched any more, and nothing waits to be.
    fn settle(&self) {
        let mut quiet = 0;
        while quiet < 20 {
            let busy = self.stats().fetches > 0;
            quiet = if busy { 0 } else { quiet + 1 };
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// No key is on the node any more.
    fn clear(&self, spec: &Spec) -> Result<(), BenchError> {
        self.settle();
        self.agent.forget_parts();
        let medium = self.agent.medium().medium();
        for (number, ..) in spec.all() {
            let _ = medium.remove(&key(number));
        }
        let usage = medium.usage();
        let left = usage.committed_bytes + usage.pending_bytes + usage.quarantine_bytes;
        if left > 0 {
            return Err(BenchError::Peer(format!("{left} bytes are still held between restores")));
        }
        Ok(())
    }
}

fn describe(document: &mut Document, args: &Args, common: &Common, spec: &Spec) {
    document.about(
        "Restores from another peer",
        "Ranks of one node read the same cold keys of another process, group of layers by group of layers.",
    );
    document.config("policy", format!("{:?}", args.policy).to_lowercase());
    document.config("engine", format!("{:?}", args.engine).to_lowercase());
    document.config("ranks", json!(args.ranks));
    document.config("pools", json!(spec.pools));
    document.config("layer_group", args.layer_group);
    document.config("pages", args.pages);
    document.config("requests", args.requests);
    document.config("compute_us_per_layer", args.compute_us_per_layer);
    document.config("prefetch", spec.prefetch);
    document.config("interleave_groups", args.interleave_groups);
    document.config("full_medium", args.full_medium);
    document.config("page_bytes", args.page_bytes);
    document.config("runs", common.runs);
    document.env_mut().engine = Some(format!("{:?}", args.engine).to_lowercase());
}

fn report(document: &mut Document, spec: &Spec, all: &[(u32, Samples)]) -> Result<(), BenchError> {
    let missing = || BenchError::Peer("no samples".into());
    let of = |values: &[f64]| Figure::of(values.iter().copied()).ok_or_else(missing);
    let head = [
        "ranks",
        "restore_us_p50",
        "ttfl_us_p50",
        "stall_us",
        "GB/s",
        "amplification",
        "calls",
        "exchanges",
    ];
    let mut table = Table::new(head);
    let (mut by_ranks, mut worst) = (Vec::new(), 0.0_f64);
    let mut firsts = Vec::new();
    for (count, samples) in all {
        let counted = samples.counted;
        let amplification = counted.wire as f64 / counted.unique.max(1) as f64;
        worst = worst.max(amplification);
        let (restore, ttfl) = (of(&samples.restore)?, of(&samples.ttfl)?);
        let (stall, rate) = (of(&samples.stall)?, of(&samples.rate)?);
        firsts.push(ttfl.median());
        by_ranks.push(json!({
            "ranks": count,
            "restore_us_p50": restore.median(), "ttfl_us_p50": ttfl.median(),
            "ttfl_us_p99": of(&samples.ttfl_p99)?.median(),
            "stall_us": stall.median(), "get_bytes_per_s": rate.median(),
            "wire_bytes": counted.wire, "unique_bytes": counted.unique,
            "amplification": amplification, "whole_bytes": counted.whole,
            "repeat_remote": counted.repeat, "local_install_bytes": counted.install,
            "remote_calls": counted.calls, "exchanges": counted.exchanges,
            "copy_bytes": counted.copied, "arena_wait_us": of(&samples.wait)?.median(),
            "arena_wait_share": of(&samples.wait_share)?.median(),
        }));
        table.row([
            count.to_string(),
            format!("{:.0}", restore.median()),
            format!("{:.0}", ttfl.median()),
            format!("{:.0}", stall.median()),
            format!("{:.2}", rate.median() / 1e9),
            format!("{amplification:.4}"),
            counted.calls.to_string(),
            counted.exchanges.to_string(),
        ]);
    }
    // The most ranks are what counts.
    if let Some((_, samples)) = all.last() {
        let figures = [
            ("restore_us_p50", &samples.restore),
            ("restore_us_p99", &samples.restore_p99),
            ("ttfl_us_p50", &samples.ttfl),
            ("ttfl_us_p99", &samples.ttfl_p99),
            ("stall_us", &samples.stall),
            ("get_bytes_per_s", &samples.rate),
            ("arena_wait_us", &samples.wait),
            ("arena_wait_share", &samples.wait_share),
        ];
        for (name, values) in figures {
            document.figure(name, &of(values)?);
        }
        let counted = samples.counted;
        document.result("wire_bytes", counted.wire);
        document.result("unique_bytes", counted.unique);
        document.result("whole_bytes", counted.whole);
        document.result("repeat_remote", counted.repeat);
        document.result("local_install_bytes", counted.install);
        document.result("remote_calls", counted.calls);
        document.result("exchanges", counted.exchanges);
        document.result("copy_bytes", counted.copied);
    }
    document.result("amplification", worst);
    if let (Some(first), Some(last)) = (firsts.first(), firsts.last()) {
        document.result("ttfl_ratio", last / first);
    }
    document.result("by_ranks", json!(by_ranks));
    let per_pool: Vec<_> = spec
        .pools
        .iter()
        .map(|pool| {
            json!({
                "name": pool.name, "layers": pool.layers.len(), "layer_bytes": pool.bytes,
                "object_bytes": pool.object_bytes(),
                "unique_bytes": pool.object_bytes() * spec.pages * spec.requests,
            })
        })
        .collect();
    document.result("per_pool", json!(per_pool));
    document.table(table);
    document.highlight(["restore_us_p50", "ttfl_us_p50", "amplification"]);
    Ok(())
}
