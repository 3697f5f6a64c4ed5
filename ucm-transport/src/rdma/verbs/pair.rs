//! Queue pairs, and the work that is posted to them.
//!
//! **Invariant:** a chain that is posted points into arrays that live until the call has returned.

use std::{
    ffi::{c_int, c_uint},
    fmt,
    ptr::{self, NonNull},
    sync::Arc,
};

use super::{Completions, Domain, Rights, Verb, done, leaked};
use crate::rdma::{absent::VerbError, sys};

/// One piece of work, as it is posted.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdma) struct Work<'a> {
    pub(in crate::rdma) id: u64,
    pub(in crate::rdma) write: bool,
    pub(in crate::rdma) signalled: bool,
    /// The device copies the bytes while it is told; writes only.
    pub(in crate::rdma) inline: bool,
    pub(in crate::rdma) near: &'a [sys::Sge],
    pub(in crate::rdma) far: u64,
    pub(in crate::rdma) rkey: u32,
}

/// The other end of a queue pair, and how to get there.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdma) struct Route {
    pub(in crate::rdma) port: u8,
    pub(in crate::rdma) sgid_index: u8,
    pub(in crate::rdma) traffic_class: u8,
    pub(in crate::rdma) gid: sys::Gid,
    pub(in crate::rdma) lid: u16,
    pub(in crate::rdma) is_global: bool,
    pub(in crate::rdma) qpn: u32,
    pub(in crate::rdma) our_psn: u32,
    pub(in crate::rdma) their_psn: u32,
    pub(in crate::rdma) mtu: u8,
    /// Reads that we have out at once, and that we answer at once.
    pub(in crate::rdma) reads_out: u8,
    pub(in crate::rdma) reads_in: u8,
    pub(in crate::rdma) ack_timeout: u8,
    pub(in crate::rdma) retries: u8,
}

/// A reliable-connected queue pair.
pub(in crate::rdma) struct QueuePair {
    raw: Option<NonNull<sys::Qp>>,
    number: u32,
    pub(in crate::rdma) cap: sys::QpCap,
    domain: Arc<Domain>,
    pub(in crate::rdma) completions: Completions,
    chain: Vec<sys::SendWr>,
    /// For tests that let it stand still.
    #[cfg(test)]
    pub(in crate::rdma) route: Option<Route>,
}

// SAFETY: the library's objects may be used from any thread; the chain's pointers are not used
// between calls.
unsafe impl Send for QueuePair {}

impl QueuePair {
    /// # Errors
    /// The device does not give so much.
    pub(in crate::rdma) fn new(
        domain: &Arc<Domain>,
        completions: Completions,
        cap: sys::QpCap,
    ) -> Result<Self, (VerbError, Completions)> {
        let mut wanted = sys::QpInitAttr {
            qp_context: ptr::null_mut(),
            send_cq: completions.raw.as_ptr(),
            recv_cq: completions.raw.as_ptr(),
            srq: ptr::null_mut(),
            cap,
            qp_type: sys::QPT_RC,
            sq_sig_all: 0,
        };
        let create = domain.context.functions.ibv_create_qp;
        // SAFETY: live objects, which the queue pair keeps alive, and a place of ours.
        let raw = unsafe { create(domain.raw.as_ptr(), &mut wanted) };
        let Some(raw) = NonNull::new(raw) else {
            return Err((VerbError::last("ibv_create_qp"), completions));
        };
        // SAFETY: just made.
        let number = unsafe { (*raw.as_ptr()).qp_num };
        let domain = Arc::clone(domain);
        Ok(Self {
            raw: Some(raw),
            number,
            cap: wanted.cap,
            domain,
            completions,
            chain: Vec::new(),
            #[cfg(test)]
            route: None,
        })
    }

    pub(in crate::rdma) fn number(&self) -> u32 {
        self.number
    }

    /// What a completion's status is called.
    pub(in crate::rdma) fn status_name(&self, status: c_uint) -> String {
        self.domain.context.status_name(status)
    }

    pub(in crate::rdma) fn modify(&self, attr: &mut sys::QpAttr, mask: c_int) -> Verb<()> {
        const CALL: &str = "ibv_modify_qp";
        let Some(raw) = self.raw else { return Err(VerbError::of(CALL, 9)) };
        let modify = self.domain.context.functions.ibv_modify_qp;
        // SAFETY: a live queue pair; the mask names fields that are set.
        done(CALL, unsafe { modify(raw.as_ptr(), attr, mask) })
    }

    /// Makes it ready to be connected.
    pub(in crate::rdma) fn init(&self, port: u8, rights: Rights) -> Verb<()> {
        let flags = rights.flags() & !sys::ACCESS_LOCAL_WRITE;
        let mut attr = sys::QpAttr {
            qp_state: sys::QPS_INIT,
            port_num: port,
            qp_access_flags: c_uint::try_from(flags).unwrap_or(0),
            ..Default::default()
        };
        let mask = sys::QP_STATE | sys::QP_PKEY_INDEX | sys::QP_PORT | sys::QP_ACCESS_FLAGS;
        self.modify(&mut attr, mask)
    }

