//! The process at the other end of a socket: who it is, and whether it has ended.
//!
//! **Invariant:** `Life::is_over` answers true only when the kernel said so through a pidfd (or
//! when the process had ended before a pidfd could be made).

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::OnceLock;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
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
            Err(e) => match Lacking::of(e, peer_pidfds_are_known) {
                Lacking::Process => Ok(Self::Over),
                Lacking::Option => Self::by_number(pid),
                Lacking::Other => Err(limit_or_os("SO_PEERPIDFD", e)),
            },
        }
    }

    /// For kernels before 6.5. The number could have been reused: then another process is watched, and
    /// this one's end is heard of late. A closed socket proves nothing, so it cannot be asked.
    fn by_number(pid: i32) -> Result<Self, DataError> {
        let Some(pid) = Pid::from_raw(pid) else {
            return Err(DataError::new(
                crate::ErrorKind::Os,
                "the peer lives in another pid namespace and this kernel cannot watch it; run all \
                 members in one pid namespace, or Linux 6.5 or later",
            ));
        };
        match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
            Ok(fd) => Ok(Self::Watched(GuardedFd::new(fd))),
            Err(Errno::SRCH) => Ok(Self::Over),
            Err(e) => Err(limit_or_os(&format!("pidfd_open of process {pid:?}"), e)),
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        match self {
            Self::Over => true,
            Self::Watched(pidfd) => is_ready(pidfd.as_fd(), PollFlags::IN) && is_still_of_it(pidfd),
        }
    }

    /// Somebody has closed the pidfd, or even put something else into its place.
    pub(crate) fn is_lost(&self) -> bool {
        matches!(self, Self::Watched(pidfd) if !is_still_of_it(pidfd))
    }

    pub(crate) fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Watched(pidfd) => Some(pidfd.as_fd()),
            Self::Over => None,
        }
    }
}

/// Why a peer's pidfd could not be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lacking {
    /// It has ended and was reaped: there is no process to make a pidfd for.
    Process,
    /// The kernel does not know the option.
    Option,
    Other,
}

impl Lacking {
    /// Between 6.5 and 6.16 a reaped process is `INVAL`; some kernels without the option say that, too.
    fn of(errno: Errno, option_is_known: impl FnOnce() -> bool) -> Self {
        match errno {
            Errno::SRCH => Self::Process,
            Errno::INVAL if option_is_known() => Self::Process,
            Errno::INVAL | Errno::NOPROTOOPT => Self::Option,
            _ => Self::Other,
        }
    }
}

/// Asks for this very process's pidfd over a pair of sockets of its own. False while that is not known.
fn peer_pidfds_are_known() -> bool {
    static KNOWN: OnceLock<bool> = OnceLock::new();
    if let Some(known) = KNOWN.get() {
        return *known;
    }
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let known = match pair.and_then(|(one, _other)| peer_pidfd(one.as_fd())) {
        Ok(_) => true,
        Err(Errno::NOPROTOOPT | Errno::INVAL) => false,
        // Out of descriptors, perhaps: ask again the next time.
        Err(_) => return false,
    };
    *KNOWN.get_or_init(|| known)
}

/// Whether this still is the pidfd of that process: nobody guards a number against `close` elsewhere in
/// the program, and another pidfd may have it by then.
fn is_still_of_it(pidfd: &GuardedFd) -> bool {
    pidfd.is_ours() && is_pidfd(pidfd.as_fd())
}

/// Of a process that runs or not.
fn is_pidfd(fd: BorrowedFd<'_>) -> bool {
    let nothing = std::ptr::null::<libc::siginfo_t>();
    // SAFETY: signal 0 is never delivered, and the null pointer means "no information".
    let rc = unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd.as_raw_fd(), 0, nothing, 0) };
    rc == 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::EBADF)
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

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn d1_what_the_kernel_says_of_a_process_that_was_reaped_is_understood() {
        assert_eq!(Lacking::of(Errno::SRCH, || unreachable!()), Lacking::Process);
        assert_eq!(Lacking::of(Errno::INVAL, || true), Lacking::Process);
        assert_eq!(Lacking::of(Errno::INVAL, || false), Lacking::Option);
        assert_eq!(Lacking::of(Errno::NOPROTOOPT, || unreachable!()), Lacking::Option);
        assert_eq!(Lacking::of(Errno::MFILE, || unreachable!()), Lacking::Other);
    }

    /// A process whose descriptors are closed may have others that take long, and writes until it is over. Mutant:
    /// a closed socket counts.
    #[test]
    fn d1_without_pidfds_of_peers_a_process_is_over_only_when_it_has_ended() {
        let mut child =
            Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let life = Life::by_number(i32::try_from(child.id()).unwrap()).unwrap();
        assert!(!life.is_over());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(life.is_over());
        let number = i32::try_from(child.id()).unwrap();
        assert!(Life::by_number(number).unwrap().is_over(), "nobody has the number again so soon");
        assert!(Life::by_number(0).is_err());
    }

    /// Something else has the number of a pidfd. Mutant: whatever can be read is an end.
    #[test]
    fn d1_what_is_no_pidfd_proves_nothing() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        drop(writer);
        let life = Life::Watched(GuardedFd::new(reader));
        assert!(is_ready(life.pidfd().unwrap(), PollFlags::IN | PollFlags::HUP));
        assert!(!life.is_over() && life.is_lost());
        let own = pidfd_of(std::process::id());
        assert!(!own.is_over() && !own.is_lost());
        let mut child = Command::new("true").spawn().unwrap();
        let gone = pidfd_of(child.id());
        child.wait().unwrap();
        assert!(gone.is_over() && !gone.is_lost());
    }

    /// A child watcher of the same program got the number of a pidfd that somebody had closed. Mutant: any
    /// pidfd will do.
    #[test]
    fn d1_another_process_s_pidfd_in_its_place_proves_nothing() {
        let mut sleeper = Command::new("sleep").arg("600").spawn().unwrap();
        let mut child = Command::new("true").spawn().unwrap();
        let (life, other) = (pidfd_of(sleeper.id()), pidfd_of(child.id()));
        child.wait().unwrap();
        let ino = |fd: &GuardedFd| rustix::fs::fstat(fd.as_fd()).unwrap().st_ino;
        let (Life::Watched(pidfd), Life::Watched(ended)) = (&life, &other) else {
            panic!("they were alive");
        };
        let told_apart = ino(pidfd) != ino(ended);
        assert!(!life.is_over() && !life.is_lost());
        // SAFETY: both are open; the number stays this object's.
        assert_ne!(unsafe { libc::dup2(ended.as_fd().as_raw_fd(), pidfd.as_fd().as_raw_fd()) }, -1);
        if told_apart {
            assert!(is_ready(life.pidfd().unwrap(), PollFlags::IN) && is_pidfd(pidfd.as_fd()));
            assert!(!life.is_over() && life.is_lost());
        } else {
            println!("SKIP d1_another_process_s_pidfd…: this kernel does not tell pidfds apart");
        }
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
    }

    fn pidfd_of(pid: u32) -> Life {
        Life::by_number(i32::try_from(pid).unwrap()).unwrap()
    }
}
