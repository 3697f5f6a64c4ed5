//! Owners that are killed.
//!
//! **Invariant:** death is proved by a pidfd; survivors need nobody else.

use rustix::process::Signal;
use ucm_ctrl::{Control, Geometry, MemberId};

use crate::{
    key, now_us,
    parent::{Proc, Shared},
    rank,
};

/// W5, D3: waiters hear of the death within 100 ms, and exactly one takes over.
#[test]
fn d3_survivors_of_a_killed_owner_clear_up_and_one_takes_over() {
    let control = Control::create(&Geometry::single(4, 0, 1, 4096), [7; 16]).unwrap();
    let shared = Shared::of(&control);
    let (_member, pool) = rank(&control);
    let mut best = u64::MAX;
    for round in 0..5_u64 {
        let mut owner = Proc::start("owner", &shared, &[round.to_string()]);
        owner.hear();
        let arguments = [round.to_string(), owner.pid().as_raw_nonzero().to_string()];
        let mut survivors: Vec<_> =
            (0..3).map(|_| Proc::start("survivor", &shared, &arguments)).collect();
        survivors.iter_mut().for_each(|child| child.expect("waiting"));
        let killed = now_us();
        owner.signal(Signal::KILL);
        let (mut owners, mut reapers, mut slowest) = (Vec::new(), 0, 0);
        for (i, child) in survivors.iter_mut().enumerate() {
            let said = child.hear();
            let words: Vec<_> = said.split(' ').collect();
            assert_eq!(words[0], "OwnerDied", "{said}");
            slowest = slowest.max(words[1].parse::<u64>().unwrap() - killed);
            if words[2] == "owner" {
                owners.push(i);
            }
            reapers += usize::from(words[3] == "true");
        }
        assert_eq!((owners.len(), reapers), (1, 1));
        let heir = &mut survivors[owners[0]];
        heir.tell("publish");
        heir.expect("published");
        assert_eq!(pool.prefix_lookup(&[key(round)]).unwrap(), 1);
        assert_eq!(control.statistics().deaths, round + 1);
        for child in survivors {
            assert!(child.end().success());
        }
        assert!(slowest < 1_000_000, "the death was heard after {slowest} µs");
        best = best.min(slowest);
        let seen = control.inspect();
        assert_eq!((seen.members.len(), seen.problems.len(), seen.pools[0].pinned), (1, 0, 0));
    }
    // A busy machine may delay a round, not all of them.
    assert!(best < 100_000, "at best, the death was heard after {best} µs");
}

/// D5, D2: seats of the dead are cleared and reused, seats of those who leave are free at once.
#[test]
fn d2_all_die_and_the_seats_are_used_again() {
    let control = Control::create(&Geometry::single(4, 0, 1, 4096), [7; 16]).unwrap();
    let shared = Shared::of(&control);
    let (member, _pool) = rank(&control);
    for round in 0..4_u32 {
        let mut children: Vec<_> = (0..3).map(|_| Proc::start("member", &shared, &[])).collect();
        let mut seats: Vec<_> = children.iter_mut().map(Proc::hear).collect();
        seats.sort();
        let expected: Vec<_> = (1..=3).map(|seat| format!("{seat} {}", round + 1)).collect();
        assert_eq!(seats, expected);
        if round % 2 == 0 {
            children.iter_mut().for_each(Proc::kill);
            assert_eq!(control.inspect().members.len(), 4, "nobody has cleared up yet");
            for seat in 1..=3 {
                assert!(member.reap(MemberId(seat), Some(round + 1)).done);
            }
        } else {
            children.into_iter().for_each(|child| assert!(child.end().success()));
        }
        assert_eq!(control.inspect().members.len(), 1);
    }
}
