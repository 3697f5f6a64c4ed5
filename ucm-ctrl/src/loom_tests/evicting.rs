//! Evictors against pinners, and the "full" flag.
//!
//! **Invariant:** who holds a pin keeps the key in its slot, and nothing but pins makes a cache
//! full.

use loom::thread;

use super::*;
use crate::Removal;

#[test]
fn loom_hit_meets_evict() {
    explore(|| {
        let (control, memory) = (cache(1), Memory::new());
        let [a, b] = [pool(&control), pool(&control)];
        memory.use_key(&a, 1);
        let theirs = memory.clone();
        let thread = thread::spawn(move || theirs.use_key(&b, 2));
        memory.use_key(&a, 1);
        thread.join().unwrap();
        assert_at_rest(&control);
    });
}

#[test]
fn loom_a_pin_keeps_its_key() {
    explore(|| {
        let control = cache(1);
        let [a, b] = [pool(&control), pool(&control)];
        load(&a, &key(1));
        let thread = thread::spawn(move || b.acquire(&key(2)).unwrap());
        let mine = a.acquire(&key(1)).unwrap();
        let theirs = thread.join().unwrap();
        match (&mine, &theirs) {
            (Acquired::Hit(_), Acquired::Full) => assert_eq!(resident(&control, &key(1)), 1),
            (Acquired::Full, Acquired::Owner(_)) => assert_eq!(resident(&control, &key(2)), 1),
            other => panic!("{other:?}"),
        }
        drop((mine, theirs));
        assert_at_rest(&control);
    });
}

#[test]
fn loom_c7_two_evictors_have_different_victims() {
    explore(|| {
        let (control, memory) = (cache(2), Memory::new());
        let [a, b] = [pool(&control), pool(&control)];
        load(&a, &key(1));
        load(&a, &key(2));
        let theirs = memory.clone();
        let thread = thread::spawn(move || {
            let fill = own(&a, &key(3));
            theirs.write(fill.slot(), 3);
            fill
        });
        let mine = own(&b, &key(4));
        memory.write(mine.slot(), 4);
        let theirs = thread.join().unwrap();
        assert_ne!(mine.slot(), theirs.slot());
        drop((mine, theirs));
        assert_at_rest(&control);
    });
}

#[test]
fn loom_c6_unpin_meets_full() {
    explore(|| {
        let control = cache(1);
        let [a, b] = [pool(&control), pool(&control)];
        let pin = own(&a, &key(1)).publish().unwrap();
        let thread = thread::spawn(move || drop(pin));
        drop(b.acquire(&key(2)).unwrap());
        thread.join().unwrap();
        // Nothing is pinned any more: nothing may be full.
        drop(own(&b, &key(3)));
        assert_at_rest(&control);
    });
}

#[test]
fn loom_c6_a_claim_given_back_meets_full() {
    explore(|| {
        let control = cache(1);
        let [a, b, c] = [pool(&control), pool(&control), pool(&control)];
        load(&a, &key(1));
        let tables = control.clone();
        let evictor = thread::spawn(move || {
            let tables = tables.region.pool(0).unwrap();
            let word = tables.slots[0].load();
            if word.phase().is_evictable() {
                assert!(!tables.evict(
                    &a.member,
                    a.member.control.region.hasher(),
                    0,
                    word,
                    || false
                ));
            }
        });
        drop(b.acquire(&key(2)).unwrap());
        evictor.join().unwrap();
        drop(own(&c, &key(3)));
        assert_at_rest(&control);
    });
}

#[test]
fn loom_remove_meets_hit() {
    explore(|| {
        let (control, memory) = (cache(1), Memory::new());
        let [a, b] = [pool(&control), pool(&control)];
        memory.use_key(&a, 1);
        let thread = thread::spawn(move || {
            let removed = b.remove(&key(1)).unwrap();
            // The slot is free: another key may have it.
            if removed == Removal::Removed {
                drop(b.acquire(&key(2)).unwrap());
            }
        });
        assert!(memory.use_key(&a, 1) || resident(&control, &key(1)) == 0);
        thread.join().unwrap();
        assert_at_rest(&control);
    });
}

/// A walk along a chain while its head leaves and comes back under another key, in the same chain
/// or in another bucket's.
#[test]
fn loom_a_chain_changes_under_a_reader() {
    for bucket in [0, 1] {
        explore(move || {
            let control = cache(4);
            let [a, b] = [pool(&control), pool(&control)];
            // First bucket: entry 1, chain 3 → 2; second bucket: entry 1.
            let there = [key(1), key(2), key_in(1, 1), key(3)];
            there.iter().for_each(|key| load(&a, key));
            let thread = thread::spawn(move || {
                assert_eq!(a.remove(&key(3)).unwrap(), Removal::Removed);
                drop(own(&a, &key_in(bucket, 9)));
            });
            assert_eq!(b.prefix_lookup(&[key(2)]).unwrap(), 1, "resident all the time");
            thread.join().unwrap();
            assert_at_rest(&control);
        });
    }
}

/// Whoever finds another key under its pin lets go; a search meanwhile may have met the pin.
#[test]
fn loom_c6_a_passing_pin_meets_full() {
    explore(|| {
        let control = cache(1);
        let [a, b] = [pool(&control), pool(&control)];
        load(&a, &key(1));
        let passing = thread::spawn(move || {
            let tables = a.tables().unwrap();
            let entered = a.enter(tables, 0, &tables.slots[0], &a.raw(&key(9)), true);
            assert!(entered.is_none());
        });
        drop(b.acquire(&key(2)).unwrap());
        passing.join().unwrap();
        drop(own(&b, &key(3)));
        assert_at_rest(&control);
    });
}

/// A second thread of a member relies on the first one's pin bit.
#[test]
fn loom_two_threads_of_a_member_meet_a_claim() {
    explore(|| {
        let (control, memory) = (cache(1), Memory::new());
        let [a, b] = [pool(&control), pool(&control)];
        memory.use_key(&a, 1);
        let threads = [a.clone(), a].map(|pool| {
            let memory = memory.clone();
            thread::spawn(move || {
                let tables = pool.tables().unwrap();
                let entered = pool.enter(tables, 0, &tables.slots[0], &pool.raw(&key(1)), true);
                if let Some(Acquired::Hit(pin)) = entered {
                    memory.check(&pin, 1);
                }
            })
        });
        let tables = b.tables().unwrap();
        let word = tables.slots[0].load();
        if tables.evict(&b.member, control.region.hasher(), 0, word, || true) {
            memory.write(SlotId(0), 2);
        }
        for thread in threads {
            thread.join().unwrap();
        }
    });
}
