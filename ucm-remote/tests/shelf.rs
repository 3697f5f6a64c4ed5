//! The bookkeeping of a medium against a model that owns every page by name.
//!
//! Mutants, each seen to fail a test here: eviction of leased objects; of used ones first; pages freed
//! before the last lease ends; an abort that frees pages still being written; a commit that does not ask
//! for every byte; a lease that outlives its time; `written` that takes a part twice; a removal that is
//! not announced.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test may panic")]

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::{Duration, Instant},
};

use proptest::prelude::*;
use ucm_remote::{
    ByteRange, Medium, ObjectKey, PagedError, PagedLimits, PagedMedium, Pending, PutOutcome,
    RemoveOutcome, Segment,
    core::{Change, Shelf, ShelfLimits},
};
use ucm_transport::{HostEngine, Memory, TransferEngine};

const PAGE: u64 = 16;
const PAGES: u32 = 20;

fn key(number: u8) -> ObjectKey {
    ObjectKey { block: [number; 16], identity: [number; 32] }
}

fn whole(len: u64) -> ByteRange {
    ByteRange { offset: 0, len }
}

fn limits() -> ShelfLimits {
    ShelfLimits { page_bytes: PAGE, pages: PAGES, pending: 4, leases: 6, watermarks: (0, 0) }
}

fn put(shelf: &mut Shelf, number: u8, len: u64, now: Instant) -> Result<Box<[u32]>, PutOutcome> {
    let (pending, pages) = shelf.allocate(&key(number), len, now)?;
    assert!(shelf.written(pending, whole(len)));
    assert_eq!(shelf.commit(pending), PutOutcome::Created);
    Ok(pages)
}

/// What the model knows to own pages.
#[derive(Debug)]
struct Owned {
    key: u8,
    len: u64,
    pages: Box<[u32]>,
    state: State,
    leases: HashMap<u64, Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Writing,
    Committed,
    /// Left its key, perhaps not its leases.
    Gone,
    Zombie,
}

#[derive(Clone, Debug)]
enum Step {
    Allocate(u8, u64),
    Write(usize, u64, u64),
    Finish(usize),
    Abort(usize, bool),
    WriteEnded(usize),
    Lease(u8, u64),
    Release(usize),
    Remove(u8),
    Touch(u8),
    Later(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let which = any::<usize>;
    prop_oneof![
        5 => (0_u8..12, 0_u64..400).prop_map(|(key, len)| Step::Allocate(key, len)),
        2 => (which(), 0_u64..100, 0_u64..100).prop_map(|(w, at, len)| Step::Write(w, at, len)),
        4 => which().prop_map(Step::Finish),
        2 => (which(), any::<bool>()).prop_map(|(which, ended)| Step::Abort(which, ended)),
        1 => which().prop_map(Step::WriteEnded),
        4 => (0_u8..12, 1_u64..30).prop_map(|(key, ms)| Step::Lease(key, ms)),
        2 => which().prop_map(Step::Release),
        1 => (0_u8..12).prop_map(Step::Remove),
        1 => (0_u8..12).prop_map(Step::Touch),
        2 => (1_u64..20).prop_map(Step::Later),
    ]
}

struct World {
    shelf: Shelf,
    owned: BTreeMap<u64, Owned>,
    written: HashMap<u64, [bool; 400]>,
    now: Instant,
}

impl World {
    fn in_state(&self, state: State, which: usize) -> Option<u64> {
        let all: Vec<u64> =
            self.owned.iter().filter(|(_, o)| o.state == state).map(|(id, _)| *id).collect();
        (!all.is_empty()).then(|| all[which % all.len()])
    }

    fn pending(id: u64) -> Pending {
        Pending { id, generation: ucm_remote::Generation(id) }
    }

