//! Leases: what a scheduler promised stays until it is used, and not a moment longer.
//!
//! **Invariant:** pins fall by an event, never because a time has passed that is not the deadline.

use std::{
    thread,
    time::{Duration, Instant},
};

use super::kit::*;
use crate::{
    Control, ErrorKind, Key, Lease, LeaseOutcome, LeaseTicket, Member, MemberSpec, Pool, PoolId,
    Redeemed, layout::LeaseRecord, sync::Ordering,
};

struct Leased {
    control: Control,
    holder: Member,
    view: Pool,
    consumer: Member,
    keys: Vec<Key>,
}

/// A cache of 8 leases with `count` ready keys, a scheduler and a consumer.
fn leased(count: u64) -> Leased {
    let control = narrow(geometry(8, 0, 1), u64::MAX);
    let consumer = rank(&control);
    let pool = consumer.pool(PoolId(0)).unwrap();
    let keys: Vec<_> = (0..count).map(key).collect();
    for key in &keys {
        load(&pool, key);
    }
    let holder = control.join(MemberSpec::scheduler()).unwrap();
    let view = holder.pool(PoolId(0)).unwrap();
    Leased { control, holder, view, consumer, keys }
}

impl Leased {
    fn lease(&self, consumers: u16, deadline: Instant) -> Lease {
        match self.view.lease(&self.keys, consumers, deadline).unwrap() {
            LeaseOutcome::Leased(lease) => lease,
            other => panic!("{other:?}"),
        }
    }

    fn pinned(&self) -> u64 {
        self.control.inspect().pools[0].pinned
    }

    fn record(&self, index: usize) -> &LeaseRecord {
        &self.control.region.leases()[index]
    }
}

fn far() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

#[test]
fn s3_a_lease_is_consumed_exactly_n_times_and_then_released() {
    let cache = leased(3);
    let ticket = cache.lease(4, far()).ticket();
    assert_eq!((cache.pinned(), cache.holder.leases_held()), (3, 1));
    for left in (0..4).rev() {
        assert_eq!(cache.holder.leases_held(), 1);
        assert_eq!(cache.consumer.redeem(ticket).unwrap(), Redeemed::Ok(left));
    }
    assert_eq!(cache.consumer.redeem(ticket).unwrap(), Redeemed::Gone);
    eventually("the keeper hears the last consumer", || cache.holder.pins_held() == 0);
    eventually("and forgets the lease", || cache.holder.leases_held() == 0);
    assert_at_rest(&cache.control);
}

#[test]
fn a09_eight_ranks_consume_one_lease_at_once() {
    let cache = leased(2);
    for _ in 0..50 {
        let ticket = cache.lease(8, far()).ticket();
        let consumed: usize = thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        (0..3)
                            .filter(|_| cache.consumer.redeem(ticket).unwrap() != Redeemed::Gone)
                            .count()
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).sum()
        });
        assert_eq!(consumed, 8);
        eventually("the release", || cache.holder.pins_held() == 0);
    }
    assert_at_rest(&cache.control);
}

#[test]
fn s3_the_deadline_releases_what_nobody_consumes() {
    let cache = leased(2);
    let soon = Instant::now() + Duration::from_millis(30);
    let first = cache.lease(1, soon).ticket();
    let second = cache.lease(1, far()).ticket();
    eventually("the deadline", || cache.holder.leases_held() == 1);
    assert!(Instant::now() >= soon);
    assert_eq!(cache.consumer.redeem(first).unwrap(), Redeemed::Gone);
    assert_eq!(cache.consumer.redeem(second).unwrap(), Redeemed::Ok(0));
    eventually("the second", || cache.holder.pins_held() == 0);
    assert_at_rest(&cache.control);
}

#[test]
fn s3_release_and_the_holders_end_release_at_once() {
    let cache = leased(2);
    let lease = cache.lease(3, far());
    let ticket = lease.ticket();
    lease.release();
    assert_eq!((cache.pinned(), cache.holder.leases_held()), (0, 0));
    assert_eq!(cache.consumer.redeem(ticket).unwrap(), Redeemed::Gone);
    // Dropping the lease value does not end it, dropping its holder does.
    let ticket = cache.lease(3, far()).ticket();
    assert_eq!(cache.pinned(), 2);
    let Leased { control, holder, view, consumer, .. } = cache;
    drop((holder, view));
    assert_eq!(consumer.redeem(ticket).unwrap(), Redeemed::Gone);
    assert_eq!(control.inspect().members.len(), 1);
    assert_at_rest(&control);
}

#[test]
fn s3_leased_keys_are_never_evicted() {
    let cache = leased(8);
    let lease = cache.lease(1, far());
    let pool = cache.consumer.pool(PoolId(0)).unwrap();
    assert!(is_full(&pool, &key(100)));
    lease.release();
    load(&pool, &key(100));
}

