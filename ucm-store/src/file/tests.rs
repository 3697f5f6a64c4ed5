//! The file backend against damage, failures of the system, other processes and SIGKILL.
//!
//! **Invariant:** after every event an object is absent or whole, and the bytes are compared.

use std::{
    cell::Cell,
    fs,
    io::{BufRead, BufReader, Read as _},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::*;
use crate::{
    IoMemory, fill_pattern, pattern_word,
    testing::{Collector, Keeps, conformance},
    verify_pattern,
};

const B: [u8; 16] = *b"file test block.";
const LEN: usize = 300_001;

thread_local! {
    /// How the test of this thread reads and writes.
    static WAY: Cell<(FileIo, bool)> = const { Cell::new((FileIo::Auto, false)) };
}

fn config(dir: &Path, namespace: &str) -> FileConfig {
    let (io, private) = WAY.get();
    let memory = if private { MemoryOwner::Private } else { MemoryOwner::Shared };
    FileConfig::new(dir, namespace).threads(2).io(io).memory(memory)
}

fn open(dir: &Path) -> FileBackend {
    let backend = FileBackend::open(config(dir, "model=a")).unwrap();
    let (io, private) = WAY.get();
    // The folder of these tests can do everything: what runs is what is meant to run.
    let wanted = match (io, private) {
        (FileIo::Auto, false) => "file: io_uring, direct, copied",
        (FileIo::Auto, true) => "file: io_uring, direct, in place",
        (FileIo::Threads, _) => "file: threads, direct, in place",
        _ => "file: threads, buffered, in place",
    };
    if !backend.mode().missing.is_empty() {
        println!("SKIP {wanted}: {:?}", backend.mode().missing);
    } else {
        assert_eq!(backend.capabilities().mode, wanted);
    }
    backend
}

/// Makes each test one for each way to read and write.
macro_rules! in_all_ways {
    ($($(#[doc = $doc:literal])* fn $name:ident() $body:block)*) => {$(
        mod $name {
            use super::*;

            $(#[doc = $doc])*
            fn body() $body

            #[test]
            fn rings() {
                WAY.set((FileIo::Auto, false));
                body();
            }

            #[test]
            fn rings_in_place() {
                WAY.set((FileIo::Auto, true));
                body();
            }

            #[test]
            fn threads() {
                WAY.set((FileIo::Threads, false));
                body();
            }

            #[test]
            fn buffered() {
                WAY.set((FileIo::Buffered, false));
                body();
            }
        }
    )*};
}

fn bytes(block: &[u8; 16], shard: u32, generation: u64) -> Vec<u8> {
    let mut bytes = vec![0; LEN];
    fill_pattern(&mut bytes, block, shard, 0, generation);
    bytes
}

fn dump(backend: &FileBackend, shard: u32, generation: u64) -> Result<(), ErrorKind> {
    let sink = Collector::new();
    backend.dump(vec![sink.op_with(B, shard, &bytes(&B, shard, generation)).1]);
    sink.wait_one().0
}

/// Loads and verifies.
fn load(backend: &FileBackend, shard: u32, generation: u64) -> Result<(), ErrorKind> {
    let sink = Collector::new();
    backend.load(vec![sink.op(B, shard, LEN).1]);
    let (result, bytes) = sink.wait_one();
    if result.is_ok() {
        verify_pattern(&bytes, &B, shard, 0, generation).unwrap();
    }
    result
}

/// All files below a directory of the namespace.
fn files(dir: &Path, sub: &str) -> Vec<PathBuf> {
    fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { walk(&path, found) } else { found.push(path) }
        }
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        walk(&entry.unwrap().path().join(sub), &mut found);
    }
    found.sort();
    found
}

fn object(dir: &Path, shard: u32) -> PathBuf {
    let ending = format!("-{shard}");
    let mut all = files(dir, "objects").into_iter();
    all.find(|p| p.to_str().unwrap().ends_with(&ending)).unwrap()
}

mod crash;
mod packed;
mod room;

in_all_ways! {
    fn conforms_with_every_durability() {
        let dir = tempfile::tempdir().unwrap();
        for (n, durability) in [Durability::None, Durability::OnClose].into_iter().enumerate() {
            let next = AtomicU64::new(0);
            conformance(Keeps::Everything, || {
                let case = next.fetch_add(1, Ordering::Relaxed);
                let dir = dir.path().join(format!("{n}-{case}"));
                let config = config(&dir, "ns").durability(durability);
                Arc::new(FileBackend::open(config).unwrap())
            });
        }
    }
}

in_all_ways! {
    fn s2_fsync_publishes_whole_objects() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), "ns").durability(Durability::Fsync);
        let backend = FileBackend::open(config).unwrap();
        assert!(backend.capabilities().durable);
        dump(&backend, 0, 1).unwrap();
        load(&backend, 0, 1).unwrap();
        backend.fail_next(FileStep::Sync, libc::EIO);
        assert_eq!(dump(&backend, 1, 1), Err(ErrorKind::Io));
        assert_eq!(load(&backend, 1, 1), Err(ErrorKind::Missing));
    }
}

