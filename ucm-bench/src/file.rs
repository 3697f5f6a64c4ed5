//! The `file` workload: objects through the file backend, and the same bytes through a bare ring.
//!
//! Owns: the command line of `ucm-bench file` and its results.
//! **Invariant:** floor and backend alternate pass by pass, on the same file system; with `--verify` every
//! byte that was read is compared afterwards.

use std::{
    path::Path,
    sync::{Arc, mpsc},
    time::Instant,
};

use ucm_store::{
    Backend, Completed, Durability, FileBackend, FileConfig, FileIo, IoMemory, MemoryOwner, Op,
    Sink,
    bare::{Arena, BareFile},
    fill_pattern, verify_pattern,
};

use crate::{
    cli::Common, clock, document::Document, env::Env, error::BenchError, figure::Figure,
    progress::Progress, scratch::Scratch,
};

const GIB: f64 = (1_u64 << 30) as f64;
const PIECE: usize = 1 << 20;

/// Options of `ucm-bench file`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Args {
    /// Bytes of each object
    #[arg(long, default_value_t = 1 << 20, value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    object_bytes: u64,
    /// Bytes of all objects
    #[arg(long, default_value_t = 1 << 30, value_parser = clap::value_parser!(u64).range(1 << 20..))]
    total_bytes: u64,
    /// Reads in flight (of packed objects: about a MiB each)
    #[arg(long, value_delimiter = ',', default_value = "4,32")]
    depth: Vec<u16>,
    /// Threads that write
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: u16,
    /// How objects are read
    #[arg(long, value_enum, default_value = "in-place")]
    mode: Mode,
    /// Objects of the store whose opening is timed; 0: none
    #[arg(long, default_value_t = 1_000_000)]
    restart_objects: u32,
    /// Where; a directory of its own is made and removed otherwise
    #[arg(long)]
    dir: Option<std::path::PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Mode {
    /// Through a ring, straight into memory of this process alone
    InPlace,
    /// Through a ring and a copy, as into memory that others may take over
    Copied,
    /// By threads, past the page cache
    Threads,
    /// By threads, through the page cache
    Buffered,
}

/// One value a run.
#[derive(Default)]
struct Samples {
    rate: Vec<f64>,
    floor: Vec<f64>,
    ratio: Vec<f64>,
    cpu: Vec<f64>,
    floor_cpu: Vec<f64>,
}

impl Samples {
    fn push(&mut self, bytes: u64, ours: Pass, floor: Pass) {
        let rate = |pass: Pass| bytes as f64 / pass.seconds;
        let cpu = |pass: Pass| pass.cpu_seconds / (bytes as f64 / GIB);
        self.rate.push(rate(ours));
        self.floor.push(rate(floor));
        self.ratio.push(rate(ours) / rate(floor));
        self.cpu.push(cpu(ours));
        self.floor_cpu.push(cpu(floor));
    }

    fn report(self, document: &mut Document, what: &str, depth: &str) {
        let all = [
            (format!("{what}_bytes_per_s{depth}"), self.rate),
            (format!("{what}_floor_bytes_per_s{depth}"), self.floor),
            (format!("{what}_ratio{depth}"), self.ratio),
            (format!("{what}_cpu_s_per_gib{depth}"), self.cpu),
            (format!("{what}_floor_cpu_s_per_gib{depth}"), self.floor_cpu),
        ];
        for (name, samples) in all {
            if let Some(figure) = Figure::of(samples) {
                document.figure(&name, &figure);
            }
        }
    }
}

#[derive(Clone, Copy)]
struct Pass {
    seconds: f64,
    cpu_seconds: f64,
}

fn timed(work: impl FnOnce() -> Result<(), BenchError>) -> Result<Pass, BenchError> {
    let (begun, cpu) = (Instant::now(), clock::cpu_ns());
    work()?;
    let cpu_ns = clock::cpu_ns() - cpu;
    Ok(Pass { seconds: begun.elapsed().as_secs_f64(), cpu_seconds: cpu_ns as f64 / 1e9 })
}

