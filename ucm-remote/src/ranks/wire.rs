//! What ranks and their agent say to each other, one message a frame; numbers little-endian.
//!
//! | kind | from | body |
//! |---|---|---|
//! | 1 hello | rank | magic `UCMRANK2` (8), 1 if it wants the memory (1) |
//! | 2 welcome | agent | magic (8), token of this run of the agent (16), 1 and its boot token if it serves others, else 17 zeros (17), segments (4), per medium and arena: length (4) and geometry; then the descriptors |
//! | 3 get | rank | ns left (8), 0 (1), keys (4), per key: key (48), length (8); then *ranges* |
//! | 4 get again | rank | ns left (8), *ranges* of the keys of the last get on this connection |
//! | 5 done | rank | pins (8 each) |
//! | 6 put | rank | ns left (8), key (48), length (8) |
//! | 7 commit | rank | ns left (8) |
//! | 8 give up | rank | – |
//! | 9 exists, 10 remove, 11 touch | rank | ns left (8), keys (4), keys (48 each) |
//! | 32 ready | agent | key (4), outcome (1), last (1), pin (8), *pages*, parts (4), per part: range (4), place (8) |
//! | 33 ended | agent | key (4), outcome (1) |
//! | 34 over | agent | – |
//! | 35 place | agent | outcome (1), *pages* if it is `Created` |
//! | 36 outcome | agent | outcome (1) |
//! | 37 lengths | agent | per key: outcome (1), length (8) (`Local`: there, `Miss`: not) |
//! | 38 removed | agent | per key: outcome (1) |
//!
//! *ranges*: 1 if all keys have the same, else 0 (1); per key (or once): will read all (1), ranges (4), per
//! range: offset (8), length (8). *pages*: object length (8), page bytes (8), runs (4), per run: segment (4),
//! offset (8), pages that follow each other (4).
//!
//! **Invariant:** decoding allocates nothing beyond a small multiple of the bytes given, and never panics.

use std::time::{Duration, Instant};

use super::socket::frame;
use crate::{
    ByteRange, GetOutcome, ObjectKey, PageList, Token,
    agent::Want,
    host_medium::segment,
    service::wire::{Fields, Malformed, get_outcome, put_key},
};

pub(super) const MAGIC: [u8; 8] = *b"UCMRANK2";

pub(super) const HELLO: u8 = 1;
pub(super) const WELCOME: u8 = 2;
pub(super) const GET: u8 = 3;
pub(super) const GET_AGAIN: u8 = 4;
pub(super) const DONE: u8 = 5;
pub(super) const PUT: u8 = 6;
pub(super) const COMMIT: u8 = 7;
pub(super) const GIVE_UP: u8 = 8;
pub(super) const EXISTS: u8 = 9;
pub(super) const REMOVE: u8 = 10;
pub(super) const TOUCH: u8 = 11;
pub(super) const READY: u8 = 32;
pub(super) const ENDED: u8 = 33;
pub(super) const OVER: u8 = 34;
pub(super) const PLACE: u8 = 35;
pub(super) const OUTCOME: u8 = 36;
pub(super) const LENGTHS: u8 = 37;
pub(super) const REMOVED: u8 = 38;

/// Keys of one message.
const MAX_KEYS: u32 = 1 << 20;
/// Ranges of one message, also when they are told once for all keys.
const MAX_RANGES: usize = 1 << 24;

/// Time that is left, as the other side counts it from now.
pub(super) fn put_left(out: &mut Vec<u8>, deadline: Instant) {
    let left = deadline.saturating_duration_since(Instant::now());
    let ns = u64::try_from(left.as_nanos()).unwrap_or(u64::MAX);
    out.extend_from_slice(&ns.to_le_bytes());
}

pub(super) fn take_left(fields: &mut Fields<'_>) -> Result<Instant, Malformed> {
    // At most a day: it is added to a clock.
    let left = Duration::from_nanos(fields.u64()?).min(Duration::from_secs(86_400));
    Ok(Instant::now() + left)
}

