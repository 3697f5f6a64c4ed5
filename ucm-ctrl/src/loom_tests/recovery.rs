//! Locks of the dead, ends that nobody was told of, and members expelled while they live.
//!
//! **Invariant:** the dead do nothing in these models; the expelled do.

use std::mem::ManuallyDrop;

use loom::thread;

use super::*;
use crate::{FillState, PublishError, WaitOutcome, bucket::Patience};

/// Locks a key's bucket in the name of a member that never unlocks it.
fn die_with_lock(control: &Control, member: &Member, key: &Key) {
    let pool = member.pool(PoolId(0)).unwrap();
    let tables = control.region.pool(0).unwrap();
    let locked = tables.lock(&pool.member, pool.raw(key).hashed, Patience::Enough);
    let _held = ManuallyDrop::new(locked.unwrap());
}

#[test]
fn loom_a01_a_dead_members_lock_is_taken_over() {
    explore(|| {
        let control = cache(2);
        let survivor = join(&control);
        let view = pool(&control);
        let dead = join(&control);
        die_with_lock(&control, &dead, &key(1));
        let id = dead.id();
        let thread = thread::spawn(move || assert_eq!(survivor.reap(id, None).locks, 1));
        load(&view, &key(1));
        thread.join().unwrap();
        assert_eq!(resident(&control, &key(1)), 1);
        assert_at_rest(&control);
        dead.inner.fence();
    });
}

/// The lock is free again and somebody else's by the time a second survivor looks at it.
#[test]
fn loom_a01_a_lock_is_broken_once() {
    explore(|| {
        let control = cache(2);
        let [a, b] = [join(&control), join(&control)];
        let (first, second) = (a.pool(PoolId(0)).unwrap(), b.pool(PoolId(0)).unwrap());
        let dead = join(&control);
        die_with_lock(&control, &dead, &key(1));
        let id = dead.id();
        let thread = thread::spawn(move || {
            let reaped = a.reap(id, None);
            drop(first.acquire(&key(1)).unwrap());
            reaped.locks
        });
        let mine = b.reap(id, None).locks;
        drop(second.acquire(&key(1)).unwrap());
        assert_eq!(thread.join().unwrap() + mine, 1);
        assert_eq!(resident(&control, &key(1)), 1);
        assert_at_rest(&control);
        dead.inner.fence();
    });
}

/// The owner died between the state and the wake-up.
#[test]
fn loom_d1_reap_tells_of_an_end_that_nobody_was_told_of() {
    explore(|| {
        let control = cache(1);
        let survivor = join(&control);
        let view = pool(&control);
        let dead = join(&control);
        let fill = ManuallyDrop::new(own(&dead.pool(PoolId(0)).unwrap(), &key(1)));
        let waiter = wait(&view, &key(1));
        let (id, theirs) = (dead.id(), control.clone());
        let thread = thread::spawn(move || {
            let slot = &theirs.region.pool(0).unwrap().slots[0];
            let word = slot.load();
            assert!(slot.change(word, word.to(Phase::Ready, None)));
            assert!(survivor.reap(id, None).done);
        });
        assert_eq!(waiter.wait(None), WaitOutcome::Ready);
        thread.join().unwrap();
        drop(waiter);
        assert_at_rest(&control);
        dead.inner.fence();
        drop(ManuallyDrop::into_inner(fill));
    });
}

#[test]
fn loom_w6_expulsion_meets_publish() {
    explore(|| {
        let (control, memory) = (cache(2), Memory::new());
        let operator = join(&control);
        let view = operator.pool(PoolId(0)).unwrap();
        let gone = join(&control);
        let fill = own(&gone.pool(PoolId(0)).unwrap(), &key(1));
        memory.write(fill.slot(), 1);
        let waiter = wait(&view, &key(1));
        let thread = thread::spawn(move || match fill.publish() {
            Ok(pin) => {
                drop(pin);
                true
            }
            Err(PublishError::Fenced) => false,
            Err(other) => panic!("{other:?}"),
        });
        assert!(operator.expel(gone.id(), gone.generation()).done);
        let outcome = waiter.wait(None);
        let published = thread.join().unwrap();
        match outcome {
            WaitOutcome::Ready => assert!(published),
            WaitOutcome::OwnerDied => assert!(!published),
            other => panic!("{other:?}"),
        }
        if let Ok(pin) = waiter.into_pin() {
            memory.check(&pin, 1);
        }
        drop(gone);
        if !published {
            load(&view, &key(1));
        }
        assert_eq!(resident(&control, &key(1)), 1);
        assert_at_rest(&control);
    });
}