    /// Connects it.
    pub(in crate::rdma) fn connect(&mut self, route: &Route) -> Verb<()> {
        #[cfg(test)]
        {
            self.route = Some(*route);
        }
        let mut attr = sys::QpAttr {
            qp_state: sys::QPS_RTR,
            path_mtu: c_uint::from(route.mtu),
            dest_qp_num: route.qpn,
            rq_psn: route.their_psn,
            max_dest_rd_atomic: route.reads_in,
            min_rnr_timer: 12,
            ah_attr: sys::AhAttr {
                dgid: route.gid,
                sgid_index: route.sgid_index,
                hop_limit: 64,
                traffic_class: route.traffic_class,
                dlid: route.lid,
                is_global: u8::from(route.is_global),
                port_num: route.port,
                ..Default::default()
            },
            ..Default::default()
        };
        let mask = sys::QP_STATE
            | sys::QP_AV
            | sys::QP_PATH_MTU
            | sys::QP_DEST_QPN
            | sys::QP_RQ_PSN
            | sys::QP_MAX_DEST_RD_ATOMIC
            | sys::QP_MIN_RNR_TIMER;
        self.modify(&mut attr, mask)?;
        let mut attr = sys::QpAttr {
            qp_state: sys::QPS_RTS,
            timeout: route.ack_timeout,
            retry_cnt: route.retries,
            rnr_retry: 7,
            sq_psn: route.our_psn,
            max_rd_atomic: route.reads_out,
            ..Default::default()
        };
        let mask = sys::QP_STATE
            | sys::QP_TIMEOUT
            | sys::QP_RETRY_CNT
            | sys::QP_RNR_RETRY
            | sys::QP_SQ_PSN
            | sys::QP_MAX_QP_RD_ATOMIC;
        self.modify(&mut attr, mask)
    }

    /// Posts work in this order, and rings the device's bell once.
    ///
    /// # Safety
    /// The near memory is registered, and stays so, and the operation's, until the work has
    /// completed well or the queue pair is destroyed. Inline work names host memory.
    ///
    /// # Errors
    /// Some of it may have been posted.
    pub(in crate::rdma) unsafe fn post(&mut self, works: &[Work<'_>]) -> Verb<()> {
        const CALL: &str = "ibv_post_send";
        let ops = self.domain.context.ops();
        let (Some(post), Some(raw)) = (ops.post_send, self.raw) else {
            return Err(VerbError { call: CALL, errno: rustix::io::Errno::NOSYS });
        };
        self.chain.clear();
        self.chain.extend(works.iter().map(|work| sys::SendWr {
            wr_id: work.id,
            next: ptr::null_mut(),
            sg_list: work.near.as_ptr().cast_mut(),
            num_sge: c_int::try_from(work.near.len()).unwrap_or(0),
            opcode: if work.write { sys::WR_RDMA_WRITE } else { sys::WR_RDMA_READ },
            send_flags: if work.signalled { sys::SEND_SIGNALED } else { 0 }
                | if work.inline { sys::SEND_INLINE } else { 0 },
            _imm_data: 0,
            remote_addr: work.far,
            rkey: work.rkey,
            _rest: [0; 19],
        }));
        let mut next = ptr::null_mut();
        for entry in self.chain.iter_mut().rev() {
            entry.next = next;
            next = &raw mut *entry;
        }
        if next.is_null() {
            return Ok(());
        }
        let mut bad = ptr::null_mut();
        // SAFETY: a live queue pair; the chain and its lists are read during the call only; the
        // caller vouches for the memory.
        done(CALL, unsafe { post(raw.as_ptr(), next, &mut bad) })
    }

    /// Stops it: what is posted completes as flushed.
    pub(in crate::rdma) fn stop(&self) {
        let mut attr = sys::QpAttr { qp_state: sys::QPS_ERR, ..Default::default() };
        // Destroying it is what counts.
        if let Err(error) = self.modify(&mut attr, sys::QP_STATE) {
            tracing::debug!("a queue pair does not stop: {error}");
        }
    }

    /// Destroys it. After this the device touches no memory of anything that was posted.
    ///
    /// # Errors
    /// It is not destroyed; try again.
    pub(in crate::rdma) fn destroy(&mut self) -> Verb<()> {
        const CALL: &str = "ibv_destroy_qp";
        let Some(raw) = self.raw else { return Ok(()) };
        #[cfg(test)]
        if crate::rdma::tests::faults::takes(&crate::rdma::tests::faults::REFUSED_DESTROYS) {
            return Err(VerbError { call: CALL, errno: rustix::io::Errno::BUSY });
        }
        // SAFETY: made by us; `raw` is taken when it is gone.
        done(CALL, unsafe { (self.domain.context.functions.ibv_destroy_qp)(raw.as_ptr()) })?;
        self.raw = None;
        Ok(())
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        if !self.domain.context.is_of_this_process() {
            return;
        }
        if let Err(error) = self.destroy() {
            leaked("a queue pair", &error);
        }
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair")
            .field("number", &self.number)
            .field("cap", &self.cap)
            .finish_non_exhaustive()
    }
}
