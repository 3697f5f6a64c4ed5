//! The `ctrl` workload: what the control plane costs, next to what memory and kernel charge.
//!
//! Owns: the command line of `ucm-bench ctrl` and the order of its measurements.
//! **Invariant:** each run measures everything once, in turn, in the same processes; each figure is
//! over the runs.

mod pressure;
mod proc;
mod rank;
mod report;
mod samples;
mod shared;
mod spec;
mod tables;
mod whole;

use std::{os::fd::AsRawFd as _, time::Duration};

pub(crate) use rank::run as run_rank;
use samples::{Idle, Samples};
use spec::{Instants, Order, Size, Speeds, Task, Together};
use ucm_ctrl::{Control, Geometry};

use crate::{
    cli::Common, clock, document::Document, env::Env, error::BenchError, progress::Progress,
    ranks::Ranks, scratch::Scratch,
};

/// Options of `ucm-bench ctrl`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Processes that hit the same keys at once, one measurement for each number
    #[arg(long, value_delimiter = ',', default_value = "1,2,4",
          value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) ranks: Vec<u32>,
    /// Slots of the cache
    #[arg(long, default_value_t = 65_536, value_parser = clap::value_parser!(u32).range(1024..))]
    pub(crate) slots: u32,
    /// Resident keys, at most one a slot
    #[arg(long, default_value_t = 65_536, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) keys: u32,
    /// Slots of further caches, each full, for the curve
    #[arg(long, value_delimiter = ',', default_value = "1000,10000,100000,1000000,10000000",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000_000))]
    pub(crate) scaling: Vec<u32>,
    /// Wake-ups of each kind and run
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) wakes: u32,
    /// Processes that wait for one fill
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) waiters: u32,
    /// How long they wait
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) wait_ms: u64,
    /// How long ranks are watched doing nothing, and waiting
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) idle_seconds: u64,
    /// In seconds rather than a minute: a shorter curve, fewer wake-ups, shorter waits
    #[arg(long)]
    pub(crate) quick: bool,
}

impl Args {
    fn in_force(&self) -> Self {
        let mut args = self.clone();
        if args.quick {
            args.scaling.retain(|slots| *slots <= 100_000);
            args.wakes = args.wakes.min(200);
            args.wait_ms = args.wait_ms.min(500);
            args.idle_seconds = args.idle_seconds.min(2);
        }
        args
    }

    fn most_ranks(&self) -> u32 {
        self.ranks.iter().copied().max().unwrap_or(1)
    }
}

/// Measures.
pub(crate) fn run(args: &Args, common: &Common) -> Result<Document, BenchError> {
    if args.keys > args.slots {
        return Err(BenchError::Usage(format!(
            "--keys {} do not fit into --slots {}",
            args.keys, args.slots
        )));
    }
    let args = &args.in_force();
    let mut document = Document::new("ctrl", Env::collect());
    let (sizes, skipped) = sizes(args)?;
    let steps = sizes.len() as u64 + u64::from(common.runs) * 4 + 2;
    let progress = Progress::new("ctrl", steps, common.quiet);
    let mut samples = Samples::new(args, sizes);

    progress.label("full caches");
    let mut bench = Bench::start(args)?;
    for at in 0..samples.sizes.len() {
        bench.make(&mut samples, at)?;
        progress.advance(1);
    }
    for run in 0..common.runs {
        progress.label("hits and lookups");
        bench.speeds(&mut samples, run)?;
        progress.advance(1);
        progress.label("misses");
        bench.misses(&mut samples)?;
        progress.advance(1);
        progress.label("wake-ups");
        bench.wakes(&mut samples)?;
        progress.advance(1);
        progress.label("waiting");
        bench.waiters(&mut samples)?;
        progress.advance(1);
    }
    drop(bench);
    progress.label("idle ranks");
    watch_idle(args, &progress, &mut samples)?;
    drop(progress);
    report::report(&mut document, args, common, &samples, &skipped)?;
    Ok(document)
}

/// The main size first, then those of the curve that fit into memory; the others with the reason.
fn sizes(args: &Args) -> Result<(Vec<Size>, Vec<String>), BenchError> {
    let mut sizes = vec![Size { slots: args.slots, keys: args.keys }];
    let mut skipped = Vec::new();
    let mut left = proc::available_bytes()? / 2;
    for slots in &args.scaling {
        // Two tables, pin counts, and the numbers that a random order is made from.
        let needed = u64::from(*slots) * 256;
        if needed > left {
            skipped.push(format!(
                "{slots} slots: {} MiB needed, {} MiB may be used",
                needed >> 20,
                left >> 20
            ));
            continue;
        }
        left -= needed;
        sizes.push(Size { slots: *slots, keys: *slots });
    }
    Ok((sizes, skipped))
}

/// The processes and what they share.
struct Bench<'a> {
    args: &'a Args,
    ranks: Ranks,
    processes: u32,
    /// Keys of the pool for waiting that were used.
    used: u64,
}

impl<'a> Bench<'a> {
    fn start(args: &'a Args) -> Result<Self, BenchError> {
        // Rank 0 owns what the others wait for.
        let processes = args.most_ranks().max(args.waiters + 1);
        let mut ranks = Ranks::start("ctrl", processes)?;
        let region = Control::create(&spec::shared_geometry(args.slots), [5; 16]).map_err(peer)?;
        let futex = Control::create(&Geometry::single(1, 0, 1, 1), [6; 16]).map_err(peer)?;
        let (region_fd, futex_fd) = (region.fd().map_err(peer)?, futex.fd().map_err(peer)?);
        let path = |fd: &Option<std::os::fd::OwnedFd>| {
            let number = fd.as_ref().map_or(-1, |fd| fd.as_raw_fd());
            format!("/proc/{}/fd/{number}", std::process::id())
        };
        let order = |_| Order::Join { region: path(&region_fd), futex: path(&futex_fd) };
        let _: Vec<()> = ranks.ask(order)?;
        let () = ranks.ask_one(0, &Order::Fill { keys: args.keys })?;
        Ok(Self { args, ranks, processes, used: 0 })
    }

