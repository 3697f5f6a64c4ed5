//! Making a connection: control connection, queue pair, and the proof that it leads to the owner.
//!
//! **Invariant:** a connection is handed out only after the owner's beacon was read over it: bytes that
//! the authenticated control connection foretold. Whatever fails before leaves nothing behind.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use ucm_data::Token;

use super::{
    conn::{Batch, Broken, Conn},
    device::RdmaDevice,
    random, route,
    sys::{QpCap, Sge},
    verbs::{Channel, Registered, Rights},
    wire::{Ask, BEACON_BYTES, Connected},
    work::{Operation, Operations},
};
use crate::{
    ErrorKind, Memory, TransferError,
    tcp::{ControlLane, Secret},
};

/// What an engine needs to connect.
#[derive(Debug)]
pub(super) struct Dialer {
    pub(super) device: RdmaDevice,
    pub(super) boot: Token,
    pub(super) cap: QpCap,
    pub(super) channel: Arc<Channel>,
    pub(super) byte: Arc<Registered>,
    pub(super) timeout: Duration,
}

/// What answers at the other end.
#[derive(Debug)]
pub(super) struct Dialed {
    pub(super) conn: Conn,
    pub(super) boot: Token,
    pub(super) owner: Token,
}

impl Dialer {
    /// Connects; blocks until `deadline` at most.
    ///
    /// # Errors
    /// `PeerDown` when nobody answers, `Denied` when secrets or versions differ, `Unsupported` when
    /// the peer does not speak RDMA or its port is of another network, `Failed` when the adapter
    /// refuses.
    pub(super) fn dial(
        &self,
        id: u64,
        address: SocketAddr,
        secret: &Secret,
        deadline: Instant,
    ) -> Result<Dialed, TransferError> {
        let failed = |error| TransferError::verb(ErrorKind::Failed, error);
        let control = ControlLane::connect(address, secret, self.boot, deadline)?;
        let opened = &self.device.opened;
        let mut pair = opened.queue_pair(self.cap, Some(&self.channel)).map_err(failed)?;
        pair.init(opened.info.port, Rights::Own).map_err(failed)?;
        let psn: [u8; 4] = random()?;
        let ours = opened.endpoint(&pair, u32::from_le_bytes(psn) & 0xff_ffff);
        let answer = control.ask(&Ask::Connect(ours).encode(), deadline).map_err(|error| {
            if error.kind() == ErrorKind::Invalid {
                TransferError::unsupported(format!("{address} serves no memory by RDMA: {error}"))
            } else {
                error
            }
        })?;
        let theirs = Connected::decode(&answer).map_err(|error| {
            TransferError::unsupported(format!("{address} does not speak our RDMA: {error}"))
        })?;
        pair.connect(&route(opened, &ours, &theirs.end)?).map_err(failed)?;
        let boot = control.boot();
        let mut conn = Conn::new(id, pair, control, Arc::clone(&self.byte));
        self.see_beacon(&mut conn, &theirs, address, deadline)?;
        Ok(Dialed { conn, boot, owner: theirs.owner })
    }

    /// Reads the owner's beacon over the new connection.
    fn see_beacon(
        &self,
        conn: &mut Conn,
        theirs: &Connected,
        address: SocketAddr,
        deadline: Instant,
    ) -> Result<(), TransferError> {
        let down = |text: String| {
            let advice =
                "check that the two addresses reach each other by RDMA (RoCE: UDP port 4791)";
            let text = format!("{address} is reached by tcp, but not by RDMA: {text}; {advice}");
            TransferError::new(ErrorKind::PeerDown, text)
        };
        let broken = |broken| match broken {
            Broken::Work { name, .. } => down(name),
            Broken::Verb(error) => TransferError::verb(ErrorKind::Failed, error),
        };
        let memory = Memory::host(BEACON_BYTES)?;
        let domain = &self.device.opened.domain;
        let to = Registered::new(domain, memory.clone(), Rights::Own)
            .map_err(|error| TransferError::verb(ErrorKind::Registration, error))?;
        let read = Operation {
            far: theirs.beacon_addr,
            rkey: theirs.beacon_rkey,
            first: 0,
            count: 1,
            bytes: BEACON_BYTES as u64,
            write: false,
        };
        let length = u32::try_from(BEACON_BYTES).unwrap_or(0);
        let element = Sge { addr: to.addr, length, lkey: to.lkey };
        let operations = Operations { all: vec![read], elements: vec![element] };
        let batch = Batch { part: 0, inline: 0, operations: &operations, from: 0, count: 1 };
        // SAFETY: `to` stays registered until the read has completed, or the queue pair is destroyed
        // below.
        let posted = unsafe { conn.post(&[batch]) };
        let seen = posted.map_err(broken).and_then(|_| {
            let (mut done, mut strangers) = (Vec::new(), 0);
            while done.is_empty() {
                conn.poll(&mut done, &mut strangers).map_err(broken)?;
                if Instant::now() > deadline {
                    return Err(down("no answer by the deadline".into()));
                }
                std::thread::yield_now();
            }
            let mut bytes = [0; BEACON_BYTES];
            memory.read(0, &mut bytes)?;
            if bytes != theirs.beacon {
                return Err(down("somebody else answers there".into()));
            }
            Ok(())
        });
        if seen.is_err()
            && let Err(error) = conn.destroy()
        {
            tracing::error!("the memory of a failed beacon is given up: {error}");
            let _ = std::mem::ManuallyDrop::new(to);
        }
        seen
    }
}
