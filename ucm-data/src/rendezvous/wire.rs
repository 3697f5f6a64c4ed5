//! Messages between members, one per SEQPACKET datagram.
//!
//! Every message starts with the magic `ucmR` and one kind byte; numbers are little-endian; texts
//! are a u16 length and UTF-8. Requests for the offer are pulled by the joiner piece by piece, so
//! that an answering member never waits and keeps no state for it.
//!
//! **Invariant:** decoding any bytes ends in a message or an error, never a panic, and every length
//! in a decoded message is within its bound.

use crate::DataError;
use crate::rendezvous::config::{
    LayoutTag, MAX_FDS, MAX_META_BYTES, MAX_SEATS, MAX_TEXT_BYTES, Token,
};

/// Version of these messages.
pub(crate) const WIRE_VERSION: u16 = 3;
/// Bytes of `meta` in one message.
pub(crate) const META_CHUNK_BYTES: usize = 16 * 1024;
/// Descriptors in one message (the kernel allows 253).
pub(crate) const FDS_PER_MESSAGE: usize = 200;
/// Longer datagrams are refused.
pub(crate) const MAX_MESSAGE_BYTES: usize = 32 * 1024;

const MAGIC: [u8; 4] = *b"ucmR";

/// Why a member refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Other user.
    Credentials = 1,
    /// Other layout; the message has the member's tag.
    Layout = 2,
    /// Other version of these messages.
    Wire = 3,
    /// The member is at its limit of descriptors.
    DescriptorLimit = 4,
    /// Too many others are in the middle of joining.
    Crowded = 5,
}

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// Joiner: may I?
    Hello { wire_min: u16, wire_max: u16, layout: LayoutTag },
    /// Member: yes; this is me, these are the others, this is the size of the offer.
    Welcome {
        seat: u16,
        incarnation: Token,
        boot: Token,
        peers: Vec<(u16, Token)>,
        meta: u32,
        fds: u32,
    },
    /// Member: no.
    Refuse { why: Refusal, layout: LayoutTag },
    /// Joiner: send `meta` from this offset.
    WantMeta { offset: u32 },
    /// Member: here.
    Meta { offset: u32, bytes: Vec<u8> },
    /// Joiner: send descriptors from this index.
    WantFds { first: u32 },
    /// Member: here, in the control message.
    Fds { first: u32, count: u16 },
    /// Joiner: I sit here now.
    Seated { seat: u16, incarnation: Token },
    /// I leave; the connection ends without a death.
    Bye,
    /// Joiner: nobody listens where you say that somebody sits; pass me hold of its process.
    WantLife { seat: u16 },
    /// Member: here, as a descriptor; without one, its stay is over. `talks`: it and I are connected.
    Life { seat: u16, incarnation: Token, talks: bool },
    /// Member to member: a joiner does not find you; is your name gone?
    Unfound,
}

