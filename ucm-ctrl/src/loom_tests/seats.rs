//! Members come, go and are cleared up after.
//!
//! **Invariant:** a seat has one holder, and one reaper.

use loom::thread;

use super::*;
use crate::{FillState, WaitOutcome};

#[test]
fn loom_two_joins_have_two_seats() {
    explore(|| {
        let control = cache(1);
        let theirs = control.clone();
        let thread = thread::spawn(move || join(&theirs));
        let mine = join(&control);
        assert_ne!(mine.id(), thread.join().unwrap().id());
    });
}

#[test]
fn loom_leave_meets_join() {
    explore(|| {
        let control = cache(1);
        let first = join(&control);
        let (seat, generation) = (first.id(), first.generation());
        let thread = thread::spawn(move || drop(first));
        let second = join(&control);
        if second.id() == seat {
            assert_eq!(second.generation(), generation + 1);
        }
        thread.join().unwrap();
        assert_eq!(control.inspect().members.len(), 1);
    });
}

#[test]
fn loom_two_reapers_meet() {
    explore(|| {
        let control = cache(1);
        let [a, b] = [join(&control), join(&control)];
        let dead = join(&control);
        let id = dead.id();
        let fill = own(&dead.pool(PoolId(0)).unwrap(), &key(1));
        let thread = thread::spawn(move || a.reap(id, None).done);
        let mine = b.reap(id, None).done;
        let theirs = thread.join().unwrap();
        assert!(mine != theirs, "one does the work");
        let pool = b.pool(PoolId(0)).unwrap();
        drop(own(&pool, &key(1)));
        assert_at_rest(&control);
        bury(dead, fill);
    });
}

/// A slow reaper must not clear the pins of the seat's next holder.
#[test]
fn loom_the_seats_next_holder_is_left_alone() {
    explore(|| {
        let control = cache(1);
        let [a, b] = [join(&control), join(&control)];
        let dead = join(&control);
        let (id, stay) = (dead.id(), Some(dead.generation()));
        let fill = own(&dead.pool(PoolId(0)).unwrap(), &key(1));
        let thread = thread::spawn(move || a.reap(id, stay).done);
        let next = b.reap(id, stay).done.then(|| {
            let next = control.join_at(id, MemberSpec::rank(0, 1)).unwrap();
            own(&next.pool(PoolId(0)).unwrap(), &key(1))
        });
        thread.join().unwrap();
        if let Some(fill) = next {
            drop(fill.publish().unwrap());
        }
        assert_at_rest(&control);
        bury(dead, fill);
    });
}

#[test]
fn loom_d3_a_waiter_hears_of_the_owners_death() {
    explore(|| {
        let control = cache(1);
        let survivor = join(&control);
        let view = pool(&control);
        let dead = join(&control);
        let id = dead.id();
        let fill = own(&dead.pool(PoolId(0)).unwrap(), &key(1));
        let waiter = wait(&view, &key(1));
        let thread = thread::spawn(move || assert!(survivor.reap(id, None).done));
        assert_eq!(waiter.wait(None), WaitOutcome::OwnerDied);
        assert_eq!(waiter.state(), FillState::OwnerDied);
        thread.join().unwrap();
        drop(waiter);
        assert_at_rest(&control);
        bury(dead, fill);
    });
}

/// Drops what a dead process would never have dropped: without any effect on the cache.
fn bury(dead: Member, fill: Fill) {
    dead.inner.fence();
    drop((dead, fill));
}
