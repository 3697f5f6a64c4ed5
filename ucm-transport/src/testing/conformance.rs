//! The suite that every engine passes, fake or real.
//!
//! **Invariant:** every case compares bytes, and the expected bytes are computed by this file alone.

use std::{
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread,
    time::Instant,
};

use super::{Bell, Harness, Random, Runner, WATCHDOG, harness::item};
use crate::{
    Completion, ErrorKind, Hold, Memory, Quiesce, RegionId, Rejected, Ticket, Transfer,
    TransferEngine, TransferPlan,
};

/// Runs all cases; each makes its own engine.
///
/// # Panics
/// When the engine does not behave as [`TransferEngine`] says.
pub fn conformance(harness: &(impl Harness + ?Sized)) {
    exact_bytes_of_random_fragments(harness);
    one_item_and_very_many(harness);
    later_plans_see_later_bytes(harness);
    memory_may_be_registered_again(harness);
    parts_of_a_bigger_allocation(harness);
    empty_plan_ends_with_nothing_moved(harness);
    every_plan_ends_once_and_gives_its_holds_back(harness);
    rejected_plans_come_back_untouched(harness);
    stale_regions_are_refused(harness);
    regions_in_use_stay(harness);
    quiesce_means_ended(harness);
    late_waker_hears_of_earlier_ends(harness);
    many_threads_submit(harness);
    dropping_the_engine_ends_everything(harness);
}

fn deadline() -> Instant {
    Instant::now() + WATCHDOG
}

/// Two registered regions and what the bytes should be.
struct Pair<'a, H: Harness + ?Sized> {
    harness: &'a H,
    src: Memory,
    dst: Memory,
    src_id: RegionId,
    dst_id: RegionId,
    src_bytes: Vec<u8>,
    dst_bytes: Vec<u8>,
}

impl<'a, H: Harness + ?Sized> Pair<'a, H> {
    fn new(harness: &'a H, engine: &dyn TransferEngine, len: usize, random: &mut Random) -> Self {
        let (src, dst) = (harness.source(len), harness.destination(len));
        Self::on(harness, engine, src, dst, random)
    }

    fn on(
        harness: &'a H,
        engine: &dyn TransferEngine,
        src: Memory,
        dst: Memory,
        random: &mut Random,
    ) -> Self {
        let (src_bytes, dst_bytes) = (random.bytes(src.len()), random.bytes(dst.len()));
        harness.write(&src, 0, &src_bytes);
        harness.write(&dst, 0, &dst_bytes);
        let src_id = harness.register(engine, &src);
        let dst_id = harness.register(engine, &dst);
        Self { harness, src, dst, src_id, dst_id, src_bytes, dst_bytes }
    }

    /// Notes that these items move.
    fn expect(&mut self, items: &[Transfer]) {
        for t in items {
            let at = |offset: u64| usize::try_from(offset).unwrap();
            let (from, to, len) = (at(t.src.offset), at(t.dst.offset), at(t.len));
            self.dst_bytes[to..to + len].copy_from_slice(&self.src_bytes[from..from + len]);
        }
    }

    fn whole(&self) -> Vec<Transfer> {
        vec![item(self.src_id, 0, self.dst_id, 0, self.src.len() as u64)]
    }

    fn verify(&self) {
        let mut bytes = vec![0; self.dst.len()];
        self.harness.read(&self.dst, 0, &mut bytes);
        if let Some(at) = bytes.iter().zip(&self.dst_bytes).position(|(a, b)| a != b) {
            panic!("destination byte {at} is {} instead of {}", bytes[at], self.dst_bytes[at]);
        }
        let mut bytes = vec![0; self.src.len()];
        self.harness.read(&self.src, 0, &mut bytes);
        assert!(bytes == self.src_bytes, "the source was changed");
    }

    /// Fragments with gaps on both sides, in random order, that do not overlap at the destination.
    fn fragments(&self, random: &mut Random, most: u64) -> Vec<Transfer> {
        let end = self.dst.len() as u64;
        let mut items = Vec::new();
        let mut to = random.range(0, 100);
        loop {
            let len = random.range(1, most);
            if to + len > end {
                break;
            }
            let from = random.range(0, end - len + 1);
            items.push(item(self.src_id, from, self.dst_id, to, len));
            to += len + random.range(0, 2) * random.range(0, most);
        }
        random.shuffle(&mut items);
        items
    }
}

