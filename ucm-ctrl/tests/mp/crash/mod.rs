//! D1: a member dies, stops or is expelled at each failpoint while three others work.
//!
//! The victim is started with one armed point (`UCM_FAILPOINT`). Afterwards: the others go on by
//! themselves, one of them or the parent clears up, nothing of the victim is left, the consistency
//! walk finds nothing, every key is loadable, and nobody ever saw a wrong byte.
//!
//! `UCM_CRASH=full` runs the whole matrix, else a random slice; `UCM_CRASH_SEED` repeats one.
//!
//! **Invariant:** every point in `ucm_ctrl::failpoint::NAMES` belongs to exactly one scenario.

mod scene;
pub(crate) mod work;

use std::time::{Duration, Instant};

use ucm_ctrl::{Control, Key, PoolId, failpoint::NAMES, testing::bucket_of};

use self::scene::Scene;
use crate::{from_environment, key, storm::Random};

/// Keys in use; two of three fall into one bucket, so that its chain is used.
pub(crate) const KEYS: u64 = 30;

/// So many of them, the first.
pub(crate) const CROWDED: usize = 20;

pub(crate) fn keys(control: &Control) -> Vec<Key> {
    let bucket = |key: &Key| bucket_of(control, PoolId(0), key).unwrap();
    let (crowded, others): (Vec<Key>, Vec<Key>) =
        (0..400).map(key).partition(|key| bucket(key) == 0);
    crowded.into_iter().take(CROWDED).chain(others.into_iter().take(10)).collect()
}

/// What is needed for a member to reach a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Work.
    Work,
    /// To clear up after a member that died at this other point.
    Reap(&'static str),
    /// To wait for the lock of a dead member.
    DeadLock,
    /// To unlock a bucket while others sleep on the lock.
    Sleepers,
    /// To find every slot pinned.
    Full,
    /// To find a lock in the hands of a stopped member.
    StoppedLock,
    /// To expel a stopped member.
    Expel,
    /// To find a dead member's seat in the hands of a stopped reaper.
    StoppedReaper,
}

fn place(point: &str) -> Place {
    match point {
        "reap.lock.after" => Place::Reap("link.lock.after"),
        "reap.take.after" | "reap.slot.after" => Place::Reap("insert.key.after"),
        "lock.sleep.before" | "lock.break.after" => Place::DeadLock,
        "unlock.wake.before" => Place::Sleepers,
        "full.set.after" => Place::Full,
        "evict.undo.after" => Place::StoppedLock,
        _ if point.starts_with("relieve.") => Place::StoppedReaper,
        _ if point.starts_with("reap.") => Place::Reap("end.word.before"),
        _ if point.starts_with("expel.") => Place::Expel,
        _ => Place::Work,
    }
}

/// How the victim ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Kill,
    /// Stopped, others go on, continued.
    Stop,
    /// Stopped, expelled, continued.
    Expel,
}

#[derive(Clone, Debug)]
enum Run {
    One(&'static str, End, u64),
    /// The first point's victim is reaped by the second's.
    Pair(&'static str, &'static str),
}

fn all_runs(random: &mut Random) -> Vec<Run> {
    let mut runs = Vec::new();
    let (reaping, working): (Vec<&str>, Vec<&str>) =
        NAMES.iter().copied().partition(|name| matches!(place(name), Place::Reap(_)));
    for name in NAMES {
        runs.push(Run::One(name, End::Kill, 1));
        if place(name) == Place::Work {
            let later = 2 + random.below(6);
            let others = [(End::Kill, later), (End::Stop, later), (End::Expel, 1)];
            runs.extend(others.map(|(end, nth)| Run::One(name, end, nth)));
        }
    }
    for first in working.into_iter().filter(|name| place(name) == Place::Work) {
        runs.extend(reaping.iter().map(|second| Run::Pair(first, second)));
    }
    runs
}

/// `UCM_CRASH=full` for all, `UCM_CRASH=<text>` for the runs whose points contain the text.
#[test]
fn d1_death_stop_and_expulsion_at_every_point() {
    let seed = from_environment("UCM_CRASH_SEED", u64::from(std::process::id()) * 7919);
    let mut random = Random(seed);
    let mut runs = all_runs(&mut random);
    let budget = Duration::from_secs(from_environment("UCM_CRASH_SECONDS", 40));
    let choice = std::env::var("UCM_CRASH").unwrap_or_default();
    match choice.as_str() {
        "" => shuffle(&mut runs, &mut random),
        "full" => {}
        text => runs.retain(|run| format!("{run:?}").contains(text)),
    }
    let trace = std::env::var_os("UCM_CRASH_TRACE").is_some();
    println!("crash: seed {seed}, {} runs, `{choice}`", runs.len());
    let begun = Instant::now();
    let mut scene = Scene::new(seed);
    let (mut done, mut unreached) = (0, 0);
    for run in &runs {
        if choice.is_empty() && begun.elapsed() > budget {
            break;
        }
        let reached = match *run {
            Run::One(point, end, nth) => {
                if trace {
                    println!("crash: {point} {end:?} {nth}");
                }
                one(&mut scene, point, end, nth)
            }
            Run::Pair(first, second) => scene.pair(first, second),
        };
        done += 1;
        unreached += u32::from(!reached);
    }
    println!(
        "crash: {done} runs, {unreached} pairs without a second death, slowest progress of others {:?}, \
         slowest reap {:?}, {:?} in all",
        scene.slowest_progress,
        scene.slowest_reap,
        begun.elapsed()
    );
    scene.end();
    assert!(done > 0);
}

fn one(scene: &mut Scene, point: &'static str, end: End, nth: u64) -> bool {
    match (place(point), end) {
        (Place::Work, End::Kill) => scene.kill(point, nth),
        (Place::Work, End::Stop) => scene.stop(point, nth),
        (Place::Work, End::Expel) => scene.stop_and_expel(point, nth),
        (Place::Reap(first), _) => scene.reaper(first, point),
        (Place::DeadLock, _) => scene.breaker(point),
        (Place::Sleepers, _) => scene.with_sleepers(point),
        (Place::Full, _) => scene.with_all_slots_pinned(point),
        (Place::StoppedLock, _) => scene.beside_a_stopped_lock(point),
        (Place::Expel, _) => scene.operator(point),
        (Place::StoppedReaper, _) => scene.beside_a_stopped_reaper(point),
    }
    true
}

fn shuffle(runs: &mut [Run], random: &mut Random) {
    for last in (1..runs.len()).rev() {
        let with = random.below(last as u64 + 1);
        runs.swap(last, usize::try_from(with).unwrap());
    }
}
