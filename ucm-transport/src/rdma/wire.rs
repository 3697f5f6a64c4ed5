//! What client and owner say to each other over the control connection, byte by byte as
//! `docs/transport.md` says. No IO, no state.
//!
//! **Invariant:** decoding allocates nothing beyond what the message is long, never panics, and what
//! was decoded encodes to the same bytes.

use ucm_data::Token;

use crate::{
    Access,
    tcp::{Fields, Malformed},
};

const MAGIC: [u8; 8] = *b"UCMRDMA\n";
const VERSION: u16 = 1;
const CONNECT: u16 = 1;
const ATTACH: u16 = 2;

/// Bytes that a client reads over the new connection, to see that it leads to the right owner.
pub(super) const BEACON_BYTES: usize = 32;
/// Most pieces of one region.
pub(super) const MAX_PIECES: usize = 1 << 14;

/// An end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Endpoint {
    pub(super) ethernet: bool,
    /// 1 is 256 bytes, 5 is 4096.
    pub(super) mtu: u8,
    /// Reads that it answers at once.
    pub(super) reads_in: u8,
    /// Reads that it would have out at once.
    pub(super) reads_out: u8,
    pub(super) lid: u16,
    pub(super) qpn: u32,
    pub(super) psn: u32,
    pub(super) gid: [u8; 16],
}

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    Connect(Endpoint),
    /// Where the region lies that this token names.
    Attach(Token),
}

/// The owner's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Connected {
    pub(super) end: Endpoint,
    /// Names this owner, as long as it lives.
    pub(super) owner: Token,
    pub(super) beacon_addr: u64,
    pub(super) beacon_rkey: u32,
    pub(super) beacon: [u8; BEACON_BYTES],
}

/// A piece of a region, as the owner's device addresses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FarPiece {
    pub(super) addr: u64,
    pub(super) len: u64,
    pub(super) rkey: u32,
}

/// An exported region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FarRegion {
    pub(super) owner: Token,
    pub(super) access: Access,
    pub(super) len: u64,
    pub(super) pieces: Vec<FarPiece>,
}

/// Whether this call is ours.
pub(super) fn is_ours(message: &[u8]) -> bool {
    message.starts_with(&MAGIC)
}

impl Fields<'_> {
    /// The head; what kind of message follows.
    fn head(&mut self) -> Result<u16, Malformed> {
        self.expect(MAGIC)?;
        if self.u16()? != VERSION {
            return Err(Malformed("another version; use the same release on both sides"));
        }
        let kind = self.u16()?;
        self.expect([0; 4])?;
        Ok(kind)
    }

    fn kind(&mut self, wanted: u16) -> Result<(), Malformed> {
        if self.head()? == wanted { Ok(()) } else { Err(Malformed("another kind of message")) }
    }

    fn end(self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed("bytes after the end")) }
    }

    fn endpoint(&mut self) -> Result<Endpoint, Malformed> {
        let [link, mtu, reads_in, reads_out] = self.array()?;
        let lid = self.u16()?;
        self.expect([0; 2])?;
        let (qpn, psn, gid) = (self.u32()?, self.u32()?, self.array()?);
        let good = matches!(link, 1 | 2)
            && (1..=5).contains(&mtu)
            && reads_in > 0
            && reads_out > 0
            && qpn < 1 << 24
            && psn < 1 << 24;
        if !good {
            return Err(Malformed("no end of a connection"));
        }
        Ok(Endpoint { ethernet: link == 2, mtu, reads_in, reads_out, lid, qpn, psn, gid })
    }
}

fn head(kind: u16) -> Vec<u8> {
    let mut out = Vec::with_capacity(128);
    out.extend(MAGIC);
    out.extend(VERSION.to_le_bytes());
    out.extend(kind.to_le_bytes());
    out.extend([0; 4]);
    out
}

impl Endpoint {
    fn encode(&self, out: &mut Vec<u8>) {
        let link = if self.ethernet { 2 } else { 1 };
        out.extend([link, self.mtu, self.reads_in, self.reads_out]);
        out.extend(self.lid.to_le_bytes());
        out.extend([0; 2]);
        out.extend(self.qpn.to_le_bytes());
        out.extend(self.psn.to_le_bytes());
        out.extend(self.gid);
    }
}

impl Ask {
    pub(super) fn encode(&self) -> Vec<u8> {
        match self {
            Self::Connect(end) => {
                let mut out = head(CONNECT);
                end.encode(&mut out);
                out
            }
            Self::Attach(token) => {
                let mut out = head(ATTACH);
                out.extend(token.0);
                out
            }
        }
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut fields = Fields(bytes);
        let ask = match fields.head()? {
            CONNECT => Self::Connect(fields.endpoint()?),
            ATTACH => Self::Attach(Token(fields.array()?)),
            _ => return Err(Malformed("an unknown kind of message")),
        };
        fields.end()?;
        Ok(ask)
    }
}

