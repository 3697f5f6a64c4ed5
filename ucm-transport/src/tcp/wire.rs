//! The frames of the tcp engine, byte by byte as `docs/transport.md` says. No IO, no state.
//!
//! **Invariant:** decoding allocates nothing beyond what the limits allow, never panics, and what
//! was decoded encodes to the same bytes.

use ucm_data::Token;

/// Oldest and newest version spoken.
pub(crate) const VERSIONS: (u16, u16) = (1, 1);
pub(crate) const HELLO_BYTES: usize = 64;
pub(crate) const CHALLENGE_BYTES: usize = 96;
pub(crate) const AUTH_BYTES: usize = 32;
pub(crate) const READY_BYTES: usize = 40;
pub(crate) const HEAD_BYTES: usize = 32;
pub(crate) const TRAILER_BYTES: usize = 16;
/// Longest descriptor.
pub(crate) const DESCRIPTOR_BYTES: usize = 256;
/// Longest text of a refusal.
pub(crate) const TEXT_BYTES: usize = 1024;

const MAGIC: [u8; 8] = *b"UCMTCP\r\n";
const REQUEST: [u8; 4] = *b"UCMQ";
const REPLY: [u8; 4] = *b"UCMR";
const TRAILER: [u8; 4] = *b"UCME";
const RANGE_BYTES: usize = 12;
const SECTION_BYTES: usize = 8;

/// Why bytes are no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Malformed(pub(crate) &'static str);

/// A part of what a descriptor names, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeerRange {
    /// First byte.
    pub offset: u64,
    /// Number of bytes, never zero.
    pub len: u32,
}

/// Cuts fields off the front of a message.
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl<'a> Fields<'a> {
    pub(crate) fn bytes(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (first, rest) = self.0.split_at_checked(count).ok_or(Malformed("cut short"))?;
        self.0 = rest;
        Ok(first)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (first, rest) = self.0.split_first_chunk().ok_or(Malformed("cut short"))?;
        self.0 = rest;
        Ok(*first)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Malformed> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(crate) fn expect<const N: usize>(&mut self, value: [u8; N]) -> Result<(), Malformed> {
        if self.array()? == value { Ok(()) } else { Err(Malformed("unexpected bytes")) }
    }
}

/// Joins parts into a message of a fixed length; shorter ones end in zeros.
fn fixed<const N: usize>(parts: &[&[u8]]) -> [u8; N] {
    let mut out = [0; N];
    let mut at = out.iter_mut();
    for byte in parts.iter().copied().flatten() {
        if let Some(place) = at.next() {
            *place = *byte;
        }
    }
    out
}

/// What a client says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) versions: (u16, u16),
    pub(crate) flags: u32,
    pub(crate) boot: Token,
    pub(crate) nonce: [u8; 32],
}

impl Hello {
    pub(crate) fn encode(&self) -> [u8; HELLO_BYTES] {
        fixed(&[
            &MAGIC,
            &self.versions.0.to_le_bytes(),
            &self.versions.1.to_le_bytes(),
            &self.flags.to_le_bytes(),
            &self.boot.0,
            &self.nonce,
        ])
    }

    pub(crate) fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, Malformed> {
        let mut fields = Fields(bytes);
        fields.expect(MAGIC)?;
        Ok(Self {
            versions: (fields.u16()?, fields.u16()?),
            flags: fields.u32()?,
            boot: Token(fields.array()?),
            nonce: fields.array()?,
        })
    }
}

/// What a server grants a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    /// Bytes asked for and not answered.
    pub(crate) window: u64,
    /// Bytes of a request's body.
    pub(crate) frame: u32,
    /// Requests not answered.
    pub(crate) requests: u32,
    /// Ranges of a request.
    pub(crate) ranges: u32,
}

/// A server's answer to [`Hello`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Challenge {
    /// 0 when no version fits.
    pub(crate) version: u16,
    pub(crate) flags: u32,
    pub(crate) boot: Token,
    pub(crate) nonce: [u8; 32],
    pub(crate) grant: Grant,
}

impl Challenge {
    pub(crate) fn encode(&self) -> [u8; CHALLENGE_BYTES] {
        fixed(&[
            &MAGIC,
            &self.version.to_le_bytes(),
            &[0; 2],
            &self.flags.to_le_bytes(),
            &self.boot.0,
            &self.nonce,
            &self.grant.window.to_le_bytes(),
            &self.grant.frame.to_le_bytes(),
            &self.grant.requests.to_le_bytes(),
            &self.grant.ranges.to_le_bytes(),
        ])
    }

