//! Settings of the remote pool.
//!
//! **Invariant:** nothing listens anywhere unless an address or a path was given.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Where objects are put.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[non_exhaustive]
pub enum PlacementKind {
    /// On this peer, then where most bytes are free.
    #[default]
    #[serde(rename = "local")]
    Local,
    /// Where most bytes are free.
    #[serde(rename = "free")]
    Free,
    /// By the key.
    #[serde(rename = "hash")]
    Hash,
}

/// The remote pool.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct RemoteConfig {
    /// Name of this peer, different on every node. Empty: the machine's name.
    pub name: String,
    /// Address and port at which other nodes are served; port 0 takes a free one. Empty: nobody is.
    pub listen: String,
    /// What other nodes are told instead of `listen`.
    pub advertise: String,
    /// The directory: "host:port" of a peer that serves one, or "redis://host:port" (feature `redis`).
    /// Empty: only this process's own.
    pub directory: String,
    /// Name space in Redis.
    pub directory_namespace: String,
    /// Address and port at which this peer serves a directory, which is then its own one, too.
    pub serve_directory: String,
    /// How long a silent peer stays in a served directory, in milliseconds.
    pub member_ttl_ms: u64,
    /// File with the secret that all peers know, at least 16 bytes.
    pub secret_file: PathBuf,
    /// Socket by which ranks of this node find the peer. A rank that is given it looks for what it misses
    /// in the pool.
    pub socket: PathBuf,
    /// Bytes of host memory for objects.
    pub bytes: u64,
    /// Bytes of a page: objects take whole ones.
    pub page_bytes: u64,
    /// Bytes for what finds no page.
    pub arena_bytes: u64,
    /// Peers on which an object is put, by `placement`; 0 keeps it on this one.
    pub copies: usize,
    /// Which peers: "local", "free" or "hash".
    pub placement: PlacementKind,
    /// Complete partly read objects in the background.
    pub prefetch: bool,
    /// Address and port at which metrics can be read by HTTP. Empty: nowhere.
    pub metrics: String,
}

impl Default for RemoteConfig {
    fn default() -> Self {
        Self {
            name: String::new(),
            listen: String::new(),
            advertise: String::new(),
            directory: String::new(),
            directory_namespace: "ucm".into(),
            serve_directory: String::new(),
            member_ttl_ms: 15_000,
            secret_file: PathBuf::new(),
            socket: PathBuf::new(),
            bytes: 1 << 30,
            page_bytes: 64 << 10,
            arena_bytes: 64 << 20,
            copies: 0,
            placement: PlacementKind::default(),
            prefetch: true,
            metrics: String::new(),
        }
    }
}