fn exact_bytes_of_random_fragments(harness: &(impl Harness + ?Sized)) {
    let mut runner = Runner::new(harness.engine());
    let mut random = Random::new(1);
    for most in [2, 17, 300, 9_000, 100_000] {
        for _ in 0..4 {
            let len = usize::try_from(random.range(most * 3, most * 20)).unwrap();
            let mut pair = Pair::new(harness, &**runner.engine(), len, &mut random);
            let items = pair.fragments(&mut random, most);
            pair.expect(&items);
            let bytes = items.iter().map(|t| t.len).sum::<u64>();
            let ticket = runner.submit(items, Vec::new());
            assert_eq!(runner.wait(ticket).result.unwrap(), bytes);
            pair.verify();
        }
    }
    // Many pieces that are one run in the end, and one piece of several megabytes.
    let mut pair = Pair::new(harness, &**runner.engine(), 5 << 20, &mut random);
    let mut items: Vec<_> =
        (0..5 << 10).map(|i| item(pair.src_id, i << 10, pair.dst_id, i << 10, 1 << 10)).collect();
    random.shuffle(&mut items);
    pair.expect(&items);
    let ticket = runner.submit(items, Vec::new());
    assert_eq!(runner.wait(ticket).result.unwrap(), 5 << 20);
    pair.verify();
}

/// One byte, then 100,000 pieces of odd lengths at odd places.
fn one_item_and_very_many(harness: &(impl Harness + ?Sized)) {
    const ITEMS: u64 = 100_000;
    let mut runner = Runner::new(harness.engine());
    let mut random = Random::new(11);
    let len = usize::try_from(ITEMS * 24).unwrap();
    let mut pair = Pair::new(harness, &**runner.engine(), len, &mut random);
    let one = vec![item(pair.src_id, 4_097, pair.dst_id, 12_345, 1)];
    pair.expect(&one);
    let ticket = runner.submit(one, Vec::new());
    assert_eq!(runner.wait(ticket).result.unwrap(), 1);
    pair.verify();
    let mut from: Vec<u64> = (0..ITEMS).collect();
    random.shuffle(&mut from);
    let items: Vec<_> = from
        .iter()
        .zip(0..)
        .map(|(from, to)| {
            let (src, dst) = (from * 24 + random.range(0, 3), to * 24 + random.range(0, 3));
            item(pair.src_id, src, pair.dst_id, dst, random.range(1, 21))
        })
        .collect();
    pair.expect(&items);
    let most = runner.engine().capabilities().max_items;
    for items in items.chunks(most) {
        let bytes = items.iter().map(|t| t.len).sum::<u64>();
        let ticket = runner.submit(items.to_vec(), Vec::new());
        assert_eq!(runner.wait(ticket).result.unwrap(), bytes);
    }
    pair.verify();
}

/// A58: a plan submitted after the end of another moves what the source holds then.
fn later_plans_see_later_bytes(harness: &(impl Harness + ?Sized)) {
    let mut runner = Runner::new(harness.engine());
    let mut random = Random::new(12);
    let mut pair = Pair::new(harness, &**runner.engine(), 70_001, &mut random);
    for _ in 0..40 {
        let bytes = random.bytes(pair.src.len());
        harness.write(&pair.src, 0, &bytes);
        pair.src_bytes = bytes;
        let items = pair.fragments(&mut random, 9_000);
        pair.expect(&items);
        let ticket = runner.submit(items, Vec::new());
        runner.wait(ticket).result.unwrap();
        pair.verify();
    }
}

/// The same memory under several handles at once, and under a new one after the old is gone.
fn memory_may_be_registered_again(harness: &(impl Harness + ?Sized)) {
    let mut runner = Runner::new(harness.engine());
    let mut random = Random::new(13);
    let mut pair = Pair::new(harness, &**runner.engine(), 20_000, &mut random);
    for _ in 0..20 {
        let old = (pair.src_id, pair.dst_id);
        let engine = &**runner.engine();
        pair.src_id = harness.register(engine, &pair.src);
        pair.dst_id = harness.register(engine, &pair.dst);
        engine.deregister(old.0).unwrap();
        engine.deregister(old.1).unwrap();
        let items = pair.fragments(&mut random, 5_000);
        pair.expect(&items);
        let ticket = runner.submit(items, Vec::new());
        runner.wait(ticket).result.unwrap();
        pair.verify();
    }
}

