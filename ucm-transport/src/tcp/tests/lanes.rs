//! Lanes: credits, several of them, idleness, breaks, restarts, the circuit breaker.
//!
//! **Invariant:** every plan ends, with its own bytes or with an error, whatever becomes of its lanes.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::kit::{
    Client, Proxy, config, eventually, filled, one, pattern, read, secret, serve, soon,
};
use crate::{
    Addr, ErrorKind, Exports, Quiesce, Secret, TcpEngine, TcpServer, TcpServerConfig, Transfer,
    TransferEngine, TransferPlan, testing::Bell,
};

/// Many plans of several threads over few credits: all bytes arrive, from whoever waits.
#[test]
fn credits_bound_what_is_in_flight_and_everything_ends() {
    const PIECE: usize = 60_000;
    for threaded in [false, true] {
        let exports = Exports::default();
        let limits = TcpServerConfig {
            window_bytes: 200_000,
            max_requests: 3,
            max_ranges: 50,
            frame_bytes: 4096,
            ..config()
        };
        let service = Arc::new(exports.clone());
        let server = TcpServer::bind(super::kit::loopback(), limits, service).unwrap();
        let client =
            Client::with(server.address(), TcpEngine::builder().max_lanes(3).spread_bytes(0));
        if threaded {
            client.engine.set_waker(Some(Bell::new().waker()));
        }
        let bytes = pattern(1, PIECE * 32);
        let far = client.remote(&exports, &filled(&bytes));
        let (target, to) = client.local(PIECE * 32);
        std::thread::scope(|scope| {
            for lane in 0..4_u64 {
                let client = &client;
                scope.spawn(move || {
                    for round in 0..8 {
                        let at = (lane * 8 + round) * PIECE as u64;
                        // 100 pieces: two requests of 50 ranges.
                        let items = (0..100).map(|i| at + i * 600).map(|offset| Transfer {
                            src: Addr { region: far, offset },
                            dst: Addr { region: to, offset },
                            len: 599,
                        });
                        let plan = TransferPlan { items: items.collect(), holds: vec![] };
                        let end = client.engine.transfer(plan, soon()).unwrap();
                        assert_eq!(end.result.unwrap(), 59_900);
                    }
                });
            }
        });
        for (at, (a, b)) in read(&target).into_iter().zip(&bytes).enumerate() {
            assert!(a == if at % 600 == 599 { 0 } else { *b }, "byte {at}");
        }
        // A plan larger than any window is cut.
        let whole = client.engine.transfer(one(far, to, bytes.len()), soon()).unwrap();
        assert_eq!(whole.result.unwrap(), bytes.len() as u64);
        assert!(read(&target) == bytes);
        let state = client.engine.peer_state(&client.peer).unwrap();
        assert!(state.queued == 0 && state.lanes <= 3, "{state:?}");
    }
}

/// A34: lanes that the peer, or something between, has closed while they were idle.
#[test]
fn a34_the_first_request_after_idleness_succeeds() {
    let exports = Exports::default();
    let server = serve(Arc::new(exports.clone()));
    let proxy = Proxy::new(server.address());
    for threaded in [false, true] {
        let client =
            Client::with(proxy.address, TcpEngine::builder().max_idle(Duration::from_secs(60)));
        if threaded {
            client.engine.set_waker(Some(Bell::new().waker()));
        }
        let far = client.remote(&exports, &filled(&pattern(2, 9000)));
        let (target, to) = client.local(9000);
        for round in 0..5_u8 {
            target.write(0, &[round; 9000]).unwrap();
            let end = client.engine.transfer(one(far, to, 9000), soon()).unwrap();
            assert_eq!(end.result.unwrap(), 9000);
            assert!(read(&target) == pattern(2, 9000));
            proxy.cut();
        }
    }
    // Older than the limit: replaced without asking.
    let client = Client::with(server.address(), TcpEngine::builder().max_idle(Duration::ZERO));
    let far = client.remote(&exports, &filled(&pattern(2, 9000)));
    let (_, to) = client.local(9000);
    for _ in 0..5 {
        client.engine.transfer(one(far, to, 9000), soon()).unwrap().result.unwrap();
    }
    assert!(client.engine.stats().lanes_opened >= 5);
}

