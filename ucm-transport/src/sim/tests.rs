//! The simulated device passes the suite of all engines, keeps its times, and does its faults.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::*;
use crate::{
    Addr, Transfer,
    testing::{Bell, conformance},
};

const MS: Duration = Duration::from_millis(1);

fn plan(device: &SimDevice, bytes: usize, pieces: u64) -> (TransferPlan, Memory) {
    let (src, dst) = (Memory::host(bytes).unwrap(), Memory::host(bytes).unwrap());
    src.write(0, &vec![7; bytes]).unwrap();
    let from = device.register(src).unwrap();
    let to = device.register(dst.clone()).unwrap();
    let len = bytes as u64 / pieces;
    let items = (0..pieces)
        .map(|i| Transfer {
            src: Addr { region: from, offset: i * len },
            dst: Addr { region: to, offset: i * len },
            len,
        })
        .collect();
    (TransferPlan { items, holds: vec![] }, dst)
}

fn written(memory: &Memory) -> usize {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes).unwrap();
    bytes.iter().filter(|byte| **byte == 7).count()
}

fn ends(device: &SimDevice) -> Vec<Completion> {
    let mut ends = Vec::new();
    device.poll(&mut ends);
    ends
}

#[test]
fn it_passes_the_suite_of_all_engines() {
    let rates = DeviceRates {
        bytes_per_s: 20 << 30,
        per_item: Duration::from_nanos(10),
        launch: Duration::from_micros(5),
        streams: 2,
        ..DeviceRates::default()
    };
    conformance(&move || SimDevice::start(rates).unwrap() as Arc<dyn TransferEngine>);
}

#[test]
fn bytes_move_when_they_are_due_and_not_before() {
    let start = Instant::now();
    let rates = DeviceRates { bytes_per_s: 1_000_000, launch: MS, ..DeviceRates::default() };
    let device = SimDevice::manual(rates, start);
    let (first, first_dst) = plan(&device, 2000, 2);
    let (second, second_dst) = plan(&device, 1000, 1);
    device.submit(first).unwrap();
    device.submit(second).unwrap();
    assert_eq!(device.next_due(), Some(start + 3 * MS));
    assert!(!device.advance(start + 2 * MS));
    assert_eq!((written(&first_dst), ends(&device).len()), (0, 0));
    assert!(device.advance(start + 3 * MS));
    assert_eq!((written(&first_dst), written(&second_dst)), (2000, 0), "one stream: in order");
    assert!(device.advance(start + 4 * MS));
    assert_eq!(written(&second_dst), 1000);
    assert_eq!(ends(&device).len(), 2);
    assert_eq!(device.stats().busy, 3 * MS);
}

#[test]
fn streams_copy_at_the_same_time() {
    let start = Instant::now();
    let rates = DeviceRates { per_item: MS, streams: 2, ..DeviceRates::default() };
    let device = SimDevice::manual(rates, start);
    for _ in 0..4 {
        device.submit(plan(&device, 8, 1).0).unwrap();
    }
    device.advance(start + MS);
    assert_eq!(ends(&device).len(), 2);
    device.advance(start + 2 * MS);
    assert_eq!(ends(&device).len(), 2);
}

#[test]
fn a_failed_copy_leaves_half_of_its_bytes() {
    let device = SimDevice::manual(DeviceRates::default(), Instant::now());
    device.inject(DeviceFault::Fails(ErrorKind::Failed));
    let (plan, dst) = plan(&device, 1000, 4);
    device.submit(plan).unwrap();
    device.advance(Instant::now());
    let ended = ends(&device);
    assert_eq!(ended[0].result.as_ref().unwrap_err().kind(), ErrorKind::Failed);
    assert_eq!(written(&dst), 500);
}

#[test]
fn a_stall_holds_its_stream_until_it_is_resumed() {
    let start = Instant::now();
    let rates = DeviceRates { per_item: MS, ..DeviceRates::default() };
    let device = SimDevice::manual(rates, start);
    device.inject(DeviceFault::Stalls);
    let (first, first_dst) = plan(&device, 8, 1);
    let region = first.items[0].dst.region;
    let first = device.submit(first).unwrap();
    device.submit(plan(&device, 8, 1).0).unwrap();
    assert!(!device.advance(start + 100 * MS));
    assert_eq!((device.stalled(), written(&first_dst)), (2, 0));
    assert_eq!(device.deregister(region).unwrap_err().kind(), ErrorKind::Busy);
    let stuck = device.quiesce(Quiesce::Ticket(first), Instant::now()).unwrap_err();
    assert_eq!(stuck.kind(), ErrorKind::Stuck);
    device.resume();
    assert!(device.advance(start + 101 * MS));
    assert_eq!((written(&first_dst), ends(&device).len()), (8, 1));
    assert!(device.advance(start + 102 * MS));
    assert_eq!(ends(&device).len(), 1);
    device.deregister(region).unwrap();
}

#[test]
fn lost_and_refused_plans_give_their_holds_back() {
    let device = SimDevice::manual(DeviceRates::default(), Instant::now());
    device.inject(DeviceFault::Refuses);
    device.inject(DeviceFault::Loses);
    let hold = Arc::new(());
    let held = |mut plan: TransferPlan| {
        plan.holds.push(Box::new(Arc::clone(&hold)));
        plan
    };
    let refused = device.submit(held(plan(&device, 8, 1).0)).unwrap_err();
    assert_eq!((refused.error.kind(), refused.plan.holds.len()), (ErrorKind::Busy, 1));
    drop(refused);
    device.submit(held(plan(&device, 8, 1).0)).unwrap();
    assert_eq!(Arc::strong_count(&hold), 2);
    device.advance(Instant::now());
    assert_eq!((Arc::strong_count(&hold), ends(&device).len()), (1, 0));
}

#[test]
fn a_device_with_a_thread_sleeps_until_a_copy_is_due() {
    let rates = DeviceRates { per_item: 5 * MS, ..DeviceRates::default() };
    let device = SimDevice::start(rates).unwrap();
    let bell = Bell::new();
    device.set_waker(Some(bell.waker()));
    let (plan, dst) = plan(&device, 64, 1);
    let begin = Instant::now();
    let seen = bell.rings();
    device.submit(plan).unwrap();
    bell.wait_past(seen);
    assert!(begin.elapsed() >= 5 * MS);
    assert_eq!((written(&dst), ends(&device).len()), (64, 1));
}