in_all_ways! {
    fn a43_failed_dumps_are_misses_and_leave_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let backend = open(dir.path());
        dump(&backend, 0, 1).unwrap();
        for step in [FileStep::Create, FileStep::Write, FileStep::Rename] {
            // A full disk has rules of its own: `room`.
            let errors = [
                (libc::EIO, ErrorKind::Io),
                (libc::EROFS, ErrorKind::Io),
                (libc::EACCES, ErrorKind::Io),
            ];
            for (errno, kind) in errors {
                backend.fail_next(step, errno);
                // Item k of a batch fails, the others do not.
                let sink = Collector::new();
                let ops = (1..9).map(|s| sink.op_with(B, s, &bytes(&B, s, 1)).1).collect();
                backend.dump(ops);
                let ended = sink.wait(8);
                let failed: Vec<_> = ended.values().filter_map(|c| c.result.as_ref().err()).collect();
                assert_eq!(failed.iter().map(|e| e.kind()).collect::<Vec<_>>(), [kind], "{step:?}");
                let lost = ended.values().find(|c| c.result.is_err()).unwrap().token;
                for token in 0..8u64 {
                    let shard = u32::try_from(token).unwrap() + 1;
                    let wanted = if token == lost { Err(ErrorKind::Missing) } else { Ok(()) };
                    assert_eq!(load(&backend, shard, 1), wanted);
                }
                assert_eq!(files(dir.path(), "tmp"), Vec::<PathBuf>::new());
                backend.remove(&(1..9).map(|s| (B, s)).collect::<Vec<_>>());
            }
            // An old object survives the failure of its successor.
            backend.fail_next(step, libc::EIO);
            assert_eq!(dump(&backend, 0, 2), Err(ErrorKind::Io));
            load(&backend, 0, 1).unwrap();
        }
    }
}

in_all_ways! {
    fn f8_any_damage_is_found_put_aside_and_heals() {
        let dir = tempfile::tempdir().unwrap();
        let backend = open(dir.path());
        let whole = 4096 + LEN as u64;
        let flips = [0, 8, 16, 47, 50, 60, 80, 88, 95, 4095, 4096, 4097, 200_000, whole - 1];
        for (n, at) in flips.into_iter().enumerate() {
            dump(&backend, 0, 1).unwrap();
            let file =
                fs::OpenOptions::new().read(true).write(true).open(object(dir.path(), 0)).unwrap();
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 0x20], at).unwrap();
            assert_eq!(backend.contains(&[(B, 0)]), [Presence::There]);
            assert_eq!(load(&backend, 0, 1), Err(ErrorKind::Corrupt), "byte {at}");
            // A27: the verdict turns at once.
            assert_eq!(backend.contains(&[(B, 0)]), [Presence::Absent]);
            assert_eq!(load(&backend, 0, 1), Err(ErrorKind::Missing));
            assert_eq!(backend.report().quarantined, n as u64 + 1);
        }
        dump(&backend, 0, 2).unwrap();
        load(&backend, 0, 2).unwrap();
    }
}

