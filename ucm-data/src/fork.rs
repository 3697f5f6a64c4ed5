//! What happens on `fork` without `exec`: the child loses its copies of this crate's descriptors.
//!
//! A forked child inherits every open file description: it would hold the parent's locks, keep its
//! sockets listening without anybody to answer, and keep the memory alive after the parent died. A
//! `pthread_atfork` child handler therefore replaces each guarded descriptor by a dead one, which it
//! makes in the place of the first: a parent without descriptors left is guarded as well. The
//! numbers stay taken, so the child's copies of the owning objects close only the dead ones. (Where a
//! limit was lowered below a number that is in use, that one is closed: nothing can take its place.)
//!
//! **Invariant:** in a forked child no guarded descriptor refers to what it refers to in the parent,
//! and [`generation`] differs from the parent's.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use crate::{DataError, ErrorKind};

/// Descriptors up to this number can be guarded; higher ones are passed through unguarded.
const GUARDABLE: usize = 64 * 1024;

static GENERATION: AtomicU64 = AtomicU64::new(1);
static GUARDED: [AtomicU64; GUARDABLE / 64] = [const { AtomicU64::new(0) }; GUARDABLE / 64];
static INSTALL: Once = Once::new();
/// A fork of a process with much memory takes tens of milliseconds.
const LONGEST_FORK: Duration = Duration::from_secs(1);
/// Forks of this process that began, and those of them that the parent has returned from.
static STARTED: AtomicU64 = AtomicU64::new(0);
static FINISHED: AtomicU64 = AtomicU64::new(0);

/// A descriptor shared by several owners of one process, closed with the last, dead in a fork.
///
/// Cloning is cheap and makes no new descriptor. Thread-safe.
#[derive(Clone, Debug)]
pub struct SharedFd(Arc<GuardedFd>);

impl From<OwnedFd> for SharedFd {
    fn from(fd: OwnedFd) -> Self {
        Self(Arc::new(GuardedFd::new(fd)))
    }
}

impl AsFd for SharedFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A descriptor that a forked child cannot use, and that knows its file again.
#[derive(Debug)]
pub(crate) struct GuardedFd {
    fd: OwnedFd,
    file: Option<(u64, u64)>,
}

impl GuardedFd {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        install();
        mark(fd.as_raw_fd(), true);
        let file = file_of(fd.as_fd());
        Self { fd, file }
    }

    /// False when another part of the program has closed it, and perhaps got its number for another
    /// file. Where the kernel does not tell files of a kind apart (pidfds before Linux 6.9, eventfds),
    /// another one of that kind goes for it.
    pub(crate) fn is_ours(&self) -> bool {
        self.file.is_some() && file_of(self.as_fd()) == self.file
    }

    /// Guards a descriptor of which no child may have a copy, not even one that another thread forks
    /// between `make` and the guard: it is made again then. Before it is locked, bound or listened at.
    pub(crate) fn made<E>(make: impl Fn() -> Result<OwnedFd, E>) -> Result<Self, E> {
        install();
        let since = Instant::now();
        loop {
            let finished = FINISHED.load(Ordering::SeqCst);
            let guarded = Self::new(make()?);
            // A fork that begins only now finds it marked.
            if STARTED.load(Ordering::SeqCst) == finished {
                return Ok(guarded);
            }
            // A fork may itself wait for this thread, in a handler of another library.
            if since.elapsed() > LONGEST_FORK {
                tracing::warn!("a fork takes long; its child may keep a seat in the cache");
                return Ok(guarded);
            }
            std::thread::yield_now();
        }
    }
}

impl AsFd for GuardedFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Device and number of an open file.
fn file_of(fd: BorrowedFd<'_>) -> Option<(u64, u64)> {
    rustix::fs::fstat(fd).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

impl Drop for GuardedFd {
    fn drop(&mut self) {
        // Before the close: the number may be reused by an unguarded descriptor right after it.
        mark(self.fd.as_raw_fd(), false);
    }
}

/// A number that is different in every process of a fork chain.
pub(crate) fn generation() -> u64 {
    GENERATION.load(Ordering::Relaxed)
}

/// Remembers in which process something was made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Birthplace {
    generation: u64,
    pid: u32,
}

impl Birthplace {
    pub(crate) fn here() -> Self {
        install();
        Self { generation: generation(), pid: std::process::id() }
    }

    /// Cheap check (one load): no fork through the C library lies between.
    pub(crate) fn is_here_fast(self) -> bool {
        self.generation == generation()
    }

    /// Full check: also notices a bare `clone` system call.
    pub(crate) fn is_here(self) -> bool {
        self.is_here_fast() && self.pid == std::process::id()
    }

    pub(crate) fn check(self) -> Result<(), DataError> {
        if self.is_here_fast() { Ok(()) } else { Err(Self::error()) }
    }

    pub(crate) fn error() -> DataError {
        DataError::new(
            ErrorKind::Forked,
            "this process was forked from a member; enter the rendezvous again to use the cache",
        )
    }
}

fn install() {
    INSTALL.call_once(|| {
        // SAFETY: these are plain functions that only use atomics and plain system calls, both allowed
        // between fork and exec; they stay valid as long as the program's code.
        let rc = unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
        if rc != 0 {
            tracing::warn!(rc, "fork guard not installed: a forked child can hold locks");
        }
    });
}

