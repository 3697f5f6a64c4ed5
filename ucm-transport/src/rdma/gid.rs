//! Which address of a port to use. No IO.
//!
//! **Invariant:** the choice depends on nothing but the table, and prefers what crosses routers.

/// Protocols that an Ethernet port speaks for an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum GidKind {
    /// RoCE v1, which stays in one Ethernet segment.
    RoceV1,
    /// The system does not say.
    Unknown,
    /// RoCE v2, over UDP.
    RoceV2,
}

impl GidKind {
    /// As the system writes it.
    pub(super) fn parse(text: &str) -> Self {
        match text.trim() {
            "RoCE v2" => Self::RoceV2,
            "IB/RoCE v1" => Self::RoceV1,
            _ => Self::Unknown,
        }
    }
}

/// The place of the best address of an Ethernet port: RoCE v2 before others; IPv4, then IPv6, then
/// link-local.
pub(super) fn best(table: &[(u8, [u8; 16], GidKind)]) -> Option<u8> {
    let rank = |gid: &[u8; 16]| match gid {
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, ..] => 2,
        [0xfe, 0x80, ..] => 0,
        _ => 1,
    };
    let real = table.iter().filter(|(_, gid, _)| *gid != [0; 16]);
    // The first of equals.
    let best = real.rev().max_by_key(|(_, gid, kind)| (*kind, rank(gid)));
    best.map(|(index, ..)| *index)
}

#[cfg(test)]
mod tests {
    use super::{GidKind::*, *};

    #[test]
    fn version_two_and_routable_addresses_come_first() {
        let v4 = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1];
        let mut local = [0; 16];
        (local[0], local[1], local[15]) = (0xfe, 0x80, 1);
        let mut v6 = [7; 16];
        v6[0] = 0x20;
        let table = [
            (0, local, RoceV1),
            (1, local, RoceV2),
            (2, v4, RoceV1),
            (3, v4, RoceV2),
            (4, v6, RoceV2),
            (5, v4, RoceV2),
            (6, [0; 16], RoceV2),
        ];
        assert_eq!(best(&table), Some(3));
        assert_eq!(best(&table[..3]), Some(1), "version 1 does not leave its segment");
        assert_eq!(best(&table[..1]), Some(0));
        assert_eq!(best(&[(0, [0; 16], RoceV2)]), None);
        assert_eq!(best(&[(0, local, Unknown), (1, v4, Unknown)]), Some(1));
        assert_eq!(GidKind::parse("RoCE v2\n"), RoceV2);
        assert_eq!(GidKind::parse("IB/RoCE v1\n"), RoceV1);
        assert_eq!(GidKind::parse(""), Unknown);
    }
}
