//! Writing back, admission, known misses and breakers.
//!
//! **Invariant:** time passes only where a test moves its clock.

use std::time::Instant;

use super::*;

/// A clock that a test moves.
fn fake_clock() -> (Clock, Arc<AtomicU64>) {
    let (start, passed) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    let read = Arc::clone(&passed);
    (Arc::new(move || start + Duration::from_millis(read.load(Ordering::SeqCst))), passed)
}

/// Broken on purpose: the dump waits for the copy; the copy is made when the tier reads it; a failure of
/// the copy fails the dump.
#[test]
fn a_dump_does_not_wait_for_what_is_written_back() {
    let (a, b, gate) = (faulty(), faulty(), Gate::new());
    let stack = Stack::new(vec![tier("a", &a), tier("b", &b).writes(Writes::Back)]).unwrap();
    b.add(Rule::new(Fault::StallBefore(gate.clone())).dumps().times(1));
    let sink = Collector::new();
    stack.dump(vec![sink.op_with(A, 0, &pattern(0)).1]);
    let completed = sink.wait(1).into_values().next().unwrap();
    completed.result.unwrap();
    assert_eq!((a.inner().len(), b.inner().len()), (1, 0));
    completed.memory.write(0, &[0xEE; LEN]).unwrap();
    assert_eq!(stack.wait_written(Duration::ZERO), LEN as u64);
    gate.open();
    assert_eq!(stack.wait_written(LONG), 0);
    verify_pattern(&b.inner().object(&A, 0).unwrap(), &A, 0, 0, 0).unwrap();
    b.add(Rule::new(Fault::Fail(ErrorKind::Io)).dumps().times(1));
    assert_eq!(dump(&stack, 1), Ok(()));
    assert_eq!(stack.wait_written(LONG), 0);
    let report = stack.report().remove(1);
    assert_eq!((report.dumps, report.dump_bytes, report.dump_failures), (1, LEN as u64, 1));
}

/// Broken on purpose: dropping the stack does not wait.
#[test]
fn dropping_the_stack_waits_for_what_is_written_back() {
    let dir = tempfile::tempdir().unwrap();
    let config = || FileConfig::new(dir.path(), "ns").threads(1);
    let files = Tier::new("files", Arc::new(FileBackend::open(config()).unwrap()));
    let stack = Stack::new(vec![tier("a", &faulty()), files.writes(Writes::Back)]).unwrap();
    let (sink, bytes) = (Collector::new(), vec![7; 300_000]);
    stack.dump((0..50).map(|shard| sink.op_with(A, shard, &bytes).1).collect());
    assert!(sink.wait(50).into_values().all(|c| c.result.is_ok()));
    drop(stack);
    let keys: Vec<Key> = (0..50).map(|shard| (A, shard)).collect();
    let files = FileBackend::open(config()).unwrap();
    assert_eq!(files.contains(&keys), [Presence::There; 50]);
}

/// Broken on purpose: copies are not bounded; what finds no room is left out.
#[test]
fn what_finds_no_room_among_the_copies_is_written_through() {
    let (a, b, gate) = (faulty(), faulty(), Gate::new());
    let mut stack = Stack::new(vec![tier("a", &a), tier("b", &b).writes(Writes::Back)]).unwrap();
    Arc::get_mut(&mut stack.inner).unwrap().writing_back = Budget::new(LEN as u64);
    b.add(Rule::new(Fault::StallBefore(gate.clone())).dumps().times(2));
    assert_eq!(dump(&stack, 0), Ok(()));
    let sink = Collector::new();
    stack.dump(vec![sink.op_with(A, 1, &pattern(1)).1]);
    assert!(gate.wait_held(2, LONG));
    assert_eq!(sink.ended(), 0, "it waits for the tier");
    gate.open();
    assert_eq!(sink.wait_one().0, Ok(()));
    assert_eq!((b.inner().len(), stack.report()[1].written_through), (2, 1));
}

