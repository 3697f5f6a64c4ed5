//! What an offer says about its descriptors: descriptor 0 is the control region, then the segments
//! of pool 0, pool 1, ….
//!
//! Layout, little-endian: `"UCMMETA\x01"`, u32 pools, then for each u32 length and its encoded
//! segment geometry.
//!
//! **Invariant:** bytes from another process are parsed in full before any is believed.

use ucm_data::{DataError, ErrorKind};

const MAGIC: &[u8; 8] = b"UCMMETA\x01";

/// Contents of an offer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Meta {
    /// Encoded segment geometry of each pool.
    pub(crate) pools: Vec<Vec<u8>>,
}

impl Meta {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend_from_slice(&len32(self.pools.len()));
        for pool in &self.pools {
            out.extend_from_slice(&len32(pool.len()));
            out.extend_from_slice(pool);
        }
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, DataError> {
        let damaged = || {
            DataError::new(
                ErrorKind::Corrupt,
                format!("{} bytes are no offer of this version", bytes.len()),
            )
        };
        let rest = bytes.strip_prefix(MAGIC).ok_or_else(damaged)?;
        let (count, mut rest) = take32(rest).ok_or_else(damaged)?;
        let mut pools = Vec::new();
        for _ in 0..count {
            let (len, after) = take32(rest).ok_or_else(damaged)?;
            let (pool, after) = after.split_at_checked(len).ok_or_else(damaged)?;
            pools.push(pool.to_vec());
            rest = after;
        }
        if !rest.is_empty() || pools.len() > ucm_ctrl::MAX_POOLS {
            return Err(damaged());
        }
        Ok(Self { pools })
    }
}

fn len32(len: usize) -> [u8; 4] {
    u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes()
}

fn take32(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let (head, rest) = bytes.split_first_chunk::<4>()?;
    Some((usize::try_from(u32::from_le_bytes(*head)).ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comes_back_equal_and_every_truncation_is_refused() {
        let meta = Meta { pools: vec![vec![1, 2, 3], vec![], vec![9; 300]] };
        let bytes = meta.encode();
        assert_eq!(Meta::decode(&bytes).unwrap(), meta);
        for len in 0..bytes.len() {
            assert!(Meta::decode(&bytes[..len]).is_err(), "{len} bytes were accepted");
        }
        let mut long = bytes.clone();
        long.push(0);
        assert!(Meta::decode(&long).is_err());
        let mut huge = bytes;
        huge[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(Meta::decode(&huge).is_err());
    }
}
