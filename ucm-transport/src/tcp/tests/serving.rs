//! What an owner decides, and what becomes of it: refusals, generations, writes, calls.
//!
//! **Invariant:** each request that an owner let in ends once for it, with its verdict on the wire.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

use super::kit::{Client, filled, one, pattern, read, serve, soon};
use crate::{
    Access, Addr, ErrorKind, Exports, Memory, Pieces, Refusal, RefusalKind, Request, Serve, Served,
    Session, Transfer, TransferEngine, TransferPlan,
};

#[test]
fn plans_are_scattered_and_gathered_over_several_regions() {
    let exports = Exports::default();
    let server = serve(Arc::new(exports.clone()));
    let client = Client::new(server.address());
    let sources: Vec<Vec<u8>> = (0..3).map(|i| pattern(i, 100_000)).collect();
    let far: Vec<_> = sources.iter().map(|s| client.remote(&exports, &filled(s))).collect();
    let (target, to) = client.local(300_000);
    let mut expected = vec![0; 300_000];
    let mut items = Vec::new();
    for i in 0..900_usize {
        let (which, from, at, len) = (i % 3, i * 101 % 90_000, i * 331, 1 + i % 330);
        let src = Addr { region: far[which], offset: from as u64 };
        let dst = Addr { region: to, offset: at as u64 };
        items.push(Transfer { src, dst, len: len as u64 });
        expected[at..at + len].copy_from_slice(&sources[which][from..from + len]);
    }
    let plan = TransferPlan { items, holds: vec![Box::new(5)] };
    let end = client.engine.transfer(plan, soon()).unwrap();
    assert_eq!((end.result.is_ok(), end.holds.len()), (true, 1));
    assert!(read(&target) == expected);
    assert_eq!(client.engine.stats().exchanges, 1, "one request carries all ranges");
}

#[test]
fn revoked_exports_are_stale_and_others_are_not() {
    let exports = Exports::default();
    let server = serve(Arc::new(exports.clone()));
    let client = Client::new(server.address());
    let (kept, gone) = (filled(&pattern(1, 5000)), filled(&pattern(2, 5000)));
    let token = exports.export(gone.clone(), Access::Read).unwrap();
    let src = client.engine.attach(&client.peer, &token.0, 5000).unwrap();
    let good = client.remote(&exports, &kept);
    let (target, to) = client.local(5000);
    let run = |src, dst| client.engine.transfer(one(src, dst, 5000), soon()).unwrap().result;
    assert_eq!(run(src, to).unwrap(), 5000);
    assert_eq!(run(to, src).unwrap_err().kind(), ErrorKind::Denied, "for reading only");
    assert!(read(&gone) == pattern(2, 5000), "nothing was written");
    exports.revoke(token, soon()).unwrap();
    assert_eq!(run(src, to).unwrap_err().kind(), ErrorKind::Stale);
    assert_eq!(exports.revoke(token, soon()).unwrap_err().kind(), ErrorKind::StaleRegion);
    // The same memory again is another export.
    let again = exports.export(gone, Access::Read).unwrap();
    assert_ne!(again, token);
    assert_eq!(run(src, to).unwrap_err().kind(), ErrorKind::Stale);
    assert_eq!(run(good, to).unwrap(), 5000);
    assert!(read(&target) == pattern(1, 5000));
    // The descriptor says 5000 bytes; the client believes 6000 of it.
    let liar = client.engine.attach(&client.peer, &again.0, 6000).unwrap();
    let (_, six) = client.local(6000);
    let beyond = client.engine.transfer(one(liar, six, 6000), soon()).unwrap().result;
    assert_eq!(beyond.unwrap_err().kind(), ErrorKind::OutOfBounds);
    assert_eq!(client.engine.stats().lanes_closed, 0, "refusals cost no lane");
}

/// One object whose generation and lease the owner checks; counts how its requests end.
struct Owner {
    memory: Memory,
    generation: AtomicU64,
    /// The generation changes while the request is served.
    changes: AtomicU32,
    whole: Arc<AtomicU32>,
    broken: Arc<AtomicU32>,
    sessions: Mutex<Vec<(u64, bool)>>,
}

impl Owner {
    fn new(bytes: &[u8]) -> Arc<Self> {
        Arc::new(Self {
            memory: filled(bytes),
            generation: AtomicU64::new(7),
            changes: AtomicU32::new(0),
            whole: Arc::default(),
            broken: Arc::default(),
            sessions: Mutex::default(),
        })
    }

    fn serve(
        self: &Arc<Self>,
        request: &Request<'_>,
        pieces: &mut Pieces,
    ) -> Result<Served, Refusal> {
        let stale = || Refusal::new(RefusalKind::Stale, "another generation");
        let wanted = u64::from_le_bytes(request.descriptor.try_into().unwrap());
        if self.generation.load(Ordering::SeqCst) != wanted {
            return Err(stale());
        }
        for range in request.ranges {
            pieces.push(&self.memory, range.offset, u64::from(range.len))?;
        }
        let change = self.changes.swap(0, Ordering::SeqCst);
        self.generation.fetch_add(u64::from(change), Ordering::SeqCst);
        let this = Arc::clone(self);
        Ok(Served::asking(move |all| {
            let counter = if all { &this.whole } else { &this.broken };
            counter.fetch_add(1, Ordering::SeqCst);
            if this.generation.load(Ordering::SeqCst) == wanted { Ok(()) } else { Err(stale()) }
        }))
    }
}

struct OwnerService(Arc<Owner>);

impl Serve for OwnerService {
    fn opened(&self, session: &Session) {
        self.0.sessions.lock().unwrap().push((session.id, true));
    }