/// A timed-out exchange takes its lane with it; what else was on it goes to another lane.
#[test]
fn a_closed_lane_gives_untouched_reads_to_another() {
    let exports = Exports::default();
    let server = serve(Arc::new(exports.clone()));
    let proxy = Proxy::new(server.address());
    let client = Client::with(proxy.address, TcpEngine::builder().max_lanes(1));
    let far = client.remote(&exports, &filled(&pattern(3, 50_000)));
    let (first, second) = (client.local(50_000), client.local(50_000));
    proxy.hold_after(10_000);
    let soon_late = Instant::now() + Duration::from_millis(250);
    let late = client.engine.submit_until(one(far, first.1, 50_000), soon_late).unwrap();
    let other = client.engine.submit(one(far, second.1, 50_000)).unwrap();
    proxy.wait_held();
    client.engine.quiesce(Quiesce::Ticket(late), soon()).unwrap();
    proxy.let_go();
    client.engine.quiesce(Quiesce::Ticket(other), soon()).unwrap();
    let mut ends = Vec::new();
    client.engine.poll(&mut ends);
    ends.sort_by_key(|end| end.ticket);
    assert_eq!(ends[0].result.as_ref().unwrap_err().kind(), ErrorKind::Timeout);
    assert_eq!(*ends[1].result.as_ref().unwrap(), 50_000);
    assert!(read(&second.0) == pattern(3, 50_000));
    let stats = client.engine.stats();
    assert_eq!((stats.resent, stats.timeouts, stats.lanes_closed), (1, 1, 1));
}

/// A47: replies belong to their requests also when lanes are cut at random moments.
#[test]
fn a47_no_reply_is_taken_for_another() {
    let exports = Exports::default();
    let server = serve(Arc::new(exports.clone()));
    let proxy = Proxy::new(server.address());
    let client = Client::with(proxy.address, TcpEngine::builder().max_lanes(3).breaker(u32::MAX));
    let sources: Vec<_> =
        (0..8).map(|seed| client.remote(&exports, &filled(&pattern(seed, 3000)))).collect();
    let (mut good, mut failed) = (0, 0);
    std::thread::scope(|scope| {
        let done = crate::testing::StopOnDrop::default();
        let stop = Arc::clone(&done.0);
        let proxy = &proxy;
        scope.spawn(move || {
            while !stop.load(std::sync::atomic::Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(3));
                proxy.cut();
            }
        });
        let until = soon();
        while (good < 500 || failed < 3) && Instant::now() < until {
            let targets: Vec<_> = sources.iter().map(|_| client.local(3000)).collect();
            let plans = sources.iter().zip(&targets);
            let tickets: Vec<_> = plans
                .map(|(src, (_, to))| client.engine.submit(one(*src, *to, 3000)).unwrap())
                .collect();
            client.engine.quiesce(Quiesce::All, soon()).unwrap();
            let mut ends = Vec::new();
            while ends.len() < tickets.len() {
                client.engine.poll(&mut ends);
            }
            for end in ends {
                let seed = tickets.iter().position(|t| *t == end.ticket).unwrap();
                match end.result {
                    Ok(_) => {
                        let expected = pattern(u8::try_from(seed).unwrap(), 3000);
                        assert!(read(&targets[seed].0) == expected, "bytes of another reply");
                        good += 1;
                    }
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::PeerDown, "{error}");
                        failed += 1;
                    }
                }
            }
            targets.iter().for_each(|(_, to)| client.engine.deregister(*to).unwrap());
        }
        drop(done);
    });
    assert!(good >= 500, "{good} good, {failed} failed");
}

