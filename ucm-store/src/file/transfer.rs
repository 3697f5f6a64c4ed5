//! A transfer between a file and up to three pieces of memory, without the calls.
//!
//! **Invariant:** a transfer is complete only when the calls moved every byte of it: short counts are
//! continued at a position the device accepts, and calls that move nothing end it after
//! [`MAX_IDLE`] tries. What a short count leaves out is never assumed.

use std::{io, ptr::NonNull};

use super::sys::{Incomplete, RawSpan};

/// Calls in a row that may bring nothing: the end of a file, interruptions, a busy device.
const MAX_IDLE: u32 = 16;
/// Most bytes of one call: below the limit of Linux (2 GiB − 4 KiB), and a multiple of any block.
const CALL_BYTES: usize = 1 << 30;
const SPANS: usize = 3;

/// What a call brought.
#[derive(Debug)]
pub(super) enum Progress {
    /// Bytes are left: call again with [`Transfer::next`].
    More,
    /// All bytes were moved, or none will be any more.
    Ended(Result<(), Incomplete>),
}

/// The spans of a transfer, one after the other from `offset` in the file on.
#[derive(Debug)]
pub(super) struct Transfer {
    spans: [RawSpan; SPANS],
    /// What the next call passes to the kernel; it must not move while the call is on its way.
    iov: [libc::iovec; SPANS],
    offset: u64,
    len: usize,
    done: usize,
    /// Positions of calls are multiples of this.
    align: usize,
    idle: u32,
}

// SAFETY: addresses and numbers. Whoever made the spans answers for the memory, in any thread.
unsafe impl Send for Transfer {}

impl Transfer {
    /// A transfer that starts at `offset`, which is a multiple of `align` (a power of two).
    pub(super) fn new(offset: u64, spans: [RawSpan; SPANS], align: usize) -> Self {
        let len = spans.iter().map(|span| span.len()).sum();
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Self { spans, iov: [nothing; SPANS], offset, len, done: 0, align, idle: 0 }
    }

    /// Vector, number of its pieces, and position of the next call.
    pub(super) fn next(&mut self) -> (*const libc::iovec, u32, u64) {
        let end = self.len.min(self.done.saturating_add(CALL_BYTES));
        let (mut start, mut count) = (0, 0);
        let mut places = self.iov.iter_mut();
        for span in self.spans {
            let part = span.part(self.done.saturating_sub(start), end.saturating_sub(start));
            start += span.len();
            if part.iov_len > 0
                && let Some(place) = places.next()
            {
                *place = part;
                count += 1;
            }
        }
        (self.iov.as_ptr(), count, self.offset + self.done as u64)
    }

    /// Bytes that are left.
    pub(super) fn left(&self) -> usize {
        self.len - self.done
    }

    /// Takes in what the call that [`next`](Self::next) described said: bytes moved, or an error.
    pub(super) fn advance(&mut self, moved: io::Result<usize>) -> Progress {
        match moved {
            Ok(n) if n > self.left() => {
                let message = format!("{n} bytes moved where {} were asked for", self.left());
                return Progress::Ended(Err(Incomplete::Failed(io::Error::other(message))));
            }
            Ok(n) if n == self.left() => {
                self.done = self.len;
                return Progress::Ended(Ok(()));
            }
            Ok(n) => {
                // A call can only start at a multiple: the rest of a block is moved again.
                let usable = n - n % self.align;
                self.done += usable;
                self.idle = if usable > 0 { 0 } else { self.idle + 1 };
                if self.idle >= MAX_IDLE {
                    let at = self.offset + (self.done + n) as u64;
                    return Progress::Ended(Err(Incomplete::EndOfFile(at)));
                }
            }
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {
                self.idle += 1;
                if self.idle >= MAX_IDLE {
                    return Progress::Ended(Err(Incomplete::Failed(e)));
                }
            }
            Err(e) => return Progress::Ended(Err(Incomplete::Failed(e))),
        }
        Progress::More
    }
}

