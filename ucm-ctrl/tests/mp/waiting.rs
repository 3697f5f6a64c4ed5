//! Waiting across processes.
//!
//! **Invariant:** what one process publishes, another hears; while it waits it uses nothing.

use std::time::Instant;

use rustix::process::Signal;
use ucm_ctrl::{Acquired, Control, Geometry, WaitOutcome};

use crate::{
    WATCHDOG, child, from_environment, key, own,
    parent::{Proc, Shared},
    rank, wait,
};

fn cache(slots: u32) -> (Control, Shared) {
    let control = Control::create(&Geometry::single(slots, 0, 1, 4096), [7; 16]).unwrap();
    let shared = Shared::of(&control);
    (control, shared)
}

/// W1: `UCM_MP_PINGS=1000000` for the long run.
#[test]
fn w1_ping_between_two_processes_loses_no_wakeup() {
    let rounds = from_environment("UCM_MP_PINGS", 200_000);
    let (control, shared) = cache(16);
    let (_member, pool) = rank(&control);
    let mut ping = own(&pool, &key(0));
    let mut child = Proc::start("pong", &shared, &[rounds.to_string()]);
    child.expect("ready");
    for round in 0..rounds {
        let next = own(&pool, &key(2 * round + 2));
        drop(ping.publish().unwrap());
        ping = next;
        match pool.acquire(&key(2 * round + 1)).unwrap() {
            Acquired::Hit(_) => {}
            Acquired::Waiter(waiter) => {
                let outcome = waiter.wait(Some(Instant::now() + WATCHDOG));
                assert_eq!(outcome, WaitOutcome::Ready, "round {round}");
            }
            other => panic!("round {round}: {other:?}"),
        }
    }
    child.expect("done");
    assert!(child.end().success());
    drop(ping);
    assert_eq!(control.inspect().problems, Vec::<String>::new());
}

/// Nanoseconds of CPU time of all threads of a process.
fn cpu_ns(child: &Proc) -> u64 {
    let tasks = format!("/proc/{}/task", child.pid().as_raw_nonzero());
    let threads = std::fs::read_dir(tasks).unwrap();
    threads
        .map(|thread| {
            let text = std::fs::read_to_string(thread.unwrap().path().join("schedstat")).unwrap();
            text.split_whitespace().next().unwrap().parse::<u64>().unwrap()
        })
        .sum()
}

#[test]
fn w2_waiters_use_no_cpu() {
    let (control, shared) = cache(4);
    let (_member, pool) = rank(&control);
    let fill = own(&pool, &key(1));
    let mut waiters: Vec<_> = (0..8)
        .map(|i| {
            let how = if i % 2 == 0 { "one" } else { "any" };
            Proc::start("waiter", &shared, &["1".into(), how.into()])
        })
        .collect();
    waiters.iter_mut().for_each(|child| child.expect("waiting"));
    let total = || waiters.iter().map(cpu_ns).sum::<u64>();
    // They have said it, and are now on their way into the kernel.
    let mut before = total();
    loop {
        std::thread::sleep(child::REST / 20);
        let now = total();
        if now == before {
            break;
        }
        before = now;
    }
    std::thread::sleep(child::REST);
    let used = total() - before;
    assert!(used < 20_000_000, "8 sleepers used {used} ns of CPU in {:?}", child::REST);
    drop(fill.publish().unwrap());
    for (i, child) in waiters.iter_mut().enumerate() {
        child.expect(if i % 2 == 0 { "Ready" } else { "Ended(0, Ready)" });
    }
}

/// W6, D4: stopped is not dead.
#[test]
fn w6_a_stopped_owner_is_not_taken_over_and_may_publish_later() {
    let (control, shared) = cache(4);
    let (member, pool) = rank(&control);
    let mut owner = Proc::start("owner", &shared, &["1".into()]);
    owner.hear();
    owner.signal(Signal::STOP);
    let waiter = wait(&pool, &key(1));
    let soon = Instant::now() + std::time::Duration::from_millis(100);
    assert_eq!(waiter.wait(Some(soon)), WaitOutcome::Deadline);
    assert!(Instant::now() >= soon);
    // Nobody takes it over, and others go on with other keys.
    drop(wait(&pool, &key(1)));
    for k in 10..100 {
        drop(own(&pool, &key(k)).publish().unwrap());
    }
    owner.tell("publish");
    owner.signal(Signal::CONT);
    assert_eq!(waiter.wait(Some(Instant::now() + WATCHDOG)), WaitOutcome::Ready);
    owner.expect("published true");
    let pin = waiter.into_pin().unwrap();
    assert!(
        matches!(pool.acquire(&key(1)).unwrap(), Acquired::Hit(hit) if hit.slot() == pin.slot())
    );
    drop((pin, member));
    assert!(owner.end().success());
    assert_eq!(control.inspect().problems, Vec::<String>::new());
}

/// W5: a waiter notices its own deadline, and SIGTERM. (The owner's death: `d3_…`.)
#[test]
fn w5_a_waiter_notices_sigterm_and_its_deadline() {
    let (control, shared) = cache(4);
    let (_member, pool) = rank(&control);
    let fill = own(&pool, &key(1));
    for how in ["one", "any"] {
        let mut waiter = Proc::start("terminated", &shared, &["1".into(), how.into()]);
        waiter.expect("waiting");
        waiter.signal(Signal::TERM);
        waiter.expect("Interrupted");
        assert!(waiter.end().success());
    }
    let (_member, other) = rank(&control);
    let waiter = wait(&other, &key(1));
    let soon = Instant::now() + std::time::Duration::from_millis(20);
    assert_eq!(waiter.wait(Some(soon)), WaitOutcome::Deadline);
    assert!(Instant::now() >= soon);
    drop((waiter, fill));
    let seen = control.inspect();
    assert_eq!((seen.problems.len(), seen.pools[0].pinned), (0, 0));
}

#[test]
fn a08_a_failure_reaches_all_processes() {
    let (_control, shared) = cache(4);
    let mut owner = Proc::start("owner", &shared, &["1".into()]);
    owner.hear();
    let mut waiters: Vec<_> = ["one", "any", "one"]
        .map(|how| Proc::start("waiter", &shared, &["1".into(), how.into()]))
        .into();
    waiters.iter_mut().for_each(|child| child.expect("waiting"));
    owner.tell("fail");
    waiters[0].expect("Failed(Io)");
    waiters[1].expect("Ended(0, Failed(Io))");
    waiters[2].expect("Failed(Io)");
}
