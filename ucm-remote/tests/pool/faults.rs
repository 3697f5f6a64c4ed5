//! F: peers that die, hang, restart, evict; and everything at random.
//!
//! Mutants, each seen to fail a test here: a lease that has run out is believed; another run at the same
//! address is taken for the one that was asked for.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use ucm_remote::{
    Directory, EmbeddedDirectory, GetOutcome, Medium as _, Member, PeerId, PutOutcome, Record,
    RemotePool as _, Token,
};

use crate::kit::{
    Node, PAGE, Proxy, Random, Setup, WATCHDOG, Way, directory, each_way, eventually, idle, key,
    range, soon,
};

/// A node that others reach through a proxy.
fn behind(setup: Setup, directory: &Arc<EmbeddedDirectory>) -> (Node, Proxy) {
    let proxy = Proxy::new();
    let address = proxy.address.to_string();
    let node = setup.with(move |b| b.advertise(&*address)).start(directory);
    proxy.lead_to(node.agent.address().unwrap());
    (node, proxy)
}

#[test]
fn f1_a_dead_peer_costs_its_own_keys_and_none_that_others_have() {
    for connected in [false, true] {
        let directory = directory();
        let (dead, proxy) = behind(Setup::new("dead", 16), &directory);
        let alive = Setup::new("alive", 16).start(&directory);
        let reader = Setup::new("reader", 16).with(|b| b.prefetch(false)).start(&directory);
        dead.publish(&directory, 1, 0, 8192);
        alive.publish(&directory, 2, 0, 8192);
        for number in 10..14 {
            dead.publish(&directory, number, 0, 4096);
            alive.publish(&directory, number, 0, 4096);
        }
        if connected {
            for number in [1, 2] {
                assert!(reader.get(number, 0, 8192, &[range(0, 10)]).is_served());
            }
        }
        proxy.cut(true);
        let whole = [range(0, 8192)];
        let begun = Instant::now();
        let readings = [reader.reading(1, 8192, &whole), reader.reading(2, 8192, &whole)];
        let outcomes = reader.read(&readings, soon());
        assert_eq!(outcomes, [GetOutcome::PeerDown, GetOutcome::Remote], "connected {connected}");
        assert!(begun.elapsed() < WATCHDOG / 2);
        readings[1].check(2, 0);
        for number in 10..14 {
            assert!(reader.get(number, 0, 4096, &[range(0, 4096)]).is_served(), "the other has it");
        }
        idle(&reader);
    }
}

#[test]
fn f2_a_hung_peer_keeps_nobody_else_and_writes_nothing_late() {
    let directory = directory();
    let (hung, proxy) = behind(Setup::new("hung", 16), &directory);
    let alive = Setup::new("alive", 16).start(&directory);
    let reader = Setup::new("reader", 2)
        .with(|b| b.prefetch(false).fetch_timeout(Duration::from_millis(150)))
        .start(&directory);
    hung.publish(&directory, 1, 0, 8192);
    alive.publish(&directory, 2, 0, 8192);
    assert!(reader.get(1, 0, 8192, &[range(0, 10)]).is_served());
    reader.agent.forget_parts();
    proxy.allow(5000);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let reading = reader.reading(1, 8192, &[range(0, 8192)]);
            reader.read(&[reading], Instant::now() + Duration::from_millis(600))[0]
        });
        eventually("it is on its way", || reader.agent.stats().fetches > 0);
        // Others are served meanwhile: by the arena, because the slot is taken.
        assert_eq!(reader.get(2, 0, 8192, &[range(0, 8192)]), GetOutcome::Remote);
        let outcome = waiting.join().unwrap();
        assert!(matches!(outcome, GetOutcome::Timeout | GetOutcome::PeerDown), "{outcome:?}");
    });
    idle(&reader);
    // The slot has another object when the peer goes on.
    assert_eq!(reader.put(3, 0, 8192), PutOutcome::Created);
    proxy.allow_all();
    eventually("the peer answers again", || {
        reader.get(1, 0, 8192, &[range(100, 7000)]).is_served()
    });
    assert!(!reader.is_resident(3) || reader.get(3, 0, 8192, &[range(0, 8192)]).is_served());
    idle(&reader);
}

