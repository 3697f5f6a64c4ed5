//! Quota, full disks, and devices that stop answering.
//!
//! **Invariant:** loads of what is there go on, whatever happens to dumps; what is removed to make room is
//! what was used longest ago.

use std::time::Duration;

use super::*;

fn block(n: u8) -> [u8; 16] {
    [n; 16]
}

fn put(backend: &FileBackend, n: u8, len: usize) -> Result<(), ErrorKind> {
    let mut bytes = vec![0; len];
    fill_pattern(&mut bytes, &block(n), 0, 0, 1);
    let sink = Collector::new();
    backend.dump(vec![sink.op_with(block(n), 0, &bytes).1]);
    sink.wait_one().0
}

fn take(backend: &FileBackend, n: u8, len: usize) -> Result<(), ErrorKind> {
    let sink = Collector::new();
    backend.load(vec![sink.op(block(n), 0, len).1]);
    let (result, bytes) = sink.wait_one();
    if result.is_ok() {
        verify_pattern(&bytes, &block(n), 0, 0, 1).unwrap();
    }
    result
}

fn age(path: &Path, seconds: u64) {
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(seconds)).unwrap();
}

/// The file of a block's only shard.
fn file_of(dir: &Path, n: u8) -> PathBuf {
    let name = format!("{:032x}-0", u128::from_be_bytes(block(n)));
    files(dir, "objects").into_iter().find(|p| p.ends_with(&name)).unwrap()
}

