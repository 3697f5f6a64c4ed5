//! Positioned reads and writes between files and raw memory.
//!
//! **Invariant:** a call that succeeds has moved exactly the bytes asked for; short counts are
//! continued, the end of the file is reported, nothing is assumed.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
    ptr::NonNull,
};

use super::transfer::{Progress, Transfer};

/// Most bytes of one system call: below the limit of Linux (2 GiB − 4 KiB).
const CALL_BYTES: usize = 1 << 30;

/// A piece of raw memory: part of an operation's memory, or a buffer of ours.
#[derive(Clone, Copy, Debug)]
pub(super) struct RawSpan {
    base: NonNull<u8>,
    len: usize,
}

impl RawSpan {
    /// # Safety
    /// The range stays valid for reads, and for writes if it is read into, while the span is used.
    pub(super) unsafe fn new(base: NonNull<u8>, len: usize) -> Self {
        Self { base, len }
    }

    pub(super) fn len(self) -> usize {
        self.len
    }

    /// The part from `start` to `end`, both cut to the span.
    pub(super) fn part(self, start: usize, end: usize) -> libc::iovec {
        let end = end.min(self.len);
        let start = start.min(end);
        // SAFETY: start <= len.
        let base = unsafe { self.base.add(start) };
        libc::iovec { iov_base: base.as_ptr().cast(), iov_len: end - start }
    }
}

/// Why a transfer is not complete.
#[derive(Debug)]
pub(super) enum Incomplete {
    /// The file ended at this position.
    EndOfFile(u64),
    /// The system reported a failure.
    Failed(io::Error),
}

/// Reads positions `start..end` of a file whose first bytes belong to `head` and the following
/// ones to `body`.
pub(super) fn read(
    fd: BorrowedFd<'_>,
    head: RawSpan,
    body: RawSpan,
    start: usize,
    end: usize,
) -> Result<(), Incomplete> {
    whole(start, end, |at| {
        let iov = vector(head, body, at, end);
        // SAFETY: both spans are valid for writes (`RawSpan::new`).
        let n = unsafe { libc::preadv(fd.as_raw_fd(), iov.as_ptr(), 2, position(at)) };
        count(n)
    })
}

/// Writes positions `start..end`, as [`read`] reads them.
pub(super) fn write(
    fd: BorrowedFd<'_>,
    head: RawSpan,
    body: RawSpan,
    start: usize,
    end: usize,
) -> Result<(), Incomplete> {
    whole(start, end, |at| {
        let iov = vector(head, body, at, end);
        // SAFETY: both spans are valid for reads (`RawSpan::new`).
        let n = unsafe { libc::pwritev(fd.as_raw_fd(), iov.as_ptr(), 2, position(at)) };
        count(n)
    })
}

/// One positioned read into the pieces of a vector, as [`Transfer::next`] describes it.
pub(super) fn readv(
    fd: BorrowedFd<'_>,
    (iov, pieces, at): (*const libc::iovec, u32, u64),
) -> io::Result<usize> {
    let at = libc::off_t::try_from(at).unwrap_or(libc::off_t::MAX);
    let pieces = libc::c_int::try_from(pieces).unwrap_or(0);
    // SAFETY: the pieces are parts of spans that are valid for writes (`RawSpan::new`).
    count(unsafe { libc::preadv(fd.as_raw_fd(), iov, pieces, at) })
}

/// One positioned write, as [`readv`] reads.
pub(super) fn writev(
    fd: BorrowedFd<'_>,
    (iov, pieces, at): (*const libc::iovec, u32, u64),
) -> io::Result<usize> {
    let at = libc::off_t::try_from(at).unwrap_or(libc::off_t::MAX);
    let pieces = libc::c_int::try_from(pieces).unwrap_or(0);
    // SAFETY: the pieces are parts of spans that are valid for reads (`RawSpan::new`).
    count(unsafe { libc::pwritev(fd.as_raw_fd(), iov, pieces, at) })
}

/// Reads all of a transfer.
pub(super) fn read_all(fd: BorrowedFd<'_>, transfer: &mut Transfer) -> Result<(), Incomplete> {
    loop {
        let moved = readv(fd, transfer.next());
        if let Progress::Ended(end) = transfer.advance(moved) {
            return end;
        }
    }
}

