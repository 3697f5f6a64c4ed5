//! The `crash` workload: rank processes work, and are killed and stopped at random moments.
//!
//! Owns: the command line of `ucm-bench crash`, the killing, and the accounts afterwards.
//! **Invariant:** a recovery is over when the dead member's record is free: by then its locks, pins,
//! fills and leases are gone.

mod rank;
mod spec;

use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use ucm::{Config, Node, Scheduler};

pub(crate) use rank::run as run_rank;
use spec::{Order, Reply, Spec};

use crate::{
    cli::Common, clock, document::Document, env::Env, error::BenchError, figure::Figure,
    plot::Plot, progress::Progress, ranks::Ranks, rng::Rng, scratch::Scratch, table::Table,
};

/// Options of `ucm-bench crash`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Rank processes
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=64))]
    pub(crate) ranks: u32,
    /// Ranks killed (SIGKILL), one after the other, each replaced by a new process
    #[arg(long, default_value_t = 100)]
    pub(crate) kills: u32,
    /// Ranks stopped (SIGSTOP) for a while and continued
    #[arg(long, default_value_t = 10)]
    pub(crate) stops: u32,
    /// Slots of the cache
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(64..))]
    pub(crate) slots: u32,
    /// Bytes of a shard
    #[arg(long, default_value_t = 16384, value_parser = clap::value_parser!(u64).range(64..))]
    pub(crate) shard_bytes: u64,
    /// Latency of the backend; long fills are often hit by a kill
    #[arg(long, default_value_t = 300)]
    pub(crate) latency_us: u64,
    /// Seed of keys and moments
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

/// How long a recovery may take before the measurement gives up.
const GIVE_UP: Duration = Duration::from_secs(10);

#[derive(Default)]
struct Accounts {
    recovery_ms: Vec<f64>,
    ops_during_recovery: u64,
    ops_while_stopped: u64,
    stuck_waiters: u64,
    ops: u64,
}

/// Measures.
pub(crate) fn run(args: &Args, common: &Common) -> Result<Document, BenchError> {
    let scratch = Scratch::new(None)?;
    let spec = spec(args, &scratch)?;
    let mut document = Document::new("crash", Env::collect());
    describe(&mut document, args);
    let scheduler = join(&spec)?;
    let mut ranks = Ranks::start("crash", args.ranks)?;
    let mut seats: Vec<Reply> = ranks.ask(|rank| open(&spec, rank, 0))?;
    let mut rng = Rng::new(args.seed);
    let mut accounts = Accounts::default();
    let progress = Progress::new("crash", u64::from(args.kills + args.stops), common.quiet);
    let (mut kills, mut stops) = (args.kills, args.stops);
    let mut life = 1;
    while kills + stops > 0 {
        pause(rng.below(5_000));
        let victim = u32::try_from(rng.below(u64::from(args.ranks))).unwrap_or(0);
        if rng.below(u64::from(kills + stops)) < u64::from(kills) {
            kills -= 1;
            kill(&mut ranks, &scheduler, &seats, victim, &mut accounts)?;
            ranks.replace("crash", victim)?;
            let reply = ranks.ask_one(victim, &open(&spec, victim, life))?;
            life += 1;
            if let Some(seat) = seats.get_mut(victim as usize) {
                *seat = reply;
            }
        } else {
            stops -= 1;
            stop(&mut ranks, victim, &mut rng, &mut accounts)?;
        }
        progress.advance(1);
    }
    drop(progress);
    settle(&mut document, &scratch, scheduler, ranks, &mut accounts)?;
    report(&mut document, args, &accounts)?;
    Ok(document)
}

fn spec(args: &Args, scratch: &Scratch) -> Result<Spec, BenchError> {
    let settings = [
        format!("cache.dir={}", scratch.path("cache").display()),
        format!("cache.ranks={}", args.ranks),
        "cache.pages=4k".into(),
        format!("pool.0.shard_bytes={}", args.shard_bytes),
        "pool.0.shards_per_block=4".into(),
        format!("pool.0.slots={}", args.slots),
        format!("pool.0.reserved={}", args.slots / 16),
        "queue.backend_depth=4".into(),
        "queue.close_timeout_ms=2000".into(),
    ];
    let config = Config::load(None, [], &settings).map_err(|e| BenchError::Usage(e.to_string()))?;
    Ok(Spec {
        config: config.to_toml().map_err(|e| BenchError::Usage(e.to_string()))?,
        keys: u64::from(args.slots) * 3,
        shard_bytes: args.shard_bytes,
        latency_us: args.latency_us,
        seed: args.seed,
        scratch: scratch.path("").display().to_string(),
    })
}

fn describe(document: &mut Document, args: &Args) {
    document.about(
        "Ranks that die",
        "Rank processes are killed and stopped at random moments while all of them work: how soon the \
         others have cleared up, and whether anything is lost, leaked or wrong afterwards.",
    );
    document.highlight(["recovery_ms_p50", "recovery_ms_max", "leaked_slots", "stuck_waiters"]);
    document.config("ranks", args.ranks);
    document.config("kills", args.kills);
    document.config("stops", args.stops);
    document.config("slots", args.slots);
    document.config("shard_bytes", args.shard_bytes);
    document.config("latency_us", args.latency_us);
    document.config("seed", args.seed);
}

/// The parent is a scheduler: it watches, and keeps the cache when all ranks are dead.
fn join(spec: &Spec) -> Result<Scheduler, BenchError> {
    let refused =
        |e: ucm::Error| BenchError::Environment(format!("the scheduler cannot join: {e}"));
    Node::new(Config::from_toml(&spec.config).map_err(refused)?)
        .and_then(|node| node.scheduler())
        .map_err(refused)
}

