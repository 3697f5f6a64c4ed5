//! The part of `libibverbs` that the engine uses: its structures, and its functions found at run time.
//!
//! The library's interface has not changed since version 1.1 of its symbols (2006), because its header
//! puts the layout of the context, and of its table of operations, into every program: posting work
//! and asking for completions go through that table, without a symbol. What stands here is compared
//! with the header of the installed library by `cargo xtask rdma-vm`.
//!
//! **Invariant:** no function is called whose symbol was not found; layouts are those of `verbs.h` on
//! 64-bit Linux.

use std::{
    error::Error as _,
    ffi::{c_char, c_int, c_uint, c_void},
    sync::OnceLock,
};

use libloading::Library;

use super::absent::RdmaAbsent;

const NAME: &str = "libibverbs.so.1";

pub(super) const ACCESS_LOCAL_WRITE: c_int = 1;
pub(super) const ACCESS_REMOTE_WRITE: c_int = 2;
pub(super) const ACCESS_REMOTE_READ: c_int = 4;

pub(super) const LINK_INFINIBAND: u8 = 1;
pub(super) const LINK_ETHERNET: u8 = 2;

pub(super) const PORT_ACTIVE: c_uint = 4;

pub(super) const QPT_RC: c_uint = 2;
pub(super) const QPS_INIT: c_uint = 1;
pub(super) const QPS_RTR: c_uint = 2;
pub(super) const QPS_RTS: c_uint = 3;
pub(super) const QPS_ERR: c_uint = 6;

pub(super) const QP_STATE: c_int = 1;
pub(super) const QP_ACCESS_FLAGS: c_int = 1 << 3;
pub(super) const QP_PKEY_INDEX: c_int = 1 << 4;
pub(super) const QP_PORT: c_int = 1 << 5;
pub(super) const QP_AV: c_int = 1 << 7;
pub(super) const QP_PATH_MTU: c_int = 1 << 8;
pub(super) const QP_TIMEOUT: c_int = 1 << 9;
pub(super) const QP_RETRY_CNT: c_int = 1 << 10;
pub(super) const QP_RNR_RETRY: c_int = 1 << 11;
pub(super) const QP_RQ_PSN: c_int = 1 << 12;
pub(super) const QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
pub(super) const QP_MIN_RNR_TIMER: c_int = 1 << 15;
pub(super) const QP_SQ_PSN: c_int = 1 << 16;
pub(super) const QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
pub(super) const QP_DEST_QPN: c_int = 1 << 20;

pub(super) const WR_RDMA_WRITE: c_uint = 0;
pub(super) const WR_RDMA_READ: c_uint = 4;
pub(super) const SEND_SIGNALED: c_uint = 2;
pub(super) const SEND_INLINE: c_uint = 8;

/// Answers of a completion.
pub(super) mod wc {
    use std::ffi::c_uint;

    pub(in crate::rdma) const SUCCESS: c_uint = 0;
    pub(in crate::rdma) const WR_FLUSH_ERR: c_uint = 5;
    pub(in crate::rdma) const REM_ACCESS_ERR: c_uint = 10;
    pub(in crate::rdma) const RETRY_EXC_ERR: c_uint = 12;
    pub(in crate::rdma) const RNR_RETRY_EXC_ERR: c_uint = 13;
    pub(in crate::rdma) const RESP_TIMEOUT_ERR: c_uint = 20;
}

/// `struct ibv_device`, known by address only.
#[repr(C)]
pub(super) struct Device {
    _opaque: [u8; 0],
}

/// `struct ibv_pd`, known by address only.
#[repr(C)]
pub(super) struct Pd {
    _opaque: [u8; 0],
}

type Unused = *const c_void;

/// `struct ibv_context_ops`.
#[repr(C)]
pub(super) struct ContextOps {
    _until_poll_cq: [Unused; 11],
    pub(super) poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int>,
    pub(super) req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
    _until_post_send: [Unused; 12],
    pub(super) post_send:
        Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    _rest: [Unused; 6],
}