/// A59: the registered region is a part of a bigger allocation.
fn parts_of_a_bigger_allocation(harness: &(impl Harness + ?Sized)) {
    const PART: usize = 50_000;
    let mut runner = Runner::new(harness.engine());
    let mut random = Random::new(2);
    for offset in [0, 4096, 4097, 12_345] {
        let (src, dst) = (harness.source(1 << 17), harness.destination(1 << 17));
        let around = random.bytes(1 << 17);
        harness.write(&dst, 0, &around);
        let parts = (src.part(offset, PART).unwrap(), dst.part(offset, PART).unwrap());
        let mut pair = Pair::on(harness, &**runner.engine(), parts.0, parts.1, &mut random);
        // First and last byte of the region, and some between.
        let last = PART as u64 - 1;
        let items = vec![
            item(pair.src_id, 0, pair.dst_id, last, 1),
            item(pair.src_id, last, pair.dst_id, 0, 1),
            item(pair.src_id, 7, pair.dst_id, 1_001, 40_000),
        ];
        pair.expect(&items);
        let ticket = runner.submit(items, Vec::new());
        assert_eq!(runner.wait(ticket).result.unwrap(), 40_002);
        pair.verify();
        let beyond = vec![item(pair.src_id, 0, pair.dst_id, last, 2)];
        let rejected = runner.engine().submit(TransferPlan { items: beyond, holds: vec![] });
        assert_eq!(rejected.unwrap_err().error.kind(), ErrorKind::OutOfBounds);
        let mut outside = vec![0; 1 << 17];
        harness.read(&dst, 0, &mut outside);
        assert!(outside[..offset] == around[..offset], "bytes before the region changed");
        let end = offset + PART;
        assert!(outside[end..] == around[end..], "bytes after the region changed");
    }
}

fn empty_plan_ends_with_nothing_moved(harness: &(impl Harness + ?Sized)) {
    let mut runner = Runner::new(harness.engine());
    let ticket = runner.submit(Vec::new(), vec![Box::new(7u8)]);
    let Completion { result, holds, .. } = runner.wait(ticket);
    assert_eq!((result.unwrap(), holds.len()), (0, 1));
}

fn every_plan_ends_once_and_gives_its_holds_back(harness: &(impl Harness + ?Sized)) {
    let mut runner = Runner::new(harness.engine());
    let mut random = Random::new(3);
    let mut pair = Pair::new(harness, &**runner.engine(), 64 << 10, &mut random);
    let items = |i: u64| vec![item(pair.src_id, i * 512, pair.dst_id, i * 512, 512)];
    let plans: Vec<_> = (0..128).map(items).collect();
    let drops = Drops::new();
    let tickets: Vec<Ticket> = plans
        .iter()
        .zip(0u64..)
        .map(|(items, i)| runner.submit(items.clone(), vec![drops.hold(), Box::new(i)]))
        .collect();
    let mut distinct = tickets.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), tickets.len(), "tickets are unique");
    for ((ticket, items), i) in tickets.into_iter().zip(&plans).zip(0u64..) {
        let before = drops.count();
        let mut completion = runner.wait(ticket);
        assert_eq!(completion.result.unwrap(), 512);
        assert_eq!(drops.count(), before, "holds are given back, not dropped");
        assert_eq!(completion.holds.len(), 2);
        let mark = completion.holds.pop().unwrap().downcast::<u64>().unwrap();
        assert_eq!(*mark, i, "the holds of this very plan");
        drop(completion.holds);
        assert_eq!(drops.count(), before + 1);
        pair.expect(items);
    }
    pair.verify();
    assert_eq!(runner.poll(), 0, "no plan ends twice");
}

