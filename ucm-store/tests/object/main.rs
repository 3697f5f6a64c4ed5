//! The backend over a directory, over a service that answers wrongly, and over a real one.
//!
//! **Invariant:** no test waits by time.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod moto;
mod server;

use std::{
    fs,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use ucm_store::{
    Backend as _, ErrorKind, ObjectBackend, ObjectConfig, Presence, fill_pattern,
    testing::{Collector, Keeps, conformance},
    verify_pattern,
};

use server::{Server, Twist};

const A: [u8; 16] = [0xA1; 16];
const LEN: usize = 10_000;

fn pattern(shard: u32, generation: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fill_pattern(&mut bytes, &A, shard, 0, generation);
    bytes
}

fn dump(backend: &ObjectBackend, shard: u32, len: usize) -> Result<(), ErrorKind> {
    let sink = Collector::new();
    backend.dump(vec![sink.op_with(A, shard, &pattern(shard, 0, len)).1]);
    sink.wait_one().0
}

fn load(backend: &ObjectBackend, shard: u32, len: usize) -> Result<(), ErrorKind> {
    let sink = Collector::new();
    backend.load(vec![sink.op(A, shard, len).1]);
    let (result, bytes) = sink.wait_one();
    if result.is_ok() {
        verify_pattern(&bytes, &A, shard, 0, 0).unwrap();
    }
    result
}

fn in_directory(dir: &std::path::Path) -> ObjectConfig {
    ObjectConfig::new(format!("file://{}", dir.display()), "ns")
}

/// All files below a directory.
fn files(dir: &std::path::Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    let of = |path: PathBuf| if path.is_dir() { files(&path) } else { vec![path] };
    entries.flat_map(of).collect()
}

#[test]
fn conforms_over_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let next = AtomicU64::new(0);
    conformance(Keeps::Everything, || {
        let case = dir.path().join(next.fetch_add(1, Ordering::Relaxed).to_string());
        Arc::new(ObjectBackend::open(in_directory(&case)).unwrap())
    });
}

#[test]
fn conforms_in_parts() {
    let dir = tempfile::tempdir().unwrap();
    let next = AtomicU64::new(0);
    conformance(Keeps::Everything, || {
        let case = dir.path().join(next.fetch_add(1, Ordering::Relaxed).to_string());
        let mut config = in_directory(&case).concurrency(3);
        config.part_bytes = 7000;
        Arc::new(ObjectBackend::open(config).unwrap())
    });
}

/// Broken on purpose: the payload's hash, the identity, the lengths are not compared; a corrupt object
/// stays.
#[test]
fn f8_a_flipped_bit_anywhere_is_never_served() {
    let dir = tempfile::tempdir().unwrap();
    let backend = ObjectBackend::open(in_directory(dir.path())).unwrap();
    let places = (0..100).chain([4095, 4096, 5000, 4096 + LEN - 1]);
    let mut flipped = 0;
    for at in places {
        assert_eq!(dump(&backend, 0, LEN), Ok(()));
        let of_object = |path: &PathBuf| !path.to_string_lossy().contains("quarantine");
        let file = files(dir.path()).into_iter().find(of_object).unwrap();
        let mut bytes = fs::read(&file).unwrap();
        assert_eq!(bytes.len(), 4096 + LEN);
        bytes[at] ^= 1 << (at % 8);
        fs::write(&file, &bytes).unwrap();
        assert_eq!(load(&backend, 0, LEN), Err(ErrorKind::Corrupt), "byte {at}");
        flipped += 1;
        assert_eq!(backend.report().quarantined, flipped);
        assert_eq!(backend.contains(&[(A, 0)]), [Presence::Absent]);
        assert_eq!(load(&backend, 0, LEN), Err(ErrorKind::Missing));
    }
    assert_eq!(files(dir.path()).len(), 1, "one copy of the last is kept aside");
}

