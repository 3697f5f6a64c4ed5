//! Rendezvous: how the processes of one cache find each other, share descriptors and learn of each
//! other's end, with a directory for a name and no daemon.
//!
//! * Entering is exclusive (`flock` on the directory). Who enters connects to every seat's socket,
//!   takes the offer from the first member that answers, sits down at a free seat and tells all.
//! * Every member holds all descriptors and answers joiners, so any of them may die.
//! * Both ends of every connection hold a pidfd of the other process: a readable pidfd is the only
//!   proof of death. A `Bye` is a leave. A broken connection alone is neither.
//!
//! **Invariant:** at any time at most one life (boot token) of a cache can be joined; as long as one
//! member lives, nobody creates another.

mod config;
mod directory;
mod meet;
mod membership;
mod probe;
mod process;
mod roster;
mod socket;
mod steward;
mod watch;
mod wire;

pub use self::config::{LayoutTag, MAX_SEATS, Offer, RendezvousConfig, Sockets, Token, WhenAbsent};
pub use self::membership::{Admission, Admitted, Enter, Membership, Occupied, Rendezvous};
pub use self::steward::StewardHooks;
pub use self::watch::{Liveness, PeerInfo, PeerWatch, RendezvousStats};

/// For the fuzzer: a message, parsed and written again.
#[cfg(feature = "testing")]
pub(crate) fn reencode(bytes: &[u8]) -> Result<Vec<u8>, crate::DataError> {
    wire::Message::decode(bytes).map(|message| message.encode())
}