    pub(crate) fn decode(bytes: &[u8; CHALLENGE_BYTES]) -> Result<Self, Malformed> {
        let mut fields = Fields(bytes);
        fields.expect(MAGIC)?;
        let version = fields.u16()?;
        fields.expect([0; 2])?;
        let flags = fields.u32()?;
        let (boot, nonce) = (Token(fields.array()?), fields.array()?);
        let grant = Grant {
            window: fields.u64()?,
            frame: fields.u32()?,
            requests: fields.u32()?,
            ranges: fields.u32()?,
        };
        fields.expect([0; 12])?;
        if version != 0 && (grant.window == 0 || grant.requests == 0 || grant.ranges == 0) {
            return Err(Malformed("a grant of nothing"));
        }
        Ok(Self { version, flags, boot, nonce, grant })
    }
}

/// A server's verdict on a client's proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ready {
    /// 0: welcome.
    pub(crate) status: u32,
    pub(crate) proof: [u8; 32],
}

impl Ready {
    pub(crate) fn encode(&self) -> [u8; READY_BYTES] {
        fixed(&[&self.status.to_le_bytes(), &[0; 4], &self.proof])
    }

    pub(crate) fn decode(bytes: &[u8; READY_BYTES]) -> Result<Self, Malformed> {
        let mut fields = Fields(bytes);
        let status = fields.u32()?;
        fields.expect([0; 4])?;
        Ok(Self { status, proof: fields.array()? })
    }
}

/// What a request wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestKind {
    Read = 1,
    Write = 2,
    Call = 3,
}

/// Head of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestHead {
    pub(crate) kind: RequestKind,
    pub(crate) id: u64,
    pub(crate) body: u32,
    pub(crate) payload: u64,
}

impl RequestHead {
    pub(crate) fn encode(&self) -> [u8; HEAD_BYTES] {
        fixed(&[
            &REQUEST,
            &[self.kind as u8],
            &[0; 3],
            &self.id.to_le_bytes(),
            &self.body.to_le_bytes(),
            &[0; 4],
            &self.payload.to_le_bytes(),
        ])
    }

    pub(crate) fn decode(bytes: &[u8; HEAD_BYTES], grant: &Grant) -> Result<Self, Malformed> {
        let mut fields = Fields(bytes);
        fields.expect(REQUEST)?;
        let kind = match fields.array()? {
            [1] => RequestKind::Read,
            [2] => RequestKind::Write,
            [3] => RequestKind::Call,
            _ => return Err(Malformed("a request of an unknown kind")),
        };
        fields.expect([0; 3])?;
        let (id, body) = (fields.u64()?, fields.u32()?);
        fields.expect([0; 4])?;
        let payload = fields.u64()?;
        if body > grant.frame {
            return Err(Malformed("a request's body is longer than granted"));
        }
        if payload > grant.window || (kind == RequestKind::Call && payload != 0) {
            return Err(Malformed("a request for more bytes than granted"));
        }
        Ok(Self { kind, id, body, payload })
    }
}

/// How a request was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReplyHead {
    /// 0: good; else a [`RefusalKind`](crate::tcp::RefusalKind).
    pub(crate) status: u32,
    pub(crate) id: u64,
    pub(crate) payload: u64,
}

impl ReplyHead {
    pub(crate) fn encode(&self) -> [u8; HEAD_BYTES] {
        fixed(&[
            &REPLY,
            &self.status.to_le_bytes(),
            &self.id.to_le_bytes(),
            &self.payload.to_le_bytes(),
        ])
    }

    pub(crate) fn decode(bytes: &[u8; HEAD_BYTES]) -> Result<Self, Malformed> {
        let mut fields = Fields(bytes);
        fields.expect(REPLY)?;
        let (status, id, payload) = (fields.u32()?, fields.u64()?, fields.u64()?);
        fields.expect([0; 8])?;
        Ok(Self { status, id, payload })
    }
}

/// How things stand after the last byte of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Trailer {
    pub(crate) status: u32,
    pub(crate) id: u64,
}

impl Trailer {
    pub(crate) fn encode(&self) -> [u8; TRAILER_BYTES] {
        fixed(&[&TRAILER, &self.status.to_le_bytes(), &self.id.to_le_bytes()])
    }

    pub(crate) fn decode(bytes: &[u8; TRAILER_BYTES]) -> Result<Self, Malformed> {
        let mut fields = Fields(bytes);
        fields.expect(TRAILER)?;
        Ok(Self { status: fields.u32()?, id: fields.u64()? })
    }
}

