//! The IO-free core against oracles that go byte by byte.
//!
//! Mutants, each seen to fail a test here: `walk` without the short last page; without the page count;
//! an extent set that does not unite touching extents, or cuts one byte too
//! far; `ask` without looking at what is in flight, at what is there; `landed` that tells everybody;
//! `failed` that tells nobody; `forget` without looking at the flights.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test may panic")]

use std::{collections::HashMap, ops::ControlFlow};

use proptest::prelude::*;
use ucm_remote::{
    ByteRange, Generation, PageList,
    core::{Ask, ExtentSet, FetchId, Flights, Fragment, ReaderId, WalkError, walk},
};
use ucm_transport::{Addr, HostEngine, Memory, RegionId, TransferEngine};

fn range(offset: u64, len: u64) -> ByteRange {
    ByteRange { offset, len }
}

fn region() -> RegionId {
    let engine = HostEngine::builder().build().unwrap();
    engine.register(Memory::host(1).unwrap()).unwrap()
}

/// Pages of 4096 bytes at these places of a buffer.
fn pages(region: RegionId, at: &[u64], page_bytes: u64, len: u64) -> PageList {
    let pages = at.iter().map(|page| Addr { region, offset: page.saturating_mul(page_bytes) });
    PageList { pages: pages.collect(), page_bytes, len }
}

/// Page, offset in the buffer, length, bytes before.
type Seen = (usize, u64, u64, u64);

fn fragments(list: &PageList, range: ByteRange) -> Result<Vec<Seen>, WalkError> {
    let mut seen = Vec::new();
    let _: ControlFlow<()> = walk(list, range, |f: Fragment| {
        seen.push((f.page, f.addr.offset, f.len, f.before));
        ControlFlow::Continue(())
    })?;
    Ok(seen)
}

#[test]
fn a_range_becomes_its_pieces_of_pages() {
    let region = region();
    let one = |at: &[u64], len, offset, bytes| {
        fragments(&pages(region, at, 4096, len), range(offset, bytes)).unwrap()
    };
    // Inside one page; mid-page across two; all pages.
    assert_eq!(one(&[0, 1], 8192, 200, 900), [(0, 200, 900, 0)]);
    assert_eq!(one(&[0, 1], 8192, 4000, 200), [(0, 4000, 96, 0), (1, 4096, 104, 96)]);
    assert_eq!(one(&[0, 1], 8192, 0, 8192), [(0, 0, 4096, 0), (1, 4096, 4096, 4096)]);
    // A slot that begins at page 7, with scattered pages.
    assert_eq!(one(&[7, 3], 8192, 4095, 2), [(0, 7 * 4096 + 4095, 1, 0), (1, 3 * 4096, 1, 1)]);
    // The short last page, and the last byte; two pages and a byte.
    assert_eq!(one(&[0, 1], 5096, 4696, 400), [(1, 4696, 400, 0)]);
    assert_eq!(one(&[0, 1, 2], 8193, 0, 8193)[2], (2, 8192, 1, 8192));
}

#[test]
fn what_makes_no_sense_is_refused_before_anything_is_emitted() {
    let region = region();
    let of = |at: &[u64], page, len, offset, bytes| {
        fragments(&pages(region, at, page, len), range(offset, bytes)).unwrap_err()
    };
    let outside = |offset, len, object| WalkError::Outside { offset, len, object };
    assert_eq!(of(&[0, 1], 4096, 8192, 8191, 2), outside(8191, 2, 8192));
    assert_eq!(of(&[0, 1], 4096, 8192, 8192, 1), outside(8192, 1, 8192));
    assert_eq!(of(&[0, 1], 4096, 8192, u64::MAX, 2), outside(u64::MAX, 2, 8192));
    assert_eq!(of(&[0, 1], 4096, 8192, 1, u64::MAX), outside(1, u64::MAX, 8192));
    assert_eq!(of(&[0, 1], 4096, 8192, 5, 0), WalkError::Empty { offset: 5 });
    assert_eq!(of(&[], 4096, 8192, 0, 1), WalkError::NoPages);
    assert_eq!(of(&[0], 0, 8192, 0, 1), WalkError::NoPageSize);
    assert_eq!(of(&[0], 4096, 0, 0, 1), WalkError::EmptyObject);
    for at in [&[0][..], &[0, 1, 2]] {
        let error = of(at, 4096, 8192, 0, 1);
        assert!(matches!(error, WalkError::PageCount { want: 2, .. }), "{error}");
    }
    // A page at the end of the address space: its last byte may be the last there is, not beyond.
    let edge = u64::MAX / 4096;
    assert_eq!(of(&[edge + 1], 4096, 4096, 0, 1), WalkError::Address { page: 0, offset: u64::MAX });
    assert!(fragments(&pages(region, &[edge], 4095, 4095), range(0, 1)).is_ok());
    assert!(fragments(&pages(region, &[0], u64::MAX, u64::MAX), range(u64::MAX - 1, 1)).is_ok());
}