/// Waits for what another thread does, without a limit of its own.
fn until(mut done: impl FnMut() -> bool) {
    while !done() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

in_all_ways! {
    /// Broken on purpose: the youngest go; touches do not count (then this test does not end); loads do not
    /// count; eviction stops too late.
    fn a46_above_the_quota_the_oldest_go() {
        let dir = tempfile::tempdir().unwrap();
        let each = 300_000;
        let quota = 10 * (304 << 10);
        let backend = open(dir.path());
        for n in 1..=10 {
            put(&backend, n, each).unwrap();
            age(&file_of(dir.path(), n), 10_000 - 100 * u64::from(n));
        }
        drop(backend);
        let backend = FileBackend::open(config(dir.path(), "model=a").quota_bytes(quota)).unwrap();
        // 1 is touched, 2 is loaded: they become young.
        backend.touch(&[block(1)]).unwrap();
        take(&backend, 2, each).unwrap();
        until(|| fs::metadata(file_of(dir.path(), 1)).unwrap().modified().unwrap() > SystemTime::now() - Duration::from_secs(60));
        put(&backend, 11, each).unwrap();
        put(&backend, 12, each).unwrap();
        until(|| backend.report().evicted >= 2);
        drop(backend);
        let backend = open(dir.path());
        let there: Vec<u8> = (1..=12).filter(|n| take(&backend, *n, each).is_ok()).collect();
        // Down to nine tenths: nine of twelve are left.
        assert!(there.starts_with(&[1, 2]) && there.ends_with(&[11, 12]), "{there:?}");
        assert!(!there.contains(&3) && !there.contains(&4), "{there:?}");
        assert!((8..=10).contains(&there.len()), "{there:?}");
    }

    fn a46_segments_go_as_a_whole_and_the_written_one_stays() {
        let dir = tempfile::tempdir().unwrap();
        let small = |backend: &FileBackend, from: u8| {
            for n in from..from + 20 {
                put(backend, n, 100_000).unwrap();
            }
        };
        let first = FileBackend::open(config(dir.path(), "model=a").segment_bytes(1 << 20)).unwrap();
        small(&first, 1);
        drop(first);
        for (n, segment) in files(dir.path(), "segments").iter().enumerate() {
            age(segment, 1000 + n as u64);
        }
        let two = config(dir.path(), "model=a").segment_bytes(1 << 20).quota_bytes(2 << 20);
        let backend = FileBackend::open(two).unwrap();
        let reader = open(dir.path());
        small(&backend, 100);
        until(|| backend.report().evicted >= 2);
        // What another process reads afterwards is whole or missing.
        let there = (1..120).filter(|n| match take(&reader, *n, 100_000) {
            Ok(()) => true,
            Err(kind) => {
                assert_eq!(kind, ErrorKind::Missing);
                false
            }
        }).count();
        assert!((8..=30).contains(&there), "{there} objects are left");
        take(&reader, 119, 100_000).unwrap();
        assert_eq!(reader.report().quarantined, 0);
    }

    /// Broken on purpose: no second try; nothing is evicted; dumps go on trying at full speed.
    fn a46_a_full_disk_costs_old_objects_then_dumps_never_loads() {
        let dir = tempfile::tempdir().unwrap();
        let backend = open(dir.path());
        put(&backend, 1, 300_000).unwrap();
        put(&backend, 2, 300_000).unwrap();
        age(&file_of(dir.path(), 1), 1000);
        // Full once: something old goes, and the dump works.
        backend.fail_next(FileStep::Write, libc::ENOSPC);
        put(&backend, 3, 300_000).unwrap();
        assert!(backend.report().evicted >= 1);
        assert_eq!(take(&backend, 1, 300_000), Err(ErrorKind::Missing));
        take(&backend, 3, 300_000).unwrap();
        // Full whatever goes: dumps pause.
        for _ in 0..2 {
            backend.fail_next(FileStep::Create, libc::EDQUOT);
        }
        assert_eq!(put(&backend, 4, 300_000), Err(ErrorKind::NoSpace));
        assert!(backend.report().stores_off);
        assert_eq!(put(&backend, 5, 300_000), Err(ErrorKind::Unavailable));
        assert_eq!(put(&backend, 6, 100), Err(ErrorKind::Unavailable));
        assert_eq!(backend.report().refused_dumps, 2);
        // Somebody else has put something there, and it is loaded all the same.
        put(&open(dir.path()), 7, 300_000).unwrap();
        take(&backend, 7, 300_000).unwrap();
        // A second later it is tried again, and works.
        until(|| put(&backend, 8, 300_000).is_ok());
        assert!(!backend.report().stores_off);
        take(&backend, 8, 300_000).unwrap();
    }

    /// Broken on purpose: the breaker never opens; what waits is not ended (then this test does not end).
    fn a49_a_device_that_stops_answering() {
        let dir = tempfile::tempdir().unwrap();
        let settings = config(dir.path(), "model=a").stall_after(Duration::from_millis(300)).depth(2);
        let backend = FileBackend::open(settings).unwrap();
        put(&backend, 1, 300_000).unwrap();
        let stall = Stall::default();
        // More than can be on their way: some wait behind them.
        for _ in 0..2 {
            backend.inject(FileStep::Open, FileFault::Stall(stall.clone()));
        }
        let sink = Collector::new();
        backend.load((0..8).map(|_| sink.op(block(1), 0, 300_000).1).collect());
        stall.wait_for(1);
        until(|| backend.report().stalls == 1);
        // At once, not after the stall:
        assert_eq!(take(&backend, 1, 300_000), Err(ErrorKind::Unavailable));
        assert_eq!(put(&backend, 2, 300_000), Err(ErrorKind::Unavailable));
        assert_eq!(backend.contains(&[(block(1), 0)]), [Presence::Unknown]);
        assert!(backend.report().stalled_calls >= 1);
        // What waited has ended; what the device has keeps its memory.
        until(|| sink.ended() >= 6);
        stall.end();
        let ended = sink.wait(8);
        for c in ended.values() {
            if let Err(e) = &c.result {
                assert_eq!(e.kind(), ErrorKind::Unavailable);
            }
        }
        assert!(ended.values().any(|c| c.result.is_ok()));
        until(|| take(&backend, 1, 300_000).is_ok());
        put(&backend, 2, 300_000).unwrap();
        assert_eq!(backend.report().stalled_calls, 0);
    }

    /// Broken on purpose: the caller's thread looks where objects lie.
    fn a49_a_caller_never_waits_for_the_device() {
        let dir = tempfile::tempdir().unwrap();
        let backend = open(dir.path());
        put(&backend, 1, 1000).unwrap();
        put(&backend, 2, 300_000).unwrap();
        for step in [FileStep::Find, FileStep::Open, FileStep::Read] {
            let stall = Stall::default();
            let sink = Collector::new();
            if step != FileStep::Read || backend.mode().direct {
                backend.inject(step, FileFault::Stall(stall.clone()));
            }
            // Returns although nothing moves: else this test does not end.
            backend.load(vec![sink.op(block(1), 0, 1000).1, sink.op(block(2), 0, 300_000).1]);
            if step != FileStep::Read || backend.mode().direct {
                stall.wait_for(1);
                assert!(sink.ended() < 2);
            }
            stall.end();
            sink.wait(2).into_values().for_each(|c| c.result.unwrap());
        }
    }

    /// Broken on purpose: the caller's thread asks (then this test does not end); it waits without a limit.
    fn a49_questions_end_although_the_device_hangs() {
        let dir = tempfile::tempdir().unwrap();
        let settings = config(dir.path(), "model=a").stall_after(Duration::from_millis(300));
        let backend = FileBackend::open(settings).unwrap();
        put(&backend, 1, 1000).unwrap();
        let key = [(block(1), 0)];
        for remove in [false, true] {
            let stall = Stall::default();
            backend.inject(FileStep::Find, FileFault::Stall(stall.clone()));
            if remove {
                let error = backend.remove(&key).remove(0).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Unavailable);
            } else {
                assert_eq!(backend.contains(&key), [Presence::Unknown]);
            }
            stall.wait_for(1);
            until(|| backend.report().stalled_calls == 1);
            stall.end();
            until(|| backend.report().stalled_calls == 0);
        }
        // It was removed when the device answered.
        until(|| backend.contains(&key) == [Presence::Absent]);
        assert!(backend.remove(&key)[0].is_ok());
    }

    fn a49_a_store_can_be_closed_while_its_device_hangs() {
        let dir = tempfile::tempdir().unwrap();
        let settings = config(dir.path(), "model=a").stall_after(Duration::from_millis(200));
        let backend = FileBackend::open(settings).unwrap();
        put(&backend, 1, 300_000).unwrap();
        let stall = Stall::default();
        backend.inject(FileStep::Open, FileFault::Stall(stall.clone()));
        let sink = Collector::new();
        backend.load(vec![sink.op(block(1), 0, 300_000).1]);
        stall.wait_for(1);
        drop(backend);
        assert_eq!(sink.ended(), 0, "the memory is still the device's");
        stall.end();
        sink.wait_one().0.unwrap();
    }
}

