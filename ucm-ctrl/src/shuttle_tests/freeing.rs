//! Slots become free while others look for one.
//!
//! **Invariant:** a free slot whose hint nobody took is found by the next search.
//!
//! Broken on purpose, and found: only the lowest cleared bit is set again.

use shuttle::thread;

use super::{histories, run_both};
use crate::{
    freemap::{set, take},
    sync::{Arc, AtomicU64},
};

/// One slot is hinted; two search and a third is freed beside it.
fn search_meets_release() {
    let words: Arc<[AtomicU64; 3]> = Arc::new([0; 3].map(AtomicU64::new));
    let map = |words: &[AtomicU64; 3], act: &dyn Fn(crate::freemap::FreeMap<'_>)| {
        act(words.each_ref().map(std::slice::from_ref));
    };
    map(&words, &|map| set(map, 0));
    let found = Arc::new(AtomicU64::new(0));
    let search = |words: &Arc<[AtomicU64; 3]>| {
        let (words, found) = (words.clone(), found.clone());
        thread::spawn(move || {
            map(&words, &|map| {
                let claim = |slot: u32| {
                    let bit = 1 << slot;
                    found.fetch_or(bit, crate::sync::Ordering::SeqCst) & bit == 0
                };
                let _ = take(map, claim);
            });
        })
    };
    let searches = [search(&words), search(&words)];
    map(&words, &|map| set(map, 1));
    for search in searches {
        search.join().unwrap();
    }
    if found.load(crate::sync::Ordering::SeqCst) & 2 == 0 {
        map(&words, &|map| assert_eq!(take(map, |slot| slot == 1), Some(1), "a free slot is lost"));
    }
}

#[test]
fn shuttle_a_free_slot_stays_findable() {
    run_both(histories(), search_meets_release);
}
