//! A bounded pool of threads for blocking file work.
//!
//! **Invariant:** a job runs at most once; a panic in it is caught and the thread goes on; loads
//! always find a thread that no dump occupies, if there are two threads or more.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
};

use crate::{ErrorKind, StoreError};

/// While loads keep coming, every so many jobs a dump gets its turn.
const DUMP_EVERY: u32 = 8;

/// Which queue a job waits in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    Load,
    /// Dumps, touches: nobody waits for them.
    Background,
}

#[derive(Debug)]
pub(super) struct Pool<J: Send + 'static> {
    shared: Arc<Shared<J>>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared<J> {
    state: Mutex<State<J>>,
    more: Condvar,
    threads: usize,
    #[cfg(test)]
    thread_ids: Mutex<Vec<i32>>,
}

#[derive(Debug)]
struct State<J> {
    loads: VecDeque<J>,
    background: VecDeque<J>,
    background_running: usize,
    loads_in_a_row: u32,
    sleeping: usize,
    stopped: bool,
}

impl<J: Send + 'static> Pool<J> {
    /// Starts `threads` threads (at least one) that do `work`; what it returns are loads to do next.
    pub(super) fn new(
        threads: usize,
        work: impl Fn(J) -> Vec<J> + Send + Sync + 'static,
    ) -> Result<Self, StoreError> {
        let threads = threads.max(1);
        let state = State {
            loads: VecDeque::new(),
            background: VecDeque::new(),
            background_running: 0,
            loads_in_a_row: 0,
            sleeping: 0,
            stopped: false,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            more: Condvar::new(),
            threads,
            #[cfg(test)]
            thread_ids: Mutex::default(),
        });
        let mut pool = Self { shared, threads: Vec::with_capacity(threads) };
        let work = Arc::new(work);
        for n in 0..threads {
            let (shared, work) = (Arc::clone(&pool.shared), Arc::clone(&work));
            let thread = thread::Builder::new()
                .name(format!("ucm-file-{n}"))
                .spawn(move || shared.run(&*work))
                .map_err(|e| {
                    StoreError::new(ErrorKind::Io, format!("thread {n} of {threads}: {e}"))
                })?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    pub(super) fn threads(&self) -> usize {
        self.shared.threads
    }

    /// Kernel ids of the threads that have started.
    #[cfg(test)]
    pub(super) fn thread_ids(&self) -> Vec<i32> {
        self.shared.thread_ids.lock().unwrap().clone()
    }

    /// Adds jobs; gives them back when the pool has stopped.
    pub(super) fn submit(&self, lane: Lane, jobs: Vec<J>) -> Result<(), Vec<J>> {
        let count = jobs.len();
        let mut state = self.shared.lock();
        if state.stopped {
            return Err(jobs);
        }
        match lane {
            Lane::Load => state.loads.extend(jobs),
            Lane::Background => state.background.extend(jobs),
        }
        let wake = state.sleeping.min(count);
        drop(state);
        (0..wake).for_each(|_| self.shared.more.notify_one());
        Ok(())
    }

    /// Something that takes back what has not begun.
    pub(super) fn drainer(&self) -> impl Fn() -> Vec<J> + Send + use<J> {
        let shared = Arc::clone(&self.shared);
        move || shared.lock().drain()
    }

    /// Takes back what has not begun; later jobs are refused.
    pub(super) fn close(&self) -> Vec<J> {
        let mut state = self.shared.lock();
        state.stopped = true;
        let left = state.drain();
        drop(state);
        self.shared.more.notify_all();
        left
    }

    /// Leaves the threads to themselves: what they wait for may never come.
    pub(super) fn detach(&mut self) {
        self.threads.clear();
    }

    /// Takes back what has not begun and waits for what runs. Later jobs are refused.
    pub(super) fn stop(&mut self) -> Vec<J> {
        let left = self.close();
        let me = thread::current().id();
        for thread in self.threads.drain(..) {
            // A sink called by a thread may drop the last reference to the backend.
            if thread.thread().id() != me && thread.join().is_err() {
                tracing::warn!("a thread of a file backend ended by a panic");
            }
        }
        left
    }
}