#[test]
fn emit_may_stop_the_walk() {
    let list = pages(region(), &[0, 1, 2], 4096, 12_288);
    let mut calls = 0;
    let stopped = walk(&list, range(0, 12_288), |fragment| {
        calls += 1;
        if calls == 2 { ControlFlow::Break(fragment.page) } else { ControlFlow::Continue(()) }
    });
    assert_eq!((stopped, calls), (Ok(ControlFlow::Break(1)), 2));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(20_000) })]

    /// Against a map from each byte of the object to its place. (10⁵ cases: five ranges each.)
    #[test]
    fn walks_equal_the_byte_map(
        page_bytes in 1_u64..70,
        len in 1_u64..400,
        seed in any::<u64>(),
        asked in prop::collection::vec((0_u64..450, 0_u64..450), 5),
    ) {
        let count = len.div_ceil(page_bytes);
        let at: Vec<u64> = (0..count).map(|page| (page ^ seed) % 64 + page * 64).collect();
        let list = pages(region_once(), &at, page_bytes, len);
        let place = |byte: u64| {
            let page = usize::try_from(byte / page_bytes).unwrap();
            (page, at[page] * page_bytes + byte % page_bytes)
        };
        for (offset, bytes) in asked {
            let good = bytes > 0 && offset + bytes <= len;
            let seen = fragments(&list, range(offset, bytes));
            prop_assert_eq!(good, seen.is_ok());
            let Ok(seen) = seen else { continue };
            let mut byte = offset;
            for (page, buffer, length, before) in seen {
                prop_assert_eq!(before, byte - offset);
                prop_assert!(length > 0);
                for inside in 0..length {
                    prop_assert_eq!(place(byte), (page, buffer + inside));
                    byte += 1;
                }
            }
            prop_assert_eq!(byte, offset + bytes);
        }
    }

    /// Against a bit for each byte.
    #[test]
    fn extent_sets_equal_the_byte_map(
        steps in prop::collection::vec((any::<bool>(), 0_u64..60, 0_u64..20), 1..60),
    ) {
        let (mut set, mut map) = (ExtentSet::default(), [false; 100]);
        for (add, offset, len) in steps {
            let (from, to) = (usize::try_from(offset).unwrap(), usize::try_from(offset + len).unwrap());
            if add { set.insert(range(offset, len)) } else { set.remove(range(offset, len)) }
            map[from..to].fill(add);
            let bits = |ranges: Vec<ByteRange>| {
                let mut bits = [false; 100];
                for r in ranges {
                    assert!(r.len > 0);
                    let from = usize::try_from(r.offset).unwrap();
                    bits[from..from + usize::try_from(r.len).unwrap()].fill(true);
                }
                bits
            };
            prop_assert_eq!(bits(set.iter().collect()), map);
            let ends: Vec<_> = set.iter().map(|r| (r.offset, r.offset + r.len)).collect();
            prop_assert!(ends.windows(2).all(|pair| pair[0].1 < pair[1].0), "touching: {:?}", ends);
            prop_assert_eq!(set.bytes(), map.iter().filter(|bit| **bit).count() as u64);
            let mut within = [false; 100];
            within[from..to].fill(true);
            let and = |value: bool| std::array::from_fn(|i| within[i] && map[i] == value);
            prop_assert_eq!(bits(set.missing(range(offset, len)).collect()), and(false));
            prop_assert_eq!(bits(set.present(range(offset, len)).collect()), and(true));
            prop_assert_eq!(set.covers(range(offset, len)), and(false) == [false; 100]);
        }
    }

    /// Random requests, ends and departures on three objects.
    #[test]
    fn flights_equal_the_byte_map(steps in prop::collection::vec(step(), 1..120)) {
        let mut world = World::new();
        for step in steps {
            world.step(step);
            world.check();
        }
        world.finish();
    }
}

