//! Members that are stopped, or dead, between a change and the telling of it. Nobody else waits for them.
//!
//! Mutants seen to fail here: a bump that leaves no trace of the wake-up that is due; a relief that tells only
//! what it has changed itself; an expulsion that skips what is in quarantine already; a reap that takes room
//! first; a reminder that is stored outside the lock; a full flag that no search doubts.
//!
//! **Invariant:** half-done states are made with the crate's own steps; who waits here has a watchdog.

use std::{
    mem::ManuallyDrop,
    sync::mpsc::{Receiver, channel},
    thread,
    time::Duration,
};

use super::kit::*;
use crate::{
    Control, FailKind, Fill, GroupVote, Member, MemberState, Phase, PoolId, WaitOutcome, Waiter,
    bucket::Patience,
    event::{EventWord, SLEEPERS},
    failpoint::visit,
    layout::Slot,
    member::MemberWord,
    sync::Ordering,
};

const SOON: Duration = Duration::from_secs(60);

fn slot_of<'a>(control: &'a Control, fill: &Fill) -> &'a Slot {
    &tables(control).slots[fill.slot().0 as usize]
}

/// Says of a seat that another member clears it up.
fn set_word(control: &Control, member: &Member, state: MemberState, reaper: u8) {
    let record = control.region.member(member.id().0).unwrap();
    record.word.store(MemberWord::with(state, reaper, member.generation()).0, Ordering::SeqCst);
}

/// Waits in a thread of its own until the word has a sleeper.
fn asleep(waiter: Waiter, word: &EventWord) -> Receiver<WaitOutcome> {
    let (send, heard) = channel();
    thread::spawn(move || send.send(waiter.wait(None)));
    until_asleep(word);
    heard
}

/// Another member writes over a bell: nobody seems to sleep, and no wake-up seems to be due.
fn scribble(word: &EventWord) {
    word.overwrite(0);
}

/// A process wakes its own threads whatever others have written over the bells they sleep on. Mutants: a doorbell,
/// an interrupt or an attendant that believes the flags.
#[test]
fn d11_a_process_hears_itself_whatever_stands_in_the_region() {
    let control = cache(2);
    let (member, other) = (rank(&control), rank(&control));
    let record = control.region.member(member.id().0).unwrap();

    let bell = member.doorbell();
    let (ticket, sleeper) = (bell.ticket(), bell.clone());
    let (send, heard) = channel();
    let thread = thread::spawn(move || {
        sleeper.wait(ticket, None);
        send.send(())
    });
    until_asleep(&record.doorbell.0);
    scribble(&record.doorbell.0);
    bell.ring();
    assert_eq!(heard.recv_timeout(SOON), Ok(()));
    thread.join().unwrap().unwrap();

    let fill = own(&other.pool(PoolId(0)).unwrap(), &key(1));
    let slot = slot_of(&control, &fill);
    let heard = asleep(wait(&member.pool(PoolId(0)).unwrap(), &key(1)), &slot.version);
    scribble(&slot.version);
    member.interrupt();
    assert_eq!(heard.recv_timeout(SOON), Ok(WaitOutcome::Interrupted));
    member.end_interrupt();

    let roster = vec![member.stay(), other.stay()];
    let vote = GroupVote { group: [1; 16], lasting: false, roster, ready: true };
    let (send, told) = channel();
    member.vote(vote, Box::new(move |commit| send.send(commit).unwrap())).unwrap();
    until_asleep(&record.group_bell.0);
    scribble(&record.group_bell.0);
    let (send, left) = channel();
    drop(bell);
    thread::spawn(move || {
        drop(member);
        send.send(())
    });
    assert_eq!(left.recv_timeout(SOON), Ok(()));
    assert_eq!(told.recv_timeout(SOON), Ok(false));
}

/// Somebody who rings is stopped before it wakes. Mutant: `bump` without `WAKING`.
#[test]
fn w6_a_bell_whose_ringer_is_stopped_is_heard_when_others_ring() {
    let control = cache(2);
    let member = rank(&control);
    let bell = member.doorbell();
    let word = &member.inner.record().unwrap().doorbell.0;
    for _ in 0..2 {
        let (ticket, sleeper) = (bell.ticket(), bell.clone());
        let (send, heard) = channel();
        thread::spawn(move || {
            sleeper.wait(ticket, None);
            send.send(())
        });
        until_asleep(word);
        let _ = word.bump();
        // As another process does: this one knows that it sleeps.
        word.ring();
        assert_eq!(heard.recv_timeout(SOON), Ok(()));
    }
    // The flag goes with the wake-up: who rings next wakes nobody in vain.
    assert_eq!(word.arm(0), word.count());
}