/// A span of no bytes.
pub(super) fn empty() -> RawSpan {
    // SAFETY: zero bytes are valid everywhere.
    unsafe { RawSpan::new(NonNull::dangling(), 0) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn span(bytes: &mut [u8]) -> RawSpan {
        // SAFETY: the slices of these tests outlive their spans and are used by nothing else.
        unsafe { RawSpan::new(NonNull::from(&mut *bytes).cast(), bytes.len()) }
    }

    /// Does what a kernel does with `next`: moves up to `most` bytes of `file`.
    fn call(transfer: &mut Transfer, file: &[u8], most: usize) -> usize {
        let (iov, count, at) = transfer.next();
        let mut from = usize::try_from(at).unwrap();
        let mut left = most;
        for n in 0..count as usize {
            let place = iov.wrapping_add(n);
            // SAFETY: `next` filled so many places.
            let piece = unsafe { *place };
            let len = piece.iov_len.min(left).min(file.len().saturating_sub(from));
            let source = file.as_ptr().wrapping_add(from);
            // SAFETY: the piece lies in a slice of the test, the source in the other.
            unsafe { piece.iov_base.cast::<u8>().copy_from(source, len) };
            from += len;
            left -= len;
        }
        most - left
    }

    proptest! {
        /// Broken on purpose: a short count taken for the whole; `done` not rounded to a block; the
        /// spans cut at the wrong place.
        #[test]
        fn a44_whatever_calls_bring_all_bytes_arrive(
            lens in prop::array::uniform3(0usize..200),
            steps in prop::collection::vec(prop_oneof![Just(None), (0usize..300).prop_map(Some)], 0..40),
            align in prop_oneof![Just(1usize), Just(8), Just(64)],
        ) {
            let total: usize = lens.iter().sum();
            prop_assume!(total > 0);
            let file: Vec<u8> = (0..total + 64).map(|n| (n * 7 + n / 251).to_le_bytes()[0] | 1).collect();
            let mut memory = vec![0; total];
            let (a, rest) = memory.split_at_mut(lens[0]);
            let (b, c) = rest.split_at_mut(lens[1]);
            let mut transfer = Transfer::new(64, [span(a), span(b), span(c)], align);
            let mut ended = None;
            for step in steps.into_iter().chain(std::iter::repeat_n(Some(usize::MAX), 2)) {
                prop_assert_eq!(transfer.next().2 % align as u64, 0, "where a device takes no call");
                let moved = match step {
                    None => Err(io::Error::from_raw_os_error(libc::EINTR)),
                    Some(most) => {
                        let most = most.min(transfer.left());
                        Ok(call(&mut transfer, &[&[0; 64], &file[..]].concat(), most))
                    }
                };
                if let Progress::Ended(end) = transfer.advance(moved) {
                    ended = Some(end);
                    break;
                }
            }
            match ended {
                Some(Ok(())) => prop_assert_eq!(&memory[..], &file[..total]),
                // Sixteen idle calls in a row.
                Some(Err(_)) => {}
                None => prop_assert!(false, "never ended"),
            }
        }
    }

    #[test]
    fn a44_the_end_of_the_file_long_counts_and_errors_end_it() {
        let mut memory = [0; 100];
        let mut make = || Transfer::new(0, [span(&mut memory), empty(), empty()], 1);
        let mut t = make();
        assert!(matches!(t.advance(Ok(99)), Progress::More));
        for _ in 1..MAX_IDLE {
            assert!(matches!(t.advance(Ok(0)), Progress::More));
        }
        assert!(matches!(t.advance(Ok(0)), Progress::Ended(Err(Incomplete::EndOfFile(99)))));
        assert!(matches!(make().advance(Ok(101)), Progress::Ended(Err(Incomplete::Failed(_)))));
        for errno in [libc::EIO, libc::ENOSPC, libc::ESTALE] {
            let Progress::Ended(Err(Incomplete::Failed(e))) =
                make().advance(Err(io::Error::from_raw_os_error(errno)))
            else {
                panic!("{errno} did not end it");
            };
            assert_eq!(e.raw_os_error(), Some(errno));
        }
        let mut t = make();
        for _ in 1..MAX_IDLE {
            let again = t.advance(Err(io::Error::from_raw_os_error(libc::EAGAIN)));
            assert!(matches!(again, Progress::More));
        }
        let end = t.advance(Err(io::Error::from_raw_os_error(libc::EAGAIN)));
        assert!(matches!(end, Progress::Ended(Err(Incomplete::Failed(_)))));
    }

    #[test]
    fn a44_no_call_is_over_the_limit_of_the_kernel() {
        // Never touched, only described.
        // SAFETY: nothing reads or writes the span.
        let huge = unsafe { RawSpan::new(NonNull::dangling(), 3 << 30) };
        let mut t = Transfer::new(4096, [empty(), huge, empty()], 4096);
        let (iov, count, at) = t.next();
        // SAFETY: one place was filled.
        assert_eq!((count, at, unsafe { (*iov).iov_len }), (1, 4096, CALL_BYTES));
        assert!(matches!(t.advance(Ok(CALL_BYTES)), Progress::More));
        assert_eq!(t.next().2, 4096 + CALL_BYTES as u64);
    }
}