/// Found by the property: a range without bytes cut an extent in two.
#[test]
fn a_range_without_bytes_changes_and_finds_nothing() {
    let mut set: ExtentSet = [range(21, 12)].into_iter().collect();
    set.remove(range(22, 0));
    set.insert(range(40, 0));
    assert_eq!(set.iter().collect::<Vec<_>>(), [range(21, 12)]);
    assert_eq!((set.present(range(22, 0)).count(), set.missing(range(0, 0)).count()), (0, 0));
    assert!(set.covers(range(50, 0)));
}

fn region_once() -> RegionId {
    static REGION: std::sync::OnceLock<RegionId> = std::sync::OnceLock::new();
    *REGION.get_or_init(region)
}

const LEN: u64 = 40;
/// The same, to index with.
const BYTES: usize = 40;

#[derive(Clone, Debug)]
enum Step {
    /// Object, and cuts that alternate between asked and not.
    Ask(u64, Vec<u64>),
    Fill(u64, u64),
    Land(usize),
    Fail(usize),
    Leave(usize),
    Forget(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0_u64..3, prop::collection::vec(1_u64..9, 1..6)).prop_map(|(o, c)| Step::Ask(o, c)),
        1 => (0_u64..3, 0_u64..50).prop_map(|(object, budget)| Step::Fill(object, budget)),
        4 => any::<usize>().prop_map(Step::Land),
        1 => any::<usize>().prop_map(Step::Fail),
        1 => any::<usize>().prop_map(Step::Leave),
        1 => (0_u64..3).prop_map(Step::Forget),
    ]
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Byte {
    Nowhere,
    Flying(FetchId),
    There,
}

struct World {
    flights: Flights<u64>,
    bytes: [[Byte; BYTES]; 3],
    flying: Vec<FetchId>,
    waiting: HashMap<ReaderId, (u64, Vec<ByteRange>)>,
    readers: u64,
    fetched: u64,
    failed: u64,
}

fn indices(r: ByteRange) -> std::ops::Range<usize> {
    usize::try_from(r.offset).unwrap()..usize::try_from(r.offset + r.len).unwrap()
}

const GENERATION: Generation = Generation(9);

impl World {
    fn new() -> Self {
        Self {
            flights: Flights::new(3, 7),
            bytes: [[Byte::Nowhere; BYTES]; 3],
            flying: Vec::new(),
            waiting: HashMap::new(),
            readers: 0,
            fetched: 0,
            failed: 0,
        }
    }

    fn object(&mut self, object: u64) -> &mut [Byte; BYTES] {
        &mut self.bytes[usize::try_from(object).unwrap()]
    }

    fn launch(&mut self, object: u64, fetches: &[ucm_remote::core::Fetch]) {
        for fetch in fetches {
            assert!((1..=7).contains(&fetch.range.len), "a piece at most");
            for at in indices(fetch.range) {
                let byte = &mut self.object(object)[at];
                assert_eq!(*byte, Byte::Nowhere, "fetched twice");
                *byte = Byte::Flying(fetch.id);
            }
            self.fetched += fetch.range.len;
            self.flying.push(fetch.id);
        }
    }

