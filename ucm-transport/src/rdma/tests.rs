//! What wants a look inside: layouts against the installed header, and devices that refuse.
//!
//! These run in the guest of `cargo xtask rdma-vm`, one at a time; elsewhere they say why not.

use std::{
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use super::*;
use crate::{
    Access, Addr, Completion, ErrorKind, Exports, Hold, Memory, Quiesce, RegionId, Secret,
    TcpServer, TcpServerConfig, Ticket, Transfer, TransferEngine, TransferPlan, testing::WATCHDOG,
};

/// Calls that are to fail.
pub(super) mod faults {
    use std::sync::atomic::{AtomicU32, Ordering};

    /// So many times a queue pair is not destroyed.
    pub(in crate::rdma) static REFUSED_DESTROYS: AtomicU32 = AtomicU32::new(0);

    pub(in crate::rdma) fn takes(fault: &AtomicU32) -> bool {
        let less = |left: u32| left.checked_sub(1);
        fault.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok()
    }
}

/// A text with what the C compiler says of the header: `struct.field offset`, `struct size`.
const LAYOUT: &str = "UCM_VERBS_LAYOUT";

#[test]
fn layouts_are_those_of_the_header() {
    let ours = sys::layout();
    let Ok(file) = std::env::var(LAYOUT) else {
        println!("SKIP no {LAYOUT}: cargo xtask rdma-vm makes it from the installed header");
        return;
    };
    let theirs = std::fs::read_to_string(&file).unwrap();
    let theirs: std::collections::HashMap<&str, usize> = theirs
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(name, number)| (name, number.parse().unwrap()))
        .collect();
    assert!(ours.len() > 70, "{}", ours.len());
    for (name, number) in ours {
        assert_eq!(theirs.get(name.as_str()), Some(&number), "{name}");
    }
    for (name, number) in sys::constants() {
        assert_eq!(theirs.get(name), Some(&number), "{name}");
    }
}

const LEN: usize = 1 << 20;

/// An owner whose adapter says nothing: it lets requests fall, and ours asks again and again.
///
/// A software adapter does its work while it is told of it, so nothing else is ever under way.
struct Silent {
    server: TcpServer,
    owner: RdmaOwner,
    engine: RdmaEngine,
    from: RegionId,
    target: Memory,
    to: RegionId,
}

impl Silent {
    fn new() -> Option<Self> {
        let device = match RdmaDevice::open(&RdmaChoice::default()) {
            Ok(device) => device,
            Err(absent) => {
                println!("SKIP {absent}");
                return None;
            }
        };
        let owner = RdmaOwner::builder(&device).build().unwrap();
        let secret = Secret::new(b"a secret for tests only").unwrap();
        let service = owner.service(Arc::new(Exports::default()));
        let config = TcpServerConfig::new(secret.clone());
        let server = TcpServer::bind("127.0.0.1:0".parse().unwrap(), config, service).unwrap();
        let source = Memory::host(LEN).unwrap();
        source.write(0, &vec![1; LEN]).unwrap();
        let token = owner.export(source, Access::ReadWrite).unwrap();
        let engine = RdmaEngine::builder(&device).build().unwrap();
        let peer = engine.connect(server.address(), &secret, soon()).unwrap();
        let from = engine.attach(&peer, token, soon()).unwrap();
        let target = Memory::host(LEN).unwrap();
        let to = engine.register(target.clone()).unwrap();
        // Ready to be connected, and not connected: it hears nothing.
        owner.with_pairs(|pair| {
            let route = pair.route.unwrap();
            let mut reset = sys::QpAttr::default();
            pair.modify(&mut reset, sys::QP_STATE).unwrap();
            pair.init(route.port, verbs::Rights::ReadWrite).unwrap();
        });
        Some(Self { server, owner, engine, from, target, to })
    }

    /// Lets it hear again: it answers what is asked once more.
    fn speak(&self) {
        self.owner.with_pairs(|pair| {
            // The beacon was answered by one packet.
            let mut route = pair.route.unwrap();
            route.their_psn = (route.their_psn + 1) & 0xff_ffff;
            pair.connect(&route).unwrap();
        });
    }

    fn item(&self, to: RegionId) -> Transfer {
        let at = |region| Addr { region, offset: 0 };
        Transfer { src: at(self.from), dst: at(to), len: LEN as u64 }
    }

    fn submit(&self, item: Transfer, deadline: Instant) -> Ticket {
        let holds: Vec<Hold> = vec![Box::new(())];
        self.engine.submit_until(TransferPlan { items: vec![item], holds }, deadline).unwrap()
    }

