//! Group votes: all or none, decided once, by nobody's clock.
//!
//! Mutants seen to fail: a commit before all have voted; a death after a passing vote that is no vote
//! against; a death after a lasting vote that is one; a dead decider's silence; a record that is freed
//! before all have taken note; an opener that does not look at its members again; a full table that
//! tells nobody when it is not full any more.
//!
//! **Invariant:** whoever waits here waits for an event, with a watchdog.

use std::{
    sync::mpsc::{Receiver, channel},
    time::Duration,
};

use super::kit::*;
use crate::{
    Control, ErrorKind, GroupVote, Member, MemberStay,
    group::{self, GroupState, Seats},
    layout::{GroupRecord, MAX_GROUPS},
    sync::Ordering,
};

const SOON: Duration = Duration::from_secs(60);

struct Ranks {
    control: Control,
    members: Vec<Member>,
    roster: Vec<MemberStay>,
}

fn ranks(count: usize) -> Ranks {
    let control = cache(4);
    let members: Vec<_> = (0..count).map(|_| rank(&control)).collect();
    let roster = members.iter().map(Member::stay).collect();
    Ranks { control, members, roster }
}

impl Ranks {
    fn vote(&self, rank: usize, group: u8, lasting: bool, ready: bool) -> Receiver<bool> {
        let (send, told) = channel();
        let roster = self.roster.clone();
        let vote = GroupVote { group: [group; 16], lasting, roster, ready };
        // Nobody listens to a dead rank any more.
        let decided = move |decision| {
            let _ = send.send(decision);
        };
        self.members[rank].vote(vote, Box::new(decided)).unwrap();
        told
    }

    fn in_state(&self, state: GroupState) -> usize {
        self.control.region.groups().iter().filter(|group| group.load().state() == state).count()
    }

    fn first(&self) -> &GroupRecord {
        &self.control.region.groups()[0]
    }

    /// All records are free.
    #[track_caller]
    fn assert_over(&self) {
        eventually("the records", || self.in_state(GroupState::Free) == MAX_GROUPS);
        assert_eq!(self.control.inspect().problems, Vec::<String>::new());
    }

    /// Takes a member out of the process without its leaving: dead, for all that others know.
    fn die(&mut self, rank: usize) -> MemberStay {
        let stay = self.roster[rank];
        // Its threads and handles do nothing any more.
        self.members[rank].inner.fence();
        stay
    }
}

#[track_caller]
fn told(votes: &[Receiver<bool>]) -> Vec<bool> {
    let all = votes.iter().map(|told| told.recv_timeout(SOON).expect("a decision")).collect();
    // Once, and never again.
    votes.iter().for_each(|told| assert!(told.try_recv().is_err()));
    all
}

#[test]
fn s6_a_group_commits_when_all_have_voted_in_any_order() {
    for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2], [2, 0, 1]] {
        for lasting in [false, true] {
            let ranks = ranks(3);
            let mut votes = Vec::new();
            for (cast, rank) in order.into_iter().enumerate() {
                assert!(votes.iter().all(|told: &Receiver<bool>| told.try_recv().is_err()));
                assert_eq!(ranks.in_state(GroupState::Committed), 0, "after {cast} votes");
                votes.push(ranks.vote(rank, 9, lasting, true));
            }
            assert_eq!(told(&votes), [true; 3]);
            ranks.assert_over();
            assert!(ranks.members.iter().all(|member| member.votes_out() == 0));
        }
    }
}

#[test]
fn s6_one_vote_against_is_enough_and_late_ones_hear_of_it() {
    for against in 0..3 {
        let ranks = ranks(3);
        let (first, late) = ((against + 1) % 3, (against + 2) % 3);
        let early = [ranks.vote(first, 9, false, true), ranks.vote(against, 9, false, false)];
        // Unless the one that opens groups has not come yet.
        if late != 0 {
            assert_eq!(told(&early), [false; 2]);
            assert_eq!(ranks.in_state(GroupState::Aborted), 1, "kept for the late one");
        }
        let late = ranks.vote(late, 9, false, true);
        assert_eq!(late.recv_timeout(SOON), Ok(false));
        if against == 1 {
            // `first` was 2, `late` 0: told only now.
            assert_eq!(told(&early), [false; 2]);
        }
        ranks.assert_over();
    }
}

