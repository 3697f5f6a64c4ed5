//! The child's side: a rank or scheduler that does what its parent says.
//!
//! Orders are JSON, one a line; every message back is a line that starts with `@@`.

use std::{
    collections::HashMap,
    io::{BufRead as _, Write as _},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use ucm::{
    Addr, Backend, DumpHandle, DumpTask, Key, Memory, Node, Outcome, PoolId, Rank, Redeemed,
    RegionId, Request, Scheduler, ShardRef, Task,
};
use ucm_store::{
    BackendCapabilities, ErrorKind, Op, PatternBackend, Presence, StoreError, fill_pattern,
    verify_pattern,
};

/// Set for children.
pub(crate) const MARK: &str = "UCM_CHILD";
const POOL: PoolId = PoolId(0);

pub(crate) fn key(number: u64) -> Key {
    Key::new(u128::from(number).to_le_bytes(), 0)
}

fn group(attempt: u64) -> [u8; 16] {
    u128::from(attempt).to_le_bytes()
}

fn say(message: &Value) {
    let mut out = std::io::stdout().lock();
    // The harness may have printed the start of a line; one write keeps ours together.
    let line = format!("\n@@{message}\n");
    if out.write_all(line.as_bytes()).and_then(|()| out.flush()).is_err() {
        std::process::exit(3);
    }
}

fn answer(fields: Value) {
    let mut message = fields;
    message["kind"] = "answer".into();
    say(&message);
}

#[test]
#[ignore = "entry of child processes"]
fn entry() {
    if std::env::var_os(MARK).is_none() {
        return;
    }
    let mut actor = Actor {
        rank: None,
        scheduler: None,
        gate: Arc::default(),
        leases: HashMap::new(),
        dumps: HashMap::new(),
    };
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        actor.obey(&serde_json::from_str(&line).unwrap());
    }
    // The parent closed the pipe or is gone.
    std::process::exit(0);
}

struct Actor {
    rank: Option<(Arc<Rank>, Memory, RegionId)>,
    scheduler: Option<Scheduler>,
    gate: Arc<Gate>,
    leases: HashMap<u64, ucm::Lease>,
    dumps: HashMap<u64, Arc<DumpHandle>>,
}

