//! Clearing up after dead members, from each state they can leave.
//!
//! The dead here are member handles that are never dropped and never used again. Half-done states
//! are made with the crate's own steps.
//! **Invariant:** afterwards the consistency walk finds nothing, and a second reap does nothing.

use std::{mem::ManuallyDrop, thread};

use super::kit::*;
use crate::{
    Acquired, Control, FailKind, FillState, Key, Liveness, Member, MemberId, MemberState, Phase,
    Pool, PoolId, Reaped, WaitAny, WaitOutcome,
    bucket::Patience,
    event::SLEEPERS,
    layout::Slot,
    member::MemberWord,
    slot::SlotWord,
    sync::{Arc, AtomicU32, Ordering},
};

/// A member that dies, and what it leaves.
struct Dead {
    member: ManuallyDrop<Member>,
    pool: ManuallyDrop<Pool>,
}

fn mortal(control: &Control) -> Dead {
    let member = rank(control);
    let pool = member.pool(PoolId(0)).unwrap();
    Dead { member: ManuallyDrop::new(member), pool: ManuallyDrop::new(pool) }
}

impl Dead {
    fn id(&self) -> MemberId {
        self.member.id()
    }

    fn seat(&self) -> u8 {
        self.id().0
    }
}

fn until(condition: impl Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !condition() {
        assert!(begun.elapsed() < std::time::Duration::from_secs(30));
        thread::yield_now();
    }
}

fn slot(control: &Control, index: u32) -> &Slot {
    &tables(control).slots[index as usize]
}

/// Reaps, and checks that there is nothing left to do.
fn reap(by: &Member, dead: &Dead) -> Reaped {
    let reaped = by.reap(dead.id(), Some(dead.member.generation()));
    assert!(reaped.done);
    assert_eq!(by.reap(dead.id(), None), Reaped::default(), "a second reap does nothing");
    reaped
}

#[test]
fn d3_a_linked_fill_fails_as_owner_died_and_one_takes_over() {
    let control = cache(2);
    let survivor = rank(&control);
    let pool = survivor.pool(PoolId(0)).unwrap();
    let dead = mortal(&control);
    let fill = ManuallyDrop::new(own(&dead.pool, &key(1)));
    let waiters = [wait(&pool, &key(1)), wait(&pool, &key(1))];
    thread::scope(|scope| {
        let threads = [0, 1].map(|i: usize| {
            let waiter = &waiters[i];
            scope.spawn(move || waiter.wait(Some(watchdog())))
        });
        let reaped = reap(&survivor, &dead);
        assert_eq!((reaped.slots, reaped.pins, reaped.locks), (1, 1, 0));
        assert_eq!(threads.map(|t| t.join().unwrap()), [WaitOutcome::OwnerDied; 2]);
    });
    drop(waiters);
    assert_eq!(phase(&control, fill.slot().0), Phase::Failed);
    let again = own(&pool, &key(1));
    assert_eq!((again.slot(), again.generation()), (fill.slot(), fill.generation() + 1));
    drop(again.publish().unwrap());
    let counts = control.statistics();
    assert_eq!((counts.deaths, counts.slots_recovered, counts.pins_recovered), (1, 1, 1));
    assert_at_rest(&control);
    // The dead one was alive after all: it can neither publish nor go on.
    let refused = ManuallyDrop::into_inner(fill).publish();
    assert!(matches!(refused, Err(crate::PublishError::Fenced)));
    assert!(dead.pool.acquire(&key(1)).is_err());
    assert_at_rest(&control);
}

