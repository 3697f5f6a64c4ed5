//! The index file: a front and 64-byte entries, added at its end.
//!
//! **Invariant:** entries are added under the lock, at multiples of 64, and never changed; a file that is
//! replaced by a shorter one loses its name, by which its readers know.

use std::{
    fs, io,
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
    thread,
    time::Duration,
};

use rustix::fs::{FlockOperation, flock};

use super::{
    entry::{ENTRY_BYTES, Entry, Front, Kind},
    segment_id,
};
use crate::file::{failpoint::failpoint, header::HEADER_BYTES};

/// Bytes read at once.
const PIECE: usize = 1 << 20;
/// How often, a millisecond apart, the lock is asked for: whoever holds it longer was stopped.
const LOCK_TRIES: u32 = 5000;

/// The file, and how far it was read.
#[derive(Debug)]
pub(super) struct Log {
    file: fs::File,
    read: u64,
}

/// The right to add entries, for as long as it lives.
#[derive(Debug)]
pub(super) struct Held<'a>(&'a fs::File);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if let Err(error) = flock(self.0, FlockOperation::Unlock) {
            tracing::error!(%error, "the lock of an index stays");
        }
    }
}

/// Waits for the lock of an index.
pub(super) fn lock(file: &fs::File) -> io::Result<Held<'_>> {
    for _ in 0..LOCK_TRIES {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Held(file)),
            Err(rustix::io::Errno::WOULDBLOCK) => thread::sleep(Duration::from_millis(1)),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    let message = "another process has held the lock of the index for 5 s; is it stopped?";
    Err(io::Error::new(io::ErrorKind::TimedOut, message))
}

/// Removes a file that no living process writes; says whether it did.
pub(super) fn remove_if_nobodys(path: &Path) -> bool {
    let Ok(file) = fs::File::open(path) else { return false };
    // Locked until it is gone: who has just made it and waits for the lock sees that.
    flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() && fs::remove_file(path).is_ok()
}

impl Log {
    /// # Errors
    /// `NotFound`; `InvalidData` when it does not begin as an index of this namespace does.
    pub(super) fn open(path: &Path, descriptor: &[u8]) -> io::Result<Self> {
        let file = fs::OpenOptions::new().read(true).write(true).open(path.join("index"))?;
        let mut front = vec![0; HEADER_BYTES];
        let whole = file.read_exact_at(&mut front, 0);
        if whole.is_err() || Front::Index.check(&front, descriptor).is_err() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the front of the index"));
        }
        Ok(Self { file, read: HEADER_BYTES as u64 })
    }

    /// Makes a new file of these entries and gives it the name. Under the lock.
    pub(super) fn write_new(path: &Path, descriptor: &[u8], entries: &[Entry]) -> io::Result<Self> {
        let new = path.join("index.new");
        let mut bytes = Front::Index.encode(descriptor);
        bytes.reserve(entries.len() * ENTRY_BYTES);
        entries.iter().for_each(|e| bytes.extend(Entry { kind: Kind::Put, ..*e }.encode()));
        fs::write(&new, &bytes)?;
        fs::File::open(&new)?.sync_data()?;
        failpoint!("packed.index.before");
        fs::rename(&new, path.join("index"))?;
        failpoint!("packed.index.after");
        let log = Self::open(path, descriptor)?;
        Ok(Self { read: bytes.len() as u64, ..log })
    }

    /// Gives every entry that was added since the last call to `each`; says how many are damaged.
    pub(super) fn read(&mut self, mut each: impl FnMut(Entry)) -> io::Result<u64> {
        let len = self.file.metadata()?.len() / ENTRY_BYTES as u64 * ENTRY_BYTES as u64;
        let mut damaged = 0;
        let mut bytes = Vec::new();
        while self.read < len {
            let count = usize::try_from(len - self.read).unwrap_or(PIECE).min(PIECE);
            bytes.resize(count, 0);
            self.file.read_exact_at(&mut bytes, self.read)?;
            for entry in bytes.chunks_exact(ENTRY_BYTES) {
                match Entry::parse(entry) {
                    Some(entry) if entry.kind != Kind::Record => each(entry),
                    _ => damaged += 1,
                }
            }
            self.read += count as u64;
        }
        Ok(damaged)
    }

    /// Whether another file has the name by now.
    pub(super) fn is_replaced(&self) -> io::Result<bool> {
        Ok(self.file.metadata()?.nlink() == 0)
    }

    /// Adds entries. Under the lock.
    pub(super) fn append(&self, entries: &[Entry]) -> io::Result<()> {
        let bytes: Vec<u8> = entries.iter().flat_map(Entry::encode).collect();
        // A write that was cut off leaves a rest, which is then a damaged entry.
        let end = self.file.metadata()?.len().next_multiple_of(ENTRY_BYTES as u64);
        failpoint!("packed.append.before");
        let (first, second) = bytes.split_at(bytes.len() / 2);
        self.file.write_all_at(first, end)?;
        failpoint!("packed.append.half");
        self.file.write_all_at(second, end + first.len() as u64)?;
        failpoint!("packed.append.after");
        Ok(())
    }

    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

/// All whole objects of all segments, older ones first.
pub(super) fn scan_segments(path: &Path, descriptor: &[u8]) -> io::Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for file in fs::read_dir(path.join("segments"))? {
        let path = file?.path();
        let Some(id) = segment_id(&path) else { continue };
        let file = fs::File::open(&path)?;
        let mut front = vec![0; HEADER_BYTES];
        if file.read_exact_at(&mut front, 0).is_err()
            || Front::Segment(id).check(&front, descriptor).is_err()
        {
            tracing::warn!(segment = %path.display(), "not a segment of this store");
            continue;
        }
        scan(&file, id, &mut entries)?;
    }
    entries.sort_by_key(|entry| entry.generation);
    Ok(entries)
}

/// The objects of one segment. Their payloads are not read: a load finds out about them.
fn scan(file: &fs::File, id: u64, entries: &mut Vec<Entry>) -> io::Result<()> {
    let len = file.metadata()?.len();
    let mut at = HEADER_BYTES as u64;
    let mut bytes = vec![0; PIECE];
    while at < len {
        let count = usize::try_from(len - at).unwrap_or(PIECE).min(PIECE);
        let piece = bytes.get_mut(..count).unwrap_or_default();
        file.read_exact_at(piece, at)?;
        let mut inside = 0_usize;
        while let Some(head) = piece.get(inside..inside + ENTRY_BYTES) {
            let here = at + inside as u64;
            let entry = Entry::parse(head).filter(|e| {
                let ends = here.saturating_add(Entry::stride(e.payload_bytes)) <= len;
                let is_here = Entry::offset(e.place) == here && e.segment == id;
                e.kind == Kind::Record && is_here && ends
            });
            // After damage, and between batches: the next record begins at a multiple of 64.
            let step = entry.map_or(ENTRY_BYTES as u64, |e| Entry::stride(e.payload_bytes));
            entries.extend(entry.map(|e| Entry { kind: Kind::Put, ..e }));
            inside = inside.saturating_add(usize::try_from(step).unwrap_or(usize::MAX));
        }
        at += (inside as u64).max(ENTRY_BYTES as u64);
    }
    Ok(())
}