in_all_ways! {
    fn f8_truncated_and_extended_files_are_corrupt() {
        let dir = tempfile::tempdir().unwrap();
        let backend = open(dir.path());
        let whole = (4096 + LEN as u64).next_multiple_of(4096);
        for len in [0, 1, 4095, 4096, 4097, 100_000, whole - 4096, whole - 1, whole + 1, whole * 2] {
            dump(&backend, 0, 1).unwrap();
            let file = fs::OpenOptions::new().write(true).open(object(dir.path(), 0)).unwrap();
            assert_eq!(file.metadata().unwrap().len(), whole);
            file.set_len(len).unwrap();
            assert_eq!(load(&backend, 0, 1), Err(ErrorKind::Corrupt), "{len} bytes");
            assert_eq!(load(&backend, 0, 1), Err(ErrorKind::Missing));
        }
    }
}

in_all_ways! {
    fn a60_an_object_under_another_name_is_not_served() {
        let dir = tempfile::tempdir().unwrap();
        let backend = open(dir.path());
        dump(&backend, 0, 1).unwrap();
        dump(&backend, 1, 1).unwrap();
        fs::copy(object(dir.path(), 0), object(dir.path(), 1)).unwrap();
        assert_eq!(load(&backend, 1, 1), Err(ErrorKind::Corrupt));
        assert_eq!(load(&backend, 1, 1), Err(ErrorKind::Missing));
        load(&backend, 0, 1).unwrap();
    }
}

in_all_ways! {
    fn a41_every_namespace_sees_its_own_objects_only() {
        let dir = tempfile::tempdir().unwrap();
        let one = open(dir.path());
        let other = FileBackend::open(config(dir.path(), "model=b")).unwrap();
        dump(&one, 0, 1).unwrap();
        assert_eq!(other.contains(&[(B, 0)]), [Presence::Absent]);
        assert_eq!(load(&other, 0, 1), Err(ErrorKind::Missing));
        // Put there by hand (or by a collision of the hash in the name), the descriptor refuses it.
        let file = object(dir.path(), 0);
        dump(&other, 0, 1).unwrap();
        let all = files(dir.path(), "objects");
        let of_other = all.iter().find(|p| **p != file).unwrap();
        fs::copy(&file, of_other).unwrap();
        assert_eq!(load(&other, 0, 1), Err(ErrorKind::Corrupt));
        load(&one, 0, 1).unwrap();
    }
}

in_all_ways! {
    fn a27_transient_errors_remove_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let backend = open(dir.path());
        dump(&backend, 0, 1).unwrap();
        for (step, errno) in [
            (FileStep::Open, libc::EMFILE),
            (FileStep::Open, libc::EACCES),
            (FileStep::Read, libc::EIO),
            (FileStep::Read, libc::ESTALE),
        ] {
            backend.fail_next(step, errno);
            assert_eq!(load(&backend, 0, 1), Err(ErrorKind::Io));
            load(&backend, 0, 1).unwrap();
        }
        assert_eq!(backend.report(), FileReport::default());
    }
}

in_all_ways! {
    fn bytes_changed_in_shared_memory_do_not_condemn_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let backend = open(dir.path());
        dump(&backend, 0, 1).unwrap();
        let memory = IoMemory::private(LEN).unwrap();
        let last = memory.as_ptr().as_ptr().wrapping_add(LEN - 1);
        let (last, stop) = (std::sync::atomic::AtomicPtr::new(last), AtomicU64::new(0));
        std::thread::scope(|scope| {
            // Somebody else writes the last byte all the time, as a process gone wrong could.
            scope.spawn(|| {
                while stop.load(Ordering::Relaxed) == 0 {
                    // SAFETY: the byte lies in `memory`, which outlives this thread.
                    unsafe { last.load(Ordering::Relaxed).write_volatile(0xFF) };
                }
            });
            let sink = Collector::new();
            let rounds = if backend.mode().in_place { 100_000 } else { 100 };
            let ended = (0..rounds).any(|_| {
                let base = memory.as_ptr();
                // SAFETY: `memory` outlives the operation.
                let part = unsafe { IoMemory::from_raw(base, LEN, Box::new(())) };
                backend.load(vec![sink.op_on(B, 0, part).1]);
                sink.wait(1)
                    .into_values()
                    .any(|c| c.result.is_err_and(|e| e.kind() == ErrorKind::Corrupt))
            });
            stop.store(1, Ordering::Relaxed);
            // What is copied was verified before: then nothing is to be noticed.
            assert_eq!(ended, backend.mode().in_place, "whether the change was noticed");
        });
        assert_eq!(backend.report(), FileReport::default());
        load(&backend, 0, 1).unwrap();
    }
}