/// The beginning of `struct ibv_context`.
#[repr(C)]
pub(super) struct Context {
    _device: *mut Device,
    pub(super) ops: ContextOps,
    _cmd_fd: c_int,
    _async_fd: c_int,
    pub(super) num_comp_vectors: c_int,
}

/// The beginning of `struct ibv_mr`, which is all of it but padding.
#[repr(C)]
pub(super) struct Mr {
    _context: *mut Context,
    _pd: *mut Pd,
    _addr: *mut c_void,
    _length: usize,
    _handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

/// The beginning of `struct ibv_comp_channel`.
#[repr(C)]
pub(super) struct CompChannel {
    _context: *mut Context,
    pub(super) fd: c_int,
}

/// The beginning of `struct ibv_cq`.
#[repr(C)]
pub(super) struct Cq {
    pub(super) context: *mut Context,
    _channel: *mut CompChannel,
    _cq_context: *mut c_void,
    _handle: u32,
    pub(super) cqe: c_int,
}

/// The beginning of `struct ibv_qp`.
#[repr(C)]
pub(super) struct Qp {
    pub(super) context: *mut Context,
    _qp_context: *mut c_void,
    _pd: *mut Pd,
    _send_cq: *mut Cq,
    _recv_cq: *mut Cq,
    _srq: *mut c_void,
    _handle: u32,
    pub(super) qp_num: u32,
}

/// `union ibv_gid`.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Gid(pub(super) [u8; 16]);

/// `struct ibv_device_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DeviceAttr {
    pub(super) fw_ver: [c_char; 64],
    _guids: [u64; 2],
    pub(super) max_mr_size: u64,
    _page_size_cap: u64,
    _ids: [u32; 3],
    _max_qp: c_int,
    pub(super) max_qp_wr: c_int,
    _device_cap_flags: c_uint,
    pub(super) max_sge: c_int,
    pub(super) max_sge_rd: c_int,
    _max_cq: c_int,
    pub(super) max_cqe: c_int,
    _max_mr: c_int,
    _max_pd: c_int,
    pub(super) max_qp_rd_atom: c_int,
    _max_ee_rd_atom: c_int,
    _max_res_rd_atom: c_int,
    pub(super) max_qp_init_rd_atom: c_int,
    _until_pkeys: [c_int; 16],
    _max_pkeys: u16,
    _local_ca_ack_delay: u8,
    pub(super) phys_port_cnt: u8,
}

/// `struct ibv_port_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct PortAttr {
    pub(super) state: c_uint,
    _max_mtu: c_uint,
    pub(super) active_mtu: c_uint,
    pub(super) gid_tbl_len: c_int,
    _port_cap_flags: u32,
    pub(super) max_msg_sz: u32,
    _counters: [u32; 2],
    _pkey_tbl_len: u16,
    pub(super) lid: u16,
    _sm_lid: u16,
    _until_link: [u8; 8],
    pub(super) link_layer: u8,
    _flags: u8,
    _port_cap_flags2: u16,
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct QpCap {
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
pub(super) struct QpInitAttr {
    pub(super) qp_context: *mut c_void,
    pub(super) send_cq: *mut Cq,
    pub(super) recv_cq: *mut Cq,
    pub(super) srq: *mut c_void,
    pub(super) cap: QpCap,
    pub(super) qp_type: c_uint,
    pub(super) sq_sig_all: c_int,
}

/// `struct ibv_ah_attr` with its `struct ibv_global_route`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct AhAttr {
    pub(super) dgid: Gid,
    pub(super) flow_label: u32,
    pub(super) sgid_index: u8,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
    pub(super) _end_of_route: u8,
    pub(super) dlid: u16,
    pub(super) sl: u8,
    pub(super) _src_path_bits: u8,
    pub(super) _static_rate: u8,
    pub(super) is_global: u8,
    pub(super) port_num: u8,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct QpAttr {
    pub(super) qp_state: c_uint,
    pub(super) _cur_qp_state: c_uint,
    pub(super) path_mtu: c_uint,
    pub(super) _path_mig_state: c_uint,
    pub(super) _qkey: u32,
    pub(super) rq_psn: u32,
    pub(super) sq_psn: u32,
    pub(super) dest_qp_num: u32,
    pub(super) qp_access_flags: c_uint,
    pub(super) _cap: QpCap,
    pub(super) ah_attr: AhAttr,
    pub(super) _alt_ah_attr: AhAttr,
    pub(super) pkey_index: u16,
    pub(super) _alt_pkey_index: u16,
    pub(super) _en_sqd_async_notify: u8,
    pub(super) _sq_draining: u8,
    pub(super) max_rd_atomic: u8,
    pub(super) max_dest_rd_atomic: u8,
    pub(super) min_rnr_timer: u8,
    pub(super) port_num: u8,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
    pub(super) _alt_port_num: u8,
    pub(super) _alt_timeout: u8,
    pub(super) _rate_limit: u32,
}

/// `struct ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sge {
    pub(super) addr: u64,
    pub(super) length: u32,
    pub(super) lkey: u32,
}

