//! Bytes become readable by publishing only, and a slot that may be written is nobody's.
//!
//! **Invariant:** all memory here is in loom cells.

use loom::thread;

use super::*;
use crate::FailKind;

#[test]
fn loom_bytes_are_visible_with_the_state() {
    explore(|| {
        let (control, memory) = (cache(1), Memory::new());
        let [a, b] = [pool(&control), pool(&control)];
        let fill = own(&a, &key(1));
        let theirs = memory.clone();
        let thread = thread::spawn(move || {
            theirs.write(fill.slot(), 1);
            drop(fill.publish().unwrap());
        });
        assert!(memory.use_key(&b, 1));
        thread.join().unwrap();
        assert_at_rest(&control);
    });
}

#[test]
fn loom_acquire_and_publish_meet_acquire() {
    explore(|| {
        let (control, memory) = (cache(1), Memory::new());
        let [a, b] = [pool(&control), pool(&control)];
        let theirs = memory.clone();
        let thread = thread::spawn(move || theirs.use_key(&a, 1));
        let mine = memory.use_key(&b, 1);
        // With a single slot one of them may find it in the other's hands.
        assert!(thread.join().unwrap() || mine);
        assert!(memory.use_key(&b, 1));
        assert_at_rest(&control);
    });
}

/// The fill fails or drains while its operation ends; whoever gets the slot next may write it.
#[test]
fn loom_quarantine_lasts_until_the_last_write() {
    explore(|| {
        let (control, memory) = (cache(1), Memory::new());
        let [a, b] = [pool(&control), pool(&control)];
        let fill = own(&a, &key(1));
        let (slot, token) = (fill.slot(), fill.start_io());
        let theirs = memory.clone();
        let io = thread::spawn(move || {
            theirs.write(slot, 9);
            drop(token);
        });
        fill.fail(FailKind::Deadline);
        // Absent or failed: either way the slot is only had when the operation has ended.
        if let Acquired::Owner(fill) = b.acquire(&key(1)).unwrap() {
            memory.write(fill.slot(), 1);
        }
        io.join().unwrap();
        assert!(matches!(phase(&control, 0), Phase::Free | Phase::Failed));
        assert_at_rest(&control);
    });
}

#[test]
fn loom_publish_is_refused_or_sees_all_writes() {
    explore(|| {
        let (control, memory) = (cache(1), Memory::new());
        let a = pool(&control);
        let fill = own(&a, &key(1));
        let (slot, token) = (fill.slot(), fill.start_io());
        let theirs = memory.clone();
        let io = thread::spawn(move || {
            theirs.write(slot, 1);
            drop(token);
        });
        match fill.publish() {
            Ok(pin) => memory.check(&pin, 1),
            Err(crate::PublishError::IoInFlight(fill)) => drop(fill),
            Err(other) => panic!("{other:?}"),
        }
        io.join().unwrap();
        assert_at_rest(&control);
    });
}

#[test]
fn loom_a_draining_slot_is_not_taken_while_a_waiter_pins_it() {
    explore(|| {
        let control = cache(1);
        let [a, b] = [pool(&control), pool(&control)];
        let fill = own(&a, &key(1));
        let waiter = wait(&b, &key(1));
        let thread = thread::spawn(move || fill.abandon_draining(FailKind::Deadline));
        let state = waiter.state();
        assert!(matches!(b.acquire(&key(2)).unwrap(), Acquired::Full), "{state:?}");
        thread.join().unwrap();
        drop(waiter);
        drop(own(&b, &key(2)));
        assert_at_rest(&control);
    });
}
