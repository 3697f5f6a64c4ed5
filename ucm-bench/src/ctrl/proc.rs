//! What the kernel says about the threads of other processes.
//!
//! Owns: reading `/proc`.
//! **Invariant:** a file that cannot be read or understood is an error, never zero.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use super::spec::Task;
use crate::{clock, error::BenchError};

/// Longest wait for a thread to fall asleep; only a broken measurement takes that long.
const ASLEEP_WITHIN: Duration = Duration::from_secs(30);

/// Sums over all threads of some processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Times a thread gave the processor up by itself, which is how often one was woken.
    pub(crate) switches: u64,
    /// Processor time.
    pub(crate) cpu_ns: u64,
    pub(crate) threads: u64,
}

impl Usage {
    /// Of these processes now.
    pub(crate) fn of(processes: &[u32]) -> Result<Self, BenchError> {
        let mut sum = Self::default();
        for process in processes {
            let tasks = PathBuf::from(format!("/proc/{process}/task"));
            let list =
                fs::read_dir(&tasks).map_err(|error| BenchError::path("list", &tasks, error))?;
            for task in list {
                let task = task.map_err(|error| BenchError::path("list", &tasks, error))?;
                let of_task = Self::of_task(&task.path())?;
                sum.switches += of_task.switches;
                sum.cpu_ns += of_task.cpu_ns;
                sum.threads += of_task.threads;
            }
        }
        Ok(sum)
    }

    fn of_task(folder: &Path) -> Result<Self, BenchError> {
        Ok(Self {
            switches: voluntary_switches(&read(&folder.join("status"))?)?,
            cpu_ns: run_ns(&read(&folder.join("schedstat"))?)?,
            threads: 1,
        })
    }

    /// What was used since `before`.
    pub(crate) fn since(self, before: Self) -> Result<Self, BenchError> {
        let (switches, cpu_ns) =
            (self.switches.checked_sub(before.switches), self.cpu_ns.checked_sub(before.cpu_ns));
        match (switches, cpu_ns) {
            (Some(switches), Some(cpu_ns)) if self.threads == before.threads => {
                Ok(Self { switches, cpu_ns, threads: self.threads })
            }
            _ => Err(BenchError::Peer(format!(
                "threads came or went while they were watched: {} before, {} after",
                before.threads, self.threads
            ))),
        }
    }
}

/// The calling thread.
pub(crate) fn this_thread() -> Task {
    let thread = rustix::thread::gettid().as_raw_nonzero().get();
    Task { pid: std::process::id(), thread: thread.unsigned_abs() }
}

/// True when the thread sleeps until something wakes it.
pub(crate) fn sleeps(task: Task) -> Result<bool, BenchError> {
    let Task { pid, thread } = task;
    let stat = read(&PathBuf::from(format!("/proc/{pid}/task/{thread}/stat")))?;
    state(&stat)
        .map(|state| state == 'S')
        .ok_or_else(|| BenchError::Environment(format!("thread {thread} has no state: {stat}")))
}

/// Returns once the thread sleeps.
pub(crate) fn until_asleep(task: Task) -> Result<(), BenchError> {
    let limit = clock::now_ns() + u64::try_from(ASLEEP_WITHIN.as_nanos()).unwrap_or(u64::MAX);
    while !sleeps(task)? {
        if clock::now_ns() > limit {
            return Err(BenchError::Peer(format!(
                "thread {} of process {} does not fall asleep",
                task.thread, task.pid
            )));
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// Bytes of memory that can still be used, as the kernel estimates.
pub(crate) fn available_bytes() -> Result<u64, BenchError> {
    let text = read(&PathBuf::from("/proc/meminfo"))?;
    number_after(&text, "MemAvailable:").map(|kib| kib.saturating_mul(1024))
}

fn read(path: &Path) -> Result<String, BenchError> {
    fs::read_to_string(path).map_err(|error| BenchError::path("read", path, error))
}

fn number_after(text: &str, label: &str) -> Result<u64, BenchError> {
    text.lines()
        .find_map(|line| line.strip_prefix(label)?.split_whitespace().next()?.parse().ok())
        .ok_or_else(|| BenchError::Environment(format!("the kernel does not tell {label}")))
}

fn voluntary_switches(status: &str) -> Result<u64, BenchError> {
    number_after(status, "voluntary_ctxt_switches:")
}

/// First number of `schedstat`: time on a processor.
fn run_ns(schedstat: &str) -> Result<u64, BenchError> {
    let first = schedstat.split_whitespace().next().and_then(|number| number.parse().ok());
    first.ok_or_else(|| {
        BenchError::Environment("the kernel keeps no scheduler statistics (schedstat)".into())
    })
}

/// The letter after the name, which may itself contain parentheses.
fn state(stat: &str) -> Option<char> {
    let (_, after) = stat.rsplit_once(')')?;
    after.trim_start().chars().next()
}

#[cfg(test)]
mod tests {
    use std::{path::PathBuf, sync::mpsc};

    use super::{Usage, available_bytes, run_ns, state, until_asleep, voluntary_switches};

    #[test]
    fn proc_files_are_understood() {
        assert_eq!(state("12 (a) (b)) S 1 12"), Some('S'));
        assert_eq!(state("nonsense"), None);
        assert_eq!(run_ns("123 456 7\n").unwrap(), 123);
        assert!(run_ns("").is_err());
        let status = "Name:\tx\nvoluntary_ctxt_switches:\t41\nnonvoluntary_ctxt_switches:\t7\n";
        assert_eq!(voluntary_switches(status).unwrap(), 41);
        assert!(voluntary_switches("nonvoluntary_ctxt_switches:\t7\n").is_err());
        assert!(available_bytes().unwrap() > 0);
    }

    #[test]
    fn a_wake_up_of_a_thread_is_counted() {
        let (wake, woken) = mpsc::channel::<()>();
        let (say, hear) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            say.send(super::this_thread()).unwrap();
            woken.recv().unwrap();
            // Sleeps once more, until the sender is gone.
            let _ = woken.recv();
        });
        let task = hear.recv().unwrap();
        let folder = PathBuf::from(format!("/proc/{}/task/{}", task.pid, task.thread));
        until_asleep(task).unwrap();
        let before = Usage::of_task(&folder).unwrap();
        wake.send(()).unwrap();
        until_asleep(task).unwrap();
        let used = Usage::of_task(&folder).unwrap().since(before).unwrap();
        assert!(used.switches >= 1 && used.cpu_ns > 0, "{used:?}");
        drop(wake);
        thread.join().unwrap();
        assert!(Usage::of_task(&folder).is_err());
        assert!(Usage { threads: 2, ..used }.since(used).is_err());
    }
}
