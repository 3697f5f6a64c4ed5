//! A device, a port of it, and an address of that.
//!
//! **Invariant:** what was chosen is known and told before anything is registered.

use std::{fs, path::PathBuf, sync::Arc};

use super::{
    absent::{RdmaAbsent, VerbError},
    gid::{self, GidKind},
    sys,
    verbs::{self, Completions, Context, Domain, QueuePair},
};
use crate::TransferError;

/// Which device, port and address to use; what is not said is chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RdmaChoice {
    /// Name of the device, as `ibv_devices` prints it. Else: the first one with a usable port.
    pub device: Option<String>,
    /// Number of the port, from 1. Else: the first one that is up.
    pub port: Option<u8>,
    /// Place in the port's table of addresses. Else, on Ethernet: RoCE v2 before v1, IPv4 before
    /// IPv6, link-local ones last; on InfiniBand 0.
    pub gid_index: Option<u8>,
    /// Traffic class (DSCP and ECN bits) of what is sent. Default 0.
    pub traffic_class: u8,
}

/// What was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RdmaInfo {
    /// Name of the device.
    pub device: String,
    /// Version of its firmware; empty where there is none.
    pub firmware: String,
    /// Number of the port.
    pub port: u8,
    /// Ethernet (RoCE), or else InfiniBand.
    pub ethernet: bool,
    /// Place of the address in the port's table.
    pub gid_index: u8,
    /// The address.
    pub gid: [u8; 16],
    /// Bytes of a packet.
    pub mtu: u32,
    /// Pieces that one operation gathers or scatters.
    pub max_pieces: u32,
    /// Operations of one queue.
    pub max_queue: u32,
    /// Bytes of one operation.
    pub max_message_bytes: u64,
    /// Reads that may be out at once.
    pub reads_out: u8,
    /// Whether the library can register memory of other devices (dmabuf); the kernel may refuse.
    pub dmabuf: bool,
}

/// An opened RDMA device. Cheap to clone; engines and owners of one process share it.
#[derive(Clone, Debug)]
pub struct RdmaDevice {
    pub(super) opened: Arc<Opened>,
}

#[derive(Debug)]
pub(super) struct Opened {
    pub(super) domain: Arc<Domain>,
    pub(super) info: RdmaInfo,
    pub(super) lid: u16,
    /// As the verbs count it: 1 is 256 bytes, 5 is 4096.
    pub(super) mtu: u8,
    pub(super) reads_in: u8,
    pub(super) max_cqe: u32,
    pub(super) traffic_class: u8,
}

/// A port that can be used.
struct Port {
    number: u8,
    attr: sys::PortAttr,
    gid_index: u8,
    gid: [u8; 16],
}

impl RdmaDevice {
    /// Names of the devices that there are.
    ///
    /// # Errors
    /// Why there can be none.
    pub fn names() -> Result<Vec<String>, RdmaAbsent> {
        verbs::device_names()
    }

    /// Opens a device.
    ///
    /// # Errors
    /// Why it cannot be used, and what to do.
    pub fn open(choice: &RdmaChoice) -> Result<Self, RdmaAbsent> {
        let names = Self::names()?;
        if names.is_empty() {
            return Err(RdmaAbsent::NoDevice { wanted: choice.device.clone(), devices: names });
        }
        if let Some(name) = &choice.device {
            return Self::open_one(name, choice);
        }
        let mut said = Vec::new();
        for name in &names {
            match Self::open_one(name, choice) {
                Ok(device) => return Ok(device),
                Err(absent) if names.len() == 1 => return Err(absent),
                Err(absent) => said.push(format!("{name}: {}", absent.reason())),
            }
        }
        Err(RdmaAbsent::NoPort { said: said.join("; ") })
    }

    fn open_one(name: &str, choice: &RdmaChoice) -> Result<Self, RdmaAbsent> {
        // Those want another way to connect.
        if system(name, "node_type").is_some_and(|kind| kind.starts_with('4')) {
            let said = format!("{name} speaks iWARP; InfiniBand or RoCE is needed");
            return Err(RdmaAbsent::NoPort { said });
        }
        let context = Context::open(name)?;
        let attr = context.query()?;
        let port = usable_port(&context, name, attr.phys_port_cnt, choice)?;
        let domain = Domain::new(&context)?;
        let count = |number: i32| u32::try_from(number).unwrap_or(0);
        let small = |number: i32| u8::try_from(number.clamp(0, 16)).unwrap_or(0);
        // Some devices take fewer pieces in a read.
        let pieces = [attr.max_sge, attr.max_sge_rd].map(count);
        let pieces = pieces.into_iter().filter(|pieces| *pieces > 0).min().unwrap_or(1);
        let firmware = attr.fw_ver.iter().map(|byte| byte.cast_unsigned());
        let firmware: Vec<u8> = firmware.take_while(|byte| *byte != 0).collect();
        let mtu = u8::try_from(port.attr.active_mtu.clamp(1, 5)).unwrap_or(1);
        let info = RdmaInfo {
            device: name.to_owned(),
            firmware: String::from_utf8_lossy(&firmware).into_owned(),
            port: port.number,
            ethernet: port.attr.link_layer == sys::LINK_ETHERNET,
            gid_index: port.gid_index,
            gid: port.gid,
            mtu: 128 << mtu,
            max_pieces: pieces,
            max_queue: count(attr.max_qp_wr),
            max_message_bytes: u64::from(port.attr.max_msg_sz.max(4096)),
            reads_out: small(attr.max_qp_init_rd_atom).max(1),
            dmabuf: sys::functions().is_ok_and(|all| all.ibv_reg_dmabuf_mr.is_some()),
        };
        let opened = Opened {
            domain,
            info,
            lid: port.attr.lid,
            mtu,
            reads_in: small(attr.max_qp_rd_atom).max(1),
            max_cqe: count(attr.max_cqe),
            traffic_class: choice.traffic_class,
        };
        Ok(Self { opened: Arc::new(opened) })
    }

