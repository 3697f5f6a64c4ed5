//! The instance directory: the name of a cache, its mutual exclusion and its sign of life.
//!
//! Locks on the directory itself, none of them a file: `flock` is held while somebody enters; a shared
//! OFD record lock on byte 0 is held by every member for as long as it lives, and one on a byte of its
//! seat, so that a seat whose socket has vanished (a cleaner of temporary files, a steward that failed)
//! is not taken for free. The kernel drops them all with the process.
//!
//! **Invariant:** at most one process is between `lock` and the drop of its guard; while a member
//! lives, `has_members` is true for everybody else.

use std::fs::{self, DirBuilder};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::fork::GuardedFd;
use crate::rendezvous::config::Sockets;
use crate::rendezvous::process::limit_or_os;
use crate::rendezvous::socket::Seats;
use crate::{DataError, ErrorKind};

/// An open instance directory.
#[derive(Debug)]
pub(crate) struct Directory {
    fd: GuardedFd,
    path: PathBuf,
    seats: Seats,
}

impl Directory {
    /// Opens the directory, making it (mode 0700) if it is missing, and checks whose it is.
    pub(crate) fn open(path: &Path, sockets: Sockets) -> Result<Arc<Self>, DataError> {
        let denied = |why: String| DataError::new(ErrorKind::Denied, why);
        let shown = path.display();
        if let Err(error) = DirBuilder::new().recursive(true).mode(0o700).create(path) {
            return Err(denied(format!(
                "instance directory {shown} cannot be made: {error}; make it yourself with mode 0700 \
                 or name another one"
            )));
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = || rustix::fs::open(path, flags, Mode::empty());
        let fd = GuardedFd::made(open).map_err(|e| match e {
            Errno::ACCESS | Errno::PERM => denied(format!(
                "instance directory {shown} belongs to somebody else ({e}); run as its owner or name \
                 another directory"
            )),
            e => limit_or_os(&format!("opening instance directory {shown}"), e),
        })?;
        let stat = rustix::fs::fstat(fd.as_fd())
            .map_err(|e| DataError::os(format!("fstat of instance directory {shown}"), e))?;
        let uid = rustix::process::geteuid().as_raw();
        if stat.st_uid != uid {
            return Err(denied(format!(
                "instance directory {shown} belongs to user {}, this process is user {uid}; run as \
                 that user or name another directory",
                stat.st_uid
            )));
        }
        if stat.st_mode & 0o022 != 0 {
            return Err(denied(format!(
                "instance directory {shown} can be written by others (mode {:o}); run: chmod 700 \
                 {shown}",
                stat.st_mode & 0o7777
            )));
        }
        if sockets == Sockets::Files && stat.st_mode & 0o300 != 0o300 {
            return Err(denied(format!(
                "instance directory {shown} cannot be written (mode {:o}); run: chmod 700 {shown}",
                stat.st_mode & 0o7777
            )));
        }
        let longest = fs::canonicalize(path).map_or(usize::MAX, |path| path.as_os_str().len());
        let seats = match sockets {
            Sockets::Abstract => Seats::Abstract { device: stat.st_dev, inode: stat.st_ino },
            // Through the descriptor where the path is too long for a socket address.
            Sockets::Files if longest > 90 => Seats::Files {
                dir: PathBuf::from(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())),
            },
            // Absolute, so that it stays right if the process changes its directory.
            Sockets::Files => {
                Seats::Files { dir: fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf()) }
            }
        };
        Ok(Arc::new(Self { fd, path: path.to_path_buf(), seats }))
    }

    pub(crate) fn seats(&self) -> &Seats {
        &self.seats
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Excludes all other entering processes until the guard is dropped.
    pub(crate) fn lock(self: &Arc<Self>, deadline: Instant) -> Result<Locked, DataError> {
        let mut pause = Duration::from_micros(100);
        loop {
            if let Some(locked) = self.try_lock()? {
                return Ok(locked);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(DataError::new(
                    ErrorKind::Deadline,
                    format!(
                        "another process has been entering {} all the time; see who holds its flock \
                         (fuser, lslocks) or allow a longer deadline",
                        self.path.display()
                    ),
                ));
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(Duration::from_millis(4));
        }
    }

    /// The same at once; `None` if somebody is entering.
    pub(crate) fn try_lock(self: &Arc<Self>) -> Result<Option<Locked>, DataError> {
        match rustix::fs::flock(self.fd.as_fd(), FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Locked { directory: Arc::clone(self) })),
            Err(Errno::WOULDBLOCK | Errno::INTR) => Ok(None),
            Err(e) => Err(DataError::os(format!("flock of {}", self.path.display()), e)),
        }
    }

    /// True if a member other than the caller lives, reachable or not. Ask before `sign_in`.
    pub(crate) fn has_members(&self) -> Result<bool, DataError> {
        self.is_locked(0)
    }

    /// True if a living process other than the caller sits there, whether or not it can be reached.
    pub(crate) fn is_seat_held(&self, seat: u16) -> Result<bool, DataError> {
        self.is_locked(1 + i64::from(seat))
    }

    /// Shows everybody that the seat is taken, as [`sign_in`](Self::sign_in) does for the cache.
    pub(crate) fn hold_seat(&self, seat: u16) -> Result<(), DataError> {
        self.record_lock(libc::F_OFD_SETLK, libc::F_RDLCK, 1 + i64::from(seat)).map(|_| ())
    }

    fn is_locked(&self, byte: i64) -> Result<bool, DataError> {
        let found = self.record_lock(libc::F_OFD_GETLK, libc::F_WRLCK, byte)?;
        Ok(i32::from(found.l_type) != libc::F_UNLCK)
    }

    /// Shows everybody that a member lives, until this object is dropped or the process ends.
    pub(crate) fn sign_in(&self) -> Result<(), DataError> {
        self.record_lock(libc::F_OFD_SETLK, libc::F_RDLCK, 0).map(|_| ())
    }

    /// Names the file that is a seat's socket at the moment, if seats are files.
    pub(crate) fn socket_file(&self, seat: u16) -> Option<(u64, u64)> {
        use std::os::unix::fs::MetadataExt;
        let file = fs::symlink_metadata(self.seats.file(seat)?).ok()?;
        Some((file.dev(), file.ino()))
    }

    /// Removes the socket file of a seat whose member is gone. Only under the lock, or by the member
    /// that listens there.
    pub(crate) fn remove_socket(&self, seat: u16) {
        let Some(file) = self.seats.file(seat) else { return };
        if let Err(error) = fs::remove_file(&file)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            tracing::warn!(%error, file = %file.display(), "stale socket file stays");
        }
    }

    fn record_lock(&self, command: i32, kind: i32, byte: i64) -> Result<libc::flock, DataError> {
        self.record_locks(command, kind, (byte, 1))
    }

    /// `l_len` of 0: to the end.
    fn record_locks(
        &self,
        command: i32,
        kind: i32,
        (byte, l_len): (i64, i64),
    ) -> Result<libc::flock, DataError> {
        let overflow = |_| DataError::invalid("record lock");
        let mut request = libc::flock {
            l_type: kind.try_into().map_err(overflow)?,
            l_whence: libc::SEEK_SET.try_into().map_err(overflow)?,
            l_start: byte,
            l_len,
            l_pid: 0,
        };
        // SAFETY: the descriptor is open and `request` is a complete flock structure that the kernel
        // reads and, for GETLK, overwrites.
        let rc = unsafe { libc::fcntl(self.fd.as_fd().as_raw_fd(), command, &raw mut request) };
        if rc == 0 {
            return Ok(request);
        }
        let error = std::io::Error::last_os_error();
        let errno = Errno::from_io_error(&error).unwrap_or(Errno::INVAL);
        Err(DataError::os(format!("record lock on {}", self.path.display()), errno))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // Before the guard goes: a child that is forked in between keeps the descriptor, not the locks.
        let _ = self.record_locks(libc::F_OFD_SETLK, libc::F_UNLCK, (0, 0));
    }
}

