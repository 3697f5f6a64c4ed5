//! What the transfer engines found: each one that is built in moves some bytes.
//!
//! **Invariant:** a verdict comes from bytes that were moved and compared, not from what should be.

use ucm_data::{PageTier, Segments, SegmentsConfig};
use ucm_transport::{
    Access, Addr, ErrorKind, HostEngine, Memory, RegionId, ShmEngine, Transfer, TransferEngine,
    TransferError, TransferPlan,
};

use super::{Finding, Verdict};

const LEN: usize = 64 << 10;

pub(crate) fn all() -> Vec<Finding> {
    vec![host(), shm(), tcp(), rdma()]
}

fn finding(
    what: &'static str,
    result: Result<(), TransferError>,
    seen: &str,
    used: &str,
    remedy: &str,
) -> Finding {
    let (verdict, seen, used, remedy) = match result {
        Ok(()) => (Verdict::Good, seen.to_owned(), used, ""),
        Err(error) => (Verdict::Degraded, error.to_string(), "cannot be used", remedy),
    };
    Finding { what, verdict, seen, used: used.into(), remedy: remedy.into() }
}

fn host() -> Finding {
    let moved = || {
        let engine = HostEngine::builder().build()?;
        let src = engine.register(source()?)?;
        compare(&engine, src)
    };
    let used = "copies between the cache and host memory";
    finding("engine host", moved(), "copied 64 KiB", used, "")
}

fn shm() -> Finding {
    let failed =
        |error: ucm_data::DataError| TransferError::new(ErrorKind::Registration, error.to_string());
    let moved = || {
        let segments = Segments::create(&SegmentsConfig {
            prefer: PageTier::Small,
            segment_bytes: LEN as u64,
            threads: 1,
            ..SegmentsConfig::new(LEN as u64, 1)
        })
        .map_err(failed)?;
        let owner = segments.map().map_err(failed)?;
        owner.write(0, 0, &pattern()).map_err(failed)?;
        let engine = ShmEngine::builder().build()?;
        let peer = engine.add_peer(Access::Read)?;
        let regions = engine.attach_segments(peer, &segments)?;
        let none = || TransferError::new(ErrorKind::Registration, "a pool without segments");
        compare(&engine, *regions.first().ok_or_else(none)?)
    };
    finding(
        "engine shm",
        moved(),
        "read 64 KiB out of a segment mapped a second time",
        "reads between peers of this node",
        "allow memfd_create and mmap (seccomp profile of the container)",
    )
}

#[cfg(feature = "tcp")]
fn tcp() -> Finding {
    use std::{net::SocketAddr, sync::Arc, time::Duration, time::Instant};

    use ucm_transport::{Exports, Secret, TcpEngine, TcpServer, TcpServerConfig};

    let moved = || {
        let secret = Secret::new(b"of this process alone, for a moment")?;
        let exports = Exports::default();
        let token = exports.export(source()?, Access::Read)?;
        let local = SocketAddr::from(([127, 0, 0, 1], 0));
        let config = TcpServerConfig::new(secret.clone());
        let server = TcpServer::bind(local, config, Arc::new(exports))?;
        let engine = TcpEngine::builder().timeout(Duration::from_secs(5)).build()?;
        let soon = Instant::now() + Duration::from_secs(5);
        let peer = engine.connect(server.address(), &secret, soon)?;
        let src = engine.attach(&peer, &token.0, LEN as u64)?;
        compare(&engine, src)
    };
    finding(
        "engine tcp",
        moved(),
        "read 64 KiB over loopback, protocol version 1",
        "reads and writes between nodes",
        "allow sockets on the loopback interface",
    )
}

#[cfg(not(feature = "tcp"))]
fn tcp() -> Finding {
    Finding {
        what: "engine tcp",
        verdict: Verdict::Absent,
        seen: "not built in".into(),
        used: "needed between nodes only".into(),
        remedy: "build with the feature tcp".into(),
    }
}

