//! The planner against a byte map.
//!
//! **Invariant:** the oracle shares no code with the planner.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::Addr;

const REGION_LEN: u64 = 96;

fn id(index: u32) -> RegionId {
    RegionId { index, generation: 7 }
}

/// Regions 0..4 on host, 4..6 on CUDA; everything else is unknown.
fn regions(r: RegionId) -> Option<RegionInfo> {
    let location = match r.index {
        0..4 => Location::Host,
        4..6 => Location::Cuda(0),
        _ => return None,
    };
    (r.generation == 7).then_some(RegionInfo { len: REGION_LEN, location })
}

fn any_pair(_: Location, _: Location) -> bool {
    true
}

fn item(src: (u32, u64), dst: (u32, u64), len: u64) -> Transfer {
    Transfer {
        src: Addr { region: id(src.0), offset: src.1 },
        dst: Addr { region: id(dst.0), offset: dst.1 },
        len,
    }
}

type ByteMap = BTreeMap<(RegionId, u64), (RegionId, u64)>;

/// Destination byte → source byte, or `None` when a destination is written twice.
fn byte_map(items: &[Transfer]) -> Option<ByteMap> {
    let mut map = ByteMap::new();
    for t in items {
        for i in 0..t.len {
            let src = (t.src.region, t.src.offset + i);
            if map.insert((t.dst.region, t.dst.offset + i), src).is_some() {
                return None;
            }
        }
    }
    Some(map)
}

fn reads_what_it_writes(map: &ByteMap) -> bool {
    map.values().any(|src| map.contains_key(src))
}

fn kind_of(items: &[Transfer]) -> ErrorKind {
    plan(items, PlanLimits::NONE, regions, any_pair).unwrap_err().kind()
}

fn arbitrary_items() -> impl Strategy<Value = Vec<Transfer>> {
    let one = (0u32..3, 0u64..80, 2u32..6, 0u64..80, 1u64..16)
        .prop_map(|(a, ao, b, bo, len)| item((a, ao), (b, bo), len));
    prop::collection::vec(one, 0..10)
}

