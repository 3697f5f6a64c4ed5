//! The tcp engine: memory of peers anywhere, over framed and authenticated connections.
//!
//! [`TcpEngine`] is the client's side, a transfer engine; [`TcpServer`] is the side that owns memory
//! and asks a [`Serve`] where things lie. `docs/transport.md` has the wire format and says what
//! "ended" means here.
//!
//! **Invariant:** a destination is written only under the receive lock of the lane that its exchange
//! belongs to, by calls that do not block; an exchange that did not get its whole reply ends only
//! after its lane was marked dead under that lock.

mod auth;
pub(crate) mod bell;
mod breaker;
mod client;
#[cfg(feature = "rdma")]
mod control;
mod handshake;
mod inbuf;
mod server;
mod socket;
mod sys;
#[cfg(not(feature = "tls"))]
#[path = "no_tls.rs"]
mod tls;
#[cfg(feature = "tls")]
mod tls;
mod wire;

pub use auth::Secret;
#[cfg(feature = "rdma")]
pub(crate) use breaker::Breaker;
pub use client::{PeerState, TcpEngine, TcpEngineBuilder, TcpPeer, TcpStats};
#[cfg(feature = "rdma")]
pub(crate) use control::ControlLane;
pub use server::{
    Exports, Pieces, Refusal, RefusalKind, Request, Serve, Served, Session, TcpServer,
    TcpServerConfig, TcpServerStats,
};
#[cfg(feature = "tls")]
pub use tls::{TlsClient, TlsServer};
pub use wire::PeerRange;
#[cfg(feature = "rdma")]
pub(crate) use wire::{Fields, Malformed};

#[cfg(any(test, feature = "testing"))]
pub(crate) mod parse;

#[cfg(test)]
mod tests;