impl<J> Shared<J> {
    fn run(&self, work: &impl Fn(J) -> Vec<J>) {
        #[cfg(test)]
        self.thread_ids.lock().unwrap().push(rustix::thread::gettid().as_raw_nonzero().get());
        let mut state = self.lock();
        loop {
            let Some((lane, job)) = state.take(self.threads) else {
                if state.stopped {
                    return;
                }
                state.sleeping += 1;
                state = self.more.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.sleeping -= 1;
                continue;
            };
            drop(state);
            // What the job holds ends by being dropped while the panic unwinds.
            let next = catch_unwind(AssertUnwindSafe(|| work(job))).unwrap_or_else(|_| {
                tracing::error!("an operation of a file backend panicked");
                Vec::new()
            });
            state = self.lock();
            // Also when the pool has stopped: whoever comes from here does them before it ends.
            let wake = state.sleeping.min(next.len());
            state.loads.extend(next);
            (0..wake).for_each(|_| self.more.notify_one());
            if lane == Lane::Background {
                state.background_running -= 1;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<J>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<J> State<J> {
    fn drain(&mut self) -> Vec<J> {
        let mut left: Vec<J> = self.loads.drain(..).collect();
        left.extend(self.background.drain(..));
        left
    }

    fn take(&mut self, threads: usize) -> Option<(Lane, J)> {
        let may_run_background = self.background_running + 1 < threads.max(2);
        let starved = self.loads_in_a_row >= DUMP_EVERY;
        if (self.loads.is_empty() || starved)
            && may_run_background
            && let Some(job) = self.background.pop_front()
        {
            self.background_running += 1;
            self.loads_in_a_row = 0;
            return Some((Lane::Background, job));
        }
        let job = self.loads.pop_front()?;
        self.loads_in_a_row = self.loads_in_a_row.saturating_add(1);
        Some((Lane::Load, job))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Barrier, mpsc};

    use super::*;

    #[test]
    fn q10_loads_never_wait_behind_dumps() {
        let gate = Arc::new(Barrier::new(2));
        let (done, ended) = mpsc::channel();
        let done = Mutex::new(done);
        let at_gate = Arc::clone(&gate);
        let mut pool = Pool::new(2, move |job: u32| {
            if job == 0 {
                at_gate.wait();
            }
            done.lock().unwrap().send(job).unwrap();
            Vec::new()
        })
        .unwrap();
        // One dump blocks; more of them must not take the second thread.
        pool.submit(Lane::Background, vec![0, 1, 2]).unwrap();
        pool.submit(Lane::Load, vec![10, 11]).unwrap();
        let first: Vec<u32> = ended.iter().take(2).collect();
        assert_eq!(first, [10, 11]);
        gate.wait();
        let rest: Vec<u32> = ended.iter().take(3).collect();
        assert_eq!(rest, [0, 1, 2]);
        assert!(pool.stop().is_empty());
        assert_eq!(pool.submit(Lane::Load, vec![7]), Err(vec![7]));
    }

    #[test]
    fn a26_a_panic_ends_its_job_only() {
        let (done, ended) = mpsc::channel();
        let done = Mutex::new(done);
        let pool = Pool::new(1, move |job: u32| {
            assert!(job.is_multiple_of(2), "odd jobs panic");
            done.lock().unwrap().send(job).unwrap();
            Vec::new()
        })
        .unwrap();
        pool.submit(Lane::Load, (0..6).collect()).unwrap();
        assert_eq!(ended.iter().take(3).collect::<Vec<_>>(), [0, 2, 4]);
    }

    /// Broken on purpose: jobs that come out of others are forgotten when the pool stops.
    #[test]
    fn jobs_bring_jobs_also_while_the_pool_stops() {
        let gate = Arc::new(Barrier::new(2));
        let (done, ended) = mpsc::channel();
        let done = Mutex::new(done);
        let at_gate = Arc::clone(&gate);
        let mut pool = Pool::new(1, move |job: u32| {
            done.lock().unwrap().send(job).unwrap();
            if job != 0 {
                return Vec::new();
            }
            at_gate.wait();
            at_gate.wait();
            vec![1, 2, 3]
        })
        .unwrap();
        pool.submit(Lane::Load, vec![0, 9]).unwrap();
        gate.wait();
        assert_eq!(pool.close(), [9]);
        gate.wait();
        assert!(pool.stop().is_empty());
        drop(pool);
        assert_eq!(ended.iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
    }

    #[test]
    fn background_work_is_not_starved() {
        let mut state: State<u32> = State {
            loads: (0..100).collect(),
            background: (100..102).collect(),
            background_running: 0,
            loads_in_a_row: 0,
            sleeping: 0,
            stopped: false,
        };
        let order: Vec<Lane> = (0..20)
            .map(|_| {
                let (lane, _) = state.take(4).unwrap();
                if lane == Lane::Background {
                    state.background_running -= 1;
                }
                lane
            })
            .collect();
        let at: Vec<usize> = (0..20).filter(|i| order[*i] == Lane::Background).collect();
        assert_eq!(at, [8, 17]);
    }
}