/// Broken on purpose: another object's bytes under this name are served.
#[test]
fn a60_an_object_under_another_name_is_not_served() {
    let dir = tempfile::tempdir().unwrap();
    let backend = ObjectBackend::open(in_directory(dir.path())).unwrap();
    assert_eq!(dump(&backend, 7, LEN), Ok(()));
    let file = files(dir.path()).remove(0);
    fs::rename(&file, file.with_file_name(format!("{:032x}-8", u128::from_be_bytes(A)))).unwrap();
    assert_eq!(load(&backend, 8, LEN), Err(ErrorKind::Corrupt));
    assert_eq!(load(&backend, 7, LEN), Err(ErrorKind::Missing));
    // Another namespace does not see what is there.
    let mut other = in_directory(dir.path());
    other.descriptor = b"nt".to_vec();
    assert_eq!(load(&ObjectBackend::open(other).unwrap(), 7, LEN), Err(ErrorKind::Missing));
}

/// Broken on purpose: truncated and grown objects are served; a question of the wrong length removes one.
#[test]
fn lengths_of_objects_and_questions_are_compared() {
    let dir = tempfile::tempdir().unwrap();
    let backend = ObjectBackend::open(in_directory(dir.path())).unwrap();
    for len in [0, 1, 4095, 4096, 4097, 4096 + LEN - 1, 4096 + LEN + 1, 2 * (4096 + LEN)] {
        assert_eq!(dump(&backend, 0, LEN), Ok(()));
        let file =
            files(dir.path()).into_iter().find(|p| !p.to_string_lossy().contains("quarantine"));
        fs::File::options().write(true).open(file.unwrap()).unwrap().set_len(len as u64).unwrap();
        assert_eq!(load(&backend, 0, LEN), Err(ErrorKind::Corrupt), "{len} bytes");
        assert_eq!(load(&backend, 0, LEN), Err(ErrorKind::Missing), "{len} bytes");
    }
    assert_eq!(dump(&backend, 0, LEN), Ok(()));
    for len in [1, LEN - 1, LEN + 1, 2 * LEN] {
        assert_eq!(load(&backend, 0, len), Err(ErrorKind::Corrupt));
    }
    assert_eq!(load(&backend, 0, LEN), Ok(()));
}

/// Broken on purpose: the same bytes are sent again; other bytes do not replace.
#[test]
fn the_same_object_is_stored_once() {
    let dir = tempfile::tempdir().unwrap();
    for part_bytes in [5 << 20, 3000] {
        let mut config = in_directory(&dir.path().join(part_bytes.to_string()));
        config.part_bytes = part_bytes;
        let backend = ObjectBackend::open(config).unwrap();
        assert_eq!((dump(&backend, 0, LEN), dump(&backend, 0, LEN)), (Ok(()), Ok(())));
        assert_eq!(backend.report().deduplicated, 1);
        let sink = Collector::new();
        backend.dump(vec![sink.op_with(A, 0, &pattern(0, 1, LEN)).1]);
        assert_eq!(sink.wait_one().0, Ok(()));
        backend.load(vec![sink.op(A, 0, LEN).1]);
        let (result, bytes) = sink.wait_one();
        result.unwrap();
        verify_pattern(&bytes, &A, 0, 0, 1).unwrap();
    }
}

