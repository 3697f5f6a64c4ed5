//! The joiner's side: before it sits down, everybody who lives knows it, and it holds everybody's process.
//!
//! * Who answered knows the joiner. Who has not answered for a while is stopped, or very slow: the joiner
//!   waits in its queue, and greets it again should it be refused there (`steward`).
//! * Who refuses for lack of descriptors, whose queue is full, or whose socket has lost its name (the
//!   member that answers tells it, and it puts the name back) is tried again until the deadline.
//! * Who sat without a goodbye, but gave up socket and seat, is ending or has become another program. It
//!   needs to know nobody; its process is passed on by the member that answers.
//!
//! **Invariant:** `meet` returns true only if each stay that the answering member lists, and each seat that
//! somebody holds, is one of the above.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use crate::fork::GuardedFd;
use crate::rendezvous::config::{LayoutTag, Token};
use crate::rendezvous::directory::Directory;
use crate::rendezvous::probe::{
    Knock, PATIENCE, Prospect, Reached, Told, Welcome, knock, wait_readable,
};
use crate::rendezvous::process::{Life, is_closed};
use crate::rendezvous::socket::Receiver;
use crate::rendezvous::watch::PeerWatch;
use crate::rendezvous::wire::{Message, Refusal};
use crate::{DataError, ErrorKind};

/// What is needed to reach others.
pub(crate) struct Way<'a> {
    pub(crate) directory: &'a Directory,
    pub(crate) layout: &'a LayoutTag,
    pub(crate) watch: &'a PeerWatch,
}

/// Why a joiner cannot sit down yet.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Lack {
    /// It was reached a moment ago.
    Answer,
    /// It is out of descriptors.
    Limit { pid: i32 },
    /// Too many are joining there.
    Crowd { pid: i32 },
    /// Its queue is full.
    Room { seat: u16 },
    /// It holds its seat, but nobody listens there.
    Name { seat: u16 },
}