/// `struct ibv_send_wr`, as one-sided operations use it.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct SendWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut Self,
    pub(super) sg_list: *mut Sge,
    pub(super) num_sge: c_int,
    pub(super) opcode: c_uint,
    pub(super) send_flags: c_uint,
    pub(super) _imm_data: u32,
    pub(super) remote_addr: u64,
    pub(super) rkey: u32,
    pub(super) _rest: [u32; 19],
}

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wc {
    pub(super) wr_id: u64,
    pub(super) status: c_uint,
    _opcode: c_uint,
    pub(super) vendor_err: u32,
    _byte_len: u32,
    _imm_data: u32,
    pub(super) qp_num: u32,
    _src_qp: u32,
    _wc_flags: c_uint,
    _pkey_index: u16,
    _slid: u16,
    _sl: u8,
    _dlid_path_bits: u8,
}

macro_rules! layout {
    ($($c:literal $rust:ty { $($field:ident as $name:literal),* $(,)? } $size:expr;)*) => {
        /// What this module believes: `struct field offset`, and `struct size` for whole ones.
        #[cfg(test)]
        pub(super) fn layout() -> Vec<(String, usize)> {
            let mut all = Vec::new();
            $(
                $(all.push((
                    format!("{}.{}", $c, $name),
                    std::mem::offset_of!($rust, $field),
                ));)*
                let size: Option<usize> = $size;
                if let Some(size) = size {
                    assert_eq!(std::mem::size_of::<$rust>(), size);
                    all.push(($c.to_owned(), size));
                }
            )*
            all
        }
    };
}

