//! Memory registered in bounded pieces.
//!
//! **Invariant:** all pieces are registered, or none; they follow each other without a gap, and an
//! operation names bytes of one piece per element only.

use std::sync::Arc;

use super::{
    absent::VerbError,
    verbs::{Domain, Registered, Rights},
    wire::FarPiece,
};
use crate::{ErrorKind, Memory, TransferError};

/// Borders of pieces lie on multiples of this address, so that no page, huge or not, is in two.
const ALIGN: usize = 2 << 20;

/// A registered region of this process.
#[derive(Debug)]
pub(super) struct Pieces {
    all: Vec<Registered>,
    /// The processor reaches the bytes too.
    pub(super) host: bool,
}

impl Pieces {
    /// Registers host memory in pieces of at most `piece_bytes` (at least 2 MiB).
    ///
    /// # Errors
    /// `Registration`, naming the piece; nothing stays registered then.
    pub(super) fn of(
        domain: &Arc<Domain>,
        memory: &Memory,
        piece_bytes: usize,
        rights: Rights,
    ) -> Result<Self, TransferError> {
        let len = memory.len();
        let cuts = cuts(memory.as_ptr().as_ptr().addr(), len, piece_bytes);
        let count = cuts.len();
        let mut this = Self { all: Vec::with_capacity(count), host: true };
        for (offset, piece) in cuts {
            let part = memory.part(offset, piece)?;
            match Registered::new(domain, part, rights) {
                Ok(registered) => this.all.push(registered),
                Err(error) => {
                    let at = this.all.len();
                    // Rolls back, newest first, before the failure is told.
                    while let Some(registered) = this.all.pop() {
                        drop(registered);
                    }
                    let hint = if matches!(
                        error.errno,
                        rustix::io::Errno::NOMEM | rustix::io::Errno::AGAIN
                    ) {
                        "; raise the limit of locked memory (ulimit -l), or register less"
                    } else {
                        ""
                    };
                    let text = format!(
                        "piece {at} of {count} ({piece} bytes at offset {offset} of {len}) was not \
                         registered: {error}{hint}"
                    );
                    return Err(TransferError::new(ErrorKind::Registration, text));
                }
            }
        }
        Ok(this)
    }

    /// Memory of another device.
    pub(super) fn of_dmabuf(
        domain: &Arc<Domain>,
        memory: Memory,
        dmabuf: (std::os::fd::BorrowedFd<'_>, u64),
        rights: Rights,
    ) -> Result<Self, TransferError> {
        let told = |error: VerbError| error.into_transfer(ErrorKind::Registration);
        let one = Registered::of_dmabuf(domain, memory, dmabuf, rights).map_err(told)?;
        Ok(Self { all: vec![one], host: false })
    }

    /// Address and key of a place, and how many bytes from there lie in the same piece.
    pub(super) fn find(&self, offset: u64) -> Option<(u64, u32, u64)> {
        let addr = self.all.first()?.addr.checked_add(offset)?;
        let at = self.all.partition_point(|piece| piece.end() <= addr);
        let piece = self.all.get(at)?;
        Some((addr, piece.lkey, piece.end() - addr))
    }

    /// What peers must know.
    pub(super) fn for_peers(&self) -> Vec<FarPiece> {
        let far =
            |piece: &Registered| FarPiece { addr: piece.addr, len: piece.len, rkey: piece.rkey };
        self.all.iter().map(far).collect()
    }

    /// Ends the registration: no peer reaches the memory any more.
    ///
    /// # Errors
    /// Some pieces are still registered; try again.
    pub(super) fn end(&mut self) -> Result<(), VerbError> {
        while let Some(piece) = self.all.last_mut() {
            piece.end_now()?;
            self.all.pop();
        }
        Ok(())
    }
}

/// Offset and length of each piece.
fn cuts(addr: usize, len: usize, piece_bytes: usize) -> Vec<(usize, usize)> {
    let piece_bytes = (piece_bytes / ALIGN).max(1) * ALIGN;
    let mut all = Vec::new();
    let mut offset = 0;
    while offset < len {
        let beyond = (addr + offset) % ALIGN;
        let piece = (piece_bytes - beyond).min(len - offset);
        all.push((offset, piece));
        offset += piece;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_meet_at_borders_of_huge_pages() {
        const M: usize = 1 << 20;
        assert_eq!(cuts(0, 5 * M, 4 * M), [(0, 4 * M), (4 * M, M)]);
        assert_eq!(cuts(4096, 5 * M, 4 * M), [(0, 4 * M - 4096), (4 * M - 4096, M + 4096)]);
        assert_eq!(cuts(2 * M - 1, 3, 1), [(0, 1), (1, 2)]);
        assert_eq!(cuts(12_345, 100, 1 << 30), [(0, 100)]);
        for (addr, len, most) in [(0, 1, 1), (7, 64 * M + 3, 6 * M), (3 * M, 9 * M, 3 * M)] {
            let all = cuts(addr, len, most);
            let mut at = 0;
            for (offset, piece) in all {
                assert_eq!(offset, at);
                assert!(piece > 0 && piece <= most.max(ALIGN));
                assert!(offset == 0 || (addr + offset).is_multiple_of(ALIGN));
                at += piece;
            }
            assert_eq!(at, len);
        }
    }
}