fn put_u32(out: &mut Vec<u8>, number: usize) {
    out.extend_from_slice(&u32::try_from(number).unwrap_or(u32::MAX).to_le_bytes());
}

/// A get; without the keys when they are those of the last one.
pub(super) fn get(wants: &[Want], again: bool, deadline: Instant) -> Vec<u8> {
    let mut out = frame(if again { GET_AGAIN } else { GET });
    put_left(&mut out, deadline);
    if !again {
        out.push(0);
        put_u32(&mut out, wants.len());
        for want in wants {
            put_key(&mut out, &want.key);
            out.extend_from_slice(&want.len.to_le_bytes());
        }
    }
    let first = wants.first().map(|want| (&want.ranges, want.will_read_all));
    let same = wants.iter().all(|want| Some((&want.ranges, want.will_read_all)) == first);
    out.push(u8::from(same));
    for want in wants.iter().take(if same { 1 } else { wants.len() }) {
        out.push(u8::from(want.will_read_all));
        put_u32(&mut out, want.ranges.len());
        for range in &want.ranges {
            out.extend_from_slice(&range.offset.to_le_bytes());
            out.extend_from_slice(&range.len.to_le_bytes());
        }
    }
    out
}

/// The keys and lengths of a get, which stay for the next ones.
pub(super) fn take_keys(fields: &mut Fields<'_>) -> Result<Vec<(ObjectKey, u64)>, Malformed> {
    if fields.u8()? != 0 {
        return Err(Malformed("a get of an unknown kind"));
    }
    let count = fields.u32()?;
    if count > MAX_KEYS || u64::from(count) * 56 > fields.0.len() as u64 {
        return Err(Malformed("more keys than bytes"));
    }
    (0..count).map(|_| Ok((fields.key()?, fields.u64()?))).collect()
}

pub(super) fn take_wants(
    fields: &mut Fields<'_>,
    keys: &[(ObjectKey, u64)],
) -> Result<Vec<Want>, Malformed> {
    let same = fields.u8()? == 1;
    let mut wants: Vec<Want> = Vec::with_capacity(keys.len());
    for (key, len) in keys {
        let (ranges, will_read_all) = match wants.first() {
            Some(first) if same => {
                if first.ranges.len().saturating_mul(keys.len()) > MAX_RANGES {
                    return Err(Malformed("more ranges than 16,777,216"));
                }
                (first.ranges.clone(), first.will_read_all)
            }
            _ => take_ranges(fields)?,
        };
        wants.push(Want { key: *key, len: *len, ranges, will_read_all });
    }
    fields.end()?;
    Ok(wants)
}

fn take_ranges(fields: &mut Fields<'_>) -> Result<(Vec<ByteRange>, bool), Malformed> {
    let will_read_all = fields.u8()? == 1;
    let count = fields.u32()?;
    if u64::from(count) * 16 > fields.0.len() as u64 {
        return Err(Malformed("more ranges than bytes"));
    }
    let range = |_| Ok(ByteRange { offset: fields.u64()?, len: fields.u64()? });
    Ok(((0..count).map(range).collect::<Result<_, Malformed>>()?, will_read_all))
}

pub(super) fn put_pages(out: &mut Vec<u8>, list: &PageList) {
    out.extend_from_slice(&list.len.to_le_bytes());
    out.extend_from_slice(&list.page_bytes.to_le_bytes());
    let place = out.len();
    put_u32(out, 0);
    let (mut runs, mut rest) = (0_u32, list.pages.iter().copied().peekable());
    while let Some(first) = rest.next() {
        let mut count = 1_u32;
        let mut next = first.offset.checked_add(list.page_bytes);
        while rest.next_if(|p| p.region == first.region && Some(p.offset) == next).is_some() {
            count += 1;
            next = next.and_then(|at| at.checked_add(list.page_bytes));
        }
        out.extend_from_slice(&first.region.index.to_le_bytes());
        out.extend_from_slice(&first.offset.to_le_bytes());
        out.extend_from_slice(&count.to_le_bytes());
        runs += 1;
    }
    if let Some(place) = out.get_mut(place..place + 4) {
        place.copy_from_slice(&runs.to_le_bytes());
    }
}