layout! {
    "ibv_context_ops" ContextOps {
        poll_cq as "poll_cq", req_notify_cq as "req_notify_cq", post_send as "post_send",
    } Some(256);
    "ibv_context" Context { ops as "ops", num_comp_vectors as "num_comp_vectors" } None;
    "ibv_mr" Mr { lkey as "lkey", rkey as "rkey" } None;
    "ibv_comp_channel" CompChannel { fd as "fd" } None;
    "ibv_cq" Cq { context as "context", cqe as "cqe" } None;
    "ibv_qp" Qp { context as "context", qp_num as "qp_num" } None;
    "ibv_device_attr" DeviceAttr {
        fw_ver as "fw_ver", max_mr_size as "max_mr_size", max_qp_wr as "max_qp_wr",
        max_sge as "max_sge", max_sge_rd as "max_sge_rd", max_cqe as "max_cqe",
        max_qp_rd_atom as "max_qp_rd_atom", max_qp_init_rd_atom as "max_qp_init_rd_atom",
        phys_port_cnt as "phys_port_cnt",
    } Some(232);
    "ibv_port_attr" PortAttr {
        state as "state", active_mtu as "active_mtu", gid_tbl_len as "gid_tbl_len",
        max_msg_sz as "max_msg_sz", lid as "lid", link_layer as "link_layer",
    } Some(52);
    "ibv_qp_cap" QpCap {
        max_send_wr as "max_send_wr", max_send_sge as "max_send_sge",
        max_inline_data as "max_inline_data",
    } Some(20);
    "ibv_qp_init_attr" QpInitAttr {
        send_cq as "send_cq", recv_cq as "recv_cq", srq as "srq", cap as "cap",
        qp_type as "qp_type", sq_sig_all as "sq_sig_all",
    } Some(64);
    "ibv_ah_attr" AhAttr {
        dgid as "grh.dgid", sgid_index as "grh.sgid_index", hop_limit as "grh.hop_limit",
        traffic_class as "grh.traffic_class", dlid as "dlid", sl as "sl",
        is_global as "is_global", port_num as "port_num",
    } Some(32);
    "ibv_qp_attr" QpAttr {
        qp_state as "qp_state", path_mtu as "path_mtu", rq_psn as "rq_psn", sq_psn as "sq_psn",
        dest_qp_num as "dest_qp_num", qp_access_flags as "qp_access_flags",
        ah_attr as "ah_attr", pkey_index as "pkey_index", max_rd_atomic as "max_rd_atomic",
        max_dest_rd_atomic as "max_dest_rd_atomic", min_rnr_timer as "min_rnr_timer",
        port_num as "port_num", timeout as "timeout", retry_cnt as "retry_cnt",
        rnr_retry as "rnr_retry",
    } Some(144);
    "ibv_sge" Sge { addr as "addr", length as "length", lkey as "lkey" } Some(16);
    "ibv_send_wr" SendWr {
        wr_id as "wr_id", next as "next", sg_list as "sg_list", num_sge as "num_sge",
        opcode as "opcode", send_flags as "send_flags", remote_addr as "wr.rdma.remote_addr",
        rkey as "wr.rdma.rkey",
    } Some(128);
    "ibv_wc" Wc {
        wr_id as "wr_id", status as "status", vendor_err as "vendor_err", qp_num as "qp_num",
    } Some(48);
}

/// The constants above by the names of the header.
#[cfg(test)]
pub(super) fn constants() -> Vec<(&'static str, usize)> {
    macro_rules! all {
        ($($name:ident)*) => {
            vec![$((stringify!($name), usize::try_from($name).unwrap()),)*]
        };
    }
    use wc::{
        REM_ACCESS_ERR as WC_REM_ACCESS_ERR, RESP_TIMEOUT_ERR as WC_RESP_TIMEOUT_ERR,
        RETRY_EXC_ERR as WC_RETRY_EXC_ERR, RNR_RETRY_EXC_ERR as WC_RNR_RETRY_EXC_ERR,
        SUCCESS as WC_SUCCESS, WR_FLUSH_ERR as WC_WR_FLUSH_ERR,
    };
    all!(ACCESS_LOCAL_WRITE ACCESS_REMOTE_WRITE ACCESS_REMOTE_READ PORT_ACTIVE QPT_RC QPS_INIT
        QPS_RTR QPS_RTS QPS_ERR QP_STATE QP_ACCESS_FLAGS QP_PKEY_INDEX QP_PORT QP_AV QP_PATH_MTU
        QP_TIMEOUT QP_RETRY_CNT QP_RNR_RETRY QP_RQ_PSN QP_MAX_QP_RD_ATOMIC QP_MIN_RNR_TIMER
        QP_SQ_PSN QP_MAX_DEST_RD_ATOMIC QP_DEST_QPN WR_RDMA_WRITE WR_RDMA_READ SEND_SIGNALED
        SEND_INLINE WC_SUCCESS WC_WR_FLUSH_ERR WC_REM_ACCESS_ERR WC_RETRY_EXC_ERR
        WC_RNR_RETRY_EXC_ERR WC_RESP_TIMEOUT_ERR)
}

