//! Named points at which a test kills or stops the process that reaches them.
//!
//! The crates of the cache call [`hit`] between the stores of their multi-step changes, in builds
//! with their feature `failpoints` only. The environment arms points of a process:
//!
//! * `UCM_FAILPOINT=link.word.after:3` sends SIGKILL to the process at the third hit of the point,
//!   counted over all threads;
//! * `UCM_FAILPOINT=link.word.after:3:stop` sends SIGSTOP; a SIGCONT lets it go on;
//! * `UCM_FAILPOINT=link.word.after:3:exec` makes it another program (`sleep 600`);
//! * several orders are separated by commas.
//!
//! No crate from elsewhere does this: what there is takes locks at every point, and brings a random
//! number generator along.
//!
//! **Invariant:** without the variable a hit changes nothing.

use std::{
    os::unix::process::CommandExt as _,
    path::Path,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

/// The variable that arms points.
pub const VARIABLE: &str = "UCM_FAILPOINT";

#[derive(Debug)]
struct Armed {
    name: String,
    nth: u64,
    what: What,
    hits: AtomicU64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Signal(libc::c_int),
    Exec,
}

static ARMED: OnceLock<Vec<Armed>> = OnceLock::new();

/// Says that a point was reached. Thread-safe; takes no lock after the first call.
pub fn hit(name: &str) {
    for armed in ARMED.get_or_init(from_environment) {
        if armed.name == name && armed.hits.fetch_add(1, Ordering::SeqCst) + 1 == armed.nth {
            match armed.what {
                // To this very thread: another might take a signal to the process while this one
                // goes on.
                // SAFETY: takes no pointers; both signals leave nothing to return to but this point.
                What::Signal(signal) => unsafe {
                    libc::raise(signal);
                },
                What::Exec => {
                    let _error = std::process::Command::new("sleep").arg("600").exec();
                    std::process::abort();
                }
            }
        }
    }
}

fn from_environment() -> Vec<Armed> {
    let Ok(text) = std::env::var(VARIABLE) else { return Vec::new() };
    // A test that arms nothing would find nothing.
    text.split(',').map(|order| parse(order).unwrap_or_else(|| std::process::abort())).collect()
}

fn parse(text: &str) -> Option<Armed> {
    let (name, rest) = text.split_once(':')?;
    let (nth, what) = match rest.split_once(':') {
        None => (rest, What::Signal(libc::SIGKILL)),
        Some((nth, "stop")) => (nth, What::Signal(libc::SIGSTOP)),
        Some((nth, "exec")) => (nth, What::Exec),
        Some(_) => return None,
    };
    let nth = nth.parse().ok().filter(|nth| *nth > 0)?;
    Some(Armed { name: name.to_owned(), nth, what, hits: AtomicU64::new(0) })
}

/// The names of all points in the sources below a folder, sorted: for the test that compares them
/// with a crate's list. A name that stands twice comes twice.
///
/// # Errors
/// If the sources cannot be read.
pub fn names_in(folder: &Path) -> std::io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            names.extend(names_in(&path)?);
            continue;
        }
        let text = std::fs::read_to_string(&path)?;
        let points = text.split("failpoint!(\"").skip(1);
        names.extend(points.filter_map(|after| Some(after.split_once('"')?.0.to_owned())));
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_orders_are_understood() {
        let understood = |text| parse(text).map(|a| (a.name, a.nth, a.what));
        let [kill, stop] = [libc::SIGKILL, libc::SIGSTOP].map(What::Signal);
        assert_eq!(understood("a.b.after:3"), Some(("a.b.after".into(), 3, kill)));
        assert_eq!(understood("a.b.after:1:stop"), Some(("a.b.after".into(), 1, stop)));
        assert_eq!(understood("a.b.after:2:exec"), Some(("a.b.after".into(), 2, What::Exec)));
        for wrong in ["", "a", "a:", "a:0", "a:x", "a:1:go", "a:1:stop:1"] {
            assert_eq!(understood(wrong), None, "{wrong}");
        }
    }
}
