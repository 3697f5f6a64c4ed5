//! G: ranges, and nothing but what was asked for.
//!
//! Mutants, each seen to fail a test of this program: rounds of the arena are not cut; what lies in the pages behind a
//! range is fetched, too (the length of the object where that of a span belongs).

use proptest::prelude::*;
use ucm_remote::{ByteRange, GetOutcome};

use crate::kit::{
    PAGE, POISON, Setup, bytes, content, directory, each_way, idle, range, soon, touched,
};

/// A medium in which an object of two pages has no place.
const SMALL: u64 = 1;

#[test]
fn g1_requested_bytes_only() {
    each_way(|way| {
        let directory = directory();
        let owner = Setup::new("owner", 8).start(&directory);
        let reader = Setup::new("reader", 8).with(|b| b.prefetch(false)).start(&directory);
        reader.reach(&owner, way);
        owner.publish(&directory, 1, 0, 8192);
        let outcome = reader.get(1, 0, 8192, &[range(200, 900), range(5000, 700)]);
        assert_eq!(outcome, GetOutcome::Remote);
        assert_eq!(reader.agent.stats().wire_bytes, 1600);
        assert_eq!(touched(&reader.memory), 1600, "the rest of the slot is as it was");
        assert_eq!(touched(&reader.arena), 0);
        assert!(!reader.is_resident(1));
        // The same without a slot: packed back to back.
        let small = Setup::new("small", SMALL).start(&directory);
        small.reach(&owner, way);
        assert_eq!(small.get(1, 0, 8192, &[range(200, 900), range(5000, 700)]), GetOutcome::Remote);
        assert_eq!(small.agent.stats().wire_bytes, 1600);
        let arena = content(&small.arena);
        assert_eq!(arena[..900], bytes(1, 0, range(200, 900)));
        assert_eq!(arena[900..1600], bytes(1, 0, range(5000, 700)));
        assert!(arena[1600..].iter().all(|byte| *byte == POISON));
        idle(&reader);
        idle(&small);
        idle(&owner);
    });
}

#[test]
fn g2_page_crossing_and_short_tail() {
    each_way(|way| {
        for pages in [8, SMALL] {
            let directory = directory();
            let owner = Setup::new("owner", 8).start(&directory);
            let reader = Setup::new("reader", pages).with(|b| b.prefetch(false)).start(&directory);
            reader.reach(&owner, way);
            owner.publish(&directory, 1, 0, 5096);
            let ranges = [range(3700, 800), range(4696, 400)];
            assert_eq!(reader.get(1, 0, 5096, &ranges), GetOutcome::Remote);
            assert_eq!(reader.agent.stats().wire_bytes, 1200);
            assert_eq!(touched(&reader.memory) + touched(&reader.arena), 1200);
        }
    });
}

#[test]
fn g3_keys_by_layer_groups() {
    each_way(|way| {
        for prefetch in [false, true] {
            let directory = directory();
            let owner = Setup::new("owner", 16).start(&directory);
            let reader =
                Setup::new("reader", 16).with(move |b| b.prefetch(prefetch)).start(&directory);
            reader.reach(&owner, way);
            (1..=3).for_each(|number| owner.publish(&directory, number, 0, 8192));
            for group in 0..8 {
                let readings: Vec<_> = (1..=3)
                    .map(|n| reader.reading(n, 8192, &[range(group * 1024, 1024)]))
                    .collect();
                let outcomes = reader.read(&readings, soon());
                assert!(outcomes.iter().all(|o| o.is_served()), "{outcomes:?}");
                readings.iter().zip(1..).for_each(|(reading, n)| reading.check(n, 0));
            }
            assert!((1..=3).all(|number| reader.is_resident(number)));
            let stats = reader.agent.stats();
            assert_eq!(stats.wire_bytes, 3 * 8192);
            assert_eq!(stats.route_calls, 1, "later groups are not looked for again");
            idle(&reader);
        }
    });
}