/// An entry leads to the slot already, but the slot is not resident yet.
#[test]
fn d1_death_in_mid_link_frees_the_slot() {
    let control = cache(1);
    let survivor = rank(&control);
    let dead = mortal(&control);
    let tables = tables(&control);
    let me = &*dead.pool.member;
    let index = tables.obtain(me, control.region.hasher()).unwrap();
    let slot = slot(&control, index);
    me.pin(0, index, &slot.pins);
    let raw = dead.pool.raw(&key(1));
    slot.set_key(&raw);
    tables.lock(me, raw.hashed, Patience::Enough).unwrap().insert(&raw, index);
    assert_eq!(survivor.pool(PoolId(0)).unwrap().prefix_lookup(&[key(1)]).unwrap(), 0);
    assert_eq!(reap(&survivor, &dead).slots, 1);
    assert_eq!((phase(&control, 0), key_in(&control, 0)), (Phase::Free, None));
    assert_at_rest(&control);
    assert_eq!(load(&survivor.pool(PoolId(0)).unwrap(), &key(1)), 0);
}

/// What the dead one had made of slot 0, which held key 1, and what must come of it.
type Leave = fn(&Control, &Pool, SlotWord) -> SlotWord;

fn died_in_eviction(leave: Leave) -> (Control, Member, SlotWord, SlotWord) {
    let control = cache(1);
    let survivor = rank(&control);
    load(&survivor.pool(PoolId(0)).unwrap(), &key(1));
    let dead = mortal(&control);
    let before = slot(&control, 0).load();
    let left = leave(&control, &dead.pool, before);
    assert!(slot(&control, 0).change(before, left));
    assert_eq!(reap(&survivor, &dead).slots, 1);
    let after = slot(&control, 0).load();
    assert_at_rest(&control);
    (control, survivor, before, after)
}

#[test]
fn d1_a_claim_is_rolled_back() {
    let (control, survivor, before, after) =
        died_in_eviction(|_, dead, word| word.claimed(dead.member.index));
    assert_eq!(after, before);
    drop(hit(&survivor.pool(PoolId(0)).unwrap(), &key(1)));
    assert_eq!(control.statistics().evictions, 0);
}

#[test]
fn d1_a_detached_slot_is_unlinked_and_freed() {
    let (_, survivor, _, after) = died_in_eviction(|_, dead, word| {
        let claimed = word.claimed(dead.member.index);
        claimed.to(Phase::Detached, Some(dead.member.index))
    });
    assert_eq!(after.phase(), Phase::Free);
    let pool = survivor.pool(PoolId(0)).unwrap();
    assert_eq!(load(&pool, &key(2)), 0);
    assert_eq!(pool.prefix_lookup(&[key(1)]).unwrap(), 0);
}

#[test]
fn d1_a_detached_slot_with_half_a_new_key_is_freed() {
    let (_, survivor, _, after) = died_in_eviction(|control, dead, word| {
        tables(control).vacate(&dead.member, control.region.hasher(), 0, Patience::Enough);
        slot(control, 0).block_lo.store(77, Ordering::SeqCst);
        word.claimed(dead.member.index).to(Phase::Detached, Some(dead.member.index))
    });
    assert_eq!(after.phase(), Phase::Free);
    assert_eq!(load(&survivor.pool(PoolId(0)).unwrap(), &key(1)), 0);
}

#[test]
fn d1_a_claim_on_a_pinned_slot_takes_nothing_from_the_pinner() {
    for failed in [false, true] {
        let control = cache(1);
        let survivor = rank(&control);
        let pool = survivor.pool(PoolId(0)).unwrap();
        let fill = own(&pool, &key(1));
        let waiter = wait(&pool, &key(1));
        if failed {
            fill.fail(FailKind::Io)
        } else {
            drop(fill.publish().unwrap())
        }
        let dead = mortal(&control);
        let before = slot(&control, 0).load();
        assert!(slot(&control, 0).change(before, before.claimed(dead.seat())));
        reap(&survivor, &dead);
        assert_eq!(slot(&control, 0).load(), before);
        if failed {
            assert_eq!(waiter.state(), FillState::Failed(FailKind::Io));
        } else {
            let pin = waiter.into_pin().unwrap();
            assert_eq!(hit(&pool, &key(1)).generation(), pin.generation());
        }
        assert_eq!(key_in(&control, 0), Some(key(1)));
    }
}