/// Writes all of a transfer.
pub(super) fn write_all(fd: BorrowedFd<'_>, transfer: &mut Transfer) -> Result<(), Incomplete> {
    loop {
        let moved = writev(fd, transfer.next());
        if let Progress::Ended(end) = transfer.advance(moved) {
            return end;
        }
    }
}

fn vector(head: RawSpan, body: RawSpan, at: usize, end: usize) -> [libc::iovec; 2] {
    let end = end.min(at.saturating_add(CALL_BYTES));
    let first = head.part(at, end);
    let second = body.part(at.saturating_sub(head.len), end.saturating_sub(head.len));
    [first, second]
}

fn position(at: usize) -> libc::off_t {
    libc::off_t::try_from(at).unwrap_or(libc::off_t::MAX)
}

fn count(n: isize) -> io::Result<usize> {
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Repeats `step` from `start` until `end` is reached.
fn whole(
    start: usize,
    end: usize,
    mut step: impl FnMut(usize) -> io::Result<usize>,
) -> Result<(), Incomplete> {
    let mut at = start;
    while at < end {
        match step(at) {
            Ok(0) => return Err(Incomplete::EndOfFile(at as u64)),
            Ok(n) if n <= end - at => at += n,
            Ok(n) => {
                let message = format!("{n} bytes moved where {} were asked for", end - at);
                return Err(Incomplete::Failed(io::Error::other(message)));
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(Incomplete::Failed(e)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{io::Write, os::fd::AsFd};

    use super::*;

    /// Runs `whole` over 100 bytes with these answers of the system.
    fn scripted(answers: Vec<io::Result<usize>>) -> (Result<(), Incomplete>, Vec<usize>) {
        let mut asked = Vec::new();
        let mut answers = answers.into_iter();
        let result = whole(0, 100, |at| {
            asked.push(at);
            answers.next().unwrap()
        });
        (result, asked)
    }

    #[test]
    fn a44_short_counts_are_continued() {
        let os = |e: i32| Err(io::Error::from_raw_os_error(e));
        let (result, asked) =
            scripted(vec![Ok(1), os(libc::EINTR), Ok(49), os(libc::EINTR), Ok(49), Ok(1)]);
        result.unwrap();
        assert_eq!(asked, [0, 1, 1, 50, 50, 99]);
    }

    #[test]
    fn a44_end_of_file_errors_and_long_counts_are_failures() {
        let os = |e: i32| Err(io::Error::from_raw_os_error(e));
        let end = scripted(vec![Ok(99), Ok(0)]).0;
        assert!(matches!(end, Err(Incomplete::EndOfFile(99))));
        let end = scripted(vec![Ok(0)]).0;
        assert!(matches!(end, Err(Incomplete::EndOfFile(0))));
        for errno in [libc::EIO, libc::EAGAIN, libc::ENOSPC] {
            let failed = scripted(vec![Ok(50), os(errno)]).0;
            let Err(Incomplete::Failed(e)) = failed else { panic!("{failed:?}") };
            assert_eq!(e.raw_os_error(), Some(errno));
        }
        assert!(matches!(scripted(vec![Ok(60), Ok(41)]).0, Err(Incomplete::Failed(_))));
    }

    fn span(bytes: &mut [u8]) -> RawSpan {
        // SAFETY: the slices of these tests outlive their spans and are used by nothing else.
        unsafe { RawSpan::new(NonNull::from(&mut *bytes).cast(), bytes.len()) }
    }

    #[test]
    fn head_and_body_go_where_they_belong() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"0123456789").unwrap();
        let (mut head, mut body) = ([0; 4], [0; 6]);
        let (h, b) = (span(&mut head), span(&mut body));
        read(file.as_fd(), h, b, 0, 7).unwrap();
        read(file.as_fd(), h, b, 7, 10).unwrap();
        assert_eq!((&head, &body), (b"0123", b"456789"));
        let mut long = [0; 9];
        let result = read(file.as_fd(), span(&mut head), span(&mut long), 0, 13);
        assert!(matches!(result, Err(Incomplete::EndOfFile(10))));
        let (mut head, mut body) = (*b"abcd", *b"efghij");
        write(file.as_fd(), span(&mut head), span(&mut body), 2, 9).unwrap();
        let mut all = [0; 10];
        read(file.as_fd(), span(&mut []), span(&mut all), 0, 10).unwrap();
        assert_eq!(&all, b"01cdefghi9");
    }
}