impl Connected {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = head(CONNECT);
        self.end.encode(&mut out);
        out.extend(self.owner.0);
        out.extend(self.beacon_addr.to_le_bytes());
        out.extend(self.beacon_rkey.to_le_bytes());
        out.extend([0; 4]);
        out.extend(self.beacon);
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut fields = Fields(bytes);
        fields.kind(CONNECT)?;
        let (end, owner) = (fields.endpoint()?, Token(fields.array()?));
        let (beacon_addr, beacon_rkey) = (fields.u64()?, fields.u32()?);
        fields.expect([0; 4])?;
        let beacon = fields.array()?;
        fields.end()?;
        Ok(Self { end, owner, beacon_addr, beacon_rkey, beacon })
    }
}

impl FarRegion {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = head(ATTACH);
        out.extend(self.owner.0);
        let access: u32 = if self.access == Access::ReadWrite { 2 } else { 1 };
        out.extend(access.to_le_bytes());
        out.extend(u32::try_from(self.pieces.len()).unwrap_or(u32::MAX).to_le_bytes());
        out.extend(self.len.to_le_bytes());
        for piece in &self.pieces {
            out.extend(piece.addr.to_le_bytes());
            out.extend(piece.len.to_le_bytes());
            out.extend(piece.rkey.to_le_bytes());
            out.extend([0; 4]);
        }
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut fields = Fields(bytes);
        fields.kind(ATTACH)?;
        let owner = Token(fields.array()?);
        let access = match fields.u32()? {
            1 => Access::Read,
            2 => Access::ReadWrite,
            _ => return Err(Malformed("an unknown access")),
        };
        let (count, len) = (fields.u32()? as usize, fields.u64()?);
        // Before anything is allocated for them.
        if count == 0 || count > MAX_PIECES || fields.0.len() != count * 24 {
            return Err(Malformed("a number of pieces that cannot be"));
        }
        let mut pieces = Vec::with_capacity(count);
        let mut sum = 0_u64;
        for _ in 0..count {
            let piece = FarPiece { addr: fields.u64()?, len: fields.u64()?, rkey: fields.u32()? };
            fields.expect([0; 4])?;
            let end = piece.addr.checked_add(piece.len);
            sum = sum
                .checked_add(piece.len)
                .filter(|_| piece.len > 0 && end.is_some())
                .ok_or(Malformed("a piece that cannot be"))?;
            pieces.push(piece);
        }
        if sum != len {
            return Err(Malformed("pieces that do not add up"));
        }
        fields.end()?;
        Ok(Self { owner, access, len, pieces })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Random;

    const END: Endpoint = Endpoint {
        ethernet: true,
        mtu: 5,
        reads_in: 16,
        reads_out: 3,
        lid: 0x1234,
        qpn: 0xab_cdef,
        psn: 0x12_3456,
        gid: [9; 16],
    };

    fn messages() -> (Vec<Vec<u8>>, Connected, FarRegion) {
        let connected = Connected {
            end: Endpoint { ethernet: false, ..END },
            owner: Token([3; 16]),
            beacon_addr: 0x1122_3344_5566_7788,
            beacon_rkey: 77,
            beacon: [8; BEACON_BYTES],
        };
        let piece = |at: u64| FarPiece { addr: at << 30, len: 1 << 30, rkey: 5 };
        let pieces: Vec<_> = (0..4).map(piece).collect();
        let region =
            FarRegion { owner: Token([4; 16]), access: Access::ReadWrite, len: 4 << 30, pieces };
        let all = vec![
            Ask::Connect(END).encode(),
            Ask::Attach(Token([5; 16])).encode(),
            connected.encode(),
            region.encode(),
        ];
        (all, connected, region)
    }

    #[test]
    fn what_was_said_is_heard() {
        let (all, connected, region) = messages();
        assert_eq!(Ask::decode(&all[0]), Ok(Ask::Connect(END)));
        assert_eq!(Ask::decode(&all[1]), Ok(Ask::Attach(Token([5; 16]))));
        assert_eq!(Connected::decode(&all[2]), Ok(connected));
        assert_eq!(FarRegion::decode(&all[3]), Ok(region));
        assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [48, 32, 112, 144]);
        assert!(all.iter().all(|message| is_ours(message)));
        assert_eq!(all[0][..16], *b"UCMRDMA\n\x01\0\x01\0\0\0\0\0");
    }

    /// Any bytes: an error, or a message that encodes to the same bytes.
    #[test]
    fn nonsense_is_refused_and_nothing_is_read_beyond_the_end() {
        let (all, ..) = messages();
        let mut random = Random::new(7);
        let mut good = 0;
        for round in 0..40_000_u64 {
            let mut bytes = all[usize::try_from(round % 4).unwrap()].clone();
            for _ in 0..random.range(0, 3) {
                let at = usize::try_from(random.range(0, bytes.len() as u64)).unwrap();
                bytes[at] = u8::try_from(random.range(0, 256)).unwrap();
            }
            if random.range(0, 8) == 0 {
                bytes.truncate(usize::try_from(random.range(0, bytes.len() as u64)).unwrap());
            }
            let asked = Ask::decode(&bytes).map(|said| said.encode());
            let connected = Connected::decode(&bytes).map(|said| said.encode());
            let region = FarRegion::decode(&bytes).map(|said| said.encode());
            for again in [asked, connected, region].into_iter().flatten() {
                assert_eq!(again, bytes);
                good += 1;
            }
        }
        assert!(good > 1_000, "{good}");
        let mut long = all[3].clone();
        long.push(0);
        assert!(FarRegion::decode(&long).is_err());
    }
}