    fn make(&mut self, samples: &mut Samples, at: usize) -> Result<(), BenchError> {
        if let Some(size) = samples.sizes.get_mut(at) {
            size.bytes = self.ranks.ask_one(0, &Order::Make(size.size))?;
        }
        Ok(())
    }

    fn speeds(&mut self, samples: &mut Samples, run: u32) -> Result<(), BenchError> {
        for size in &mut samples.sizes {
            let order = Order::Measure { size: size.size, seed: u64::from(run) };
            let speeds: Speeds = self.ranks.ask_one(0, &order)?;
            size.speeds.push(speeds);
        }
        for together in &mut samples.together {
            // Time enough for all to hear of it and to make their orders.
            let at_ns = clock::now_ns() + 200_000_000;
            let keys = self.args.keys;
            let replies: Vec<Option<Together>> = self.ranks.ask(|rank| {
                let seed = (u64::from(run) << 32) | u64::from(rank);
                match rank < together.ranks {
                    true => Order::Together { keys, at_ns, seed },
                    false => Order::Rest,
                }
            })?;
            together.push(replies.into_iter().flatten());
        }
        Ok(())
    }

    fn misses(&mut self, samples: &mut Samples) -> Result<(), BenchError> {
        let slots = self.args.slots;
        samples.miss_ns.push(self.ranks.ask_one(0, &Order::Miss { slots })?);
        samples.prealloc.push(self.ranks.ask_one(0, &Order::Prealloc { slots })?);
        Ok(())
    }

    fn fresh(&mut self, count: u32) -> u64 {
        let first = self.used;
        // One more: who rings owns the key after the last one.
        self.used += u64::from(count) + 1;
        first
    }

    fn wakes(&mut self, samples: &mut Samples) -> Result<(), BenchError> {
        let count = self.args.wakes;
        let first = self.fresh(count);
        let () = self.ranks.ask_one(0, &Order::Own { key: first })?;
        let listener: Task = self.ranks.ask_one(1, &Order::Listen { first, count })?;
        let rung: Instants = self.ranks.ask_one(0, &Order::Ring { first, count, listener })?;
        let heard: Instants = self.ranks.ask_one(1, &Order::Heard)?;
        samples.wakes(&rung, &heard)
    }

    fn waiters(&mut self, samples: &mut Samples) -> Result<(), BenchError> {
        let key = self.fresh(1);
        let waiters = self.args.waiters;
        let () = self.ranks.ask_one(0, &Order::Own { key })?;
        let waits = |rank| (1..=waiters).contains(&rank);
        let tasks: Vec<Option<Task>> =
            self.ranks.ask(|rank| if waits(rank) { Order::Await { key } } else { Order::Rest })?;
        let tasks: Vec<Task> = tasks.into_iter().flatten().collect();
        tasks.iter().try_for_each(|task| proc::until_asleep(*task))?;
        let processes: Vec<u32> = tasks.iter().map(|task| task.pid).collect();
        let before = proc::Usage::of(&processes)?;
        std::thread::sleep(Duration::from_millis(self.args.wait_ms));
        let used = proc::Usage::of(&processes)?.since(before)?;
        samples.waiters_cpu_ms.push(used.cpu_ns as f64 / 1e6);
        let () = self.ranks.ask_one(0, &Order::Publish)?;
        let _: Vec<Option<Instants>> =
            self.ranks.ask(|rank| if waits(rank) { Order::Awaited } else { Order::Rest })?;
        debug_assert!(waiters < self.processes);
        Ok(())
    }
}

/// Watches whole ranks that do nothing, and then wait for a fill.
fn watch_idle(args: &Args, progress: &Progress, samples: &mut Samples) -> Result<(), BenchError> {
    let scratch = Scratch::new(None)?;
    let count = args.most_ranks();
    let config = whole::config(&scratch.path("cache"), count)?;
    let mut ranks = Ranks::start("ctrl", count)?;
    let processes: Vec<u32> = ranks.ask(|rank| Order::Start { rank, config: config.clone() })?;
    let watch = || -> Result<Idle, BenchError> {
        // What a join or a submit has set in motion comes to rest first.
        std::thread::sleep(Duration::from_millis(500));
        let before = proc::Usage::of(&processes)?;
        std::thread::sleep(Duration::from_secs(args.idle_seconds));
        let used = proc::Usage::of(&processes)?.since(before)?;
        let share = used.cpu_ns as f64 / 1e6 / args.idle_seconds as f64 / f64::from(count);
        Ok(Idle { wakeups: used.switches, cpu_ms_per_s: share, threads: used.threads })
    };
    samples.idle = watch()?;
    progress.advance(1);
    let () = ranks.ask_one(0, &Order::Hold)?;
    let _: Vec<()> = ranks.ask(|_| Order::Load)?;
    samples.waiting = watch()?;
    let () = ranks.ask_one(0, &Order::GiveUp)?;
    let _: Vec<()> = ranks.ask(|_| Order::Loaded)?;
    progress.advance(1);
    Ok(())
}

fn peer(error: impl std::fmt::Display) -> BenchError {
    BenchError::Peer(error.to_string())
}