fn failed(error: &ucm_store::StoreError) -> BenchError {
    BenchError::Peer(format!("the file backend: {error}"))
}

struct Channel(mpsc::Sender<Vec<Completed>>);

impl Sink for Channel {
    fn complete(&self, completed: Completed) {
        self.complete_all(vec![completed]);
    }

    fn complete_all(&self, batch: Vec<Completed>) {
        // The receiver lives until all have ended, or has failed.
        drop(self.0.send(batch));
    }
}

/// The objects: shards of blocks of 64, in the order in which they are stored and read.
struct Objects {
    bytes: usize,
    count: usize,
    generation: u64,
}

impl Objects {
    fn name(&self, number: usize) -> ([u8; 16], u32) {
        let mut block = [0x5a; 16];
        let tag = (number as u64 / 64).to_le_bytes();
        for (to, from) in block.iter_mut().zip(tag) {
            *to = from;
        }
        (block, u32::try_from(number % 64).unwrap_or(0))
    }

    /// Objects that are asked for together.
    fn batch(&self) -> usize {
        (PIECE / self.bytes).max(1)
    }

    /// Moves all objects, `depth` batches at a time, each to or from its place in the arena.
    fn move_all(
        &self,
        depth: usize,
        place: impl Fn(usize) -> IoMemory,
        submit: impl Fn(Vec<Op>),
    ) -> Result<(), BenchError> {
        let (sender, ended) = mpsc::channel();
        let sink: Arc<dyn Sink> = Arc::new(Channel(sender));
        let batch = self.batch();
        let mut next = 0;
        let mut start = |count: usize| {
            let end = self.count.min(next + count);
            let ops: Vec<Op> = (next..end)
                .map(|n| {
                    let (block, shard) = self.name(n);
                    Op::new(block, shard, n as u64, place(n), sink.clone())
                })
                .collect();
            next = end;
            if !ops.is_empty() {
                submit(ops);
            }
        };
        (0..depth).for_each(|_| start(batch));
        let (mut since, mut left) = (0, self.count);
        while left > 0 {
            let batch_ended =
                ended.recv().map_err(|_| BenchError::Peer("operations were lost".into()))?;
            for end in batch_ended {
                end.result.map_err(|e| failed(&e))?;
                left -= 1;
                since += 1;
                if since == batch {
                    since = 0;
                    start(batch);
                }
            }
        }
        Ok(())
    }

    fn fill(&self, memory: &IoMemory, number: usize) -> Result<(), BenchError> {
        let (block, shard) = self.name(number);
        let mut bytes = vec![0; self.bytes];
        fill_pattern(&mut bytes, &block, shard, 0, self.generation);
        memory.write(0, &bytes).map_err(|e| failed(&e))
    }

    fn check(&self, memory: &IoMemory, number: usize) -> Result<bool, BenchError> {
        let (block, shard) = self.name(number);
        let mut bytes = vec![0; self.bytes];
        memory.read(0, &mut bytes).map_err(|e| failed(&e))?;
        Ok(verify_pattern(&bytes, &block, shard, 0, self.generation).is_ok())
    }
}

fn settings(args: &Args, dir: &Path, depth: u16) -> FileConfig {
    let (io, memory) = match args.mode {
        Mode::InPlace => (FileIo::Auto, MemoryOwner::Private),
        Mode::Copied => (FileIo::Auto, MemoryOwner::Shared),
        Mode::Threads => (FileIo::Threads, MemoryOwner::Private),
        Mode::Buffered => (FileIo::Buffered, MemoryOwner::Private),
    };
    // Threads are what depth is to a ring.
    let threads = if io == FileIo::Auto { args.threads } else { depth.max(args.threads) };
    let config = FileConfig::new(dir, "ucm-bench file").io(io).memory(memory);
    config.threads(threads.into()).depth(depth.into())
}

