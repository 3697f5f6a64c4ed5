//! Who fills what: exactly one.
//!
//! **Invariant:** handles are kept until all threads have theirs.

use loom::thread;

use super::*;
use crate::{FailKind, Prealloc};

/// Both threads acquire the key; returns what they got, owners first.
fn both(a: Pool, b: Pool, block: u64) -> [Acquired; 2] {
    let thread = thread::spawn(move || a.acquire(&key(block)).unwrap());
    let mine = b.acquire(&key(block)).unwrap();
    let theirs = thread.join().unwrap();
    if matches!(mine, Acquired::Owner(_)) { [mine, theirs] } else { [theirs, mine] }
}

#[test]
fn loom_two_acquires_of_an_absent_key_make_one_owner() {
    explore(|| {
        let control = cache(2);
        let got = both(pool(&control), pool(&control), 1);
        assert!(matches!(got, [Acquired::Owner(_), Acquired::Waiter(_)]), "{got:?}");
        assert_eq!(resident(&control, &key(1)), 1);
        drop(got);
        assert_at_rest(&control);
    });
}

#[test]
fn loom_two_acquires_with_one_slot_make_one_owner() {
    explore(|| {
        let control = cache(1);
        let [owner, other] = both(pool(&control), pool(&control), 1);
        assert!(matches!(owner, Acquired::Owner(_)), "{owner:?}");
        // The only slot is in the owner's hands, but not under its key yet: the cache is full.
        assert!(matches!(other, Acquired::Waiter(_) | Acquired::Full), "{other:?}");
        drop((owner, other));
        assert_at_rest(&control);
    });
}

#[test]
fn loom_takeover_of_a_failed_fill_has_one_winner() {
    explore(|| {
        let control = cache(1);
        let [a, b] = [pool(&control), pool(&control)];
        own(&a, &key(1)).fail(FailKind::Io);
        let got = both(a, b, 1);
        assert!(matches!(got, [Acquired::Owner(_), Acquired::Waiter(_)]), "{got:?}");
        drop(got);
        assert_at_rest(&control);
    });
}

#[test]
fn loom_takeover_by_two_threads_of_a_member_has_one_winner() {
    explore(|| {
        let control = cache(1);
        let a = pool(&control);
        own(&a, &key(1)).fail(FailKind::Io);
        let got = both(a.clone(), a, 1);
        assert!(matches!(got, [Acquired::Owner(_), Acquired::Waiter(_)]), "{got:?}");
        drop(got);
        assert_at_rest(&control);
    });
}

#[test]
fn loom_takeover_meets_failure() {
    explore(|| {
        let control = cache(1);
        let [a, b] = [pool(&control), pool(&control)];
        let fill = own(&a, &key(1));
        let thread = thread::spawn(move || fill.fail(FailKind::Io));
        let got = b.acquire(&key(1)).unwrap();
        assert!(matches!(got, Acquired::Owner(_) | Acquired::Waiter(_)), "{got:?}");
        thread.join().unwrap();
        drop(got);
        assert_at_rest(&control);
    });
}

#[test]
fn loom_p3_prealloc_meets_acquire() {
    explore(|| {
        let control = cache(2);
        let [a, b] = [pool(&control), pool(&control)];
        let thread = thread::spawn(move || a.prealloc(&key(1)).unwrap());
        let fill = own(&b, &key(1));
        let made = thread.join().unwrap();
        assert!(matches!(made, Prealloc::Made | Prealloc::Resident));
        assert_eq!(resident(&control, &key(1)), 1);
        drop(fill);
        assert_at_rest(&control);
    });
}

#[test]
fn loom_c6_prealloc_leaves_no_full_flag() {
    explore(|| {
        let control = cache(1);
        let [a, b] = [pool(&control), pool(&control)];
        let thread = thread::spawn(move || a.prealloc(&key(1)).unwrap());
        // Full while the slot is in the other's hands; never afterwards.
        drop(b.acquire(&key(2)).unwrap());
        thread.join().unwrap();
        drop(own(&b, &key(3)));
        assert_at_rest(&control);
    });
}
