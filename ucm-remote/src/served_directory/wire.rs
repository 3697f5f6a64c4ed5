//! What a directory that is served and its clients say to each other, byte by byte.
//!
//! All numbers little-endian. A text is its length (2) and UTF-8; a record is boot token (16), generation
//! (8), object length (8), tier (1), peer (text); a member is boot token (16), capacity and free bytes (8
//! each), peer (text), address (text).
//!
//! A call is a head of 20 bytes: magic `UCMD` (4), version (2), operation (2), items (4), the highest epoch
//! that the client has heard (8), then the items. A directory of a lower epoch does nothing.
//! An answer is the directory's epoch (8) and a status (1): 0, then one answer an item; 1 refused, 2 too
//! late, 3 unavailable, 4 nonsense, then a text.
//!
//! | operation | item asked | item answered |
//! |---|---|---|
//! | 1 epoch | – | – |
//! | 2 locate | key (48) | count (2), records |
//! | 3 announce | key (48), record | – |
//! | 4 withdraw | key (48), record | – |
//! | 5 register | member | – |
//! | 6 remove a peer | boot token (16), peer (text) | – |
//! | 7 members | – | count (4), members |
//! | 8 place | key (48), length (8) | count (2), peers (texts) |
//!
//! **Invariant:** decoding allocates nothing beyond the bytes that were given, and never panics.

use crate::{
    DirectoryError, Epoch, Generation, Member, PeerId, Record, Tier, Token,
    service::wire::{Fields, Malformed},
};

pub(super) const VERSION: u16 = 1;
/// Items of one call at most.
pub(super) const MAX_ITEMS: usize = 4096;
/// Bytes of a name or an address at most.
const MAX_TEXT: usize = 512;
const MAGIC: [u8; 4] = *b"UCMD";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op {
    Epoch = 1,
    Locate = 2,
    Announce = 3,
    Withdraw = 4,
    Register = 5,
    RemovePeer = 6,
    Members = 7,
    Place = 8,
}

/// Begins a call of `items` items.
pub(super) fn call(op: Op, items: usize, heard: Epoch) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&(op as u16).to_le_bytes());
    out.extend_from_slice(&u32::try_from(items).unwrap_or(u32::MAX).to_le_bytes());
    out.extend_from_slice(&heard.0.to_le_bytes());
    out
}

/// A call, without the bytes of its items.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) op: Op,
    pub(super) items: usize,
    pub(super) heard: Epoch,
}

/// The head of a call, and its items.
pub(super) fn parse_call(bytes: &[u8]) -> Result<(Head, Fields<'_>), Malformed> {
    let mut fields = Fields(bytes);
    if fields.array()? != MAGIC {
        return Err(Malformed("no call to a directory"));
    }
    if fields.u16()? != VERSION {
        return Err(Malformed("another version; this directory speaks version 1"));
    }
    let op = match fields.u16()? {
        1 => Op::Epoch,
        2 => Op::Locate,
        3 => Op::Announce,
        4 => Op::Withdraw,
        5 => Op::Register,
        6 => Op::RemovePeer,
        7 => Op::Members,
        8 => Op::Place,
        _ => return Err(Malformed("an operation that does not exist")),
    };
    let items = usize::try_from(fields.u32()?).unwrap_or(usize::MAX);
    if items > MAX_ITEMS {
        return Err(Malformed("more than 4096 items in a call"));
    }
    let heard = Epoch(fields.u64()?);
    Ok((Head { op, items, heard }, fields))
}

pub(super) fn put_text(out: &mut Vec<u8>, text: &str) {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let text = text.get(..end).unwrap_or_default();
    out.extend_from_slice(&u16::try_from(text.len()).unwrap_or(0).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

pub(super) fn text<'a>(fields: &mut Fields<'a>) -> Result<&'a str, Malformed> {
    let len = usize::from(fields.u16()?);
    if len > MAX_TEXT {
        return Err(Malformed("a text of more than 512 bytes"));
    }
    std::str::from_utf8(fields.bytes(len)?).map_err(|_| Malformed("a text that is not UTF-8"))
}

/// A name or an address that would be cut cannot be sent.
pub(super) fn fits(text: &str) -> Result<(), DirectoryError> {
    if text.len() <= MAX_TEXT {
        return Ok(());
    }
    let len = text.len();
    Err(DirectoryError::Refused(format!("a name of {len} bytes; at most {MAX_TEXT} can be told")))
}

pub(super) fn put_record(out: &mut Vec<u8>, record: &Record) {
    out.extend_from_slice(&record.boot.0);
    out.extend_from_slice(&record.generation.0.to_le_bytes());
    out.extend_from_slice(&record.len.to_le_bytes());
    out.push(match record.tier {
        Tier::Device => 0,
        Tier::Host => 1,
        Tier::Storage => 2,
    });
    put_text(out, record.peer.as_str());
}

pub(super) fn record(fields: &mut Fields<'_>) -> Result<Record, Malformed> {
    let boot = Token(fields.array()?);
    let (generation, len) = (Generation(fields.u64()?), fields.u64()?);
    let tier = match fields.u8()? {
        0 => Tier::Device,
        1 => Tier::Host,
        2 => Tier::Storage,
        _ => return Err(Malformed("a tier that does not exist")),
    };
    Ok(Record { peer: PeerId::new(text(fields)?), boot, generation, len, tier })
}