impl Message {
    /// The greeting of somebody with this layout.
    pub(crate) fn hello(layout: &LayoutTag) -> Self {
        Self::Hello { wire_min: WIRE_VERSION, wire_max: WIRE_VERSION, layout: layout.clone() }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Writer(MAGIC.to_vec());
        match self {
            Self::Hello { wire_min, wire_max, layout } => {
                out.u8(1);
                out.u16(*wire_min);
                out.u16(*wire_max);
                out.layout(layout);
            }
            Self::Welcome { seat, incarnation, boot, peers, meta, fds } => {
                out.u8(2);
                out.u16(*seat);
                out.token(*incarnation);
                out.token(*boot);
                out.u32(*meta);
                out.u32(*fds);
                out.u16(u16::try_from(peers.len()).unwrap_or(u16::MAX));
                for (seat, incarnation) in peers {
                    out.u16(*seat);
                    out.token(*incarnation);
                }
            }
            Self::Refuse { why, layout } => {
                out.u8(3);
                out.u8(*why as u8);
                out.layout(layout);
            }
            Self::WantMeta { offset } => {
                out.u8(4);
                out.u32(*offset);
            }
            Self::Meta { offset, bytes } => {
                out.u8(5);
                out.u32(*offset);
                out.0.extend_from_slice(bytes);
            }
            Self::WantFds { first } => {
                out.u8(6);
                out.u32(*first);
            }
            Self::Fds { first, count } => {
                out.u8(7);
                out.u32(*first);
                out.u16(*count);
            }
            Self::Seated { seat, incarnation } => {
                out.u8(8);
                out.u16(*seat);
                out.token(*incarnation);
            }
            Self::Bye => out.u8(9),
            Self::WantLife { seat } => {
                out.u8(10);
                out.u16(*seat);
            }
            Self::Life { seat, incarnation, talks } => {
                out.u8(11);
                out.u16(*seat);
                out.token(*incarnation);
                out.u8(u8::from(*talks));
            }
            Self::Unfound => out.u8(12),
        }
        out.0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, DataError> {
        let mut input = Reader(bytes);
        if input.array::<4>()? != MAGIC {
            return Err(DataError::corrupt("rendezvous message: wrong magic"));
        }
        let message = match input.u8()? {
            1 => Self::Hello {
                wire_min: input.u16()?,
                wire_max: input.u16()?,
                layout: input.layout()?,
            },
            2 => {
                let seat = input.seat()?;
                let incarnation = input.token()?;
                let boot = input.token()?;
                let meta = input.bounded(MAX_META_BYTES)?;
                let fds = input.bounded(MAX_FDS)?;
                let count = input.u16()?;
                if count > MAX_SEATS {
                    return Err(DataError::corrupt(format!("{count} peers in a welcome")));
                }
                let mut peers = Vec::with_capacity(usize::from(count));
                for _ in 0..count {
                    peers.push((input.seat()?, input.token()?));
                }
                Self::Welcome { seat, incarnation, boot, peers, meta, fds }
            }
            3 => Self::Refuse { why: input.refusal()?, layout: input.layout()? },
            4 => Self::WantMeta { offset: input.bounded(MAX_META_BYTES)? },
            5 => {
                let offset = input.bounded(MAX_META_BYTES)?;
                let bytes = std::mem::take(&mut input.0).to_vec();
                if bytes.len() > META_CHUNK_BYTES {
                    return Err(DataError::corrupt(format!("{} bytes of meta", bytes.len())));
                }
                Self::Meta { offset, bytes }
            }
            6 => Self::WantFds { first: input.bounded(MAX_FDS)? },
            7 => {
                let first = input.bounded(MAX_FDS)?;
                let count = input.u16()?;
                if usize::from(count) > FDS_PER_MESSAGE {
                    return Err(DataError::corrupt(format!("{count} descriptors in a message")));
                }
                Self::Fds { first, count }
            }
            8 => Self::Seated { seat: input.seat()?, incarnation: input.token()? },
            9 => Self::Bye,
            10 => Self::WantLife { seat: input.seat()? },
            11 => Self::Life {
                seat: input.seat()?,
                incarnation: input.token()?,
                talks: input.flag()?,
            },
            12 => Self::Unfound,
            kind => {
                return Err(DataError::corrupt(format!(
                    "rendezvous message of unknown kind {kind}"
                )));
            }
        };
        if input.0.is_empty() {
            Ok(message)
        } else {
            Err(DataError::corrupt(format!("{} bytes after a rendezvous message", input.0.len())))
        }
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    fn u16(&mut self, value: u16) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn token(&mut self, token: Token) {
        self.0.extend_from_slice(&token.0);
    }

    fn layout(&mut self, layout: &LayoutTag) {
        self.u32(layout.protocol);
        self.u32(layout.layout_version);
        self.0.extend_from_slice(&layout.fingerprint);
        self.u16(u16::try_from(layout.text.len()).unwrap_or(u16::MAX));
        self.0.extend_from_slice(layout.text.as_bytes());
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], DataError> {
        let (head, rest) = self
            .0
            .split_first_chunk::<N>()
            .ok_or_else(|| DataError::corrupt("rendezvous message ends too early"))?;
        self.0 = rest;
        Ok(*head)
    }

    fn u8(&mut self) -> Result<u8, DataError> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Result<u16, DataError> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, DataError> {
        self.array().map(u32::from_le_bytes)
    }

    fn token(&mut self) -> Result<Token, DataError> {
        self.array().map(Token)
    }

    fn seat(&mut self) -> Result<u16, DataError> {
        let seat = self.u16()?;
        if seat < MAX_SEATS {
            Ok(seat)
        } else {
            Err(DataError::corrupt(format!("seat {seat} in a rendezvous message")))
        }
    }

    fn bounded(&mut self, most: usize) -> Result<u32, DataError> {
        let value = self.u32()?;
        if value as usize <= most {
            Ok(value)
        } else {
            Err(DataError::corrupt(format!("{value} in a rendezvous message, at most {most}")))
        }
    }

    fn flag(&mut self) -> Result<bool, DataError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            flag => Err(DataError::corrupt(format!("flag {flag} in a rendezvous message"))),
        }
    }

