//! All decoders of the wire format behind one function, for the fuzzer.
//!
//! **Invariant:** what was understood is written again as the same bytes.

use super::wire::{
    Body, CHALLENGE_BYTES, Challenge, Grant, HEAD_BYTES, HELLO_BYTES, Hello, READY_BYTES, Ready,
    ReplyHead, RequestHead, TRAILER_BYTES, Trailer, sections,
};

const GRANT: Grant = Grant { window: 1 << 30, frame: 1 << 20, requests: 16, ranges: 1 << 12 };

/// Takes bytes as each of the messages; the number of those that they are. Panics when one of them
/// is not written as it was read.
pub fn tcp_frames(bytes: &[u8]) -> usize {
    let mut understood = 0;
    let mut same = |again: Option<Vec<u8>>| {
        if let Some(again) = again {
            understood += 1;
            assert_eq!(bytes.get(..again.len()), Some(again.as_slice()));
        }
    };
    same(
        bytes
            .first_chunk::<HELLO_BYTES>()
            .and_then(|b| Hello::decode(b).ok())
            .map(|m| m.encode().to_vec()),
    );
    same(
        bytes
            .first_chunk::<CHALLENGE_BYTES>()
            .and_then(|b| Challenge::decode(b).ok())
            .map(|m| m.encode().to_vec()),
    );
    same(
        bytes
            .first_chunk::<READY_BYTES>()
            .and_then(|b| Ready::decode(b).ok())
            .map(|m| m.encode().to_vec()),
    );
    same(
        bytes
            .first_chunk::<HEAD_BYTES>()
            .and_then(|b| ReplyHead::decode(b).ok())
            .map(|m| m.encode().to_vec()),
    );
    same(
        bytes
            .first_chunk::<TRAILER_BYTES>()
            .and_then(|b| Trailer::decode(b).ok())
            .map(|m| m.encode().to_vec()),
    );
    let request = bytes.split_first_chunk::<HEAD_BYTES>();
    let head = request.and_then(|(head, _)| RequestHead::decode(head, &GRANT).ok());
    same(head.map(|m| m.encode().to_vec()));
    // The rest as a body, with the payload it says it has.
    let body = request.map_or(bytes, |(_, body)| body);
    let payload = head.map_or(0, |head| head.payload);
    if let Ok(all) = sections(body, payload, &GRANT) {
        understood += 1;
        let mut again = Body::new(0);
        for section in &all {
            again.section(section.descriptor);
            section.ranges().for_each(|range| again.range(range));
        }
        assert_eq!(again.finish().split_off(HEAD_BYTES), body);
    }
    understood
}