/// Broken on purpose: what the upper tier refuses is written back, and so nowhere for a while.
#[test]
fn what_only_one_tier_takes_is_written_through() {
    let (a, b, gate) = (faulty(), faulty(), Gate::new());
    let admission = Arc::new(Admission::new(100));
    let tiers = vec![
        tier("a", &a).admission(Arc::clone(&admission)).promotion(Promotion::Always),
        tier("b", &b).writes(Writes::Back),
    ];
    let stack = Stack::new(tiers).unwrap();
    // Objects that are never used again push a few out that are.
    for n in 0..20_000_u32 {
        let again = [n.to_le_bytes()[0] % 40; 16];
        admission.used(&if n % 4 == 0 { again } else { A }, n);
        admission.used(&again, 0);
    }
    assert!(admission.only_used_before());
    b.add(Rule::new(Fault::StallBefore(gate.clone())).dumps());
    let sink = Collector::new();
    stack.dump(vec![sink.op_with(A, 70_000, &pattern(70_000)).1]);
    assert!(gate.wait_held(1, LONG));
    assert_eq!(sink.ended(), 0);
    gate.open();
    assert_eq!(sink.wait_one().0, Ok(()));
    assert_eq!((a.inner().len(), b.inner().len()), (0, 1));
    // Loaded, it is used for the second time.
    assert_eq!(load(&stack, 70_000), Ok(()));
    assert_eq!((a.inner().len(), stack.report()[0].not_admitted), (1, 1));
}

#[test]
fn stacks_that_lose_objects_are_refused() {
    let a = faulty();
    let admission = || Arc::new(Admission::new(1));
    for tiers in [
        vec![tier("a", &a).writes(Writes::Back)],
        vec![tier("a", &a).writes(Writes::Never), tier("b", &a).writes(Writes::Back)],
        vec![tier("a", &a).admission(admission())],
        vec![tier("a", &a), tier("b", &a).writes(Writes::Back).admission(admission())],
    ] {
        assert_eq!(Stack::new(tiers).unwrap_err().kind(), ErrorKind::Invalid);
    }
}

/// Broken on purpose: the tier is asked all the same; a dump or a promotion leaves what was known; time
/// changes nothing.
#[test]
fn a_tier_is_not_asked_again_for_what_it_does_not_have() {
    let (a, b) = (faulty(), faulty());
    let (clock, passed) = fake_clock();
    let ttl = Duration::from_millis(1000);
    let tiers = vec![
        tier("a", &a).remember_absent(100, ttl).promotion(Promotion::Always).writes(Writes::Never),
        tier("b", &b).remember_absent(100, ttl),
    ];
    let stack = Stack::with_clock(tiers, clock).unwrap();
    let misses = || stack.report().iter().map(|t| (t.misses, t.known_misses)).collect::<Vec<_>>();
    for _ in 0..2 {
        assert_eq!(load(&stack, 0), Err(ErrorKind::Missing));
    }
    assert_eq!(misses(), [(1, 1), (1, 1)]);
    assert_eq!(stack.contains(&[(A, 0)]), [Presence::Absent]);
    assert_eq!(misses(), [(1, 2), (1, 2)]);
    // Stored here: known at once, and promoted into the tier that did not have it.
    assert_eq!(dump(&stack, 0), Ok(()));
    assert_eq!((load(&stack, 0), load(&stack, 0)), (Ok(()), Ok(())));
    let first = stack.report().remove(0);
    assert_eq!((misses(), first.hits, first.promoted), (vec![(1, 3), (1, 2)], 1, 1));
    // Stored by others: known when the time is over.
    assert_eq!(load(&stack, 1), Err(ErrorKind::Missing));
    put(&b, 1);
    passed.store(999, Ordering::SeqCst);
    assert_eq!(load(&stack, 1), Err(ErrorKind::Missing));
    passed.store(1000, Ordering::SeqCst);
    assert_eq!(stack.contains(&[(A, 1)]), [Presence::There]);
    assert_eq!(load(&stack, 1), Ok(()));
}

/// Broken on purpose: the end of a dump leaves what was said while it was on its way.
#[test]
fn a_miss_during_a_dump_does_not_outlive_it() {
    let (a, gate) = (faulty(), Gate::new());
    let tiers = vec![tier("a", &a).remember_absent(100, LONG)];
    let stack = Stack::new(tiers).unwrap();
    a.add(Rule::new(Fault::StallBefore(gate.clone())).dumps());
    let sink = Collector::new();
    stack.dump(vec![sink.op_with(A, 0, &pattern(0)).1]);
    assert!(gate.wait_held(1, LONG));
    assert_eq!(load(&stack, 0), Err(ErrorKind::Missing));
    gate.open();
    assert_eq!(sink.wait_one().0, Ok(()));
    assert_eq!(load(&stack, 0), Ok(()));
}

