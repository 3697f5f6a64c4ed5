//! Seats: who holds one, for how long, and what a pin is worth.
//!
//! **Invariant:** a seat is given back with the last handle, never earlier, and pins are counted
//! exactly.

use std::thread;

use super::kit::*;
use crate::{
    Acquired, Control, ErrorKind, MAX_MEMBERS, MemberId, MemberSpec, MemberState, PoolId,
    failpoint::visit, sync::Ordering,
};

#[test]
fn seats_are_reused_with_new_generations() {
    let control = cache(1);
    let first = rank(&control);
    let second = rank(&control);
    assert_eq!((first.id(), second.id()), (MemberId(0), MemberId(1)));
    assert_eq!(first.generation(), 1);
    drop(first);
    let third = rank(&control);
    assert_eq!((third.id(), third.generation()), (MemberId(0), 2));
    assert_eq!(control.free_member(&[]), Some(MemberId(2)));
    assert_eq!(control.free_member(&[2, 3]), Some(MemberId(4)));
}

#[test]
fn d5_a_seat_changes_hands_a_thousand_times_while_others_work() {
    let control = cache(8);
    let stop = crate::sync::AtomicU32::new(0);
    let steady = pool(&control);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut round = 0;
            while stop.load(Ordering::SeqCst) == 0 {
                round += 1;
                if let Acquired::Owner(fill) = steady.acquire(&key(round % 20)).unwrap() {
                    drop(fill.publish().unwrap());
                }
            }
        });
        for round in 1..=1000 {
            let member = control.join_at(MemberId(7), MemberSpec::rank(7, 8)).unwrap();
            assert_eq!(member.generation(), round);
            let pool = member.pool(PoolId(0)).unwrap();
            drop(pool.acquire(&key(u64::from(round) % 20)).unwrap());
        }
        stop.store(1, Ordering::SeqCst);
    });
    assert_eq!(control.inspect().members.len(), 1);
    assert_at_rest(&control);
}

#[test]
fn every_handle_keeps_the_seat() {
    let control = cache(4);
    let seats = |n: usize| assert_eq!(control.inspect().members.len(), n);
    let pool_only = pool(&control);
    seats(1);
    let fill = own(&pool_only, &key(1));
    drop(pool_only);
    seats(1);
    let pin = fill.publish().unwrap();
    seats(1);
    drop(pin);
    seats(0);
    let bell = rank(&control).doorbell();
    seats(1);
    drop(bell);
    seats(0);
}

