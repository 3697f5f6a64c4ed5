//! Who is connected, as an IO-free state machine: messages and ends of connections and processes go
//! in, replies and notices come out.
//!
//! A connection goes `Greeting → Joining → Member`. A member ends in one of two ways: it says `Bye`
//! (left) or its process is proven over (dead). A connection that merely breaks proves nothing: a
//! killed process closes its sockets before it counts as ended.
//!
//! Whoever sits is known to all others: a member that has not answered this one's hello yet, and then
//! refuses it or hangs up, is greeted again (`Again`) until it has answered or its process is over.
//!
//! **Invariant:** for every (seat, incarnation) that was announced, exactly one of `Left` and `Died`
//! is announced, at most once.

use crate::rendezvous::config::{LayoutTag, Token};
use crate::rendezvous::wire::{Message, Refusal, WIRE_VERSION};

/// Names a connection within one process.
pub(crate) type ConnId = u64;

/// What the hooks hear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    Joined(u16, Token),
    Left(u16, Token),
    Died(u16, Token),
    /// A process ended between its hello and its sitting down.
    DiedJoining,
    /// Its process goes on, but has given up the seat without a goodbye.
    Vanished(u16, Token),
}

/// What the driver does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Reply(Message),
    SendMeta {
        offset: u32,
    },
    SendFds {
        first: u32,
    },
    /// Pass hold of this member's process on, and tell the member that it is not found.
    SendLife {
        seat: u16,
    },
    /// Look whether our own name is still there.
    Rename,
    /// It does not know us: drop the connection, and greet it anew later.
    Again,
    /// Stop talking; the process is still watched if it is a member.
    Hang,
    /// Forget connection and process.
    Forget,
    /// The same of another one.
    ForgetOther(ConnId),
    Notify(Notice),
}

/// How a member ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Left,
    Dead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Connected, said nothing yet.
    Greeting,
    /// May ask for the offer.
    Joining,
    /// Listens at this seat, but has not said yet who it is.
    Silent { seat: u16 },
    /// Sits.
    Member { seat: u16, incarnation: Token, line: Line },
}

/// The connection with a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    /// We greeted it, and it has not answered: it may not know us yet.
    Unanswered,
    /// Each knows the other.
    Up,
    /// It hung up without a goodbye: it is ending, has become another program, or its steward failed.
    Down,
}

/// What this member tells joiners about itself and the offer.
#[derive(Clone, Debug)]
pub(crate) struct Me {
    pub(crate) seat: u16,
    pub(crate) incarnation: Token,
    pub(crate) boot: Token,
    pub(crate) layout: LayoutTag,
    pub(crate) meta: u32,
    pub(crate) fds: u32,
}

/// All connections of one member.
#[derive(Debug)]
pub(crate) struct Roster {
    me: Me,
    entries: Vec<(ConnId, Phase)>,
    /// Last end seen at each seat.
    fates: Vec<(u16, Token, Fate)>,
    /// Stays whose end is proven, and that this member could not clear up after.
    uncleared: Vec<(u16, Token)>,
}

impl Roster {
    pub(crate) fn new(me: Me) -> Self {
        Self { me, entries: Vec::new(), fates: Vec::new(), uncleared: Vec::new() }
    }

    /// A stranger connected.
    pub(crate) fn accepted(&mut self, id: ConnId) {
        self.entries.push((id, Phase::Greeting));
    }

    /// This member reached the listener of a seat when it joined; `answered` if it was welcomed there.
    pub(crate) fn reached(
        &mut self,
        id: ConnId,
        seat: u16,
        incarnation: Option<Token>,
        answered: bool,
    ) {
        let line = if answered { Line::Up } else { Line::Unanswered };
        let phase = match incarnation {
            Some(incarnation) => Phase::Member { seat, incarnation, line },
            None => Phase::Silent { seat },
        };
        self.entries.push((id, phase));
    }

    /// This member was told of a stay that nobody reaches any more, and holds its process.
    pub(crate) fn told_of(&mut self, id: ConnId, seat: u16, incarnation: Token) {
        self.entries.push((id, Phase::Member { seat, incarnation, line: Line::Down }));
    }