    fn committed(&self, number: u8) -> Option<u64> {
        let committed = |o: &Owned| o.key == number && o.state == State::Committed;
        self.owned.iter().find(|(_, o)| committed(o)).map(|(id, _)| *id)
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Allocate(number, len) => self.allocate(number, len),
            Step::Write(which, at, len) => {
                let Some(id) = self.in_state(State::Writing, which) else { return };
                let object = &self.owned[&id];
                let bits = self.written.get_mut(&id).unwrap();
                let to = usize::try_from(at)..usize::try_from(at + len);
                let (from, end) = (to.start.unwrap(), to.end.unwrap());
                let good = len > 0 && at + len <= object.len && !bits[from..end].contains(&true);
                let range = ByteRange { offset: at, len };
                assert_eq!(self.shelf.written(Self::pending(id), range), good);
                if good {
                    bits[from..end].fill(true);
                }
            }
            Step::Finish(which) => self.finish(which),
            Step::Abort(which, ended) => {
                let Some(id) = self.in_state(State::Writing, which) else { return };
                self.shelf.abort(Self::pending(id), ended);
                if ended {
                    self.owned.remove(&id);
                } else {
                    self.owned.get_mut(&id).unwrap().state = State::Zombie;
                }
            }
            Step::WriteEnded(which) => {
                let Some(id) = self.in_state(State::Zombie, which) else { return };
                self.shelf.write_ended(Self::pending(id));
                self.owned.remove(&id);
            }
            Step::Lease(number, ms) => self.lease(number, ms),
            Step::Release(which) => {
                let all: Vec<u64> =
                    self.owned.values().flat_map(|o| o.leases.keys().copied()).collect();
                if !all.is_empty() {
                    let lease = all[which % all.len()];
                    self.shelf.release(lease);
                    self.owned.values_mut().for_each(|o| {
                        o.leases.remove(&lease);
                    });
                    self.sweep();
                }
            }
            Step::Remove(number) => {
                let there = self.committed(number);
                let outcome = self.shelf.remove(&key(number));
                assert_eq!(outcome == RemoveOutcome::Removed, there.is_some());
                self.follow(there.into_iter().collect());
            }
            Step::Touch(number) => {
                assert_eq!(self.shelf.touch(&key(number)), self.committed(number).is_some());
            }
            Step::Later(ms) => {
                self.now += Duration::from_millis(ms);
                self.shelf.expire(self.now);
                self.expire();
            }
        }
    }

    fn expire(&mut self) {
        let now = self.now;
        self.owned.values_mut().for_each(|o| o.leases.retain(|_, until| *until > now));
        self.sweep();
    }

    fn sweep(&mut self) {
        self.owned.retain(|_, o| o.state != State::Gone || !o.leases.is_empty());
    }

    /// Objects that left their keys: exactly those announced, and none of them leased unless removed.
    fn follow(&mut self, expected: Vec<u64>) {
        let mut gone = Vec::new();
        for change in self.shelf.take_changes() {
            if let Change::Gone(_, generation, len) = change {
                let object = self.owned.get_mut(&generation.0).unwrap();
                assert_eq!((object.state, object.len), (State::Committed, len));
                assert!(object.leases.is_empty() || expected.contains(&generation.0));
                object.state = State::Gone;
                gone.push(generation.0);
            }
        }
        assert!(expected.iter().all(|id| gone.contains(id)));
        self.sweep();
    }

    fn allocate(&mut self, number: u8, len: u64) {
        self.expire();
        let there = self.committed(number).map(|id| self.owned[&id].len);
        let count = len.div_ceil(PAGE);
        let writing: Vec<_> = self.owned.values().filter(|o| o.state == State::Writing).collect();
        let evictable =
            self.owned.values().filter(|o| o.state == State::Committed && o.leases.is_empty());
        let held: usize = self.owned.values().map(|o| o.pages.len()).sum();
        let room = PAGES as usize - held + evictable.map(|o| o.pages.len()).sum::<usize>();
        let expected = match there {
            Some(other) if other == len => Some(PutOutcome::AlreadyExists),
            Some(_) => Some(PutOutcome::Conflict),
            None if len == 0 => Some(PutOutcome::Invalid),
            None if count > u64::from(PAGES) => Some(PutOutcome::TooLarge),
            None if writing.len() >= 4 || writing.iter().any(|o| o.key == number) => {
                Some(PutOutcome::Busy)
            }
            None if count > room as u64 => Some(PutOutcome::NoSpace),
            None => None,
        };
        let got = self.shelf.allocate(&key(number), len, self.now);
        self.follow(vec![]);
        match got {
            Err(outcome) => assert_eq!(Some(outcome), expected),
            Ok((pending, pages)) => {
                assert_eq!((expected, pages.len() as u64), (None, count));
                self.written.insert(pending.id, [false; 400]);
                let owned = Owned {
                    key: number,
                    len,
                    pages,
                    state: State::Writing,
                    leases: HashMap::new(),
                };
                self.owned.insert(pending.id, owned);
            }
        }
    }