pub(super) fn take_pages(fields: &mut Fields<'_>) -> Result<PageList, Malformed> {
    let (len, page_bytes, runs) = (fields.u64()?, fields.u64()?, fields.u32()?);
    if page_bytes == 0 {
        return Err(Malformed("pages of no bytes"));
    }
    // Every page of an object holds at least one of its bytes.
    let want = len.div_ceil(page_bytes);
    let mut list = PageList { pages: Vec::new(), page_bytes, len };
    for _ in 0..runs {
        let (index, mut offset, count) = (fields.u32()?, fields.u64()?, fields.u32()?);
        if list.pages.len() as u64 + u64::from(count) > want.min(u64::from(u32::MAX)) {
            return Err(Malformed("more pages than the object has"));
        }
        for _ in 0..count {
            list.pages.push(segment(index, offset));
            offset = offset.checked_add(page_bytes).ok_or(Malformed("a page beyond 64 bits"))?;
        }
    }
    if list.pages.len() as u64 == want { Ok(list) } else { Err(Malformed("too few pages")) }
}

/// A delivery, with the number of its pin instead of the pin.
#[derive(Debug)]
pub(super) struct Ready {
    pub(super) index: usize,
    pub(super) outcome: GetOutcome,
    pub(super) last: bool,
    pub(super) pin: u64,
    pub(super) pages: PageList,
    pub(super) parts: Vec<(usize, u64)>,
}

impl Ready {
    pub(super) fn encode(
        (index, outcome, last): (usize, GetOutcome, bool),
        pin: u64,
        pages: &PageList,
        parts: &[(usize, u64)],
    ) -> Vec<u8> {
        let mut out = frame(READY);
        put_u32(&mut out, index);
        out.extend_from_slice(&[outcome as u8, u8::from(last)]);
        out.extend_from_slice(&pin.to_le_bytes());
        put_pages(&mut out, pages);
        put_u32(&mut out, parts.len());
        for (range, at) in parts {
            put_u32(&mut out, *range);
            out.extend_from_slice(&at.to_le_bytes());
        }
        out
    }

    pub(super) fn decode(body: &[u8]) -> Result<Self, Malformed> {
        let mut fields = Fields(body);
        let index = take_index(&mut fields)?;
        let (outcome, last) = (get_outcome(fields.u8()?)?, fields.u8()? == 1);
        let (pin, pages) = (fields.u64()?, take_pages(&mut fields)?);
        let count = fields.u32()?;
        if u64::from(count) * 12 != fields.0.len() as u64 {
            return Err(Malformed("another length than the parts have"));
        }
        let part = |_| Ok((take_index(&mut fields)?, fields.u64()?));
        let parts = (0..count).map(part).collect::<Result<_, Malformed>>()?;
        Ok(Self { index, outcome, last, pin, pages, parts })
    }
}

pub(super) fn take_index(fields: &mut Fields<'_>) -> Result<usize, Malformed> {
    usize::try_from(fields.u32()?).map_err(|_| Malformed("a number beyond memory"))
}

pub(super) fn ended(index: usize, outcome: GetOutcome) -> Vec<u8> {
    let mut out = frame(ENDED);
    put_u32(&mut out, index);
    out.push(outcome as u8);
    out
}

/// A message about keys.
pub(super) fn keys(kind: u8, keys: &[ObjectKey], deadline: Instant) -> Vec<u8> {
    let mut out = frame(kind);
    put_left(&mut out, deadline);
    put_u32(&mut out, keys.len());
    keys.iter().for_each(|key| put_key(&mut out, key));
    out
}

pub(super) fn take_plain_keys(fields: &mut Fields<'_>) -> Result<Vec<ObjectKey>, Malformed> {
    let count = fields.u32()?;
    if u64::from(count) * 48 != fields.0.len() as u64 {
        return Err(Malformed("another length than the keys have"));
    }
    (0..count).map(|_| fields.key()).collect()
}

