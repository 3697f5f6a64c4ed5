//! An operator who is slow: while the expulsion goes on, the expelled lets go or dies, somebody clears
//! up after it, and another sits down in its seat. And somebody who is slow to relieve a reaper.
//!
//! **Invariant:** neither touches anything that is not of the stay it names.
//!
//! Broken on purpose, and found: the record is not looked at before a fill is taken, by either; a slot is
//! unlinked without a look at its word; a reaper that is overtaken at a slot passes on.

use std::mem::ManuallyDrop;

use shuttle::thread;

use super::{assert_at_rest, histories, key, run_both};
use crate::{
    Acquired, Control, FailKind, Fill, Geometry, Member, MemberSpec, Pool, PoolId, PublishError,
};

fn cache(slots: u32) -> Control {
    Control::private(&Geometry { leases: 0, ..Geometry::single(slots, 0, 1, 4096) }).unwrap()
}

fn rank(control: &Control) -> (Member, Pool) {
    let member = control.join(MemberSpec::rank(0, 1)).unwrap();
    let pool = member.pool(PoolId(0)).unwrap();
    (member, pool)
}

fn own(pool: &Pool, block: u64) -> Fill {
    match pool.acquire(&key(block)).unwrap() {
        Acquired::Owner(fill) => fill,
        other => panic!("{other:?}"),
    }
}

/// The slot of the fill may be free and another key's by the time the operator unlinks it.
fn lets_go() {
    let control = cache(1);
    let (operator, _) = rank(&control);
    let (gone, theirs) = rank(&control);
    let (_other, pool) = rank(&control);
    let fill = own(&theirs, 0);
    let expelling = thread::spawn(move || operator.expel(gone.id(), gone.generation()).done);
    let letting_go = thread::spawn(move || {
        let token = fill.start_io();
        fill.abandon_draining(FailKind::Deadline);
        drop((token, theirs));
    });
    let mut loaded = false;
    for _ in 0..6 {
        match pool.acquire(&key(1)).unwrap() {
            Acquired::Owner(fill) => loaded |= fill.publish().map(drop).is_ok(),
            Acquired::Hit(_) => {}
            Acquired::Full => thread::yield_now(),
            other => panic!("{other:?}"),
        }
    }
    letting_go.join().unwrap();
    assert!(expelling.join().unwrap());
    assert_eq!(pool.prefix_lookup(&[key(1)]).unwrap() == 1, loaded, "a publish was lost");
    assert_at_rest(&control);
}

/// The reaper and the seat's next holder, while the operator is at it still.
fn dies() {
    let control = cache(2);
    let (operator, _) = rank(&control);
    let (survivor, _) = rank(&control);
    let (gone, theirs) = rank(&control);
    let gone = ManuallyDrop::new(gone);
    let _fills = [0, 1].map(|block| ManuallyDrop::new(own(&theirs, block)));
    let _theirs = ManuallyDrop::new(theirs);
    let (id, generation) = (gone.id(), gone.generation());
    let expelling = thread::spawn(move || operator.expel(id, generation));
    assert!(survivor.reap(id, Some(generation)).done);
    let next = control.join_at(id, MemberSpec::rank(0, 1)).unwrap();
    fill_all(&next);
    expelling.join().unwrap();
    drop(next);
    assert_at_rest(&control);
    gone.inner.fence();
}

/// Two hear of a death: one clears up, the other sees to what is waited for, perhaps too late.
fn is_relieved() {
    let control = cache(2);
    let (survivor, _) = rank(&control);
    let (other, _) = rank(&control);
    let (gone, theirs) = rank(&control);
    let gone = ManuallyDrop::new(gone);
    let _fills = [0, 1].map(|block| ManuallyDrop::new(own(&theirs, block)));
    let _theirs = ManuallyDrop::new(theirs);
    let (id, generation) = (gone.id(), gone.generation());
    let reaping = thread::spawn(move || other.reap(id, Some(generation)));
    let mine = survivor.reap(id, Some(generation));
    let next = loop {
        match control.join_at(id, MemberSpec::rank(0, 1)) {
            Ok(next) => break next,
            Err(_) => thread::yield_now(),
        }
    };
    fill_all(&next);
    let theirs = reaping.join().unwrap();
    assert!(mine.done != theirs.done && mine.slots + theirs.slots == 2, "{mine:?} {theirs:?}");
    drop(next);
    assert_at_rest(&control);
    gone.inner.fence();
}

/// A member that nobody has declared gone publishes what it fills.
fn fill_all(next: &Member) {
    let pool = next.pool(PoolId(0)).unwrap();
    for block in [0, 1] {
        // The bucket may be in the operator's hands.
        if let Acquired::Owner(fill) = pool.acquire(&key(block)).unwrap() {
            thread::yield_now();
            let published = fill.publish();
            assert!(!matches!(published, Err(PublishError::Fenced)), "block {block}");
        }
    }
}

#[test]
fn shuttle_w6_expulsion_meets_the_next_key_of_the_slot() {
    run_both(histories(), lets_go);
}

#[test]
fn shuttle_w6_expulsion_meets_death_and_the_seats_next_holder() {
    run_both(histories(), dies);
}

#[test]
fn shuttle_w6_relief_meets_the_seats_next_holder() {
    run_both(histories(), is_relieved);
}