    /// Writes what is left, and commits; not before every byte was written.
    fn finish(&mut self, which: usize) {
        let Some(id) = self.in_state(State::Writing, which) else { return };
        let (number, len) = (self.owned[&id].key, self.owned[&id].len);
        let bits = self.written[&id];
        let open: Vec<usize> = (0..usize::try_from(len).unwrap()).filter(|at| !bits[*at]).collect();
        if !open.is_empty() {
            assert_eq!(self.shelf.commit(Self::pending(id)), PutOutcome::Invalid);
        }
        for at in open {
            let range = ByteRange { offset: at as u64, len: 1 };
            assert!(self.shelf.written(Self::pending(id), range));
        }
        assert_eq!(self.shelf.commit(Self::pending(id)), PutOutcome::Created);
        assert_eq!(self.shelf.commit(Self::pending(id)), PutOutcome::Stale);
        let stored = Change::Stored(key(number), ucm_remote::Generation(id), len);
        assert_eq!(self.shelf.take_changes(), [stored]);
        self.owned.get_mut(&id).unwrap().state = State::Committed;
    }

    fn lease(&mut self, number: u8, ms: u64) {
        self.expire();
        let leases: usize = self.owned.values().map(|o| o.leases.len()).sum();
        let there = self.committed(number).filter(|_| leases < 6);
        let until = self.now + Duration::from_millis(ms);
        let leased = self.shelf.lease(&key(number), until, self.now);
        assert_eq!(leased.as_ref().map(|l| l.generation.0), there);
        if let Some(leased) = leased {
            let object = self.owned.get_mut(&there.unwrap()).unwrap();
            assert_eq!((leased.len, &leased.pages), (object.len, &object.pages));
            object.leases.insert(leased.lease, until);
        }
    }

    /// Each page has one owner, and the numbers are the model's.
    fn check(&self) {
        let mut seen = HashSet::new();
        for object in self.owned.values() {
            assert!(object.pages.iter().all(|page| *page < PAGES && seen.insert(*page)));
        }
        let bytes = |states: &[State]| {
            let all = self.owned.values().filter(|o| states.contains(&o.state));
            all.map(|o| o.pages.len() as u64 * PAGE).sum::<u64>()
        };
        let usage = self.shelf.usage();
        assert_eq!(usage.capacity_bytes, PAGE * u64::from(PAGES));
        assert_eq!(usage.committed_bytes, bytes(&[State::Committed]));
        assert_eq!(usage.pending_bytes, bytes(&[State::Writing]));
        assert_eq!(usage.quarantine_bytes, bytes(&[State::Gone, State::Zombie]));
        let leases: usize = self.owned.values().map(|o| o.leases.len()).sum();
        assert_eq!(usage.leases, leases as u64);
        assert_eq!(
            self.shelf.objects().count(),
            self.owned.values().filter(|o| o.state == State::Committed).count()
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(4000) })]

    #[test]
    fn a_shelf_equals_the_model(steps in prop::collection::vec(step(), 1..150)) {
        let mut world = World {
            shelf: Shelf::new(limits()),
            owned: BTreeMap::new(),
            written: HashMap::new(),
            now: Instant::now(),
        };
        for step in steps {
            world.step(step);
            world.check();
        }
    }
}

