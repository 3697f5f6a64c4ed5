//! F6: the dispatcher panics, at every step it has.

use std::sync::Arc;

use ucm_ctrl::FailKind;
use ucm_queue::{DumpRef, DumpTask, ErrorKind, Outcome};

use crate::support::*;

const BYTES: u64 = 512;

/// One run of a bit of everything; the dispatcher panics at step `nth`. Says whether it did.
fn run(nth: u64) -> bool {
    let node = Node::new(6, BYTES);
    let rank = node.rank();
    let backend = Script::new();
    let builder = rank
        .builder(backend.clone())
        .staging(rank.buffers(1))
        .dump_staging(rank.buffers(1))
        .backend_depth(3);
    let queue = Arc::new(builder.panic_at_step(nth).start().unwrap());
    let buffer = Buffer::of(&queue, 16, BYTES);
    (12..16).for_each(|i| buffer.fill(key(i), i));
    let mut loads = Vec::new();
    let mut dumps = Vec::new();
    let mut refused = 0;
    for round in 0..3 {
        match queue.submit(task_of(&buffer, (0..12).map(|i| key((i + round) % 12)))) {
            Ok(handle) => loads.push(handle),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Poisoned, "{error}");
                refused += 1;
            }
        }
        let shards =
            (12..16).map(|i| DumpRef { key: key(i), src: buffer.addr(i), len: None }).collect();
        match queue.dump(DumpTask { shards, durable: true, ..DumpTask::default() }) {
            Ok(handle) => dumps.push(handle),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Poisoned, "{error}");
                refused += 1;
            }
        }
        if round == 1
            && let Some(last) = loads.last()
        {
            last.cancel();
        }
        // In step, so that every run takes the same steps.
        for handle in &loads {
            for outcome in outcomes(handle) {
                let typed = match &outcome {
                    Outcome::Loaded | Outcome::Cancelled | Outcome::Stuck => true,
                    Outcome::Recompute { shards, kind } => {
                        shards == &[0] && *kind == FailKind::Abandoned
                    }
                    Outcome::Deadline => false,
                };
                assert!(typed, "step {nth}: {outcome:?}");
            }
            assert!(handle.wait_quiesced(watchdog()), "step {nth}");
        }
        for handle in &dumps {
            assert!(handle.wait_cached(watchdog()).is_some(), "step {nth}");
            assert!(handle.wait_durable(watchdog()).is_some(), "step {nth}");
        }
    }
    let poisoned = queue.check().is_err();
    if poisoned {
        let error = queue.submit(task_of(&buffer, [key(0)])).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Poisoned);
        assert!(error.to_string().contains("injected panic"), "{error}");
    } else {
        assert_eq!(refused, 0);
    }
    // Whatever happened, nothing is left, and another queue works.
    drop(queue);
    node.assert_at_rest();
    let queue = rank.builder(backend).staging(rank.buffers(1)).start().unwrap();
    let buffer = Buffer::of(&queue, 16, BYTES);
    assert_all_loaded(&queue.submit(task_of(&buffer, (0..12).map(key))).unwrap());
    (0..12).for_each(|i| buffer.assert_holds(key(i), i));
    poisoned
}

#[test]
fn f6_a_panic_at_any_step_ends_everything_typed() {
    quiet_injected_panics();
    let mut steps = 0;
    // Runs differ a little in how events fall into turns: only a few misses in a row are an end.
    let mut misses = 0;
    while misses < 3 {
        if run(steps) {
            misses = 0;
        } else {
            misses += 1;
        }
        steps += 1;
    }
    assert!(steps > 100, "only {steps} steps were seen");
}