impl Actor {
    fn obey(&mut self, order: &Value) {
        let keys = || -> Vec<u64> {
            order["keys"].as_array().unwrap().iter().map(|k| k.as_u64().unwrap()).collect()
        };
        match order["do"].as_str().unwrap() {
            "join" => match self.join(order) {
                Ok(created) => answer(json!({ "created": created })),
                Err(error) => answer(
                    json!({ "error": error.to_string(), "error_kind": format!("{:?}", error.kind()) }),
                ),
            },
            "exec" => {
                use std::os::unix::process::CommandExt as _;
                let error = std::process::Command::new("sleep").arg("600").exec();
                panic!("{error}");
            }
            "leave" => {
                self.rank = None;
                self.scheduler = None;
                answer(json!({}));
            }
            "load" => match self.load(order["task"].as_u64().unwrap(), &keys()) {
                Ok(()) => answer(json!({})),
                Err(error) => answer(json!({ "error": error.to_string() })),
            },
            "dump" => {
                self.dump(&keys());
                answer(json!({}));
            }
            "dump_group" => match self.dump_group(order, &keys()) {
                Ok(()) => answer(json!({})),
                Err(error) => answer(
                    json!({ "error": error.to_string(), "error_kind": format!("{:?}", error.kind()) }),
                ),
            },
            "give_up" => {
                let attempt = order["attempt"].as_u64().unwrap();
                match self.dumps.remove(&attempt) {
                    Some(handle) => handle.give_up(),
                    None => {
                        let (rank, ..) = self.rank.as_ref().unwrap();
                        rank.commit_group(group(attempt)).unwrap().give_up();
                    }
                }
                answer(json!({}));
            }
            "release" => {
                self.gate.release(order["key"].as_u64().unwrap(), None);
                answer(json!({}));
            }
            "fail" => {
                self.gate.release(order["key"].as_u64().unwrap(), Some(ErrorKind::Io));
                answer(json!({}));
            }
            "lookup" => {
                let keys: Vec<Key> = keys().into_iter().map(key).collect();
                let scheduler = self.scheduler.as_ref().unwrap();
                let there = scheduler.lookup(POOL, &keys).unwrap();
                let there: Vec<String> = there.iter().map(|p| format!("{p:?}")).collect();
                answer(
                    json!({ "there": there, "prefix": scheduler.prefix_lookup(POOL, &keys).unwrap() }),
                );
            }
            "lease" => {
                let keys: Vec<Key> = keys().into_iter().map(key).collect();
                let consumers = u16::try_from(order["consumers"].as_u64().unwrap()).unwrap();
                let deadline =
                    Instant::now() + Duration::from_secs(order["seconds"].as_u64().unwrap());
                match self
                    .scheduler
                    .as_ref()
                    .unwrap()
                    .lease(POOL, &keys, consumers, deadline)
                    .unwrap()
                {
                    ucm::LeaseOutcome::Leased(lease) => {
                        let ticket = lease.ticket().to_u64();
                        answer(json!({ "ticket": ticket, "covered": lease.covered() }));
                        self.leases.insert(ticket, lease);
                    }
                    other => answer(json!({ "error": format!("{other:?}") })),
                }
            }
            "redeem" => {
                let ticket = ucm::LeaseTicket::from_u64(order["ticket"].as_u64().unwrap());
                let (rank, ..) = self.rank.as_ref().unwrap();
                answer(match rank.member().redeem(ticket).unwrap() {
                    Redeemed::Ok(left) => json!({ "left": left }),
                    Redeemed::Gone => json!({ "gone": true }),
                });
            }
            "inspect" => {
                let inspection = match (&self.rank, &self.scheduler) {
                    (Some((rank, ..)), _) => rank.inspect(),
                    (None, Some(scheduler)) => scheduler.inspect(),
                    _ => panic!("not joined"),
                };
                let pool = &inspection.pools[0];
                answer(json!({
                    "problems": inspection.problems, "members": inspection.members.len(), "ready": pool.ready,
                    "filling": pool.filling, "draining": pool.draining, "pinned": pool.pinned, "free": pool.free,
                    "deaths": inspection.statistics.deaths, "owners": inspection.statistics.owners,
                }));
            }
            "fork" => {
                // A worker process of an engine, which outlives the rank and knows nothing of the cache.
                // SAFETY: the child only sleeps, and ends without running anything of its parent.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    std::thread::sleep(Duration::from_secs(120));
                    // SAFETY: see above.
                    unsafe { libc::_exit(0) };
                }
                answer(json!({ "pid": child }));
            }
            "memory" => {
                let status = std::fs::read_to_string("/proc/self/status").unwrap();
                let field = |name: &str| {
                    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
                    line.trim_end_matches(" kB").trim().parse::<u64>().unwrap()
                };
                answer(
                    json!({ "shmem_kib": field("RssShmem:"), "huge_kib": field("HugetlbPages:"), "virtual_kib": field("VmSize:") }),
                );
            }
            other => panic!("unknown order {other}"),
        }
    }

    fn join(&mut self, order: &Value) -> Result<bool, ucm::Error> {
        let number = |name: &str, default: u64| order[name].as_u64().unwrap_or(default);
        let node = Node::builder("test")
            .dir(order["dir"].as_str().unwrap())
            .ranks(u32::try_from(number("ranks", 1)).unwrap())
            .pool(
                number("shard_bytes", 4096),
                u32::try_from(number("shards_per_block", 1)).unwrap(),
                u32::try_from(number("slots", 64)).unwrap(),
            )
            .configure(|config| {
                config.cache.pages = ucm::Pages::Small;
                config.cache.join_timeout_ms = number("timeout_ms", 30_000);
                config.queue.backend_depth = usize::try_from(number("depth", 4)).unwrap();
                config.queue.close_timeout_ms = 200;
                if order["first"] == "wait" {
                    config.cache.scheduler_first = ucm::SchedulerFirst::Wait;
                }
            })
            .build()?;
        if order["role"] == "scheduler" {
            let scheduler = node.scheduler()?;
            let created = scheduler.created();
            self.scheduler = Some(scheduler);
            return Ok(created);
        }
        let backend: Arc<dyn Backend> = match order["backend"].as_str() {
            Some("gate") => self.gate.clone(),
            Some("none") => Arc::new(ucm_store::MemoryBackend::new()),
            _ => Arc::new(PatternBackend::new(GENERATION)),
        };
        let rank =
            node.rank(u32::try_from(number("device", 0)).unwrap()).backend(backend).start()?;
        let memory =
            Memory::host(usize::try_from(number("destination", 1 << 20)).unwrap()).unwrap();
        let region = rank.register(memory.clone())?;
        let created = rank.report().created;
        self.rank = Some((Arc::new(rank), memory, region));
        Ok(created)
    }

    /// Dumps the keys into the cache and the backend, and waits for both.
    fn dump(&self, keys: &[u64]) {
        let (rank, ..) = self.rank.as_ref().unwrap();
        let handle = rank.dump(POOL, &self.sources(keys), true).unwrap();
        assert!(handle.wait_durable(None).unwrap().iter().all(Result::is_ok));
    }

    /// Dumps the keys as this rank's part of an attempt of all ranks; says how they ended.
    fn dump_group(&mut self, order: &Value, keys: &[u64]) -> Result<(), ucm::Error> {
        let (rank, ..) = self.rank.as_ref().unwrap();
        let attempt = order["attempt"].as_u64().unwrap();
        let part = rank.commit_group(group(attempt))?;
        let shard = |(key, src): (Key, Addr)| ucm::DumpRef { key, src, len: None };
        let task = DumpTask {
            shards: self.sources(keys).into_iter().map(shard).collect(),
            durable: true,
            group: Some(part),
            ..DumpTask::default()
        };
        let handle = Arc::new(rank.submit_dump(POOL, task)?);
        self.dumps.insert(attempt, handle.clone());
        std::thread::spawn(move || {
            let results = handle.wait_durable(None).unwrap();
            let results: Vec<String> = results.iter().map(|r| format!("{r:?}")).collect();
            say(&json!({ "kind": "dumped", "attempt": attempt, "results": results }));
        });
        Ok(())
    }

    /// Fills the memory with the bytes of the keys; where each one's are.
    fn sources(&self, keys: &[u64]) -> Vec<(Key, Addr)> {
        let (rank, memory, region) = self.rank.as_ref().unwrap();
        let bytes = rank.pool(POOL).unwrap().shard_bytes();
        let mut buffer = vec![0; usize::try_from(bytes).unwrap()];
        let mut shards = Vec::new();
        for (index, number) in (0..).zip(keys) {
            fill_pattern(&mut buffer, &key(*number).block.0, 0, 0, GENERATION);
            let offset = index * bytes;
            memory.write(usize::try_from(offset).unwrap(), &buffer).unwrap();
            shards.push((key(*number), Addr { region: *region, offset }));
        }
        shards
    }

    /// Loads the keys one after the other into the destination; says how it ended.
    fn load(&self, task: u64, keys: &[u64]) -> Result<(), ucm::Error> {
        let (rank, memory, region) = self.rank.as_ref().unwrap();
        let bytes = rank.pool(POOL)?.shard_bytes();
        let shard = |(index, number): (usize, &u64)| ShardRef {
            key: key(*number),
            dst: Addr { region: *region, offset: index as u64 * bytes },
            len: None,
        };
        let request =
            Request { shards: keys.iter().enumerate().map(shard).collect(), deadline: None };
        let handle = rank.submit(POOL, Task { requests: vec![request] })?;
        let (memory, keys) = (memory.clone(), keys.to_vec());
        std::thread::spawn(move || {
            let outcome = handle.wait(None).unwrap().remove(0);
            let valid = |index: u32| match &outcome {
                Outcome::Loaded => true,
                Outcome::Recompute { shards, .. } => !shards.contains(&index),
                _ => false,
            };
            let mut buffer = vec![0; usize::try_from(bytes).unwrap()];
            let mut wrong = None;
            for (index, number) in (0..).zip(&keys) {
                memory.read(index as usize * buffer.len(), &mut buffer).unwrap();
                if valid(index)
                    && let Err(mismatch) =
                        verify_pattern(&buffer, &key(*number).block.0, 0, 0, GENERATION)
                {
                    wrong.get_or_insert_with(|| format!("shard {number}: {mismatch}"));
                }
            }
            say(
                &json!({ "kind": "ended", "task": task, "outcome": format!("{outcome:?}"), "wrong": wrong }),
            );
        });
        Ok(())
    }
}

