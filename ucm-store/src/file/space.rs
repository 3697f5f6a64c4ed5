//! The directories of one namespace: names, temporary files, quarantine.
//!
//! ```text
//! <dir>/ns-<descriptor hash, 16 hex>/objects/<aa>/<bb>/<block, 32 hex>-<shard>
//!                                   /tmp/<random, 16 hex>-<number>
//!                                   /quarantine/<object name>.<random, 16 hex>
//! ```
//!
//! `aa` and `bb` (00 to 3f) are bits 0–5 and 6–11 of XXH3-64 of the block id, so block ids need not
//! be random: 4,096 directories, made when needed, with some 2,400 files each for 10⁷ objects. All
//! shards of a block lie in one directory. Temporary files have a directory of their own in the
//! same file system: renaming stays atomic, and cleaning up after a crash reads one directory
//! instead of 4,096.
//!
//! **Invariant:** a name below `objects` only ever refers to a file that was complete before it got
//! the name; a temporary file is locked (`flock`) by its writer, so one that can be locked is
//! nobody's.

use std::{
    fmt::Write as _,
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use crate::xxh3::xxh3_64;
use rustix::fs::{
    AtFlags, FlockOperation, Mode, OFlags, RenameFlags, Timespec, Timestamps, UTIME_NOW,
};

use super::{
    buffers::Buffers,
    sys,
    transfer::{Transfer, empty},
};
use crate::StoreError;

/// An open namespace.
#[derive(Debug)]
pub(super) struct Space {
    root: OwnedFd,
    path: PathBuf,
    /// Tells the temporary files of this instance from all others.
    token: u64,
    next_temp: AtomicU64,
    /// Files in quarantine, as far as this process knows.
    quarantined: AtomicU64,
    quarantine_files: u64,
}

/// What became of a corrupt object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Aside {
    /// It lies in quarantine.
    Kept,
    /// The quarantine was full: it is deleted.
    Deleted,
    /// Somebody replaced or removed it meanwhile.
    Gone,
}