#[test]
fn w5_w6_an_interrupt_reaches_a_waiter_whose_owner_is_stopped_while_it_tells() {
    let control = cache(2);
    let (member, owner) = (rank(&control), pool(&control));
    let fill = ManuallyDrop::new(own(&owner, &key(1)));
    let slot = slot_of(&control, &fill);
    let heard = asleep(wait(&member.pool(PoolId(0)).unwrap(), &key(1)), &slot.version);
    let word = slot.load();
    assert!(slot.change(word, word.to(Phase::Ready, None)));
    let _ = slot.version.bump();
    member.interrupt();
    assert_eq!(heard.recv_timeout(SOON), Ok(WaitOutcome::Ready));
}

/// The member's thread of votes sleeps on a bell whose ringer is stopped; the member can leave all the same.
#[test]
fn w6_a_member_leaves_while_the_ringer_of_its_group_bell_is_stopped() {
    let control = cache(2);
    let [first, second] = [rank(&control), rank(&control)];
    let roster = vec![first.stay(), second.stay()];
    let vote = GroupVote { group: [1; 16], lasting: false, roster, ready: true };
    let (send, told) = channel();
    first.vote(vote, Box::new(move |commit| send.send(commit).unwrap())).unwrap();
    let word = &control.region.member(first.id().0).unwrap().group_bell.0;
    until_asleep(word);
    let _ = word.bump();
    let (send, left) = channel();
    thread::spawn(move || {
        drop(first);
        send.send(())
    });
    assert_eq!(left.recv_timeout(SOON), Ok(()));
    assert_eq!(told.recv_timeout(SOON), Ok(false));
}

/// A reaper is stopped, and it or the dead one had changed a word and not told it.
#[test]
fn w6_what_a_stopped_reaper_has_not_told_is_told_by_the_next() {
    for ready in [false, true] {
        let control = cache(2);
        let survivor = rank(&control);
        let stopped = ManuallyDrop::new(rank(&control));
        let dead = ManuallyDrop::new(rank(&control));
        let theirs = ManuallyDrop::new(dead.pool(PoolId(0)).unwrap());
        let fill = ManuallyDrop::new(own(&theirs, &key(1)));
        let slot = slot_of(&control, &fill);
        let heard = asleep(wait(&survivor.pool(PoolId(0)).unwrap(), &key(1)), &slot.version);
        let word = slot.load();
        let next = match ready {
            true => word.to(Phase::Ready, None),
            false => word.failed_as(FailKind::OwnerDied).to(Phase::Failed, None),
        };
        assert!(slot.change(word, next));
        set_word(&control, &dead, MemberState::Reaping, stopped.id().0);
        assert!(!survivor.reap(dead.id(), Some(dead.generation())).done);
        let expected = if ready { WaitOutcome::Ready } else { WaitOutcome::OwnerDied };
        assert_eq!(heard.recv_timeout(SOON), Ok(expected));
    }
}

/// An operator dies between putting a fill into quarantine and telling so (`expel.slot.after`).
#[test]
fn d1_w6_what_a_dead_operator_has_not_told_is_told_by_its_reaper_or_the_next_operator() {
    for again in [false, true] {
        let control = cache(2);
        let survivor = rank(&control);
        let operator = ManuallyDrop::new(rank(&control));
        let gone = rank(&control);
        let fill = own(&gone.pool(PoolId(0)).unwrap(), &key(1));
        let slot = slot_of(&control, &fill);
        let heard = asleep(wait(&survivor.pool(PoolId(0)).unwrap(), &key(1)), &slot.version);
        set_word(&control, &gone, MemberState::Expelled, 0);
        let word = slot.load();
        let draining = word.failed_as(FailKind::OwnerDied).to(Phase::Draining, Some(gone.id().0));
        assert!(slot.change(word, draining));
        if again {
            assert!(survivor.expel(gone.id(), gone.generation()).done);
        } else {
            assert!(survivor.reap(operator.id(), None).done);
        }
        assert_eq!(heard.recv_timeout(SOON), Ok(WaitOutcome::OwnerDied));
        // The key is absent: the next to want it loads it into the other slot.
        load(&survivor.pool(PoolId(0)).unwrap(), &key(1));
        drop(fill);
    }
}