in_all_ways! {
    fn an_object_that_cannot_be_put_aside_is_still_no_hit() {
        let dir = tempfile::tempdir().unwrap();
        let backend = open(dir.path());
        dump(&backend, 0, 1).unwrap();
        fs::OpenOptions::new().write(true).open(object(dir.path(), 0)).unwrap().set_len(9000).unwrap();
        backend.fail_next(FileStep::Quarantine, libc::EROFS);
        assert_eq!(load(&backend, 0, 1), Err(ErrorKind::Corrupt));
        assert_eq!(backend.contains(&[(B, 0)]), [Presence::Absent]);
        dump(&backend, 0, 2).unwrap();
        assert_eq!(backend.contains(&[(B, 0)]), [Presence::There]);
        load(&backend, 0, 2).unwrap();
    }
}

in_all_ways! {
    fn the_quarantine_is_bounded_also_over_restarts() {
        let dir = tempfile::tempdir().unwrap();
        let config = || config(dir.path(), "ns").quarantine_files(3);
        for round in 0..3 {
            let backend = FileBackend::open(config()).unwrap();
            for shard in 0..2 {
                dump(&backend, shard, 1).unwrap();
                let file = fs::OpenOptions::new().write(true).open(object(dir.path(), shard)).unwrap();
                file.set_len(10).unwrap();
                assert_eq!(load(&backend, shard, 1), Err(ErrorKind::Corrupt));
            }
            let kept = files(dir.path(), "quarantine").len();
            assert_eq!(kept, [2, 3, 3][round]);
        }
    }
}

in_all_ways! {
    fn two_instances_share_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let (one, two) = (open(dir.path()), open(dir.path()));
        dump(&one, 0, 1).unwrap();
        load(&two, 0, 1).unwrap();
        dump(&two, 0, 2).unwrap();
        load(&one, 0, 2).unwrap();
        two.remove(&[(B, 0)]).pop().unwrap().unwrap();
        assert_eq!(load(&one, 0, 2), Err(ErrorKind::Missing));
    }
}

in_all_ways! {
    fn temps_of_the_living_stay_and_those_of_the_dead_go() {
        let dir = tempfile::tempdir().unwrap();
        let living = open(dir.path());
        let temp = living.inner.space.temp(false).unwrap();
        fs::write(living.inner.space.path().join("tmp/0123-0"), b"left behind").unwrap();
        assert_eq!(files(dir.path(), "tmp").len(), 2);
        let second = open(dir.path());
        assert_eq!(second.report().temps_removed, 1);
        assert_eq!(files(dir.path(), "tmp").len(), 1);
        temp.publish(&B, 9).unwrap();
        assert_eq!(files(dir.path(), "tmp").len(), 0);
    }
}

in_all_ways! {
    fn an_unusable_directory_is_named_with_a_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("plain-file");
        fs::write(&file, b"").unwrap();
        for path in [file.join("store"), file, PathBuf::from("/proc/ucm-store")] {
            let error = FileBackend::open(FileConfig::new(&path, "ns")).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Io);
            let text = error.to_string();
            assert!(text.contains(path.to_str().unwrap()) && text.contains("write access"), "{text}");
        }
        let long = vec![1; 4009];
        let error = FileBackend::open(FileConfig::new(dir.path(), long)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains("4009") && error.to_string().contains("4008"));
    }
}

in_all_ways! {
    fn touch_renews_all_shards_of_a_block() {
        let dir = tempfile::tempdir().unwrap();
        let mut backend = open(dir.path());
        for shard in 0..3 {
            dump(&backend, shard, 1).unwrap();
        }
        let old = SystemTime::UNIX_EPOCH;
        let time = |shard| fs::metadata(object(dir.path(), shard)).unwrap().modified().unwrap();
        for shard in 0..3 {
            let file = fs::File::options().write(true).open(object(dir.path(), shard)).unwrap();
            file.set_modified(old).unwrap();
        }
        backend.touch(&[B, [0; 16]]).unwrap();
        // One thread at least works until the queue is empty.
        let sink = Collector::new();
        backend.dump(vec![sink.op_with([3; 16], 0, b"x").1]);
        sink.wait(1);
        backend.pool.stop();
        assert!((0..3).all(|shard| time(shard) > old));
        let many = vec![B; 4097];
        assert_eq!(backend.touch(&many).unwrap_err().kind(), ErrorKind::Unavailable);
    }
}

