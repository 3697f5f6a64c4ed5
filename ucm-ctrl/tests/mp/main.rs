//! Tests with real processes: this binary starts itself again as a child (`child::entry`), talks to
//! it over pipes, and ends it with real signals.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod child;
#[cfg(feature = "failpoints")]
mod crash;
mod death;
mod fork;
mod parent;
mod region;
mod storm;
mod waiting;

use std::{fs::File, os::fd::OwnedFd, time::Duration};

use ucm_ctrl::{Acquired, BlockId, Control, Fill, Key, Member, MemberSpec, Pool, PoolId, Waiter};

/// Far enough for any machine; reaching it means that something was lost.
const WATCHDOG: Duration = Duration::from_secs(60);

fn key(block: u64) -> Key {
    let wide = u128::from(block) << 64 | u128::from(!block);
    Key::new(BlockId(wide.to_le_bytes()), 0)
}

/// A region that another process made, through a path to its descriptor.
fn attach(path: &str) -> Control {
    let file = File::options().read(true).write(true).open(path).unwrap();
    Control::attach(OwnedFd::from(file)).unwrap()
}

fn rank(control: &Control) -> (Member, Pool) {
    let member = control.join(MemberSpec::rank(0, 8)).unwrap();
    let pool = member.pool(PoolId(0)).unwrap();
    (member, pool)
}

fn own(pool: &Pool, key: &Key) -> Fill {
    match pool.acquire(key).unwrap() {
        Acquired::Owner(fill) => fill,
        other => panic!("{key:?} should be ours to fill: {other:?}"),
    }
}

fn wait(pool: &Pool, key: &Key) -> Waiter {
    match pool.acquire(key).unwrap() {
        Acquired::Waiter(waiter) => waiter,
        other => panic!("{key:?} should be in somebody's hands: {other:?}"),
    }
}

fn from_environment(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |value| value.parse().unwrap())
}

/// Microseconds of the clock that all processes share.
fn now_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap() * 1_000_000 + u64::try_from(now.tv_nsec).unwrap() / 1000
}
