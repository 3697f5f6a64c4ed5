//! What is refused, before it begins or by the peer's adapter.

use std::{
    os::fd::AsFd,
    sync::Arc,
    time::{Duration, Instant},
};

use ucm_data::Token;
use ucm_transport::{
    Access, ErrorKind, Exports, Location, Memory, Quiesce, RdmaChoice, RdmaDevice, RdmaEngine,
    RdmaOwner, Secret, TcpServer, TcpServerConfig, TransferEngine, TransferPlan,
};

use crate::kit::{Far, Near, device, exported, filled, item, pattern, read, secret, soon};

/// The keys of a revoked region name nothing any more: typed, and everything else goes on.
///
/// Mutants seen to fail: `revoke` that leaves the memory registered.
#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn a_revoked_region_is_stale_and_is_not_reached() {
    let Some(device) = device() else { return };
    let far = Far::new(&device);
    let near = Near::new(&device, far.server.address());
    let theirs = filled(&pattern(1, 10_000));
    let token = far.owner.export(theirs.clone(), Access::ReadWrite).unwrap();
    let (old, (_keep, good)) =
        (near.attach(token), exported(&far, &near, &pattern(2, 10_000), Access::Read));
    let (ours, to) = near.local(10_000);
    far.owner.revoke(token).unwrap();
    assert_eq!(far.owner.revoke(token).unwrap_err().kind(), ErrorKind::StaleRegion);
    // Reads of others beside it begin again by themselves.
    let (bad, fine) = (
        TransferPlan { items: vec![item((to, 0), (old, 0), 10_000)], holds: vec![] },
        TransferPlan { items: vec![item((good, 0), (to, 0), 10_000)], holds: vec![] },
    );
    let (bad, fine) = (near.engine.submit(bad).unwrap(), near.engine.submit(fine).unwrap());
    near.engine.quiesce(Quiesce::All, soon()).unwrap();
    let mut ends = Vec::new();
    near.engine.poll(&mut ends);
    let end = |ticket| ends.iter().find(|end| end.ticket == ticket).unwrap().result.clone();
    assert_eq!(end(bad).unwrap_err().kind(), ErrorKind::Stale);
    assert_eq!(end(fine).unwrap(), 10_000);
    assert!(read(&ours) == pattern(2, 10_000));
    assert!(read(&theirs) == pattern(1, 10_000), "written after the revocation");
    let error = near.run(vec![item((old, 0), (to, 0), 100)]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
    let error = near.engine.attach(&near.peer, token, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
    // Exported again, it has another name and other keys.
    let again = near.attach(far.owner.export(theirs, Access::Read).unwrap());
    assert_eq!(near.run(vec![item((again, 0), (to, 0), 10_000)]).unwrap(), 10_000);
    assert!(read(&ours) == pattern(1, 10_000));
}

#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn what_makes_no_sense_is_refused_before_it_begins() {
    let Some(device) = device() else { return };
    let far = Far::new(&device);
    let near = Near::new(&device, far.server.address());
    let (theirs, their_id) = exported(&far, &near, &pattern(1, 5_000), Access::Read);
    let (_ours, our_id) = near.local(5_000);
    let refused = |items| near.run(items).unwrap_err().kind();
    let write = item((our_id, 0), (their_id, 0), 10);
    assert_eq!(refused(vec![write]), ErrorKind::Denied, "exported for reading only");
    assert_eq!(refused(vec![item((our_id, 0), (our_id, 100), 10)]), ErrorKind::Unsupported);
    assert_eq!(refused(vec![item((their_id, 4_999), (our_id, 0), 2)]), ErrorKind::OutOfBounds);
    let both = vec![item((their_id, 0), (our_id, 0), 10), item((their_id, 50), (our_id, 9), 10)];
    assert_eq!(refused(both), ErrorKind::Invalid, "overlapping destinations");
    assert!(read(&theirs) == pattern(1, 5_000));
    assert_eq!(near.engine.stats().broken, 0);
    let unknown = near.engine.attach(&near.peer, Token([1; 16]), soon()).unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::Stale);
    let elsewhere = Memory::host(4096).unwrap();
    // SAFETY: host memory that only claims to be a device's; it is refused.
    let elsewhere = unsafe {
        Memory::from_raw(elsewhere.as_ptr(), 4096, Location::Cuda(0), Arc::new(elsewhere.clone()))
    };
    assert_eq!(near.engine.register(elsewhere.clone()).unwrap_err().kind(), ErrorKind::Unsupported);
    let error = far.owner.export(elsewhere, Access::Read).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

/// A file that is no dmabuf: a clean error, of the library, the kernel or the adapter.
#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn dmabuf_or_a_reason() {
    let Some(device) = device() else { return };
    let far = Far::new(&device);
    let near = Near::new(&device, far.server.address());
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    let memory = Memory::host(4096).unwrap();
    let kinds = [ErrorKind::Unsupported, ErrorKind::Registration];
    let error = near.engine.register_dmabuf(memory.clone(), file.as_fd(), 0).unwrap_err();
    assert!(kinds.contains(&error.kind()), "{error}");
    let error = far.owner.export_dmabuf(memory, file.as_fd(), 0, Access::Read).unwrap_err();
    assert!(kinds.contains(&error.kind()), "{error}");
    println!("{error}");
}