    pub(crate) fn on_message(&mut self, id: ConnId, message: Message) -> Vec<Action> {
        let known = matches!(message, Message::Seated { seat, incarnation } | Message::Welcome { seat, incarnation, .. }
            if self.members().any(|(other, s, i)| other != id && (s, i) == (seat, incarnation)));
        let me = &self.me;
        let Some((_, phase)) = self.entries.iter_mut().find(|(other, _)| *other == id) else {
            return vec![Action::Forget];
        };
        let refuse = |why| Action::Reply(Message::Refuse { why, layout: me.layout.clone() });
        match (*phase, message) {
            (Phase::Greeting, Message::Hello { wire_min, wire_max, layout }) => {
                if !(wire_min..=wire_max).contains(&WIRE_VERSION) {
                    return vec![refuse(Refusal::Wire), self.forget(id)];
                }
                if !layout.agrees_with(&me.layout) {
                    return vec![refuse(Refusal::Layout), self.forget(id)];
                }
                *phase = Phase::Joining;
                vec![Action::Reply(self.welcome())]
            }
            (Phase::Joining, Message::WantMeta { offset }) => vec![Action::SendMeta { offset }],
            (Phase::Joining, Message::WantFds { first }) => vec![Action::SendFds { first }],
            (Phase::Joining, Message::WantLife { seat }) => vec![Action::SendLife { seat }],
            // Greeted again by somebody who is known already.
            (Phase::Joining, Message::Seated { .. }) if known => vec![self.forget(id)],
            (Phase::Joining, Message::Seated { seat, incarnation }) if seat != me.seat => {
                *phase = Phase::Member { seat, incarnation, line: Line::Up };
                let mut actions = self.supersede(id, seat);
                actions.push(Action::Notify(Notice::Joined(seat, incarnation)));
                actions
            }
            // A stay that is known by a connection of its own; this one meant an earlier one.
            (Phase::Silent { .. }, Message::Welcome { .. }) if known => vec![self.forget(id)],
            (Phase::Member { incarnation: told, .. }, Message::Welcome { incarnation, .. })
                if known =>
            {
                if told == incarnation {
                    vec![self.forget(id)]
                } else {
                    self.over(id)
                }
            }
            (Phase::Silent { seat }, Message::Welcome { seat: says, incarnation, boot, .. })
                if says == seat && boot == me.boot =>
            {
                *phase = Phase::Member { seat, incarnation, line: Line::Up };
                vec![Action::Notify(Notice::Joined(seat, incarnation))]
            }
            (Phase::Silent { .. }, Message::Welcome { .. }) => vec![self.forget(id)],
            // The answer to our own Hello, after another member already told us who this is; perhaps it
            // meant an earlier stay on the seat.
            (
                Phase::Member { seat, incarnation: told, .. },
                Message::Welcome { seat: says, incarnation, .. },
            ) if says == seat => {
                *phase = Phase::Member { seat, incarnation, line: Line::Up };
                if told == incarnation {
                    Vec::new()
                } else {
                    self.ended(seat, told, Fate::Left);
                    vec![
                        Action::Notify(Notice::Left(seat, told)),
                        Action::Notify(Notice::Joined(seat, incarnation)),
                    ]
                }
            }
            (Phase::Member { .. }, Message::Unfound) => vec![Action::Rename],
            // A late answer to what this process asked before it sat down, and asked others since.
            (
                Phase::Member { .. },
                Message::Meta { .. } | Message::Fds { .. } | Message::Life { .. },
            ) => Vec::new(),
            (Phase::Greeting | Phase::Joining | Phase::Silent { .. }, Message::Bye) => {
                vec![self.forget(id)]
            }
            (Phase::Member { seat, incarnation, .. }, Message::Bye) => {
                self.ended(seat, incarnation, Fate::Left);
                vec![self.forget(id), Action::Notify(Notice::Left(seat, incarnation))]
            }
            _ => self.on_closed(id),
        }
    }

    /// Somebody sits there now: the record was free, so the stay of any other is over, unless it talks
    /// and says so itself.
    fn supersede(&mut self, by: ConnId, wanted: u16) -> Vec<Action> {
        self.uncleared.retain(|(seat, _)| *seat != wanted);
        let earlier: Vec<_> = self.entries.iter().filter(|(id, _)| *id != by).copied().collect();
        let mut actions = Vec::new();
        for (id, phase) in earlier {
            let named = match phase {
                Phase::Member { seat, incarnation, line } if seat == wanted && line != Line::Up => {
                    Some(incarnation)
                }
                Phase::Silent { seat } if seat == wanted => None,
                _ => continue,
            };
            self.forget(id);
            actions.push(Action::ForgetOther(id));
            if let Some(incarnation) = named {
                self.ended(wanted, incarnation, Fate::Left);
                actions.push(Action::Notify(Notice::Left(wanted, incarnation)));
            }
        }
        actions
    }