#[test]
fn a_vote_can_be_taken_back_until_the_decision() {
    let ranks = ranks(2);
    let first = ranks.vote(0, 1, false, true);
    ranks.members[0].withdraw([1; 16], false);
    assert_eq!(first.recv_timeout(SOON), Ok(false));
    assert_eq!(told(&[ranks.vote(1, 1, false, true)]), [false]);
    let both = [ranks.vote(1, 2, false, true), ranks.vote(0, 2, false, true)];
    assert_eq!(told(&both), [true; 2]);
    ranks.members[0].withdraw([2; 16], false);
    ranks.assert_over();
    // Not cast yet, because nobody has opened the group.
    let early = ranks.vote(1, 3, true, true);
    ranks.members[1].withdraw([3; 16], true);
    assert_eq!(early.try_recv(), Ok(false), "only the opener could have made it anything else");
    assert_eq!(told(&[ranks.vote(0, 3, true, true)]), [false]);
    assert!(early.try_recv().is_err());
    ranks.assert_over();
}

#[test]
fn a_rank_that_dies_before_its_vote_ends_the_group() {
    for lasting in [false, true] {
        for dead in 0..3 {
            let mut ranks = ranks(3);
            let living = [(dead + 1) % 3, (dead + 2) % 3];
            let votes = living.map(|rank| ranks.vote(rank, 9, lasting, true));
            let stay = ranks.die(dead);
            // Nothing happens without proof.
            assert!(votes.iter().all(|told| told.try_recv().is_err()));
            assert!(ranks.members[living[0]].reap(stay.id, None).done);
            assert_eq!(told(&votes), [false; 2], "rank {dead}");
            ranks.assert_over();
            // The next attempt names a member that is gone.
            let votes = living.map(|rank| ranks.vote(rank, 10, lasting, true));
            assert_eq!(told(&votes), [false; 2], "rank {dead}");
            ranks.assert_over();
        }
    }
}

#[test]
fn a_vote_outlives_its_voter_only_if_what_it_is_for_does() {
    for (lasting, dead) in [(false, 0), (false, 1), (true, 0), (true, 1)] {
        let mut ranks = ranks(3);
        let votes = [ranks.vote(0, 9, lasting, true), ranks.vote(1, 9, lasting, true)];
        let stay = ranks.die(dead);
        assert!(ranks.members[2].reap(stay.id, None).done);
        let last = ranks.vote(2, 9, lasting, true);
        assert_eq!(last.recv_timeout(SOON), Ok(lasting), "rank {dead}");
        assert_eq!(votes[1 - dead].recv_timeout(SOON), Ok(lasting));
        ranks.assert_over();
    }
}

#[test]
fn a_dead_rank_s_unfinished_steps_are_finished() {
    // All have voted, nobody has decided.
    let mut r = ranks(2);
    let first = r.vote(0, 1, true, true);
    let stay = r.die(1);
    r.first().ready[0].fetch_or(1 << stay.id.0, Ordering::SeqCst);
    r.members[0].reap(stay.id, None);
    assert_eq!(told(&[first]), [true]);
    r.assert_over();
    // Decided, nobody was told.
    let mut r = ranks(2);
    let first = r.vote(0, 1, false, true);
    let stay = r.die(1);
    let word = &r.first().word;
    word.store(
        word.load(Ordering::SeqCst) & !0xff | GroupState::Committed as u64,
        Ordering::SeqCst,
    );
    r.members[0].reap(stay.id, None);
    assert_eq!(told(&[first]), [true]);
    r.assert_over();
    // Let go of by all, not freed; and taken, not opened.
    let mut r = ranks(2);
    let stay = r.die(1);
    let [aborted, opening] = [GroupState::Aborted, GroupState::Opening].map(|state| state as u64);
    r.first().word.store(aborted | 1 << 17 | 7 << 32, Ordering::SeqCst);
    r.control.region.groups()[1]
        .word
        .store(opening | u64::from(stay.id.0) << 8 | 7 << 32, Ordering::SeqCst);
    r.members[0].reap(stay.id, None);
    r.assert_over();
}

/// A member that was cleared up after before the record was open: nobody will ever do so again.
#[test]
fn an_opener_looks_at_its_members_again() {
    let mut ranks = ranks(3);
    let stay = ranks.die(2);
    assert!(ranks.members[1].reap(stay.id, None).done);
    let opened = group::open(&ranks.members[0].inner, [5, 5], true, &ranks.roster);
    assert!(matches!(opened, group::Opened::Yes(_)));
    assert_eq!(ranks.in_state(GroupState::Aborted), 1);
    assert_eq!(ranks.first().holders(), Seats::of(&ranks.roster[..2]));
}