impl Space {
    /// Opens the namespace, making its directories; returns it with the number of temporary files
    /// of dead writers removed.
    pub(super) fn open(
        dir: &Path,
        descriptor: &[u8],
        quarantine_files: usize,
    ) -> io::Result<(Self, u64)> {
        let path = dir.join(format!("ns-{:016x}", xxh3_64(descriptor)));
        for sub in ["objects", "tmp", "quarantine"] {
            fs::create_dir_all(path.join(sub))?;
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(&path, flags, Mode::empty())?;
        let mut token = [0; 8];
        rustix::rand::getrandom(&mut token, rustix::rand::GetRandomFlags::empty())?;
        let quarantined = fs::read_dir(path.join("quarantine"))?.count() as u64;
        let space = Self {
            root,
            path,
            token: u64::from_ne_bytes(token),
            next_temp: AtomicU64::new(0),
            quarantined: AtomicU64::new(quarantined),
            quarantine_files: quarantine_files as u64,
        };
        let removed = space.remove_dead_temps()?;
        Ok((space, removed))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens an object for reading.
    pub(super) fn open_object(
        &self,
        block: &[u8; 16],
        shard: u32,
        direct: bool,
    ) -> io::Result<OwnedFd> {
        let name = object_path(block, shard);
        let mut flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        flags.set(OFlags::DIRECT, direct);
        Ok(rustix::fs::openat(&self.root, name, flags, Mode::empty())?)
    }

    /// Whether an object of that name is there.
    pub(super) fn has_object(&self, block: &[u8; 16], shard: u32) -> io::Result<bool> {
        let name = object_path(block, shard);
        match rustix::fs::statat(&self.root, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(true),
            Err(rustix::io::Errno::NOENT) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// Removes an object; says whether there was one.
    pub(super) fn remove_object(&self, block: &[u8; 16], shard: u32) -> io::Result<bool> {
        match rustix::fs::unlinkat(&self.root, object_path(block, shard), AtFlags::empty()) {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::NOENT) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// A new temporary file, locked.
    pub(super) fn temp(&self, direct: bool) -> io::Result<Temp<'_>> {
        loop {
            let number = self.next_temp.fetch_add(1, Ordering::Relaxed);
            let name = format!("tmp/{:016x}-{number}", self.token);
            let mut flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
            flags.set(OFlags::DIRECT, direct);
            let fd = rustix::fs::openat(&self.root, &name, flags, Mode::from_raw_mode(0o644))?;
            let mut temp = Temp { space: self, fd, name, published: false };
            // Where locks do not work, no cleaner can take one either, and the file is safe.
            let locked = rustix::fs::flock(&temp.fd, FlockOperation::LockExclusive).is_ok();
            // Before the lock, a starting process may have taken the file for a dead one's.
            if !locked || rustix::fs::fstat(&temp.fd)?.st_nlink > 0 {
                return Ok(temp);
            }
            temp.published = true; // nothing to remove
        }
    }

    /// Renews the time stamps of all shards of a block; returns how many there are.
    pub(super) fn touch(&self, block: &[u8; 16]) -> io::Result<usize> {
        let (dir, prefix) = (object_dir(block), object_name(block, None));
        let entries = match fs::read_dir(self.path.join(&dir)) {
            Ok(entries) => entries,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(0),
            Err(e) => return Err(e),
        };
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let times = Timestamps { last_access: now, last_modification: now };
        let mut touched = 0;
        for entry in entries {
            let name = entry?.file_name();
            let Some(name) = name.to_str().filter(|n| n.starts_with(&prefix)) else { continue };
            let path = format!("{dir}/{name}");
            match rustix::fs::utimensat(&self.root, path, &times, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(()) => touched += 1,
                Err(rustix::io::Errno::NOENT) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(touched)
    }

    /// Takes a corrupt object out of the way, if `fd` is still what its name refers to.
    pub(super) fn put_aside(
        &self,
        block: &[u8; 16],
        shard: u32,
        fd: BorrowedFd<'_>,
    ) -> io::Result<Aside> {
        let bad = rustix::fs::fstat(fd)?;
        let name = object_path(block, shard);
        let same = |stat: &rustix::fs::Stat| (stat.st_dev, stat.st_ino) == (bad.st_dev, bad.st_ino);
        match rustix::fs::statat(&self.root, &name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if same(&stat) => {}
            Ok(_) | Err(rustix::io::Errno::NOENT) => return Ok(Aside::Gone),
            Err(e) => return Err(e.into()),
        }
        let number = self.next_temp.fetch_add(1, Ordering::Relaxed);
        let aside =
            format!("quarantine/{}.{:016x}-{number}", object_name(block, Some(shard)), self.token);
        match rustix::fs::renameat(&self.root, &name, &self.root, &aside) {
            Ok(()) => {}
            Err(rustix::io::Errno::NOENT) => return Ok(Aside::Gone),
            Err(e) => return Err(e.into()),
        }
        // Between the look and the rename a good object may have taken the name: put it back,
        // unless a still newer one is there.
        if !same(&rustix::fs::statat(&self.root, &aside, AtFlags::SYMLINK_NOFOLLOW)?) {
            let back = rustix::fs::renameat_with(
                &self.root,
                &aside,
                &self.root,
                &name,
                RenameFlags::NOREPLACE,
            );
            if back.is_err() {
                rustix::fs::unlinkat(&self.root, &aside, AtFlags::empty())?;
            }
            return Ok(Aside::Gone);
        }
        if self.quarantined.fetch_add(1, Ordering::Relaxed) < self.quarantine_files {
            return Ok(Aside::Kept);
        }
        self.quarantined.fetch_sub(1, Ordering::Relaxed);
        rustix::fs::unlinkat(&self.root, &aside, AtFlags::empty())?;
        Ok(Aside::Deleted)
    }

    /// Keeps the bytes of a corrupt packed object; says whether there was room for them.
    pub(super) fn keep_aside(
        &self,
        block: &[u8; 16],
        shard: u32,
        bytes: &[u8],
    ) -> io::Result<bool> {
        if self.quarantined.fetch_add(1, Ordering::Relaxed) >= self.quarantine_files {
            self.quarantined.fetch_sub(1, Ordering::Relaxed);
            return Ok(false);
        }
        let number = self.next_temp.fetch_add(1, Ordering::Relaxed);
        let name = object_name(block, Some(shard));
        let aside = format!("quarantine/{name}.{:016x}-{number}", self.token);
        fs::write(self.path.join(aside), bytes)?;
        Ok(true)
    }

    /// Proves that files can be written, read back and renamed here.
    pub(super) fn probe(&self) -> io::Result<()> {
        let mut written = [0; 4096];
        rustix::rand::getrandom(&mut written, rustix::rand::GetRandomFlags::empty())?;
        let temp = self.temp(false)?;
        let mut read = [0; 4096];
        let (wrote, got) = (
            rustix::io::pwrite(&temp.fd, &written, 0)?,
            rustix::io::pread(&temp.fd, &mut read, 0)?,
        );
        if (wrote, got) != (written.len(), read.len()) || written != read {
            return Err(io::Error::other("bytes written are not the bytes read back"));
        }
        let renamed = format!("{}-probe", temp.name);
        rustix::fs::renameat(&self.root, &temp.name, &self.root, &renamed)?;
        rustix::fs::renameat(&self.root, &renamed, &self.root, &temp.name)?;
        Ok(())
    }

    /// What positions, lengths and addresses must be multiples of past the page cache: found out by
    /// writing, reading back and comparing.
    ///
    /// # Errors
    /// The system's answer, when the file system cannot do it.
    pub(super) fn probe_direct(&self, buffers: &Buffers) -> io::Result<usize> {
        let temp = self.temp(true)?;
        let mut last = io::Error::from(io::ErrorKind::Unsupported);
        let short = |e: StoreError| io::Error::new(io::ErrorKind::OutOfMemory, e);
        for align in [512, 4096] {
            let mut written = buffers.take(3 * align).map_err(short)?;
            let bytes = written.bytes_mut();
            rustix::rand::getrandom(&mut *bytes, rustix::rand::GetRandomFlags::empty())?;
            let expected = bytes.get(align..2 * align).unwrap_or_default().to_vec();
            let at = align as u64;
            // Odd multiples, so that a coarser device says no.
            let transfer = |span| Transfer::new(at, [span, empty(), empty()], align);
            let moved = sys::writev(temp.fd(), transfer(written.span(align, align)).next());
            match moved {
                Ok(n) if n == align => {}
                Ok(n) => {
                    last = io::Error::other(format!("{n} of {align} bytes were written"));
                    continue;
                }
                Err(e) => {
                    last = e;
                    continue;
                }
            }
            let mut read = buffers.take(3 * align).map_err(short)?;
            read.bytes_mut().fill(0);
            let moved = sys::readv(temp.fd(), transfer(read.span(align, align)).next())?;
            if moved == align && read.bytes().get(align..2 * align) == Some(&expected) {
                return Ok(align);
            }
            last = io::Error::other("bytes written are not the bytes read back");
        }
        Err(last)
    }

    /// Whether a thread that is killed in a direct read leaves no read behind: true of the file
    /// systems of this machine that are known, false of all others (NFS, FUSE, …).
    pub(super) fn is_local(&self) -> bool {
        const LOCAL: [u32; 8] = [
            0xEF53,      // ext2, ext3, ext4
            0x5846_5342, // XFS
            0x9123_683E, // Btrfs
            0x0102_1994, // tmpfs
            0xF2F5_2010, // F2FS
            0x2FC1_2FC1, // ZFS
            0x794C_7630, // overlay
            0xCA45_1A4E, // bcachefs
        ];
        let kind = rustix::fs::fstatfs(&self.root).map(|s| s.f_type);
        kind.is_ok_and(|kind| u32::try_from(kind).is_ok_and(|kind| LOCAL.contains(&kind)))
    }

    /// Writes everything of the file system to its device.
    pub(super) fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::syncfs(&self.root)?)
    }

    /// Writes the directory of an object to the device, so that its name survives.
    pub(super) fn sync_dir(&self, block: &[u8; 16]) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = object_dir(block);
        // A new directory needs its own name on the device too.
        let parents = dir.match_indices('/').map(|(at, _)| dir.split_at(at).0);
        for path in parents.chain([dir.as_str()]) {
            let fd = rustix::fs::openat(&self.root, path, flags, Mode::empty())?;
            rustix::fs::fsync(&fd)?;
        }
        Ok(())
    }

    fn remove_dead_temps(&self) -> io::Result<u64> {
        let mut removed = 0;
        for entry in fs::read_dir(self.path.join("tmp"))? {
            let path = entry?.path();
            let Ok(file) = fs::File::open(&path) else { continue };
            // Only a lock that is free proves the writer dead. Where locks do not work, nothing
            // is proved and the file stays.
            let lock = rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive);
            if lock.is_ok() && fs::remove_file(&path).is_ok() {
                removed += 1;
            }
        }
        Ok(removed)
    }
}

/// A file without a name below `objects` yet. Dropped unpublished, it is removed.
#[derive(Debug)]
pub(super) struct Temp<'a> {
    space: &'a Space,
    fd: OwnedFd,
    name: String,
    published: bool,
}

impl Temp<'_> {
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Gives the file its name, replacing an object that has it.
    pub(super) fn publish(mut self, block: &[u8; 16], shard: u32) -> io::Result<()> {
        let name = object_path(block, shard);
        let root = &self.space.root;
        let rename = || rustix::fs::renameat(root, &self.name, root, &name);
        match rename() {
            Ok(()) => {}
            Err(rustix::io::Errno::NOENT) => {
                fs::create_dir_all(self.space.path.join(object_dir(block)))?;
                rename()?;
            }
            Err(e) => return Err(e.into()),
        }
        self.published = true;
        Ok(())
    }

    /// Writes the bytes and the length to the device.
    pub(super) fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fdatasync(&self.fd)?)
    }
}

impl Drop for Temp<'_> {
    fn drop(&mut self) {
        if !self.published {
            // What cannot be removed now is removed at the next open.
            let removed = rustix::fs::unlinkat(&self.space.root, &self.name, AtFlags::empty());
            if let Err(error) = removed {
                tracing::debug!(%error, name = %self.name, "a temporary file stays");
            }
        }
    }
}

fn object_dir(block: &[u8; 16]) -> String {
    let hash = xxh3_64(block);
    format!("objects/{:02x}/{:02x}", hash & 0x3F, (hash >> 6) & 0x3F)
}

/// File name of a shard; without one, what the names of all shards of the block begin with.
fn object_name(block: &[u8; 16], shard: Option<u32>) -> String {
    let mut name = format!("{:032x}-", u128::from_be_bytes(*block));
    if let Some(shard) = shard {
        // Writing to a string cannot fail.
        let _ = write!(name, "{shard}");
    }
    name
}

fn object_path(block: &[u8; 16], shard: u32) -> String {
    format!("{}/{}", object_dir(block), object_name(block, Some(shard)))
}
