//! Segments and mappings on ordinary memory.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;

use ucm_data::{
    ErrorKind, Geometry, NumaOutcome, NumaPolicy, Packing, PageTier, Segments, SegmentsConfig,
};

/// 4 KiB pages, so that other tests' huge-page settings do not matter.
pub(crate) fn small(slot_bytes: u64, slots: u32, segment_bytes: u64) -> SegmentsConfig {
    SegmentsConfig {
        segment_bytes,
        prefer: PageTier::Small,
        threads: 2,
        ..SegmentsConfig::new(slot_bytes, slots)
    }
}

/// Bytes that tell which slot and which offset they belong to.
fn payload(slot: u32, len: usize) -> Vec<u8> {
    let word = |i: usize| (u64::from(slot) << 32 | i as u64).to_le_bytes();
    (0..len.div_ceil(8)).flat_map(word).take(len).collect()
}

#[test]
fn m2_every_slot_keeps_its_own_bytes_in_every_mapping() {
    for packing in [Packing::PowerOfTwo, Packing::Dense] {
        let config = SegmentsConfig { packing, ..small(5000, 37, 64 << 10) };
        let segments = Segments::create(&config).unwrap();
        assert_eq!(segments.geometry().stride_bytes(), 8192);
        assert!(segments.geometry().segments().len() > 1);
        let writer = segments.map().unwrap();
        for slot in 0..37 {
            writer.write(slot, 0, &payload(slot, 5000)).unwrap();
        }
        // As another process would: from the encoded geometry and duplicated descriptors.
        let geometry = Geometry::decode(&segments.geometry().encode()).unwrap();
        let fds: Vec<OwnedFd> =
            segments.fds().iter().map(|fd| fd.as_fd().try_clone_to_owned().unwrap()).collect();
        let reader = Segments::from_fds(geometry, fds).unwrap().map().unwrap();
        for slot in 0..37 {
            let mut bytes = vec![0; 5000];
            reader.read(slot, 0, &mut bytes).unwrap();
            assert_eq!(bytes, payload(slot, 5000), "slot {slot}");
            assert_ne!(reader.slot_ptr(slot), writer.slot_ptr(slot));
        }
    }
}