    fn ends(&self) -> Vec<(Ticket, Result<u64, ErrorKind>, usize)> {
        let mut ends = Vec::new();
        self.engine.poll(&mut ends);
        let kind = |end: Completion| {
            (end.ticket, end.result.map_err(|error| error.kind()), end.holds.len())
        };
        ends.into_iter().map(kind).collect()
    }
}

fn soon() -> Instant {
    Instant::now() + WATCHDOG
}

fn bytes(memory: &Memory) -> Vec<u8> {
    let mut all = vec![0; memory.len()];
    memory.read(0, &mut all).unwrap();
    all
}

/// Uses the memory for something else while the owner goes on, for longer than it takes to ask again.
fn reuse(target: &Memory, speak: impl FnOnce()) {
    let fresh = vec![7; LEN];
    target.write(0, &fresh).unwrap();
    speak();
    for _ in 0..150 {
        assert!(bytes(target) == fresh, "a byte of the old read");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A request that is not answered for a while is answered when it is asked again: what the tests
/// below rest on.
#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn a_silent_owner_answers_later() {
    let Some(silent) = Silent::new() else { return };
    let ticket = silent.submit(silent.item(silent.to), soon());
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(silent.ends(), []);
    silent.speak();
    silent.engine.quiesce(Quiesce::All, soon()).unwrap();
    assert_eq!(silent.ends(), [(ticket, Ok(LEN as u64), 1)]);
    assert_eq!(bytes(&silent.target), vec![1; LEN]);
    assert_eq!(silent.engine.stats().connected, 1);
}

/// Mutants seen to fail: a queue pair that lives on when its plan was told as ended.
#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn a_cancelled_read_writes_nothing_any_more() {
    let Some(silent) = Silent::new() else { return };
    let ticket = silent.submit(silent.item(silent.to), soon());
    assert_eq!(silent.engine.deregister(silent.to).unwrap_err().kind(), ErrorKind::Busy);
    assert!(silent.engine.cancel(ticket));
    assert!(!silent.engine.cancel(ticket), "it has ended");
    assert_eq!(silent.ends(), [(ticket, Err(ErrorKind::Cancelled), 1)]);
    reuse(&silent.target, || silent.speak());
    silent.engine.deregister(silent.to).unwrap();
}

#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn a_read_past_its_deadline_writes_nothing_any_more() {
    let Some(silent) = Silent::new() else { return };
    let ticket = silent.submit(silent.item(silent.to), Instant::now() + Duration::from_millis(40));
    silent.engine.quiesce(Quiesce::All, soon()).unwrap();
    assert_eq!(silent.ends(), [(ticket, Err(ErrorKind::Timeout), 1)]);
    reuse(&silent.target, || silent.speak());
}

#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn a_dropped_engine_writes_nothing_any_more() {
    let Some(silent) = Silent::new() else { return };
    silent.submit(silent.item(silent.to), soon());
    let Silent { engine, target, owner, server, .. } = silent;
    drop(engine);
    reuse(&target, || drop((server, owner)));
}

/// Cancelling one plan makes its connection anew; reads of others go on over that one, writes are
/// told. Mutant seen to fail: a read that is not begun again.
#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn other_reads_survive_a_cancel() {
    let Some(silent) = Silent::new() else { return };
    let mine = silent.engine.register(Memory::host(LEN).unwrap()).unwrap();
    let other = Memory::host(LEN).unwrap();
    let to_other = silent.engine.register(other.clone()).unwrap();
    let first = silent.submit(silent.item(silent.to), soon());
    let second = silent.submit(silent.item(to_other), soon());
    let at = |region| Addr { region, offset: 0 };
    let write = Transfer { src: at(mine), dst: at(silent.from), len: 10 };
    let third = silent.submit(write, soon());
    assert!(silent.engine.cancel(first));
    silent.engine.quiesce(Quiesce::All, soon()).unwrap();
    let mut ends = silent.ends();
    ends.sort_by_key(|(ticket, ..)| *ticket);
    let wanted = [
        (first, Err(ErrorKind::Cancelled), 1),
        (second, Ok(LEN as u64), 1),
        (third, Err(ErrorKind::PeerDown), 1),
    ];
    assert_eq!(ends, wanted);
    assert!(bytes(&other) == vec![1; LEN]);
    let stats = silent.engine.stats();
    assert_eq!((stats.resent, stats.connected, stats.broken), (1, 2, 1), "{stats:?}");
}

