//! Waiting for somebody else's fill: every end is heard, nothing is heard twice or wrongly.
//!
//! **Invariant:** no test sleeps to give another thread time; deadlines of a minute are watchdogs.

use std::{
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use super::kit::*;
use crate::{
    Acquired, ErrorKind, FailKind, FillState, Member, Pool, PoolId, WaitAny, WaitOutcome, Waiter,
    event::SLEEPERS, sync::Ordering,
};

/// Two members of one cache.
fn pair(slots: u32) -> (crate::Control, Pool, Member, Pool) {
    let control = cache(slots);
    let owner = pool(&control);
    let member = rank(&control);
    let pool = member.pool(PoolId(0)).unwrap();
    (control, owner, member, pool)
}

#[test]
fn w1_every_fill_wakes_its_waiter() {
    let (control, owner, _, pool) = pair(2);
    let rounds: u64 = 20_000;
    let at = crate::sync::AtomicU64::new(0);
    let barrier = Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..rounds {
                let fill = own(&owner, &key(round));
                at.store(round + 1, Ordering::SeqCst);
                barrier.wait();
                // From "at once" to "surely asleep in the kernel".
                for _ in 0..(round * 37) % 6000 {
                    std::hint::spin_loop();
                }
                match round % 3 {
                    0 => fill.fail(FailKind::Io),
                    1 => fill.abandon_draining(FailKind::Cancelled),
                    _ => drop(fill.publish().unwrap()),
                }
                barrier.wait();
            }
        });
        for round in 0..rounds {
            barrier.wait();
            assert_eq!(at.load(Ordering::SeqCst), round + 1);
            let outcome = match pool.acquire(&key(round)).unwrap() {
                Acquired::Waiter(waiter) => waiter.wait(Some(watchdog())),
                // The owner was faster.
                Acquired::Hit(_) => WaitOutcome::Ready,
                Acquired::Owner(fill) => {
                    drop(fill);
                    WaitOutcome::Failed(if round % 3 == 0 {
                        FailKind::Io
                    } else {
                        FailKind::Cancelled
                    })
                }
                Acquired::Full => panic!("round {round}: two slots for one key"),
            };
            let expected = match round % 3 {
                0 => WaitOutcome::Failed(FailKind::Io),
                1 => WaitOutcome::Failed(FailKind::Cancelled),
                _ => WaitOutcome::Ready,
            };
            assert_eq!(outcome, expected, "round {round}");
            barrier.wait();
        }
    });
    assert_at_rest(&control);
}

#[test]
fn w4_wait_any_returns_the_one_that_ended() {
    let (control, owner, member, pool) = pair(256);
    for count in [1_usize, 2, 3, 64, 127, 128, 129, 200] {
        let keys: Vec<_> = (0..count as u64).map(|k| key(1000 * count as u64 + k)).collect();
        let mut fills: Vec<_> = keys.iter().map(|key| Some(own(&owner, key))).collect();
        let waiters: Vec<_> = keys.iter().map(|key| wait(&pool, key)).collect();
        let refs: Vec<&Waiter> = waiters.iter().collect();
        for pick in [count - 1, count / 2, 0] {
            let Some(fill) = fills[pick].take() else { continue };
            let open: Vec<_> =
                refs.iter().copied().filter(|w| w.state() == FillState::Filling).collect();
            let slot = fill.slot();
            thread::scope(|scope| {
                let waiting = scope.spawn(|| member.wait_any(&open, Some(watchdog())).unwrap());
                // Ending after the sleep has begun, and ending at any moment.
                if pick % 2 == 0 {
                    until_asleep(&member);
                }
                drop(fill.publish().unwrap());
                let WaitAny::Ended(at, state) = waiting.join().unwrap() else {
                    panic!("{count} waiters: {pick} has ended, nobody heard it")
                };
                assert_eq!((open[at].slot(), state), (slot, FillState::Ready));
            });
        }
        drop(fills);
        // What has ended already is reported without sleeping.
        assert!(matches!(member.wait_any(&refs, None).unwrap(), WaitAny::Ended(0, _)));
    }
    assert_at_rest(&control);
}

fn until_asleep(member: &Member) {
    let record = member.inner.record().unwrap();
    eventually("a sleeper", || record.doorbell.0.arm(0) & SLEEPERS != 0);
}