#[test]
fn ranges_outside_a_slot_are_refused_although_the_segment_goes_on() {
    let mapped = Segments::create(&small(5000, 4, 1 << 20)).unwrap().map().unwrap();
    mapped.write(0, 4999, &[1]).unwrap();
    for (slot, offset, len) in
        [(0, 4999, 2), (0, 5000, 1), (4, 0, 1), (0, u64::MAX, 1), (3, 0, 5001)]
    {
        let error = mapped.write(slot, offset, &vec![0; len]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{slot} {offset} {len}");
        let error = mapped.read(slot, offset, &mut vec![0; len]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfBounds, "{slot} {offset} {len}");
    }
    mapped.write(3, 5000, &[]).unwrap();
    assert_eq!(mapped.slot_ptr(4), None);
    assert_eq!(mapped.segment_range(1), None);
}

#[test]
fn d10_segments_cannot_be_resized_by_anybody() {
    let segments = Segments::create(&small(4096, 4, 1 << 20)).unwrap();
    for fd in segments.fds() {
        for size in [0, 4096, 1 << 30] {
            assert_eq!(rustix::fs::ftruncate(fd, size), Err(rustix::io::Errno::PERM));
        }
        let more = rustix::fs::SealFlags::WRITE;
        assert_eq!(rustix::fs::fcntl_add_seals(fd, more), Err(rustix::io::Errno::PERM));
    }
}

#[test]
fn unsealed_or_wrongly_sized_descriptors_are_refused() {
    let segments = Segments::create(&small(4096, 4, 1 << 20)).unwrap();
    let geometry = segments.geometry().clone();
    let make = |size: u64, seal: bool| {
        let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("evil", flags).unwrap();
        rustix::fs::ftruncate(&fd, size).unwrap();
        if seal {
            use rustix::fs::SealFlags;
            let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
            rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        }
        fd
    };
    let right = geometry.segments()[0].bytes;
    for (fd, word) in [(make(right, false), "not sealed"), (make(right - 1, true), "geometry says")]
    {
        let error = Segments::from_fds(geometry.clone(), [fd]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains(word), "{error}");
    }
    Segments::from_fds(geometry.clone(), [make(right, true)]).unwrap();
    let none: [OwnedFd; 0] = [];
    assert_eq!(Segments::from_fds(geometry, none).unwrap_err().kind(), ErrorKind::Corrupt);
    let (reader, _writer) = rustix::pipe::pipe().unwrap();
    let geometry = segments.geometry().clone();
    assert_eq!(Segments::from_fds(geometry, [reader]).unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn pages_are_real_before_anybody_maps_them() {
    let config = small(1 << 20, 20, 8 << 20);
    let progress = Mutex::new(Vec::new());
    let segments = Segments::create_with_progress(&config, &|done, total| {
        progress.lock().unwrap().push((done, total));
    })
    .unwrap();
    assert_eq!(segments.geometry().segments().len(), 3);
    for (fd, info) in segments.fds().iter().zip(segments.geometry().segments()) {
        let stat = rustix::fs::fstat(fd).unwrap();
        assert_eq!(u64::try_from(stat.st_blocks).unwrap() * 512, info.bytes);
    }
    let progress = progress.into_inner().unwrap();
    assert!(progress.iter().all(|(_, total)| *total == 20 << 20));
    assert_eq!(progress.iter().map(|(done, _)| *done).max(), Some(20 << 20));
}

#[test]
fn prefault_reports_progress_to_the_end_and_keeps_bytes() {
    let mapped = Segments::create(&small(1 << 20, 130, 64 << 20)).unwrap().map().unwrap();
    mapped.write(129, 77, &[0xC3; 100]).unwrap();
    for threads in [0, 1, 3] {
        let progress = Mutex::new(Vec::new());
        mapped
            .prefault(threads, &|done, total| progress.lock().unwrap().push((done, total)))
            .unwrap();
        let progress = progress.into_inner().unwrap();
        assert!(progress.is_sorted(), "{progress:?}");
        let total = mapped.geometry().total_bytes();
        assert_eq!(progress.last(), Some(&(total, total)));
    }
    let mut bytes = [0; 100];
    mapped.read(129, 77, &mut bytes).unwrap();
    assert_eq!(bytes, [0xC3; 100]);
}

#[test]
fn a20_numa_policies_are_a_reported_no_op_or_applied() {
    let config = SegmentsConfig { numa: NumaPolicy::Bind(vec![0]), ..small(4096, 4, 1 << 20) };
    let segments = Segments::create(&config).unwrap();
    match segments.numa() {
        NumaOutcome::SingleNode => assert_eq!(segments.geometry().segments()[0].node, None),
        NumaOutcome::Bound(nodes) => {
            assert_eq!(nodes, &[0]);
            assert_eq!(segments.geometry().segments()[0].node, Some(0));
        }
        other => panic!("{other:?}"),
    }
    let config = SegmentsConfig { numa: NumaPolicy::Bind(vec![4095]), ..config };
    let error = Segments::create(&config).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("node 4095"), "{error}");
}

#[test]
fn m4_bad_numbers_never_reach_the_kernel() {
    let error = Segments::create(&small(u64::MAX - 1, 2, 1 << 20)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("18446744073709551614"), "{error}");
    let error = Segments::create(&small(4096, 2, 4097)).unwrap_err();
    assert!(error.to_string().contains("4097"), "{error}");
}

#[test]
fn m3_more_memory_than_the_machine_has_is_a_shortage_with_numbers() {
    // 64 TiB of sparse-looking request: refused by arithmetic, nothing is allocated.
    let error = Segments::create(&small(1 << 40, 64, 1 << 46)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Shortage, "{error}");
    let shortage = error.shortage().unwrap();
    assert_eq!(shortage.wanted_bytes, 1 << 46);
    assert!(shortage.available_bytes < 1 << 46);
    assert!(error.to_string().contains("70368744177664"), "{error}");
}