impl Reached {
    /// Waits until everybody is acquainted; `false` if the member that answered is gone and all is to be
    /// begun again.
    pub(crate) fn meet(
        &mut self,
        way: &Way<'_>,
        welcome: &Welcome,
        deadline: Instant,
    ) -> Result<bool, DataError> {
        let mut receiver = Receiver::with_fds();
        let mut pause = Duration::from_millis(1);
        let mut seats: Vec<u16> = welcome.peers.iter().map(|(seat, _)| *seat).collect();
        seats.append(&mut self.occupied);
        seats.sort_unstable();
        seats.dedup();
        self.occupied = seats;
        loop {
            let mut lack = None;
            for seat in self.occupied.clone() {
                lack = match (self.lack(way, welcome, seat, &mut receiver)?, lack) {
                    (None | Some(Lack::Answer), Some(other)) => Some(other),
                    (this, _) => this,
                };
            }
            if self.source(welcome).is_none_or(|source| source.gone) {
                return Ok(false);
            }
            let Some(lack) = lack else { return Ok(true) };
            let now = Instant::now();
            if now >= deadline {
                return lack.error().map_or(Ok(true), Err);
            }
            let unanswered = self.prospects.iter().filter(|p| p.welcome.is_none() && !p.gone);
            let sockets: Vec<_> = unanswered.map(|p| p.socket.as_fd()).collect();
            wait_readable(&sockets, deadline.min(now + pause))?;
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }

    fn source(&mut self, welcome: &Welcome) -> Option<&mut Prospect> {
        self.prospects.iter_mut().find(|prospect| prospect.seat == welcome.seat)
    }

    /// What is lacking at this seat.
    fn lack(
        &mut self,
        way: &Way<'_>,
        welcome: &Welcome,
        seat: u16,
        receiver: &mut Receiver,
    ) -> Result<Option<Lack>, DataError> {
        if self.told.iter().any(|told| told.seat == seat) {
            return Ok(None);
        }
        let mut before = None;
        if let Some(prospect) = self.prospects.iter_mut().find(|prospect| prospect.seat == seat) {
            // First, so that what it said before is heard.
            let closed = is_closed(prospect.socket.as_fd());
            if prospect.welcome.is_none() && !prospect.gone {
                prospect.hear(way.layout, receiver)?;
            }
            prospect.gone |= closed;
            if prospect.life.is_over() {
                return Ok(None);
            }
            if !prospect.gone {
                let young = prospect.welcome.is_none() && prospect.since.elapsed() < PATIENCE;
                return Ok(young.then(|| Lack::of(prospect.before, prospect.pid)));
            }
            if seat == welcome.seat {
                return Ok(Some(Lack::Answer));
            }
            before = prospect.refusal;
            let left = prospect.left;
            self.prospects.retain(|prospect| prospect.seat != seat || !left);
        }
        // Whoever was met stays in the list, and its process watched, until another one is met there.
        match knock(way.directory, way.layout, way.watch, seat)? {
            Knock::Met(mut prospect) => {
                let lack = Lack::of(before, prospect.pid);
                prospect.before = before;
                self.prospects.retain(|prospect| prospect.seat != seat);
                self.prospects.push(prospect);
                Ok(Some(lack))
            }
            Knock::Full => Ok(Some(Lack::Room { seat })),
            Knock::Foreign | Knock::Nobody => self.lack_at_empty(way, welcome, seat, receiver),
        }
    }

    /// The same where nobody of ours listens.
    fn lack_at_empty(
        &mut self,
        way: &Way<'_>,
        welcome: &Welcome,
        seat: u16,
        receiver: &mut Receiver,
    ) -> Result<Option<Lack>, DataError> {
        let held = way.directory.is_seat_held(seat)?.then_some(Lack::Name { seat });
        if !welcome.peers.iter().any(|(listed, _)| *listed == seat) {
            return Ok(held);
        }
        let Some(source) = self.source(welcome) else { return Ok(Some(Lack::Answer)) };
        match source.pass_on(seat, receiver)? {
            // It does not answer at once.
            None => Ok(Some(Lack::Name { seat })),
            Some(Passed::Over) => Ok(held),
            // On its way out, or its name is gone and it puts it back.
            Some(Passed::Talks) => Ok(Some(Lack::Name { seat })),
            Some(Passed::Silent(incarnation, life)) => {
                self.prospects.retain(|prospect| prospect.seat != seat);
                self.told.push(Told { seat, incarnation, life });
                Ok(None)
            }
        }
    }
}

/// What a member says about another one.
enum Passed {
    /// Its stay is over.
    Over,
    /// They are connected.
    Talks,
    /// It hung up without a goodbye; this is its process.
    Silent(Token, Life),
}

impl Prospect {
    fn pass_on(&mut self, seat: u16, receiver: &mut Receiver) -> Result<Option<Passed>, DataError> {
        let fits =
            |message: &Message| matches!(message, Message::Life { seat: s, .. } if *s == seat);
        let want = Message::WantLife { seat };
        let answer = self.request(&want, fits, receiver, Instant::now() + PATIENCE)?;
        let Some((Message::Life { incarnation, talks, .. }, mut fds)) = answer else {
            return Ok(None);
        };
        Ok(Some(match fds.pop() {
            None if incarnation == Token::NOBODY => Passed::Over,
            // Its end is proven, and it may not have been cleared up after.
            None => Passed::Silent(incarnation, Life::Over),
            Some(_) if talks => Passed::Talks,
            Some(fd) => Passed::Silent(incarnation, Life::Watched(GuardedFd::new(fd))),
        }))
    }
}

impl Lack {
    /// Of somebody who was reached a moment ago, and has refused before.
    pub(crate) fn of(before: Option<Refusal>, pid: i32) -> Self {
        match before {
            Some(Refusal::DescriptorLimit) => Self::Limit { pid },
            Some(Refusal::Crowded) => Self::Crowd { pid },
            _ => Self::Answer,
        }
    }

    /// `None` if it can be done without.
    pub(crate) fn error(self) -> Option<DataError> {
        let (kind, text) = match self {
            Self::Answer => return None,
            Self::Limit { pid } => return Some(at_its_limit(pid)),
            Self::Crowd { pid } => (
                ErrorKind::Deadline,
                format!(
                    "too many others have been joining at process {pid} all the time; try again"
                ),
            ),
            Self::Room { seat } => (
                ErrorKind::Deadline,
                format!(
                    "the member at seat {seat} has taken none of many joiners: it is stopped (SIGSTOP, \
                     debugger) or overrun; continue it or end it, and try again"
                ),
            ),
            Self::Name { seat } => (
                ErrorKind::Deadline,
                format!(
                    "a living process holds seat {seat}, but its socket is gone, and it has not put it \
                     back in time: it is stopped (SIGSTOP, debugger), ending, or failed (lslocks names \
                     it); continue or end it, and try again"
                ),
            ),
        };
        Some(DataError::new(kind, text))
    }
}

/// A member cannot take another one in.
fn at_its_limit(pid: i32) -> DataError {
    DataError::new(
        ErrorKind::DescriptorLimit,
        format!(
            "process {pid} of the cache is out of file descriptors and cannot take in another member; \
             raise its RLIMIT_NOFILE (prlimit --pid {pid} --nofile) and try again"
        ),
    )
}
