//! The region as a descriptor: seals, and what is refused.
//!
//! **Invariant:** nothing that is not a finished region of this version is mapped for use.

use std::os::fd::OwnedFd;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use ucm_ctrl::{Control, CtrlError, ErrorKind, Geometry, LAYOUT_VERSION};

use crate::{
    key, own,
    parent::{Proc, Shared},
    rank,
};

fn region() -> (Control, OwnedFd) {
    let control = Control::create(&Geometry::single(64, 4, 2, 4096), [9; 16]).unwrap();
    let fd = control.fd().unwrap().unwrap();
    (control, fd)
}

fn memfd(bytes: u64, seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create("wrong", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

#[test]
fn d10_nobody_can_resize_a_region() {
    let (control, fd) = region();
    let len = control.total_bytes() as u64;
    for size in [0, len - 4096, len + 4096] {
        assert_eq!(rustix::fs::ftruncate(&fd, size), Err(rustix::io::Errno::PERM), "{size}");
    }
    let more = rustix::fs::fallocate(&fd, FallocateFlags::empty(), len, 4096);
    assert_eq!(more, Err(rustix::io::Errno::PERM));
    let unseal = rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE);
    assert_eq!(unseal, Err(rustix::io::Errno::PERM), "the seals are final");
    assert_eq!(rustix::fs::fstat(&fd).unwrap().st_size, i64::try_from(len).unwrap());
}

#[test]
fn a_second_mapping_is_the_same_cache() {
    let (control, fd) = region();
    let (_member, pool) = rank(&control);
    drop(own(&pool, &key(1)).publish().unwrap());
    let again = Control::attach(fd).unwrap();
    assert_eq!((again.geometry(), again.boot_token()), (control.geometry(), [9; 16]));
    let (member, view) = rank(&again);
    assert_eq!((member.id().0, view.prefix_lookup(&[key(1)]).unwrap()), (1, 1));
}

fn refusal(fd: OwnedFd) -> (ErrorKind, String) {
    let error = Control::attach(fd).unwrap_err();
    (error.kind(), error.to_string())
}

#[test]
fn d10_what_is_no_region_is_refused() {
    let both = SealFlags::SHRINK | SealFlags::GROW;
    for (fd, says) in [
        (memfd(100, both), "100 bytes are too few"),
        (memfd(65_536, SealFlags::SHRINK), "not sealed"),
        (memfd(65_536, both), "no magic number"),
    ] {
        let (kind, text) = refusal(fd);
        assert_eq!(kind, ErrorKind::Corrupt);
        assert!(text.contains(says), "{text}");
    }
    let file = tempfile();
    assert!(matches!(Control::attach(file), Err(CtrlError::Os { .. })));
}

/// An ordinary file: it has no seals.
fn tempfile() -> OwnedFd {
    let path = std::env::temp_dir().join(format!("ucm-ctrl-{}", std::process::id()));
    let file = std::fs::File::create_new(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    file.set_len(65_536).unwrap();
    file.into()
}

#[test]
fn d8_a04_an_unfinished_region_or_another_version_is_named_as_such() {
    let write = |fd: &OwnedFd, offset, bytes: &[u8]| {
        assert_eq!(rustix::io::pwrite(fd, bytes, offset).unwrap(), bytes.len());
    };
    // The magic is written last: without it the creator died on the way.
    let (_control, fd) = region();
    write(&fd, 0, &[0; 8]);
    assert!(refusal(fd).1.contains("not a finished control region"));

    let (_control, fd) = region();
    write(&fd, 8, &(LAYOUT_VERSION + 41).to_le_bytes());
    let (kind, text) = refusal(fd);
    assert_eq!(kind, ErrorKind::Version);
    let named =
        [LAYOUT_VERSION + 41, LAYOUT_VERSION].map(|v| text.contains(&format!("version {v}")));
    assert_eq!(named, [true; 2], "{text}");

    // A geometry that does not belong to the size.
    let (control, fd) = region();
    write(&fd, 64, &65_000_u32.to_le_bytes());
    let (kind, text) = refusal(fd);
    assert_eq!(kind, ErrorKind::Corrupt);
    assert!(text.contains(&control.total_bytes().to_string()), "{text}");
}

/// D11: any header at all is either the one we know or refused; nothing panics.
#[test]
fn d11_random_headers_are_refused() {
    let mut seed = 0x5eed_u64;
    let mut random = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    for round in 0..500 {
        let (_control, fd) = region();
        // Everything behind the magic, or single words of it.
        let words = if round % 2 == 0 { 71 } else { 1 };
        for _ in 0..words {
            let offset = if words == 1 { 8 + random() % 64 * 8 } else { 8 + random() % 568 };
            let value = match random() % 4 {
                0 => 0,
                1 => u64::MAX,
                2 => random() % 1000,
                _ => random(),
            };
            rustix::io::pwrite(&fd, &value.to_le_bytes(), offset).unwrap();
        }
        if let Ok(control) = Control::attach(fd) {
            // Harmless words: the sizes are those of the mapping.
            assert_eq!(control.geometry().pools[0].slots, 64);
        }
    }
}

/// S1: what a scheduler needs of its own does not grow with the cache.
#[test]
fn s1_a_scheduler_needs_little_memory() {
    let control = Control::create(&Geometry::single(300_000, 0, 1, 4096), [9; 16]).unwrap();
    let shared = Shared::of(&control);
    let (_member, pool) = rank(&control);
    for k in 0..1000 {
        drop(own(&pool, &key(k)).publish().unwrap());
    }
    let mut scheduler = Proc::start("scheduler", &shared, &[]);
    let said = scheduler.hear();
    let (ready, grown) = said.split_once(' ').unwrap();
    assert_eq!(ready, "1000");
    assert!(grown.parse::<u64>().unwrap() < 512 << 10, "{grown} bytes");
    assert!(scheduler.end().success());
}