#[test]
fn leaving_and_expulsion_end_groups_too() {
    for (gone, voted) in [(0, false), (1, false), (0, true), (1, true)] {
        let mut ranks = ranks(2);
        let mine = voted.then(|| ranks.vote(gone, 9, true, true));
        let other = ranks.vote(1 - gone, 9, true, true);
        if voted {
            assert_eq!(told(&[mine.unwrap(), other]), [true; 2]);
        } else {
            let stay = ranks.roster[gone];
            drop(ranks.members.remove(gone));
            assert_eq!(told(&[other]), [false]);
            assert_eq!(ranks.members[0].votes_out(), 0, "{stay:?}");
        }
        ranks.assert_over();
    }
    // Leaving takes back what was voted, whatever it was for.
    let mut left = ranks(2);
    let votes = [left.vote(1, 9, true, true), left.vote(0, 8, true, true)];
    drop(left.members.remove(1));
    assert_eq!(told(&votes), [false; 2]);
    left.assert_over();
    // Expelled, it hears so, and its vote is worth what a dead member's is.
    for opener in [false, true] {
        let expelled = ranks(2);
        let (gone, other) = if opener { (0, 1) } else { (1, 0) };
        let votes = [expelled.vote(0, 9, false, true), expelled.vote(0, 8, false, true)];
        let late = expelled.vote(1, 7, false, true);
        let stay = expelled.roster[gone];
        assert!(expelled.members[other].expel(stay.id, stay.generation).done);
        assert_eq!(told(&votes), [false; 2]);
        assert_eq!(told(&[late]), [false]);
        eventually("no votes", || expelled.members.iter().all(|member| member.votes_out() == 0));
        let error = expelled.members[gone].vote(
            GroupVote {
                group: [1; 16],
                lasting: false,
                roster: expelled.roster.clone(),
                ready: true,
            },
            Box::new(|decision| assert!(!decision)),
        );
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Fenced);
        if opener {
            // Its records wait for the other to take note.
            let votes = [9, 8].map(|group| expelled.vote(1, group, false, true));
            assert_eq!(told(&votes), [false; 2]);
        }
        expelled.assert_over();
    }
}

/// A new stay on a dead rank's seat has no say in what its predecessor was in.
#[test]
fn a_seat_s_next_holder_is_nobody_in_the_old_group() {
    let mut ranks = ranks(3);
    let early = ranks.vote(0, 9, false, true);
    let stay = ranks.die(1);
    assert!(ranks.members[0].reap(stay.id, None).done);
    assert_eq!(told(&[early]), [false]);
    // The record waits for rank 2 to take note.
    assert_eq!(ranks.in_state(GroupState::Aborted), 1);
    let next = rank(&ranks.control);
    assert_eq!(next.id(), stay.id);
    ranks.members[1] = next;
    ranks.roster[1] = ranks.members[1].stay();
    let again = [ranks.vote(1, 9, false, true), ranks.vote(0, 9, false, true)];
    assert_eq!(told(&[ranks.vote(2, 9, false, true)]), [false], "of the old attempt");
    let late = ranks.vote(2, 9, false, true);
    assert_eq!(told(&again), [true; 2]);
    assert_eq!(told(&[late]), [true]);
    ranks.assert_over();
}

#[test]
fn a_full_table_makes_votes_wait_and_loses_none() {
    let ranks = ranks(2);
    let groups = u8::try_from(MAX_GROUPS / 2 + 2).unwrap();
    let vote = |rank| {
        let both = |group| [false, true].map(|lasting| ranks.vote(rank, group, lasting, true));
        (0..groups).flat_map(both).collect::<Vec<_>>()
    };
    let opened = vote(0);
    assert_eq!(ranks.in_state(GroupState::Open), MAX_GROUPS);
    assert_eq!(ranks.members[0].votes_out(), MAX_GROUPS + 4);
    let seen = ranks.control.inspect().groups;
    assert_eq!((seen.records, seen.open, seen.decided), (MAX_GROUPS as u64, MAX_GROUPS as u64, 0));
    let others = vote(1);
    assert!(told(&opened).into_iter().chain(told(&others)).all(|commit| commit));
    ranks.assert_over();
}

#[test]
fn what_makes_no_sense_is_refused_and_told() {
    let ranks = ranks(2);
    let [a, b] = [ranks.roster[0], ranks.roster[1]];
    let stranger = MemberStay { generation: a.generation + 1, ..a };
    for roster in [vec![], vec![b], vec![a, a], vec![stranger, b]] {
        let (send, told) = channel();
        let vote = GroupVote { group: [1; 16], lasting: false, roster, ready: true };
        let decided = Box::new(move |decision| send.send(decision).unwrap());
        let error = ranks.members[0].vote(vote, decided).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert_eq!(told.try_recv(), Ok(false));
    }
    // Twice in one attempt.
    let first = ranks.vote(0, 1, false, true);
    let vote =
        GroupVote { group: [1; 16], lasting: false, roster: ranks.roster.clone(), ready: true };
    let error = ranks.members[0].vote(vote, Box::new(|decision| assert!(!decision)));
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Invalid);
    // Ranks that do not agree on who they are.
    let (send, other) = channel();
    let third = rank(&ranks.control).stay();
    let roster = vec![a, b, third];
    let vote = GroupVote { group: [1; 16], lasting: false, roster, ready: true };
    let decided = Box::new(move |decision| send.send(decision).unwrap());
    ranks.members[1].vote(vote, decided).unwrap();
    assert_eq!(told(&[first, other]), [false; 2]);
    ranks.assert_over();
}