/// Measures.
pub(crate) fn run(args: &Args, common: &Common) -> Result<Document, BenchError> {
    let scratch = Scratch::new(args.dir.as_deref())?;
    let store = scratch.path("store");
    let bytes = usize::try_from(args.object_bytes).unwrap_or(usize::MAX);
    let count = usize::try_from(args.total_bytes.div_ceil(args.object_bytes)).unwrap_or(usize::MAX);
    let objects = Objects { bytes, count, generation: 1 };
    let total = (bytes * count) as u64;
    // All objects have places of their own, so that all can be compared; they start at multiples of a page
    // where they are as long as one.
    let stride =
        if bytes >= 4096 { bytes.next_multiple_of(4096) } else { bytes.next_multiple_of(64) };
    let memory = |e| BenchError::io("map memory", e);
    let arena = Arc::new(Arena::new(stride * count).map_err(memory)?);
    let place = |n: usize| Arena::part(&arena, n * stride, bytes);
    let pieces = usize::try_from(total.div_ceil(PIECE as u64)).unwrap_or(usize::MAX);
    let piece = if bytes < PIECE { PIECE } else { bytes.next_multiple_of(4096) };
    let pieces = if bytes < PIECE { pieces } else { count };
    let open = |depth| FileBackend::open(settings(args, &store, depth)).map_err(|e| failed(&e));
    let deepest = args.depth.iter().copied().max().unwrap_or(4).max(1);

    let mut document = Document::new("file", Env::collect());
    document.about(
        "Objects in files",
        "All objects are read in stored order through the file backend, and the same bytes through a bare \
         ring; each is verified (that is part of the time), pass and pass alternating.",
    );
    let steps = u64::from(common.runs) * (args.depth.len() as u64 + 1) + 1;
    let progress = Progress::new("file", steps, common.quiet);
    let backend = open(deepest)?;
    let mut bare = BareFile::new(&scratch.path("bare"), piece, pieces, deepest.into())
        .map_err(|e| BenchError::io("open the bare file", e))?;
    let bare_io = |e| BenchError::io("move the bare file", e);
    document.config("mode", backend.mode().to_string());
    document.config("object_bytes", args.object_bytes);
    document.config("objects", count as u64);
    document.config("floor_piece_bytes", piece as u64);
    document.config("floor_registered", bare.memory().0);
    document.config("huge_pages", arena.is_huge() && bare.memory().1);
    document.config("write_threads", args.threads);

    let mut write = Samples::default();
    for _ in 0..common.runs {
        for n in 0..count {
            objects.fill(&place(n), n)?;
        }
        // What is overwritten has no blocks to find: both begin with nothing.
        let names: Vec<_> = (0..count).map(|n| objects.name(n)).collect();
        backend.remove(&names).into_iter().collect::<Result<(), _>>().map_err(|e| failed(&e))?;
        drop(bare);
        std::fs::remove_file(scratch.path("bare")).map_err(|e| BenchError::io("remove", e))?;
        bare =
            BareFile::new(&scratch.path("bare"), piece, pieces, deepest.into()).map_err(bare_io)?;
        let floor = timed(|| bare.write_all().map_err(bare_io))?;
        let ours = timed(|| objects.move_all(deepest.into(), place, |ops| backend.dump(ops)))?;
        write.push(total, ours, floor);
        progress.advance(1);
    }
    drop(backend);
    let mut wrong = 0_u64;
    let mut reads: Vec<Samples> = args.depth.iter().map(|_| Samples::default()).collect();
    let mut verify = Vec::new();
    for _ in 0..common.runs {
        for (depth, samples) in args.depth.iter().zip(&mut reads) {
            let depth = (*depth).max(1);
            let backend = open(depth)?;
            let path = scratch.path("bare");
            let mut bare = BareFile::new(&path, piece, pieces, depth.into()).map_err(bare_io)?;
            for n in 0..count {
                place(n).write(0, &[0xEE; 64][..bytes.min(64)]).map_err(|e| failed(&e))?;
            }
            let floor = timed(|| bare.read_all().map_err(bare_io))?;
            let ours = timed(|| objects.move_all(depth.into(), place, |ops| backend.load(ops)))?;
            samples.push(total, ours, floor);
            if common.verify {
                for n in 0..count {
                    wrong += u64::from(!objects.check(&place(n), n)?);
                }
            }
            progress.advance(1);
        }
        verify.push(hash_cost(&arena, stride * count));
    }
    write.report(&mut document, "write", "");
    for (depth, samples) in args.depth.iter().zip(reads) {
        samples.report(&mut document, "read", &format!("_qd{depth}"));
    }
    if let Some(figure) = Figure::of(verify) {
        document.figure("checksum_cpu_s_per_gib", &figure);
    }
    publish(args, &scratch.path("fsync"), bytes, common, &mut document)?;
    if args.restart_objects > 0 {
        restart(args, &scratch.path("many"), common, &mut document)?;
    }
    progress.advance(1);
    drop(progress);
    document.result("wrong_objects", wrong);
    if wrong > 0 {
        return Err(BenchError::Peer(format!("{wrong} objects have wrong bytes")));
    }
    Ok(document)
}

