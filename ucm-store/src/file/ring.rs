//! One io_uring: the few calls that the workers need.
//!
//! **Invariant:** a completion carries the number its request was given; the memory of a request is
//! kept by whoever pushed it until that number comes back.

use std::{
    fmt, io,
    os::fd::{AsRawFd, BorrowedFd},
};

use io_uring::{IoUring, opcode, types};

/// A ring of one thread.
pub(super) struct Ring {
    ring: IoUring,
}

impl Ring {
    /// A ring for `entries` requests at once. To be made by the thread that uses it.
    ///
    /// # Errors
    /// `ENOSYS`, `EPERM`: not allowed here. `ENOMEM`: the limit of locked memory (kernels before
    /// 5.12).
    pub(super) fn new(entries: u32) -> io::Result<Self> {
        // One thread submits, and completions are prepared when it asks for them: no interrupts of
        // its other work. Kernels before 6.1 do not know this.
        let modern = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_clamp()
            .dontfork()
            .build(entries);
        let ring = match modern {
            Ok(ring) => ring,
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                IoUring::builder().setup_clamp().dontfork().build(entries)?
            }
            Err(e) => return Err(e),
        };
        Ok(Self { ring })
    }

    /// Makes the ring hold this file until the ring and all its requests are gone.
    pub(super) fn keep(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        self.ring.submitter().register_files(&[file.as_raw_fd()])
    }

    /// Adds a read into the pieces of a vector. `false`: the queue is full, submit first.
    ///
    /// # Safety
    /// The vector must not move before it is submitted; what it names stays valid for writes, and
    /// the descriptor open, until the completion with this number.
    pub(super) unsafe fn push_read(
        &mut self,
        fd: i32,
        (iov, count, at): (*const libc::iovec, u32, u64),
        number: u64,
    ) -> bool {
        let entry = opcode::Readv::new(types::Fd(fd), iov, count).offset(at).build();
        // SAFETY: the caller keeps everything the entry names.
        unsafe { self.ring.submission().push(&entry.user_data(number)) }.is_ok()
    }

    /// Submits what was added and waits until `wanted` completions are there.
    pub(super) fn submit_and_wait(&self, wanted: usize) -> io::Result<()> {
        match self.ring.submit_and_wait(wanted) {
            Ok(_) => Ok(()),
            // A signal, or completions that want to be taken first: the caller takes and comes back.
            Err(e)
                if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN)) =>
            {
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    /// Takes a completion: its number, and bytes moved or an error.
    pub(super) fn take(&mut self) -> Option<(u64, io::Result<usize>)> {
        let entry = self.ring.completion().next()?;
        let result = entry.result();
        let moved = usize::try_from(result)
            .map_err(|_| io::Error::from_raw_os_error(result.saturating_neg()));
        Some((entry.user_data(), moved))
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").finish_non_exhaustive()
    }
}