/// A member was cleared up after before the group was opened; the opener dies before it has looked
/// (`group.open.after`). Mutants: no trace of whether the opener has looked; a reaper that leaves it.
#[test]
fn d1_a_record_whose_opener_died_early_is_kept_by_nobody() {
    for found in [false, true] {
        let ranks = ranks(3);
        let [opener, other, x] = [0, 1, 2].map(|rank| &ranks.members[rank]);
        x.inner.fence();
        assert!(other.reap(x.id(), None).done);
        // What `claim` leaves at that point.
        let record = ranks.first();
        record.id.iter().for_each(|half| half.store(5, Ordering::SeqCst));
        let seats = Seats::of(&ranks.roster).iter().map(|seat| 1_u64 << seat).sum();
        record.members[0].store(seats, Ordering::SeqCst);
        record.holders[0].store(seats, Ordering::SeqCst);
        let open = GroupState::Open as u64 | u64::from(opener.id().0) << 8 | 1 << 32;
        record.word.store(open, Ordering::SeqCst);
        let find = || group::find(&ranks.control.region, [5, 5], false, other.id().0);
        let seated = found.then(find).flatten();
        opener.inner.fence();
        assert!(other.reap(opener.id(), None).done);
        if let Some(seated) = seated {
            assert_eq!(group::decision(&ranks.control.region, seated), Some(false));
            group::let_go(&other.inner, seated);
        }
        assert!(find().is_none());
        ranks.assert_over();
    }
}

/// An opener is stopped and expelled before it has looked at the members, and all others have let go. It is
/// about to take members out of this record, so the record is nobody else's until it has.
/// Mutant: an unsettled record is freed under its opener.
#[test]
fn w6_a_record_is_not_freed_while_its_opener_is_about_to_change_it() {
    let ranks = ranks(2);
    let (opener, other) = (&ranks.members[0], &ranks.members[1]);
    let record = ranks.first();
    record.id.iter().for_each(|half| half.store(5, Ordering::SeqCst));
    let seats = Seats::of(&ranks.roster).iter().map(|seat| 1_u64 << seat).sum();
    record.members[0].store(seats, Ordering::SeqCst);
    record.holders[0].store(seats, Ordering::SeqCst);
    let open = GroupState::Open as u64 | u64::from(opener.id().0) << 8 | 1 << 32;
    record.word.store(open, Ordering::SeqCst);
    let seated = group::find(&ranks.control.region, [5, 5], false, other.id().0).unwrap();
    assert!(other.expel(opener.id(), opener.generation()).done);
    assert_eq!(group::decision(&ranks.control.region, seated), Some(false));
    group::let_go(&other.inner, seated);
    assert_eq!(ranks.in_state(GroupState::Aborted), 1, "freed under its opener");
    // Its end frees it.
    let seat = opener.id();
    assert!(other.reap(seat, None).done);
    ranks.assert_over();
}

/// A member that was declared gone rings nobody at its end, and is dropped while the thread that tells has
/// it in hand. Mutant: that thread sleeps without a look at whether it is to go on.
#[test]
fn q8_a_thread_that_ends_its_own_member_ends() {
    let control = cache(4);
    let (member, other) = (rank(&control), rank(&control));
    let roster = vec![member.stay(), other.stay()];
    let vote = || GroupVote { group: [1; 16], lasting: false, roster: roster.clone(), ready: true };
    let (send, told) = channel();
    let (open, gate) = channel();
    let decided = move |commit| {
        send.send((commit, rustix::thread::gettid())).unwrap();
        gate.recv().unwrap();
    };
    member.vote(vote(), Box::new(decided)).unwrap();
    // Else it might hear of the decision before its bell rings, and not sleep for that.
    until_asleep(&control.region.member(member.id().0).unwrap().group_bell.0);
    other.vote(vote(), Box::new(|_| {})).unwrap();
    let (commit, thread) = told.recv_timeout(SOON).unwrap();
    assert!(commit);
    assert_ne!(thread, rustix::thread::gettid());
    member.inner.fence();
    drop(member);
    open.send(()).unwrap();
    let task = format!("/proc/self/task/{}", thread.as_raw_nonzero());
    eventually("the end of the thread", || !std::path::Path::new(&task).exists());
    assert_eq!(control.inspect().problems, Vec::<String>::new());
}