/// What the checksum alone takes, of memory that is not in a cache.
fn hash_cost(arena: &Arena, len: usize) -> f64 {
    let len = len.min(256 << 20) / PIECE * PIECE;
    let cpu = clock::cpu_ns();
    let all = (0..len).step_by(PIECE).fold(0, |all, at| all ^ arena.checksum(at, PIECE));
    std::hint::black_box(all);
    (clock::cpu_ns() - cpu) as f64 / 1e9 / (len as f64 / GIB)
}

/// One object after the other, each on the device before the next.
fn publish(
    args: &Args,
    dir: &Path,
    bytes: usize,
    common: &Common,
    document: &mut Document,
) -> Result<(), BenchError> {
    let config = settings(args, dir, 1).durability(Durability::Fsync);
    let backend = FileBackend::open(config).map_err(|e| failed(&e))?;
    let arena = Arc::new(Arena::new(bytes).map_err(|e| BenchError::io("map memory", e))?);
    let mut samples = Vec::new();
    for run in 0..common.runs {
        const EACH: u32 = 16;
        let begun = Instant::now();
        for n in 0..EACH {
            let one = Objects { bytes, count: 1, generation: u64::from(run * EACH + n) };
            let place = |_| Arena::part(&arena, 0, bytes);
            one.move_all(1, place, |ops| backend.dump(ops))?;
        }
        samples.push(begun.elapsed().as_secs_f64() * 1e6 / f64::from(EACH));
    }
    if let Some(figure) = Figure::of(samples) {
        document.figure("fsync_publish_us", &figure);
    }
    Ok(())
}

/// How long a store with many objects takes to open and answer.
fn restart(
    args: &Args,
    dir: &Path,
    common: &Common,
    document: &mut Document,
) -> Result<(), BenchError> {
    const BYTES: usize = 64;
    let count = args.restart_objects as usize;
    let objects = Objects { bytes: BYTES, count, generation: 1 };
    let arena = Arc::new(Arena::new(BYTES).map_err(|e| BenchError::io("map memory", e))?);
    let open = || FileBackend::open(settings(args, dir, 32)).map_err(|e| failed(&e));
    let backend = open()?;
    objects.move_all(4, |_| Arena::part(&arena, 0, BYTES), |ops| backend.dump(ops))?;
    drop(backend);
    let mut samples = Vec::new();
    for _ in 0..common.runs {
        let begun = Instant::now();
        let backend = open()?;
        let names: Vec<_> =
            (0..count).step_by((count / 1000).max(1)).map(|n| objects.name(n)).collect();
        let there = backend.contains(&names);
        samples.push(begun.elapsed().as_secs_f64() * 1e3);
        if there.iter().any(|there| *there != ucm_store::Presence::There) {
            return Err(BenchError::Peer("an object is missing after the restart".into()));
        }
    }
    document.config("restart_objects", count as u64);
    if let Some(figure) = Figure::of(samples) {
        document.figure("restart_ms", &figure);
    }
    Ok(())
}