#[test]
fn s3_a_lease_covers_the_ready_prefix() {
    let mut cache = leased(2);
    let pool = cache.consumer.pool(PoolId(0)).unwrap();
    let fill = own(&pool, &key(2));
    cache.keys = [0, 1, 2, 3].map(key).to_vec();
    let lease = cache.lease(1, far());
    assert_eq!((lease.covered(), cache.holder.pins_held()), (2, 2));
    lease.release();
    drop(fill);
    let outcome = cache.view.lease(&[key(9), key(1)], 1, far()).unwrap();
    assert!(matches!(outcome, LeaseOutcome::NothingReady));
    assert_eq!(cache.view.lease(&cache.keys, 0, far()).unwrap_err().kind(), ErrorKind::Invalid);
    assert_at_rest(&cache.control);
}

#[test]
fn s3_tickets_that_were_never_given_or_are_spent_are_gone() {
    let cache = leased(1);
    for wrong in [0, 1, 1 << 32, u64::MAX] {
        let ticket = LeaseTicket::from_u64(wrong);
        assert_eq!(cache.consumer.redeem(ticket).unwrap(), Redeemed::Gone);
    }
    let old = cache.lease(1, far());
    let number = old.ticket().to_u64();
    old.release();
    let new = cache.lease(1, far());
    assert_eq!(LeaseTicket::from_u64(new.ticket().to_u64()), new.ticket());
    assert_ne!(number, new.ticket().to_u64(), "same record, another generation");
    assert_eq!(cache.consumer.redeem(LeaseTicket::from_u64(number)).unwrap(), Redeemed::Gone);
    assert_eq!(cache.consumer.redeem(new.ticket()).unwrap(), Redeemed::Ok(0));
}

#[test]
fn s3_a_full_table_is_an_answer_and_leaves_no_pins() {
    let cache = leased(1);
    let mut leases: Vec<_> = (0..8).map(|_| cache.lease(1, far())).collect();
    assert_eq!(cache.holder.pins_held(), 8);
    let outcome = cache.view.lease(&cache.keys, 1, far()).unwrap();
    assert!(matches!(outcome, LeaseOutcome::TableFull));
    assert_eq!(cache.holder.pins_held(), 8);
    leases.remove(3).release();
    leases.push(cache.lease(1, far()));
    leases.into_iter().for_each(Lease::release);
    assert_at_rest(&cache.control);
}

/// The record tells operators until when; the absolute time, in milliseconds.
#[test]
fn s3_the_record_shows_the_deadline() {
    let cache = leased(1);
    let before = crate::clock_ms();
    let lease = cache.lease(1, Instant::now() + Duration::from_secs(100));
    let deadline = cache.record(0).deadline_ms.load(Ordering::SeqCst);
    assert!((before + 99_000..=crate::clock_ms() + 100_000).contains(&deadline), "{deadline}");
    assert_eq!(cache.record(0).slots.load(Ordering::SeqCst), 1);
    lease.release();
}

#[test]
fn s3_a_dead_holders_leases_fall_with_its_pins() {
    let cache = leased(3);
    let ticket = cache.lease(2, far()).ticket();
    let (holder, view) = (std::mem::ManuallyDrop::new(cache.holder), cache.view);
    let _never_dropped = std::mem::ManuallyDrop::new(view);
    let reaped = cache.consumer.reap(holder.id(), None);
    assert_eq!((reaped.done, reaped.pins), (true, 3));
    assert_eq!(cache.consumer.redeem(ticket).unwrap(), Redeemed::Gone);
    assert_at_rest(&cache.control);
}

/// Regression: the last consumer died between consuming and ringing; the pins stayed until the
/// deadline.
#[test]
fn s3_a_consumers_death_before_the_ring_holds_nothing_up() {
    let cache = leased(1);
    let consumer = std::mem::ManuallyDrop::new(rank(&cache.control));
    cache.lease(1, far());
    let word = cache.record(0).word.load(Ordering::SeqCst);
    let consumed = word & !(0xffff << 16);
    cache.record(0).word.store(consumed, Ordering::SeqCst);
    assert_eq!(cache.holder.leases_held(), 1);
    assert!(cache.consumer.reap(consumer.id(), None).done);
    eventually("the keeper looks again", || cache.holder.pins_held() == 0);
    assert_eq!(cache.record(0).word.load(Ordering::SeqCst) & 0xff, 0, "the record is free");
}

/// Regression: a consumer that redeemed while the lease's dead holder was cleared up after kept the
/// record in use for ever.
#[test]
fn s3_a_record_of_a_dead_holder_is_freed_though_a_consumer_redeems() {
    let l = leased(1);
    let deadline = Instant::now() + Duration::from_secs(600);
    let ticket = l.lease(3, deadline).ticket();
    let record = l.control.region.leases().iter().find(|lease| is_live(lease)).unwrap();
    let redeemed = std::cell::Cell::new(false);
    record.retire(|word| {
        // Between the first look at the word and its change.
        if !redeemed.replace(true) {
            assert_eq!(l.consumer.redeem(ticket).unwrap(), Redeemed::Ok(2));
        }
        word.holder() == l.holder.id().0
    });
    assert!(!is_live(record), "used up, but never freed");
}

fn is_live(lease: &LeaseRecord) -> bool {
    lease.word.load(Ordering::SeqCst) & 0xff != 0
}