/// A real file system of 64 MiB that a neighbour fills, with a quota twice its size.
#[test]
fn a46_a_neighbour_fills_the_disk() {
    let base = tempfile::tempdir().unwrap();
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=64m", "tmpfs"])
        .arg(base.path())
        .output()
        .is_ok_and(|o| o.status.success());
    if !mounted {
        println!("SKIP no tmpfs can be mounted here");
        return;
    }
    let result = std::panic::catch_unwind(|| {
        let settings = FileConfig::new(base.path(), "ns").quota_bytes(128 << 20);
        let backend = FileBackend::open(settings).unwrap();
        for n in 0..20 {
            put(&backend, n, 1 << 20).unwrap();
        }
        let neighbour = fs::File::create(base.path().join("neighbour")).unwrap();
        let zeros = vec![1; 1 << 20];
        let filled =
            (0..100).take_while(|n| neighbour.write_all_at(&zeros, *n << 20).is_ok()).count();
        assert!(filled > 10);
        // Old ones go for new ones; nothing that is there fails.
        let stored: Vec<u8> = (100..140).filter(|n| put(&backend, *n, 1 << 20).is_ok()).collect();
        assert!(!stored.is_empty(), "eviction made room");
        let mut there = 0;
        for n in (0..20).chain(100..140) {
            match take(&backend, n, 1 << 20) {
                Ok(()) => there += 1,
                Err(kind) => assert_eq!(kind, ErrorKind::Missing),
            }
        }
        assert!(there >= 5, "{there} are left");
        let report = backend.report();
        assert!(report.evicted > 0 && report.quarantined == 0, "{report:?}");
    });
    let unmounted = Command::new("umount").arg("-l").arg(base.path()).status().unwrap();
    assert!(unmounted.success());
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

/// A real file system on which every write hangs in the kernel.
///
/// Broken on purpose: the breaker never opens (then this test does not end).
#[test]
fn a49_a_frozen_file_system() {
    /// A process that thaws it however this one ends: whoever writes there would hang for ever.
    struct Thaw(std::process::Child);
    impl Thaw {
        fn of(dir: &Path) -> Self {
            let script = "read line; fsfreeze -u \"$0\"; umount -l \"$0\"";
            let mut command = Command::new("setsid");
            command.args(["sh", "-c", script]).arg(dir).stdin(std::process::Stdio::piped());
            Self(command.stderr(std::process::Stdio::null()).spawn().unwrap())
        }
    }
    impl Drop for Thaw {
        fn drop(&mut self) {
            drop(self.0.stdin.take());
            let _ = self.0.wait();
        }
    }
    let base = tempfile::tempdir().unwrap();
    let (image, dir) = (base.path().join("image"), base.path().join("mounted"));
    fs::create_dir(&dir).unwrap();
    fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
    let works = |program: &str, arguments: &[&std::ffi::OsStr]| {
        Command::new(program).args(arguments).output().is_ok_and(|o| o.status.success())
    };
    let mounted = works("mkfs.ext4", &["-q".as_ref(), image.as_ref()])
        && works("mount", &["-o".as_ref(), "loop".as_ref(), image.as_ref(), dir.as_ref()]);
    if !mounted {
        println!("SKIP no file system in a file can be mounted here");
        return;
    }
    let thaw = Thaw::of(&dir);
    let settings = FileConfig::new(&dir, "ns").threads(2).stall_after(Duration::from_millis(300));
    let backend = FileBackend::open(settings).unwrap();
    put(&backend, 1, 1 << 20).unwrap();
    take(&backend, 1, 1 << 20).unwrap();
    if !works("fsfreeze", &["-f".as_ref(), dir.as_ref()]) {
        println!("SKIP no file system can be frozen here");
        return;
    }
    let other = tempfile::tempdir().unwrap();
    let other = FileBackend::open(FileConfig::new(other.path(), "ns")).unwrap();
    let (sink, mut bytes) = (Collector::new(), vec![0; 1 << 20]);
    fill_pattern(&mut bytes, &block(2), 0, 0, 1);
    backend.dump(vec![sink.op_with(block(2), 0, &bytes).1]);
    until(|| backend.report().stalls == 1);
    assert_eq!(put(&backend, 3, 1 << 20), Err(ErrorKind::Unavailable));
    assert_eq!(take(&backend, 1, 1 << 20), Err(ErrorKind::Unavailable));
    assert_eq!(backend.contains(&[(block(1), 0)]), [Presence::Unknown]);
    assert_eq!(sink.ended(), 0, "what hangs keeps its memory");
    put(&other, 4, 1 << 20).unwrap();
    take(&other, 4, 1 << 20).unwrap();
    assert!(works("fsfreeze", &["-u".as_ref(), dir.as_ref()]));
    assert_eq!(sink.wait_one().0, Ok(()));
    until(|| put(&backend, 3, 1 << 20).is_ok());
    (1..4).for_each(|n| take(&backend, n, 1 << 20).unwrap());
    drop(backend);
    drop(thaw);
}