/// Ranges of one descriptor, in a request's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Section<'a> {
    pub(crate) descriptor: &'a [u8],
    ranges: &'a [u8],
}

impl Section<'_> {
    pub(crate) fn ranges(&self) -> impl Iterator<Item = PeerRange> {
        let (ranges, _) = self.ranges.as_chunks::<RANGE_BYTES>();
        ranges.iter().map(|[a, b, c, d, e, f, g, h, len @ ..]| PeerRange {
            offset: u64::from_le_bytes([*a, *b, *c, *d, *e, *f, *g, *h]),
            len: u32::from_le_bytes(*len),
        })
    }
}

/// Builds a request's body.
#[derive(Debug, Default)]
pub(crate) struct Body {
    bytes: Vec<u8>,
    /// Where the current section's number of ranges stands, and the number.
    count: Option<(usize, u32)>,
}

impl Body {
    /// A body behind room for the head.
    pub(crate) fn new(ranges: usize) -> Self {
        let mut bytes = Vec::with_capacity(HEAD_BYTES + 64 + ranges * RANGE_BYTES);
        bytes.resize(HEAD_BYTES, 0);
        Self { bytes, count: None }
    }

    /// Begins a section; descriptors are at most [`DESCRIPTOR_BYTES`] long.
    pub(crate) fn section(&mut self, descriptor: &[u8]) {
        self.end_section();
        let descriptor = descriptor.get(..DESCRIPTOR_BYTES).unwrap_or(descriptor);
        let len = u16::try_from(descriptor.len()).unwrap_or(0);
        self.bytes.extend_from_slice(&len.to_le_bytes());
        self.bytes.extend_from_slice(&[0; 2]);
        self.count = Some((self.bytes.len(), 0));
        self.bytes.extend_from_slice(&[0; 4]);
        self.bytes.extend_from_slice(descriptor);
    }

    pub(crate) fn range(&mut self, range: PeerRange) {
        let mut bytes = [0; RANGE_BYTES];
        let (offset, len) = bytes.split_at_mut(8);
        offset.copy_from_slice(&range.offset.to_le_bytes());
        len.copy_from_slice(&range.len.to_le_bytes());
        self.bytes.extend_from_slice(&bytes);
        if let Some((_, count)) = &mut self.count {
            *count += 1;
        }
    }

    /// The frame, with room for the head at its front.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.end_section();
        self.bytes
    }

    fn end_section(&mut self) {
        if let Some((at, count)) = self.count.take()
            && let Some(place) = self.bytes.get_mut(at..at + 4)
        {
            place.copy_from_slice(&count.to_le_bytes());
        }
    }

    /// Bytes that a section of `ranges` ranges takes.
    pub(crate) fn section_bytes(descriptor: usize, ranges: usize) -> usize {
        SECTION_BYTES + descriptor + ranges * RANGE_BYTES
    }
}

/// Checks a whole body: sections, lengths, and that the ranges add up to `payload`.
pub(crate) fn sections<'a>(
    body: &'a [u8],
    payload: u64,
    grant: &Grant,
) -> Result<Vec<Section<'a>>, Malformed> {
    let mut fields = Fields(body);
    let mut all = Vec::new();
    let (mut ranges_left, mut bytes) = (grant.ranges, 0_u64);
    while !fields.0.is_empty() {
        let descriptor = usize::from(fields.u16()?);
        fields.expect([0; 2])?;
        let count = fields.u32()?;
        if descriptor > DESCRIPTOR_BYTES || count == 0 {
            return Err(Malformed("a section without ranges, or with too long a descriptor"));
        }
        ranges_left =
            ranges_left.checked_sub(count).ok_or(Malformed("more ranges than granted"))?;
        let descriptor = fields.bytes(descriptor)?;
        let length = usize::try_from(count).ok().and_then(|n| n.checked_mul(RANGE_BYTES));
        let ranges = fields.bytes(length.ok_or(Malformed("more ranges than memory"))?)?;
        let section = Section { descriptor, ranges };
        for PeerRange { offset, len } in section.ranges() {
            if len == 0 || offset.checked_add(u64::from(len)).is_none() {
                return Err(Malformed("a range of no bytes, or beyond 64 bits"));
            }
            // At most 2³² ranges of less than 2³² bytes.
            bytes += u64::from(len);
        }
        all.push(section);
    }
    if bytes != payload || all.is_empty() {
        return Err(Malformed("the ranges do not add up to the payload"));
    }
    Ok(all)
}

#[cfg(test)]
mod tests;