/// What an agent shows a rank first.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Welcome {
    /// Whose memory it is.
    pub(super) run: Token,
    pub(super) boot: Option<Token>,
    pub(super) segments: usize,
    /// Of the medium, and of the arena.
    pub(super) geometries: Vec<Vec<u8>>,
}

impl Welcome {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = frame(WELCOME);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&self.run.0);
        out.push(u8::from(self.boot.is_some()));
        out.extend_from_slice(&self.boot.unwrap_or(Token([0; 16])).0);
        put_u32(&mut out, self.segments);
        for geometry in &self.geometries {
            put_u32(&mut out, geometry.len());
            out.extend_from_slice(geometry);
        }
        out
    }

    pub(super) fn decode(body: &[u8]) -> Result<Self, Malformed> {
        let mut fields = Fields(body);
        if fields.array()? != MAGIC {
            return Err(Malformed("no agent of this version"));
        }
        let run = Token(fields.array()?);
        let (serves, token) = (fields.u8()? == 1, Token(fields.array()?));
        let segments = take_index(&mut fields)?;
        let mut geometries = Vec::new();
        while !fields.0.is_empty() {
            let len = take_index(&mut fields)?;
            geometries.push(fields.bytes(len)?.to_vec());
        }
        Ok(Self { run, boot: serves.then_some(token), segments, geometries })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn want() -> impl Strategy<Value = Want> {
        let range =
            (any::<u64>(), any::<u64>()).prop_map(|(offset, len)| ByteRange { offset, len });
        let ranges = prop::collection::vec(range, 0..5);
        (any::<[u8; 16]>(), any::<u64>(), ranges, any::<bool>()).prop_map(
            |(block, len, ranges, will_read_all)| {
                let key = ObjectKey { block, identity: [7; 32] };
                Want { key, len, ranges, will_read_all }
            },
        )
    }

    proptest! {
        #[test]
        fn gets_come_back_as_they_went(mut wants in prop::collection::vec(want(), 0..6), same: bool) {
            if same && let Some(first) = wants.first().cloned() {
                for want in &mut wants {
                    want.ranges.clone_from(&first.ranges);
                    want.will_read_all = first.will_read_all;
                }
            }
            let begun = Instant::now();
            let deadline = begun + Duration::from_secs(5);
            let bytes = get(&wants, false, deadline);
            prop_assert_eq!(bytes[4], GET);
            let mut fields = Fields(&bytes[5..]);
            // What is left is counted from when it is read.
            let taken = take_left(&mut fields).unwrap();
            prop_assert!(taken <= deadline + begun.elapsed());
            prop_assert!(taken + Duration::from_millis(1) >= deadline);
            let keys = take_keys(&mut fields).unwrap();
            prop_assert_eq!(&take_wants(&mut fields, &keys).unwrap(), &wants);
            let bytes = get(&wants, true, deadline);
            let mut fields = Fields(&bytes[13..]);
            prop_assert_eq!(&take_wants(&mut fields, &keys).unwrap(), &wants);
        }

        #[test]
        fn pages_come_back_as_they_went(
            pages in prop::collection::vec((0_u32..3, 0_u64..20), 1..40), short in 0_u64..10,
        ) {
            let pages = pages.into_iter().map(|(index, at)| segment(index, at * 10)).collect::<Vec<_>>();
            let list = PageList { len: pages.len() as u64 * 10 - short, page_bytes: 10, pages };
            let mut bytes = Vec::new();
            put_pages(&mut bytes, &list);
            prop_assert_eq!(take_pages(&mut Fields(&bytes)), Ok(list));
            for end in 0..bytes.len() {
                prop_assert!(take_pages(&mut Fields(&bytes[..end])).is_err());
            }
        }

        #[test]
        fn no_bytes_are_too_much(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Ready::decode(&bytes);
            let _ = Welcome::decode(&bytes);
            let _ = take_keys(&mut Fields(&bytes));
            let _ = take_wants(&mut Fields(&bytes), &[(ObjectKey { block: [0; 16], identity: [0; 32] }, 1)]);
            let _ = take_pages(&mut Fields(&bytes));
            let _ = take_plain_keys(&mut Fields(&bytes));
        }
    }
}
