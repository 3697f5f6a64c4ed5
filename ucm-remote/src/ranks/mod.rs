//! Ranks in processes of their own: a unix socket to the node's agent, and its memory mapped.
//!
//! **Invariant:** bytes never take the way of the socket; a rank's end of a connection is open for as long
//! as the rank copies from what was delivered on it.

mod rank;
mod server;
mod socket;
mod wire;

pub(crate) use self::{rank::Rank, server::RankServer};