fn mark(fd: RawFd, on: bool) {
    let Ok(number) = usize::try_from(fd) else { return };
    let Some(word) = GUARDED.get(number / 64) else { return };
    let bit = 1u64 << (number % 64);
    if on {
        word.fetch_or(bit, Ordering::SeqCst);
    } else {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
}

unsafe extern "C" fn before() {
    STARTED.fetch_add(1, Ordering::SeqCst);
}

unsafe extern "C" fn in_parent() {
    FINISHED.fetch_add(1, Ordering::SeqCst);
}

unsafe extern "C" fn in_child() {
    // The fork that made this process is over here, too.
    FINISHED.store(STARTED.load(Ordering::SeqCst), Ordering::SeqCst);
    GENERATION.fetch_add(1, Ordering::Relaxed);
    let mut dead: RawFd = -1;
    let mut base: RawFd = 0;
    for word in &GUARDED {
        let mut bits = word.load(Ordering::Relaxed);
        while bits != 0 {
            let fd = base + bits.trailing_zeros().cast_signed();
            if dead < 0 {
                dead = bury(fd);
            } else {
                // SAFETY: plain system call on two integers. The number stays owned by the same
                // object, so no owner sees a foreign descriptor.
                let rc = unsafe { libc::dup3(dead, fd, libc::O_CLOEXEC) };
                if rc < 0 {
                    // SAFETY: as above; the number lies beyond the limit, where nothing new comes.
                    unsafe { libc::close(fd) };
                }
            }
            bits &= bits - 1;
        }
        base += 64;
    }
}

/// Replaces a descriptor by a new one that leads nowhere; the number of one, or -1 if none can be had.
fn bury(fd: RawFd) -> RawFd {
    // First, so that there is room. The child has one thread: nobody takes the number meanwhile.
    // SAFETY: plain system call on an integer; its owner finds something else below, or nothing.
    unsafe { libc::close(fd) };
    // SAFETY: plain system call on two integers.
    let made = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    if made < 0 || made == fd {
        return made;
    }
    // SAFETY: plain system call on two integers; `fd` was closed above.
    if unsafe { libc::dup3(made, fd, libc::O_CLOEXEC) } < 0 {
        return made;
    }
    // SAFETY: made above, and nobody else knows it.
    unsafe { libc::close(made) };
    fd
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn d9_forked_child_loses_guarded_descriptors_and_changes_generation() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let guarded = GuardedFd::new(writer);
        let before = generation();
        // SAFETY: the child only makes system calls and leaves with _exit.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // The pipe's write end is an eventfd here, which refuses one byte.
            let refused = rustix::io::write(guarded.as_fd(), b"x").is_err();
            let moved = generation() != before;
            let code = if refused && moved { 0 } else { 1 };
            // SAFETY: ends the child without running the parent's destructors.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above, with a valid status pointer.
        unsafe { libc::waitpid(pid, &raw mut status, 0) };
        assert_eq!(status, 0, "child saw the parent's pipe or the parent's generation");
        drop(guarded);
        // All writers are gone: end of file, although the child had inherited the write end.
        assert_eq!(rustix::io::read(&reader, &mut [0u8; 1]).unwrap(), 0);
    }

    /// Another thread forks after the descriptor was made and before it is guarded. Mutant: it is not made again.
    #[test]
    fn d9_a_child_that_is_forked_before_the_guard_has_no_copy_of_what_is_used() {
        let made = std::cell::RefCell::new(Vec::new());
        let child = std::cell::Cell::new(0);
        let make = || {
            let (reader, writer) = rustix::pipe::pipe()?;
            made.borrow_mut().push(reader);
            if child.get() == 0 {
                // SAFETY: the child only makes system calls until it is killed.
                child.set(unsafe { libc::fork() });
                if child.get() == 0 {
                    // SAFETY: ends the child, should nobody else do so.
                    unsafe { libc::alarm(60) };
                    loop {
                        // SAFETY: waits for a signal.
                        unsafe { libc::pause() };
                    }
                }
            }
            Ok::<_, rustix::io::Errno>(writer)
        };
        let guarded = GuardedFd::made(make).unwrap();
        drop(guarded);
        let readers = made.into_inner();
        for reader in &readers {
            rustix::io::ioctl_fionbio(reader, true).unwrap();
        }
        let ends = |reader: &OwnedFd| rustix::io::read(reader, &mut [0u8; 1]) == Ok(0);
        // The child holds the first one's other end; of the last one nobody does.
        assert!(readers.len() > 1);
        assert!(!ends(&readers[0]));
        assert!(readers.last().is_some_and(ends));
        // SAFETY: ends the child made above.
        unsafe { libc::kill(child.get(), libc::SIGKILL) };
        // SAFETY: waits for it; no status is asked for.
        unsafe { libc::waitpid(child.get(), std::ptr::null_mut(), 0) };
    }

    #[test]
    fn numbers_are_unmarked_before_they_can_be_reused() {
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        let number = reader.as_raw_fd();
        let word = usize::try_from(number).unwrap() / 64;
        let bit = 1u64 << (number % 64);
        let guarded = GuardedFd::new(reader);
        assert_ne!(GUARDED[word].load(Ordering::Relaxed) & bit, 0);
        drop(guarded);
        // Another test thread may have guarded the reused number; only the drop's effect on a free
        // number is asserted.
        if rustix::io::fcntl_getfd(
            // SAFETY: only used to ask whether the number is open.
            unsafe { BorrowedFd::borrow_raw(number) },
        )
        .is_err()
        {
            assert_eq!(GUARDED[word].load(Ordering::Relaxed) & bit, 0);
        }
    }
}
