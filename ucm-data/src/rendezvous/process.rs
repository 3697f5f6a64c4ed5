//! The process at the other end of a socket: who it is, and whether it has ended.
//!
//! **Invariant:** `Life::is_over` answers true only when the kernel said so through a pidfd (or
//! when the process had ended before a pidfd could be made).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

use crate::DataError;
use crate::fork::GuardedFd;

/// `SO_PEERPIDFD`, Linux 6.5.
const SO_PEERPIDFD: libc::c_int = 77;

/// A process that is watched, or known to have ended.
#[derive(Debug)]
pub(crate) enum Life {
    Watched(GuardedFd),
    Over,
}

impl Life {
    /// The process that connected to, or listens at, the other end of `socket`.
    pub(crate) fn of_peer(socket: BorrowedFd<'_>, pid: i32) -> Result<Self, DataError> {
        match peer_pidfd(socket) {
            Ok(fd) => Ok(Self::Watched(GuardedFd::new(fd))),
            // The process has ended and was reaped: no process there to make a pidfd for.
            Err(Errno::SRCH) => Ok(Self::Over),
            // Kernels before 6.5 do not know the option; some after say INVAL for a reaped process.
            Err(Errno::NOPROTOOPT | Errno::INVAL) => Self::by_number(socket, pid),
            Err(e) => Err(limit_or_os("SO_PEERPIDFD", e)),
        }
    }

    /// The number could have been reused; it was not if the process still held its end of the socket
    /// after the pidfd was made.
    fn by_number(socket: BorrowedFd<'_>, pid: i32) -> Result<Self, DataError> {
        let Some(pid) = Pid::from_raw(pid) else {
            return Err(DataError::new(
                crate::ErrorKind::Os,
                "the peer lives in another pid namespace and this kernel cannot watch it; run all \
                 members in one pid namespace, or Linux 6.5 or later",
            ));
        };
        match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
            Ok(fd) if !is_closed(socket) => Ok(Self::Watched(GuardedFd::new(fd))),
            Ok(_) | Err(Errno::SRCH) => Ok(Self::Over),
            Err(e) => Err(limit_or_os(&format!("pidfd_open of process {pid:?}"), e)),
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        match self {
            Self::Over => true,
            Self::Watched(pidfd) => is_ready(pidfd.as_fd(), PollFlags::IN),
        }
    }

    pub(crate) fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Watched(pidfd) => Some(pidfd.as_fd()),
            Self::Over => None,
        }
    }
}

/// Credentials of the peer at connect or listen time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    /// 0 if the process has no number in this pid namespace.
    pub(crate) pid: i32,
    pub(crate) uid: u32,
}

pub(crate) fn peer_of(socket: BorrowedFd<'_>) -> Result<Peer, DataError> {
    // Not through rustix: its process ids cannot be 0.
    let nobody = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let creds =
        option(socket, libc::SO_PEERCRED, nobody).map_err(|e| DataError::os("SO_PEERCRED", e))?;
    Ok(Peer { pid: creds.pid, uid: creds.uid })
}

/// Maps the two "too many descriptors" numbers to their own kind.
pub(crate) fn limit_or_os(what: &str, errno: Errno) -> DataError {
    match errno {
        Errno::MFILE | Errno::NFILE => descriptor_limit(what).with_errno(errno),
        e => DataError::os(what, e),
    }
}

/// `what` failed because descriptors ran out.
pub(crate) fn descriptor_limit(what: &str) -> DataError {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let now = limit.current.map_or_else(|| "unlimited".into(), |n| n.to_string());
    DataError::new(
        crate::ErrorKind::DescriptorLimit,
        format!(
            "{what}: out of file descriptors (RLIMIT_NOFILE is {now}); raise it (ulimit -n) and try \
             again"
        ),
    )
}

fn peer_pidfd(socket: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let fd: libc::c_int = option(socket, SO_PEERPIDFD, -1)?;
    if fd < 0 {
        return Err(Errno::INVAL);
    }
    // SAFETY: the kernel just made this descriptor for us (close-on-exec); nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A socket option of a plain C type.
fn option<T: Copy>(socket: BorrowedFd<'_>, name: libc::c_int, mut value: T) -> Result<T, Errno> {
    let mut len = libc::socklen_t::try_from(size_of::<T>()).map_err(|_| Errno::INVAL)?;
    // SAFETY: `value` and `len` are alive; the kernel writes at most `len` bytes of `value`, and both
    // types used here (int, ucred) are valid for any bytes.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            (&raw mut value).cast(),
            &raw mut len,
        )
    };
    if rc == 0 {
        return Ok(value);
    }
    let error = std::io::Error::last_os_error();
    Err(Errno::from_io_error(&error).unwrap_or(Errno::INVAL))
}

pub(crate) fn is_closed(socket: BorrowedFd<'_>) -> bool {
    is_ready(socket, PollFlags::HUP)
}

fn is_ready(fd: BorrowedFd<'_>, flags: PollFlags) -> bool {
    let mut fds = [PollFd::new(&fd, flags)];
    let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&zero)).is_ok()
        && fds.iter().any(|fd| fd.revents().intersects(flags))
}