#[test]
fn d1_quarantine_ends_with_the_proof_of_death() {
    let control = cache(1);
    let survivor = rank(&control);
    let pool = survivor.pool(PoolId(0)).unwrap();
    let dead = mortal(&control);
    let fill = own(&dead.pool, &key(1));
    let _token = ManuallyDrop::new(fill.start_io());
    fill.abandon_draining(FailKind::Deadline);
    assert!(is_full(&pool, &key(2)));
    assert_eq!(phase(&control, 0), Phase::Draining);
    let reaped = reap(&survivor, &dead);
    assert_eq!((reaped.slots, reaped.pins), (1, 1));
    assert_eq!(load(&pool, &key(2)), 0);
    assert_at_rest(&control);
}

#[test]
fn d1_pins_fall_and_full_ends() {
    let control = cache(3);
    let survivor = rank(&control);
    let pool = survivor.pool(PoolId(0)).unwrap();
    let dead = mortal(&control);
    let pins: Vec<_> =
        (0..3).map(|k| ManuallyDrop::new(own(&dead.pool, &key(k)).publish().unwrap())).collect();
    let shared = hit(&pool, &key(1));
    assert!(is_full(&pool, &key(9)) && is_full(&pool, &key(9)));
    assert_eq!(reap(&survivor, &dead).pins, pins.len() as u64);
    assert_eq!(load(&pool, &key(9)), 0);
    assert_eq!(load(&pool, &key(8)), 2, "the survivor's pin holds");
    drop(shared);
    assert_at_rest(&control);
}

/// Regression: the owner had made the state `Ready`, but died before it told anybody.
#[test]
fn d1_death_between_state_and_wake_is_heard() {
    // How far the owner came: state, version moved (flags gone), nothing more.
    for moved in [false, true] {
        for any in [false, true] {
            let control = cache(1);
            let survivor = rank(&control);
            let pool = survivor.pool(PoolId(0)).unwrap();
            let dead = mortal(&control);
            let fill = ManuallyDrop::new(own(&dead.pool, &key(1)));
            let waiter = wait(&pool, &key(1));
            let slot = slot(&control, fill.slot().0);
            thread::scope(|scope| {
                let waiting = scope.spawn(|| match any {
                    false => waiter.wait(Some(watchdog())) == WaitOutcome::Ready,
                    true => {
                        let ended = survivor.wait_any(&[&waiter], Some(watchdog())).unwrap();
                        ended == WaitAny::Ended(0, FillState::Ready)
                    }
                });
                let bell = &survivor.inner.record().unwrap().doorbell.0;
                eventually("the waiter sleeps", || {
                    let word = if any { bell } else { &slot.version };
                    word.arm(0) & SLEEPERS != 0
                });
                let word = slot.load();
                assert!(slot.change(word, word.to(Phase::Ready, None)));
                if moved {
                    let _ = slot.version.bump();
                }
                assert_eq!(reap(&survivor, &dead).pins, 1);
                assert!(waiting.join().unwrap(), "moved {moved}, any {any}");
            });
            drop(hit(&pool, &key(1)));
        }
    }
}

#[derive(Debug)]
struct AllDead(AtomicU32);

impl Liveness for AllDead {
    fn is_dead(&self, member: MemberId) -> bool {
        self.0.load(Ordering::SeqCst) & (1 << member.0) != 0
    }
}

