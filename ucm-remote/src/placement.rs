//! Who should keep a new object.
//!
//! **Invariant:** only members that could ever hold the object are named, each once.

use std::{
    cmp::Reverse,
    fmt,
    hash::{DefaultHasher, Hash, Hasher},
};

use crate::{Member, ObjectKey, PeerId, Placement};

/// Chooses peers for a new object of `len` bytes, best first, at most `count`. Thread-safe.
pub trait PlacementStrategy: Send + Sync + fmt::Debug {
    /// See the trait.
    fn place(&self, key: &ObjectKey, len: u64, members: &[Member], count: usize) -> Placement;
}

fn able(members: &[Member], len: u64) -> Vec<&Member> {
    members.iter().filter(|member| member.capacity_bytes >= len).collect()
}

fn first(members: Vec<&Member>, count: usize) -> Placement {
    Placement(members.into_iter().take(count).map(|member| member.peer.clone()).collect())
}

/// Where most bytes are free.
#[derive(Clone, Copy, Debug, Default)]
pub struct MostFree;

impl PlacementStrategy for MostFree {
    fn place(&self, _: &ObjectKey, len: u64, members: &[Member], count: usize) -> Placement {
        let mut members = able(members, len);
        members.sort_by(|a, b| {
            (Reverse(a.free_bytes), &a.peer).cmp(&(Reverse(b.free_bytes), &b.peer))
        });
        first(members, count)
    }
}

/// By rendezvous hashing (Thaler and Ravishankar, 1996): each key has an order of peers of its own, and
/// a peer that comes or goes moves only the keys that are its own.
#[derive(Clone, Copy, Debug, Default)]
pub struct ByHash;

impl PlacementStrategy for ByHash {
    fn place(&self, key: &ObjectKey, len: u64, members: &[Member], count: usize) -> Placement {
        let hash = |what: &dyn Fn(&mut DefaultHasher)| {
            let mut hasher = DefaultHasher::new();
            what(&mut hasher);
            hasher.finish()
        };
        let of_key = hash(&|hasher| key.hash(hasher));
        // The best so far, best first: few are wanted of many.
        let mut best: Vec<(Reverse<u64>, &Member)> = Vec::new();
        for member in able(members, len) {
            let rank = Reverse(hash(&|hasher| (of_key, &member.peer).hash(hasher)));
            let at =
                best.partition_point(|(other, known)| (other, &known.peer) < (&rank, &member.peer));
            if at < count {
                best.truncate(count - 1);
                best.insert(at, (rank, member));
            }
        }
        first(best.into_iter().map(|(_, member)| member).collect(), count)
    }
}

/// On this peer if it can, then as another strategy says.
#[derive(Clone, Debug)]
pub struct LocalFirst<S> {
    /// This node's peer.
    pub me: PeerId,
    /// For the rest.
    pub then: S,
}

impl<S: PlacementStrategy> PlacementStrategy for LocalFirst<S> {
    fn place(&self, key: &ObjectKey, len: u64, members: &[Member], count: usize) -> Placement {
        let mine = able(members, len).iter().any(|member| member.peer == self.me);
        let mut peers: Vec<PeerId> = mine.then(|| self.me.clone()).into_iter().collect();
        let others = self.then.place(key, len, members, count.saturating_add(1));
        peers.extend(others.0.into_iter().filter(|peer| *peer != self.me));
        peers.truncate(count);
        Placement(peers)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use ucm_data::Token;

    use super::*;

    fn member(name: &str, capacity: u64, free: u64) -> Member {
        let mut member = Member::new(PeerId::new(name), Token([1; 16]), "nowhere");
        (member.capacity_bytes, member.free_bytes) = (capacity, free);
        member
    }

    fn key(number: u64) -> ObjectKey {
        let mut block = [0; 16];
        block[..8].copy_from_slice(&number.to_le_bytes());
        ObjectKey { block, identity: [0; 32] }
    }

    fn names(placement: &Placement) -> Vec<&str> {
        placement.0.iter().map(PeerId::as_str).collect()
    }

    #[test]
    fn most_free_first_and_never_where_it_cannot_fit() {
        let members = [member("a", 100, 10), member("b", 100, 90), member("c", 50, 50)];
        assert_eq!(names(&MostFree.place(&key(1), 50, &members, 9)), ["b", "c", "a"]);
        assert_eq!(names(&MostFree.place(&key(1), 51, &members, 1)), ["b"]);
        assert_eq!(names(&MostFree.place(&key(1), 101, &members, 9)), Vec::<&str>::new());
        let local = LocalFirst { me: PeerId::new("c"), then: MostFree };
        assert_eq!(names(&local.place(&key(1), 50, &members, 2)), ["c", "b"]);
        assert_eq!(names(&local.place(&key(1), 51, &members, 2)), ["b", "a"]);
        assert_eq!(names(&local.place(&key(1), 50, &members, 0)), Vec::<&str>::new());
    }

    #[test]
    fn a_peer_that_goes_moves_only_its_own_keys() {
        let mut members: Vec<Member> = (0..8).map(|i| member(&format!("p{i}"), 100, 100)).collect();
        let place =
            |members: &[Member], n| names(&ByHash.place(&key(n), 1, members, 1))[0].to_owned();
        let before: Vec<String> = (0..4000).map(|n| place(&members, n)).collect();
        let mut share = HashMap::new();
        before.iter().for_each(|name| *share.entry(name.clone()).or_insert(0) += 1);
        assert!(
            share.len() == 8 && share.values().all(|keys| (400..600).contains(keys)),
            "{share:?}"
        );
        members.retain(|member| member.peer.as_str() != "p3");
        for (n, old) in (0..).zip(&before) {
            let new = place(&members, n);
            assert!(new == *old || old == "p3", "{n}: {old} → {new}");
        }
    }
}
