//! Threads of one member that pin the same slot.
//!
//! **Invariant:** the shared bit stays set while any of them holds a pin, and is clear when none
//! does.

use loom::thread;

use super::*;
use crate::{
    pins::{Pins, Release, is_unpinned},
    sync::AtomicU64,
};

#[derive(Clone)]
struct Shared(Arc<(Pins, [AtomicU64; 2])>);

impl Shared {
    fn new() -> Self {
        Self(Arc::new((Pins::new(0), Default::default())))
    }

    /// Pins and releases; the bit must be there in between.
    fn visit(&self) -> Release {
        let (pins, words) = &*self.0;
        pins.pin(0, 0, words);
        assert!(!is_unpinned(words), "pinned without a bit");
        let release = pins.unpin(0, 0, words);
        assert_ne!(release, Release::Nothing);
        release
    }

    fn assert_at_rest(&self) {
        let (pins, words) = &*self.0;
        assert_eq!((pins.further_pins(), is_unpinned(words)), (0, true));
    }
}

#[test]
fn loom_two_threads_share_a_bit() {
    explore(|| {
        let shared = Shared::new();
        let theirs = shared.clone();
        let thread = thread::spawn(move || [theirs.visit(), theirs.visit()]);
        let mine = shared.visit();
        let [_, last] = thread.join().unwrap();
        assert!(mine == Release::Last || last == Release::Last, "nobody was the last");
        shared.assert_at_rest();
    });
}

#[test]
fn loom_two_threads_of_a_member_meet_an_evictor() {
    explore(|| {
        let (control, memory) = (cache(1), Memory::new());
        let [a, b] = [pool(&control), pool(&control)];
        memory.use_key(&a, 1);
        let theirs = (memory.clone(), a.clone());
        let hitter = thread::spawn(move || theirs.0.use_key(&theirs.1, 1));
        let theirs = memory.clone();
        let evictor = thread::spawn(move || theirs.use_key(&b, 2));
        memory.use_key(&a, 1);
        hitter.join().unwrap();
        evictor.join().unwrap();
        assert_at_rest(&control);
    });
}