fn rejected_plans_come_back_untouched(harness: &(impl Harness + ?Sized)) {
    let mut runner = Runner::new(harness.engine());
    let mut random = Random::new(4);
    let mut pair = Pair::new(harness, &**runner.engine(), 4096, &mut random);
    let (s, d) = (pair.src_id, pair.dst_id);
    let stale = RegionId { generation: d.generation.wrapping_add(1), ..d };
    let unknown = RegionId { index: u32::MAX, ..s };
    let good = item(s, 0, d, 0, 100);
    let cases = [
        (item(s, 0, d, 200, 0), ErrorKind::Invalid),
        (item(s, 0, d, 99, 10), ErrorKind::Invalid),
        (item(d, 50, d, 300, 10), ErrorKind::Invalid),
        (item(s, 4096, d, 200, 1), ErrorKind::OutOfBounds),
        (item(s, 0, d, 4090, 7), ErrorKind::OutOfBounds),
        (item(s, u64::MAX, d, 200, 2), ErrorKind::OutOfBounds),
        (item(s, 0, d, 200, u64::MAX), ErrorKind::OutOfBounds),
        (item(s, 0, stale, 200, 1), ErrorKind::StaleRegion),
        (item(unknown, 0, d, 200, 1), ErrorKind::StaleRegion),
    ];
    // An engine that moves nothing between destinations says so before it looks at overlaps.
    let skipped = |bad: &Transfer| bad.src.region == d && !harness.copies_locally();
    for (bad, kind) in cases.into_iter().filter(|(bad, _)| !skipped(bad)) {
        for items in [vec![good, bad], vec![bad, good]] {
            let drops = Drops::new();
            let plan = TransferPlan { items: items.clone(), holds: vec![drops.hold()] };
            let Rejected { plan, error } = runner.engine().submit(plan).unwrap_err();
            assert_eq!(error.kind(), kind, "{bad:?}: {error}");
            assert_eq!(plan.items, items);
            assert_eq!((plan.holds.len(), drops.count()), (1, 0));
        }
    }
    assert_eq!(runner.poll(), 0, "a rejected plan does not end as well");
    pair.verify();
    pair.expect(&[good]);
    let ticket = runner.submit(vec![good], Vec::new());
    assert_eq!(runner.wait(ticket).result.unwrap(), 100, "the engine works after rejections");
    pair.verify();
}

fn stale_regions_are_refused(harness: &(impl Harness + ?Sized)) {
    let engine = harness.engine();
    let mut random = Random::new(5);
    let old = Pair::new(harness, &*engine, 4096, &mut random);
    engine.deregister(old.src_id).unwrap();
    assert_eq!(engine.deregister(old.src_id).unwrap_err().kind(), ErrorKind::StaleRegion);
    let new = Pair::new(harness, &*engine, 4096, &mut random);
    assert_ne!(new.src_id, old.src_id);
    let plan = TransferPlan { items: old.whole(), holds: vec![] };
    assert_eq!(engine.submit(plan).unwrap_err().error.kind(), ErrorKind::StaleRegion);
    old.verify();
    new.verify();
}

fn regions_in_use_stay(harness: &(impl Harness + ?Sized)) {
    let mut runner = Runner::new(harness.engine());
    let mut random = Random::new(6);
    for _ in 0..8 {
        let mut pair = Pair::new(harness, &**runner.engine(), 4 << 20, &mut random);
        let items = pair.whole();
        pair.expect(&items);
        let ticket = runner.submit(items, Vec::new());
        // Either the plan has ended, with all bytes there, or the region is busy.
        match runner.engine().deregister(pair.dst_id) {
            Ok(()) => pair.verify(),
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::Busy);
                runner.engine().quiesce(Quiesce::Region(pair.dst_id), deadline()).unwrap();
                pair.verify();
                runner.engine().deregister(pair.dst_id).unwrap();
            }
        }
        assert_eq!(runner.wait(ticket).result.unwrap(), 4 << 20);
        runner.engine().deregister(pair.src_id).unwrap();
    }
}

fn quiesce_means_ended(harness: &(impl Harness + ?Sized)) {
    let mut runner = Runner::new(harness.engine());
    let mut random = Random::new(7);
    runner.engine().quiesce(Quiesce::All, deadline()).unwrap();
    for round in 0..6 {
        let mut pair = Pair::new(harness, &**runner.engine(), 1 << 20, &mut random);
        let items = pair.whole();
        pair.expect(&items);
        let ticket = runner.submit(items, Vec::new());
        let target = match round % 3 {
            0 => Quiesce::All,
            1 => Quiesce::Region(pair.src_id),
            _ => Quiesce::Ticket(ticket),
        };
        runner.engine().quiesce(target, deadline()).unwrap();
        pair.verify();
        assert_eq!(runner.wait(ticket).result.unwrap(), 1 << 20);
        runner.engine().quiesce(Quiesce::Ticket(ticket), deadline()).unwrap();
    }
}

