//! The shared secret, and proofs of knowing it.
//!
//! **Invariant:** the secret never appears in a message or in a `Debug` output; proofs are compared
//! in constant time.

use std::{fmt, sync::Arc};

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use crate::{ErrorKind, TransferError};

const MIN_BYTES: usize = 16;

/// What both ends of a connection must know. Cheap to clone.
#[derive(Clone)]
pub struct Secret(Arc<[u8]>);

/// Who proves that it knows the secret.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Side {
    Client,
    Server,
}

impl Secret {
    /// From bytes that are hard to guess, at least 16.
    ///
    /// # Errors
    /// `Invalid` for a shorter one.
    pub fn new(bytes: &[u8]) -> Result<Self, TransferError> {
        if bytes.len() < MIN_BYTES {
            return Err(TransferError::new(
                ErrorKind::Invalid,
                format!("a secret of {} bytes; use at least {MIN_BYTES} random ones", bytes.len()),
            ));
        }
        Ok(Self(bytes.into()))
    }

    /// Proof for this exchange of greetings.
    pub(crate) fn proof(&self, side: Side, hello: &[u8], challenge: &[u8]) -> [u8; 32] {
        self.mac(side, hello, challenge).map_or([0; 32], |mac| mac.finalize().into_bytes().into())
    }

    /// Whether the other end knows the secret.
    pub(crate) fn verify(&self, side: Side, hello: &[u8], challenge: &[u8], proof: &[u8]) -> bool {
        self.mac(side, hello, challenge).is_some_and(|mac| mac.verify_slice(proof).is_ok())
    }

    fn mac(&self, side: Side, hello: &[u8], challenge: &[u8]) -> Option<Hmac<Sha256>> {
        // HMAC takes keys of any length.
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).ok()?;
        mac.update(match side {
            Side::Client => b"ucm-tcp client",
            Side::Server => b"ucm-tcp server",
        });
        mac.update(hello);
        mac.update(challenge);
        Some(mac)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proofs_depend_on_secret_side_and_both_greetings() {
        let secret = Secret::new(&[7; 16]).unwrap();
        let proof = secret.proof(Side::Client, b"hello", b"challenge");
        assert!(secret.verify(Side::Client, b"hello", b"challenge", &proof));
        assert!(!secret.verify(Side::Server, b"hello", b"challenge", &proof));
        assert!(!secret.verify(Side::Client, b"hallo", b"challenge", &proof));
        assert!(!secret.verify(Side::Client, b"hello", b"other", &proof));
        assert!(!secret.verify(Side::Client, b"hello", b"challenge", &proof[..31]));
        let other = Secret::new(&[8; 16]).unwrap();
        assert!(!other.verify(Side::Client, b"hello", b"challenge", &proof));
        assert!(Secret::new(&[7; 15]).is_err());
        assert!(!format!("{secret:?}").contains('7'));
    }
}
