//! Two ranks and a scheduler, three processes, one shared cache over a directory of files.
//!
//! Run it with `cargo xtask demo`. It starts itself again as rank processes, which it tells over
//! their standard input what to do; everything it uses is created in a temporary directory and gone
//! at the end.

use std::{
    env,
    error::Error,
    fs,
    io::{self, BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::Instant,
};

use ucm::{
    Addr, BackendKind, Inspection, Key, Memory, Node, Outcome, PoolId, Presence, Rank, RegionId,
    Scheduler,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const RANKS: u32 = 2;
const LAYERS: u32 = 4;
const SHARD_BYTES: u64 = 256 << 10;
const PROMPT_BLOCKS: u32 = 6;
/// The cache has room for one prompt.
const SLOTS: u32 = PROMPT_BLOCKS * LAYERS;
const POOL: PoolId = PoolId(0);

fn main() -> Result<()> {
    let words: Vec<String> = env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["rank", device, dir] => rank_process(device.parse()?, Path::new(dir)),
        _ => scheduler_process(),
    }
}

/// The cache as every process describes it.
fn node(dir: &Path) -> Result<Node> {
    Ok(Node::builder("demo")
        .dir(dir.join("cache"))
        .ranks(RANKS)
        .pool(SHARD_BYTES, LAYERS, SLOTS)
        .configure(|config| {
            config.backend.kind = BackendKind::File;
            config.backend.dir = dir.join("files");
            config.namespace.model = "demo".into();
        })
        .build()?)
}

/// Names of a prompt's blocks, as an engine would hash their tokens; the same in every process.
fn blocks(node: &Node, prompt: &str) -> Vec<ucm::BlockId> {
    let identity = node.config().namespace.identity();
    (0..PROMPT_BLOCKS).map(|i| identity.block_id(format!("{prompt}/{i}").as_bytes())).collect()
}

// ---------------------------------------------------------------------------- scheduler

fn scheduler_process() -> Result<()> {
    let begin = Instant::now();
    let place = Place::new()?;
    let node = node(&place.0)?;
    let mut ranks = Vec::new();
    for device in 0..RANKS {
        ranks.push(RankChild::start(device, &place.0)?);
    }
    for rank in &mut ranks {
        say(&rank.hear()?)?;
    }
    // A scheduler asks what is there; it maps no bytes.
    let scheduler = node.scheduler()?;
    say(&format!("scheduler: process {}, no bytes mapped", std::process::id()))?;

    for (what, order, prompt) in [
        ("a new prompt: the ranks compute its blocks and dump them", "dump", "cats"),
        ("the same prompt again: loads come from the shared cache", "load", "cats"),
        ("another prompt: its dump pushes the first one out of the cache", "dump", "dogs"),
        ("the first prompt again: from files, each shard read once for both ranks", "load", "cats"),
    ] {
        say(&format!("\n== {what}"))?;
        say(&format!("scheduler: {}", presence(&scheduler, &node, prompt)?))?;
        for rank in &mut ranks {
            rank.tell(&format!("{order} {prompt}"))?;
        }
        for rank in &mut ranks {
            say(&rank.hear()?)?;
        }
    }

    say("\n== inspect: what the shared control region says")?;
    say(&inspection(&scheduler.inspect()))?;
    for rank in ranks {
        rank.finish()?;
    }
    let left = fs::read_dir(place.0.join("files"))?.count();
    say(&format!("all ranks have left; {left} entries in the store, removed with its directory"))?;
    say(&format!("{:.1} s", begin.elapsed().as_secs_f64()))
}

fn presence(scheduler: &Scheduler, node: &Node, prompt: &str) -> Result<String> {
    let blocks = blocks(node, prompt);
    let keys: Vec<Key> = blocks.iter().flat_map(|block| shards(*block)).collect();
    let ready = scheduler.lookup(POOL, &keys)?.iter().filter(|p| **p == Presence::Ready).count();
    let prefix = scheduler.prefix_lookup(POOL, &keys)? / LAYERS as usize;
    let all = keys.len();
    Ok(format!(
        "of {prompt:?} {ready} of {all} shards are in memory, {prefix} whole blocks from the start"
    ))
}

fn inspection(inspection: &Inspection) -> String {
    let mut lines = Vec::new();
    for pool in &inspection.pools {
        lines.push(format!(
            "pool: {} slots, {} ready, {} free, {} pinned, {} being filled",
            pool.slots, pool.ready, pool.free, pool.pinned, pool.filling
        ));
    }
    for member in &inspection.members {
        let role = match member.device_id {
            ..0 => "scheduler".to_owned(),
            device => format!("rank {device}"),
        };
        lines.push(format!("member: process {}, {role}, {:?}", member.pid, member.state));
    }
    let events = inspection.statistics;
    lines.push(format!(
        "events: {} hits, {} waits for another rank, {} fills, {} evictions",
        events.hits, events.waiters, events.publishes, events.evictions
    ));
    lines.push(match inspection.problems.as_slice() {
        [] => "no contradictions found".to_owned(),
        problems => format!("CONTRADICTIONS: {problems:?}"),
    });
    lines.join("\n")
}

// ---------------------------------------------------------------------------- rank

/// Serves orders ("dump PROMPT", "load PROMPT") until its input ends.
fn rank_process(device: u32, dir: &Path) -> Result<()> {
    let rank = node(dir)?.rank(device).start()?;
    let prompt_bytes = usize::try_from(u64::from(PROMPT_BLOCKS * LAYERS) * SHARD_BYTES)?;
    let memory = Memory::host(prompt_bytes)?; // stands for the GPU's memory
    let region = rank.register(memory.clone())?;
    let report = rank.report();
    say(&format!(
        "rank {device}: process {}, memory on {}, backend {}",
        std::process::id(),
        report.pages.join(", "),
        report.backend
    ))?;
    for order in io::stdin().lock().lines() {
        let order = order?;
        let text = match order.split_once(' ') {
            Some(("dump", prompt)) => dump(&rank, device, prompt, &memory, region)?,
            Some(("load", prompt)) => load(&rank, prompt, &memory, region)?,
            _ => format!("what is {order:?}?"),
        };
        say(&format!("rank {device}: {text}"))?;
    }
    Ok(())
}

/// All ranks have computed the prompt; each dumps every second block: device → cache → files.
fn dump(
    rank: &Rank,
    device: u32,
    prompt: &str,
    memory: &Memory,
    region: RegionId,
) -> Result<String> {
    let mut mine = Vec::new();
    for (number, (key, addr)) in places(rank, prompt, region) {
        memory.write(usize::try_from(addr.offset)?, &content(&key))?;
        if number % RANKS == device {
            mine.push((key, addr));
        }
    }
    let results = rank.dump(POOL, &mine, true)?.wait_durable(None).unwrap_or_default();
    let stored = results.iter().filter(|result| result.is_ok()).count();
    if stored != mine.len() {
        return Err(
            format!("{} of {} shards were not stored", mine.len() - stored, mine.len()).into()
        );
    }
    Ok(format!("computed {prompt:?}, dumped {stored} shards to cache and files"))
}

/// Layer by layer: one task a layer, all submitted at once; the engine could start computing when
/// the first has ended.
fn load(rank: &Rank, prompt: &str, memory: &Memory, region: RegionId) -> Result<String> {
    memory.write(0, &vec![0xEE; memory.len()])?;
    let before = rank.stats(POOL)?;
    let begin = Instant::now();
    let places: Vec<_> = places(rank, prompt, region).into_iter().map(|(_, place)| place).collect();
    let mut tasks = Vec::new();
    for layer in 0..LAYERS {
        let shards: Vec<_> = places.iter().filter(|(key, _)| key.shard == layer).copied().collect();
        tasks.push(rank.load(POOL, &shards)?);
    }
    let mut first_layer = None;
    for task in tasks {
        for outcome in task.wait(None).unwrap_or_default() {
            if outcome != Outcome::Loaded {
                return Err(format!("a request ended as {outcome:?}").into());
            }
        }
        first_layer.get_or_insert_with(|| begin.elapsed());
    }
    let (first, all) = (first_layer.unwrap_or_default(), begin.elapsed());
    for (key, addr) in &places {
        let expected = content(key);
        let mut found = vec![0; expected.len()];
        memory.read(usize::try_from(addr.offset)?, &mut found)?;
        if found != expected {
            return Err(format!("wrong bytes in {key:?}").into());
        }
    }
    let after = rank.stats(POOL)?;
    Ok(format!(
        "loaded {prompt:?}, every byte right: {} shards found in the cache, {} read from files, {} read \
         by the other rank meanwhile; first layer after {:.1} ms, all after {:.1} ms",
        after.hit_shards - before.hit_shards,
        after.owned_shards - before.owned_shards,
        after.waited_shards - before.waited_shards,
        first.as_secs_f64() * 1e3,
        all.as_secs_f64() * 1e3
    ))
}

fn shards(block: ucm::BlockId) -> impl Iterator<Item = Key> {
    (0..LAYERS).map(move |layer| Key::new(block, layer))
}

/// Each shard of a prompt with its block's number and its place in device memory.
fn places(rank: &Rank, prompt: &str, region: RegionId) -> Vec<(u32, (Key, Addr))> {
    let identity = rank.identity();
    let mut places = Vec::new();
    for number in 0..PROMPT_BLOCKS {
        let block = identity.block_id(format!("{prompt}/{number}").as_bytes());
        for key in shards(block) {
            let place = u64::from(number * LAYERS + key.shard);
            places.push((number, (key, Addr { region, offset: place * SHARD_BYTES })));
        }
    }
    places
}

/// The bytes of a shard: made from its key, so that every byte can be verified.
fn content(key: &Key) -> Vec<u8> {
    let seed = u64::from_le_bytes(key.block.0.first_chunk().copied().unwrap_or_default());
    let words = (0..SHARD_BYTES / 8).map(|at| {
        (seed ^ (u64::from(key.shard) << 56)).wrapping_add(at.wrapping_mul(0x9E37_79B9_7F4A_7C15))
    });
    words.flat_map(u64::to_le_bytes).collect()
}

// ---------------------------------------------------------------------------- processes

/// This program again, as a rank.
struct RankChild {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl RankChild {
    fn start(device: u32, dir: &Path) -> Result<Self> {
        let mut child = Command::new(env::current_exe()?)
            .args(["rank", &device.to_string()])
            .arg(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = child.stdin.take().ok_or("no pipe")?;
        let output = BufReader::new(child.stdout.take().ok_or("no pipe")?);
        Ok(Self { child, input, output })
    }

    fn tell(&mut self, order: &str) -> Result<()> {
        Ok(writeln!(self.input, "{order}")?)
    }

    fn hear(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            return Err(format!("a rank ended early: {}", self.child.wait()?).into());
        }
        Ok(line.trim_end().to_owned())
    }

    fn finish(self) -> Result<()> {
        let Self { mut child, input, .. } = self;
        drop(input);
        let status = child.wait()?;
        if status.success() { Ok(()) } else { Err(format!("a rank ended with {status}").into()) }
    }
}

/// A temporary directory that vanishes with the value.
struct Place(PathBuf);

impl Place {
    fn new() -> Result<Self> {
        let path = env::temp_dir().join(format!("ucm-demo-{}", std::process::id()));
        fs::create_dir(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn say(line: &str) -> Result<()> {
    Ok(writeln!(io::stdout().lock(), "{line}")?)
}
