//! Nobody sleeps through the end of a fill.
//!
//! **Invariant:** all waits here are without a deadline.

use loom::thread;

use super::*;
use crate::{
    FailKind, FillState, WaitAny, WaitOutcome,
    event::{EventWord, SLEEPERS},
    sync::{Arc, AtomicU32, Ordering},
};

#[test]
fn loom_w1_wait_hears_publish() {
    explore(|| {
        let control = cache(1);
        let fill = own(&pool(&control), &key(1));
        let waiter = wait(&pool(&control), &key(1));
        let owner = thread::spawn(move || drop(fill.publish().unwrap()));
        assert_eq!(waiter.wait(None), WaitOutcome::Ready);
        owner.join().unwrap();
    });
}

#[test]
fn loom_w1_two_waiters_hear_a_failure() {
    explore(|| {
        let control = cache(1);
        let fill = own(&pool(&control), &key(1));
        let other = pool(&control);
        let waiters = [wait(&other, &key(1)), wait(&other, &key(1))];
        let [first, second] = waiters;
        let sleeper = thread::spawn(move || first.wait(None));
        let owner = thread::spawn(move || fill.fail(FailKind::Io));
        assert_eq!(second.wait(None), WaitOutcome::Failed(FailKind::Io));
        assert_eq!(sleeper.join().unwrap(), WaitOutcome::Failed(FailKind::Io));
        owner.join().unwrap();
    });
}

#[test]
fn loom_w4_wait_any_hears_one_of_two() {
    explore(|| {
        let control = cache(2);
        let owner = pool(&control);
        let [first, second] = [own(&owner, &key(1)), own(&owner, &key(2))];
        let member = join(&control);
        let view = member.pool(PoolId(0)).unwrap();
        let waiters = [wait(&view, &key(1)), wait(&view, &key(2))];
        let thread = thread::spawn(move || drop(second.publish().unwrap()));
        let ended = member.wait_any(&[&waiters[0], &waiters[1]], None).unwrap();
        assert_eq!(ended, WaitAny::Ended(1, FillState::Ready));
        thread.join().unwrap();
        drop(first);
    });
}

#[test]
fn loom_w4_the_doorbell_is_heard_with_the_fill() {
    explore(|| {
        let control = cache(1);
        let fill = own(&pool(&control), &key(1));
        let member = join(&control);
        let waiter = wait(&member.pool(PoolId(0)).unwrap(), &key(1));
        let bell = member.doorbell();
        let thread = thread::spawn(move || {
            bell.ring();
            fill.abandon_draining(FailKind::Deadline);
        });
        let ended = member.wait_any(&[&waiter], None).unwrap();
        assert_eq!(ended, WaitAny::Ended(0, FillState::Failed(FailKind::Deadline)));
        thread.join().unwrap();
    });
}

/// One who rings is stopped, or dies, before it wakes anybody. Mutant: it leaves no trace.
#[test]
fn loom_w6_the_next_ringer_wakes_for_one_that_was_stopped() {
    explore(|| {
        let bell = Arc::new(EventWord::default());
        let happened = Arc::new(AtomicU32::new(0));
        let (theirs, condition) = (bell.clone(), happened.clone());
        let sleeper = thread::spawn(move || {
            loop {
                let seen = theirs.arm(SLEEPERS);
                if condition.load(Ordering::SeqCst) != 0 {
                    return;
                }
                theirs.sleep(seen, None);
            }
        });
        let stopped = bell.clone();
        let stopped = thread::spawn(move || {
            let _ = stopped.bump();
        });
        happened.store(1, Ordering::SeqCst);
        bell.ring();
        sleeper.join().unwrap();
        stopped.join().unwrap();
    });
}
