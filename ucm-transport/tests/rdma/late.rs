//! Late writes in the middle of long plans. Those of single reads that hang are tests of the library's
//! own, because they must make an adapter hang.

use std::time::Duration;

use ucm_transport::{
    Access, ErrorKind, Memory, RdmaEngine, RegionId, Ticket, TransferEngine, TransferPlan,
};

use crate::kit::{Far, Near, device, eventually, exported, item, pattern, read};

/// Pieces, with gaps between.
const PIECES: usize = 30_000;
const PIECE: usize = 200;
const STEP: usize = 256;
const LEN: usize = PIECES * STEP;

struct Running {
    far: Far,
    near: Near,
    from: RegionId,
    target: Memory,
    to: RegionId,
    ticket: Ticket,
}

/// A read that has brought some of its bytes and not all: it has many times more operations than the
/// queue has places.
fn running() -> Option<Running> {
    let device = device()?;
    let far = Far::new(&device);
    let builder = RdmaEngine::builder(&device).queue(8).pieces(1);
    let near = Near::with(builder, far.server.address());
    let (_, from) = exported(&far, &near, &vec![1; LEN], Access::Read);
    let (target, to) = near.local(LEN);
    let items = (0..PIECES).map(|i| item((from, i * STEP), (to, i * STEP), PIECE)).collect();
    let ticket = near.engine.submit(TransferPlan { items, holds: vec![] }).unwrap();
    let mut byte = [0];
    while byte != [1] {
        target.read(0, &mut byte).unwrap();
        std::thread::yield_now();
    }
    Some(Running { far, near, from, target, to, ticket })
}

#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn a_long_plan_is_cancelled_in_the_middle() {
    let Some(running) = running() else { return };
    let engine = &running.near.engine;
    assert_eq!(engine.deregister(running.to).unwrap_err().kind(), ErrorKind::Busy);
    assert!(engine.cancel(running.ticket));
    let mut last = [0];
    running.target.read(LEN - STEP, &mut last).unwrap();
    assert_eq!(last, [0], "it was cancelled in the middle");
    let mut ends = Vec::new();
    engine.poll(&mut ends);
    assert_eq!((ends.len(), ends[0].ticket), (1, running.ticket));
    assert_eq!(ends[0].result.as_ref().unwrap_err().kind(), ErrorKind::Cancelled);
    // The destination is used at once for something else.
    let fresh = pattern(77, LEN);
    running.target.write(0, &fresh).unwrap();
    for _ in 0..30 {
        assert!(read(&running.target) == fresh, "a byte of the old read");
        std::thread::sleep(Duration::from_millis(2));
    }
    // And through the engine: another read into the same place brings its own bytes only.
    let other = pattern(42, 1 << 20);
    let (_, source) = exported(&running.far, &running.near, &other, Access::Read);
    running.near.run(vec![item((source, 0), (running.to, 0), 1 << 20)]).unwrap();
    let got = read(&running.target);
    assert!(got[..1 << 20] == other && got[1 << 20..] == fresh[1 << 20..]);
    engine.deregister(running.from).unwrap();
    engine.deregister(running.to).unwrap();
}

#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn an_engine_is_dropped_in_the_middle_of_a_long_plan() {
    let Some(Running { near, target, far, .. }) = running() else { return };
    drop(near);
    let fresh = pattern(9, LEN);
    target.write(0, &fresh).unwrap();
    for _ in 0..30 {
        assert!(read(&target) == fresh, "a byte of the old read");
        std::thread::sleep(Duration::from_millis(2));
    }
    eventually("the owner's end of the connection", || far.owner.stats().connected == 0);
}