/// The right to enter.
#[derive(Debug)]
pub(crate) struct Locked {
    directory: Arc<Directory>,
}

impl Drop for Locked {
    fn drop(&mut self) {
        if let Err(errno) = rustix::fs::flock(self.directory.fd.as_fd(), FlockOperation::Unlock) {
            tracing::error!(%errno, "unlocking the instance directory failed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lock_excludes_and_the_sign_of_life_is_seen_by_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cache");
        let a = Directory::open(&path, Sockets::Abstract).unwrap();
        let b = Directory::open(&path, Sockets::Abstract).unwrap();
        let held = a.lock(Instant::now()).unwrap();
        assert_eq!(b.lock(Instant::now()).unwrap_err().kind(), ErrorKind::Deadline);
        drop(held);
        drop(b.lock(Instant::now()).unwrap());
        assert!(!b.has_members().unwrap());
        a.sign_in().unwrap();
        assert!(b.has_members().unwrap());
        b.sign_in().unwrap();
        a.hold_seat(7).unwrap();
        let held = |seat| b.is_seat_held(seat).unwrap();
        assert_eq!([held(6), held(7), held(8)], [false, true, false]);
        drop(a);
        assert!(!b.is_seat_held(7).unwrap());
        let c = Directory::open(&path, Sockets::Abstract).unwrap();
        assert!(c.has_members().unwrap());
        drop(b);
        assert!(!c.has_members().unwrap());
        assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
    }

    #[test]
    fn a_directory_that_others_may_write_is_refused_with_the_remedy() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let error = Directory::open(dir.path(), Sockets::Abstract).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied);
        let remedy = format!("chmod 700 {}", dir.path().display());
        assert!(error.to_string().contains(&remedy), "{error}");
    }

    #[test]
    fn a_path_that_cannot_be_a_directory_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let error = Directory::open(&file.join("below"), Sockets::Abstract).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied);
        assert!(error.to_string().contains("file/below"), "{error}");
    }
}
