//! D11: other members write nonsense into the region.
//!
//! **Invariant:** every test here also runs the consistency walk over the damage.

use std::path::Path;

use proptest::prelude::*;

use super::kit::*;
use crate::{Phase, PoolId, Presence, sync::Ordering, testing::abuse};

/// The scripts that the fuzzer kept, and those that once found something.
#[test]
fn d11_the_corpus_of_the_fuzzer_is_harmless() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/region");
    let mut scripts = 0;
    for entry in std::fs::read_dir(&corpus).unwrap() {
        let script = std::fs::read(entry.unwrap().path()).unwrap();
        abuse(&script).unwrap();
        scripts += 1;
    }
    assert!(scripts > 0, "no scripts in {}", corpus.display());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn d11_random_scripts_of_writes_and_calls_end(script in prop::collection::vec(any::<u8>(), 0..600)) {
        abuse(&script).unwrap();
    }
}

/// A chain that is a ring, or leads out of the table, is cut by the next insertion; what was behind
/// the cut can be evicted.
#[test]
fn d11_damaged_chains_are_cut() {
    for damage in [1, 3, 7, 8, 9, 1000, u32::MAX] {
        let control = narrow(geometry(10, 0, 1), 0);
        let pool = pool(&control);
        (0..10).for_each(|k| {
            load(&pool, &key(k));
        });
        let bucket = &tables(&control).buckets[0];
        let first = bucket.overflow.load(Ordering::SeqCst);
        assert_ne!(first, 0, "ten keys do not fit into six entries");
        tables(&control).slots[first as usize - 1].next.store(damage, Ordering::SeqCst);
        assert!(control.inspect().problems.len() <= 20);
        // Neither readers nor inserters walk for ever.
        let keys: Vec<_> = (0..40).map(key).collect();
        pool.lookup(&keys, &mut [Presence::Absent; 40]).unwrap();
        (20..30).for_each(|k| {
            load(&pool, &key(k));
        });
        assert!(damage < 11 || control.statistics().corruptions > 0, "{damage}");
        assert_at_rest(&control);
    }
}

#[test]
fn d11_entries_that_name_no_slot_are_removed() {
    let control = narrow(geometry(4, 0, 1), 0);
    let pool = pool(&control);
    let bucket = &tables(&control).buckets[0];
    for (i, entry) in bucket.entries.iter().enumerate() {
        let tag = pool.raw(&key(1)).hashed.tag;
        entry.store(u64::from(tag) << 32 | (5 + i as u64 * 1000), Ordering::SeqCst);
    }
    assert_eq!(control.inspect().problems.len(), 6);
    load(&pool, &key(1));
    drop(hit(&pool, &key(1)));
    assert_eq!(control.statistics().corruptions, 6);
    assert_at_rest(&control);
}

/// A slot in an impossible state is out of use; everything else goes on.
#[test]
fn d11_impossible_states_are_left_alone() {
    let control = cache(2);
    let pool = pool(&control);
    load(&pool, &key(1));
    let slot = &tables(&control).slots[0];
    let word = slot.word.load(Ordering::SeqCst);
    assert_ne!(word, 0);
    slot.word.store(word | 15, Ordering::SeqCst);
    assert_eq!(phase(&control, 0), Phase::Invalid);
    for k in 1..20 {
        assert_eq!(load(&pool, &key(k)), 1);
    }
    let problems = control.inspect().problems;
    assert!(problems.iter().any(|p| p.contains("impossible state")), "{problems:?}");
}

/// A record that says something impossible fences its member, and can be cleared up after.
#[test]
fn d11_a_damaged_member_record_fences_its_member_only() {
    let control = cache(2);
    let survivor = rank(&control);
    let damaged = rank(&control);
    let theirs = damaged.pool(PoolId(0)).unwrap();
    let pin = own(&theirs, &key(1)).publish().unwrap();
    control.region.member(damaged.id().0).unwrap().word.store(u64::MAX, Ordering::SeqCst);
    assert!(theirs.acquire(&key(1)).is_err());
    drop(pin);
    drop(hit(&survivor.pool(PoolId(0)).unwrap(), &key(1)));
    drop((theirs, damaged));
    assert!(survivor.reap(crate::MemberId(1), None).done);
    assert_eq!(control.inspect().members.len(), 1);
}
