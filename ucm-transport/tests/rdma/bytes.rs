//! Exact bytes, and how few calls they take.

use ucm_transport::{Access, RdmaEngine, TransferEngine};

use crate::kit::{Far, Near, Random, device, exported, item, pattern, read};

/// Ten thousand random operations in plans of random size, reads and writes.
#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn ten_thousand_random_operations_move_exactly_their_bytes() {
    const LEN: usize = 1 << 20;
    let Some(device) = device() else { return };
    let far = Far::new(&device);
    let near = Near::new(&device, far.server.address());
    let (theirs, their_id) = exported(&far, &near, &pattern(1, LEN), Access::ReadWrite);
    let (ours, our_id) = near.local(LEN);
    let (mut their_bytes, mut our_bytes) = (pattern(1, LEN), vec![0; LEN]);
    let mut random = Random(5);
    let mut left = 10_000;
    while left > 0 {
        let write = random.below(2) == 0;
        let mut items = Vec::new();
        let mut to = random.below(200);
        for _ in 0..random.below(60) + 1 {
            let most = [30, 300, 5_000][random.below(3)];
            let len = random.below(most) + 1;
            if to + len > LEN {
                break;
            }
            let from = random.below(LEN - len);
            items.push((from, to, len));
            to += len + random.below(500);
        }
        left -= items.len().min(left);
        let plan = items.iter().map(|&(from, to, len)| match write {
            true => item((our_id, from), (their_id, to), len),
            false => item((their_id, from), (our_id, to), len),
        });
        near.run(plan.collect()).unwrap();
        let (src, dst) = if write {
            (our_bytes.clone(), &mut their_bytes)
        } else {
            (their_bytes.clone(), &mut our_bytes)
        };
        for (from, to, len) in items {
            dst[to..to + len].copy_from_slice(&src[from..from + len]);
        }
        // A58: at the moment of the completion the bytes are there, on both sides.
        assert!(read(&theirs) == their_bytes, "the peer's bytes");
        assert!(read(&ours) == our_bytes, "our bytes");
    }
    assert_eq!(near.engine.stats().strangers, 0);
}

/// Mutants seen to fail: a doorbell for each operation; every operation signalled.
#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn a_plan_takes_one_doorbell_and_few_signals() {
    let Some(device) = device() else { return };
    let far = Far::new(&device);
    let near = Near::new(&device, far.server.address());
    let (_theirs, from) = exported(&far, &near, &pattern(1, 1 << 20), Access::ReadWrite);
    let (ours, to) = near.local(1 << 20);
    let before = near.engine.stats();
    // Pieces apart on both sides: an operation for each.
    let apart: Vec<_> = (0..61).map(|i| item((from, i * 9_000), (to, i * 10_000), 8_448)).collect();
    near.run(apart).unwrap();
    let after = near.engine.stats();
    assert_eq!(after.reads - before.reads, 61);
    assert_eq!((after.doorbells - before.doorbells, after.signalled - before.signalled), (1, 1));
    // Together on the far side: scattered by as few operations as the pieces of one allow.
    let before = after;
    let together: Vec<_> =
        (0..64).map(|i| item((from, i * 1_728), (to, i * 2_000), 1_728)).collect();
    near.run(together).unwrap();
    let after = near.engine.stats();
    let most = 64 / u64::from(device.info().max_pieces.min(16)) + 1;
    assert!(after.reads - before.reads <= most, "{before:?} {after:?}");
    assert_eq!(after.doorbells - before.doorbells, 1);
    let bytes = pattern(1, 1 << 20);
    let got = read(&ours);
    assert!((0..64).all(|i| got[i * 2_000..][..1_728] == bytes[i * 1_728..][..1_728]));
}

/// A queue that is shorter than the plan: places come free while it runs. Mutant seen to fail: places
/// of unsignalled operations that do not come free.
#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn plans_longer_than_the_queue_go_through() {
    let Some(device) = device() else { return };
    let far = Far::new(&device);
    let near = Near::with(RdmaEngine::builder(&device).queue(8).pieces(1), far.server.address());
    let bytes = pattern(3, 1 << 20);
    let (_theirs, from) = exported(&far, &near, &bytes, Access::Read);
    let (ours, to) = near.local(1 << 20);
    let items: Vec<_> = (0..1_000).map(|i| item((from, i * 1_000), (to, i * 1_001), 999)).collect();
    assert_eq!(near.run(items).unwrap(), 999_000);
    let got = read(&ours);
    assert!((0..1_000).all(|i| got[i * 1_001..][..999] == bytes[i * 1_000..][..999]));
    // A signal for each quarter of the queue, and with it two operations at once, to the end.
    let stats = near.engine.stats();
    assert_eq!((stats.reads, stats.signalled), (1_000, 500), "{stats:?}");
}

/// One plan with two peers.
#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn a_plan_may_gather_from_several_peers() {
    let Some(device) = device() else { return };
    let (far, other) = (Far::new(&device), Far::new(&device));
    let near = Near::new(&device, far.server.address());
    let second =
        near.engine.connect(other.server.address(), &crate::kit::secret(), crate::kit::soon());
    let second = second.unwrap();
    let (_theirs, from) = exported(&far, &near, &pattern(1, 50_000), Access::Read);
    let token = other.owner.export(crate::kit::filled(&pattern(2, 50_000)), Access::Read).unwrap();
    let from_other = near.engine.attach(&second, token, crate::kit::soon()).unwrap();
    let (ours, to) = near.local(100_000);
    let items = vec![item((from, 0), (to, 0), 50_000), item((from_other, 0), (to, 50_000), 50_000)];
    assert_eq!(near.run(items).unwrap(), 100_000);
    let got = read(&ours);
    assert!(got[..50_000] == pattern(1, 50_000) && got[50_000..] == pattern(2, 50_000));
    near.engine.deregister(from).unwrap();
}
