//! Frames: what is written is read, and nothing else is.

use proptest::prelude::*;

use super::*;

const GRANT: Grant = Grant { window: 1 << 20, frame: 4096, requests: 8, ranges: 100 };

fn body(sections: &[(Vec<u8>, Vec<PeerRange>)]) -> (Vec<u8>, u64) {
    let mut body = Body::new(4);
    let mut payload = 0;
    for (descriptor, ranges) in sections {
        body.section(descriptor);
        for range in ranges {
            body.range(*range);
            payload += u64::from(range.len);
        }
    }
    (body.finish().split_off(HEAD_BYTES), payload)
}

proptest! {
    #[test]
    fn handshakes_are_read_as_written(
        versions: (u16, u16), flags: u32, boot: [u8; 16], nonce: [u8; 32],
        window in 1..u64::MAX, frame: u32, requests in 1..u32::MAX, ranges in 1..u32::MAX,
        version: u16, status: u32,
    ) {
        let hello = Hello { versions, flags, boot: Token(boot), nonce };
        prop_assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        let grant = Grant { window, frame, requests, ranges };
        let challenge = Challenge { version, flags, boot: Token(boot), nonce, grant };
        prop_assert_eq!(Challenge::decode(&challenge.encode()), Ok(challenge));
        let ready = Ready { status, proof: nonce };
        prop_assert_eq!(Ready::decode(&ready.encode()), Ok(ready));
    }

    #[test]
    fn bodies_are_read_as_written(
        sections in prop::collection::vec(
            (prop::collection::vec(any::<u8>(), 0..40),
             prop::collection::vec((0..1_u64 << 40, 1..5000_u32), 1..6)), 1..8),
    ) {
        let sections: Vec<(Vec<u8>, Vec<PeerRange>)> = sections.into_iter().map(|(d, r)| {
            (d, r.into_iter().map(|(offset, len)| PeerRange { offset, len }).collect())
        }).collect();
        let (bytes, payload) = body(&sections);
        let read = super::sections(&bytes, payload, &GRANT).unwrap();
        let read: Vec<(Vec<u8>, Vec<PeerRange>)> =
            read.iter().map(|s| (s.descriptor.to_vec(), s.ranges().collect())).collect();
        prop_assert_eq!(read, sections);
        prop_assert!(super::sections(&bytes, payload + 1, &GRANT).is_err());
        prop_assert!(super::sections(&bytes[..bytes.len() - 1], payload, &GRANT).is_err());
    }
}

#[test]
fn heads_keep_to_the_grant() {
    let head = RequestHead { kind: RequestKind::Read, id: 7, body: 4096, payload: 1 << 20 };
    assert_eq!(RequestHead::decode(&head.encode(), &GRANT), Ok(head));
    for bad in [
        RequestHead { body: 4097, ..head },
        RequestHead { payload: (1 << 20) + 1, ..head },
        RequestHead { kind: RequestKind::Call, ..head },
    ] {
        assert!(RequestHead::decode(&bad.encode(), &GRANT).is_err(), "{bad:?}");
    }
    for at in [0, 4, 5, 20] {
        let mut bytes = head.encode();
        bytes[at] = 9;
        assert!(RequestHead::decode(&bytes, &GRANT).is_err(), "byte {at}");
    }
    let reply = ReplyHead { status: 3, id: u64::MAX, payload: 12 };
    assert_eq!(ReplyHead::decode(&reply.encode()), Ok(reply));
    let trailer = Trailer { status: 1, id: 5 };
    assert_eq!(Trailer::decode(&trailer.encode()), Ok(trailer));
    assert!(Trailer::decode(&[0; TRAILER_BYTES]).is_err());
}

#[test]
fn ranges_are_bounded() {
    let range = PeerRange { offset: 0, len: 1 };
    let (bytes, payload) = body(&[(vec![1], vec![range; 100])]);
    assert!(sections(&bytes, payload, &GRANT).is_ok());
    let (bytes, payload) = body(&[(vec![1], vec![range; 99]), (vec![2], vec![range; 2])]);
    assert!(sections(&bytes, payload, &GRANT).is_err(), "101 ranges");
    for bad in [PeerRange { offset: 0, len: 0 }, PeerRange { offset: u64::MAX, len: 1 }] {
        let (bytes, payload) = body(&[(vec![], vec![bad])]);
        assert!(sections(&bytes, payload, &GRANT).is_err());
    }
    assert!(sections(&[], 0, &GRANT).is_err(), "no section");
    let mut many = body(&[(vec![], vec![range])]).0;
    many[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(sections(&many, 1, &Grant { ranges: u32::MAX, ..GRANT }).is_err(), "a lie");
}

/// Everything that the fuzzer kept, each of its beginnings, and each with one byte changed.
#[test]
fn the_corpus_of_the_fuzzer_is_harmless() {
    let corpus = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/tcp");
    let (mut inputs, mut understood) = (0, 0);
    for entry in std::fs::read_dir(&corpus).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        understood += crate::testing::tcp_frames(&bytes);
        inputs += 1;
        for at in 0..bytes.len() {
            crate::testing::tcp_frames(&bytes[..at]);
            let mut changed = bytes.clone();
            changed[at] ^= 0x81;
            crate::testing::tcp_frames(&changed);
        }
    }
    assert!(inputs > 10 && understood > 9, "{inputs} inputs in {}", corpus.display());
}