#[test]
fn f3_a_peer_that_restarted_is_not_believed_to_be_the_same() {
    each_way(|way| {
        for parts in [true, false] {
            let directory = directory();
            let old = Setup::new("owner", 16).start(&directory);
            let address = old.agent.address().unwrap();
            let reader = Setup::new("reader", 16).with(|b| b.prefetch(false)).start(&directory);
            reader.reach(&old, way);
            (1..4).for_each(|number| old.publish(&directory, number, 1, 8192));
            if parts {
                assert!(reader.get(1, 1, 8192, &[range(0, 100)]).is_served());
            } else {
                assert!(reader.get(3, 1, 8192, &[range(0, 8192)]).is_served());
            }
            drop(old);
            let new = Setup::new("owner", 16).with(move |b| b.listen(address)).start(&directory);
            (1..4).for_each(|number| new.publish(&directory, number, 2, 8192));
            reader.reach(&new, way);
            // Not one byte of the first storing beside one of the second. Memory that is mapped here
            // outlives its owner, who alone could have written it anew: what was lent stays readable.
            let reading = reader.reading(1, 8192, &[range(50, 8000)]);
            let outcome = reader.read(std::slice::from_ref(&reading), soon())[0];
            assert_eq!(outcome, GetOutcome::Remote);
            let old_is_good = parts && way == Way::Shm;
            assert!(reading.is(1, if old_is_good { 1 } else { 2 }));
            assert_eq!(reader.get(2, 2, 8192, &[range(0, 8192)]), GetOutcome::Remote);
            if !parts {
                // What is whole here is good for ever.
                assert_eq!(reader.get(3, 1, 8192, &[range(0, 8192)]), GetOutcome::Local);
            }
            idle(&reader);
        }
    });
}

/// A directory that still tells of a run whose address another run has now: that one is not asked, even if
/// its generations happen to be the same.
#[test]
fn f3_another_run_at_the_address_is_not_asked() {
    let directory = directory();
    let owner = Setup::new("owner", 16).start(&directory);
    let reader = Setup::new("reader", 16).start(&directory);
    owner.publish(&directory, 1, 0, 8192);
    let (generation, len) = owner.agent.medium().medium().find(&key(1)).unwrap();
    let (ghost, boot) = (PeerId::new("ghost"), Token([9; 16]));
    let address = owner.agent.address().unwrap().to_string();
    directory.register(&Member::new(ghost.clone(), boot, address), soon()).unwrap();
    directory
        .withdraw(
            &[(
                key(1),
                Record::new(PeerId::new("owner"), owner.agent.boot().unwrap(), generation, len),
            )],
            soon(),
        )
        .unwrap();
    directory.announce(&[(key(1), Record::new(ghost, boot, generation, len))], soon()).unwrap();
    assert_eq!(reader.get(1, 0, 8192, &[range(0, 8192)]), GetOutcome::Stale);
    assert_eq!(owner.agent.stats().medium.leases, 0);
    idle(&reader);
}

/// F4 over tcp: the owner evicts and writes anew while it sends.
#[test]
fn f4_what_is_sent_is_not_overwritten() {
    let directory = directory();
    // More than sockets take.
    let len = 30 << 20;
    let large = |name| Setup { page_bytes: 1 << 20, ..Setup::new(name, 31) };
    let (owner, proxy) = behind(large("owner"), &directory);
    let reader = large("reader")
        .with(|b| b.prefetch(false).batch_bytes(1 << 30).piece_bytes(1 << 30))
        .start(&directory);
    owner.publish(&directory, 1, 1, len);
    owner.publish(&directory, 2, 0, 10);
    assert!(reader.get(2, 0, 10, &[range(0, 10)]).is_served(), "connected");
    // What comes then is the lease of the other.
    eventually("its lease is given back", || owner.agent.stats().medium.leases == 0);
    proxy.allow(100_000);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let reading = reader.reading(1, len, &[range(0, len)]);
            let outcome = reader.read(std::slice::from_ref(&reading), soon())[0];
            (outcome, reading)
        });
        let medium = owner.agent.medium().medium();
        eventually("it is being sent", || owner.agent.stats().medium.leases == 1);
        assert_eq!(owner.client.remove(&[key(1)], soon()).len(), 1);
        // Its pages are not to be had.
        assert_eq!(owner.put(1, 2, len), PutOutcome::NoSpace);
        proxy.allow_all();
        let (outcome, reading) = waiting.join().unwrap();
        assert_eq!(outcome, GetOutcome::Remote);
        reading.check(1, 1);
        eventually("the pages are free", || {
            medium.find(&key(1)).is_none() && owner.put(1, 2, len).is_stored()
        });
    });
    idle(&owner);
}

