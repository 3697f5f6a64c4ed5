//! What children do, by role.
//!
//! **Invariant:** a child says each line with `say`, and ends when its input is closed.

use std::{
    io::{BufRead, Write},
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use rustix::process::Pid;
use ucm_ctrl::{Acquired, Control, FailKind, MemberId, WaitOutcome};

use crate::{WATCHDOG, attach, fork, key, now_us, own, parent, rank, storm, wait};

pub(crate) fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "@ {text}").unwrap();
    out.flush().unwrap();
}

/// The next command; `None` when the parent wants an end.
pub(crate) fn hear() -> Option<String> {
    let mut line = String::new();
    let read = std::io::stdin().lock().read_line(&mut line).unwrap();
    (read > 0).then(|| line.trim_end().to_owned())
}

#[test]
#[ignore = "the entry point of child processes"]
fn entry() {
    let Ok(role) = std::env::var("UCM_MP_ROLE") else { return };
    let control = attach(&std::env::var("UCM_MP_REGION").unwrap());
    let arguments = std::env::var("UCM_MP_ARGUMENTS").unwrap();
    let arguments: Vec<&str> = arguments.split_whitespace().collect();
    let number = |i: usize| arguments[i].parse::<u64>().unwrap();
    match role.as_str() {
        "pong" => pong(&control, number(0)),
        "waiter" => waiter(&control, number(0), arguments[1] == "any"),
        "terminated" => terminated(&control, number(0), arguments[1] == "any"),
        "owner" => owner(&control, number(0)),
        "survivor" => survivor(&control, number(0), number(1)),
        "member" => member(&control),
        "scheduler" => scheduler(&control),
        "forker" => fork::forker(&control),
        #[cfg(feature = "failpoints")]
        "busy" => crate::crash::work::child(&control, arguments[0], number(1)),
        "storm" => storm::child(&control, arguments[0], number(1)),
        other => panic!("no such role: {other}"),
    }
}

/// Answers each even key with the odd one after it.
fn pong(control: &Control, rounds: u64) {
    let (_member, pool) = rank(control);
    let mut answer = own(&pool, &key(1));
    say("ready");
    for round in 0..rounds {
        match pool.acquire(&key(2 * round)).unwrap() {
            Acquired::Hit(_) => {}
            Acquired::Waiter(waiter) => {
                let outcome = waiter.wait(Some(Instant::now() + WATCHDOG));
                assert_eq!(outcome, WaitOutcome::Ready, "round {round}");
            }
            other => panic!("round {round}: {other:?}"),
        }
        let next = own(&pool, &key(2 * round + 3));
        drop(answer.publish().unwrap());
        answer = next;
    }
    drop(answer);
    say("done");
}

fn waiter(control: &Control, block: u64, any: bool) {
    let (member, pool) = rank(control);
    let waiter = wait(&pool, &key(block));
    say("waiting");
    let watchdog = Some(Instant::now() + WATCHDOG);
    if any {
        say(&format!("{:?}", member.wait_any(&[&waiter], watchdog).unwrap()));
    } else {
        say(&format!("{:?}", waiter.wait(watchdog)));
    }
    hear();
}

static INTERRUPTED: OnceLock<ucm_ctrl::Member> = OnceLock::new();

extern "C" fn on_sigterm(_: libc::c_int) {
    if let Some(member) = INTERRUPTED.get() {
        member.interrupt();
    }
}

/// Waits until SIGTERM, then leaves in good order.
fn terminated(control: &Control, block: u64, any: bool) {
    let (member, pool) = rank(control);
    INTERRUPTED.set(member.clone()).unwrap();
    let handler: extern "C" fn(libc::c_int) = on_sigterm;
    // SAFETY: the handler is async-signal-safe: an atomic load and `Member::interrupt`.
    unsafe { libc::signal(libc::SIGTERM, handler as libc::sighandler_t) };
    let waiter = wait(&pool, &key(block));
    say("waiting");
    let watchdog = Some(Instant::now() + WATCHDOG);
    if any {
        say(&format!("{:?}", member.wait_any(&[&waiter], watchdog).unwrap()));
    } else {
        say(&format!("{:?}", waiter.wait(watchdog)));
    }
}

/// Fills a key, and ends the fill as told.
fn owner(control: &Control, block: u64) {
    let (member, pool) = rank(control);
    let mut fill = Some(own(&pool, &key(block)));
    say(&format!("{}", member.id().0));
    while let (Some(command), Some(fill)) = (hear(), fill.take()) {
        match command.as_str() {
            "publish" => say(&format!("published {}", fill.publish().is_ok())),
            "fail" => {
                fill.fail(FailKind::Io);
                say("failed");
            }
            other => panic!("{other}"),
        }
    }
}

/// Waits for the fill of a process, with proof of that process's life, as all members do.
fn survivor(control: &Control, block: u64, pid: u64) {
    let (member, pool) = rank(control);
    let proof = parent::pidfd(Pid::from_raw(i32::try_from(pid).unwrap()).unwrap());
    let seat = control
        .inspect()
        .members
        .iter()
        .find(|m| u64::from(m.pid) == pid)
        .map(|m| (MemberId(m.index), m.generation))
        .unwrap();
    let waiter = wait(&pool, &key(block));
    let steward = {
        let member = member.clone();
        thread::spawn(move || {
            parent::until_dead(&proof);
            member.reap(seat.0, Some(seat.1)).done
        })
    };
    say("waiting");
    let outcome = waiter.wait(Some(Instant::now() + WATCHDOG));
    let at = now_us();
    drop(waiter);
    let acquired = pool.acquire(&key(block)).unwrap();
    let got = match &acquired {
        Acquired::Owner(_) => "owner",
        Acquired::Waiter(_) => "waiter",
        other => panic!("{other:?}"),
    };
    say(&format!("{outcome:?} {at} {got} {}", steward.join().unwrap()));
    if let (Some(_), Acquired::Owner(fill)) = (hear(), acquired) {
        drop(fill.publish().unwrap());
        say("published");
        hear();
    }
}

/// Joins, and leaves when told.
fn member(control: &Control) {
    let (member, _pool) = rank(control);
    say(&format!("{} {}", member.id().0, member.generation()));
    hear();
}

/// S1: joins as a scheduler and looks things up; says by how much its own memory has grown.
fn scheduler(control: &Control) {
    let before = anonymous_bytes();
    let scheduler = control.join(ucm_ctrl::MemberSpec::scheduler()).unwrap();
    let pool = scheduler.pool(ucm_ctrl::PoolId(0)).unwrap();
    let keys: Vec<_> = (0..1000).map(key).collect();
    let ready = pool.prefix_lookup(&keys).unwrap();
    say(&format!("{ready} {}", anonymous_bytes().saturating_sub(before)));
    hear();
}

fn anonymous_bytes() -> u64 {
    let smaps = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = smaps.lines().find(|line| line.starts_with("Anonymous:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// Long enough for a process to fall asleep, for a test that measures a period of rest.
pub(crate) const REST: Duration = Duration::from_secs(2);