#[test]
fn g4_more_than_the_arena_in_rounds() {
    each_way(|way| {
        let directory = directory();
        let owner = Setup::new("owner", 8).start(&directory);
        let reader = Setup::new("reader", SMALL).start(&directory);
        reader.reach(&owner, way);
        owner.publish(&directory, 1, 0, 20_480);
        let ranges = [range(0, 4000), range(8000, 4000), range(16_000, 4000)];
        assert_eq!(reader.get(1, 0, 20_480, &ranges), GetOutcome::Remote);
        let stats = reader.agent.stats();
        assert_eq!((stats.wire_bytes, stats.arena_bytes), (12_000, 12_000));
        assert_eq!(stats.remote_calls, 2, "two rounds");
        idle(&reader);
    });
}

#[test]
fn g5_a_range_larger_than_the_arena_is_refused_whole() {
    each_way(|way| {
        let directory = directory();
        let owner = Setup::new("owner", 16).start(&directory);
        let reader = Setup::new("reader", SMALL).start(&directory);
        reader.reach(&owner, way);
        owner.publish(&directory, 1, 0, 20_480);
        owner.publish(&directory, 2, 0, 8192);
        let large = [range(0, 5000), range(5000, 5000), range(10_000, 10_480)];
        let readings =
            [reader.reading(1, 20_480, &large), reader.reading(2, 8192, &[range(100, 8000)])];
        let outcomes = reader.read(&readings, soon());
        assert_eq!(outcomes, [GetOutcome::TooLarge, GetOutcome::Remote]);
        assert!(readings[0].is_untouched());
        readings[1].check(2, 0);
        assert_eq!(reader.agent.stats().wire_bytes, 8000);
        idle(&reader);
    });
}

#[test]
fn g6_an_object_larger_than_the_arena_in_chunks() {
    each_way(|way| {
        let directory = directory();
        let owner = Setup::new("owner", 8).start(&directory);
        let reader = Setup::new("reader", SMALL).start(&directory);
        reader.reach(&owner, way);
        owner.publish(&directory, 1, 0, 20_480);
        let ranges: Vec<ByteRange> = (0..5).map(|i| range(i * 4096, 4096)).collect();
        assert_eq!(reader.get(1, 0, 20_480, &ranges), GetOutcome::Remote);
        let stats = reader.agent.stats();
        assert_eq!((stats.wire_bytes, stats.remote_calls), (20_480, 3));
        idle(&reader);
    });
}

#[test]
fn g7_one_past_the_end_touches_nothing() {
    each_way(|way| {
        let directory = directory();
        let owner = Setup::new("owner", 8).start(&directory);
        let reader = Setup::new("reader", 8).with(|b| b.prefetch(false)).start(&directory);
        reader.reach(&owner, way);
        owner.publish(&directory, 1, 0, 8192);
        owner.publish(&directory, 2, 0, 8192);
        for bad in [
            vec![range(0, 10), range(8191, 2)],
            vec![],
            vec![range(5, 0)],
            vec![range(0, 10), range(9, 2)],
            vec![range(u64::MAX, 2)],
        ] {
            let readings =
                [reader.reading(1, 8192, &bad), reader.reading(2, 8192, &[range(0, 100)])];
            let outcomes = reader.read(&readings, soon());
            assert_eq!(outcomes[0], GetOutcome::Invalid, "{bad:?}");
            assert!(outcomes[1].is_served());
            assert!(readings[0].is_untouched());
            readings[1].check(2, 0);
        }
        assert_eq!(reader.agent.stats().wire_bytes, 100, "bad ranges are never sent");
    });
}

