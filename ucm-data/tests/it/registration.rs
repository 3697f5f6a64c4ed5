//! A16, A17: registration in bounded pieces, with roll-back, against a device stub.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use ucm_data::{
    ErrorKind, Mapped, RegisterFailure, RegisterPolicy, RegisterRegion, Registration, Segments,
};

use crate::segments::small;

#[derive(Default)]
struct State {
    live: BTreeMap<usize, usize>,
    calls: usize,
    sticky: bool,
    most_bytes: usize,
}

/// Refuses calls over a limit, fails the k-th call, and leaves a sticky error behind every failure.
struct Device {
    limit: u64,
    /// What it tells callers; a lying device is how an oversized call is provoked.
    claims: u64,
    fail_calls: Vec<usize>,
    state: Mutex<State>,
}

impl Device {
    fn new(limit: u64, fail_calls: &[usize]) -> Arc<Self> {
        let fail_calls = fail_calls.to_vec();
        Arc::new(Self { limit, claims: limit, fail_calls, state: Mutex::default() })
    }

    fn live_bytes(&self) -> usize {
        self.state.lock().unwrap().live.values().sum()
    }
}

impl RegisterRegion for Device {
    fn max_piece_bytes(&self) -> u64 {
        self.claims
    }

    fn register(&self, base: NonNull<u8>, len: usize) -> Result<(), RegisterFailure> {
        let mut state = self.state.lock().unwrap();
        state.calls += 1;
        assert!(!state.sticky, "a call inherited an earlier error");
        if len as u64 > self.limit || self.fail_calls.contains(&state.calls) {
            state.sticky = true;
            return Err(RegisterFailure { code: 2, text: "out of memory".into() });
        }
        state.most_bytes = state.most_bytes.max(len);
        assert_eq!(state.live.insert(base.addr().get(), len), None, "registered twice");
        Ok(())
    }

    fn unregister(&self, base: NonNull<u8>, len: usize) -> Result<(), RegisterFailure> {
        let mut state = self.state.lock().unwrap();
        assert!(!state.sticky, "a call inherited an earlier error");
        assert_eq!(state.live.remove(&base.addr().get()), Some(len), "not registered like this");
        Ok(())
    }

    fn consume_error(&self) {
        self.state.lock().unwrap().sticky = false;
    }
}

/// 3 segments of 12 KiB slots: 16, 16 and 8 slots.
fn pool() -> Arc<Mapped> {
    Segments::create(&small(12 << 10, 40, 200 << 10)).unwrap().map().unwrap()
}

#[test]
fn a16_pieces_are_bounded_cover_everything_and_cut_no_slot() {
    let mapped = pool();
    let device = Device::new(50 << 10, &[]);
    let registration =
        Registration::new(Arc::clone(&mapped), device.clone(), RegisterPolicy::AllOrNothing)
            .unwrap();
    let total = mapped.geometry().total_bytes();
    assert_eq!(registration.summary().registered_bytes, total);
    assert_eq!(device.live_bytes() as u64, total);
    assert_eq!(device.state.lock().unwrap().most_bytes, 48 << 10);
    for slot in 0..40 {
        let at = mapped.slot(slot).unwrap();
        let piece = &registration.pieces()[registration.piece_of(slot).unwrap()];
        assert_eq!(piece.segment, at.segment);
        assert!(piece.offset <= at.offset);
        assert!(at.offset + (12 << 10) <= piece.offset + piece.bytes, "slot {slot} is cut");
    }
    assert_eq!(registration.piece_of(40), None);
    drop(registration);
    assert_eq!(device.live_bytes(), 0);
}

#[test]
fn a16_failure_of_any_call_rolls_back_names_the_piece_and_leaves_no_error() {
    let mapped = pool();
    let pieces = 4 + 4 + 2;
    for k in 1..=pieces {
        let device = Device::new(50 << 10, &[k]);
        let error =
            Registration::new(Arc::clone(&mapped), device.clone(), RegisterPolicy::AllOrNothing)
                .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Registration);
        let named = format!("piece {} of {pieces}", k - 1);
        assert!(error.to_string().contains(&named), "{error}");
        assert!(error.to_string().contains("out of memory"), "{error}");
        assert_eq!(device.live_bytes(), 0, "call {k}: pieces stay registered");
        assert!(!device.state.lock().unwrap().sticky, "call {k}: the error is still pending");
    }
}

#[test]
fn a17_a_refused_piece_is_excluded_and_counted() {
    let mapped = pool();
    let device = Device::new(50 << 10, &[2, 10]);
    let registration =
        Registration::new(Arc::clone(&mapped), device.clone(), RegisterPolicy::Partial).unwrap();
    let summary = registration.summary();
    assert_eq!(summary.refused.len(), 2);
    assert_eq!(summary.refused_bytes, 2 * (48 << 10));
    let total = mapped.geometry().total_bytes();
    assert_eq!(summary.registered_bytes + summary.refused_bytes, total);
    // Slots 4..8 are in piece 1 of segment 0, slots 36..40 in the last piece of segment 2.
    for slot in 0..40 {
        let refused = (4..8).contains(&slot) || (36..40).contains(&slot);
        assert_eq!(registration.piece_of(slot).is_none(), refused, "slot {slot}");
    }
    drop(registration);
    assert_eq!(device.live_bytes(), 0);
}

#[test]
fn a16_a_device_that_refuses_less_than_it_claims_is_an_error_not_a_crash() {
    let mapped = pool();
    let device = Arc::new(Device {
        limit: 40 << 10,
        claims: 60 << 10,
        fail_calls: vec![],
        state: Mutex::default(),
    });
    let error =
        Registration::new(mapped, device.clone(), RegisterPolicy::AllOrNothing).unwrap_err();
    assert!(error.to_string().contains("61440 bytes"), "{error}");
    assert_eq!(device.live_bytes(), 0);
}

#[test]
fn a_slot_larger_than_a_piece_is_refused_with_both_numbers() {
    let device = Device::new(8 << 10, &[]);
    let error =
        Registration::new(pool(), device.clone(), RegisterPolicy::AllOrNothing).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Registration);
    assert!(error.to_string().contains("8192") && error.to_string().contains("12288"), "{error}");
    assert_eq!(device.state.lock().unwrap().calls, 0);
}

#[test]
fn tiny_slots_are_registered_in_whole_pages() {
    let mapped = Segments::create(&small(100, 1000, 1 << 20)).unwrap().map().unwrap();
    let device = Device::new(10_000, &[]);
    let registration =
        Registration::new(Arc::clone(&mapped), device, RegisterPolicy::AllOrNothing).unwrap();
    assert!(registration.pieces().iter().all(|p| p.offset % 8192 == 0 && p.bytes <= 8192));
    assert_eq!(registration.summary().registered_bytes, mapped.geometry().total_bytes());
}
