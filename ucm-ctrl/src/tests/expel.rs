//! Members declared gone by an operator while their processes live.
//!
//! **Invariant:** nothing that an expelled member may still write is handed on, and all it held
//! comes back when it lets go or ends.

use std::mem::ManuallyDrop;

use super::kit::*;
use crate::{
    ErrorKind, FailKind, FillState, MemberState, Phase, PoolId, PublishError, WaitOutcome,
    sync::Ordering,
};

#[test]
fn w6_the_fills_of_an_expelled_member_go_to_quarantine_and_it_is_fenced() {
    let control = cache(3);
    let operator = rank(&control);
    let pool = operator.pool(PoolId(0)).unwrap();
    let gone = rank(&control);
    let theirs = gone.pool(PoolId(0)).unwrap();
    let pin = own(&theirs, &key(1)).publish().unwrap();
    let fill = own(&theirs, &key(2));
    let waiter = wait(&pool, &key(2));
    assert!(!operator.expel(gone.id(), gone.generation() + 1).done, "another stay");
    assert!(!operator.expel(operator.id(), operator.generation()).done, "nobody expels itself");
    let expelled = operator.expel(gone.id(), gone.generation());
    assert_eq!((expelled.done, expelled.fills), (true, 1));
    assert_eq!(waiter.wait(None), WaitOutcome::OwnerDied);
    drop(waiter);
    let seen = control.inspect();
    assert_eq!(seen.problems, Vec::<String>::new());
    assert_eq!((seen.pools[0].draining, seen.pools[0].pinned), (1, 2));
    assert_eq!(seen.members[1].state, MemberState::Expelled);
    // The key can be loaded elsewhere; what the expelled member may still write is out of reach.
    let again = own(&pool, &key(2));
    assert_ne!(again.slot(), fill.slot());
    drop(again.publish().unwrap());
    // Its pin holds until it lets go.
    assert!(!matches!(pool.remove(&key(1)).unwrap(), crate::Removal::Removed));
    assert!(is_full(&pool, &key(3)) || key_in(&control, fill.slot().0) != Some(key(3)));
    // It goes on: nothing new, but it can let go of everything.
    for refused in [
        theirs.acquire(&key(1)).map(drop),
        theirs.prealloc(&key(9)).map(drop),
        theirs.touch(&[key(1).block]).map(drop),
        theirs.remove(&key(1)).map(drop),
        theirs.prefix_lookup(&[key(1)]).map(drop),
    ] {
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Fenced);
    }
    let slot = fill.slot().0;
    assert!(matches!(fill.publish(), Err(PublishError::Fenced)));
    assert_eq!(phase(&control, slot), Phase::Free, "it was quiet: no operation was in flight");
    drop(pin);
    drop((theirs, gone));
    assert_eq!(control.inspect().members.len(), 1, "an expelled member can leave");
    assert_eq!(control.statistics().expelled, 1);
    assert_at_rest(&control);
}

#[test]
fn w6_an_operation_of_an_expelled_member_keeps_its_slot_until_it_ends() {
    let control = cache(1);
    let operator = rank(&control);
    let pool = operator.pool(PoolId(0)).unwrap();
    let gone = rank(&control);
    let fill = own(&gone.pool(PoolId(0)).unwrap(), &key(1));
    let token = fill.start_io();
    operator.expel(gone.id(), gone.generation());
    assert_eq!(operator.expel(gone.id(), gone.generation()).fills, 0, "once is enough");
    let Err(PublishError::IoInFlight(fill)) = fill.publish() else { panic!("a token lives") };
    fill.fail(FailKind::Io);
    assert_eq!(phase(&control, 0), Phase::Draining);
    assert!(is_full(&pool, &key(2)));
    drop(token);
    assert_eq!(load(&pool, &key(2)), 0);
    drop(gone);
    assert_at_rest(&control);
}

#[test]
fn d1_an_expelled_member_that_ends_is_cleared_up_after() {
    let control = cache(2);
    let operator = rank(&control);
    let gone = ManuallyDrop::new(rank(&control));
    let theirs = ManuallyDrop::new(gone.pool(PoolId(0)).unwrap());
    let _pin = ManuallyDrop::new(own(&theirs, &key(1)).publish().unwrap());
    let _fill = ManuallyDrop::new(own(&theirs, &key(2)));
    operator.expel(gone.id(), gone.generation());
    let reaped = operator.reap(gone.id(), Some(gone.generation()));
    assert_eq!((reaped.done, reaped.slots, reaped.pins), (true, 1, 2));
    assert!(!operator.expel(gone.id(), gone.generation()).done);
    assert_eq!(control.inspect().members.len(), 1);
    assert_at_rest(&control);
}

/// It had passed the check before it was stopped, and takes a key after it was expelled.
#[test]
fn w6_a_fill_begun_after_the_expulsion_cannot_be_published() {
    let control = cache(1);
    let operator = rank(&control);
    let pool = operator.pool(PoolId(0)).unwrap();
    let gone = rank(&control);
    let fill = own(&gone.pool(PoolId(0)).unwrap(), &key(1));
    let record = control.region.member(gone.id().0).unwrap();
    let expelled = crate::member::MemberWord::with(MemberState::Expelled, 0, gone.generation());
    record.word.store(expelled.0, Ordering::SeqCst);
    let waiter = wait(&pool, &key(1));
    assert!(matches!(fill.publish(), Err(PublishError::Fenced)));
    assert_eq!(waiter.state(), FillState::OwnerDied);
    drop((waiter, gone));
    assert_eq!(load(&pool, &key(1)), 0);
    assert_at_rest(&control);
}