macro_rules! functions {
    (
        needed { $($need:ident: fn($($arg:ty),* $(,)?) -> $answer:ty;)* }
        optional { $($may:ident: fn($($opt:ty),* $(,)?) -> $some:ty;)* }
    ) => {
        /// Entry points of the library.
        #[derive(Debug)]
        pub(super) struct Functions {
            $(pub(super) $need: unsafe extern "C" fn($($arg),*) -> $answer,)*
            $(pub(super) $may: Option<unsafe extern "C" fn($($opt),*) -> $some>,)*
            /// Keeps the functions where they are.
            _library: Library,
        }

        impl Functions {
            /// Looks all of them up, and names the needed ones that are not there.
            fn find(library: Library) -> Result<Self, Vec<&'static str>> {
                let mut missing = Vec::new();
                // SAFETY: the signatures are those of infiniband/verbs.h; the library is kept.
                $(let $need = unsafe { symbol::<unsafe extern "C" fn($($arg),*) -> $answer>(
                    &library,
                    stringify!($need),
                ) };
                if $need.is_none() {
                    missing.push(stringify!($need));
                })*
                // SAFETY: as above.
                $(let $may = unsafe { symbol::<unsafe extern "C" fn($($opt),*) -> $some>(
                    &library,
                    stringify!($may),
                ) };)*
                match ($($need,)*) {
                    ($(Some($need),)*) => Ok(Self { $($need,)* $($may,)* _library: library }),
                    _ => Err(missing),
                }
            }
        }
    };
}

functions! {
    needed {
        ibv_get_device_list: fn(*mut c_int) -> *mut *mut Device;
        ibv_free_device_list: fn(*mut *mut Device) -> ();
        ibv_get_device_name: fn(*mut Device) -> *const c_char;
        ibv_open_device: fn(*mut Device) -> *mut Context;
        ibv_close_device: fn(*mut Context) -> c_int;
        ibv_query_device: fn(*mut Context, *mut DeviceAttr) -> c_int;
        ibv_query_port: fn(*mut Context, u8, *mut PortAttr) -> c_int;
        ibv_query_gid: fn(*mut Context, u8, c_int, *mut Gid) -> c_int;
        ibv_alloc_pd: fn(*mut Context) -> *mut Pd;
        ibv_dealloc_pd: fn(*mut Pd) -> c_int;
        ibv_reg_mr: fn(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
        ibv_dereg_mr: fn(*mut Mr) -> c_int;
        ibv_create_comp_channel: fn(*mut Context) -> *mut CompChannel;
        ibv_destroy_comp_channel: fn(*mut CompChannel) -> c_int;
        ibv_create_cq: fn(
            *mut Context, c_int, *mut c_void, *mut CompChannel, c_int,
        ) -> *mut Cq;
        ibv_destroy_cq: fn(*mut Cq) -> c_int;
        ibv_get_cq_event: fn(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int;
        ibv_ack_cq_events: fn(*mut Cq, c_uint) -> ();
        ibv_create_qp: fn(*mut Pd, *mut QpInitAttr) -> *mut Qp;
        ibv_modify_qp: fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
        ibv_destroy_qp: fn(*mut Qp) -> c_int;
        ibv_wc_status_str: fn(c_uint) -> *const c_char;
    }
    optional {
        ibv_reg_dmabuf_mr: fn(*mut Pd, u64, usize, u64, c_int, c_int) -> *mut Mr;
    }
}

/// # Safety
/// `F` is the type of the function of this name, and not used after the library is gone.
unsafe fn symbol<F: Copy>(library: &Library, name: &str) -> Option<F> {
    // SAFETY: the caller vouches for the type.
    unsafe { library.get::<F>(name.as_bytes()) }.ok().map(|found| *found)
}

/// The library's functions; looked up once, but looked for again when it was not there.
pub(super) fn functions() -> Result<&'static Functions, RdmaAbsent> {
    static FUNCTIONS: OnceLock<Functions> = OnceLock::new();
    if let Some(found) = FUNCTIONS.get() {
        return Ok(found);
    }
    // SAFETY: loading a library runs its initialisers; that is what a runtime is loaded for.
    let library = unsafe { Library::new(NAME) }.map_err(|error| RdmaAbsent::NoLibrary {
        // What the loader itself said stands behind the error.
        said: error.source().map_or_else(|| error.to_string(), ToString::to_string),
    })?;
    let found = Functions::find(library).map_err(|names| RdmaAbsent::MissingSymbols { names })?;
    Ok(FUNCTIONS.get_or_init(|| found))
}