    /// Its stay is over, though its process and perhaps its seat are not.
    pub(crate) fn over(&mut self, id: ConnId) -> Vec<Action> {
        let Some((seat, incarnation)) = self.member(id) else { return vec![self.forget(id)] };
        self.ended(seat, incarnation, Fate::Left);
        vec![self.forget(id), Action::Notify(Notice::Left(seat, incarnation))]
    }

    /// Nobody has cleared up after this stay yet, whose end is proven.
    pub(crate) fn keep(&mut self, seat: u16, incarnation: Token) {
        if self.member_at(seat).is_none() {
            self.uncleared.push((seat, incarnation));
        }
    }

    /// Somebody has cleared up after some of these by now.
    pub(crate) fn forget_cleared(&mut self, is_cleared: impl Fn(u16, Token) -> bool) {
        self.uncleared.retain(|(seat, incarnation)| !is_cleared(*seat, *incarnation));
    }

    /// The connection broke, or carried garbage.
    pub(crate) fn on_closed(&mut self, id: ConnId) -> Vec<Action> {
        match self.entries.iter_mut().find(|(other, _)| *other == id) {
            Some((_, Phase::Silent { .. } | Phase::Member { line: Line::Unanswered, .. })) => {
                vec![Action::Again]
            }
            Some((_, Phase::Member { line, .. })) => {
                *line = Line::Down;
                vec![Action::Hang]
            }
            // It may have claimed a seat's record already. A joiner that gives up says Bye.
            Some((_, Phase::Joining)) => vec![Action::Hang],
            _ => vec![self.forget(id)],
        }
    }

    /// It does not listen at its seat any more, and has not said goodbye.
    pub(crate) fn lost(&mut self, id: ConnId) -> Vec<Action> {
        match self.entries.iter_mut().find(|(other, _)| *other == id) {
            Some((_, Phase::Member { line, .. })) => {
                *line = Line::Down;
                vec![Action::Hang]
            }
            // Whoever it is: its end is awaited.
            Some((_, Phase::Silent { .. })) => vec![Action::Hang],
            _ => vec![self.forget(id)],
        }
    }

    /// True if it was greeted by us and may not know us yet.
    pub(crate) fn is_unanswered(&self, wanted: ConnId) -> bool {
        self.entries.iter().any(|(id, phase)| {
            let open = matches!(
                phase,
                Phase::Silent { .. } | Phase::Member { line: Line::Unanswered, .. }
            );
            *id == wanted && open
        })
    }

    pub(crate) fn me(&self) -> &Me {
        &self.me
    }

    /// Whom to drop when another stranger comes: who has said nothing yet. Others rely on being known.
    pub(crate) fn mute(&self) -> Option<ConnId> {
        self.entries.iter().find(|(_, phase)| *phase == Phase::Greeting).map(|(id, _)| *id)
    }

    /// Drops a connection that is one too many.
    pub(crate) fn evict(&mut self, id: ConnId) -> Vec<Action> {
        vec![self.forget(id)]
    }

    /// The process is over. Call only after every message it had sent was handed in.
    pub(crate) fn on_exit(&mut self, id: ConnId) -> Vec<Action> {
        let phase = self.entries.iter().find(|(other, _)| *other == id).map(|(_, phase)| *phase);
        let forget = self.forget(id);
        match phase {
            Some(Phase::Member { seat, incarnation, .. }) => {
                self.ended(seat, incarnation, Fate::Dead);
                vec![forget, Action::Notify(Notice::Died(seat, incarnation))]
            }
            // Or it sat, and never said who it was.
            Some(Phase::Joining | Phase::Silent { .. }) => {
                vec![forget, Action::Notify(Notice::DiedJoining)]
            }
            _ => vec![forget],
        }
    }