/// A reminder is about to end when the next one is due, over and over.
#[test]
fn w6_a_reminder_that_ends_does_not_take_the_next_with_it() {
    let control = narrow(geometry(4, 0, 1), 0);
    let (one, two, resting) = (pool(&control), pool(&control), rank(&control));
    let pool = resting.pool(PoolId(0)).unwrap();
    for n in 0..30 {
        let fills = [2 * n, 2 * n + 1].map(|n| own(&pool, &key(n)));
        let slots = fills.each_ref().map(|fill| fill.slot().0);
        let hashed = pool.raw(&key(0)).hashed;
        let lock = |by| tables(&control).lock(by, hashed, Patience::Enough);
        let give_up = |fill: Fill| {
            let token = fill.start_io();
            fill.abandon_draining(FailKind::Io);
            drop(token);
        };
        let [first, second] = fills;
        let held = lock(&one.member);
        give_up(first);
        thread::scope(|scope| {
            scope.spawn(|| drop(held));
            let held = lock(&two.member);
            give_up(second);
            drop(held);
        });
        let free = |slot: &u32| phase(&control, *slot) == Phase::Free;
        eventually("the leftovers", || slots.iter().all(free) && !resting.inner.has_leftovers());
    }
}

/// Whoever unpinned last is stopped before it says that there is room.
#[test]
fn w6_c6_room_that_nobody_has_told_of_is_found() {
    for slots in [1, 5] {
        let control = cache(slots);
        let [a, b] = [rank(&control), rank(&control)];
        let (theirs, ours) = (a.pool(PoolId(0)).unwrap(), b.pool(PoolId(0)).unwrap());
        let pins: Vec<_> = (0..u64::from(slots))
            .map(|n| ManuallyDrop::new(own(&theirs, &key(n)).publish().unwrap()))
            .collect();
        assert!(is_full(&ours, &key(99)));
        let last = pins.last().unwrap().slot().0;
        assert!(a.inner.unpin(0, last, &tables(&control).slots[last as usize].pins));
        let tries = (0..=slots).take_while(|_| is_full(&ours, &key(99))).count();
        assert!(tries <= slots as usize, "one slot of {slots} is not pinned");
    }
}

/// Quarantined slots of the dead in the bucket of a lock holder that is stopped, and a fill behind them.
/// Mutant: waiters are told when all slots have been cleared.
#[test]
fn d1_w6_waiters_of_the_dead_do_not_wait_for_its_leftovers() {
    let control = narrow(geometry(8, 0, 1), 0);
    let survivor = rank(&control);
    let stopped = pool(&control);
    let dead = ManuallyDrop::new(rank(&control));
    let theirs = ManuallyDrop::new(dead.pool(PoolId(0)).unwrap());
    for n in 0..5 {
        let fill = own(&theirs, &key(n));
        let _token = ManuallyDrop::new(fill.start_io());
        fill.abandon_draining(FailKind::Io);
    }
    let fill = ManuallyDrop::new(own(&theirs, &key(9)));
    let slot = slot_of(&control, &fill);
    let heard = asleep(wait(&survivor.pool(PoolId(0)).unwrap(), &key(9)), &slot.version);
    let hashed = theirs.raw(&key(1)).hashed;
    let held = tables(&control).lock(&stopped.member, hashed, Patience::Brief);
    let (send, visited) = channel();
    // The reaper is about to give back the first one, and to wait for its bucket's lock.
    visit::at("reap.take.after", move || {
        assert_eq!(heard.recv_timeout(SOON), Ok(WaitOutcome::OwnerDied), "told last");
        send.send(()).unwrap();
    });
    survivor.reap(dead.id(), None);
    visited.try_recv().expect("nothing was given back");
    drop(held);
}

/// A flag that a ringer has left behind keeps nobody from sleeping. Mutant: the ticket is compared with it.
#[test]
fn w2_w6_a_wake_up_that_is_still_due_keeps_nobody_awake() {
    let control = cache(2);
    let member = rank(&control);
    let bell = member.doorbell();
    let word = &member.inner.record().unwrap().doorbell.0;
    word.arm(SLEEPERS);
    let _ = word.bump();
    let (send, heard) = channel();
    let (ticket, sleeper) = (bell.ticket(), bell.clone());
    thread::spawn(move || {
        sleeper.wait(ticket, None);
        send.send(())
    });
    until_asleep(word);
    assert!(heard.try_recv().is_err(), "nobody has rung since");
    bell.ring();
    assert_eq!(heard.recv_timeout(SOON), Ok(()));
}