    fn ask(&mut self, object: u64, ranges: Vec<ByteRange>) {
        self.readers += 1;
        let reader = ReaderId(self.readers);
        let before = *self.object(object);
        let Ask::Admitted(asked) = self.flights.ask(&object, GENERATION, LEN, reader, &ranges)
        else {
            panic!("refused")
        };
        let count = |want: fn(Byte) -> bool| {
            let all = ranges.iter().flat_map(|r| indices(*r));
            all.filter(|at| want(before[*at])).count() as u64
        };
        assert_eq!(asked.present_bytes, count(|byte| byte == Byte::There));
        assert_eq!(asked.joined_bytes, count(|byte| matches!(byte, Byte::Flying(_))));
        let new: u64 = asked.fetches.iter().map(|fetch| fetch.range.len).sum();
        assert_eq!(new, count(|byte| byte == Byte::Nowhere), "only what is missing");
        self.launch(object, &asked.fetches);
        assert_eq!(asked.ready, asked.joined_bytes + new == 0);
        if !asked.ready {
            self.waiting.insert(reader, (object, ranges));
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Ask(object, cuts) => {
                let mut at = 0;
                let mut ranges = Vec::new();
                for (index, len) in cuts.into_iter().enumerate() {
                    let len = len.min(LEN - at);
                    if index % 2 == 0 && len > 0 {
                        ranges.push(range(at, len));
                    }
                    at += len;
                }
                ranges.reverse();
                self.ask(object, ranges);
            }
            Step::Fill(object, budget) => {
                let fetches = self.flights.fill_holes(&object, GENERATION, budget);
                assert!(fetches.iter().map(|f| f.range.len).sum::<u64>() <= budget);
                self.launch(object, &fetches);
            }
            Step::Land(which) => self.end(which, true),
            Step::Fail(which) => self.end(which, false),
            Step::Leave(which) => {
                let mut all: Vec<_> = self.waiting.keys().copied().collect();
                all.sort_unstable();
                if !all.is_empty() {
                    let reader = all[which % all.len()];
                    self.waiting.remove(&reader);
                    self.flights.leave(reader);
                }
            }
            Step::Forget(object) => {
                let flies = self.object(object).iter().any(|b| matches!(b, Byte::Flying(_)));
                let waits = self.waiting.values().any(|(of, _)| *of == object);
                assert_eq!(self.flights.forget(&object, GENERATION), !flies && !waits);
                if !flies && !waits {
                    self.object(object).fill(Byte::Nowhere);
                }
            }
        }
    }

    fn end(&mut self, which: usize, good: bool) {
        if self.flying.is_empty() {
            return;
        }
        let at = which % self.flying.len();
        let fetch = self.flying.swap_remove(at);
        let ended = if good { self.flights.landed(fetch) } else { self.flights.failed(fetch) };
        let ended = ended.unwrap();
        assert_eq!(self.flights.landed(fetch), None, "ends once");
        for byte in &mut self.object(ended.key)[indices(ended.range)] {
            assert_eq!(*byte, Byte::Flying(fetch));
            *byte = if good { Byte::There } else { Byte::Nowhere };
        }
        if !good {
            self.failed += ended.range.len;
        }
        let bytes = *self.object(ended.key);
        assert_eq!(ended.complete, bytes.iter().all(|byte| *byte == Byte::There));
        let expected = |(of, ranges): &(u64, Vec<ByteRange>)| {
            let mut all = ranges.iter().flat_map(|r| indices(*r));
            *of == ended.key
                && if good {
                    all.all(|at| bytes[at] == Byte::There)
                } else {
                    all.any(|at| indices(ended.range).contains(&at))
                }
        };
        let mut told: Vec<ReaderId> =
            self.waiting.iter().filter(|(_, w)| expected(w)).map(|(reader, _)| *reader).collect();
        told.sort_unstable();
        assert_eq!(ended.readers, told);
        for reader in told {
            let (object, ranges) = self.waiting.remove(&reader).unwrap();
            // Who is told of a failure asks again, or gives up.
            if !good && reader.0 % 2 == 0 {
                self.ask(object, ranges);
            }
        }
    }

    fn check(&self) {
        let (_, flying, readers) = self.flights.sizes();
        assert_eq!((flying, readers), (self.flying.len(), self.waiting.len()));
        for (object, ranges) in self.waiting.values() {
            let bytes = &self.bytes[usize::try_from(*object).unwrap()];
            let mut all = ranges.iter().flat_map(|r| indices(*r));
            assert!(all.all(|at| bytes[at] != Byte::Nowhere), "nobody brings what is waited for");
        }
    }

