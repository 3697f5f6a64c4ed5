//! Cancels and deadlines at random, against a storage and a device that fail.
//!
//! Owns: the random schedule and what is lost or wrong in it.
//! **Invariant:** a place is wiped and used again as soon as its request has ended and come to rest,
//! so that a late write anywhere shows as wrong bytes.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use ucm::{Deadline, Outcome, Task, TaskHandle};
use ucm_store::{Delay, ErrorKind, Fault, FaultBackend, LatencyBackend};
use ucm_transport::{DeviceFault, DeviceRates, ErrorKind as CopyError};

use super::lane::{Lane, POOL, Setup, environment, pattern};
use crate::{error::BenchError, rng::Rng};

const SHARD_BYTES: u64 = 4096;
const PLACES: u64 = 256;
const KEYS: u64 = 512;
const PATIENCE: Duration = Duration::from_secs(60);

/// What came of it.
#[derive(Debug, Default)]
pub(super) struct Storm {
    /// Requests submitted.
    pub(super) requests: u64,
    /// Requests that did not end, plus buffers, pins and bytes that did not come back.
    pub(super) lost: u64,
    pub(super) wrong_bytes: u64,
    pub(super) outcomes: BTreeMap<&'static str, u64>,
}

struct Live {
    handle: TaskHandle,
    /// Shard number and place.
    shards: Vec<(u64, u64)>,
}

/// `requests` requests with random ends.
pub(super) fn run(requests: u64, dir: &Path) -> Result<Storm, BenchError> {
    let delay = Delay::Exponential(Duration::from_micros(20));
    let storage = FaultBackend::new(LatencyBackend::new(pattern(), delay, 4).map_err(environment)?);
    storage.randomly(
        1,
        vec![
            (0.03, Fault::Fail(ErrorKind::Io)),
            (0.02, Fault::Fail(ErrorKind::Missing)),
            (0.01, Fault::Lose),
        ],
    );
    let setup = Setup {
        shard_bytes: SHARD_BYTES,
        buffer_bytes: 2 * SHARD_BYTES,
        depth: 3,
        backend_depth: 6,
        places: PLACES,
        full: false,
    };
    let rates = DeviceRates { per_item: Duration::from_micros(2), ..DeviceRates::default() };
    let lane = Lane::with(&setup, Arc::new(storage), rates, dir)?;
    for place in 0..PLACES {
        lane.poison(place)?;
    }
    let mut storm = Storm::default();
    let mut random = Rng::new(7);
    let mut free: Vec<u64> = (0..PLACES).collect();
    let mut live: Vec<Live> = Vec::new();
    while storm.requests < requests {
        fault(&lane, &mut random);
        if let Some(next) = submit(&lane, &mut random, &mut free)? {
            storm.requests += 1;
            live.push(next);
        }
        if random.below(2) == 0
            && let Some(victim) = pick(&live, &mut random)
        {
            victim.handle.cancel();
        }
        if free.len() < 8
            && let Some(oldest) = live.first()
        {
            // Backed up: somebody must come to rest. A stall that comes only now is ended, too.
            let limit = Instant::now() + PATIENCE;
            let soon = || Some(Instant::now() + Duration::from_millis(1));
            while !oldest.handle.wait_quiesced(soon()) && Instant::now() < limit {
                lane.device.resume();
            }
        }
        reap(&lane, &mut live, &mut free, &mut storm)?;
    }
    lane.device.heal();
    let limit = Instant::now() + PATIENCE;
    for one in &live {
        storm.lost += u64::from(!one.handle.wait_quiesced(Some(limit)));
    }
    reap(&lane, &mut live, &mut free, &mut storm)?;
    storm.lost += leftovers(&lane, limit)?;
    Ok(storm)
}

/// Now and then the device does something wrong.
fn fault(lane: &Lane, random: &mut Rng) {
    match random.below(100) {
        0 => lane.device.inject(DeviceFault::Fails(CopyError::Failed)),
        1 => lane.device.inject(DeviceFault::Loses),
        2 => lane.device.inject(DeviceFault::Refuses),
        3 => lane.device.inject(DeviceFault::Delays(Duration::from_micros(300))),
        4 => lane.device.inject(DeviceFault::Stalls),
        5..15 => lane.device.resume(),
        _ => {}
    }
}

fn submit(lane: &Lane, random: &mut Rng, free: &mut Vec<u64>) -> Result<Option<Live>, BenchError> {
    let count = 1 + random.below(4);
    let mut shards = Vec::new();
    let mut request = ucm::Request::default();
    for _ in 0..count {
        let Some(place) = free.pop() else { break };
        let n = random.below(KEYS);
        request.shards.extend(lane.request(n, 1, place).shards);
        shards.push((n, place));
    }
    if shards.is_empty() {
        return Ok(None);
    }
    if random.below(4) == 0 {
        let time = Duration::from_micros(random.below(1000));
        request.deadline = Some(Deadline::After(time));
    }
    let task = Task { requests: vec![request] };
    let handle = lane.rank.submit(POOL, task).map_err(|e| BenchError::Peer(e.to_string()))?;
    Ok(Some(Live { handle, shards }))
}

fn pick<'a>(live: &'a [Live], random: &mut Rng) -> Option<&'a Live> {
    let at = random.below(live.len().max(1) as u64);
    live.get(usize::try_from(at).ok()?)
}

/// Takes out what has ended and come to rest, and checks it.
fn reap(
    lane: &Lane,
    live: &mut Vec<Live>,
    free: &mut Vec<u64>,
    storm: &mut Storm,
) -> Result<(), BenchError> {
    let (ended, rest) =
        std::mem::take(live).into_iter().partition::<Vec<_>, _>(|one| one.handle.is_quiesced());
    *live = rest;
    for Live { handle, shards } in ended {
        let outcome = handle.request(0);
        let (name, invalid) = match &outcome {
            Some(Outcome::Loaded) => ("loaded", Some(&[][..])),
            Some(Outcome::Recompute { shards, .. }) => ("recompute", Some(shards.as_slice())),
            Some(Outcome::Cancelled) => ("cancelled", None),
            Some(Outcome::Deadline) => ("deadline", None),
            Some(Outcome::Stuck) => ("stuck", None),
            None => ("none", None),
        };
        *storm.outcomes.entry(name).or_default() += 1;
        storm.lost += u64::from(outcome.is_none());
        for (index, (n, place)) in (0_u32..).zip(shards) {
            if invalid.is_some_and(|invalid| !invalid.contains(&index)) {
                storm.wrong_bytes += lane.wrong_bytes(n, place)?;
            }
            lane.poison(place)?;
            free.push(place);
        }
    }
    Ok(())
}

/// What is still held when everything should have come back.
fn leftovers(lane: &Lane, limit: Instant) -> Result<u64, BenchError> {
    loop {
        let stats = lane.rank.stats(POOL).map_err(|e| BenchError::Peer(e.to_string()))?;
        let pools = lane.rank.inspect().pools;
        let pinned: u64 = pools.iter().map(|pool| pool.pinned + pool.draining).sum();
        let held = stats.staging_in_use + stats.quarantine_loads + stats.backend_in_flight + pinned;
        if held == 0 || Instant::now() > limit {
            return Ok(held);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
