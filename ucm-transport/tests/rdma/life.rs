//! What stays behind: nothing. And what idling costs: nothing.

use ucm_transport::{Access, TransferEngine};

use crate::kit::{Far, Near, device, eventually, exported, item, pattern, read, secret, soon};

fn count(dir: &str) -> usize {
    std::fs::read_dir(dir).unwrap().count()
}

fn maps() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count()
}

/// A36: connections that come and go leave no thread, queue pair or descriptor.
#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn connections_leave_nothing_behind() {
    let Some(device) = device() else { return };
    let far = Far::new(&device);
    let near = Near::new(&device, far.server.address());
    let state = || (count("/proc/self/fd"), count("/proc/self/task"));
    let before = state();
    for round in 0..60 {
        let peer = near.engine.connect(far.server.address(), &secret(), soon()).unwrap();
        let token = far.owner.export(crate::kit::filled(&pattern(1, 5_000)), Access::Read).unwrap();
        let from = near.engine.attach(&peer, token, soon()).unwrap();
        let (ours, to) = near.local(5_000);
        near.run(vec![item((from, 0), (to, 0), 5_000)]).unwrap();
        assert!(read(&ours) == pattern(1, 5_000), "round {round}");
        near.engine.disconnect(peer);
        near.engine.deregister(from).unwrap();
        near.engine.deregister(to).unwrap();
        far.owner.revoke(token).unwrap();
    }
    eventually("the owner's ends", || far.owner.stats().connected == 1);
    eventually("descriptors and threads", || state() == before);
    assert_eq!((far.owner.stats().exports, far.owner.stats().undead), (0, 0));
}

/// A19: registering and giving back leaves the address space as it was.
#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn registrations_leave_nothing_behind() {
    let Some(device) = device() else { return };
    let far = Far::new(&device);
    let near = Near::new(&device, far.server.address());
    let memory = crate::kit::filled(&pattern(1, 4 << 20));
    let mut random = crate::kit::Random(1);
    let before = maps();
    for _ in 0..3_000 {
        let (from, len) = (random.below(2 << 20), random.below(1 << 20) + 1);
        let id = near.engine.register(memory.part(from, len).unwrap()).unwrap();
        near.engine.deregister(id).unwrap();
    }
    let after = maps();
    assert!(after <= before + 2, "{before} mappings became {after}");
}

#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn an_idle_engine_sleeps() {
    let Some(device) = device() else { return };
    let far = Far::new(&device);
    let near = Near::new(&device, far.server.address());
    let (_theirs, from) = exported(&far, &near, &pattern(1, 5_000), Access::Read);
    let (_ours, to) = near.local(5_000);
    near.run(vec![item((from, 0), (to, 0), 5_000)]).unwrap();
    let last = std::cell::Cell::new(u64::MAX);
    // Two looks apart that see the same number: it went to sleep and stayed there.
    eventually("sleep", || {
        let now = near.engine.stats().sleeps;
        let before = last.replace(now);
        std::thread::sleep(std::time::Duration::from_millis(100));
        before == now
    });
    // And wakes for what comes.
    assert_eq!(near.run(vec![item((from, 0), (to, 0), 5_000)]).unwrap(), 5_000);
}