/// The caller of `expel` died after it had marked the record.
#[test]
fn d1_a_half_done_expulsion_is_completed_by_the_reaper_of_its_caller() {
    let control = cache(1);
    let survivor = rank(&control);
    let operator = ManuallyDrop::new(rank(&control));
    let gone = rank(&control);
    let fill = own(&gone.pool(PoolId(0)).unwrap(), &key(1));
    let record = control.region.member(gone.id().0).unwrap();
    let expelled = crate::member::MemberWord::with(MemberState::Expelled, 0, gone.generation());
    record.word.store(expelled.0, Ordering::SeqCst);
    assert!(survivor.reap(operator.id(), None).done);
    assert_eq!(phase(&control, 0), Phase::Draining);
    drop((fill, gone));
    assert_at_rest(&control);
}

/// An operator that was slow comes to the fills when the seat is another's.
#[test]
fn w6_the_fills_of_the_seats_next_holder_are_not_the_expelleds() {
    let control = cache(2);
    let operator = rank(&control);
    let gone = ManuallyDrop::new(rank(&control));
    let (id, generation) = (gone.id(), gone.generation());
    assert!(operator.expel(id, generation).done);
    let record = control.region.member(id.0).unwrap();
    let marked = crate::member::MemberWord(record.word.load(Ordering::SeqCst));
    assert!(operator.reap(id, Some(generation)).done);
    let next = control.join_at(id, crate::MemberSpec::rank(0, 1)).unwrap();
    let fill = own(&next.pool(PoolId(0)).unwrap(), &key(1));
    assert_eq!(crate::expel::quarantine_fills(&operator.inner, id.0, record, marked), 0);
    drop(fill.publish().unwrap());
    drop(next);
    assert_at_rest(&control);
}

/// An expelled member is the only one that sees another die: it clears up, and the survivors' waiters hear.
/// Mutant: only who may begin something clears up.
#[test]
fn w6_d1_an_expelled_member_clears_up_after_the_dead() {
    let control = cache(2);
    let (operator, witness) = (rank(&control), rank(&control));
    let dead = ManuallyDrop::new(rank(&control));
    let theirs = ManuallyDrop::new(dead.pool(PoolId(0)).unwrap());
    let _fill = ManuallyDrop::new(own(&theirs, &key(1)));
    let waiter = wait(&operator.pool(PoolId(0)).unwrap(), &key(1));
    assert!(control.holds_anything(dead.id()));
    assert!(operator.expel(witness.id(), witness.generation()).done);
    let reaped = witness.reap(dead.id(), Some(dead.generation()));
    assert_eq!((reaped.done, reaped.slots), (true, 1));
    assert_eq!(waiter.wait(None), WaitOutcome::OwnerDied);
    assert!(!control.holds_anything(dead.id()));
    drop((waiter, witness));
    assert_at_rest(&control);
}

/// What keeps a seat from being given away without proof: a slot that is owned, in whatever phase, a pin, a lock.
/// Mutants: pins only; owners only; no locks.
#[test]
fn d1_a_seat_holds_what_it_owns_pins_or_locks() {
    let control = cache(2);
    let (one, two) = (rank(&control), rank(&control));
    let (pool, other) = (one.pool(PoolId(0)).unwrap(), two.pool(PoolId(0)).unwrap());
    let holds = || [one.id(), two.id()].map(|id| control.holds_anything(id));
    assert_eq!(holds(), [false, false]);
    let pin = own(&pool, &key(1)).publish().unwrap();
    assert_eq!(holds(), [true, false]);
    drop(pin);
    let slot = &tables(&control).slots[0];
    let word = slot.load();
    assert!(slot.change(word, word.to(Phase::Detached, Some(two.id().0))));
    assert_eq!(holds(), [false, true]);
    let now = slot.load();
    assert!(slot.change(now, word));
    let hashed = other.raw(&key(1)).hashed;
    let held = tables(&control).lock(&other.member, hashed, crate::bucket::Patience::Enough);
    assert_eq!(holds(), [false, true]);
    drop(held);
    assert_eq!(holds(), [false, false]);
    let dead = ManuallyDrop::new(rank(&control));
    let record = control.region.member(dead.id().0).unwrap();
    let word = crate::member::MemberWord::with(MemberState::Reaping, one.id().0, dead.generation());
    record.word.store(word.0, Ordering::SeqCst);
    assert_eq!(holds(), [true, false]);
}

/// A stay is over when its record is free or another's, not while somebody clears it up. Mutants: a record that is
/// being cleared up counts; another stay's does not.
#[test]
fn d5_a_stay_is_over_when_its_record_is() {
    let control = cache(1);
    let spec = |n| crate::MemberSpec::rank(0, 1).named([n; 16]);
    let first = control.join_at(crate::MemberId(3), spec(1)).unwrap();
    let over = |n| control.is_stay_over(crate::MemberId(3), [n; 16]);
    assert_eq!([over(1), over(2)], [false, true]);
    let record = control.region.member(3).unwrap();
    let word = record.word.load(Ordering::SeqCst);
    let reaping = crate::member::MemberWord::with(MemberState::Reaping, 5, first.generation()).0;
    record.word.store(reaping, Ordering::SeqCst);
    assert!(!over(1));
    record.word.store(word, Ordering::SeqCst);
    drop(first);
    assert!(over(1));
    let _second = control.join_at(crate::MemberId(3), spec(2)).unwrap();
    assert_eq!([over(1), over(2)], [true, false]);
}
