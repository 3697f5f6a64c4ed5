//! One connection to a peer: a queue pair, its completions, and the control connection it lives by.
//!
//! **Invariant:** what is posted is on record until it has completed well, or the queue pair is
//! destroyed; completions come in the order of posting, and one that is not the next is a stranger.

use std::{collections::VecDeque, sync::Arc};

use super::{
    absent::VerbError,
    sys::{Wc, wc},
    verbs::{QueuePair, Registered, Work},
};
use crate::tcp::ControlLane;

/// A connected queue pair.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) id: u64,
    pair: QueuePair,
    pub(super) control: Arc<ControlLane>,
    /// Places in the send queue.
    depth: u32,
    free: u32,
    /// An announcement of the next completion was asked for and has not come.
    pub(super) armed: bool,
    next: u64,
    flight: VecDeque<Flight>,
    /// Where reads go whose bytes nobody wants.
    _byte: Arc<Registered>,
}

/// Work up to and with a signalled operation.
#[derive(Clone, Copy, Debug)]
struct Flight {
    id: u64,
    /// Operations.
    count: u32,
    part: u64,
}

/// A run of a part's operations that completed well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Done {
    pub(super) part: u64,
    pub(super) count: u32,
}

/// Why a connection cannot go on.
#[derive(Clone, Debug)]
pub(super) enum Broken {
    /// An operation of this part failed, or one before its next signalled one.
    Work { part: Option<u64>, status: u32, name: String, vendor: u32 },
    /// A verb failed.
    Verb(VerbError),
}

/// Operations of a part to post.
#[derive(Clone, Copy, Debug)]
pub(super) struct Batch<'a> {
    pub(super) part: u64,
    /// Bytes up to which writes go inline; 0 for memory that the processor does not reach.
    pub(super) inline: u64,
    pub(super) operations: &'a super::work::Operations,
    /// Which of them.
    pub(super) from: usize,
    pub(super) count: usize,
}

impl Conn {
    pub(super) fn new(
        id: u64,
        pair: QueuePair,
        control: ControlLane,
        byte: Arc<Registered>,
    ) -> Self {
        let depth = pair.cap.max_send_wr;
        let (flight, control) = (VecDeque::new(), Arc::new(control));
        Self { id, pair, control, depth, free: depth, armed: false, next: 1, flight, _byte: byte }
    }

    pub(super) fn free(&self) -> usize {
        self.free as usize
    }

    pub(super) fn is_idle(&self) -> bool {
        self.flight.is_empty()
    }

    /// Bytes that a write may carry inline.
    pub(super) fn inline_bytes(&self) -> u64 {
        u64::from(self.pair.cap.max_inline_data)
    }

    /// Posts batches by one doorbell; together they are at most [`free`](Self::free) operations. Says
    /// how many were signalled. After an error the connection is broken; all are on record.
    ///
    /// # Safety
    /// The near memory of all operations is registered, and belongs to them until they have
    /// completed well or the queue pair is destroyed.
    pub(super) unsafe fn post(&mut self, batches: &[Batch<'_>]) -> Result<u64, Broken> {
        // A long batch frees its places before it has all ended.
        let often = (self.depth / 4).max(1);
        let mut works = Vec::with_capacity(batches.iter().map(|batch| batch.count).sum());
        let mut signals = 0;
        for batch in batches {
            let end = batch.from + batch.count;
            let all = batch.operations.all.get(batch.from..end).unwrap_or_default();
            let mut unsignalled = 0;
            for (operation, at) in all.iter().zip(batch.from + 1..) {
                unsignalled += 1;
                let signalled = at == end || unsignalled == often;
                let id = self.next;
                if signalled {
                    self.next += 1;
                    signals += 1;
                    self.flight.push_back(Flight { id, count: unsignalled, part: batch.part });
                    self.free = self.free.saturating_sub(unsignalled);
                    unsignalled = 0;
                }
                works.push(Work {
                    id,
                    write: operation.write,
                    signalled,
                    inline: operation.write && operation.bytes <= batch.inline,
                    near: batch.operations.elements(operation),
                    far: operation.far,
                    rkey: operation.rkey,
                });
            }
        }
        // SAFETY: as the caller promises.
        unsafe { self.pair.post(&works) }.map_err(Broken::Verb)?;
        Ok(signals)
    }

    /// Takes completions. What completed well before an error is told, too.
    pub(super) fn poll(&mut self, done: &mut Vec<Done>, strangers: &mut u64) -> Result<(), Broken> {
        loop {
            let mut taken = [Wc::default(); 32];
            let count = self.pair.completions.poll(&mut taken).map_err(Broken::Verb)?;
            for one in taken.iter().take(count) {
                self.take(one, done, strangers)?;
            }
            if count < taken.len() {
                return Ok(());
            }
        }
    }

    fn take(&mut self, one: &Wc, done: &mut Vec<Done>, strangers: &mut u64) -> Result<(), Broken> {
        if one.qp_num != self.pair.number() {
            *strangers += 1;
            return Ok(());
        }
        let head = self.flight.front().copied();
        if one.status != wc::SUCCESS {
            // Unsignalled operations complete with errors too, under the number of their flight.
            let failed = self.flight.iter().find(|flight| flight.id == one.wr_id);
            return Err(Broken::Work {
                part: failed.map(|flight| flight.part),
                status: one.status,
                name: self.pair.status_name(one.status),
                vendor: one.vendor_err,
            });
        }
        match head {
            Some(head) if head.id == one.wr_id => {
                self.flight.pop_front();
                self.free += head.count;
                done.push(Done { part: head.part, count: head.count });
            }
            _ => *strangers += 1,
        }
        Ok(())
    }

    /// Asks for an announcement of the next completion.
    pub(super) fn arm(&mut self) -> Result<(), Broken> {
        if !self.armed {
            self.pair.completions.arm().map_err(Broken::Verb)?;
            self.armed = true;
        }
        Ok(())
    }

    /// Stops both sides.
    pub(super) fn stop(&self) {
        self.control.close();
        self.pair.stop();
    }

    /// Destroys the queue pair: after this the adapter touches no memory of what was posted.
    pub(super) fn destroy(&mut self) -> Result<(), VerbError> {
        self.pair.destroy()
    }
}

impl Broken {
    /// Whether the same may succeed over a new connection.
    pub(super) fn may_be_repaired(&self) -> bool {
        match self {
            Self::Work { status, .. } => matches!(
                *status,
                wc::WR_FLUSH_ERR | wc::RETRY_EXC_ERR | wc::RNR_RETRY_EXC_ERR | wc::RESP_TIMEOUT_ERR
            ),
            Self::Verb(_) => false,
        }
    }
}
