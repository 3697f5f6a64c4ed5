//! The tcp engine against its real server, over loopback: the suite of all engines, and what only
//! this engine has to keep.

mod hostile;
mod kit;
mod lanes;
mod late;
mod serving;
mod suite;
#[cfg(feature = "tls")]
mod tls;