#[test]
fn what_was_used_gets_a_second_chance() {
    let now = Instant::now();
    let mut shelf = Shelf::new(limits());
    for number in 0..4 {
        put(&mut shelf, number, 5 * PAGE, now).unwrap();
    }
    assert!(shelf.touch(&key(0)));
    put(&mut shelf, 4, 5 * PAGE, now).unwrap();
    assert_eq!(
        [0, 1, 2, 3, 4].map(|n| shelf.find(&key(n)).is_some()),
        [true, false, true, true, true]
    );
    assert_eq!(shelf.evictions(), 1);
}

#[test]
fn watermarks_keep_pages_free_ahead() {
    let now = Instant::now();
    let mut shelf = Shelf::new(ShelfLimits { watermarks: (4, 10), ..limits() });
    for number in 0..4 {
        put(&mut shelf, number, 4 * PAGE, now).unwrap();
    }
    assert_eq!(shelf.evictions(), 0, "four pages are free");
    put(&mut shelf, 4, PAGE, now).unwrap();
    assert_eq!(shelf.evictions(), 2, "until ten are free: 3 + 4 + 4");
    assert_eq!(shelf.usage().committed_bytes, 9 * PAGE);
}

/// Removing and storing again for long does not fill the eviction order.
#[test]
fn removed_objects_leave_no_trace() {
    let now = Instant::now();
    let mut shelf = Shelf::new(limits());
    for _ in 0..10_000 {
        put(&mut shelf, 1, PAGE, now).unwrap();
        assert_eq!(shelf.remove(&key(1)), RemoveOutcome::Removed);
        shelf.take_changes();
    }
    assert!(format!("{shelf:?}").len() < 10_000, "bounded");
}

#[test]
fn a_medium_cuts_segments_into_pages() {
    let engine = HostEngine::builder().build().unwrap();
    let region = || engine.register(Memory::host(100).unwrap()).unwrap();
    let (a, b) = (region(), region());
    let segments =
        [Segment { region: a, offset: 8, bytes: 40 }, Segment { region: b, offset: 0, bytes: 100 }];
    let medium = PagedMedium::new(&segments, PagedLimits::new(PAGE)).unwrap();
    assert_eq!(medium.usage().capacity_bytes, (2 + 6) * PAGE);
    let (pending, list) = medium.allocate(&key(1), 4 * PAGE - 1).unwrap();
    let places: Vec<_> = list.pages.iter().map(|addr| (addr.region, addr.offset)).collect();
    assert_eq!(places, [(a, 8), (a, 24), (b, 0), (b, 16)]);
    assert_eq!((list.page_bytes, list.len), (PAGE, 4 * PAGE - 1));
    assert!(medium.lease(&key(1), Instant::now() + Duration::from_secs(60)).is_none());
    assert!(medium.written(pending, whole(4 * PAGE - 1)));
    assert_eq!(medium.commit(pending), PutOutcome::Created);
    let stored = medium.lease(&key(1), Instant::now() + Duration::from_secs(60)).unwrap();
    assert_eq!((stored.pages, stored.generation), (list, pending.generation));
    assert_eq!(medium.all_stored(), medium.take_changes());
    medium.release(stored.lease);
    assert_eq!(medium.remove(&key(1)), RemoveOutcome::Removed);
    assert_eq!(medium.usage().committed_bytes, 0);

    let refuse = |segments: &[Segment], page| {
        PagedMedium::new(segments, PagedLimits::new(page)).unwrap_err()
    };
    assert_eq!(refuse(&segments, 0), PagedError::NoPageSize);
    assert_eq!(refuse(&segments, 101), PagedError::NoPages { bytes: 140, page_bytes: 101 });
    let huge = Segment { region: a, offset: 1, bytes: u64::MAX };
    assert_eq!(refuse(&[huge], 16), PagedError::Address(0));
    let huge = Segment { region: a, offset: 0, bytes: u64::MAX };
    assert!(matches!(refuse(&[huge, huge], 1), PagedError::TooMany { .. }));
}