#[test]
fn g8_exactly_the_arena_is_one_round() {
    each_way(|way| {
        let directory = directory();
        let owner = Setup::new("owner", 8).start(&directory);
        owner.publish(&directory, 1, 0, 8193);
        for (len, rounds) in [(8191, 1), (8192, 1), (8193, 0)] {
            let reader = Setup::new("reader", SMALL).start(&directory);
            reader.reach(&owner, way);
            let outcome = reader.get(1, 0, 8193, &[range(0, len)]);
            let want = if rounds == 0 { GetOutcome::TooLarge } else { GetOutcome::Remote };
            assert_eq!((outcome, reader.agent.stats().remote_calls), (want, rounds));
        }
        let reader = Setup::new("reader", SMALL).start(&directory);
        reader.reach(&owner, way);
        let edges = [range(1, 4095), range(4096, 4097)];
        assert_eq!(reader.get(1, 0, 8193, &edges), GetOutcome::Remote);
        assert_eq!(reader.agent.stats().remote_calls, 1);
        let over = [range(0, 4096), range(4096, 4097)];
        assert_eq!(reader.get(1, 0, 8193, &over), GetOutcome::Remote);
        assert_eq!(reader.agent.stats().remote_calls, 3);
        idle(&reader);
    });
}

#[test]
fn g9_one_key_twice_in_a_batch() {
    each_way(|way| {
        for pages in [8, SMALL] {
            let directory = directory();
            let owner = Setup::new("owner", 8).start(&directory);
            let reader = Setup::new("reader", pages).with(|b| b.prefetch(false)).start(&directory);
            reader.reach(&owner, way);
            owner.publish(&directory, 1, 0, 8192);
            let ranges = [[range(0, 5000)], [range(3000, 5000)]];
            let readings =
                [reader.reading(1, 8192, &ranges[0]), reader.reading(1, 8192, &ranges[1])];
            let outcomes = reader.read(&readings, soon());
            assert!(outcomes.iter().all(|o| o.is_served()), "{outcomes:?}");
            readings.iter().for_each(|reading| reading.check(1, 0));
            if pages > SMALL {
                assert_eq!(reader.agent.stats().wire_bytes, 8000, "what both want comes once");
            }
            idle(&reader);
        }
    });
}

/// Cuts of an object in some order, perhaps with gaps.
fn cuts(len: u64) -> impl Strategy<Value = Vec<ByteRange>> {
    let edges = prop::collection::btree_set(1..len, 1..12);
    (edges, any::<u64>()).prop_map(move |(edges, seed)| {
        let mut ranges = Vec::new();
        let mut from = 0;
        for edge in edges.into_iter().chain([len]) {
            ranges.push(range(from, edge - from));
            from = edge;
        }
        let mut state = seed | 1;
        let mut next = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        ranges.retain(|_| next() % 4 != 0);
        for i in (1..ranges.len()).rev() {
            let j = usize::try_from(next() % (i as u64 + 1)).unwrap();
            ranges.swap(i, j);
        }
        ranges
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// G9: any cuts in any order, into a slot and through the arena, are the object's bytes in the
    /// caller's order, and move exactly what was asked for.
    #[test]
    fn g9_any_cuts_in_any_order(
        all in prop::collection::vec(cuts(20_000), 1..4),
    ) {
        let directory = directory();
        let owner = Setup::new("owner", 8).start(&directory);
        let slots = Setup::new("slots", 16).with(|b| b.prefetch(false)).start(&directory);
        let arena = Setup { arena: 5 * PAGE, ..Setup::new("arena", SMALL) }.start(&directory);
        owner.publish(&directory, 1, 7, 20_000);
        let mut seen = vec![false; 20_000];
        let mut packed = 0;
        for ranges in all.iter().filter(|ranges| !ranges.is_empty()) {
            prop_assert!(slots.get(1, 7, 20_000, ranges).is_served());
            prop_assert!(arena.get(1, 7, 20_000, ranges).is_served());
            for r in ranges {
                packed += r.len;
                let from = usize::try_from(r.offset).unwrap();
                seen[from..from + usize::try_from(r.len).unwrap()].fill(true);
            }
        }
        let moved = seen.iter().filter(|byte| **byte).count() as u64;
        prop_assert_eq!(slots.agent.stats().wire_bytes, moved);
        prop_assert_eq!(arena.agent.stats().wire_bytes, packed);
    }
}