    fn refusal(&mut self) -> Result<Refusal, DataError> {
        match self.u8()? {
            1 => Ok(Refusal::Credentials),
            2 => Ok(Refusal::Layout),
            3 => Ok(Refusal::Wire),
            4 => Ok(Refusal::DescriptorLimit),
            5 => Ok(Refusal::Crowded),
            why => Err(DataError::corrupt(format!("unknown refusal {why}"))),
        }
    }

    fn layout(&mut self) -> Result<LayoutTag, DataError> {
        let protocol = self.u32()?;
        let layout_version = self.u32()?;
        let fingerprint = self.array()?;
        let len = usize::from(self.u16()?);
        if len > MAX_TEXT_BYTES {
            return Err(DataError::corrupt(format!("layout text of {len} bytes")));
        }
        let (text, rest) = self
            .0
            .split_at_checked(len)
            .ok_or_else(|| DataError::corrupt("rendezvous message ends too early"))?;
        self.0 = rest;
        // What replaces wrong bytes is longer than they were.
        let mut text = String::from_utf8_lossy(text).into_owned();
        while text.len() > MAX_TEXT_BYTES {
            text.pop();
        }
        Ok(LayoutTag { protocol, layout_version, fingerprint, text })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_token() -> impl Strategy<Value = Token> {
        any::<[u8; 16]>().prop_map(Token)
    }

    fn any_layout() -> impl Strategy<Value = LayoutTag> {
        (any::<u32>(), any::<u32>(), any::<[u8; 32]>(), "[a-zß 0-9]{0,200}").prop_map(
            |(protocol, layout_version, fingerprint, text)| LayoutTag {
                protocol,
                layout_version,
                fingerprint,
                text,
            },
        )
    }

    fn any_message() -> impl Strategy<Value = Message> {
        let seat = 0..MAX_SEATS;
        let peers = prop::collection::vec((0..MAX_SEATS, any_token()), 0..128);
        prop_oneof![
            (any::<u16>(), any::<u16>(), any_layout()).prop_map(|(wire_min, wire_max, layout)| {
                Message::Hello { wire_min, wire_max, layout }
            }),
            (seat.clone(), any_token(), any_token(), peers, 0..1u32 << 24, 0..1u32 << 14).prop_map(
                |(seat, incarnation, boot, peers, meta, fds)| Message::Welcome {
                    seat,
                    incarnation,
                    boot,
                    peers,
                    meta,
                    fds
                }
            ),
            any_layout().prop_map(|layout| Message::Refuse { why: Refusal::Layout, layout }),
            (0..1u32 << 24).prop_map(|offset| Message::WantMeta { offset }),
            (0..1u32 << 24, prop::collection::vec(any::<u8>(), 0..META_CHUNK_BYTES))
                .prop_map(|(offset, bytes)| Message::Meta { offset, bytes }),
            (0..1u32 << 14).prop_map(|first| Message::WantFds { first }),
            (0..1u32 << 14, 0..200u16).prop_map(|(first, count)| Message::Fds { first, count }),
            (seat.clone(), any_token())
                .prop_map(|(seat, incarnation)| Message::Seated { seat, incarnation }),
            Just(Message::Bye),
            seat.clone().prop_map(|seat| Message::WantLife { seat }),
            (seat, any_token(), any::<bool>()).prop_map(|(seat, incarnation, talks)| {
                Message::Life { seat, incarnation, talks }
            }),
            Just(Message::Unfound),
        ]
    }

    proptest! {
        #[test]
        fn messages_come_back_equal_and_fit_a_datagram(message in any_message()) {
            let bytes = message.encode();
            prop_assert!(bytes.len() <= MAX_MESSAGE_BYTES);
            prop_assert_eq!(Message::decode(&bytes).unwrap(), message);
        }

        #[test]
        fn damaged_messages_never_panic_and_stay_in_bounds(
            message in any_message(), at in any::<prop::sample::Index>(), value in any::<u8>(),
            cut in any::<prop::sample::Index>()
        ) {
            let mut bytes = message.encode();
            let index = at.index(bytes.len());
            bytes[index] = value;
            bytes.truncate(cut.index(bytes.len()) + 1);
            if let Ok(Message::Welcome { seat, peers, fds, meta, .. }) = Message::decode(&bytes) {
                prop_assert!(seat < MAX_SEATS && peers.len() <= usize::from(MAX_SEATS));
                prop_assert!(fds as usize <= MAX_FDS && meta as usize <= MAX_META_BYTES);
            }
        }
    }

    /// What the fuzzer kept of messages and geometries.
    #[test]
    fn d11_the_corpus_of_the_fuzzer_is_harmless() {
        let corpus = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/wire");
        let mut understood = 0;
        for entry in std::fs::read_dir(&corpus).unwrap() {
            let bytes = std::fs::read(entry.unwrap().path()).unwrap();
            if let Ok(message) = Message::decode(&bytes) {
                assert_eq!(Message::decode(&message.encode()).unwrap(), message);
                understood += 1;
            }
            if let Ok(geometry) = crate::Geometry::decode(&bytes) {
                assert_eq!(crate::Geometry::decode(&geometry.encode()).unwrap(), geometry);
            }
        }
        assert!(understood > 0, "no message in {}", corpus.display());
    }

    /// Regression, found by the fuzzer: a text of wrong bytes grew beyond the limit when it was
    /// repaired, so that nobody understood what had been understood once.
    #[test]
    fn a_repaired_text_stays_within_its_limit() {
        let layout = LayoutTag {
            protocol: 1,
            layout_version: 1,
            fingerprint: [7; 32],
            text: "x".repeat(MAX_TEXT_BYTES),
        };
        let mut bytes = Message::Refuse { why: Refusal::Layout, layout }.encode();
        let text = bytes.len() - MAX_TEXT_BYTES;
        bytes[text..].fill(0xff);
        let Message::Refuse { layout, .. } = Message::decode(&bytes).unwrap() else { panic!() };
        assert!(layout.text.len() <= MAX_TEXT_BYTES && layout.text.len() > MAX_TEXT_BYTES - 3);
        let again = Message::Refuse { why: Refusal::Layout, layout };
        assert_eq!(Message::decode(&again.encode()).unwrap(), again);
    }

    #[test]
    fn every_truncation_of_a_fixed_message_is_refused() {
        let message = Message::Seated { seat: 3, incarnation: Token([7; 16]) };
        let bytes = message.encode();
        for len in 0..bytes.len() {
            assert!(Message::decode(&bytes[..len]).is_err(), "accepted {len} bytes");
        }
    }
}