/// The expelled member writes its slot all the while; the key is loaded into another.
#[test]
fn loom_w6_expulsion_hands_on_no_slot_that_may_be_written() {
    explore(|| {
        let (control, memory) = (cache(2), Memory::new());
        let operator = join(&control);
        let view = operator.pool(PoolId(0)).unwrap();
        let gone = join(&control);
        let fill = own(&gone.pool(PoolId(0)).unwrap(), &key(1));
        let theirs = memory.clone();
        let thread = thread::spawn(move || {
            theirs.write(fill.slot(), 7);
            drop(fill);
        });
        operator.expel(gone.id(), gone.generation());
        if let Acquired::Owner(fill) = view.acquire(&key(1)).unwrap() {
            memory.write(fill.slot(), 1);
            memory.check(&fill.publish().unwrap(), 1);
        }
        thread.join().unwrap();
        drop(gone);
        assert_at_rest(&control);
    });
}

/// A member that is expelled while it takes a key: whatever it gets, it cannot make it ready.
#[test]
fn loom_w6_expulsion_meets_acquire() {
    explore(|| {
        let control = cache(1);
        let operator = join(&control);
        let view = operator.pool(PoolId(0)).unwrap();
        let gone = join(&control);
        let theirs = gone.pool(PoolId(0)).unwrap();
        let thread = thread::spawn(move || match theirs.acquire(&key(1)) {
            Ok(Acquired::Owner(fill)) => Some(fill),
            _ => None,
        });
        operator.expel(gone.id(), gone.generation());
        let fill = thread.join().unwrap();
        if let Some(fill) = fill {
            assert!(matches!(fill.publish(), Err(PublishError::Fenced)));
        }
        drop(gone);
        load(&view, &key(1));
        assert_at_rest(&control);
    });
}

/// The expelled lets go of its fill while the operator takes it.
#[test]
fn loom_w6_expulsion_meets_failure() {
    explore(|| {
        let control = cache(1);
        let operator = join(&control);
        let view = operator.pool(PoolId(0)).unwrap();
        let gone = join(&control);
        let fill = own(&gone.pool(PoolId(0)).unwrap(), &key(1));
        let waiter = wait(&view, &key(1));
        let thread = thread::spawn(move || drop(fill));
        operator.expel(gone.id(), gone.generation());
        assert_ne!(waiter.wait(None), WaitOutcome::Ready);
        assert!(matches!(waiter.state(), FillState::OwnerDied | FillState::Failed(_)));
        thread.join().unwrap();
        drop((waiter, gone));
        load(&view, &key(1));
        assert_at_rest(&control);
    });
}

/// Two consumers of a lease while its holder's record is ended, and the next holder's after that.
/// Mutants: a record is taken by a store; consumed without a look at its generation; ended by one try.
#[test]
fn loom_s3_consumers_meet_the_holders_death() {
    explore(|| {
        let record = Arc::new(crate::layout::LeaseRecord::default());
        let first = record.take(1, 2).unwrap();
        let consumers = [(); 2].map(|()| {
            let record = record.clone();
            thread::spawn(move || record.consume(first).map(|word| word.left()))
        });
        record.retire(|word| word.holder() == 1);
        let second = record.take(2, 1).unwrap();
        let consumed = consumers.map(|consumer| consumer.join().unwrap());
        assert!(consumed[0].is_none() || consumed[0] != consumed[1], "{consumed:?}");
        assert_eq!((record.load().holder(), record.load().left()), (2, 1), "{consumed:?}");
        assert!(record.load().is_live() && second != first);
        assert_eq!(record.consume(second).map(|word| word.left()), Some(0));
        assert!(record.consume(second).is_none());
    });
}

/// One record, two members that want it.
#[test]
fn loom_s3_a_record_is_taken_once() {
    explore(|| {
        let record = Arc::new(crate::layout::LeaseRecord::default());
        let other = record.clone();
        let theirs = thread::spawn(move || other.take(2, 1));
        let mine = record.take(1, 1);
        let theirs = theirs.join().unwrap();
        assert!(mine.is_some() != theirs.is_some(), "{mine:?} {theirs:?}");
        assert_eq!(record.load().holder(), if mine.is_some() { 1 } else { 2 });
    });
}