/// Reads over the adapter from this process's own memory.
#[cfg(feature = "rdma")]
fn rdma() -> Finding {
    use std::{net::SocketAddr, sync::Arc, time::Duration, time::Instant};

    use ucm_transport::{
        Exports, RdmaChoice, RdmaDevice, RdmaEngine, RdmaOwner, Secret, TcpServer, TcpServerConfig,
    };

    let device = match RdmaDevice::open(&RdmaChoice::default()) {
        Ok(device) => device,
        Err(absent) => {
            return Finding {
                what: "engine rdma",
                verdict: Verdict::Absent,
                seen: absent.reason(),
                used: "peers on other nodes are reached by tcp".into(),
                remedy: absent.remedy(),
            };
        }
    };
    let moved = || {
        let secret = Secret::new(b"of this process alone, for a moment")?;
        let owner = RdmaOwner::builder(&device).build()?;
        let token = owner.export(source()?, Access::Read)?;
        let local = SocketAddr::from(([127, 0, 0, 1], 0));
        let config = TcpServerConfig::new(secret.clone());
        let service = owner.service(Arc::new(Exports::default()));
        let server = TcpServer::bind(local, config, service)?;
        let engine = RdmaEngine::builder(&device).timeout(Duration::from_secs(5)).build()?;
        let soon = Instant::now() + Duration::from_secs(5);
        let peer = engine.connect(server.address(), &secret, soon)?;
        let src = engine.attach(&peer, token, soon)?;
        compare(&engine, src)
    };
    let info = device.info();
    let seen = format!(
        "read 64 KiB over {} port {} ({}, packets of {} bytes, {} pieces an operation{})",
        info.device,
        info.port,
        if info.ethernet { "RoCE" } else { "InfiniBand" },
        info.mtu,
        info.max_pieces,
        if info.dmabuf { ", dmabuf if the kernel agrees" } else { ", no dmabuf" },
    );
    finding(
        "engine rdma",
        moved(),
        &seen,
        "reads and writes between nodes",
        "raise the limit of locked memory (ulimit -l unlimited), allow /dev/infiniband",
    )
}

#[cfg(not(feature = "rdma"))]
fn rdma() -> Finding {
    let devices: Vec<String> = std::fs::read_dir("/sys/class/infiniband")
        .map(|dir| {
            dir.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        })
        .unwrap_or_default();
    let none = devices.is_empty();
    Finding {
        what: "engine rdma",
        verdict: Verdict::Absent,
        seen: if none { "no device, and not built in".into() } else { devices.join(", ") },
        used: "built without the rdma engine".into(),
        remedy: if none { String::new() } else { "build with the feature rdma".into() },
    }
}

fn pattern() -> Vec<u8> {
    (0..LEN).map(|at| (at as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes()[5]).collect()
}

fn source() -> Result<Memory, TransferError> {
    let memory = Memory::host(LEN)?;
    memory.write(0, &pattern())?;
    Ok(memory)
}

/// Reads the pattern through an engine.
fn compare(engine: &dyn TransferEngine, src: RegionId) -> Result<(), TransferError> {
    let target = Memory::host(LEN)?;
    let dst = engine.register(target.clone())?;
    let at = |region| Addr { region, offset: 0 };
    let items = vec![Transfer { src: at(src), dst: at(dst), len: LEN as u64 }];
    let plan = TransferPlan { items, holds: Vec::new() };
    engine.submit(plan).map_err(|rejected| rejected.error)?;
    let soon = std::time::Instant::now() + std::time::Duration::from_secs(5);
    engine.quiesce(ucm_transport::Quiesce::All, soon)?;
    let mut ends = Vec::new();
    engine.poll(&mut ends);
    let lost = || TransferError::new(ErrorKind::Failed, "the copy did not end");
    ends.pop().ok_or_else(lost)?.result?;
    let mut bytes = vec![0; LEN];
    target.read(0, &mut bytes)?;
    if bytes == pattern() {
        Ok(())
    } else {
        Err(TransferError::new(ErrorKind::Failed, "wrong bytes arrived"))
    }
}