/// Broken on purpose: a failing tier is asked for ever; it is never tried again; what it would have had
/// counts as missing; loads and dumps share a breaker.
#[test]
fn a_failing_tier_is_passed_over_until_it_answers() {
    let (a, b) = (faulty(), faulty());
    let (clock, passed) = fake_clock();
    let tiers = vec![tier("a", &a).failures_off(3).writes(Writes::Never), tier("b", &b)];
    let stack = Stack::with_clock(tiers, clock).unwrap();
    put(&a, 0);
    put(&b, 1);
    a.add(Rule::new(Fault::Fail(ErrorKind::Io)).loads().times(4));
    (0..3).for_each(|_| assert_eq!(load(&stack, 0), Err(ErrorKind::Io)));
    assert_eq!(load(&stack, 0), Err(ErrorKind::Unavailable), "not asked, not missing");
    assert_eq!(load(&stack, 1), Ok(()), "others go on");
    assert_eq!(stack.contains(&[(A, 0), (A, 1)]), [Presence::Unknown, Presence::There]);
    let report = stack.report().remove(0);
    let counts = (report.loads_skipped, report.turned_off, report.loads_off, report.dumps_off);
    assert_eq!(counts, (2, 1, true, false));
    passed.store(1000, Ordering::SeqCst);
    assert_eq!(load(&stack, 0), Err(ErrorKind::Io), "one tries");
    passed.store(2999, Ordering::SeqCst);
    assert_eq!(load(&stack, 0), Err(ErrorKind::Unavailable));
    passed.store(3000, Ordering::SeqCst);
    assert_eq!((load(&stack, 0), load(&stack, 0)), (Ok(()), Ok(())));
    assert!(!stack.report()[0].loads_off);
}

/// Broken on purpose: the breaker of dumps is not asked; the home's own is taken for a success.
#[test]
fn dumps_into_a_failing_tier_are_left_out_or_refused() {
    let (a, b) = (faulty(), faulty());
    let stack =
        Stack::new(vec![tier("a", &a).failures_off(1), tier("b", &b).failures_off(1)]).unwrap();
    a.add(Rule::new(Fault::Fail(ErrorKind::Io)).dumps());
    assert_eq!((dump(&stack, 0), dump(&stack, 1)), (Ok(()), Ok(())));
    let report = stack.report().remove(0);
    assert_eq!((report.dump_failures, report.dumps_skipped), (1, 1));
    b.add(Rule::new(Fault::Lose).dumps());
    assert_eq!(
        (dump(&stack, 2), dump(&stack, 3)),
        (Err(ErrorKind::Lost), Err(ErrorKind::Unavailable))
    );
    assert_eq!((load(&stack, 0), load(&stack, 1)), (Ok(()), Ok(())), "loads go on");
}

/// Broken on purpose: the time without an end is not looked at.
#[test]
fn a49_a_tier_in_which_nothing_ends_gets_no_more() {
    let (a, b, gate) = (faulty(), faulty(), Gate::new());
    let (clock, passed) = fake_clock();
    let stack = Stack::with_clock(vec![tier("a", &a), tier("b", &b)], clock).unwrap();
    (0..2).for_each(|shard| put(&b, shard));
    a.add(Rule::new(Fault::StallBefore(gate.clone())).loads().shard(0));
    let sink = Collector::new();
    stack.load(vec![sink.op(A, 0, LEN).1]);
    assert!(gate.wait_held(1, LONG));
    assert_eq!(load(&stack, 1), Ok(()));
    passed.store(30_000, Ordering::SeqCst);
    assert_eq!(load(&stack, 1), Ok(()));
    let report = stack.report().remove(0);
    assert_eq!((report.misses, report.loads_skipped, report.loads_off), (1, 1, true));
    gate.open();
    assert_eq!(sink.wait_one().0, Ok(()));
    assert_eq!((load(&stack, 1), stack.report()[0].loads_off), (Ok(()), false));
}