#[test]
fn q9_idle_threads_never_wake() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    dump(&backend, 0, 1).unwrap();
    load(&backend, 0, 1).unwrap();
    let switches = || -> Vec<String> {
        let of_thread = |tid: &i32| {
            let path = format!("/proc/self/task/{tid}/status");
            let status = fs::read_to_string(path).unwrap();
            status.lines().filter(|l| l.contains("ctxt_switches")).collect::<String>()
        };
        backend.pool.thread_ids().iter().map(of_thread).collect()
    };
    let pause = |ms: u64| {
        let (_sender, nothing) = std::sync::mpsc::channel::<()>();
        nothing.recv_timeout(std::time::Duration::from_millis(ms)).unwrap_err();
    };
    pause(50); // the threads go back to sleep
    let before = switches();
    assert_eq!(before.len(), 2);
    pause(1000);
    assert_eq!(switches(), before);
}

/// Where the child of `s4_…` stores.
const CRASH_DIR: &str = "UCM_STORE_CRASH_DIR";
const CRASH_SHARDS: u32 = 4;
const CRASH_GENERATIONS: u64 = 5;

#[test]
#[ignore = "started by s4_sigkill_in_mid_dump_leaves_whole_objects_or_none"]
fn crash_child() {
    let Some(dir) = std::env::var_os(CRASH_DIR) else { return };
    let backend = open(Path::new(&dir));
    let of_generation = |g| (0..CRASH_SHARDS).map(|s| bytes(&B, s, g)).collect::<Vec<_>>();
    let contents: Vec<_> = (0..CRASH_GENERATIONS).map(of_generation).collect();
    println!("ready");
    // Each shard is dumped again and again, so that a kill at any time meets dumps in progress.
    std::thread::scope(|scope| {
        for shard in 0..CRASH_SHARDS {
            let (backend, contents) = (&backend, &contents);
            scope.spawn(move || {
                for bytes in contents.iter().cycle().filter_map(|c| c.get(shard as usize)) {
                    let base = std::ptr::NonNull::from(bytes.as_slice()).cast();
                    // SAFETY: dumps only read, and the bytes outlive this thread.
                    let memory = unsafe { IoMemory::from_raw(base, LEN, Box::new(())) };
                    let sink = Collector::new();
                    backend.dump(vec![sink.op_on(B, shard, memory).1]);
                    sink.wait(1).into_values().for_each(|c| c.result.unwrap());
                    println!("round");
                }
            });
        }
    });
}

#[test]
fn s4_sigkill_in_mid_dump_leaves_whole_objects_or_none() {
    let dir = tempfile::tempdir().unwrap();
    let (mut temps, mut loaded) = (0, 0);
    for kill in 0..40u64 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "file::tests::crash_child", "--ignored", "--nocapture"])
            .env(CRASH_DIR, dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        // Killed after a varying number of rounds, wherever it is by then.
        let mut lines = 0;
        let mut line = String::new();
        while lines < 1 + kill % 23 {
            line.clear();
            assert_ne!(output.read_line(&mut line).unwrap(), 0, "the child ended by itself");
            lines += u64::from(line.contains("ready") || line.contains("round"));
        }
        // A varying bit of computation, so that the kill does not always meet the same step.
        (0..kill * 500).for_each(|n| drop(std::hint::black_box(n.to_string())));
        child.kill().unwrap();
        child.wait().unwrap();
        drop(output.read_to_end(&mut Vec::new()));
        let backend = open(dir.path());
        temps += backend.report().temps_removed;
        assert_eq!(files(dir.path(), "tmp").len(), 0);
        for shard in 0..CRASH_SHARDS {
            let sink = Collector::new();
            backend.load(vec![sink.op(B, shard, LEN).1]);
            let (result, bytes) = sink.wait_one();
            match result {
                Err(kind) => assert_eq!(kind, ErrorKind::Missing),
                Ok(()) => {
                    let first = u64::from_le_bytes(*bytes.first_chunk().unwrap());
                    let generation = (0..CRASH_GENERATIONS)
                        .find(|g| pattern_word(&B, shard, 0, *g) == first)
                        .unwrap();
                    verify_pattern(&bytes, &B, shard, 0, generation).unwrap();
                    loaded += 1;
                }
            }
        }
        assert_eq!(backend.report().quarantined, 0, "no object was ever incomplete");
    }
    assert!(loaded > 0 && temps > 0, "kills met dumps: {temps} temporary files, {loaded} loads");
}