#[test]
fn w4_two_threads_of_a_member_wait_for_different_fills() {
    let (control, owner, member, pool) = pair(8);
    let fills = [1, 2].map(|k| own(&owner, &key(k)));
    let waiters = [1, 2].map(|k| wait(&pool, &key(k)));
    thread::scope(|scope| {
        let threads = waiters
            .each_ref()
            .map(|waiter| scope.spawn(|| member.wait_any(&[waiter], Some(watchdog())).unwrap()));
        let [first, second] = fills;
        second.fail(FailKind::Missing);
        drop(first.publish().unwrap());
        let [a, b] = threads.map(|t| t.join().unwrap());
        assert_eq!(a, WaitAny::Ended(0, FillState::Ready));
        assert_eq!(b, WaitAny::Ended(0, FillState::Failed(FailKind::Missing)));
    });
    drop(waiters);
    assert_at_rest(&control);
}

#[test]
fn w4_bad_waiters_are_refused() {
    let (_control, owner, member, _pool) = pair(8);
    let fill = own(&owner, &key(1));
    let foreign = wait(&owner, &key(1));
    assert_eq!(member.wait_any(&[], None).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(member.wait_any(&[&foreign], None).unwrap_err().kind(), ErrorKind::Invalid);
    drop(fill);
}

#[test]
fn w5_deadlines_end_waits() {
    let (_control, owner, member, pool) = pair(2);
    let fill = own(&owner, &key(1));
    let waiter = wait(&pool, &key(1));
    assert_eq!(waiter.wait(Some(Instant::now())), WaitOutcome::Deadline);
    assert_eq!(member.wait_any(&[&waiter], Some(Instant::now())).unwrap(), WaitAny::Deadline);
    let soon = Instant::now() + Duration::from_millis(5);
    assert_eq!(waiter.wait(Some(soon)), WaitOutcome::Deadline);
    assert!(Instant::now() >= soon);
    let soon = Instant::now() + Duration::from_millis(5);
    assert_eq!(member.wait_any(&[&waiter], Some(soon)).unwrap(), WaitAny::Deadline);
    assert!(Instant::now() >= soon);
    // The deadline released the waiter, not the fill.
    drop(fill.publish().unwrap());
    assert_eq!(waiter.wait(Some(soon)), WaitOutcome::Ready);
}

#[test]
fn a08_all_waiters_hear_the_same_failure_and_one_takes_over() {
    let control = cache(2);
    let owner = pool(&control);
    let others: Vec<_> = (0..7).map(|_| pool(&control)).collect();
    for round in 0..200 {
        let fill = own(&owner, &key(round));
        let waiters: Vec<_> = others.iter().map(|pool| wait(pool, &key(round))).collect();
        let barrier = Barrier::new(others.len());
        let owners: usize = thread::scope(|scope| {
            let threads: Vec<_> = waiters
                .into_iter()
                .zip(&others)
                .map(|(waiter, pool)| {
                    let barrier = &barrier;
                    scope.spawn(move || {
                        let outcome = waiter.wait(Some(watchdog()));
                        assert_eq!(outcome, WaitOutcome::Failed(FailKind::Corrupt));
                        drop(waiter);
                        barrier.wait();
                        match pool.acquire(&key(round)).unwrap() {
                            Acquired::Owner(fill) => {
                                barrier.wait();
                                drop(fill.publish().unwrap());
                                1
                            }
                            Acquired::Waiter(waiter) => {
                                barrier.wait();
                                assert_eq!(waiter.wait(Some(watchdog())), WaitOutcome::Ready);
                                0
                            }
                            other => panic!("{other:?}"),
                        }
                    })
                })
                .collect();
            fill.fail(FailKind::Corrupt);
            threads.into_iter().map(|t| t.join().unwrap()).sum()
        });
        assert_eq!(owners, 1, "round {round}");
    }
    assert_eq!(control.statistics().takeovers, 200);
    assert_at_rest(&control);
}

#[test]
fn a_late_waiter_hears_the_last_failure_or_the_bytes() {
    let (control, owner, _, pool) = pair(1);
    let fill = own(&owner, &key(1));
    let late = wait(&pool, &key(1));
    fill.fail(FailKind::Io);
    assert_eq!(late.state(), FillState::Failed(FailKind::Io));
    // Somebody takes over: for the late one its own fill has failed.
    let second = own(&owner, &key(1));
    assert_eq!(late.state(), FillState::Failed(FailKind::Io));
    let early = wait(&pool, &key(1));
    assert_eq!(early.state(), FillState::Filling);
    let late = late.into_pin().unwrap_err();
    second.fail(FailKind::Corrupt);
    assert_eq!(late.state(), FillState::Failed(FailKind::Corrupt));
    let pin = own(&owner, &key(1)).publish().unwrap();
    assert_eq!((late.state(), early.state()), (FillState::Ready, FillState::Ready));
    let late = late.into_pin().unwrap();
    assert_eq!(late.generation(), pin.generation());
    drop((pin, early));
    assert!(is_full(&owner, &key(2)), "the late pin holds the slot");
    drop(late);
    assert_at_rest(&control);
}

/// A failure of an earlier key in the slot is not a failure of the next one.
#[test]
fn failure_kinds_do_not_outlive_their_key() {
    let (control, owner, _, pool) = pair(1);
    own(&owner, &key(1)).fail(FailKind::Corrupt);
    let fill = own(&owner, &key(2));
    assert_eq!(tables(&control).slots[0].load(), tables(&control).slots[0].load().fresh());
    let waiter = wait(&pool, &key(2));
    drop(fill);
    assert_eq!(waiter.wait(None), WaitOutcome::Failed(FailKind::Abandoned));
}

/// Regression: a waiter that looked while an evictor tried the slot span until it was through,
/// for ever if the evictor had died there.
#[test]
fn a_claim_in_progress_hides_no_end_from_a_waiter() {
    for (end, expected) in [
        (None, FillState::Ready),
        (Some(FailKind::Io), FillState::Failed(FailKind::Io)),
        (Some(FailKind::OwnerDied), FillState::OwnerDied),
    ] {
        let (control, owner, _, pool) = pair(1);
        let fill = own(&owner, &key(1));
        let waiter = wait(&pool, &key(1));
        match end {
            None => drop(fill.publish().unwrap()),
            Some(kind) => fill.fail(kind),
        }
        let slot = &tables(&control).slots[0];
        let word = slot.load();
        let claimed = word.claimed(owner.member.index);
        assert!(slot.change(word, claimed));
        assert_eq!(waiter.state(), expected);
        if end.is_none() {
            assert_eq!(waiter.into_pin().unwrap().generation(), word.generation());
        }
        assert!(slot.change(claimed, word));
    }
}

/// D4: an evictor that was stopped in mid-claim holds up nobody for long.
#[test]
fn d4_acquire_goes_around_a_claim_that_does_not_end() {
    let (control, owner, _, pool) = pair(1);
    load(&owner, &key(1));
    let slot = &tables(&control).slots[0];
    let word = slot.load();
    let claimed = word.claimed(owner.member.index);
    assert!(slot.change(word, claimed));
    assert!(is_full(&pool, &key(1)));
    assert!(pool.acquire_resident(&key(1)).unwrap().is_none());
    assert_eq!(pool.remove(&key(1)).unwrap(), crate::Removal::InUse);
    assert!(slot.change(claimed, word));
    drop(hit(&pool, &key(1)));
}

#[test]
fn a_doorbell_rung_before_the_wait_is_heard() {
    let (_control, _, member, _) = pair(1);
    let bell = member.doorbell();
    let ticket = bell.ticket();
    bell.ring();
    bell.wait(ticket, None);
    let ticket = bell.ticket();
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            while bell.ticket() == ticket {
                bell.wait(ticket, Some(watchdog()));
            }
        });
        until_asleep(&member);
        bell.ring();
        thread.join().unwrap();
    });
}

