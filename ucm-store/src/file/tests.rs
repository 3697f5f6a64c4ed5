//! The file backend against damage, failures of the system, other processes and SIGKILL.
//!
//! **Invariant:** after every event an object is absent or whole, and the bytes are compared.

use std::{
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

fn open(dir: &Path) -> FileBackend {
    FileBackend::open(FileConfig::new(dir, "model=a").threads(2)).unwrap()
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

#[test]
fn conforms_with_every_durability() {
    let dir = tempfile::tempdir().unwrap();
    for (n, durability) in [Durability::None, Durability::OnClose].into_iter().enumerate() {
        let next = AtomicU64::new(0);
        conformance(Keeps::Everything, || {
            let case = next.fetch_add(1, Ordering::Relaxed);
            let dir = dir.path().join(format!("{n}-{case}"));
            let config = FileConfig::new(dir, "ns").threads(2).durability(durability);
            Arc::new(FileBackend::open(config).unwrap())
        });
    }
}

#[test]
fn s2_fsync_publishes_whole_objects() {
    let dir = tempfile::tempdir().unwrap();
    let config = FileConfig::new(dir.path(), "ns").durability(Durability::Fsync);
    let backend = FileBackend::open(config).unwrap();
    assert!(backend.capabilities().durable);
    dump(&backend, 0, 1).unwrap();
    load(&backend, 0, 1).unwrap();
    backend.fail_next(FileStep::Sync, libc::EIO);
    assert_eq!(dump(&backend, 1, 1), Err(ErrorKind::Io));
    assert_eq!(load(&backend, 1, 1), Err(ErrorKind::Missing));
}

#[test]
fn a43_failed_dumps_are_misses_and_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    dump(&backend, 0, 1).unwrap();
    for step in [FileStep::Create, FileStep::Write, FileStep::Rename] {
        let errors = [
            (libc::EIO, ErrorKind::Io),
            (libc::ENOSPC, ErrorKind::NoSpace),
            (libc::EDQUOT, ErrorKind::NoSpace),
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
        backend.fail_next(step, libc::ENOSPC);
        assert_eq!(dump(&backend, 0, 2), Err(ErrorKind::NoSpace));
        load(&backend, 0, 1).unwrap();
    }
}

#[test]
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

#[test]
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

#[test]
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

#[test]
fn a41_every_namespace_sees_its_own_objects_only() {
    let dir = tempfile::tempdir().unwrap();
    let one = open(dir.path());
    let other = FileBackend::open(FileConfig::new(dir.path(), "model=b")).unwrap();
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

#[test]
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

#[test]
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
        let ended = (0..100_000).any(|_| {
            let base = memory.as_ptr();
            // SAFETY: `memory` outlives the operation.
            let part = unsafe { IoMemory::from_raw(base, LEN, Box::new(())) };
            backend.load(vec![sink.op_on(B, 0, part).1]);
            sink.wait(1)
                .into_values()
                .any(|c| c.result.is_err_and(|e| e.kind() == ErrorKind::Corrupt))
        });
        stop.store(1, Ordering::Relaxed);
        assert!(ended, "the change was never noticed");
    });
    assert_eq!(backend.report(), FileReport::default());
    load(&backend, 0, 1).unwrap();
}

#[test]
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

#[test]
fn the_quarantine_is_bounded_also_over_restarts() {
    let dir = tempfile::tempdir().unwrap();
    let config = || FileConfig::new(dir.path(), "ns").quarantine_files(3);
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

#[test]
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

#[test]
fn temps_of_the_living_stay_and_those_of_the_dead_go() {
    let dir = tempfile::tempdir().unwrap();
    let living = open(dir.path());
    let temp = living.inner.space.temp().unwrap();
    fs::write(living.inner.space.path().join("tmp/0123-0"), b"left behind").unwrap();
    assert_eq!(files(dir.path(), "tmp").len(), 2);
    let second = open(dir.path());
    assert_eq!(second.report().temps_removed, 1);
    assert_eq!(files(dir.path(), "tmp").len(), 1);
    temp.publish(&B, 9).unwrap();
    assert_eq!(files(dir.path(), "tmp").len(), 0);
}

#[test]
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

#[test]
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