/// Pieces of long runs, shuffled, so that merging has something to do (also with fan-out).
fn broken_runs() -> impl Strategy<Value = Vec<Transfer>> {
    let cuts = prop::collection::vec(1u64..8, 1..12);
    (cuts, 0u64..20, prop::bool::ANY, any::<u64>()).prop_map(|(cuts, start, fan_out, seed)| {
        let mut items = Vec::new();
        let mut at = start;
        for len in cuts {
            if at + len > REGION_LEN {
                break;
            }
            items.push(item((0, at), (4, at), len));
            if fan_out {
                items.push(item((0, at), (5, at - start), len));
            }
            at += len;
        }
        // A cheap, seeded shuffle.
        let mut state = seed | 1;
        for i in (1..items.len()).rev() {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            items.swap(i, (state >> 33) as usize % (i + 1));
        }
        items
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn moves_exactly_the_bytes_asked_for(
        items in prop_oneof![arbitrary_items(), broken_runs()],
        max_item_bytes in 1u64..40,
        max_group_items in 1usize..5,
        sort in any::<bool>(),
    ) {
        let limits = PlanLimits { max_item_bytes, max_group_items, sort };
        let planned = plan(&items, limits, regions, any_pair);
        match byte_map(&items) {
            Some(map) if !reads_what_it_writes(&map) => {
                let planned = planned.unwrap();
                prop_assert_eq!(byte_map(&planned.items), Some(map));
                prop_assert_eq!(planned.bytes, items.iter().map(|t| t.len).sum::<u64>());
                prop_assert!(planned.items.iter().all(|t| t.len >= 1 && t.len <= max_item_bytes));
                // Groups cover all items in order, within their limit, and name the right pair.
                let mut next = 0;
                for g in &planned.groups {
                    prop_assert_eq!(g.items.start, next);
                    prop_assert!(!g.items.is_empty() && g.items.len() <= max_group_items);
                    for t in &planned.items[g.items.clone()] {
                        prop_assert_eq!(regions(t.src.region).unwrap().location, g.src);
                        prop_assert_eq!(regions(t.dst.region).unwrap().location, g.dst);
                    }
                    next = g.items.end;
                }
                prop_assert_eq!(next, planned.items.len());
                let named = items.iter().flat_map(|t| [t.src.region, t.dst.region]);
                prop_assert_eq!(planned.regions, named.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>());
            }
            _ => prop_assert_eq!(planned.unwrap_err().kind(), ErrorKind::Invalid),
        }
    }

    #[test]
    fn merges_all_that_can_be_merged(items in broken_runs()) {
        let planned = plan(&items, PlanLimits::NONE, regions, any_pair).unwrap();
        let mergeable = planned.items.iter().any(|a| planned.items.iter().any(|b| {
            a.src.region == b.src.region && a.dst.region == b.dst.region
                && a.src.offset + a.len == b.src.offset && a.dst.offset + a.len == b.dst.offset
        }));
        prop_assert!(!mergeable, "{:?}", planned.items);
        let pairs = 1 + usize::from(items.iter().any(|t| t.dst.region == id(5)));
        prop_assert_eq!(planned.items.len(), pairs);
        prop_assert!(planned.items.is_sorted_by_key(|t| (t.src.region, t.dst.region, t.src.offset)));
    }
}

#[test]
fn empty_plan_is_empty() {
    assert_eq!(plan(&[], PlanLimits::NONE, regions, any_pair).unwrap(), Planned::default());
}

#[test]
fn zero_length_is_invalid() {
    assert_eq!(kind_of(&[item((0, 0), (1, 0), 0)]), ErrorKind::Invalid);
}

#[test]
fn unknown_and_stale_regions_are_refused() {
    assert_eq!(kind_of(&[item((9, 0), (1, 0), 1)]), ErrorKind::StaleRegion);
    let mut stale = item((0, 0), (1, 0), 1);
    stale.dst.region.generation = 6;
    assert_eq!(kind_of(&[stale]), ErrorKind::StaleRegion);
}

#[test]
fn a29_a37_bounds_are_checked_without_overflow() {
    assert_eq!(kind_of(&[item((0, REGION_LEN), (1, 0), 1)]), ErrorKind::OutOfBounds);
    assert_eq!(kind_of(&[item((0, 0), (1, REGION_LEN - 3), 4)]), ErrorKind::OutOfBounds);
    assert_eq!(kind_of(&[item((0, u64::MAX), (1, 0), 2)]), ErrorKind::OutOfBounds);
    assert_eq!(kind_of(&[item((0, 0), (1, 2), u64::MAX)]), ErrorKind::OutOfBounds);
    let exact = [item((0, 0), (1, 0), REGION_LEN)];
    assert_eq!(plan(&exact, PlanLimits::NONE, regions, any_pair).unwrap().items, exact);
}

#[test]
fn sums_are_checked() {
    let huge = |_| Some(RegionInfo { len: u64::MAX, location: Location::Host });
    let items = [item((0, 0), (1, 0), u64::MAX), item((0, 0), (2, 0), 1)];
    let err = plan(&items, PlanLimits::NONE, huge, any_pair).unwrap_err();
    assert_eq!(err.kind(), ErrorKind::Invalid);
}

#[test]
fn unsupported_pairs_are_refused() {
    let host_only = |a, b| a == Location::Host && b == Location::Host;
    let items = [item((0, 0), (1, 0), 1), item((0, 8), (4, 0), 1)];
    let err = plan(&items, PlanLimits::NONE, regions, host_only).unwrap_err();
    assert_eq!(err.kind(), ErrorKind::Unsupported);
}

#[test]
fn overlaps_are_refused() {
    assert_eq!(kind_of(&[item((0, 0), (1, 0), 8), item((0, 20), (1, 7), 8)]), ErrorKind::Invalid);
    assert_eq!(kind_of(&[item((0, 0), (0, 4), 8)]), ErrorKind::Invalid);
    // Touching is not overlapping.
    plan(&[item((0, 0), (0, 8), 8)], PlanLimits::NONE, regions, any_pair).unwrap();
}
