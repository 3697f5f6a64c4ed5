//! Small objects, many in one file: segments, and an index that says where they lie.
//!
//! Owns: `segments/<id>`, `index` and `index.lock` of a namespace.
//! **Invariant:** a segment is written by one process, from front to back, and never changed: an object is
//! there when the index says so, and the index says so only after the object's bytes are written. Segments
//! are the truth: the index can be made from them.

mod entry;
mod index;
mod log;
mod read;
mod write;

use std::{
    collections::HashMap,
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use rustix::fs::{AtFlags, Mode as Rights, OFlags};

pub(super) use read::{Group, Located, groups};

use super::{
    buffers::Buffers,
    failpoint::failpoint,
    header::HEADER_BYTES,
    sys,
    transfer::{Transfer, empty},
};
use crate::{ErrorKind, Op, Presence, StoreError};
use entry::{Entry, Front, Kind};
use index::{Index, Key, Place};
use log::Log;
use write::Writer;

/// Segments kept open for reading; more are closed, in no order.
const OPEN_SEGMENTS: usize = 256;

/// The packed objects of a namespace.
#[derive(Debug)]
pub(super) struct Packed {
    path: PathBuf,
    descriptor: Vec<u8>,
    direct: bool,
    segment_bytes: u64,
    buffers: Buffers,
    state: Mutex<State>,
    /// Segments that this process writes and that nobody is at: each store takes one and gives it back.
    writers: Mutex<Vec<Writer>>,
    /// The file whose lock writers of the index hold.
    lock: Mutex<fs::File>,
    open: Mutex<HashMap<u64, Arc<OwnedFd>>>,
}

#[derive(Debug)]
struct State {
    index: Index,
    log: Log,
}

/// What opening found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// Entries of the index that were damaged; then it was made anew.
    pub(super) damaged: u64,
    /// Segments without an object, of nobody, removed.
    pub(super) orphans: u64,
}