/// What the system may answer to a call, and what an operation may end with.
fn answers() -> Vec<(FileFault, Option<ErrorKind>)> {
    let mut all: Vec<_> = [0, 1, 500, 1000].map(|part| (FileFault::Short(part), None)).into();
    all.extend([libc::EINTR, libc::EAGAIN].map(|errno| (FileFault::Errno(errno), None)));
    all.push((FileFault::Errno(libc::EIO), Some(ErrorKind::Io)));
    all
}

in_all_ways! {
    /// One odd answer to a read: the object is loaded whole or the load fails as what it is; the
    /// object stays.
    ///
    /// Broken on purpose: a short count taken for all bytes (`Transfer::advance`), the end of a read
    /// taken for the end of the file (`judge` says proved).
    fn a44_every_odd_answer_to_a_read_is_survived() {
        let dir = tempfile::tempdir().unwrap();
        let backend = open(dir.path());
        dump(&backend, 0, 1).unwrap();
        if !backend.mode().direct {
            return; // `sys::whole` has its own test
        }
        for (fault, end) in answers() {
            backend.inject(FileStep::Read, fault.clone());
            assert_eq!(load(&backend, 0, 1).err(), end, "{fault:?}");
            load(&backend, 0, 1).unwrap();
        }
        // Nothing but nothing: an error, and no proof against the object.
        for fault in [FileFault::Short(0), FileFault::Errno(libc::EAGAIN)] {
            for _ in 0..16 {
                backend.inject(FileStep::Read, fault.clone());
            }
            assert_eq!(load(&backend, 0, 1), Err(ErrorKind::Io), "{fault:?}");
            load(&backend, 0, 1).unwrap();
        }
        assert_eq!(backend.report(), FileReport::default());
    }

    /// Broken on purpose: a failed write is published.
    fn a44_every_odd_answer_to_a_write_is_survived() {
        let dir = tempfile::tempdir().unwrap();
        let backend = open(dir.path());
        if !backend.mode().direct {
            return;
        }
        dump(&backend, 0, 1).unwrap();
        for (n, (fault, end)) in answers().into_iter().enumerate() {
            backend.inject(FileStep::Write, fault.clone());
            let generation = n as u64 + 2;
            assert_eq!(dump(&backend, 0, generation).err(), end, "{fault:?}");
            let now = if end.is_some() { generation - 1 } else { generation };
            load(&backend, 0, now).unwrap();
            assert_eq!(files(dir.path(), "tmp"), Vec::<PathBuf>::new());
        }
        for step in [FileStep::Allocate, FileStep::Write] {
            for errno in [libc::ENOSPC, libc::EDQUOT] {
                backend.inject(step, FileFault::Errno(errno));
                // Once: it is tried again.
                dump(&backend, 1, 1).unwrap();
                load(&backend, 1, 1).unwrap();
                assert_eq!(files(dir.path(), "tmp"), Vec::<PathBuf>::new());
            }
        }
    }

    /// One read is held up by its device: others pass it, and it ends when the device answers.
    fn a49_a_stalled_read_holds_up_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let backend = open(dir.path());
        if !backend.mode().direct {
            return;
        }
        dump(&backend, 0, 1).unwrap();
        dump(&backend, 1, 1).unwrap();
        let stall = Stall::default();
        backend.inject(FileStep::Read, FileFault::Stall(stall.clone()));
        let sink = Collector::new();
        backend.load(vec![sink.op(B, 0, LEN).1]);
        stall.wait_for(1);
        for _ in 0..20 {
            load(&backend, 1, 1).unwrap();
        }
        stall.end();
        let (result, bytes) = sink.wait_one();
        result.unwrap();
        verify_pattern(&bytes, &B, 0, 0, 1).unwrap();
    }

    /// Lengths, and places in memory, that no device takes as they are.
    fn a45_odd_lengths_and_odd_addresses() {
        let dir = tempfile::tempdir().unwrap();
        let backend = open(dir.path());
        for (n, len) in [1, 511, 512, 513, 1728, 4095, 4096, 4097, 8448, 515_328].into_iter().enumerate() {
            let shard = u32::try_from(n).unwrap();
            for (at, odd) in [(0, 0), (64, 64), (512, 1), (1, 512)] {
                let mut wanted = vec![0; len];
                fill_pattern(&mut wanted, &B, shard, 0, at as u64);
                let place = |offset: usize| {
                    let memory = IoMemory::private(len + 1024).unwrap();
                    let base = std::ptr::NonNull::new(memory.as_ptr().as_ptr().wrapping_add(offset));
                    // SAFETY: inside the memory, which is kept as the hold.
                    unsafe { IoMemory::from_raw(base.unwrap(), len, Box::new(memory)) }
                };
                let sink = Collector::new();
                let from = place(at);
                from.write(0, &wanted).unwrap();
                backend.dump(vec![sink.op_on(B, shard, from).1]);
                sink.wait(1).into_values().for_each(|c| c.result.unwrap());
                backend.load(vec![sink.op_on(B, shard, place(odd)).1]);
                let loaded = sink.wait(1).into_values().next().unwrap();
                loaded.result.unwrap();
                let mut bytes = vec![0; len];
                loaded.memory.read(0, &mut bytes).unwrap();
                assert_eq!(bytes, wanted, "{len} bytes at {at} and {odd}");
            }
        }
    }

    /// More reads at once than any ring holds, in a backend that is dropped while they wait: each
    /// ends once, with its bytes or as cancelled.
    fn a25_dropping_the_backend_ends_every_read_once() {
        let dir = tempfile::tempdir().unwrap();
        let backend = FileBackend::open(config(dir.path(), "ns").depth(4)).unwrap();
        let sink = Collector::new();
        backend.dump((0..50).map(|s| sink.op_with(B, s, &bytes(&B, s, 1)).1).collect());
        sink.wait(50).into_values().for_each(|c| c.result.unwrap());
        let ops: Vec<_> = (0..50).map(|s| sink.op(B, s, LEN)).collect();
        let shards: std::collections::HashMap<u64, u32> =
            ops.iter().map(|(token, op)| (*token, op.shard())).collect();
        backend.load(ops.into_iter().map(|(_, op)| op).collect());
        drop(backend);
        for (token, ended) in sink.wait(50) {
            match ended.result {
                Ok(()) => {
                    let mut loaded = vec![0; LEN];
                    ended.memory.read(0, &mut loaded).unwrap();
                    verify_pattern(&loaded, &B, shards[&token], 0, 1).unwrap();
                }
                Err(e) => assert_eq!(e.kind(), ErrorKind::Cancelled),
            }
        }
    }
}

