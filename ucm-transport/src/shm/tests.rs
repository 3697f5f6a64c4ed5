//! The shm engine: the suite of all engines over real segments that are mapped twice, stamps, and
//! what only this engine refuses.

use std::sync::{Mutex, Weak};

use ucm_data::{Mapped, PageTier, SegmentsConfig};

use super::*;
use crate::{
    Addr, Transfer,
    testing::{Harness, Runner, conformance},
};

/// An owner's segment: its own mapping, and the descriptors that a peer maps.
struct Owned {
    segments: Segments,
    memory: Memory,
}

impl Owned {
    fn new(len: usize) -> Self {
        let config = SegmentsConfig {
            segment_bytes: (len as u64).next_multiple_of(4096),
            prefer: PageTier::Small,
            threads: 1,
            ..SegmentsConfig::new(len as u64, 1)
        };
        let segments = Segments::create(&config).unwrap();
        let memory = Memory::of_segments(&segments).unwrap().remove(0).part(0, len).unwrap();
        Self { segments, memory }
    }

    /// The peer's view of a part of the owner's memory: another mapping of the same file.
    fn seen_by_peer(&self, part: &Memory) -> Option<Memory> {
        let own = self.memory.as_ptr().addr().get();
        let offset = part.as_ptr().addr().get().checked_sub(own)?;
        if offset + part.len() > self.memory.len() {
            return None;
        }
        let geometry = self.segments.geometry().clone();
        let peer = Segments::from_fds(geometry, self.segments.fds().iter().cloned()).unwrap();
        Memory::of_segments(&peer).unwrap().remove(0).part(offset, part.len()).ok()
    }
}

/// Which side of a plan lies with the peer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Far {
    Source,
    Destination,
    Both,
}

struct ShmHarness {
    far: Far,
    workers: usize,
    owned: Mutex<Vec<Owned>>,
    engines: Mutex<Vec<Weak<ShmEngine>>>,
}

impl ShmHarness {
    fn new(far: Far, workers: usize) -> Self {
        Self { far, workers, owned: Mutex::default(), engines: Mutex::default() }
    }

    fn far(&self, len: usize) -> Memory {
        let owned = Owned::new(len);
        let memory = owned.memory.clone();
        self.owned.lock().unwrap().push(owned);
        memory
    }
}

impl Harness for ShmHarness {
    fn engine(&self) -> Arc<dyn TransferEngine> {
        let engine = ShmEngine::builder().workers(self.workers).build().unwrap();
        engine.add_peer(Access::ReadWrite).unwrap();
        let engine = Arc::new(engine);
        self.engines.lock().unwrap().push(Arc::downgrade(&engine));
        engine
    }

    fn source(&self, len: usize) -> Memory {
        if self.far == Far::Destination { Memory::host(len).unwrap() } else { self.far(len) }
    }

    fn destination(&self, len: usize) -> Memory {
        if self.far == Far::Source { Memory::host(len).unwrap() } else { self.far(len) }
    }

    fn register(&self, engine: &dyn TransferEngine, memory: &Memory) -> RegionId {
        let seen = self.owned.lock().unwrap().iter().find_map(|o| o.seen_by_peer(memory));
        let Some(seen) = seen else { return engine.register(memory.clone()).unwrap() };
        let engines = self.engines.lock().unwrap();
        let same = |e: &Arc<ShmEngine>| std::ptr::addr_eq(Arc::as_ptr(e), &raw const *engine);
        engines.iter().filter_map(Weak::upgrade).find(same).unwrap().attach(0, seen).unwrap()
    }
}

#[test]
fn conforms_when_it_reads_from_a_peer() {
    conformance(&ShmHarness::new(Far::Source, 0));
}

#[test]
fn conforms_when_it_writes_to_a_peer_with_workers() {
    conformance(&ShmHarness::new(Far::Destination, 2));
}

#[test]
fn conforms_between_segments_of_a_peer() {
    conformance(&ShmHarness::new(Far::Both, 1));
}

fn one(src: RegionId, dst: RegionId, len: u64) -> TransferPlan {
    let at = |region| Addr { region, offset: 0 };
    TransferPlan { items: vec![Transfer { src: at(src), dst: at(dst), len }], holds: vec![] }
}

#[test]
fn what_a_peer_lends_for_reading_is_not_written() {
    let engine = ShmEngine::builder().build().unwrap();
    let owned = Owned::new(4096);
    let peer = engine.add_peer(Access::Read).unwrap();
    let theirs = engine.attach_segments(peer, &owned.segments).unwrap()[0];
    let ours = engine.register(Memory::host(4096).unwrap()).unwrap();
    let refused = engine.submit(one(ours, theirs, 8)).unwrap_err();
    assert_eq!(refused.error.kind(), ErrorKind::Unsupported);
    engine.submit(one(theirs, ours, 8)).unwrap();
    let unknown = engine.attach(peer + 1, Memory::host(8).unwrap()).unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::Invalid);
}

#[test]
fn stamps_grow_and_odd_ones_serve_nobody() {
    let stamps = Stamps::new(Memory::host(64).unwrap()).unwrap();
    assert_eq!(stamps.count(), 8);
    let first = stamps.current(3).unwrap();
    let check = stamps.check(vec![(2, stamps.current(2).unwrap()), (3, first)]);
    assert!(check.is_current());
    assert_eq!(stamps.end_rewrite(3), None, "nothing was begun");
    assert!(stamps.begin_rewrite(3));
    assert_eq!((stamps.current(3), check.is_current()), (None, false));
    // The owner died and came back: the word goes on, it does not become the old one.
    assert!(stamps.begin_rewrite(3));
    let second = stamps.end_rewrite(3).unwrap();
    assert_ne!(second, first);
    assert_eq!(stamps.current(3), Some(second));
    assert!(!check.is_current() && stamps.check(vec![(3, second)]).is_current());
    assert!(!stamps.begin_rewrite(8) && stamps.current(8).is_none());
    assert!(!stamps.check(vec![(8, first)]).is_current());
    assert_eq!(Stamps::new(Memory::host(7).unwrap()).unwrap_err().kind(), ErrorKind::Invalid);
}