impl Packed {
    /// Opens or makes the store below `path`.
    pub(super) fn open(
        path: &Path,
        descriptor: &[u8],
        direct: bool,
        segment_bytes: u64,
        buffers: &Buffers,
    ) -> io::Result<(Self, Found)> {
        fs::create_dir_all(path.join("segments"))?;
        let lock = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(path.join("index.lock"))?;
        let held = log::lock(&lock)?;
        let mut found = Found::default();
        // Of whoever was killed while it wrote one.
        drop(fs::remove_file(path.join("index.new")));
        let mut log = match Log::open(path, descriptor) {
            Ok(log) => Some(log),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                found.damaged += 1;
                None
            }
            Err(e) => return Err(e),
        };
        let mut index = Index::default();
        if let Some(log) = &mut log {
            let mut entries = Vec::new();
            found.damaged += log.read(|entry| entries.push(entry))?;
            index = Index::build(entries);
        }
        let dead = index.entries.saturating_sub(index.len() as u64);
        let log = match log {
            Some(log) if found.damaged == 0 && dead <= index.len() as u64 + 4096 => log,
            old => {
                let entries = if old.is_some() && found.damaged == 0 {
                    index
                        .objects()
                        .filter_map(|(key, place)| entry_of(&index, key, place))
                        .collect()
                } else {
                    log::scan_segments(path, descriptor)?
                };
                let log = Log::write_new(path, descriptor, &entries)?;
                index = Index::build(entries);
                log
            }
        };
        // Under the lock no object appears in the index, and a segment of a living writer is locked.
        let live = index.live_segments();
        for entry in fs::read_dir(path.join("segments"))? {
            let file = entry?.path();
            let id = segment_id(&file);
            if id.is_none_or(|id| !live.contains(&id)) {
                found.orphans += u64::from(log::remove_if_nobodys(&file));
            }
        }
        drop(held);
        let packed = Self {
            path: path.to_owned(),
            descriptor: descriptor.to_vec(),
            direct,
            segment_bytes: segment_bytes.clamp(1 << 20, entry::MAX_SEGMENT_BYTES),
            buffers: buffers.clone(),
            state: Mutex::new(State { index, log }),
            writers: Mutex::default(),
            lock: Mutex::new(lock),
            open: Mutex::default(),
        };
        Ok((packed, found))
    }

    /// What the index says about each key. Sees what other processes have stored before the call.
    pub(super) fn contains(&self, keys: &[Key]) -> io::Result<Vec<bool>> {
        let mut state = self.fresh()?;
        let state = &mut *state;
        Ok(keys.iter().map(|key| state.index.place_of(key).is_some()).collect())
    }

    /// Adds what the index says to what is known about these keys.
    pub(super) fn add_presence(&self, keys: &[Key], known: &mut [Presence]) {
        match self.contains(keys) {
            Ok(there) => {
                for (known, _) in known.iter_mut().zip(there).filter(|(_, there)| *there) {
                    *known = Presence::There;
                }
            }
            Err(_) => known.fill(Presence::Unknown),
        }
    }

    /// Takes objects out of the index. Their bytes go with their segment.
    pub(super) fn remove(&self, keys: &[Key]) -> io::Result<u64> {
        let there = {
            let state = self.fresh()?;
            let entries = keys.iter().filter_map(|key| {
                let place = state.index.place_of(key)?;
                let put = entry_of(&state.index, key, &place)?;
                Some(Entry { kind: Kind::Remove, ..put })
            });
            entries.collect::<Vec<_>>()
        };
        if there.is_empty() {
            return Ok(0);
        }
        let appended = self.append(&there);
        if appended.is_err() {
            // At least this process says no.
            let mut state = self.state();
            there.iter().for_each(|e| state.index.remove(&(e.block, e.shard)));
        }
        appended.map(|()| there.len() as u64)
    }

    /// Renews the time stamps of all segments with shards of this block; returns how many.
    pub(super) fn touch(&self, block: &[u8; 16]) -> io::Result<usize> {
        let segments = self.fresh()?.index.segments_of(block);
        let now = rustix::fs::Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW };
        let times = rustix::fs::Timestamps { last_access: now, last_modification: now };
        for id in &segments {
            let path = self.segment_path(*id);
            match rustix::fs::utimensat(rustix::fs::CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(()) | Err(rustix::io::Errno::NOENT) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(segments.len())
    }

    /// Takes a segment away with all that lies in it. Whoever reads it goes on; its bytes are free when
    /// the last one has ended.
    pub(super) fn drop_segment(&self, id: u64) -> io::Result<()> {
        let entry = Entry {
            kind: Kind::Drop,
            block: [0; 16],
            shard: 0,
            segment: id,
            place: 0,
            payload_bytes: 0,
            generation: 0,
            payload_hash: 0,
        };
        // First the file: an index that says too much costs a miss, a file too many costs space.
        failpoint!("gc.segment.before");
        let removed = fs::remove_file(self.segment_path(id));
        failpoint!("gc.segment.after");
        self.opened().remove(&id);
        self.state().index.drop_segment(id);
        self.append(&[entry])?;
        match removed {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    /// Objects in the index.
    pub(super) fn len(&self) -> usize {
        self.state().index.len()
    }

    /// Writes entries to the index; they are in effect in this process when it returns.
    fn append(&self, entries: &[Entry]) -> io::Result<()> {
        let lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let held = log::lock(&lock)?;
        let mut state = self.fresh()?;
        state.log.append(entries)?;
        drop(held);
        refresh(&mut state)
    }

    /// The index with everything that stands in its file by now.
    fn fresh(&self) -> io::Result<MutexGuard<'_, State>> {
        let mut state = self.state();
        if state.log.is_replaced()? {
            let mut log = Log::open(&self.path, &self.descriptor)?;
            let mut entries = Vec::new();
            log.read(|entry| entries.push(entry))?;
            *state = State { index: Index::build(entries), log };
        }
        refresh(&mut state)?;
        Ok(state)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn opened(&self) -> MutexGuard<'_, HashMap<u64, Arc<OwnedFd>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn segment_path(&self, id: u64) -> PathBuf {
        self.path.join("segments").join(format!("{id:016x}"))
    }

    /// A segment, open for reading, its front checked.
    fn segment(&self, id: u64) -> Result<Arc<OwnedFd>, StoreError> {
        if let Some(file) = self.opened().get(&id) {
            return Ok(Arc::clone(file));
        }
        let mut flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        flags.set(OFlags::DIRECT, self.direct);
        let failed = |e: io::Error| match e.kind() {
            io::ErrorKind::NotFound => StoreError::new(ErrorKind::Missing, "its segment is gone"),
            _ => StoreError::new(ErrorKind::Io, format!("segment {id:016x}: {e}")),
        };
        let file = rustix::fs::open(self.segment_path(id), flags, Rights::empty())
            .map_err(|e| failed(e.into()))?;
        let mut buffer = self.buffers.take(HEADER_BYTES)?;
        let spans = [buffer.span(0, HEADER_BYTES), empty(), empty()];
        match sys::read_all(file.as_fd(), &mut Transfer::new(0, spans, HEADER_BYTES)) {
            Ok(()) => {}
            Err(sys::Incomplete::Failed(e)) => return Err(failed(e)),
            Err(sys::Incomplete::EndOfFile(at)) => {
                let message = format!("segment {id:016x} ends at byte {at}");
                return Err(StoreError::new(ErrorKind::Corrupt, message));
            }
        }
        Front::Segment(id).check(buffer.bytes(), &self.descriptor)?;
        let file = Arc::new(file);
        let mut open = self.opened();
        if open.len() >= OPEN_SEGMENTS {
            open.clear();
        }
        open.insert(id, Arc::clone(&file));
        Ok(file)
    }

    /// Which of these operations concern packed objects, where they lie, and which do not.
    pub(super) fn find(&self, ops: Vec<Op>) -> (Vec<Located>, Vec<Op>) {
        if ops.is_empty() {
            return (Vec::new(), ops);
        }
        let Ok(state) = self.fresh() else { return (Vec::new(), ops) };
        let (mut packed, mut others) = (Vec::new(), Vec::new());
        for op in ops {
            let place = state.index.place_of(&(*op.block(), op.shard()));
            match place.and_then(|p| Some((p, state.index.segment(p.segment)?))) {
                Some((Place { place, payload_bytes, .. }, segment)) => {
                    packed.push(Located { op, segment, place, payload_bytes });
                }
                None => others.push(op),
            }
        }
        (packed, others)
    }
}

fn refresh(state: &mut State) -> io::Result<()> {
    let State { index, log } = state;
    log.read(|entry| index.apply(&entry)).map(drop)
}

fn entry_of(index: &Index, key: &Key, place: &Place) -> Option<Entry> {
    Some(Entry {
        kind: Kind::Put,
        block: key.0,
        shard: key.1,
        segment: index.segment(place.segment)?,
        place: place.place,
        payload_bytes: place.payload_bytes,
        generation: 0,
        payload_hash: 0,
    })
}

/// The id in the name of a segment.
pub(super) fn segment_id(path: &Path) -> Option<u64> {
    let name = path.file_name()?.to_str()?;
    u64::from_str_radix(name, 16).ok().filter(|_| name.len() == 16)
}
