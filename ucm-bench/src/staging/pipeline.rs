//! Makespans, small requests behind big ones, and the silence of an idle queue.
//!
//! Owns: what is submitted and when.
//! **Invariant:** no two runs ask for the same shard, and a place is used again only when its request
//! has ended.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use ucm::{Task, TaskHandle};

use super::{
    Args, Samples,
    lane::{Lane, POOL, all_loaded},
};
use crate::error::BenchError;

/// Keys of one run lie this far from those of the next.
const RUN: u64 = 1 << 32;
const PATIENCE: Duration = Duration::from_secs(60);

/// One run on a lane.
pub(super) fn measure(
    lane: &Lane,
    args: &Args,
    run: u32,
    verify: bool,
    samples: &mut Samples,
) -> Result<(), BenchError> {
    let first = u64::from(run) * RUN;
    makespan(lane, args, first, verify, samples)?;
    small_and_big(lane, args, first + RUN / 2, samples)
}

/// A closed loop: as many requests in flight as asked for, until all are done.
fn makespan(
    lane: &Lane,
    args: &Args,
    first: u64,
    verify: bool,
    samples: &mut Samples,
) -> Result<(), BenchError> {
    let shards = u64::from(args.shards);
    let mut waiting: VecDeque<(u64, u64, TaskHandle)> = VecDeque::new();
    let mut free: Vec<u64> = (0..u64::from(args.concurrency)).map(|n| n * shards).collect();
    let mut verifying = Duration::ZERO;
    let begin = Instant::now();
    for n in 0..u64::from(args.requests) {
        if free.is_empty()
            && let Some((n, place, handle)) = waiting.pop_front()
        {
            verifying += finish(lane, args, first + n * shards, place, &handle, verify, samples)?;
            free.push(place);
        }
        let place = free.pop().unwrap_or(0);
        let handle = submit(lane, first + n * shards, shards, place)?;
        waiting.push_back((n, place, handle));
    }
    for (n, place, handle) in waiting {
        verifying += finish(lane, args, first + n * shards, place, &handle, verify, samples)?;
    }
    // With --verify the checks take the caller's time, not the queue's; they are not hidden in it.
    let took = begin.elapsed().saturating_sub(verifying);
    samples.makespan_us.push(took.as_secs_f64() * 1e6);
    let stats = lane.rank.stats(POOL).map_err(|e| BenchError::Peer(e.to_string()))?;
    samples.inflight_max = samples.inflight_max.max(stats.tasks_in_flight_max);
    Ok(())
}

fn finish(
    lane: &Lane,
    args: &Args,
    first: u64,
    place: u64,
    handle: &TaskHandle,
    verify: bool,
    samples: &mut Samples,
) -> Result<Duration, BenchError> {
    all_loaded(handle.wait(Some(Instant::now() + PATIENCE)))?;
    let begin = Instant::now();
    if verify {
        for n in 0..u64::from(args.shards) {
            samples.wrong_bytes += lane.wrong_bytes(first + n, place + n)?;
            lane.poison(place + n)?;
        }
    }
    Ok(begin.elapsed())
}

/// A request of one shard, alone and behind a big one.
fn small_and_big(
    lane: &Lane,
    args: &Args,
    first: u64,
    samples: &mut Samples,
) -> Result<(), BenchError> {
    let big_shards = u64::from(args.big_shards);
    samples.small_alone_us.push(timed(lane, first, big_shards)?);
    let big = submit(lane, first + 1, big_shards, 0)?;
    // It is in full swing once its first copies have been made.
    let begun = lane.device.stats().plans + 2 * u64::from(args.shards);
    let limit = Instant::now() + PATIENCE;
    while lane.device.stats().plans < begun && !big.is_done() && Instant::now() < limit {
        std::thread::sleep(Duration::from_micros(200));
    }
    samples.small_behind_big_us.push(timed(lane, first + 1 + big_shards, big_shards)?);
    big.cancel();
    if !big.wait_quiesced(Some(limit)) {
        return Err(BenchError::Peer("a cancelled request never came to rest".into()));
    }
    Ok(())
}

fn timed(lane: &Lane, n: u64, place: u64) -> Result<f64, BenchError> {
    let begin = Instant::now();
    all_loaded(submit(lane, n, 1, place)?.wait(Some(begin + PATIENCE)))?;
    Ok(begin.elapsed().as_secs_f64() * 1e6)
}

fn submit(lane: &Lane, first: u64, shards: u64, place: u64) -> Result<TaskHandle, BenchError> {
    let task = Task { requests: vec![lane.request(first, shards, place)] };
    lane.rank.submit(POOL, task).map_err(|e| BenchError::Peer(e.to_string()))
}

/// Counts the turns of a queue that has nothing to do.
pub(super) fn idle(lane: &Lane, args: &Args, samples: &mut Samples) {
    let turns = || lane.rank.stats(POOL).map_or(0, |stats| stats.turns);
    // What a cancelled request left in the storage ends first.
    let mut last = turns();
    loop {
        std::thread::sleep(Duration::from_millis(50));
        let now = turns();
        if now == last {
            break;
        }
        last = now;
    }
    std::thread::sleep(Duration::from_millis(args.idle_ms));
    samples.idle_polls = turns() - last;
}
