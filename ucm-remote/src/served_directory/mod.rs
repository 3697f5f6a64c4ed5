//! A directory of one process, used by others: the small cluster's way, without a server of its own.
//!
//! **Invariant:** what crosses the wire is the [`Directory`](crate::Directory) trait, and nothing else.

mod client;
mod server;
mod wire;

pub use self::{client::DirectoryClient, server::DirectoryServer};