/// A piece in the middle that cannot be registered: the others are given back.
#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn registration_is_all_or_nothing() {
    const M: usize = 1 << 20;
    let Some(device) = device() else { return };
    let far = Far::new(&device);
    let near = Near::with(RdmaEngine::builder(&device).piece_bytes(2 * M), far.server.address());
    let pinned = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        status.lines().find(|line| line.starts_with("VmPin")).unwrap().to_owned()
    };
    let before = pinned();
    let hole = hole::Hole::new(16 * M, 9 * M);
    let error = near.engine.register(hole.memory()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Registration);
    assert!(error.to_string().contains("piece 4 of"), "{error}");
    let error = far.owner.export(hole.memory(), Access::Read).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Registration, "{error}");
    assert_eq!(pinned(), before, "pieces stayed registered");
    let (memory, _id) = near.local(16 * M);
    assert_ne!(pinned(), before, "{}", memory.len());
}

/// Memory with a page that is not there.
mod hole {
    use std::{ptr::NonNull, sync::Arc};

    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
    use ucm_transport::{Location, Memory};

    pub(super) struct Hole(Arc<Mapping>);

    struct Mapping(NonNull<std::ffi::c_void>, usize);

    // SAFETY: an address and a length; nobody touches the bytes.
    unsafe impl Send for Mapping {}
    // SAFETY: as above.
    unsafe impl Sync for Mapping {}

    impl Hole {
        /// Begins at a multiple of 2 MiB.
        pub(super) fn new(len: usize, at: usize) -> Self {
            let all = len + (2 << 20);
            let flags = MapFlags::PRIVATE;
            // SAFETY: a new mapping.
            let base = unsafe {
                mmap_anonymous(std::ptr::null_mut(), all, ProtFlags::READ | ProtFlags::WRITE, flags)
            };
            let mapping = Mapping(NonNull::new(base.unwrap()).unwrap(), all);
            let this = Self(Arc::new(mapping));
            // SAFETY: inside the mapping.
            let page = unsafe { this.start().add(at) };
            // SAFETY: a page of ours that nobody uses.
            unsafe { munmap(page.as_ptr().cast(), 4096) }.unwrap();
            this
        }

        fn start(&self) -> NonNull<u8> {
            let base = self.0.0.cast::<u8>();
            let skip = base.addr().get().next_multiple_of(2 << 20) - base.addr().get();
            // SAFETY: the mapping is 2 MiB longer than what is used.
            unsafe { base.add(skip) }
        }

        pub(super) fn memory(&self) -> Memory {
            let len = self.0.1 - (2 << 20);
            let keep = Arc::clone(&self.0) as Arc<_>;
            // SAFETY: mapped for as long as `keep` lives but for the hole; registering it is refused.
            unsafe { Memory::from_raw(self.start(), len, Location::Host, keep) }
        }
    }

    impl Drop for Mapping {
        fn drop(&mut self) {
            // SAFETY: our mapping, and nothing else in the hole; unmapped once.
            let _ = unsafe { munmap(self.0.as_ptr(), self.1) };
        }
    }
}

#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn strangers_are_told_why() {
    let Some(device) = device() else { return };
    let far = Far::new(&device);
    let engine = RdmaEngine::builder(&device).build().unwrap();
    let connect = |address, secret: &Secret| engine.connect(address, secret, soon());
    let wrong = Secret::new(b"another secret, not theirs").unwrap();
    let error = connect(far.server.address(), &wrong).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    // A server without an owner.
    let plain = TcpServer::bind(
        "127.0.0.1:0".parse().unwrap(),
        TcpServerConfig::new(secret()),
        Arc::new(Exports::default()),
    )
    .unwrap();
    let error = connect(plain.address(), &secret()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    // Nobody at all, and somebody who says nothing.
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = nobody.local_addr().unwrap();
    let short = Instant::now() + Duration::from_millis(200);
    let error = engine.connect(address, &secret(), short).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PeerDown | ErrorKind::Timeout), "{error}");
    drop(nobody);
    assert_eq!(connect(address, &secret()).unwrap_err().kind(), ErrorKind::PeerDown);
    // No more than so many.
    let few = RdmaOwner::builder(&device).max_connections(1).build().unwrap();
    let server = TcpServer::bind(
        "127.0.0.1:0".parse().unwrap(),
        TcpServerConfig::new(secret()),
        few.service(Arc::new(Exports::default())),
    )
    .unwrap();
    connect(server.address(), &secret()).unwrap();
    assert_eq!(connect(server.address(), &secret()).unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(few.stats().connected, 1);
}

#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn choices_that_cannot_be_are_told() {
    let Some(device) = device() else { return };
    let info = device.info();
    let mut choice = RdmaChoice::default();
    choice.device = Some("no such device".into());
    let absent = RdmaDevice::open(&choice).unwrap_err();
    assert!(absent.reason().contains(&info.device), "{absent}");
    choice.device = Some(info.device.clone());
    choice.port = Some(77);
    let absent = RdmaDevice::open(&choice).unwrap_err();
    assert!(absent.reason().contains("port 77"), "{absent}");
    (choice.port, choice.gid_index) = (Some(info.port), Some(info.gid_index));
    assert_eq!(RdmaDevice::open(&choice).unwrap().info(), info);
    println!("{info:?}");
}