fn late_waker_hears_of_earlier_ends(harness: &(impl Harness + ?Sized)) {
    let engine = harness.engine();
    let mut pair = Pair::new(harness, &*engine, 4096, &mut Random::new(8));
    let items = pair.whole();
    pair.expect(&items);
    let ticket = engine.submit(TransferPlan { items, holds: vec![] }).unwrap();
    engine.quiesce(Quiesce::All, deadline()).unwrap();
    let bell = Bell::new();
    engine.set_waker(Some(bell.waker()));
    bell.wait_past(0);
    let mut out = Vec::new();
    assert_eq!(engine.poll(&mut out), 1);
    assert_eq!(out.first().map(|c| c.ticket), Some(ticket));
    pair.verify();
}

fn many_threads_submit(harness: &(impl Harness + ?Sized)) {
    const THREADS: u64 = 4;
    const PLANS: u64 = 64;
    const CHUNK: u64 = 3000;
    let mut runner = Runner::new(harness.engine());
    let mut random = Random::new(9);
    let len = usize::try_from(THREADS * PLANS * CHUNK).unwrap();
    let mut pair = Pair::new(harness, &**runner.engine(), len, &mut random);
    let all = pair.whole();
    pair.expect(&all);
    let (src, dst) = (pair.src_id, pair.dst_id);
    let tickets = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for t in 0..THREADS {
            let (engine, tickets) = (Arc::clone(runner.engine()), &tickets);
            scope.spawn(move || {
                for p in 0..PLANS {
                    let at = (t * PLANS + p) * CHUNK;
                    let items = vec![item(src, at, dst, at, CHUNK)];
                    let ticket = engine.submit(TransferPlan { items, holds: vec![] }).unwrap();
                    tickets.lock().unwrap().push(ticket);
                }
            });
        }
    });
    for ticket in tickets.into_inner().unwrap() {
        assert_eq!(runner.wait(ticket).result.unwrap(), CHUNK);
    }
    pair.verify();
}

fn dropping_the_engine_ends_everything(harness: &(impl Harness + ?Sized)) {
    let mut random = Random::new(10);
    let engine = harness.engine();
    let pairs: Vec<_> =
        (0..4).map(|_| Pair::new(harness, &*engine, 2 << 20, &mut random)).collect();
    let drops = Drops::new();
    for pair in &pairs {
        let plan = TransferPlan { items: pair.whole(), holds: vec![drops.hold()] };
        engine.submit(plan).unwrap();
    }
    assert_eq!(Arc::strong_count(&engine), 1, "the harness keeps no engine");
    drop(engine);
    drops.wait(pairs.len());
    // Nothing writes any more: what is written now stays.
    for mut pair in pairs {
        let bytes = random.bytes(pair.dst.len());
        harness.write(&pair.dst, 0, &bytes);
        pair.dst_bytes = bytes;
        pair.verify();
    }
}

/// Holds that tell when they are dropped.
struct Drops {
    state: Arc<(Mutex<usize>, Condvar)>,
}

struct Dropped(Arc<(Mutex<usize>, Condvar)>);

impl Drops {
    fn new() -> Self {
        Self { state: Arc::default() }
    }

    fn hold(&self) -> Hold {
        Box::new(Dropped(Arc::clone(&self.state)))
    }

    fn count(&self) -> usize {
        *self.state.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self, count: usize) {
        let lock = self.state.0.lock().unwrap_or_else(PoisonError::into_inner);
        let missing = |n: &mut usize| *n < count;
        let (n, _) = self
            .state
            .1
            .wait_timeout_while(lock, WATCHDOG, missing)
            .unwrap_or_else(PoisonError::into_inner);
        assert_eq!(*n, count, "every hold is dropped");
    }
}

impl Drop for Dropped {
    fn drop(&mut self) {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.1.notify_all();
    }
}