    /// Everything lands: nobody waits any more, and each byte came once for each time it was lost.
    fn finish(mut self) {
        while !self.flying.is_empty() {
            self.end(0, true);
        }
        assert!(self.waiting.is_empty());
        for object in 0..3 {
            assert!(self.flights.forget(&object, GENERATION));
        }
        assert_eq!(self.flights.sizes(), (0, 0, 0));
        assert!(self.fetched >= self.failed);
    }
}

/// Four ranks read an object layer group by layer group, in different orders: each byte is fetched once.
#[test]
fn i7_i8_each_byte_is_fetched_once_whatever_the_shapes() {
    let (len, group) = (4_497_408, 589_824);
    let mut flights = Flights::new(8, 1 << 20);
    let (mut fetched, mut open, mut complete) = (0, Vec::new(), false);
    for rank in 0..4_u64 {
        for step in 0..8 {
            let group_index = (step + 2 * rank) % 8;
            let offset = group_index * group;
            let asked = range(offset, group.min(len - offset));
            let reader = ReaderId(rank * 8 + step);
            let Ask::Admitted(asked) = flights.ask(&"v32", GENERATION, len, reader, &[asked])
            else {
                panic!("refused")
            };
            fetched += asked.fetches.iter().map(|fetch| fetch.range.len).sum::<u64>();
            open.extend(asked.fetches);
            // Some land while others ask.
            if step % 3 == 2 && !open.is_empty() {
                complete |= flights.landed(open.remove(0).id).unwrap().complete;
            }
        }
    }
    for fetch in open {
        complete |= flights.landed(fetch.id).unwrap().complete;
    }
    assert!(complete);
    assert_eq!(fetched, len, "1.00 times");
    assert_eq!(flights.sizes(), (1, 0, 0));
}

#[test]
fn a_table_has_bounds_and_compares_lengths() {
    let mut flights = Flights::new(1, 100);
    let ask = |flights: &mut Flights<u8>, key, len, offset| {
        flights.ask(&key, GENERATION, len, ReaderId(1), &[range(offset, 1)])
    };
    assert!(matches!(ask(&mut flights, 1, 10, 0), Ask::Admitted(_)));
    assert_eq!(ask(&mut flights, 1, 11, 0), Ask::Length(10));
    assert_eq!(ask(&mut flights, 2, 10, 0), Ask::Busy);
    assert!(matches!(ask(&mut flights, 1, 10, 10), Ask::Invalid(_)));
    assert!(!flights.forget(&1, GENERATION));
    assert!(matches!(flights.failed(FetchId(1)), Some(ended) if ended.readers == [ReaderId(1)]));
    assert_eq!(flights.idle().count(), 1);
    assert!(flights.forget(&1, GENERATION));
    assert!(matches!(ask(&mut flights, 2, 10, 0), Ask::Admitted(_)));
}

/// A background fetch that a reader waits for becomes urgent, once.
#[test]
fn i5_a_background_fetch_is_promoted() {
    let mut flights = Flights::new(1, 100);
    let Ask::Admitted(first) = flights.ask(&0, GENERATION, 40, ReaderId(1), &[range(0, 10)]) else {
        panic!("refused")
    };
    assert_eq!(first.fetches.len(), 1);
    let holes = flights.fill_holes(&0, GENERATION, 1000);
    assert_eq!(holes.iter().map(|f| f.range).collect::<Vec<_>>(), [range(10, 30)]);
    assert_eq!(flights.fill_holes(&0, GENERATION, 1000), [], "all on its way");
    for (reader, promoted) in [(2, vec![holes[0].id]), (3, vec![])] {
        let Ask::Admitted(asked) =
            flights.ask(&0, GENERATION, 40, ReaderId(reader), &[range(5, 10)])
        else {
            panic!("refused")
        };
        assert_eq!((asked.promoted, asked.fetches, asked.joined_bytes), (promoted, vec![], 10));
    }
}