/// A peer refuses an exchange as a whole: which of its objects it meant is found out, and the others are
/// served.
#[test]
fn f4_one_evicted_key_costs_its_siblings_nothing() {
    let directory = directory();
    let owner = Setup::new("owner", 16).start(&directory);
    let reader = Setup::new("reader", 16).with(|b| b.prefetch(false)).start(&directory);
    (1..=3).for_each(|number| owner.publish(&directory, number, 0, 8192));
    let part = |n, at| reader.reading(n, 8192, &[range(at, 1000)]);
    let first: Vec<_> = (1..=3).map(|n| part(n, 0)).collect();
    assert_eq!(reader.read(&first, soon()), [GetOutcome::Remote; 3]);
    let _ = owner.agent.medium().medium().remove(&key(2));
    let second: Vec<_> = (1..=3).map(|n| part(n, 5000)).collect();
    let outcomes = reader.read(&second, soon());
    assert_eq!(outcomes, [GetOutcome::Remote, GetOutcome::Miss, GetOutcome::Remote]);
    second[0].check(1, 0);
    second[2].check(3, 0);
    assert!(second[1].is_untouched());
    idle(&reader);
    idle(&owner);
}

/// F4 over shm: a lease that has run out protects nothing, and what is read then is given to nobody.
#[test]
fn f4_what_is_lent_is_not_read_after_its_time() {
    let directory = directory();
    let owner =
        Setup::new("owner", 4).with(|b| b.lend_for(Duration::from_millis(40))).start(&directory);
    let reader = Setup::new("reader", 16).with(|b| b.prefetch(false)).start(&directory);
    reader.reach(&owner, Way::Shm);
    owner.publish(&directory, 1, 1, 4 * PAGE);
    // Slow machines may need several tries to read within the time.
    eventually("a part is read", || reader.get(1, 1, 4 * PAGE, &[range(0, 1000)]).is_served());
    // The owner waits for the end of the lease, and then for nobody.
    eventually("the pages have other bytes", || owner.put(2, 0, 4 * PAGE).is_stored());
    let outcome = reader.get(1, 1, 4 * PAGE, &[range(500, 10_000)]);
    assert!(matches!(outcome, GetOutcome::Miss | GetOutcome::Stale), "{outcome:?}");
    eventually("the other is read", || reader.get(2, 0, 4 * PAGE, &[range(0, 9000)]).is_served());
}

/// F4 over shm: two objects were lent at different times, and are read together.
/// Mutant: the lease of the first decides for both.
#[test]
fn f4_of_what_is_read_together_the_shortest_lease_decides() {
    let directory = directory();
    let owner =
        Setup::new("owner", 8).with(|b| b.lend_for(Duration::from_secs(2))).start(&directory);
    let reader = Setup::new("reader", 16).with(|b| b.prefetch(false)).start(&directory);
    reader.reach(&owner, Way::Shm);
    for number in [1, 2] {
        owner.publish(&directory, number, 1, 4 * PAGE);
    }
    assert!(reader.get(1, 1, 4 * PAGE, &[range(0, 1000)]).is_served());
    // So that the second lease outlasts the first; should this machine be slower, both have run out.
    thread::sleep(Duration::from_millis(1200));
    assert!(reader.get(2, 1, 4 * PAGE, &[range(0, 1000)]).is_served());
    eventually("the first one's pages have other bytes", || owner.put(3, 0, 4 * PAGE).is_stored());
    let second = [2, 1].map(|number| reader.reading(number, 4 * PAGE, &[range(5000, 1000)]));
    let outcomes = reader.read(&second, soon());
    assert!(!outcomes[1].is_served(), "{outcomes:?}");
    assert!(second[1].is_untouched());
    if outcomes[0].is_served() {
        second[0].check(2, 1);
    }
}

#[test]
fn f9_pulls_that_are_too_many_are_dropped_and_counted() {
    let directory = directory();
    let owner = Setup::new("owner", 64).start(&directory);
    let reader = Setup::new("reader", 64).with(|b| b.pulls(0)).start(&directory);
    for number in 0..8 {
        owner.publish(&directory, number, 0, 8192);
        for part in 0..2 {
            assert!(reader.get(number, 0, 8192, &[range(part * 100, 100)]).is_served());
        }
        assert!(!reader.is_resident(number));
    }
    let stats = reader.agent.stats();
    assert_eq!((stats.dropped_pulls, stats.pulled_bytes), (8, 0));
    idle(&reader);
}

