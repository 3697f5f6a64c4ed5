//! The `directory` workload: who has what, asked by several clients while a peer goes away.
//!
//! Owns: the command line of `ucm-bench directory` and its results.
//! **Invariant:** every answer is compared with what was announced; the time of a removal is that of the
//! call, and routes are timed before and during it by the same clients.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use ucm_remote::{
    Directory, DirectoryError, EmbeddedDirectory, EmbeddedLimits, Generation, Member, ObjectKey,
    PeerId, Record, RedisDirectory, RedisOptions, Token,
};

use crate::{
    cli::Common,
    document::Document,
    env::Env,
    error::BenchError,
    figure::Figure,
    progress::Progress,
    simulation::{self, Shape},
    stats::percentile,
};

/// Keys of one question, as the specification has it.
const BATCH: usize = 64;

/// Peers that share the keys.
const PEERS: u64 = 8;

/// Options of `ucm-bench directory`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Where the records lie
    #[arg(long, value_enum, default_value = "embedded")]
    backend: Kind,
    /// Server for `--backend redis`; what is stored there runs out after an hour
    #[arg(long, default_value = "redis://127.0.0.1:6379")]
    address: String,
    /// Objects
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(64..=100_000_000))]
    keys: u64,
    /// Threads that ask
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=256))]
    clients: u32,
    /// Questions of each client before the removal
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u32).range(10..))]
    questions: u32,
    /// Simulate so many peers of an embedded directory: storms of announcements, reports, a restart,
    /// departures, placement
    #[arg(long, value_name = "PEERS", value_parser = clap::value_parser!(u64).range(10..=4000))]
    simulate: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Kind {
    /// In this process
    Embedded,
    /// In a server
    Redis,
}

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(600)
}

fn key(number: u64) -> ObjectKey {
    // Spread over the tables, as block ids are.
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut block = [0; 16];
    for (to, from) in
        block.iter_mut().zip(mixed.to_le_bytes().into_iter().chain(number.to_le_bytes()))
    {
        *to = from;
    }
    ObjectKey { block, identity: [1; 32] }
}

fn peer(number: u64) -> PeerId {
    PeerId::new(&format!("peer-{number}"))
}

fn record(number: u64, boot: Token) -> Record {
    Record::new(peer(number % PEERS), boot, Generation(number), number + 1)
}

fn failed(error: &DirectoryError) -> BenchError {
    BenchError::Peer(format!("the directory: {error}"))
}

/// One value a run.
#[derive(Default)]
struct Samples {
    p50: Vec<f64>,
    p99: Vec<f64>,
    during_p99: Vec<f64>,
    announce: Vec<f64>,
    bytes: Vec<f64>,
    removal: Vec<f64>,
}

/// Measures.
pub(crate) fn run(args: &Args, common: &Common) -> Result<Document, BenchError> {
    let mut document = Document::new("directory", Env::collect());
    if let Some(peers) = args.simulate {
        let shape = Shape { peers, keys: args.keys, clients: args.clients };
        simulation::run(shape, common, &mut document)?;
        return Ok(document);
    }
    document.about(
        "Who has what",
        "Peers announce objects, clients ask for batches of 64 keys, and a peer with an eighth of all \
         records is removed meanwhile.",
    );
    document.config("backend", format!("{:?}", args.backend).to_lowercase());
    document.config("keys", args.keys);
    document.config("clients", args.clients);
    document.config("batch", BATCH as u64);
    let progress = Progress::new("directory", u64::from(common.runs), common.quiet);
    let (mut all, mut wrong) = (Samples::default(), 0);
    for number in 0..common.runs {
        let boot = Token([number.to_le_bytes()[0]; 16]);
        match args.backend {
            Kind::Embedded => {
                let directory = EmbeddedDirectory::new(EmbeddedLimits::default());
                wrong += once(args, &directory, boot, &mut all)?;
            }
            Kind::Redis => {
                // A namespace of its own: nothing that is there is told or changed.
                let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                let name = format!("bench-{}-{number}", since.as_nanos());
                let mut options = RedisOptions::new(&name);
                options.member_ttl = Duration::from_secs(3600);
                let directory =
                    RedisDirectory::single(&args.address, options).map_err(|e| failed(&e))?;
                wrong += once(args, &directory, boot, &mut all)?;
            }
        }
        progress.advance(1);
    }
    drop(progress);
    document.result("wrong_records", wrong);
    let figures = [
        ("route_us_p50", all.p50),
        ("route_us_p99", all.p99),
        ("route_during_removal_us_p99", all.during_p99),
        ("announce_per_s", all.announce),
        ("bytes_per_key", all.bytes),
        ("node_removal_ms", all.removal),
    ];
    for (name, samples) in figures {
        if let Some(figure) = Figure::of(samples) {
            document.figure(name, &figure);
        }
    }
    document.highlight(["route_us_p50", "route_us_p99", "node_removal_ms"]);
    Ok(document)
}