/// An owner that stays silent is found out by the adapter, and one that left by its control
/// connection; both are typed. Mutant seen to fail: the end of a control connection is not heard.
#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn a_peer_that_does_not_answer_is_typed() {
    let Some(silent) = Silent::new() else { return };
    let at = |region| Addr { region, offset: 0 };
    let write = Transfer { src: at(silent.to), dst: at(silent.from), len: 10 };
    let ticket = silent.submit(write, soon());
    let begin = Instant::now();
    silent.engine.quiesce(Quiesce::All, soon()).unwrap();
    println!("a silent adapter is found out after {:?}", begin.elapsed());
    assert_eq!(silent.ends(), [(ticket, Err(ErrorKind::PeerDown), 1)]);
    let Some(silent) = Silent::new() else { return };
    let write = Transfer { src: at(silent.to), dst: at(silent.from), len: 10 };
    silent.submit(write, soon());
    let begin = Instant::now();
    let Silent { engine, server, .. } = silent;
    drop(server);
    engine.quiesce(Quiesce::All, soon()).unwrap();
    println!("a peer that left is found out after {:?}", begin.elapsed());
    let mut ends = Vec::new();
    engine.poll(&mut ends);
    let error = ends[0].result.clone().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerDown);
    // Not by the adapter, which takes its time.
    assert!(error.to_string().contains("ended the control connection"), "{error}");
}

/// Mutant seen to fail: a beacon that is read and not compared.
#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn a_connection_that_leads_to_somebody_else_is_not_used() {
    let Some(Silent { server, owner, engine, .. }) = Silent::new() else { return };
    owner.beacon().write(5, &[0; 20]).unwrap();
    let secret = Secret::new(b"a secret for tests only").unwrap();
    let error = engine.connect(server.address(), &secret, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerDown);
    assert!(error.to_string().contains("somebody else"), "{error}");
}

/// Mutants seen to fail: a plan told as ended when its queue pair was not destroyed; a quarantine
/// whose plans never end.
#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn nothing_ends_before_its_queue_pair_is_destroyed() {
    let Some(silent) = Silent::new() else { return };
    let engine = &silent.engine;
    let ticket = silent.submit(silent.item(silent.to), soon());
    // The tries of the cancel, of the thread, and some more.
    faults::REFUSED_DESTROYS.store(u32::MAX, Ordering::SeqCst);
    assert!(engine.cancel(ticket));
    let short = Instant::now() + Duration::from_millis(300);
    let stuck = engine.quiesce(Quiesce::Ticket(ticket), short).unwrap_err();
    assert_eq!(stuck.kind(), ErrorKind::Stuck);
    assert_eq!((silent.ends().len(), engine.stats().quarantined), (0, 1));
    assert_eq!(engine.deregister(silent.to).unwrap_err().kind(), ErrorKind::Busy);
    // Others go on meanwhile, over another connection.
    let other = engine.register(Memory::host(LEN).unwrap()).unwrap();
    let second = silent.submit(silent.item(other), soon());
    engine.quiesce(Quiesce::Ticket(second), soon()).unwrap();
    assert_eq!(silent.ends(), [(second, Ok(LEN as u64), 1)]);
    // The device gives in.
    faults::REFUSED_DESTROYS.store(0, Ordering::SeqCst);
    engine.quiesce(Quiesce::All, soon()).unwrap();
    assert_eq!(silent.ends(), [(ticket, Err(ErrorKind::Cancelled), 1)]);
    assert_eq!(engine.stats().quarantined, 0);
    engine.deregister(silent.to).unwrap();
}

/// A dropped engine whose device does not give a queue pair back keeps the memory for ever.
#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn memory_of_an_undead_queue_pair_outlives_the_engine() {
    let Some(silent) = Silent::new() else { return };
    let kept = Arc::new(());
    let holds: Vec<Hold> = vec![Box::new(Arc::clone(&kept))];
    let items = vec![silent.item(silent.to)];
    silent.engine.submit(TransferPlan { items, holds }).unwrap();
    let before = verbs::LEAKED.load(Ordering::SeqCst);
    faults::REFUSED_DESTROYS.store(u32::MAX, Ordering::SeqCst);
    drop(silent.engine);
    faults::REFUSED_DESTROYS.store(0, Ordering::SeqCst);
    assert_eq!(Arc::strong_count(&kept), 2, "the hold is not given back");
    assert!(verbs::LEAKED.load(Ordering::SeqCst) > before);
}

/// A device that gives less than was asked for gets smaller requests, down to one.
#[test]
#[ignore = "wants an RDMA device: cargo xtask rdma-vm"]
fn limits_are_those_of_the_device() {
    let Some(Silent { engine, .. }) = Silent::new() else { return };
    let opened = &engine.device().opened;
    let wish = sys::QpCap {
        max_send_wr: u32::MAX,
        max_send_sge: u32::MAX,
        max_inline_data: 1 << 20,
        ..Default::default()
    };
    let made = opened.queue_pair(wish, None).unwrap();
    let info = engine.device().info();
    assert!(made.cap.max_send_wr >= 1 && made.cap.max_send_wr <= info.max_queue);
    assert!(made.cap.max_send_sge >= 1);
    println!("{:?} of {info:?}", made.cap);
}