/// Loads a key whose bucket may be locked for longer than an acquire waits.
fn load_at_last(pool: &Pool, key: &Key) {
    loop {
        match pool.acquire(key).unwrap() {
            Acquired::Owner(fill) => return drop(fill.publish().unwrap()),
            Acquired::Full => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a01_a_dead_holders_lock_is_freed_by_reap() {
    let control = narrow(geometry(4, 0, 1), 0);
    let survivor = rank(&control);
    let pool = survivor.pool(PoolId(0)).unwrap();
    let dead = mortal(&control);
    let hashed = dead.pool.raw(&key(1)).hashed;
    let _held = ManuallyDrop::new(
        tables(&control).lock(&dead.pool.member, hashed, Patience::Enough).unwrap(),
    );
    thread::scope(|scope| {
        let stuck = scope.spawn(|| load_at_last(&pool, &key(1)));
        let bucket = &tables(&control).buckets[0];
        eventually("somebody sleeps on the lock", || {
            bucket.lock.load(Ordering::SeqCst) & (1 << 31) != 0
        });
        assert_eq!(reap(&survivor, &dead).locks, 1);
        stuck.join().unwrap();
    });
    assert_eq!(control.statistics().locks_recovered, 1);
    assert_at_rest(&control);
}

#[test]
fn a01_whoever_waits_for_a_dead_holders_lock_breaks_it_with_proof_only() {
    let control = narrow(geometry(4, 0, 1), 0);
    let survivor = rank(&control);
    let proof = Arc::new(AllDead(AtomicU32::new(0)));
    survivor.set_liveness(proof.clone());
    let pool = survivor.pool(PoolId(0)).unwrap();
    let dead = mortal(&control);
    let hashed = dead.pool.raw(&key(1)).hashed;
    let _held = ManuallyDrop::new(
        tables(&control).lock(&dead.pool.member, hashed, Patience::Enough).unwrap(),
    );
    thread::scope(|scope| {
        let stuck = scope.spawn(|| load_at_last(&pool, &key(1)));
        let bucket = &tables(&control).buckets[0];
        eventually("somebody sleeps on the lock", || {
            bucket.lock.load(Ordering::SeqCst) & (1 << 31) != 0
        });
        assert!(!stuck.is_finished(), "nothing is proven yet");
        proof.0.store(1 << dead.seat(), Ordering::SeqCst);
        stuck.join().unwrap();
    });
    assert_eq!(control.statistics().locks_recovered, 1);
    assert_eq!(reap(&survivor, &dead).locks, 0);
    assert_at_rest(&control);
}

/// The recovery of one dead member meets the lock of another.
#[test]
fn d2_two_dead_members_do_not_block_each_others_recovery() {
    let control = narrow(geometry(4, 0, 1), 0);
    let survivor = rank(&control);
    let [first, second] = [mortal(&control), mortal(&control)];
    let both = 1 << first.seat() | 1 << second.seat();
    survivor.set_liveness(Arc::new(AllDead(AtomicU32::new(both))));
    let _fill = ManuallyDrop::new(own(&first.pool, &key(1)));
    let hashed = second.pool.raw(&key(2)).hashed;
    let _held = ManuallyDrop::new(
        tables(&control).lock(&second.pool.member, hashed, Patience::Enough).unwrap(),
    );
    assert_eq!(reap(&survivor, &first).slots, 1);
    reap(&survivor, &second);
    assert_at_rest(&control);
}

#[test]
fn a_lock_of_the_seats_next_holder_is_not_the_dead_ones() {
    let control = narrow(geometry(4, 0, 1), 0);
    let survivor = rank(&control);
    let dead = mortal(&control);
    reap(&survivor, &dead);
    let next = rank(&control);
    assert_eq!(next.id(), dead.id());
    let old = crate::bucket::LockWord::of(dead.seat(), dead.member.generation());
    let new = crate::bucket::LockWord::of(dead.seat(), next.generation());
    assert!(old != new);
}

#[test]
fn reap_asks_for_the_right_stay() {
    let control = cache(1);
    let survivor = rank(&control);
    let spec = crate::MemberSpec::rank(1, 2).named([5; 16]);
    let first = control.join_at(MemberId(9), spec).unwrap();
    let generation = first.generation();
    assert!(!survivor.reap(MemberId(9), Some(generation + 1)).done);
    assert!(!survivor.reap_stay(MemberId(9), [6; 16]).done);
    assert!(!survivor.reap(survivor.id(), None).done, "nobody reaps itself");
    assert!(!survivor.reap(MemberId(77), None).done, "nobody sits there");
    assert!(!survivor.reap(MemberId(200), None).done, "no such seat");
    drop(first);
    let second = ManuallyDrop::new(control.join_at(MemberId(9), spec.named([6; 16])).unwrap());
    assert!(!survivor.reap(MemberId(9), Some(generation)).done, "that stay is over");
    assert!(!survivor.reap_stay(MemberId(9), [5; 16]).done);
    assert!(survivor.reap_stay(MemberId(9), [6; 16]).done);
    assert_eq!(second.generation(), generation + 1);
}

fn record_word(control: &Control, seat: u8) -> MemberWord {
    MemberWord(control.region.member(seat).unwrap().word.load(Ordering::SeqCst))
}

fn set_reaping(control: &Control, seat: u8, by: u8) {
    let word = MemberWord::with(MemberState::Reaping, by, record_word(control, seat).generation());
    control.region.member(seat).unwrap().word.store(word.0, Ordering::SeqCst);
}

#[test]
fn d1_a_reaper_that_dies_is_followed_by_another() {
    let control = cache(2);
    let survivor = rank(&control);
    let [reaper, first, second] = [mortal(&control), mortal(&control), mortal(&control)];
    let _fills =
        [(&first, 1), (&second, 2)].map(|(dead, k)| ManuallyDrop::new(own(&dead.pool, &key(k))));
    // `reaper` was at `first`, which had been at `second`.
    set_reaping(&control, first.seat(), reaper.seat());
    set_reaping(&control, second.seat(), first.seat());
    // Without proof that the reaper is dead, its work is its own, but for what others wait for.
    let relieved = survivor.reap(first.id(), None);
    assert_eq!((relieved.done, relieved.slots, relieved.pins), (false, 1, 0));
    let reaped = survivor.reap(reaper.id(), None);
    assert_eq!((reaped.done, reaped.slots, reaped.pins), (true, 1, 2));
    assert_eq!(control.inspect().members.len(), 1);
    assert_eq!(control.statistics().deaths, 3);
    assert_at_rest(&control);
}

/// Mutants: nothing is relieved; the stay's generation is not looked at; its locks are left; a vote is.
#[test]
fn w6_a_stopped_reaper_stops_nobody() {
    let control = narrow(geometry(4, 0, 1), 0);
    let survivor = rank(&control);
    let pool = survivor.pool(PoolId(0)).unwrap();
    let [stopped, dead] = [mortal(&control), mortal(&control)];
    let generation = dead.member.generation();
    let _fill = ManuallyDrop::new(own(&dead.pool, &key(1)));
    let hashed = pool.raw(&key(2)).hashed;
    let _held =
        ManuallyDrop::new(tables(&control).lock(&dead.member.inner, hashed, Patience::Brief));
    let waiter = wait(&pool, &key(1));
    let (told, heard) = std::sync::mpsc::channel();
    let vote = crate::GroupVote {
        group: [1; 16],
        lasting: false,
        roster: vec![survivor.stay(), dead.member.stay()],
        ready: true,
    };
    survivor.vote(vote, Box::new(move |decision| told.send(decision).unwrap())).unwrap();
    set_reaping(&control, dead.seat(), stopped.seat());
    assert_eq!(survivor.reap(dead.id(), Some(generation + 1)), Reaped::default());
    let relieved = survivor.reap(dead.id(), Some(generation));
    assert_eq!((relieved.done, relieved.slots, relieved.locks), (false, 1, 1));
    assert_eq!(waiter.wait(None), WaitOutcome::OwnerDied);
    drop(waiter);
    assert_eq!(heard.recv_timeout(std::time::Duration::from_secs(60)), Ok(false));
    load(&pool, &key(1));
    load(&pool, &key(2));
    assert_eq!(survivor.reap(dead.id(), Some(generation)), Reaped::default(), "nothing is left");
    // The rest is the stopped one's, or its reaper's.
    let reaped = reap(&survivor, &stopped);
    assert_eq!((reaped.slots, reaped.pins), (0, 1));
    assert_eq!(control.inspect().members.len(), 1);
    assert_at_rest(&control);
}

#[test]
fn d1_proof_of_the_reapers_death_is_enough_to_follow() {
    let control = cache(2);
    let survivor = rank(&control);
    let [reaper, dead] = [mortal(&control), mortal(&control)];
    survivor.set_liveness(Arc::new(AllDead(AtomicU32::new(1 << reaper.seat()))));
    let _fill = ManuallyDrop::new(own(&dead.pool, &key(1)));
    set_reaping(&control, dead.seat(), reaper.seat());
    // The reaper had taken a slot for itself already.
    assert_eq!(reap(&survivor, &dead).slots, 1);
    reap(&survivor, &reaper);
    assert_at_rest(&control);
}

#[test]
fn a01_of_many_reapers_one_does_the_work() {
    for _ in 0..50 {
        let control = cache(8);
        let survivors: Vec<_> = (0..4).map(|_| rank(&control)).collect();
        let dead = mortal(&control);
        let _fills: Vec<_> = (0..8).map(|k| ManuallyDrop::new(own(&dead.pool, &key(k)))).collect();
        let done: Vec<_> = thread::scope(|scope| {
            let reap = |member: Member| {
                let id = dead.id();
                scope.spawn(move || member.reap(id, None))
            };
            // Two threads of each.
            let twice = survivors.iter().chain(&survivors);
            let threads: Vec<_> = twice.map(|m| reap(m.clone())).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert_eq!(done.iter().filter(|reaped| reaped.done).count(), 1);
        // The others may have been faster with some of the fills.
        assert_eq!(done.iter().map(|reaped| reaped.slots).sum::<u64>(), 8);
        assert_eq!(done.iter().map(|reaped| reaped.pins).sum::<u64>(), 8);
        assert_eq!(control.inspect().members.len(), 4);
        assert_eq!(control.inspect().pools[0].failed, 8);
        assert_at_rest(&control);
    }
}

/// Lost hints of free slots come back with the next reap.
#[test]
fn d1_free_slots_are_found_again() {
    let control = cache(2);
    let survivor = rank(&control);
    let pool = survivor.pool(PoolId(0)).unwrap();
    for level in tables(&control).free_regular() {
        level.iter().for_each(|word| word.store(0, Ordering::SeqCst));
    }
    assert!(is_full(&pool, &key(1)));
    reap(&survivor, &mortal(&control));
    assert_eq!((load(&pool, &key(1)), load(&pool, &key(2))), (0, 1));
}

/// A member that is stopped while it holds a lock stops nobody, and what must leave the bucket
/// leaves it later.
#[test]
fn w6_a_lock_of_a_stopped_member_stops_nobody() {
    let control = narrow(geometry(2, 0, 1), 0);
    let survivor = rank(&control);
    let pool = survivor.pool(PoolId(0)).unwrap();
    let stopped = rank(&control).pool(PoolId(0)).unwrap();
    load(&pool, &key(1));
    let drained = own(&pool, &key(2));
    let (token, slot) = (drained.start_io(), drained.slot().0);
    let held = tables(&control).lock(&stopped.member, pool.raw(&key(1)).hashed, Patience::Brief);
    assert!(held.is_some());
    assert!(is_full(&pool, &key(3)), "neither can a key leave, nor one be linked");
    assert_eq!(pool.prealloc(&key(3)).unwrap(), crate::Prealloc::NoSlot);
    drop(hit(&pool, &key(1)));
    assert_eq!(pool.remove(&key(1)).unwrap(), crate::Removal::InUse);
    // A fill given up meanwhile stays in quarantine, absent.
    drained.abandon_draining(FailKind::Io);
    drop(token);
    assert_eq!(phase(&control, slot), Phase::Draining);
    assert!(is_full(&pool, &key(2)));
    drop(held);
    // Unlinked when a slot is needed, or by the reminder a moment before, which has freed it or is about to.
    load(&pool, &key(2));
    until(|| phase(&control, slot) != Phase::Draining);
    assert_at_rest(&control);
}

/// A member that does nothing more gives back what it could not unlink, and can leave meanwhile.
/// Mutants: no reminder; a reminder that keeps the member; one that ends after the first failure.
#[test]
fn w6_a_member_at_rest_keeps_no_leftovers() {
    for leaves in [false, true] {
        let control = narrow(geometry(2, 0, 1), 0);
        let stopped = rank(&control).pool(PoolId(0)).unwrap();
        let resting = rank(&control);
        let (seat, pool) = (resting.id(), resting.pool(PoolId(0)).unwrap());
        let drained = own(&pool, &key(2));
        let (token, slot) = (drained.start_io(), drained.slot().0);
        let hashed = pool.raw(&key(2)).hashed;
        let held = tables(&control).lock(&stopped.member, hashed, Patience::Brief);
        drained.abandon_draining(FailKind::Io);
        drop(token);
        // Longer than the reminder's first pauses.
        thread::sleep(std::time::Duration::from_millis(50));
        assert_eq!(phase(&control, slot), Phase::Draining);
        if leaves {
            let weak = resting.downgrade();
            drop((pool, resting));
            until(|| weak.upgrade().is_none());
        }
        drop(held);
        if leaves {
            // The next joiner's work, unless the member is still leaving and can do it now.
            rank(&control).reap(seat, None);
        }
        until(|| phase(&control, slot) == Phase::Free);
        assert_at_rest(&control);
    }
}

#[test]
fn d1_a_fill_of_the_dead_in_a_stopped_members_bucket_is_freed_later() {
    for detached in [false, true] {
        let control = narrow(geometry(1, 0, 1), 0);
        let survivor = rank(&control);
        let pool = survivor.pool(PoolId(0)).unwrap();
        let stopped = rank(&control).pool(PoolId(0)).unwrap();
        let dead = mortal(&control);
        let _fill = ManuallyDrop::new(own(&dead.pool, &key(1)));
        if detached {
            let word = slot(&control, 0).load();
            assert!(slot(&control, 0).change(word, word.to(Phase::Detached, Some(dead.seat()))));
        }
        let waiter = (!detached).then(|| wait(&pool, &key(1)));
        let hashed = pool.raw(&key(1)).hashed;
        let held = tables(&control).lock(&stopped.member, hashed, Patience::Brief);
        let reaped = reap(&survivor, &dead);
        assert_eq!((reaped.slots, reaped.pins), (1, 1));
        assert_eq!(waiter.map(|w| w.wait(None)), (!detached).then_some(WaitOutcome::OwnerDied));
        assert!(is_full(&pool, &key(2)));
        assert_eq!(pool.prefix_lookup(&[key(1)]).unwrap(), 0);
        drop(held);
        assert_eq!(load(&pool, &key(3)), 0);
        assert_at_rest(&control);
    }
}

/// D11: a lock word that names nobody's stay.
#[test]
fn d11_a_lock_of_nobody_is_broken_at_once() {
    let control = narrow(geometry(2, 0, 1), 0);
    let pool = pool(&control);
    for garbage in [1 << 31, 0x7fff_ff00, 0x0000_01ff, 0x0000_0701, 0x0000_0142, u32::MAX] {
        tables(&control).buckets[0].lock.store(garbage, Ordering::SeqCst);
        drop(own(&pool, &key(1)));
        assert_eq!(pool.remove(&key(1)).unwrap(), crate::Removal::Removed);
    }
    assert!(control.statistics().corruptions >= 5);
    assert_at_rest(&control);
}
