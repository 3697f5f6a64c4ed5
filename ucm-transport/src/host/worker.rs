//! Running pieces, in a worker or in the caller's thread.
//!
//! **Invariant:** every piece taken is reported as ended, also when running it panics.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::state::{Piece, PieceEnd, Shared};

/// Body of a worker thread.
pub(super) fn run(shared: &Shared) {
    while let Some(piece) = shared.take() {
        run_piece(shared, piece);
    }
}

/// Runs one piece and reports its end.
pub(super) fn run_piece(shared: &Shared, piece: Piece) {
    let Piece { ticket, ops, range, check, inject_panic } = piece;
    let end = catch_unwind(AssertUnwindSafe(|| {
        if inject_panic {
            panic!("injected: a copy worker panics");
        }
        for op in ops.get(range).unwrap_or_default() {
            // SAFETY: the job keeps its region lease until this piece is reported as ended.
            unsafe { op.run() };
        }
        // What was current after the last byte was current before it: generations never return.
        match &check {
            Some(check) if !check.is_current() => PieceEnd::Stale,
            _ => PieceEnd::Moved,
        }
    }))
    .unwrap_or(PieceEnd::Panicked);
    drop(ops);
    shared.piece_ended(ticket, end);
}
