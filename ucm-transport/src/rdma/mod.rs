//! The RDMA engine: memory of peers anywhere, read and written by the network adapter.
//!
//! [`RdmaEngine`] is the side that moves bytes, a transfer engine; [`RdmaOwner`] is the side whose
//! memory is reached, and whose processor does nothing meanwhile. They meet over an authenticated
//! control connection to a [`TcpServer`](crate::TcpServer), which also is the connection's life: when
//! it ends, both destroy their queue pairs. `docs/transport.md` has the messages, and says what
//! "ended" means here. The verbs library is loaded at run time.
//!
//! **Invariant:** a plan that did not complete well ends only after the queue pair that carried it was
//! destroyed: until then the adapter may write its destinations.

mod absent;
mod builder;
mod conn;
mod device;
mod dial;
mod ends;
mod engine;
mod gid;
mod inner;
mod owner;
mod peer;
mod pieces;
mod plan;
mod sys;
mod thread;
mod verbs;
mod wire;
mod work;

#[cfg(test)]
mod tests;

pub use absent::RdmaAbsent;
pub use builder::RdmaEngineBuilder;
pub use device::{RdmaChoice, RdmaDevice, RdmaInfo};
pub use engine::{RdmaEngine, RdmaPeer, RdmaStats};
pub use owner::{RdmaOwner, RdmaOwnerBuilder, RdmaOwnerStats};

use rustix::{
    io::Errno,
    rand::{GetRandomFlags, getrandom},
};

use self::{
    device::Opened,
    verbs::{QueuePair, Route},
    wire::Endpoint,
};
use crate::{ErrorKind, TransferError};

/// Bytes that nobody can guess.
fn random<const N: usize>() -> Result<[u8; N], TransferError> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        let (_, rest) = bytes.split_at_mut(filled);
        match getrandom(rest, GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(Errno::INTR) => {}
            Err(error) => {
                let text = format!("the system gives no random bytes: {error}");
                return Err(TransferError::new(ErrorKind::Registration, text));
            }
        }
    }
    Ok(bytes)
}

impl Opened {
    /// Our end of a connection by this queue pair.
    fn endpoint(&self, pair: &QueuePair, psn: u32) -> Endpoint {
        Endpoint {
            ethernet: self.info.ethernet,
            mtu: self.mtu,
            reads_in: self.reads_in,
            reads_out: self.info.reads_out,
            lid: self.lid,
            qpn: pair.number(),
            psn,
            gid: self.info.gid,
        }
    }
}

/// How to get from our end to theirs.
///
/// # Errors
/// `Unsupported` when the two ends are no pair.
fn route(opened: &Opened, ours: &Endpoint, theirs: &Endpoint) -> Result<Route, TransferError> {
    if ours.ethernet != theirs.ethernet {
        let name = |ethernet| if ethernet { "Ethernet" } else { "InfiniBand" };
        return Err(TransferError::unsupported(format!(
            "our port is {}, the peer's is {}; choose ports of one network",
            name(ours.ethernet),
            name(theirs.ethernet)
        )));
    }
    let prefix = |end: &Endpoint| end.gid.first_chunk::<8>().copied();
    Ok(Route {
        port: opened.info.port,
        sgid_index: opened.info.gid_index,
        traffic_class: opened.traffic_class,
        gid: sys::Gid(theirs.gid),
        lid: theirs.lid,
        // In one InfiniBand subnet the lid is enough.
        is_global: ours.ethernet || prefix(ours) != prefix(theirs),
        qpn: theirs.qpn,
        our_psn: ours.psn,
        their_psn: theirs.psn,
        mtu: ours.mtu.min(theirs.mtu),
        reads_out: ours.reads_out.min(theirs.reads_in),
        reads_in: ours.reads_in.min(theirs.reads_out),
        ack_timeout: ACK_TIMEOUT,
        retries: RETRIES,
    })
}

/// 4.096 µs × 2¹⁴ = 67 ms until a packet is sent again, and how often that is done: a peer that is
/// gone without a word is found out in about half a second (some adapters take longer). To some, 7
/// means for ever.
const ACK_TIMEOUT: u8 = 14;
const RETRIES: u8 = 6;
