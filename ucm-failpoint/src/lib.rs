//! Named points at which a test kills or stops the process that reaches them.
//!
//! The crates of the cache call [`hit`] between the stores of their multi-step changes, in builds
//! with their feature `failpoints` only. The environment arms one point of a process:
//!
//! * `UCM_FAILPOINT=link.word.after:3` sends SIGKILL to the process at the third hit of the point,
//!   counted over all threads;
//! * `UCM_FAILPOINT=link.word.after:3:stop` sends SIGSTOP; a SIGCONT lets it go on.
//!
//! No crate from elsewhere does this: what there is takes locks at every point, and brings a random
//! number generator along.
//!
//! **Invariant:** without the variable a hit changes nothing.

use std::sync::{
    OnceLock,
    atomic::{AtomicU64, Ordering},
};

use rustix::process::{Signal, getpid, kill_process};

/// The variable that arms a point.
pub const VARIABLE: &str = "UCM_FAILPOINT";

#[derive(Debug)]
struct Armed {
    name: String,
    nth: u64,
    signal: Signal,
    hits: AtomicU64,
}

static ARMED: OnceLock<Option<Armed>> = OnceLock::new();

/// Says that a point was reached. Thread-safe; takes no lock after the first call.
pub fn hit(name: &str) {
    let Some(armed) = ARMED.get_or_init(from_environment) else { return };
    if armed.name == name && armed.hits.fetch_add(1, Ordering::SeqCst) + 1 == armed.nth {
        // Nothing can be done about a refusal; the test misses the signal.
        let _ = kill_process(getpid(), armed.signal);
    }
}

fn from_environment() -> Option<Armed> {
    let text = std::env::var(VARIABLE).ok()?;
    let armed = parse(&text);
    if armed.is_none() {
        // A test that arms nothing would find nothing.
        let _ = kill_process(getpid(), Signal::ABORT);
    }
    armed
}

fn parse(text: &str) -> Option<Armed> {
    let (name, rest) = text.split_once(':')?;
    let (nth, signal) = match rest.split_once(':') {
        None => (rest, Signal::KILL),
        Some((nth, "stop")) => (nth, Signal::STOP),
        Some(_) => return None,
    };
    let nth = nth.parse().ok().filter(|nth| *nth > 0)?;
    Some(Armed { name: name.to_owned(), nth, signal, hits: AtomicU64::new(0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_orders_are_understood() {
        let understood = |text| parse(text).map(|a| (a.name, a.nth, a.signal));
        assert_eq!(understood("a.b.after:3"), Some(("a.b.after".into(), 3, Signal::KILL)));
        assert_eq!(understood("a.b.after:1:stop"), Some(("a.b.after".into(), 1, Signal::STOP)));
        for wrong in ["", "a", "a:", "a:0", "a:x", "a:1:go", "a:1:stop:1"] {
            assert_eq!(understood(wrong), None, "{wrong}");
        }
    }
}