fn open(spec: &Spec, rank: u32, life: u64) -> Order {
    Order::Open { rank, life, spec: Box::new(spec.clone()) }
}

fn pause(us: u64) {
    std::thread::sleep(Duration::from_micros(us));
}

fn kill(
    ranks: &mut Ranks,
    scheduler: &Scheduler,
    seats: &[Reply],
    victim: u32,
    accounts: &mut Accounts,
) -> Result<(), BenchError> {
    let Some(seat) = seats.get(victim as usize) else { return Ok(()) };
    let before = survivors_ops(ranks, victim)?;
    let start = clock::now_ns();
    ranks.signal(victim, Signal::KILL)?;
    let control = scheduler.member().control();
    let is_there = || {
        let members = control.inspect_members();
        members.iter().any(|m| m.index == seat.seat && m.generation == seat.generation)
    };
    while is_there() {
        if clock::now_ns() - start > u64::try_from(GIVE_UP.as_nanos()).unwrap_or(u64::MAX) {
            return Err(BenchError::Peer(format!(
                "the death of rank {victim} was not recovered within {GIVE_UP:?}"
            )));
        }
        pause(100);
    }
    accounts.recovery_ms.push((clock::now_ns() - start) as f64 / 1e6);
    accounts.ops_during_recovery += survivors_ops(ranks, victim)?.saturating_sub(before);
    Ok(())
}

fn stop(
    ranks: &mut Ranks,
    victim: u32,
    rng: &mut Rng,
    accounts: &mut Accounts,
) -> Result<(), BenchError> {
    let before = survivors_ops(ranks, victim)?;
    ranks.signal(victim, Signal::STOP)?;
    pause(20_000 + rng.below(200_000));
    let after = survivors_ops(ranks, victim)?;
    ranks.signal(victim, Signal::CONT)?;
    accounts.ops_while_stopped += after.saturating_sub(before);
    Ok(())
}

fn survivors_ops(ranks: &mut Ranks, victim: u32) -> Result<u64, BenchError> {
    let mut ops = 0;
    for rank in (0..ranks.count()).filter(|rank| *rank != victim) {
        let reply: Reply = ranks.ask_one(rank, &Order::Report)?;
        ops += reply.ops;
    }
    Ok(ops)
}

/// Lets everybody finish, then looks at what is left.
fn settle(
    document: &mut Document,
    scratch: &Scratch,
    scheduler: Scheduler,
    mut ranks: Ranks,
    accounts: &mut Accounts,
) -> Result<(), BenchError> {
    let replies: Vec<Reply> = ranks.ask(|_| Order::Finish)?;
    accounts.ops += replies.iter().map(|r| r.ops).sum::<u64>();
    accounts.stuck_waiters += replies.iter().map(|r| r.stuck).sum::<u64>();
    let inspection = scheduler.inspect();
    let (mut slots, mut pins) = (0, 0);
    for pool in &inspection.pools {
        slots += pool.moving + pool.filling + pool.draining;
        pins += pool.pinned;
    }
    document.result("leaked_slots", slots);
    document.result("leaked_pins", pins);
    document.result("problems", json!(inspection.problems));
    document.result("problem_count", inspection.problems.len());
    let statistics: serde_json::Map<_, _> = inspection
        .statistics
        .list()
        .into_iter()
        .map(|(name, value)| (name.to_owned(), json!(value)))
        .collect();
    document.result("statistics", statistics);
    drop(ranks);
    drop(scheduler);
    document.result("leaked_bytes", shared_bytes_left()?);
    let wrong = spec::wrong_notes(scratch)?;
    document.result("wrong_bytes", wrong.len());
    if let Some(first) = wrong.first() {
        document.result("first_wrong_byte", first.clone());
    }
    Ok(())
}

/// Bytes of our shared memory that some process of this machine still holds open, after all of
/// ours have ended.
fn shared_bytes_left() -> Result<u64, BenchError> {
    let mut bytes = 0;
    let own =
        std::fs::read_dir("/proc/self/fd").map_err(|e| BenchError::io("list open files", e))?;
    for entry in own.flatten() {
        let is_ours = std::fs::read_link(entry.path())
            .is_ok_and(|to| to.to_string_lossy().contains("memfd:ucm"));
        if is_ours {
            bytes += std::fs::metadata(entry.path()).map_or(0, |m| m.len());
        }
    }
    Ok(bytes)
}

fn report(document: &mut Document, args: &Args, accounts: &Accounts) -> Result<(), BenchError> {
    document.result("kills", args.kills);
    document.result("stops", args.stops);
    if let Some(figure) = Figure::of(accounts.recovery_ms.iter().copied()) {
        document.result("recovery_ms_p50", figure.median());
        document.result("recovery_ms_max", figure.max());
        let mut plot = Plot::lines("Time from SIGKILL to full recovery", "kill", "ms");
        plot.line(
            "recovery",
            accounts.recovery_ms.iter().enumerate().map(|(i, ms)| (i as f64, *ms)),
        );
        document.plot(plot);
    }
    document.result("stuck_waiters", accounts.stuck_waiters);
    document.result("ops_during_recovery", accounts.ops_during_recovery);
    document.result("ops_while_stopped", accounts.ops_while_stopped);
    document.result("ops", accounts.ops);
    document.table(summary(document));
    Ok(())
}

/// All results but the long list of event counts.
fn summary(document: &Document) -> Table {
    let mut table = Table::new(["result", "value"]);
    for (name, value) in document.results().iter().filter(|(name, _)| *name != "statistics") {
        table.row([name.to_owned(), Table::human(name, value)]);
    }
    table
}
