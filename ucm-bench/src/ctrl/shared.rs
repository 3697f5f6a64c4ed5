//! The region that all processes of a measurement share: hits at the same time, waits, wake-ups.
//!
//! Owns: one process's membership in it and the thread that waits there.
//! **Invariant:** a wake-up is only timed when the kernel says that the thread sleeps.

use std::{fs::File, thread::JoinHandle, time::Duration};

use ucm_ctrl::{
    Acquired, Control, Fill, MemberSpec, Pool, WaitOutcome, Waiter, testing::BareFutex,
};

use super::{
    peer, proc, samples,
    spec::{HIT_POOL, Instants, Task, Together, WAIT_POOL, key, wake_order},
    tables,
};
use crate::{clock, error::BenchError, rng::Rng};

/// Between the moment a thread is seen asleep and its wake-up. Idle processors look out for work for
/// up to 0.2 ms before they halt, and a halted one takes several times as long to wake: near that
/// limit, chance would decide what is measured.
const SETTLE: Duration = Duration::from_millis(1);

/// How often each key is hit in a measurement with others.
const ROUNDS: usize = 4;

/// See the module description.
#[derive(Debug)]
pub(crate) struct Shared {
    hit: Pool,
    wait: Pool,
    futex: Control,
    owned: Option<Fill>,
    waiting: Option<JoinHandle<Result<Instants, BenchError>>>,
}

impl Shared {
    /// Joins the regions whose descriptors another process has under these paths.
    pub(crate) fn join(region: &str, futex: &str) -> Result<Self, BenchError> {
        let member = attach(region)?.join(MemberSpec::rank(0, 1)).map_err(peer)?;
        Ok(Self {
            hit: member.pool(HIT_POOL).map_err(peer)?,
            wait: member.pool(WAIT_POOL).map_err(peer)?,
            futex: attach(futex)?,
            owned: None,
            waiting: None,
        })
    }

    pub(crate) fn fill(&self, keys: u32) -> Result<(), BenchError> {
        tables::fill(&self.hit, keys)
    }

    /// Hits the same keys as the other processes, in an order of its own.
    pub(crate) fn together(
        &self,
        keys: u32,
        at_ns: u64,
        seed: u64,
    ) -> Result<Together, BenchError> {
        let keys: Vec<_> = tables::random_order(keys, &mut Rng::new(seed)).map(key).collect();
        let mut passes = Vec::new();
        clock::wait_until(at_ns);
        let cpu = clock::cpu_ns();
        for _ in 0..ROUNDS {
            for part in keys.chunks_exact(tables::PASS) {
                passes.push(tables::timed(|| tables::hits(&self.hit, part))?);
            }
        }
        let cpu_ns = (clock::cpu_ns() - cpu) as f64 / (ROUNDS * keys.len()) as f64;
        Ok(Together { cpu_ns, wall_ns: samples::figure(passes)?.median() })
    }

    pub(crate) fn own(&mut self, number: u64) -> Result<(), BenchError> {
        self.owned = Some(own(&self.wait, number)?);
        Ok(())
    }

    pub(crate) fn publish(&mut self) -> Result<(), BenchError> {
        self.owned.take().map_or_else(|| Err(peer("nothing is owned")), publish)
    }

    /// Starts a thread that waits for a key.
    pub(crate) fn wait(&mut self, number: u64) -> Result<Task, BenchError> {
        let waiter = waiter(&self.wait, number)?;
        self.spawn(move || ready(&waiter).map(|()| Instants::default()))
    }

    /// Starts a thread that waits for keys and for the futex.
    pub(crate) fn listen(&mut self, first: u64, count: u32) -> Result<Task, BenchError> {
        let pool = self.wait.clone();
        let futex = BareFutex::new(self.futex.clone()).map_err(peer)?;
        let mut seen = futex.value();
        self.spawn(move || {
            let mut heard = Instants::default();
            let mut number = first;
            for through_cache in wake_order(first, count) {
                if through_cache {
                    let waiter = waiter(&pool, number)?;
                    ready(&waiter)?;
                    heard.cache_ns.push(clock::now_ns());
                    number += 1;
                } else {
                    futex.wait(seen);
                    heard.futex_ns.push(clock::now_ns());
                    seen = seen.wrapping_add(1);
                }
            }
            Ok(heard)
        })
    }

    /// The other side of [`listen`](Self::listen). The first key is owned already.
    pub(crate) fn ring(
        &mut self,
        first: u64,
        count: u32,
        listener: Task,
    ) -> Result<Instants, BenchError> {
        let futex = BareFutex::new(self.futex.clone()).map_err(peer)?;
        let mut rung = Instants::default();
        let mut next = first;
        for through_cache in wake_order(first, count) {
            if through_cache {
                // The listener must find its next key owned when it comes back.
                next += 1;
                let fill = self.owned.replace(own(&self.wait, next)?);
                let fill = fill.ok_or_else(|| peer("the first key is not owned"))?;
                settle(listener)?;
                rung.cache_ns.push(clock::now_ns());
                publish(fill)?;
            } else {
                settle(listener)?;
                rung.futex_ns.push(clock::now_ns());
                futex.ring();
            }
        }
        self.owned = None;
        Ok(rung)
    }

    /// Joins the thread that waited.
    pub(crate) fn waited(&mut self) -> Result<Instants, BenchError> {
        let thread = self.waiting.take().ok_or_else(|| peer("no thread waits"))?;
        thread.join().map_err(|_| peer("a waiting thread panicked"))?
    }

    fn spawn(
        &mut self,
        wait: impl FnOnce() -> Result<Instants, BenchError> + Send + 'static,
    ) -> Result<Task, BenchError> {
        let (say, hear) = std::sync::mpsc::channel();
        self.waiting = Some(std::thread::spawn(move || {
            let _ = say.send(proc::this_thread());
            wait()
        }));
        hear.recv().map_err(|_| peer("a waiting thread did not start"))
    }
}

fn attach(path: &str) -> Result<Control, BenchError> {
    let file = File::options()
        .read(true)
        .write(true)
        .open(path)
        .map_err(|error| BenchError::io(format!("open the region at {path}"), error))?;
    Control::attach(file.into()).map_err(peer)
}

fn own(pool: &Pool, number: u64) -> Result<Fill, BenchError> {
    match pool.acquire(&key(number)).map_err(peer)? {
        Acquired::Owner(fill) => Ok(fill),
        other => Err(peer(format!("key {number} should be new: {other:?}"))),
    }
}

fn publish(fill: Fill) -> Result<(), BenchError> {
    fill.publish().map(drop).map_err(|error| peer(format!("a publish was refused: {error:?}")))
}

fn waiter(pool: &Pool, number: u64) -> Result<Waiter, BenchError> {
    match pool.acquire(&key(number)).map_err(peer)? {
        Acquired::Waiter(waiter) => Ok(waiter),
        other => Err(peer(format!("key {number} should be in somebody's hands: {other:?}"))),
    }
}

fn ready(waiter: &Waiter) -> Result<(), BenchError> {
    match waiter.wait(None) {
        WaitOutcome::Ready => Ok(()),
        other => Err(peer(format!("a wait ended as {other:?}"))),
    }
}

fn settle(listener: Task) -> Result<(), BenchError> {
    proc::until_asleep(listener)?;
    std::thread::sleep(SETTLE);
    Ok(())
}