#[test]
fn f10_an_agent_that_ends_while_it_pulls_leaves_nothing() {
    let directory = directory();
    let (owner, proxy) = behind(Setup::new("owner", 64), &directory);
    owner.publish(&directory, 1, 0, 64 * PAGE);
    let reader = Setup::new("reader", 64).start(&directory);
    assert!(reader.get(1, 0, 64 * PAGE, &[range(0, 10)]).is_served());
    proxy.allow(1000);
    assert!(reader.get(1, 0, 64 * PAGE, &[range(20, 10)]).is_served());
    eventually("it pulls", || reader.agent.stats().fetches > 0);
    // Somebody still waits for what does not come.
    thread::scope(|scope| {
        let Node { agent, client, .. } = reader;
        let engine = Arc::new(ucm_transport::HostEngine::builder().build().unwrap());
        let other = agent.client(engine.clone()).unwrap();
        drop(client);
        let waiting = scope.spawn(move || {
            let region =
                ucm_transport::TransferEngine::register(&*engine, crate::kit::poisoned(100));
            let to = ucm_transport::Addr { region: region.unwrap(), offset: 0 };
            let ranges = vec![ucm_remote::Destination { range: range(5000, 100), to }];
            let request =
                ucm_remote::GetRequest { key: key(1), len: 64 * PAGE, ranges, will_read_all: true };
            other.get(&[request], soon())[0]
        });
        eventually("it waits", || agent.stats().waiting == 1);
        drop(agent);
        assert_eq!(waiting.join().unwrap(), GetOutcome::PeerDown);
    });
    proxy.allow_all();
    idle(&owner);
}

/// F11: threads read mixed shapes from two peers whose connections are delayed, cut and refused, and
/// whose objects are removed and written anew, over media too small for the keys. How many faults there are
/// says `UCM_POOL_FAULTS` (default 1,500).
#[test]
fn f11_random_faults_cost_reads_and_never_bytes() {
    let faults: u64 =
        std::env::var("UCM_POOL_FAULTS").ok().and_then(|text| text.parse().ok()).unwrap_or(1500);
    const KEYS: u64 = 24;
    let len = 5 * PAGE + 123;
    let directory = directory();
    let peers =
        [behind(Setup::new("left", 90), &directory), behind(Setup::new("right", 90), &directory)];
    let reader = Setup { arena: 16 * PAGE, ..Setup::new("reader", 40) }
        .with(|b| {
            b.fetch_timeout(Duration::from_millis(60))
                .connect_timeout(Duration::from_millis(200))
                .piece_bytes(6000)
                .batch_bytes(10_000)
        })
        .start(&directory);
    let versions: Vec<AtomicU64> = (0..KEYS).map(|_| AtomicU64::new(0)).collect();
    for number in 0..KEYS {
        let put = peers[usize::try_from(number % 2).unwrap()].0.put(number, 0, len);
        assert_eq!(put, PutOutcome::Created);
    }
    let (over, served) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (reader, versions, over, served) = (&reader, &versions, &over, &served);
            scope.spawn(move || {
                let mut random = Random(thread * 77 + 1);
                while !over.load(Ordering::SeqCst) {
                    let picks: Vec<u64> =
                        (0..=random.below(4)).map(|_| random.below(KEYS)).collect();
                    let readings: Vec<_> = picks
                        .iter()
                        .map(|number| reader.reading(*number, len, &random.ranges(len)))
                        .collect();
                    let limit = Duration::from_millis(20 + random.below(200));
                    let outcomes = reader.read(&readings, Instant::now() + limit);
                    for ((reading, number), outcome) in readings.iter().zip(&picks).zip(outcomes) {
                        if outcome.is_served() {
                            let last =
                                versions[usize::try_from(*number).unwrap()].load(Ordering::SeqCst);
                            assert!(
                                (0..=last).any(|version| reading.is(*number, version)),
                                "key {number}: bytes of no storing up to {last}, or of several"
                            );
                            served.fetch_add(1, Ordering::SeqCst);
                        }
                    }
                }
            });
        }
        let mut random = Random(4711);
        for fault in 0..faults {
            if fault % 100 == 99 {
                // Whatever happened, it does not stay.
                for (_, proxy) in &peers {
                    proxy.welcome();
                    proxy.allow_all();
                }
                let before = served.load(Ordering::SeqCst);
                eventually("reads are served again", || served.load(Ordering::SeqCst) > before + 4);
            }
            let (node, proxy) = &peers[usize::try_from(random.below(2)).unwrap()];
            match random.below(8) {
                0 => proxy.allow(random.below(40_000)),
                1 => proxy.cut(false),
                2 => proxy.cut(true),
                3..=5 => {
                    proxy.allow_all();
                    proxy.welcome();
                }
                6 => {
                    let number = random.below(KEYS);
                    let version = versions[usize::try_from(number).unwrap()]
                        .fetch_add(1, Ordering::SeqCst)
                        + 1;
                    let _ = node.agent.medium().medium().remove(&key(number));
                    let _ = node.put(number, version, len);
                }
                _ => thread::sleep(Duration::from_micros(random.below(4000))),
            }
        }
        over.store(true, Ordering::SeqCst);
        for (_, proxy) in &peers {
            proxy.allow_all();
            proxy.welcome();
        }
    });
    idle(&reader);
    drop(reader);
    peers.iter().for_each(|(node, _)| idle(node));
}
