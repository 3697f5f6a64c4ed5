//! Layer-wise loads, and refusals by prediction.

use std::time::{Duration, Instant};

use ucm_queue::{Deadline, ErrorKind, LayerGroup, Outcome, Request, Task};

use crate::support::*;

const BYTES: u64 = 256;
const D: Duration = Duration::from_millis(5);

/// `groups` groups of `each` layers, one shard a layer, shard `i` to place `i`.
fn groups(buffer: &Buffer, groups: u64, each: u64) -> Vec<LayerGroup> {
    (0..groups)
        .map(|group| {
            let layers = group * each..(group + 1) * each;
            let shards = layers.clone().map(|i| buffer.shard(key(i), i)).collect();
            let requests = vec![Request { shards, deadline: None }];
            let narrow = |layer| u32::try_from(layer).unwrap();
            LayerGroup { layers: narrow(layers.start)..narrow(layers.end), task: Task { requests } }
        })
        .collect()
}

#[test]
fn layers_end_in_order_and_copies_overlap_the_reads_of_the_next() {
    let copy = D / 8;
    let mut world = World::with_copies(
        Node::new(128, BYTES),
        1,
        64,
        Copies { per_item: copy, ..Copies::default() },
        |_| Box::new(move |_, _| (D, Fate::Good)),
        |_, builder| builder.backend_depth(4),
    );
    let begin = world.now;
    let rank = &world.ranks[0];
    let layers = rank.queue.submit_layers(groups(&rank.buffer, 8, 8), world.now).unwrap();
    let mut ended = Vec::new();
    while world.step(None) {
        for layer in 0..64 {
            if !ended.contains(&layer) && layers.group(layer).unwrap().is_done() {
                ended.push(layer);
            }
        }
        // Nothing of group g + 2 is read before g has ended.
        let read = world.loads().len();
        assert!(read <= ended.len() + 16, "{read} reads begun, {} layers ended", ended.len());
    }
    assert_eq!(ended, (0..64).collect::<Vec<_>>());
    let took = world.now - begin;
    let floor = (D * 64 / 4).max(copy * 64);
    assert!(took <= floor.mul_f64(1.1), "took {took:?}, the floor is {floor:?}");
    assert_eq!(world.ranks[0].device.stats().synchronisations, 0, "Q13");
    (0..64).for_each(|i| world.ranks[0].buffer.assert_holds(key(i), i));
}

#[test]
fn a_layer_is_awaited_by_itself() {
    let node = Node::new(32, BYTES);
    let rank = node.rank();
    let backend = Script::holding();
    let queue = rank.builder(backend.clone()).backend_depth(4).start().unwrap();
    let buffer = Buffer::of(&queue, 16, BYTES);
    let mut layers = queue.submit_layers(groups(&buffer, 4, 4)).unwrap();
    backend.wait_held(4);
    assert_eq!(backend.held(), (0..4).map(key).collect::<Vec<_>>(), "the first group first");
    backend.release_some(4);
    assert_eq!(layers.wait_layer(3, watchdog()), Some(vec![Outcome::Loaded]));
    assert_eq!(layers.wait_layer(4, Some(Instant::now())), None);
    assert_eq!(layers.wait_layer(99, watchdog()), None);
    backend.wait_held(4);
    assert_eq!(backend.held(), (4..8).map(key).collect::<Vec<_>>());
    // As a future, too.
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    let future = std::pin::Pin::new(layers.group_mut(9).unwrap());
    assert!(Future::poll(future, &mut cx).is_pending());
    backend.open();
    assert_eq!(layers.wait(watchdog()), Some(vec![vec![Outcome::Loaded]; 4]));
    (0..16).for_each(|i| buffer.assert_holds(key(i), i));
}

#[test]
fn a_cancelled_group_lets_the_next_begin() {
    let node = Node::new(32, BYTES);
    let rank = node.rank();
    let backend = Script::holding();
    let queue = rank.builder(backend.clone()).backend_depth(2).start().unwrap();
    let buffer = Buffer::of(&queue, 16, BYTES);
    let layers = queue.submit_layers(groups(&buffer, 4, 4)).unwrap();
    backend.wait_held(2);
    layers.group(5).unwrap().cancel();
    layers.group(0).unwrap().cancel();
    assert_eq!(layers.wait_layer(0, watchdog()), Some(vec![Outcome::Cancelled]));
    assert_eq!(layers.wait_layer(5, watchdog()), Some(vec![Outcome::Cancelled]));
    backend.open();
    for layer in [8, 12] {
        assert_eq!(layers.wait_layer(layer, watchdog()), Some(vec![Outcome::Loaded]));
    }
    assert!(layers.preempt(watchdog()));
    queue.close().unwrap();
    node.assert_at_rest();
}

#[test]
fn a_request_that_would_be_late_is_refused_with_the_prediction() {
    // Four reads of 5 ms at a time: 1.25 ms a shard.
    let mut world = World::new(
        Node::new(512, BYTES),
        1,
        400,
        |_| Box::new(move |_, _| (D, Fate::Good)),
        |_, builder| builder.backend_depth(4).refuse_late(true),
    );
    let task = |world: &World, keys: std::ops::Range<u64>, deadline| {
        let buffer = &world.ranks[0].buffer;
        let shards = keys.map(|i| buffer.shard(key(i), i)).collect();
        Task { requests: vec![Request { shards, deadline }] }
    };
    let soon = Some(Deadline::After(Duration::from_millis(1)));
    // Nothing measured, nothing refused.
    let first = world.ranks[0].queue.submit(task(&world, 0..40, soon), world.now).unwrap();
    assert_eq!(first.predicted(), Duration::ZERO);
    world.run();
    world.ranks[0].queue.submit(task(&world, 40..80, None), world.now).unwrap();
    world.run();
    let big = world.ranks[0].queue.submit(task(&world, 100..180, None), world.now).unwrap();
    let expected = Duration::from_millis(100);
    let near = |time: Duration| time > expected.mul_f64(0.8) && time < expected.mul_f64(1.3);
    assert!(near(big.predicted()), "{:?}", big.predicted());
    let error = world.ranks[0]
        .queue
        .submit(task(&world, 200..201, Some(Deadline::After(D * 10))), world.now)
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooLate);
    assert!(near(error.predicted().unwrap()), "{error}");
    assert_eq!(world.ranks[0].queue.stats().rejected[ErrorKind::TooLate as usize], 1);
    let later = Some(Deadline::After(D * 60));
    let small = world.ranks[0].queue.submit(task(&world, 201..202, later), world.now).unwrap();
    world.run();
    assert_all_loaded(&big);
    assert_all_loaded(&small);
    world.ranks[0].buffer.assert_untouched(200);
}
