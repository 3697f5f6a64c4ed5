//! Fills given up with operations in flight: quarantine.
//!
//! **Invariant:** a slot that a token may still write is neither victim nor re-keyed; everything
//! else goes on at once.

use super::kit::*;
use crate::{FailKind, FillState, Phase, PublishError, WaitOutcome};

#[test]
fn draining_is_heard_at_once_and_the_key_loads_into_another_slot() {
    let control = cache(2);
    let [owner, other] = [pool(&control), pool(&control)];
    let fill = own(&owner, &key(1));
    let waiter = wait(&other, &key(1));
    let (slot, token) = (fill.slot().0, fill.start_io());
    fill.abandon_draining(FailKind::Deadline);
    assert_eq!(waiter.wait(None), WaitOutcome::Failed(FailKind::Deadline));
    assert_eq!(key_in(&control, slot), None, "unlinked");
    let again = own(&other, &key(1));
    assert_ne!(again.slot().0, slot);
    let pin = again.publish().unwrap();
    // Under any pressure the quarantined slot stays what it is.
    for k in 10..30 {
        assert!(is_full(&owner, &key(k)));
        assert_eq!(owner.prealloc(&key(k)).unwrap(), crate::Prealloc::NoSlot);
        assert_eq!(phase(&control, slot), Phase::Draining);
    }
    let seen = control.inspect();
    assert_eq!((seen.pools[0].draining, seen.problems.len()), (1, 0), "{seen:?}");
    drop(token);
    // The waiter has not let go: the slot is free, but not given out.
    assert_eq!(phase(&control, slot), Phase::Free);
    assert!(is_full(&owner, &key(50)));
    assert_eq!(waiter.state(), FillState::Failed(FailKind::Deadline));
    drop(waiter);
    assert_eq!(load(&owner, &key(50)), slot);
    drop(pin);
    assert_eq!(control.statistics().drains, 1);
    assert_at_rest(&control);
}

#[test]
fn only_the_last_token_ends_the_quarantine() {
    let control = cache(1);
    let pool = pool(&control);
    let fill = own(&pool, &key(1));
    let (first, second) = (fill.start_io(), fill.start_io());
    let third = first.clone();
    fill.fail(FailKind::Cancelled);
    for token in [first, second] {
        assert_eq!(phase(&control, 0), Phase::Draining);
        drop(token);
    }
    assert_eq!(phase(&control, 0), Phase::Draining);
    assert!(is_full(&pool, &key(2)));
    drop(third);
    assert_eq!(load(&pool, &key(2)), 0);
    assert_at_rest(&control);
}

#[test]
fn a_dropped_fill_fails_or_drains() {
    let control = cache(1);
    let pool = pool(&control);
    drop(own(&pool, &key(1)));
    assert_eq!((phase(&control, 0), key_in(&control, 0)), (Phase::Failed, Some(key(1))));
    let fill = own(&pool, &key(1));
    let token = fill.start_io();
    drop(fill);
    assert_eq!(phase(&control, 0), Phase::Draining);
    drop(token);
    assert_eq!(phase(&control, 0), Phase::Free);
    assert_eq!(control.statistics().failures, 1);
    assert_eq!(control.statistics().drains, 1);
    assert_at_rest(&control);
}

#[test]
fn draining_without_operations_frees_the_slot_at_once() {
    let control = cache(1);
    let pool = pool(&control);
    own(&pool, &key(1)).abandon_draining(FailKind::Deadline);
    assert_eq!(phase(&control, 0), Phase::Free);
    assert_at_rest(&control);
}

#[test]
fn nothing_is_published_while_operations_may_write() {
    let control = cache(1);
    let pool = pool(&control);
    let fill = own(&pool, &key(1));
    let token = fill.start_io();
    let Err(PublishError::IoInFlight(fill)) = fill.publish() else { panic!("published") };
    assert_eq!(phase(&control, 0), Phase::Filling);
    drop(token);
    let generation = fill.generation();
    let pin = fill.publish().unwrap();
    assert_eq!((phase(&control, 0), pin.generation()), (Phase::Ready, generation));
}

/// A linked leftover of a drained fill, as between its two steps, is no obstacle and no answer.
#[test]
fn a_draining_slot_still_linked_counts_as_absent() {
    for mask in [u64::MAX, 0] {
        let control = narrow(geometry(16, 0, 1), mask);
        let pool = pool(&control);
        let others: Vec<_> = (10..18).map(|k| own(&pool, &key(k))).collect();
        let fill = own(&pool, &key(1));
        let slot = &tables(&control).slots[fill.slot().0 as usize];
        let word = slot.load();
        let draining = word.failed_as(FailKind::Io).to(Phase::Draining, Some(pool.member.index));
        assert!(slot.change(word, draining));
        let again = own(&pool, &key(1));
        assert_ne!(again.slot(), fill.slot());
        assert_eq!(control.inspect().problems, Vec::<String>::new(), "the old link is gone");
        drop((again.publish().unwrap(), others));
        // The fill lost its slot, as after a reap by mistake: it must not publish.
        assert!(matches!(fill.publish(), Err(PublishError::Fenced)));
    }
}

#[test]
fn tokens_outlive_the_member_handle() {
    let control = cache(1);
    let fill = own(&pool(&control), &key(1));
    let token = fill.start_io();
    drop(fill);
    // Pool and member are gone, but the token keeps the seat: its operation may still write.
    assert_eq!(control.inspect().members.len(), 1);
    assert_eq!(phase(&control, 0), Phase::Draining);
    drop(token);
    assert_eq!(control.inspect().members.len(), 0);
    assert_at_rest(&control);
}
