//! Read-ahead of a connection: short messages cost one system call, long payloads bypass it.
//!
//! **Invariant:** it never holds more than its fixed size, and gives bytes out in the order of the
//! stream.

use std::io;

use super::{socket::Socket, sys::Scatter};

const BYTES: usize = 8 << 10;

#[derive(Debug)]
pub(super) struct InBuf {
    bytes: Box<[u8; BYTES]>,
    start: usize,
    end: usize,
}

impl InBuf {
    pub(super) fn new() -> Self {
        Self { bytes: Box::new([0; BYTES]), start: 0, end: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    fn ready(&self) -> &[u8] {
        self.bytes.get(self.start..self.end).unwrap_or_default()
    }

    fn use_up(&mut self, count: usize) {
        self.start = (self.start + count).min(self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Reads ahead; `false` when nothing is there now.
    fn refill(&mut self, socket: &Socket) -> io::Result<bool> {
        if self.end == BYTES {
            self.bytes.copy_within(self.start.., 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let Some(room) = self.bytes.get_mut(self.end..) else { return Ok(false) };
        match socket.receive(room) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                self.end += count;
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The next `N` bytes, once they are all here. `N` is far below the size of the buffer.
    pub(super) fn take<const N: usize>(&mut self, socket: &Socket) -> io::Result<Option<[u8; N]>> {
        loop {
            if let Some((first, _)) = self.ready().split_first_chunk::<N>() {
                let first = *first;
                self.use_up(N);
                return Ok(Some(first));
            }
            if !self.refill(socket)? {
                return Ok(None);
            }
        }
    }

    /// Fills a buffer of ours up to `length`; says whether it is full.
    pub(super) fn fill(
        &mut self,
        socket: &Socket,
        into: &mut Vec<u8>,
        length: usize,
    ) -> io::Result<bool> {
        loop {
            let missing = length.saturating_sub(into.len());
            let ready = self.ready();
            let now = ready.get(..missing).unwrap_or(ready);
            into.extend_from_slice(now);
            let count = now.len();
            self.use_up(count);
            if count == missing {
                return Ok(true);
            }
            if !self.refill(socket)? {
                return Ok(false);
            }
        }
    }

    /// Reads into pieces, past the buffer once it is empty; says whether they are full.
    pub(super) fn fill_pieces(
        &mut self,
        socket: &Socket,
        pieces: &mut Scatter,
    ) -> io::Result<bool> {
        let count = pieces.fill(self.ready());
        self.use_up(count);
        while pieces.left() > 0 {
            match socket.receive_into(pieces) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Throws away what is there, up to `left` bytes; returns how many are still to come.
    pub(super) fn skip(&mut self, socket: &Socket, mut left: u64) -> io::Result<u64> {
        loop {
            let count = usize::try_from(left).unwrap_or(usize::MAX).min(self.ready().len());
            self.use_up(count);
            left -= count as u64;
            if left == 0 || !self.refill(socket)? {
                return Ok(left);
            }
        }
    }
}
