//! What a fuzzer needs: the parser of what other processes say.
//!
//! **Invariant:** nothing in here sends or receives.

use crate::{DataError, rendezvous::reencode};

/// Parses a rendezvous message and writes it again.
///
/// # Errors
/// `Corrupt` for everything that is no message.
pub fn parse_message(bytes: &[u8]) -> Result<Vec<u8>, DataError> {
    reencode(bytes)
}