const LOCK_DIR: &str = "UCM_STORE_LOCK_DIR";
const LOCK_SHARDS: u32 = 64;
const LOCK_SHARD_BYTES: usize = 1 << 20;

/// Maps the file that plays the slots of a shared cache, as memory of operations.
fn slots(dir: &Path) -> Vec<IoMemory> {
    let file = fs::OpenOptions::new().read(true).write(true).open(dir.join("slots")).unwrap();
    let len = LOCK_SHARD_BYTES * LOCK_SHARDS as usize;
    // SAFETY: a new mapping, at an address the kernel chooses.
    let base = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            len,
            rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
            rustix::mm::MapFlags::SHARED | rustix::mm::MapFlags::POPULATE,
            &file,
            0,
        )
    };
    let base: *mut u8 = base.unwrap().cast();
    let slot = |n: u32| {
        let at = base.wrapping_add(n as usize * LOCK_SHARD_BYTES);
        // SAFETY: inside the mapping, which is never taken down.
        unsafe {
            IoMemory::from_raw(std::ptr::NonNull::new(at).unwrap(), LOCK_SHARD_BYTES, Box::new(()))
        }
    };
    (0..LOCK_SHARDS).map(slot).collect()
}

#[test]
#[ignore = "started by d1_the_lock_is_held_until_the_last_read_has_landed"]
fn lock_child() {
    let Some(dir) = std::env::var_os(LOCK_DIR).map(PathBuf::from) else { return };
    let lock = fs::File::open(dir.join("lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let memory = MemoryOwner::Locked(Arc::new(lock.into()));
    let config = FileConfig::new(dir.join("store"), "ns").memory(memory).depth(64).rings(2);
    let backend = FileBackend::open(config).unwrap();
    assert!(backend.mode().in_place);
    let sink = Collector::new();
    let ops = slots(&dir).into_iter().zip(0..).map(|(slot, s)| sink.op_on(B, s, slot).1).collect();
    println!("ready");
    std::io::stdin().read_exact(&mut [0]).unwrap();
    backend.load(ops);
    println!("begun");
    sink.wait(LOCK_SHARDS as usize);
    println!("ended");
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

/// A process with direct reads into shared memory is killed. Whoever waits for its lock before it
/// takes the memory over sees no byte change any more.
///
/// Broken on purpose: the ring does not keep the file (the lock is free at once, and reads land in
/// what the next owner wrote).
#[test]
fn d1_the_lock_is_held_until_the_last_read_has_landed() {
    let dir = tempfile::tempdir().unwrap();
    let store = FileBackend::open(FileConfig::new(dir.path().join("store"), "ns")).unwrap();
    if store.mode().rings == 0 {
        println!("SKIP no rings here: {:?}", store.mode().missing);
        return;
    }
    let sink = Collector::new();
    let zeros = vec![0x11; LOCK_SHARD_BYTES];
    store.dump((0..LOCK_SHARDS).map(|s| sink.op_with(B, s, &zeros).1).collect());
    sink.wait(LOCK_SHARDS as usize).into_values().for_each(|c| c.result.unwrap());
    fs::write(dir.path().join("lock"), b"").unwrap();
    let slots_file = fs::File::create(dir.path().join("slots")).unwrap();
    slots_file.set_len(LOCK_SHARD_BYTES as u64 * u64::from(LOCK_SHARDS)).unwrap();
    let mut landed = 0;
    for _ in 0..8 {
        let slots = slots(dir.path());
        slots.iter().for_each(|slot| slot.write(0, &vec![0xEE; LOCK_SHARD_BYTES]).unwrap());
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "file::tests::lock_child", "--ignored", "--nocapture"])
            .env(LOCK_DIR, dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut wait_for = |word: &str| {
            let mut line = String::new();
            while !line.contains(word) {
                line.clear();
                assert_ne!(output.read_line(&mut line).unwrap(), 0, "the child ended by itself");
            }
        };
        wait_for("ready");
        std::io::Write::write_all(child.stdin.as_mut().unwrap(), b"x").unwrap();
        wait_for("begun");
        // Wait until the first read has landed, so that the others are on their way.
        let filled = |slot: &IoMemory| {
            let mut last = [0];
            slot.read(LOCK_SHARD_BYTES - 1, &mut last).unwrap();
            last != [0xEE]
        };
        while !slots.iter().any(filled) {
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let lock = fs::File::open(dir.path().join("lock")).unwrap();
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
        // The memory has a new owner, who writes it.
        landed += slots.iter().filter(|slot| filled(slot)).count();
        slots.iter().for_each(|slot| slot.write(0, &vec![0x77; LOCK_SHARD_BYTES]).unwrap());
        let (_sender, nothing) = std::sync::mpsc::channel::<()>();
        nothing.recv_timeout(std::time::Duration::from_millis(300)).unwrap_err();
        let mut now = vec![0; LOCK_SHARD_BYTES];
        for slot in &slots {
            slot.read(0, &mut now).unwrap();
            assert!(now.iter().all(|b| *b == 0x77), "a read of the dead landed in another's bytes");
        }
    }
    assert!(landed > 0 && landed < 8 * LOCK_SHARDS as usize + 1, "kills met reads: {landed}");
}