/// W5: a waiting process notices SIGTERM.
#[test]
fn w5_an_interrupt_ends_all_waits_until_it_is_ended() {
    let control = cache(2);
    let owner = pool(&control);
    let fills = [1, 2].map(|k| own(&owner, &key(k)));
    let member = rank(&control);
    let view = member.pool(PoolId(0)).unwrap();
    let waiters = [1, 2].map(|k| wait(&view, &key(k)));
    let other = rank(&control);
    let bystander = wait(&other.pool(PoolId(0)).unwrap(), &key(1));
    let watchdog = Some(Instant::now() + Duration::from_secs(60));
    thread::scope(|scope| {
        let one = scope.spawn(|| waiters[0].wait(watchdog));
        let any = scope.spawn(|| member.wait_any(&[&waiters[0], &waiters[1]], watchdog).unwrap());
        let stays = scope.spawn(|| other.wait_any(&[&bystander], watchdog).unwrap());
        let slot = &tables(&control).slots[fills[0].slot().0 as usize];
        let bells = [&member, &other].map(|m| &m.inner.record().unwrap().doorbell.0);
        eventually("all sleep", || {
            slot.version.arm(0) & 3 == 3 && bells.iter().all(|bell| bell.arm(0) & 1 == 1)
        });
        member.interrupt();
        assert_eq!(one.join().unwrap(), WaitOutcome::Interrupted);
        assert_eq!(any.join().unwrap(), WaitAny::Interrupted);
        assert!(!stays.is_finished(), "nobody else is interrupted");
        assert_eq!(waiters[1].wait(None), WaitOutcome::Interrupted, "waits that begin later, too");
        member.end_interrupt();
        for fill in fills {
            drop(fill.publish().unwrap());
        }
        assert_eq!(waiters[0].wait(watchdog), WaitOutcome::Ready);
        assert_eq!(stays.join().unwrap(), WaitAny::Ended(0, FillState::Ready));
    });
}