pub(super) fn put_member(out: &mut Vec<u8>, member: &Member) {
    out.extend_from_slice(&member.boot.0);
    out.extend_from_slice(&member.capacity_bytes.to_le_bytes());
    out.extend_from_slice(&member.free_bytes.to_le_bytes());
    put_text(out, member.peer.as_str());
    put_text(out, &member.address);
}

pub(super) fn member(fields: &mut Fields<'_>) -> Result<Member, Malformed> {
    let boot = Token(fields.array()?);
    let (capacity_bytes, free_bytes) = (fields.u64()?, fields.u64()?);
    let peer = PeerId::new(text(fields)?);
    let address = text(fields)?.to_owned();
    Ok(Member { peer, boot, address, capacity_bytes, free_bytes })
}

/// An answer without items yet.
pub(super) fn good(epoch: Epoch) -> Vec<u8> {
    let mut out = epoch.0.to_le_bytes().to_vec();
    out.push(0);
    out
}

pub(super) fn bad(epoch: Epoch, error: &DirectoryError) -> Vec<u8> {
    let mut out = epoch.0.to_le_bytes().to_vec();
    let (status, why) = match error {
        DirectoryError::Refused(why) => (1, why.as_str()),
        DirectoryError::Timeout => (2, ""),
        DirectoryError::Unavailable(why) => (3, why.as_str()),
        DirectoryError::Corrupt(why) => (4, why.as_str()),
    };
    out.push(status);
    put_text(&mut out, why);
    out
}

/// Epoch, and the items or what went wrong.
pub(super) fn parse_answer(
    bytes: &[u8],
) -> Result<(Epoch, Result<Fields<'_>, DirectoryError>), Malformed> {
    let mut fields = Fields(bytes);
    let epoch = Epoch(fields.u64()?);
    let answer = match fields.u8()? {
        0 => Ok(fields),
        1 => Err(DirectoryError::Refused(text(&mut fields)?.to_owned())),
        2 => Err(DirectoryError::Timeout),
        3 => Err(DirectoryError::Unavailable(text(&mut fields)?.to_owned())),
        4 => Err(DirectoryError::Corrupt(text(&mut fields)?.to_owned())),
        _ => return Err(Malformed("a status that does not exist")),
    };
    Ok((epoch, answer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_nothing_shorter() {
        let mut first = Record::new(PeerId::new("pëer"), Token([3; 16]), Generation(9), u64::MAX);
        for tier in [Tier::Device, Tier::Host, Tier::Storage] {
            first.tier = tier;
            let mut bytes = Vec::new();
            put_record(&mut bytes, &first);
            assert_eq!(record(&mut Fields(&bytes)), Ok(first.clone()));
            for end in 0..bytes.len() {
                assert!(record(&mut Fields(&bytes[..end])).is_err());
            }
        }
        let mut one = Member::new(PeerId::new("p"), Token([4; 16]), "host:1");
        (one.capacity_bytes, one.free_bytes) = (7, 5);
        let mut bytes = Vec::new();
        put_member(&mut bytes, &one);
        assert_eq!(member(&mut Fields(&bytes)), Ok(one));
        for end in 0..bytes.len() {
            assert!(member(&mut Fields(&bytes[..end])).is_err());
        }
        for bytes in [&[0xff; 40][..], &[1, 0, 0xff], &[3, 0, b'a', b'b']] {
            assert!(text(&mut Fields(bytes)).is_err());
        }
    }

    #[test]
    fn answers_and_calls_come_back_as_they_went() {
        let errors = [
            DirectoryError::Refused("why".into()),
            DirectoryError::Timeout,
            DirectoryError::Unavailable("x".into()),
            DirectoryError::Corrupt(String::new()),
        ];
        for error in errors {
            let bytes = bad(Epoch(5), &error);
            let (epoch, answer) = parse_answer(&bytes).unwrap();
            assert_eq!((epoch, answer.unwrap_err()), (Epoch(5), error));
        }
        assert!(parse_answer(&good(Epoch(6))).unwrap().1.unwrap().0.is_empty());
        let head = call(Op::Place, 3, Epoch(7));
        let parsed = Head { op: Op::Place, items: 3, heard: Epoch(7) };
        assert_eq!(parse_call(&head).map(|(head, _)| head), Ok(parsed));
        for (at, byte) in [(0, 0), (4, 9), (6, 99), (11, 1)] {
            let mut other = head.clone();
            other[at] = byte;
            assert!(parse_call(&other).is_err(), "byte {at}");
        }
        let long = "ü".repeat(MAX_TEXT);
        assert!(fits(&long).is_err() && fits("short").is_ok());
        let mut bytes = Vec::new();
        put_text(&mut bytes, &long[..MAX_TEXT - 2]);
        assert_eq!(text(&mut Fields(&bytes)).map(str::len), Ok(MAX_TEXT - 2));
    }
}