    /// What was opened.
    #[must_use]
    pub fn info(&self) -> &RdmaInfo {
        &self.opened.info
    }
}

impl Opened {
    pub(super) fn context(&self) -> &Arc<Context> {
        &self.domain.context
    }

    /// A queue pair as big as wished, or as the device allows.
    pub(super) fn queue_pair(
        &self,
        wish: sys::QpCap,
        channel: Option<&Arc<verbs::Channel>>,
    ) -> Result<QueuePair, VerbError> {
        let info = &self.info;
        let mut cap = sys::QpCap {
            max_send_wr: wish
                .max_send_wr
                .min(info.max_queue)
                .min(self.max_cqe.saturating_sub(1))
                .max(1),
            max_send_sge: wish.max_send_sge.min(info.max_pieces).max(1),
            // Nothing is received, but some devices want room for it.
            max_recv_wr: 1,
            max_recv_sge: 1,
            max_inline_data: wish.max_inline_data,
        };
        // When a queue pair breaks, each operation completes, signalled or not.
        let entries = cap.max_send_wr + 1;
        let mut completions = Completions::new(self.context(), entries, channel)?;
        loop {
            match QueuePair::new(&self.domain, completions, cap) {
                Ok(mut made) => {
                    let room = made.completions.entries().saturating_sub(1).max(1);
                    made.cap.max_send_wr = made.cap.max_send_wr.min(cap.max_send_wr).min(room);
                    return Ok(made);
                }
                Err((error, again)) => {
                    // Devices do not say what was too much; the three limits depend on each other.
                    let smaller = sys::QpCap {
                        max_inline_data: cap.max_inline_data / 2,
                        max_send_sge: if cap.max_inline_data == 0 {
                            (cap.max_send_sge / 2).max(1)
                        } else {
                            cap.max_send_sge
                        },
                        max_send_wr: if cap.max_inline_data == 0 && cap.max_send_sge == 1 {
                            (cap.max_send_wr / 2).max(1)
                        } else {
                            cap.max_send_wr
                        },
                        ..cap
                    };
                    if smaller == cap {
                        return Err(error);
                    }
                    tracing::debug!("{error} with {cap:?}; trying {smaller:?}");
                    (cap, completions) = (smaller, again);
                }
            }
        }
    }
}

fn usable_port(
    context: &Context,
    name: &str,
    ports: u8,
    choice: &RdmaChoice,
) -> Result<Port, RdmaAbsent> {
    let mut said = Vec::new();
    let numbers = match choice.port {
        Some(number) => number..=number,
        None => 1..=ports,
    };
    for number in numbers {
        let attr = match context.query_port(number) {
            Ok(attr) => attr,
            Err(error) => {
                said.push(format!("port {number}: {error}"));
                continue;
            }
        };
        if attr.state != sys::PORT_ACTIVE {
            said.push(format!("port {number} is not active (state {})", attr.state));
            continue;
        }
        match address(context, name, number, &attr, choice) {
            Some((gid_index, gid)) => return Ok(Port { number, attr, gid_index, gid }),
            None => said.push(format!("port {number} has no address")),
        }
    }
    Err(RdmaAbsent::NoPort { said: format!("{name}: {}", said.join(", ")) })
}

fn address(
    context: &Context,
    name: &str,
    port: u8,
    attr: &sys::PortAttr,
    choice: &RdmaChoice,
) -> Option<(u8, [u8; 16])> {
    let gid = |index| context.query_gid(port, index).ok().map(|gid| gid.0);
    let first = (attr.link_layer == sys::LINK_INFINIBAND).then_some(0);
    let named = choice.gid_index.or(first);
    if let Some(index) = named {
        return gid(index).map(|gid| (index, gid));
    }
    let len = u8::try_from(attr.gid_tbl_len.clamp(0, 255)).unwrap_or(u8::MAX);
    let kind = |index| {
        let text = system(name, &format!("ports/{port}/gid_attrs/types/{index}"));
        text.map_or(GidKind::Unknown, |text| GidKind::parse(&text))
    };
    let table: Vec<_> =
        (0..len).filter_map(|index| Some((index, gid(index)?, kind(index)))).collect();
    let best = gid::best(&table)?;
    table.iter().find(|(index, ..)| *index == best).map(|(index, gid, _)| (*index, *gid))
}

/// What the system says about a device.
fn system(device: &str, what: &str) -> Option<String> {
    let path: PathBuf = ["/sys/class/infiniband", device, what].iter().collect();
    fs::read_to_string(path).ok()
}

impl TransferError {
    /// A verb that failed.
    pub(super) fn verb(kind: crate::ErrorKind, error: VerbError) -> Self {
        error.into_transfer(kind)
    }
}