/// What the tables take; a server does not say.
trait Tables {
    fn table_bytes(&self) -> Option<usize>;
}

impl Tables for EmbeddedDirectory {
    fn table_bytes(&self) -> Option<usize> {
        Some(self.bytes())
    }
}

impl Tables for RedisDirectory {
    fn table_bytes(&self) -> Option<usize> {
        None
    }
}

fn once(
    args: &Args,
    directory: &(impl Directory + Tables),
    boot: Token,
    all: &mut Samples,
) -> Result<u64, BenchError> {
    for number in 0..PEERS {
        let mut member = Member::new(peer(number), boot, "127.0.0.1:1");
        (member.capacity_bytes, member.free_bytes) = (1 << 40, 1 << 40);
        directory.register(&member, deadline()).map_err(|e| failed(&e))?;
    }
    let begun = Instant::now();
    let mut batch = Vec::with_capacity(1024);
    for first in (0..args.keys).step_by(1024) {
        batch.clear();
        batch.extend((first..args.keys.min(first + 1024)).map(|n| (key(n), record(n, boot))));
        directory.announce(&batch, deadline()).map_err(|e| failed(&e))?;
    }
    all.announce.push(args.keys as f64 / begun.elapsed().as_secs_f64());
    if let Some(bytes) = directory.table_bytes() {
        all.bytes.push(bytes as f64 / args.keys as f64);
    }
    let (removed, wrong) = (AtomicBool::new(false), AtomicU64::new(0));
    let (mut before, mut during) = (Vec::new(), Vec::new());
    let (ready, go) = (AtomicU64::new(0), AtomicBool::new(false));
    thread::scope(|scope| -> Result<(), BenchError> {
        let clients: Vec<_> = (0..u64::from(args.clients))
            .map(|client| {
                let (removed, wrong, ready, go) = (&removed, &wrong, &ready, &go);
                scope.spawn(move || -> Result<_, DirectoryError> {
                    let mut random = client.wrapping_mul(0x2545_f491_4f6c_dd1d) | 1;
                    let (mut before, mut during) = (Vec::new(), Vec::new());
                    for _ in 0..args.questions {
                        before.push(ask(args, directory, &mut random, boot, true, wrong)?);
                    }
                    ready.fetch_add(1, Ordering::SeqCst);
                    while !go.load(Ordering::SeqCst) {
                        thread::yield_now();
                    }
                    while !removed.load(Ordering::SeqCst) || during.len() < 10 {
                        during.push(ask(args, directory, &mut random, boot, false, wrong)?);
                    }
                    Ok((before, during))
                })
            })
            .collect();
        while ready.load(Ordering::SeqCst) < clients.len() as u64
            && !clients.iter().any(thread::ScopedJoinHandle::is_finished)
        {
            thread::sleep(Duration::from_millis(1));
        }
        go.store(true, Ordering::SeqCst);
        let begun = Instant::now();
        let done = directory.remove_peer(&peer(0), boot, deadline());
        all.removal.push(begun.elapsed().as_secs_f64() * 1e3);
        removed.store(true, Ordering::SeqCst);
        for client in clients {
            let ended = client.join().map_err(|_| BenchError::Peer("a client panicked".into()))?;
            let (b, d) = ended.map_err(|e| failed(&e))?;
            before.extend(b);
            during.extend(d);
        }
        done.map_err(|e| failed(&e))
    })?;
    before.sort_by(f64::total_cmp);
    during.sort_by(f64::total_cmp);
    all.p50.push(percentile(&before, 0.5));
    all.p99.push(percentile(&before, 0.99));
    all.during_p99.push(percentile(&during, 0.99));
    Ok(wrong.into_inner())
}

/// One question; microseconds. While a peer goes its records may be missing, all others not.
fn ask(
    args: &Args,
    directory: &impl Directory,
    random: &mut u64,
    boot: Token,
    whole: bool,
    wrong: &AtomicU64,
) -> Result<f64, DirectoryError> {
    let numbers: [u64; BATCH] = std::array::from_fn(|_| {
        *random ^= *random << 13;
        *random ^= *random >> 7;
        *random ^= *random << 17;
        *random % args.keys
    });
    let keys = numbers.map(key);
    let begun = Instant::now();
    let told = directory.locate(&keys, deadline())?;
    let took = begun.elapsed().as_secs_f64() * 1e6;
    for (number, told) in numbers.into_iter().zip(told) {
        let right = told == [record(number, boot)];
        let gone = !whole && number.is_multiple_of(PEERS) && told.is_empty();
        if !right && !gone {
            wrong.fetch_add(1, Ordering::Relaxed);
        }
    }
    Ok(took)
}