    fn closed(&self, session: &Session) {
        self.0.sessions.lock().unwrap().push((session.id, false));
    }

    fn read(&self, request: &Request<'_>, pieces: &mut Pieces) -> Result<Served, Refusal> {
        self.0.serve(request, pieces)
    }

    fn write(&self, request: &Request<'_>, pieces: &mut Pieces) -> Result<Served, Refusal> {
        self.0.serve(request, pieces)
    }

    fn call(&self, _: &Session, request: &[u8], reply: &mut Vec<u8>) -> Result<(), Refusal> {
        match request {
            b"panic" => panic!("an owner must not do this"),
            b"no" => return Err(Refusal::new(RefusalKind::Busy, "ä".repeat(2000))),
            b"long" => reply.resize(2 << 20, 1),
            _ => reply.extend(request.iter().rev()),
        }
        Ok(())
    }
}

/// Mutants seen to fail: the trailer's status ignored, `finish` not called.
#[test]
fn a_source_that_changes_while_it_is_sent_is_stale() {
    let owner = Owner::new(&pattern(3, 400_000));
    let server = serve(Arc::new(OwnerService(Arc::clone(&owner))));
    let client = Client::new(server.address());
    let attach = |generation: u64| {
        client.engine.attach(&client.peer, &generation.to_le_bytes(), 400_000).unwrap()
    };
    let (target, to) = client.local(400_000);
    let run = |src| client.engine.transfer(one(src, to, 400_000), soon()).unwrap().result;
    assert_eq!(run(attach(6)).unwrap_err().kind(), ErrorKind::Stale, "another generation");
    assert_eq!(run(attach(7)).unwrap(), 400_000);
    assert!(read(&target) == pattern(3, 400_000));
    owner.changes.store(1, Ordering::SeqCst);
    assert_eq!(run(attach(7)).unwrap_err().kind(), ErrorKind::Stale, "changed meanwhile");
    assert_eq!(run(attach(8)).unwrap(), 400_000);
    let ended = (owner.whole.load(Ordering::SeqCst), owner.broken.load(Ordering::SeqCst));
    assert_eq!(ended, (3, 0), "each request that was let in ended once");
}

#[test]
fn writes_are_checked_at_their_end_too_and_refused_ones_leave_the_lane_usable() {
    let owner = Owner::new(&[0; 200_000]);
    let server = serve(Arc::new(OwnerService(Arc::clone(&owner))));
    let client = Client::new(server.address());
    let attach = |generation: u64| {
        client.engine.attach(&client.peer, &generation.to_le_bytes(), 200_000).unwrap()
    };
    let source = client.engine.register(filled(&pattern(4, 200_000))).unwrap();
    let run = |dst| client.engine.transfer(one(source, dst, 200_000), soon()).unwrap().result;
    assert_eq!(run(attach(6)).unwrap_err().kind(), ErrorKind::Stale);
    assert!(read(&owner.memory) == vec![0; 200_000], "a refused write writes nothing");
    assert_eq!(run(attach(7)).unwrap(), 200_000);
    assert!(read(&owner.memory) == pattern(4, 200_000));
    owner.changes.store(1, Ordering::SeqCst);
    assert_eq!(run(attach(7)).unwrap_err().kind(), ErrorKind::Stale);
    assert_eq!(client.engine.stats().lanes_closed, 0);
}

#[test]
fn calls_are_answered_refused_and_bounded() {
    let owner = Owner::new(&[0; 8]);
    let server = serve(Arc::new(OwnerService(owner)));
    let client = Client::new(server.address());
    let call = |request: &[u8]| client.engine.call(&client.peer, request, soon());
    assert_eq!(call(b"abc").unwrap(), b"cba");
    assert_eq!(call(b"").unwrap(), b"");
    let long = pattern(1, 700_000);
    assert!(call(&long).unwrap().iter().rev().eq(long.iter()));
    let busy = call(b"no").unwrap_err();
    assert_eq!(busy.kind(), ErrorKind::Busy);
    assert!(busy.to_string().len() < 1200, "texts are cut");
    assert_eq!(call(b"long").unwrap_err().kind(), ErrorKind::Failed);
    assert_eq!(call(&vec![0; 2 << 20]).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(client.engine.stats().lanes_closed, 0);
    // A panic of the owner costs the connection, not the server.
    assert_eq!(call(b"panic").unwrap_err().kind(), ErrorKind::PeerDown);
    assert_eq!(call(b"xy").unwrap(), b"yx");
}

/// The end of a session is told after the end of everything that it did.
#[test]
fn a_session_that_breaks_ends_its_requests_first() {
    let owner = Owner::new(&pattern(5, 8 << 20));
    let server = serve(Arc::new(OwnerService(Arc::clone(&owner))));
    let proxy = super::kit::Proxy::new(server.address());
    let client = Client::new(proxy.address);
    let src = client.engine.attach(&client.peer, &7_u64.to_le_bytes(), 8 << 20).unwrap();
    let (_, to) = client.local(8 << 20);
    proxy.hold_after(1000);
    let ticket = client.engine.submit(one(src, to, 8 << 20)).unwrap();
    proxy.wait_held();
    assert_eq!(owner.sessions.lock().unwrap().as_slice(), [(1, true)]);
    assert!(client.engine.cancel(ticket));
    proxy.cut();
    super::kit::eventually("the session's end", || {
        owner.sessions.lock().unwrap().contains(&(1, false))
    });
    assert_eq!(owner.broken.load(Ordering::SeqCst), 1, "it was told before the session's end");
}