#[test]
fn what_makes_no_sense_is_refused_at_the_start() {
    for url in ["", "bucket", "s3://", "ftp://host/x"] {
        let error = ObjectBackend::open(ObjectConfig::new(url, "ns")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{url}: {error}");
    }
    let config = ObjectConfig::new("s3://bucket/x", "ns").option("no_such_setting", "secret");
    assert!(!format!("{config:?}").contains("secret"));
    assert_eq!(ObjectBackend::open(config).unwrap_err().kind(), ErrorKind::Invalid);
    let long = ObjectConfig::new("file:///nowhere", vec![0; 4009]);
    assert_eq!(ObjectBackend::open(long).unwrap_err().kind(), ErrorKind::Invalid);
}

/// Broken on purpose: the length that came is not compared with the one that must. (That no byte is written
/// beyond the memory is checked twice, here and in `IoMemory::write`: either alone is enough.)
#[test]
fn a50_a_body_of_another_length_is_never_a_hit() {
    let server = Server::start();
    let backend = ObjectBackend::open(server.config()).unwrap();
    assert_eq!(dump(&backend, 0, LEN), Ok(()));
    let whole = 4096 + LEN;
    for len in [0, 1, 4095, 4096, whole - 1, whole + 1, whole + 4096, 2 * whole] {
        for twist in [Twist::Chunked(len), Twist::Length(len), Twist::Unsaid(len)] {
            // Each try of the client is answered so.
            server.twist(twist, u32::MAX);
            let result = load(&backend, 0, LEN);
            // Of too many bytes than were told the rest is not read; of too few the client asks for the rest.
            let may = len > 0 && matches!(twist, Twist::Unsaid(_));
            assert!(may || result.is_ok() == (len == whole), "{twist:?}: {result:?}");
            server.clear();
            assert_eq!(load(&backend, 0, LEN), Ok(()), "the object is where it was");
        }
    }
    assert_eq!(backend.report().quarantined, 0, "what a service sends proves nothing");
}

/// Broken on purpose: no tries; tries without end.
#[test]
fn requests_are_tried_again_so_often() {
    let server = Server::start();
    let backend = ObjectBackend::open(server.config()).unwrap();
    assert_eq!(dump(&backend, 0, LEN), Ok(()));
    server.twist(Twist::Status(503), 1);
    assert_eq!(load(&backend, 0, LEN), Ok(()));
    server.twist(Twist::Status(503), 2);
    let before = server.requests();
    assert_eq!(load(&backend, 0, LEN), Err(ErrorKind::Io));
    assert_eq!(server.requests() - before, 3, "two tries, and a look at the length");
    assert_eq!(load(&backend, 0, LEN), Ok(()));
}

/// Broken on purpose: no deadline.
#[test]
fn a49_a_service_that_stops_answering_ends_operations_and_opens_the_breaker() {
    let server = Server::start();
    let mut config = server.config();
    config.deadline = Duration::from_millis(300);
    config.answer_within = Duration::from_millis(100);
    // The client would give up by itself otherwise.
    let config = config.option("timeout", "1 hour");
    let backend = ObjectBackend::open(config).unwrap();
    server.twist(Twist::Hang, u32::MAX);
    let sink = Collector::new();
    backend.load((0..5).map(|shard| sink.op(A, shard, LEN).1).collect());
    for completed in sink.wait(5).into_values() {
        assert_eq!(completed.result.unwrap_err().kind(), ErrorKind::Io);
        completed.memory.write(0, &[1; LEN]).unwrap();
    }
    let report = backend.report();
    assert_eq!((report.turned_off, report.loads_off, report.dumps_off), (1, true, false));
    assert_eq!(load(&backend, 9, LEN), Err(ErrorKind::Unavailable), "not asked");
    assert_eq!(backend.contains(&[(A, 9)]), [Presence::Unknown]);
    assert_eq!(backend.remove(&[(A, 9)])[0].as_ref().unwrap_err().kind(), ErrorKind::Unavailable);
    server.clear();
    // The pause is a second; whatever it takes, it comes back by itself.
    while load(&backend, 9, LEN) != Err(ErrorKind::Missing) {
        std::thread::yield_now();
    }
    assert!(!backend.report().loads_off);
}

/// Broken on purpose: a task that is dropped leaves the end to its operation (`Lost`).
#[test]
fn dropping_it_ends_what_waits_and_what_is_on_its_way() {
    let server = Server::start();
    let config = server.config().concurrency(1).close_within(Duration::ZERO);
    let backend = ObjectBackend::open(config).unwrap();
    let asked = server.hang_and_wait();
    let sink = Collector::new();
    backend.load((0..4).map(|shard| sink.op(A, shard, LEN).1).collect());
    asked.recv().unwrap();
    drop(backend);
    let ends = sink.wait(4);
    let kinds = ends.values().map(|c| c.result.as_ref().unwrap_err().kind());
    assert_eq!(kinds.collect::<Vec<_>>(), [ErrorKind::Cancelled; 4]);
}