#[test]
fn a_full_house_and_a_taken_seat_are_refused() {
    let control = cache(1);
    let mut members: Vec<_> = (0..MAX_MEMBERS).map(|_| rank(&control)).collect();
    assert!(members.iter().enumerate().all(|(i, m)| usize::from(m.id().0) == i));
    let error = control.join(MemberSpec::scheduler()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::MembersFull);
    assert!(error.to_string().contains("128"), "{error}");
    let error = control.join_at(MemberId(5), MemberSpec::scheduler()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::MembersFull);
    assert!(error.to_string().contains('5'), "{error}");
    let error = control.join_at(MemberId(128), MemberSpec::scheduler()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert_eq!(control.free_member(&[]), None);
    // The last seats work like the first: both words of the pin mask.
    let [low, high] = [2, 127].map(|i: usize| members[i].pool(PoolId(0)).unwrap());
    let pin = own(&high, &key(1)).publish().unwrap();
    let other = hit(&low, &key(1));
    let slot = &tables(&control).slots[0];
    let pins = || [0, 1].map(|i: usize| slot.pins[i].load(Ordering::SeqCst));
    assert_eq!(pins(), [1 << 2, 1 << 63]);
    drop(other);
    assert!(is_full(&low, &key(2)));
    drop(pin);
    assert_eq!(load(&low, &key(2)), 0);
    drop((low, high));
    members.remove(77);
    assert_eq!(rank(&control).id(), MemberId(77));
}

#[test]
fn the_record_says_who_sits_there() {
    let control = cache(1);
    let spec = MemberSpec::rank(3, 8).named([9; 16]);
    let member = control.join_at(MemberId(4), spec).unwrap();
    assert_eq!(control.incarnation(MemberId(4)), Some([9; 16]));
    assert_eq!(control.incarnation(MemberId(3)), None);
    let seen = control.inspect().members.remove(0);
    assert_eq!((seen.index, seen.device_id, seen.incarnation), (4, 3, [9; 16]));
    assert_eq!((seen.state, seen.pid), (MemberState::Joined, std::process::id()));
    let weak = member.downgrade();
    assert_eq!(weak.upgrade().unwrap().id(), MemberId(4));
    drop(member);
    assert!(weak.upgrade().is_none());
    assert_eq!(control.incarnation(MemberId(4)), None);
}

/// What proves a member's life must outlive its record.
#[test]
fn the_guard_is_dropped_after_the_record_is_free() {
    struct Guard(Control, std::sync::mpsc::Sender<usize>);
    impl Drop for Guard {
        fn drop(&mut self) {
            self.1.send(self.0.inspect().members.len()).unwrap();
        }
    }
    let control = cache(1);
    let (sender, seen) = std::sync::mpsc::channel();
    let member = rank(&control);
    member.keep_until_left(Box::new(Guard(control.clone(), sender)));
    let pool = member.pool(PoolId(0)).unwrap();
    drop(member);
    assert!(seen.try_recv().is_err());
    drop(pool);
    assert_eq!(seen.recv().unwrap(), 0);
}

#[test]
fn pins_are_exact_under_many_threads() {
    let control = cache(2);
    let members = [rank(&control), rank(&control)];
    let pools = members.each_ref().map(|m| m.pool(PoolId(0)).unwrap());
    let [a, b] = [1, 2].map(key);
    for key in [&a, &b] {
        load(&pools[0], key);
    }
    thread::scope(|scope| {
        for thread in 0..4 {
            let pool = &pools[thread % 2];
            scope.spawn(move || {
                for round in 0..20_000_usize {
                    let pin = hit(pool, if round % 3 == 0 { &a } else { &b });
                    let slot = &tables(&pool.member.control).slots[pin.slot().0 as usize];
                    let mine = slot.pins[0].load(Ordering::SeqCst) & (1 << pool.member.index);
                    assert_ne!(mine, 0, "pinned, but the mask does not say so");
                }
            });
        }
    });
    assert_eq!(members.each_ref().map(crate::Member::pins_held), [0, 0]);
    assert_at_rest(&control);
}

/// A10: a count below zero is a bug that stops the process's use of the cache.
#[test]
fn a10_an_underflow_poisons_the_member() {
    let control = cache(1);
    let member = rank(&control);
    let pool = member.pool(PoolId(0)).unwrap();
    let slot = &tables(&control).slots[0];
    let pin = own(&pool, &key(1)).publish().unwrap();
    assert!(pool.member.unpin(0, 0, &slot.pins), "somebody's bug: one release too many");
    drop(pin);
    let error = pool.acquire(&key(1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced);
    assert!(error.to_string().contains("released twice"), "{error}");
    assert!(pool.lookup(&[], &mut []).is_err() && pool.touch(&[]).is_err());
    // The seat stays taken until the process is gone and reaped: what it did is not trusted.
    drop((member, pool));
    assert_eq!(control.inspect().members.len(), 1);
}

/// A record is taken for a dead joiner's while its joiner, which had lost what proves its life, goes on; or
/// the joiner is done first. Mutants: a joiner that is done is taken all the same; a joiner does not look
/// whether the record still is its own.
#[test]
fn d1_a_record_is_the_joiner_s_or_the_reaper_s() {
    let control = cache(2);
    let reaper = rank(&control);
    let joined = control.join_at(MemberId(5), MemberSpec::rank(1, 2)).unwrap();
    let pin = own(&joined.pool(PoolId(0)).unwrap(), &key(1)).publish().unwrap();
    assert!(!reaper.reap_joining(MemberId(5), joined.generation()).done);
    assert_eq!(control.inspect().members.len(), 2);
    drop(pin);
    drop(joined);

    let (send, reaped) = std::sync::mpsc::channel();
    let of_reaper = control.clone();
    visit::at("join.fields.after", move || {
        let seen = of_reaper.inspect_members().into_iter().find(|m| m.index == 6).unwrap();
        assert_eq!(seen.state, MemberState::Joining);
        let reaped = reaper.reap_joining(MemberId(6), seen.generation);
        // Somebody else takes the seat at once.
        let next = of_reaper.join_at(MemberId(6), MemberSpec::rank(3, 4)).unwrap();
        send.send((reaped.done, next)).unwrap();
    });
    let error = control.join_at(MemberId(6), MemberSpec::rank(1, 2)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Fenced, "{error}");
    let (done, next) = reaped.recv().unwrap();
    assert!(done);
    let _fill = own(&next.pool(PoolId(0)).unwrap(), &key(2));
    assert_eq!(control.inspect().problems, Vec::<String>::new());
}