    /// Connections that have not sat down yet, oldest first.
    pub(crate) fn strangers(&self) -> impl Iterator<Item = ConnId> + '_ {
        self.entries
            .iter()
            .filter(|(_, phase)| matches!(phase, Phase::Greeting | Phase::Joining))
            .map(|(id, _)| *id)
    }

    /// Members: connection, seat, incarnation.
    pub(crate) fn members(&self) -> impl Iterator<Item = (ConnId, u16, Token)> + '_ {
        self.entries.iter().filter_map(|(id, phase)| match phase {
            Phase::Member { seat, incarnation, .. } => Some((*id, *seat, *incarnation)),
            _ => None,
        })
    }

    /// The seat's member, and whether this one and it are connected.
    pub(crate) fn member_at(&self, wanted: u16) -> Option<(ConnId, Token, bool)> {
        self.entries.iter().find_map(|(id, phase)| match *phase {
            Phase::Member { seat, incarnation, line } if seat == wanted => {
                Some((*id, incarnation, line != Line::Down))
            }
            _ => None,
        })
    }

    /// A stay on this seat whose end is proven, and that nobody is known to have cleared up after.
    pub(crate) fn uncleared_at(&self, wanted: u16) -> Option<Token> {
        let found = self.uncleared.iter().find(|(seat, _)| *seat == wanted);
        found.map(|(_, incarnation)| *incarnation)
    }

    /// The connection of this stay.
    pub(crate) fn conn_of(&self, seat: u16, incarnation: Token) -> Option<ConnId> {
        let found = self.members().find(|(_, s, i)| (*s, *i) == (seat, incarnation));
        found.map(|(id, ..)| id)
    }

    /// The member of this connection: seat, incarnation.
    pub(crate) fn member(&self, wanted: ConnId) -> Option<(u16, Token)> {
        self.members().find(|(id, ..)| *id == wanted).map(|(_, seat, stay)| (seat, stay))
    }

    /// The seat at which this connection's process listens.
    pub(crate) fn seat_of(&self, wanted: ConnId) -> Option<u16> {
        self.entries.iter().find(|(id, _)| *id == wanted).and_then(|(_, phase)| match *phase {
            Phase::Silent { seat } | Phase::Member { seat, .. } => Some(seat),
            _ => None,
        })
    }

    /// The last end seen at each seat.
    pub(crate) fn fates(&self) -> &[(u16, Token, Fate)] {
        &self.fates
    }

    fn welcome(&self) -> Message {
        // Also those that do not talk: they may be ending, and write until their process is over. They
        // belong to those who hold it.
        let peers = self.members().map(|(_, seat, incarnation)| (seat, incarnation));
        let peers = peers.chain(self.uncleared.iter().copied());
        let me = &self.me;
        Message::Welcome {
            seat: me.seat,
            incarnation: me.incarnation,
            boot: me.boot,
            peers: peers.take(usize::from(crate::rendezvous::config::MAX_SEATS)).collect(),
            meta: me.meta,
            fds: me.fds,
        }
    }

    fn ended(&mut self, seat: u16, incarnation: Token, fate: Fate) {
        self.fates.retain(|(other, _, _)| *other != seat);
        self.fates.push((seat, incarnation, fate));
    }

    fn forget(&mut self, id: ConnId) -> Action {
        self.entries.retain(|(other, _)| *other != id);
        Action::Forget
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn layout(version: u32) -> LayoutTag {
        LayoutTag {
            protocol: 1,
            layout_version: version,
            fingerprint: [9; 32],
            text: format!("layout {version}"),
        }
    }

    fn roster() -> Roster {
        Roster::new(Me {
            seat: 0,
            incarnation: Token([1; 16]),
            boot: Token([2; 16]),
            layout: layout(7),
            meta: 10,
            fds: 3,
        })
    }

    fn hello(version: u32) -> Message {
        Message::hello(&layout(version))
    }

    fn seat(roster: &mut Roster, id: ConnId, seat: u16, incarnation: Token) {
        roster.accepted(id);
        roster.on_message(id, hello(7));
        let actions = roster.on_message(id, Message::Seated { seat, incarnation });
        assert_eq!(actions, [Action::Notify(Notice::Joined(seat, incarnation))]);
    }

    /// Regression: who had hung up was left out, and the joiner took its seat and cleared up after it while
    /// it could still write. Mutant: only those that talk are listed.
    #[test]
    fn d1_a_joiner_is_welcomed_with_all_whose_process_is_not_over() {
        let mut roster = roster();
        let (a, b) = (Token([3; 16]), Token([4; 16]));
        seat(&mut roster, 1, 5, a);
        seat(&mut roster, 2, 6, b);
        assert_eq!(roster.on_closed(2), [Action::Hang]);
        roster.accepted(3);
        let actions = roster.on_message(3, hello(7));
        let [Action::Reply(Message::Welcome { peers, meta: 10, fds: 3, .. })] = &actions[..] else {
            panic!("{actions:?}");
        };
        assert_eq!(peers, &[(5, a), (6, b)]);
        assert_eq!(roster.member_at(5), Some((1, a, true)));
        assert_eq!(roster.member_at(6), Some((2, b, false)));
        assert_eq!(
            roster.on_message(3, Message::WantLife { seat: 6 }),
            [Action::SendLife { seat: 6 }]
        );
        assert_eq!(
            roster.on_message(3, Message::WantFds { first: 2 }),
            [Action::SendFds { first: 2 }]
        );
    }

    /// The hook could not clear up: the joiner is told, until somebody sits there again. Mutant: not listed.
    #[test]
    fn d1_a_stay_that_is_over_and_not_cleared_up_is_told_to_joiners() {
        let mut roster = roster();
        let (old, new) = (Token([3; 16]), Token([4; 16]));
        seat(&mut roster, 1, 5, old);
        roster.on_exit(1);
        roster.keep(5, old);
        let listed = |roster: &mut Roster, id| {
            roster.accepted(id);
            match &roster.on_message(id, hello(7))[..] {
                [Action::Reply(Message::Welcome { peers, .. })] => peers.clone(),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(listed(&mut roster, 2), [(5, old)]);
        assert_eq!((roster.member_at(5), roster.uncleared_at(5)), (None, Some(old)));
        seat(&mut roster, 3, 5, new);
        assert_eq!(listed(&mut roster, 4), [(5, new)]);
        assert_eq!(roster.uncleared_at(5), None);
        // It sits there: the news is late.
        roster.keep(5, old);
        assert_eq!(roster.uncleared_at(5), None);
        roster.keep(9, old);
        roster.forget_cleared(|seat, incarnation| (seat, incarnation) == (9, new));
        assert_eq!(roster.uncleared_at(9), Some(old));
        roster.forget_cleared(|seat, incarnation| (seat, incarnation) == (9, old));
        assert_eq!(roster.uncleared_at(9), None);
    }

    /// Whoever sits down where another one has hung up: that one's stay is over. Mutants: it stays; one that talks goes.
    #[test]
    fn d5_a_new_stay_ends_the_one_before_that_had_hung_up() {
        let mut roster = roster();
        let [old, new, other] = [3, 4, 5].map(|n| Token([n; 16]));
        seat(&mut roster, 1, 5, old);
        seat(&mut roster, 2, 6, other);
        assert_eq!(roster.on_closed(1), [Action::Hang]);
        roster.accepted(3);
        roster.on_message(3, hello(7));
        let actions = roster.on_message(3, Message::Seated { seat: 5, incarnation: new });
        let expected = [
            Action::ForgetOther(1),
            Action::Notify(Notice::Left(5, old)),
            Action::Notify(Notice::Joined(5, new)),
        ];
        assert_eq!(actions, expected);
        assert_eq!(roster.member_at(5), Some((3, new, true)));
        assert_eq!(roster.fates(), [(5, old, Fate::Left)]);
        assert_eq!(roster.on_exit(1), [Action::Forget]);
        assert_eq!(roster.member_at(6), Some((2, other, true)));
        // The same of one that has not answered, or never said who it was.
        roster.reached(4, 7, Some(old), false);
        roster.reached(5, 7, None, false);
        roster.accepted(6);
        roster.on_message(6, hello(7));
        let actions = roster.on_message(6, Message::Seated { seat: 7, incarnation: new });
        let expected = [
            Action::ForgetOther(4),
            Action::Notify(Notice::Left(7, old)),
            Action::ForgetOther(5),
            Action::Notify(Notice::Joined(7, new)),
        ];
        assert_eq!(actions, expected);
    }

    /// What others say of a stay is corrected by who sits there. Mutant: the welcome's name is not taken.
    #[test]
    fn d5_a_welcome_says_whose_stay_it_is() {
        let mut roster = roster();
        let [old, new] = [3, 4].map(|n| Token([n; 16]));
        roster.reached(1, 5, Some(old), false);
        let welcome = |seat, incarnation| Message::Welcome {
            seat,
            incarnation,
            boot: Token([2; 16]),
            peers: vec![],
            meta: 0,
            fds: 0,
        };
        let actions = roster.on_message(1, welcome(5, new));
        let expected =
            [Action::Notify(Notice::Left(5, old)), Action::Notify(Notice::Joined(5, new))];
        assert_eq!(actions, expected);
        assert_eq!(roster.member(1), Some((5, new)));
        assert_eq!(roster.on_message(1, welcome(5, new)), []);
        // One that speaks for another seat is not believed.
        assert_eq!(roster.on_message(1, welcome(6, new)), [Action::Hang]);
        // Of one that is known by its own connection nothing is told twice.
        roster.reached(2, 5, Some(old), false);
        let ends = [Action::Forget, Action::Notify(Notice::Left(5, old))];
        assert_eq!(roster.on_message(2, welcome(5, new)), ends);
        roster.reached(3, 5, None, false);
        assert_eq!(roster.on_message(3, welcome(5, new)), [Action::Forget]);
    }

    /// It sat, perhaps, and never said who it was: its record must be looked for. Mutant: no notice.
    #[test]
    fn d1_the_end_of_one_that_never_answered_is_heard() {
        let mut roster = roster();
        roster.reached(1, 5, None, false);
        let expected = [Action::Forget, Action::Notify(Notice::DiedJoining)];
        assert_eq!(roster.on_exit(1), expected);
        // A seat that is free proves nothing of its process.
        roster.reached(2, 6, None, false);
        assert_eq!(roster.lost(2), [Action::Hang]);
        assert_eq!(roster.on_exit(2), expected);
    }

    #[test]
    fn d8_other_layouts_and_wire_versions_are_refused_with_our_own_tag() {
        let mut roster = roster();
        roster.accepted(1);
        let refuse = |why| Action::Reply(Message::Refuse { why, layout: layout(7) });
        assert_eq!(roster.on_message(1, hello(8)), [refuse(Refusal::Layout), Action::Forget]);
        roster.accepted(2);
        let newer = Message::Hello { wire_min: WIRE_VERSION + 1, wire_max: 9, layout: layout(7) };
        assert_eq!(roster.on_message(2, newer), [refuse(Refusal::Wire), Action::Forget]);
    }

    #[test]
    fn a_broken_connection_is_no_death_and_a_bye_is_a_leave() {
        let mut roster = roster();
        let (a, b) = (Token([3; 16]), Token([4; 16]));
        seat(&mut roster, 1, 5, a);
        assert_eq!(roster.on_closed(1), [Action::Hang]);
        assert_eq!(roster.members().count(), 1);
        let died = [Action::Forget, Action::Notify(Notice::Died(5, a))];
        assert_eq!(roster.on_exit(1), died);
        assert_eq!(roster.on_exit(1), [Action::Forget]);
        seat(&mut roster, 2, 5, b);
        let left = [Action::Forget, Action::Notify(Notice::Left(5, b))];
        assert_eq!(roster.on_message(2, Message::Bye), left);
        assert_eq!(roster.fates(), [(5, b, Fate::Left)]);
    }

    #[test]
    fn d1_a_joiner_that_dies_before_it_sits_is_reported_and_one_that_gives_up_is_not() {
        let mut roster = roster();
        roster.accepted(1);
        roster.on_message(1, hello(7));
        assert_eq!(roster.on_closed(1), [Action::Hang]);
        assert_eq!(roster.on_exit(1), [Action::Forget, Action::Notify(Notice::DiedJoining)]);
        roster.accepted(2);
        roster.on_message(2, hello(7));
        assert_eq!(roster.on_message(2, Message::Bye), [Action::Forget]);
        assert_eq!(roster.on_exit(2), [Action::Forget]);
    }

    #[test]
    fn a_stranger_cannot_fetch_or_sit_without_a_greeting() {
        for message in [
            Message::WantMeta { offset: 0 },
            Message::WantFds { first: 0 },
            Message::Seated { seat: 1, incarnation: Token([0; 16]) },
            Message::Bye,
        ] {
            let mut roster = roster();
            roster.accepted(1);
            assert_eq!(roster.on_message(1, message), [Action::Forget]);
        }
    }

    #[test]
    fn a_silent_member_becomes_known_by_its_own_welcome_of_the_same_boot() {
        let a = Token([3; 16]);
        let welcome = |boot| Message::Welcome {
            seat: 5,
            incarnation: a,
            boot,
            peers: vec![],
            meta: 0,
            fds: 0,
        };
        let mut known = roster();
        known.reached(1, 5, None, false);
        let joined = [Action::Notify(Notice::Joined(5, a))];
        assert_eq!(known.on_message(1, welcome(Token([2; 16]))), joined);
        let mut foreign = roster();
        foreign.reached(1, 5, None, false);
        assert_eq!(foreign.on_message(1, welcome(Token([8; 16]))), [Action::Forget]);
    }

    /// Mutants: a refusal is taken for a broken connection; an answer is not noted.
    #[test]
    fn a05_a_member_that_never_answered_is_greeted_again_until_it_has() {
        let (a, b) = (Token([3; 16]), Token([4; 16]));
        let mut roster = roster();
        roster.reached(1, 5, Some(a), false);
        let refuse = Message::Refuse { why: Refusal::DescriptorLimit, layout: layout(7) };
        assert_eq!(roster.on_message(1, refuse), [Action::Again]);
        assert_eq!(roster.on_closed(1), [Action::Again]);
        assert!(roster.is_unanswered(1));
        let welcome = Message::Welcome {
            seat: 5,
            incarnation: a,
            boot: Token([2; 16]),
            peers: vec![],
            meta: 0,
            fds: 0,
        };
        assert_eq!(roster.on_message(1, welcome), []);
        assert!(!roster.is_unanswered(1));
        assert_eq!(roster.on_closed(1), [Action::Hang]);
        // The other side: who greets again is announced once.
        seat(&mut roster, 2, 6, b);
        roster.accepted(3);
        roster.on_message(3, hello(7));
        let again = Message::Seated { seat: 6, incarnation: b };
        assert_eq!(roster.on_message(3, again), [Action::Forget]);
        assert_eq!(roster.on_message(2, Message::Unfound), [Action::Rename]);
    }

    /// Mutant: the oldest stranger is dropped, whoever it is.
    #[test]
    fn a05_only_who_has_said_nothing_gives_way() {
        let mut roster = roster();
        roster.accepted(1);
        roster.on_message(1, hello(7));
        roster.accepted(2);
        assert_eq!((roster.strangers().count(), roster.mute()), (2, Some(2)));
        assert_eq!(roster.evict(2), [Action::Forget]);
        assert_eq!(roster.mute(), None);
    }

    proptest! {
        /// Any order of events announces each stay once and ends it at most once.
        #[test]
        fn every_stay_is_announced_once_and_ends_at_most_once(
            events in prop::collection::vec((0u64..4, 0u8..6), 1..80)
        ) {
            let mut roster = roster();
            let mut stays = 0u8;
            let (mut joined, mut ended) = (Vec::new(), Vec::new());
            for (id, event) in events {
                let known = roster.entries.iter().any(|(other, _)| *other == id);
                let actions = match event {
                    0 if !known => { roster.accepted(id); vec![] }
                    1 => roster.on_message(id, hello(7)),
                    2 => {
                        stays += 1;
                        let incarnation = Token([stays; 16]);
                        let seat = 1 + u16::try_from(id).unwrap();
                        roster.on_message(id, Message::Seated { seat, incarnation })
                    }
                    3 => roster.on_message(id, Message::Bye),
                    4 => roster.on_closed(id),
                    _ => roster.on_exit(id),
                };
                for action in actions {
                    match action {
                        Action::Notify(Notice::Joined(_, stay)) => joined.push(stay),
                        Action::Notify(Notice::Left(_, stay) | Notice::Died(_, stay)) => {
                            prop_assert!(joined.contains(&stay));
                            prop_assert!(!ended.contains(&stay));
                            ended.push(stay);
                        }
                        _ => {}
                    }
                }
            }
            let sitting: Vec<_> = roster.members().map(|(_, _, stay)| stay).collect();
            prop_assert_eq!(joined.len(), ended.len() + sitting.len());
        }
    }
}