const GENERATION: u64 = 7;

/// A backend whose loads end when the parent says so.
#[derive(Debug, Default)]
struct Gate {
    held: Mutex<HashMap<u64, Op>>,
}

impl Gate {
    fn release(&self, number: u64, error: Option<ErrorKind>) {
        let op = self.held.lock().unwrap().remove(&number).unwrap();
        match error {
            Some(kind) => op.finish(Err(StoreError::new(kind, "the parent said so"))),
            None => {
                let mut bytes = vec![0; op.memory().len()];
                fill_pattern(&mut bytes, op.block(), op.shard(), 0, GENERATION);
                op.memory().write(0, &bytes).unwrap();
                op.finish(Ok(()));
            }
        }
    }
}

impl Backend for Gate {
    fn capabilities(&self) -> BackendCapabilities {
        BackendCapabilities::new("gate", 1, false)
    }

    fn load(&self, ops: Vec<Op>) {
        for op in ops {
            let number = u64::try_from(u128::from_le_bytes(*op.block())).unwrap();
            // Half of the bytes are there: what a killed owner leaves must never be served.
            op.memory().write(0, &vec![0xAB; op.memory().len() / 2]).unwrap();
            self.held.lock().unwrap().insert(number, op);
            say(&json!({ "kind": "started", "key": number }));
        }
    }

    fn dump(&self, ops: Vec<Op>) {
        Op::finish_all(ops.into_iter().map(|op| (op, Ok(()))));
    }

    fn contains(&self, keys: &[([u8; 16], u32)]) -> Vec<Presence> {
        vec![Presence::Unknown; keys.len()]
    }

    fn touch(&self, _blocks: &[[u8; 16]]) -> Result<(), StoreError> {
        Ok(())
    }

    fn remove(&self, keys: &[([u8; 16], u32)]) -> Vec<Result<(), StoreError>> {
        keys.iter().map(|_| Ok(())).collect()
    }
}