/// A33: another run at the same address and port. Mutant seen to fail: boot tokens not compared.
#[test]
fn a33_a_restarted_peer_is_stale_for_good() {
    let exports = Exports::default();
    let server = serve(Arc::new(exports.clone()));
    let proxy = Proxy::new(server.address());
    let address = server.address();
    let client = Client::new(proxy.address);
    let far = client.remote(&exports, &filled(&pattern(4, 4096)));
    let (target, to) = client.local(4096);
    let run = || client.engine.transfer(one(far, to, 4096), soon()).unwrap().result;
    assert_eq!(run().unwrap(), 4096);
    drop(server);
    // The same exports, even: only the run differs.
    let again = TcpServer::bind(address, config(), Arc::new(exports.clone())).unwrap();
    target.write(0, &[0; 4096]).unwrap();
    assert_eq!(run().unwrap_err().kind(), ErrorKind::Stale);
    assert_eq!(run().unwrap_err().kind(), ErrorKind::Stale);
    assert!(client.engine.peer_state(&client.peer).unwrap().gone);
    assert_eq!(read(&target), [0; 4096]);
    let peer = client.engine.connect(proxy.address, &secret(), soon()).unwrap();
    assert_eq!(peer.boot(), again.boot());
    assert_ne!(peer.boot(), client.peer.boot());
    client.engine.disconnect(client.peer);
    assert_eq!(client.engine.peer_state(&client.peer), None);
    assert_eq!(run().unwrap_err().kind(), ErrorKind::Stale);
}

#[test]
fn the_circuit_opens_and_closes_again() {
    let exports = Exports::default();
    let server = serve(Arc::new(exports.clone()));
    let proxy = Proxy::new(server.address());
    let client = Client::with(proxy.address, TcpEngine::builder().breaker(2));
    let far = client.remote(&exports, &filled(&pattern(5, 4096)));
    let (_, to) = client.local(4096);
    let run = || client.engine.transfer(one(far, to, 4096), soon()).unwrap().result;
    run().unwrap();
    proxy.refuse(true);
    proxy.cut();
    while !client.engine.peer_state(&client.peer).unwrap().circuit_open {
        assert_eq!(run().unwrap_err().kind(), ErrorKind::PeerDown);
    }
    let before = proxy.connections();
    let text = run().unwrap_err().to_string();
    assert!(text.contains("tried again in"), "{text}");
    assert_eq!(proxy.connections(), before, "an open circuit connects to nobody");
    proxy.refuse(false);
    eventually("the circuit closes", || run().is_ok());
    assert!(!client.engine.peer_state(&client.peer).unwrap().circuit_open);
}

#[test]
fn strangers_and_other_versions_are_not_let_in() {
    let server = serve(Arc::new(Exports::default()));
    let engine = TcpEngine::builder().build().unwrap();
    let other = Secret::new(b"another secret of strangers").unwrap();
    let error = engine.connect(server.address(), &other, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    eventually("the stranger is gone", || {
        let stats = server.stats();
        (stats.connections, stats.expelled, stats.requests) == (0, 1, 0)
    });
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = nobody.local_addr().unwrap();
    drop(nobody);
    let error = engine.connect(address, &secret(), soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerDown, "{error}");
}

/// Threads, descriptors and regions return to what they were.
#[test]
fn a36_nothing_is_left_after_many_connections() {
    let exports = Exports::default();
    let server = serve(Arc::new(exports.clone()));
    let engine = TcpEngine::builder().build().unwrap();
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mut before = 0;
    for round in 0..60 {
        let peer = engine.connect(server.address(), &secret(), soon()).unwrap();
        assert!(engine.call(&peer, b"x", soon()).is_err(), "no calls here");
        engine.disconnect(peer);
        if round == 9 {
            eventually("ten are gone", || server.stats().connections == 0);
            before = descriptors();
        }
    }
    eventually("all are gone", || server.stats().connections == 0);
    eventually("descriptors are closed", || descriptors() <= before);
}
