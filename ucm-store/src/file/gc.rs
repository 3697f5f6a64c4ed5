//! Making room: the blocks and segments that were used longest ago go.
//!
//! **Invariant:** only one process at a time collects in a namespace; what is removed is unlinked, so that
//! whoever reads it reads on; a segment that a living process writes stays; what is used is what the
//! file system says is allocated.

use std::{
    collections::HashMap,
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, flock};

use super::{Inner, failpoint::failpoint, packed::segment_id};

/// Something that can go as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// All shards of a block that have files of their own.
    Block(Vec<PathBuf>),
    /// A segment of packed objects.
    Segment(u64, PathBuf),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) what: What,
    /// When any part of it was last stored, touched or loaded: seconds and nanoseconds.
    pub(super) used_at: (i64, i64),
    /// Allocated.
    pub(super) bytes: u64,
}

/// What a collection did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Collected {
    /// Allocated bytes that are left.
    pub(super) used: u64,
    pub(super) freed: u64,
    pub(super) removed: u64,
}

/// Oldest first, until `target` bytes or fewer are left.
pub(super) fn victims(mut all: Vec<Candidate>, used: u64, target: u64) -> Vec<Candidate> {
    all.sort_by_key(|candidate| candidate.used_at);
    let mut left = used;
    all.into_iter()
        .take_while(|candidate| {
            let takes = left > target;
            left = left.saturating_sub(candidate.bytes);
            takes
        })
        .collect()
}

impl Inner {
    /// Brings the namespace down to nine tenths of its quota if it is over it, and frees at least
    /// `wanted` bytes if there are so many. `None`: another process is at it.
    pub(super) fn collect(&self, wanted: u64) -> io::Result<Option<Collected>> {
        let root = self.space.path();
        let lock = fs::File::create(root.join("gc.lock"))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(e) => return Err(e.into()),
        }
        let (candidates, used) = survey(root)?;
        let mut target = used.saturating_sub(wanted);
        if self.quota_bytes > 0 && used > self.quota_bytes {
            target = target.min(self.quota_bytes / 10 * 9);
        }
        let mut done = Collected { used, ..Collected::default() };
        for victim in victims(candidates, used, target) {
            let removed = match &victim.what {
                What::Block(files) => remove_all(files),
                What::Segment(id, path) => self.remove_segment(*id, path),
            };
            match removed {
                Ok(true) => {
                    done.removed += 1;
                    done.freed += victim.bytes;
                    done.used = done.used.saturating_sub(victim.bytes);
                }
                Ok(false) => {}
                Err(error) => tracing::warn!(%error, ?victim, "could not be evicted"),
            }
        }
        tracing::debug!(?done, "a store was collected");
        Ok(Some(done))
    }

    fn remove_segment(&self, id: u64, path: &Path) -> io::Result<bool> {
        let file = match fs::File::open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(e) => return Err(e),
        };
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            // Its writer lives.
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(false),
            Err(e) => return Err(e.into()),
        }
        self.packed.drop_segment(id)?;
        Ok(true)
    }
}

fn remove_all(files: &[PathBuf]) -> io::Result<bool> {
    let mut any = false;
    for file in files {
        failpoint!("gc.block.before");
        match fs::remove_file(file) {
            Ok(()) => any = true,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
        failpoint!("gc.block.after");
    }
    Ok(any)
}

/// Everything that can go, and all bytes that are allocated.
fn survey(root: &Path) -> io::Result<(Vec<Candidate>, u64)> {
    let mut used = 0;
    let mut blocks: HashMap<String, Candidate> = HashMap::new();
    let mut candidates = Vec::new();
    for outer in entries(&root.join("objects"))? {
        for inner in entries(&outer)? {
            for file in entries(&inner)? {
                let Some((used_at, bytes)) = usage(&file)? else { continue };
                used += bytes;
                let name = file.file_name().and_then(|n| n.to_str()).unwrap_or_default();
                let block = name.split('-').next().unwrap_or_default().to_owned();
                let none = Candidate { what: What::Block(Vec::new()), used_at, bytes: 0 };
                let candidate = blocks.entry(block).or_insert(none);
                candidate.bytes += bytes;
                candidate.used_at = candidate.used_at.max(used_at);
                if let What::Block(files) = &mut candidate.what {
                    files.push(file);
                }
            }
        }
    }
    candidates.extend(blocks.into_values());
    for file in entries(&root.join("segments"))? {
        let Some((used_at, bytes)) = usage(&file)? else { continue };
        used += bytes;
        if let Some(id) = segment_id(&file) {
            candidates.push(Candidate { what: What::Segment(id, file), used_at, bytes });
        }
    }
    for other in ["tmp", "quarantine"] {
        for file in entries(&root.join(other))? {
            used += usage(&file)?.map_or(0, |(_, bytes)| bytes);
        }
    }
    used += usage(&root.join("index"))?.map_or(0, |(_, bytes)| bytes);
    Ok((candidates, used))
}

/// What is in a directory; nothing, if it is gone.
fn entries(dir: &Path) -> io::Result<Vec<PathBuf>> {
    match fs::read_dir(dir) {
        Ok(entries) => entries.map(|entry| entry.map(|e| e.path())).collect(),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e),
    }
}

/// When a file was used, and what it takes; `None` if it is gone.
fn usage(file: &Path) -> io::Result<Option<((i64, i64), u64)>> {
    match fs::symlink_metadata(file) {
        Ok(m) => Ok(Some(((m.mtime(), m.mtime_nsec()), m.blocks() * 512))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_go_and_no_more_than_needed() {
        let candidate = |at: i64, bytes| Candidate {
            what: What::Segment(0, PathBuf::new()),
            used_at: (at, 0),
            bytes,
        };
        let all = vec![candidate(3, 10), candidate(1, 10), candidate(2, 10)];
        let ages = |used, target| -> Vec<i64> {
            victims(all.clone(), used, target).iter().map(|c| c.used_at.0).collect()
        };
        assert_eq!(ages(35, 35), [0_i64; 0]);
        assert_eq!(ages(35, 34), [1]);
        assert_eq!(ages(35, 25), [1]);
        assert_eq!(ages(35, 24), [1, 2]);
        assert_eq!(ages(35, 0), [1, 2, 3]);
    }
}