#[test]
fn a_source_that_changed_before_is_refused_and_later_is_stale() {
    let stamps = Stamps::new(Memory::host(8).unwrap()).unwrap();
    let engine = Arc::new(ShmEngine::builder().build().unwrap());
    let owned = Owned::new(4096);
    let peer = engine.add_peer(Access::Read).unwrap();
    let theirs = engine.attach_segments(peer, &owned.segments).unwrap()[0];
    let ours = engine.register(Memory::host(4096).unwrap()).unwrap();
    let mut runner = Runner::new(Arc::clone(&engine) as Arc<dyn TransferEngine>);
    let check = stamps.check(vec![(0, stamps.current(0).unwrap())]);
    let ticket = engine.submit_checked(one(theirs, ours, 4096), check.clone()).unwrap();
    assert_eq!(runner.wait(ticket).result.unwrap(), 4096);

    // The owner begins to rewrite after the engine has asked for the first time.
    let asked = std::sync::atomic::AtomicU32::new(0);
    let late = move || asked.fetch_add(1, std::sync::atomic::Ordering::SeqCst) == 0;
    let ticket = engine.submit_checked(one(theirs, ours, 4096), Arc::new(late)).unwrap();
    assert_eq!(runner.wait(ticket).result.unwrap_err().kind(), ErrorKind::Stale);

    stamps.begin_rewrite(0);
    let refused = engine.submit_checked(one(theirs, ours, 4096), check).unwrap_err();
    assert_eq!((refused.error.kind(), refused.plan.items.len()), (ErrorKind::Stale, 1));
    engine.deregister(theirs).unwrap();
}

/// A writer rewrites all the time, a reader copies under check: what is good is of one generation.
/// Mutants seen to fail: no check after the copy, an even stamp while rewriting.
#[test]
fn a_checked_copy_is_of_one_generation() {
    const LEN: usize = 64 << 10;
    let owned = Owned::new(LEN);
    let stamps = Stamps::new(Memory::host(8).unwrap()).unwrap();
    let engine = Arc::new(ShmEngine::builder().build().unwrap());
    let peer = engine.add_peer(Access::Read).unwrap();
    let theirs = engine.attach_segments(peer, &owned.segments).unwrap()[0];
    let target = Memory::host(LEN).unwrap();
    let ours = engine.register(target.clone()).unwrap();
    let (mut good, mut stale) = (0, 0);
    std::thread::scope(|scope| {
        let guard = crate::testing::StopOnDrop::default();
        let stop = Arc::clone(&guard.0);
        let (stamps, owned) = (&stamps, &owned);
        scope.spawn(move || {
            let mut value = 0_u8;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                value = value.wrapping_add(1);
                stamps.begin_rewrite(0);
                owned.memory.write(0, &vec![value; LEN]).unwrap();
                stamps.end_rewrite(0).unwrap();
                std::thread::yield_now();
            }
        });
        let mut bytes = vec![0; LEN];
        let mut ends = Vec::new();
        let until = Instant::now() + crate::testing::WATCHDOG;
        while (good < 200 || stale < 5) && Instant::now() < until {
            let Some(stamp) = stamps.current(0) else { continue };
            match engine
                .submit_checked(one(theirs, ours, LEN as u64), stamps.check(vec![(0, stamp)]))
            {
                Err(rejected) => assert_eq!(rejected.error.kind(), ErrorKind::Stale),
                Ok(_) => {
                    engine.poll(&mut ends);
                    match ends.pop().unwrap().result {
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::Stale);
                            stale += 1;
                        }
                        Ok(_) => {
                            target.read(0, &mut bytes).unwrap();
                            assert!(bytes.iter().all(|b| *b == bytes[0]), "two generations");
                            good += 1;
                        }
                    }
                }
            }
        }
        drop(guard);
    });
    assert!(good >= 200 && stale >= 5, "{good} good, {stale} stale");
}

#[test]
fn segments_of_a_pool_are_attached_in_order() {
    let config = SegmentsConfig {
        segment_bytes: 8192,
        prefer: PageTier::Small,
        threads: 1,
        ..SegmentsConfig::new(4096, 5)
    };
    let segments = Segments::create(&config).unwrap();
    let owner: Arc<Mapped> = segments.map().unwrap();
    let engine = ShmEngine::builder().build().unwrap();
    let peer = engine.add_peer(Access::Read).unwrap();
    let regions = engine.attach_segments(peer, &segments).unwrap();
    assert_eq!(regions.len(), 3);
    let target = Memory::host(4096).unwrap();
    let ours = engine.register(target.clone()).unwrap();
    for slot in 0..5_u8 {
        owner.write(u32::from(slot), 0, &[slot + 1; 4096]).unwrap();
        let at = owner.slot(u32::from(slot)).unwrap();
        let src = Addr { region: regions[at.segment as usize], offset: at.offset };
        let dst = Addr { region: ours, offset: 0 };
        let items = vec![Transfer { src, dst, len: 4096 }];
        engine.submit(TransferPlan { items, holds: vec![] }).unwrap();
        let mut bytes = [0; 4096];
        target.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [slot + 1; 4096]);
    }
}
