//! The steward: one thread per member that answers joiners, sees deaths and keeps deadlines.
//!
//! It sleeps in `poll` without a timeout (or until the hooks' next deadline, or while it looks after
//! somebody that hung up) and never blocks on anybody: each reply is one non-blocking send, and who cannot
//! take it has to ask again. Its own stop and deaths come first, then what members and joiners say, then a
//! few newcomers: whoever only knocks keeps it from nothing.
//!
//! **Invariant:** hooks are called on this thread only, after the table shows what they are told;
//! a panic in a hook is caught, recorded, and the steward goes on answering.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use crate::DataError;
use crate::failpoint::failpoint;
use crate::fork::{GuardedFd, SharedFd};
use crate::rendezvous::config::{LayoutTag, Offer, Token};
use crate::rendezvous::directory::Directory;
use crate::rendezvous::membership::{Occupied, ROBBED};
use crate::rendezvous::process::{Life, Peer, limit_or_os, peer_of};
use crate::rendezvous::roster::{Action, ConnId, Notice, Roster};
use crate::rendezvous::socket::{self, Received, Receiver};
use crate::rendezvous::watch::{PeerInfo, PeerWatch};
use crate::rendezvous::wire::{FDS_PER_MESSAGE, META_CHUNK_BYTES, Message, Refusal};

/// Connections that may be in the middle of joining; the oldest that has said nothing yet gives way.
const MAX_STRANGERS: usize = 64;

/// Newcomers taken before the others have their turn.
const ACCEPTS_PER_ROUND: usize = 32;

/// First and longest pause between looks at somebody that hung up, or between greetings.
const LOOKS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));

/// Messages taken from one connection before the others have their turn.
const MESSAGES_PER_ROUND: usize = 256;

/// What a member does about the others. Called on the steward thread; must not block for long.
pub trait StewardHooks: Send + Sync {
    /// A member sat down, later than this one. Who sat already is in [`PeerWatch::peers`].
    fn on_joined(&self, seat: u16, incarnation: Token) {
        let _ = (seat, incarnation);
    }

    /// A member's process is proven over. Exactly once per stay. False if this member could not clear up
    /// after it: then whoever joins is told of that end as well.
    fn on_death(&self, seat: u16, incarnation: Token) -> bool;

    /// Whether this stay, whose end is proven and which this member could not clear up after, has been
    /// cleared up after by somebody else.
    fn is_cleared(&self, seat: u16, incarnation: Token) -> bool {
        let _ = (seat, incarnation);
        false
    }

    /// A member left in good order: nothing of it needs repair. Exactly once per stay.
    fn on_leave(&self, seat: u16, incarnation: Token);

    /// A member has given up its seat and all connections without a goodbye, and its process goes on: it
    /// has become another program (`exec`), or closed what was not its to close. Nothing of it is proven
    /// quiet before [`on_death`](Self::on_death), but it is lost to the cache. At most once per stay; a
    /// process that takes long to end is heard of as well, and one whose goodbye was lost. True if the stay
    /// is over all the same, its record given back: then it has left.
    fn on_vanished(&self, seat: u16, incarnation: Token) -> bool {
        let _ = (seat, incarnation);
        false
    }

    /// A process ended in the middle of joining: it may have claimed a record without ever sitting there.
    /// Others may be joining meanwhile. Records of stays that nobody has cleared up after may be repaired,
    /// see [`Occupied`].
    fn on_failed_join(&self, occupied: &Occupied<'_>) {
        let _ = occupied;
    }

    /// When to call [`on_deadline`](Self::on_deadline) next.
    fn next_deadline(&self) -> Option<Instant> {
        None
    }

    /// The deadline has passed.
    fn on_deadline(&self) {}
}

/// Wakes and stops the steward.
#[derive(Debug)]
pub(crate) struct Bell {
    eventfd: GuardedFd,
    stop: AtomicBool,
}

impl Bell {
    pub(crate) fn new() -> Result<Self, DataError> {
        let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| limit_or_os("eventfd", e))?;
        Ok(Self { eventfd: GuardedFd::new(fd), stop: AtomicBool::new(false) })
    }

    /// False if somebody has closed it: nothing is written to what has its number now.
    pub(crate) fn ring(&self) -> bool {
        let ours = self.eventfd.is_ours();
        if ours {
            // Full means it is ringing already.
            let _ = rustix::io::write(self.eventfd.as_fd(), &1u64.to_ne_bytes());
        }
        ours
    }

    /// False if the steward cannot hear of it.
    pub(crate) fn stop(&self) -> bool {
        self.stop.store(true, Ordering::Release);
        self.ring()
    }
}

/// One connection.
pub(crate) struct Conn {
    pub(crate) id: ConnId,
    /// `None` once the connection is broken and only the process is watched.
    pub(crate) socket: Option<SharedFd>,
    pub(crate) life: Arc<Life>,
    pub(crate) pid: i32,
    /// When to look after it again, or to greet it again.
    later: Option<Later>,
}

impl Conn {
    pub(crate) fn new(id: ConnId, socket: Option<SharedFd>, life: Arc<Life>, pid: i32) -> Self {
        Self { id, socket, life, pid, later: None }
    }

    /// Somebody who is known by its process only.
    pub(crate) fn told(id: ConnId, life: Life) -> Self {
        Self { later: Some(Later::default()), ..Self::new(id, None, Arc::new(life), 0) }
    }
}

/// Something that is tried again and again, more and more rarely.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Later {
    due: Instant,
    pause: Duration,
}

impl Default for Later {
    fn default() -> Self {
        let (first, _) = LOOKS;
        Self { due: Instant::now() + first, pause: first }
    }
}

impl Later {
    fn next(self) -> Self {
        let (_, longest) = LOOKS;
        let pause = (self.pause * 2).min(longest);
        Self { due: Instant::now() + pause, pause }
    }
}

/// The steward's own state.
pub(crate) struct Steward {
    pub(crate) seat: u16,
    pub(crate) directory: Arc<Directory>,
    pub(crate) listener: GuardedFd,
    pub(crate) conns: Vec<Conn>,
    pub(crate) next_id: ConnId,
    pub(crate) roster: Roster,
    pub(crate) layout: LayoutTag,
    pub(crate) offer: Offer,
    pub(crate) watch: PeerWatch,
    pub(crate) hooks: Arc<dyn StewardHooks>,
    pub(crate) bell: Arc<Bell>,
    pub(crate) receiver: Receiver,
    /// The file that is our socket, if seats are files.
    pub(crate) named: Option<(u64, u64)>,
    /// Given up for a moment when descriptors run out, so that a connection can be refused.
    pub(crate) spare: Option<OwnedFd>,
}

/// What `poll` found.
#[derive(Default)]
struct Ready {
    rung: bool,
    knocked: bool,
    talking: Vec<ConnId>,
    over: Vec<ConnId>,
    /// Somebody has closed our descriptors.
    robbed: bool,
}

impl Steward {
    /// Runs until the bell says stop, then says goodbye to everybody.
    pub(crate) fn run(mut self) {
        block_signals();
        self.publish();
        while !self.bell.stop.load(Ordering::Acquire) {
            let ready = self.wait();
            if ready.robbed {
                // Nothing of the others can be proved any more, and what has our numbers now is not ours.
                self.watch.poison(ROBBED.into());
                let _never_dropped = std::mem::ManuallyDrop::new(self);
                return;
            }
            if ready.rung {
                let _ = rustix::io::read(self.bell.eventfd.as_fd(), &mut [0; 8]);
            }
            let mut notices = Vec::new();
            for id in ready.over {
                // A farewell may still be in the queue.
                self.listen_to(id, &mut notices);
                let actions = self.roster.on_exit(id);
                self.perform(id, actions, &mut notices);
            }
            self.tell(std::mem::take(&mut notices));
            for id in ready.talking {
                self.listen_to(id, &mut notices);
            }
            self.look_after(&mut notices);
            self.tell(std::mem::take(&mut notices));
            if ready.knocked {
                self.accept_some(&mut notices);
                self.tell(notices);
            }
            self.keep_deadline();
        }
        self.farewell();
    }

    fn farewell(&mut self) {
        // The name goes before the listener: nobody can have bound it anew yet.
        self.directory.remove_socket(self.seat);
        failpoint!("leave.name.after");
        // Nobody new comes, but those who wait there may sit already, and have not been taken in: they
        // must not take this leave for something else.
        socket::shutdown(self.listener.as_fd());
        failpoint!("leave.listener.after");
        self.spare = None;
        while let Ok(waiting) = socket::accept(self.listener.as_fd()) {
            let _ = socket::send(waiting.as_fd(), &Message::Bye, &[]);
            socket::shutdown(waiting.as_fd());
        }
        for socket in self.conns.iter().filter_map(|conn| conn.socket.as_ref()) {
            let _ = socket::send(socket.as_fd(), &Message::Bye, &[]);
            failpoint!("leave.bye.after");
        }
        for socket in self.conns.iter().filter_map(|conn| conn.socket.as_ref()) {
            socket::shutdown(socket.as_fd());
        }
    }

    fn wait(&self) -> Ready {
        enum Who {
            Bell,
            Listener,
            Socket(ConnId),
            Process(ConnId),
        }
        let mut ready = Ready::default();
        let bell = self.bell.eventfd.as_fd();
        let listener = self.listener.as_fd();
        let mut who = vec![Who::Bell, Who::Listener];
        let mut fds: Vec<BorrowedFd<'_>> = vec![bell, listener];
        for conn in &self.conns {
            if let Some(socket) = &conn.socket {
                who.push(Who::Socket(conn.id));
                fds.push(socket.as_fd());
            }
            match conn.life.pidfd() {
                Some(pidfd) => {
                    who.push(Who::Process(conn.id));
                    fds.push(pidfd);
                }
                None => ready.over.push(conn.id),
            }
        }
        let timeout = if ready.over.is_empty() { self.timeout() } else { Some(Duration::ZERO) };
        let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
        let mut polled: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        match rustix::event::poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => {
                // Only a lack of kernel memory is left as a reason; do not spin on it.
                tracing::error!(%errno, "steward: poll failed");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        for (who, polled) in who.iter().zip(&polled) {
            if polled.revents().is_empty() {
                continue;
            }
            ready.robbed |= polled.revents().contains(PollFlags::NVAL);
            match who {
                Who::Bell => ready.rung = true,
                Who::Listener => ready.knocked = true,
                Who::Socket(id) => ready.talking.push(*id),
                Who::Process(id) => {
                    let is_over = |conn: &Conn| conn.id == *id && conn.life.is_over();
                    ready.over.extend(self.conns.iter().any(is_over).then_some(*id));
                    ready.robbed |= self.conns.iter().any(|c| c.id == *id && c.life.is_lost());
                }
            }
        }
        ready
    }

    fn timeout(&self) -> Option<Duration> {
        let hooks = &self.hooks;
        let deadline = self.guarded(|| hooks.next_deadline()).flatten();
        let looks = self.conns.iter().filter_map(|conn| conn.later);
        let next = looks.map(|later| later.due).chain(deadline).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    fn keep_deadline(&self) {
        let hooks = &self.hooks;
        let now = Instant::now();
        if self.guarded(|| hooks.next_deadline()).flatten().is_some_and(|next| next <= now) {
            self.guarded(|| hooks.on_deadline());
            // A hook that keeps naming the past costs a millisecond a round, not a whole core.
            if self.guarded(|| hooks.next_deadline()).flatten().is_some_and(|next| next <= now) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    fn accept_some(&mut self, notices: &mut Vec<Notice>) {
        for _ in 0..ACCEPTS_PER_ROUND {
            if !self.accept_next(notices) {
                return;
            }
        }
    }

    /// Takes the next connection; false when there is none, or none can be had at the moment.
    fn accept_next(&mut self, notices: &mut Vec<Notice>) -> bool {
        failpoint!("answer.accept.before");
        match socket::accept(self.listener.as_fd()) {
            Ok(socket) => self.accept_one(socket, notices),
            Err(Errno::MFILE | Errno::NFILE) => {
                // Take the connection with the spare descriptor and drop it: the joiner hears
                // at once, and `poll` does not find it again.
                let spare = self.spare.take();
                let next = spare.map(|spare| {
                    drop(spare);
                    socket::accept(self.listener.as_fd())
                });
                let refused = match next {
                    Some(Ok(socket)) => {
                        count(&self.watch.shared.counters.refused_descriptors);
                        self.refuse(&socket, Refusal::DescriptorLimit);
                        true
                    }
                    // The limit is met before the queue is looked at: nobody is there.
                    Some(Err(Errno::AGAIN)) => false,
                    _ => {
                        count(&self.watch.shared.counters.refused_descriptors);
                        std::thread::sleep(Duration::from_millis(10));
                        false
                    }
                };
                self.spare = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).ok();
                return refused;
            }
            Err(Errno::AGAIN) => return false,
            Err(errno) => {
                // The kernel is out of memory; `poll` will find the connection again.
                tracing::warn!(%errno, "steward: accept failed");
                std::thread::sleep(Duration::from_millis(10));
                return false;
            }
        }
        true
    }

    fn accept_one(&mut self, socket: OwnedFd, notices: &mut Vec<Notice>) {
        let counters = &self.watch.shared.counters;
        let Ok(peer) = peer_of(socket.as_fd()) else { return };
        if peer.uid != rustix::process::geteuid().as_raw() {
            let times = counters.refused_credentials.fetch_add(1, Ordering::Relaxed) + 1;
            // A stranger cannot fill the log: only every doubling is told.
            if times.is_power_of_two() {
                let Peer { uid, pid } = peer;
                tracing::warn!(uid, pid, times, "refused a joiner of another user");
            }
            return self.refuse(&socket, Refusal::Credentials);
        }
        let life = match Life::of_peer(socket.as_fd(), peer.pid) {
            Ok(life) => Arc::new(life),
            Err(error) => {
                count(&counters.refused_descriptors);
                tracing::warn!(%error, "refused a joiner");
                return self.refuse(&socket, Refusal::DescriptorLimit);
            }
        };
        if self.roster.strangers().count() >= MAX_STRANGERS {
            let Some(mute) = self.roster.mute() else {
                return self.refuse(&socket, Refusal::Crowded);
            };
            let actions = self.roster.evict(mute);
            self.perform(mute, actions, notices);
        }
        let id = self.next_id;
        self.next_id += 1;
        self.roster.accepted(id);
        let socket = Some(SharedFd::from(socket));
        self.conns.push(Conn::new(id, socket, life, peer.pid));
    }

    fn refuse(&self, socket: &OwnedFd, why: Refusal) {
        let message = Message::Refuse { why, layout: self.layout.clone() };
        let _ = socket::send(socket.as_fd(), &message, &[]);
    }

    /// Handles what a connection has sent.
    fn listen_to(&mut self, id: ConnId, notices: &mut Vec<Notice>) {
        // Bounded, so that a flooding peer cannot keep the steward from the others. More is never
        // queued by a well-behaved one, so a farewell before an exit is always found.
        for _ in 0..MESSAGES_PER_ROUND {
            let Some(conn) = self.conns.iter().find(|conn| conn.id == id) else { return };
            let Some(socket) = &conn.socket else { return };
            let actions = match self.receiver.receive(socket.as_fd()) {
                Received::Message { message, .. } => {
                    if matches!(message, Message::Hello { .. }) {
                        self.hear_strangers_before(id, notices);
                        let hooks = &self.hooks;
                        let is_cleared = |seat, stay| {
                            guarded(&self.watch, || hooks.is_cleared(seat, stay)) == Some(true)
                        };
                        self.roster.forget_cleared(is_cleared);
                    }
                    self.roster.on_message(id, message)
                }
                Received::Garbage(error) => {
                    tracing::warn!(%error, "hung up on a connection");
                    self.roster.on_closed(id)
                }
                Received::Closed => self.roster.on_closed(id),
                Received::Empty => return,
            };
            self.perform(id, actions, notices);
        }
    }

    /// Who sat down before a joiner said hello must be in its welcome: their messages were sent
    /// before (entering is exclusive), but `poll` may not have reported them yet.
    fn hear_strangers_before(&mut self, joiner: ConnId, notices: &mut Vec<Notice>) {
        let earlier: Vec<_> = self.roster.strangers().filter(|id| *id < joiner).collect();
        for id in earlier {
            self.listen_to(id, notices);
        }
    }

    fn perform(&mut self, id: ConnId, actions: Vec<Action>, notices: &mut Vec<Notice>) {
        for action in actions {
            match action {
                Action::Reply(message) => {
                    failpoint!("answer.welcome.before");
                    if matches!(message, Message::Refuse { .. }) {
                        count(&self.watch.shared.counters.refused_layout);
                    }
                    self.send(id, &message, &[]);
                }
                Action::SendMeta { offset } => {
                    failpoint!("answer.meta.before");
                    let rest = self.offer.meta.get(offset as usize..).unwrap_or_default();
                    let bytes = rest.iter().take(META_CHUNK_BYTES).copied().collect();
                    self.send(id, &Message::Meta { offset, bytes }, &[]);
                }
                Action::SendFds { first } => self.send_fds(id, first),
                Action::SendLife { seat } => self.send_life(id, seat),
                Action::Rename => self.rename(notices),
                Action::Hang | Action::Again => {
                    if let Some(conn) = self.conns.iter_mut().find(|conn| conn.id == id) {
                        conn.socket = None;
                        let later = conn.later.get_or_insert_default();
                        *later = Later { due: Instant::now() + later.pause, ..*later };
                    }
                }
                Action::Forget => self.conns.retain(|conn| conn.id != id),
                Action::ForgetOther(other) => self.conns.retain(|conn| conn.id != other),
                Action::Notify(notice) => notices.push(notice),
            }
        }
    }

    fn send_fds(&self, id: ConnId, first: u32) {
        failpoint!("answer.fds.before");
        let rest = self.offer.fds.get(first as usize..).unwrap_or_default();
        let fds: Vec<_> = rest.iter().take(FDS_PER_MESSAGE).map(AsFd::as_fd).collect();
        let count_here = u16::try_from(fds.len()).unwrap_or(0);
        let sent = self.send(id, &Message::Fds { first, count: count_here }, &fds);
        failpoint!("answer.fds.after");
        if sent && first as usize + fds.len() == self.offer.fds.len() {
            count(&self.watch.shared.counters.served);
        }
    }

    fn send_life(&self, id: ConnId, seat: u16) {
        failpoint!("answer.life.before");
        let found = self.roster.member_at(seat);
        let conn = found.and_then(|(of, ..)| self.conns.iter().find(|conn| conn.id == of));
        let fds = Vec::from_iter(conn.and_then(|conn| conn.life.pidfd()));
        let uncleared = self.roster.uncleared_at(seat).unwrap_or(Token::NOBODY);
        let (of, incarnation, talks) = found.unwrap_or((id, uncleared, false));
        self.send(id, &Message::Life { seat, incarnation, talks }, &fds);
        if talks {
            self.send(of, &Message::Unfound, &[]);
        }
    }

    /// False if it was not taken. Nobody is hung up on for that: a joiner asks again, and others say so
    /// little that it always fits.
    fn send(&self, id: ConnId, message: &Message, fds: &[BorrowedFd<'_>]) -> bool {
        let conn = self.conns.iter().find(|conn| conn.id == id);
        let Some(socket) = conn.and_then(|conn| conn.socket.as_ref()) else { return false };
        match socket::send(socket.as_fd(), message, fds) {
            // The peer has closed, but what it said before is still in the queue: it may have sat
            // down, and then its end must be heard of.
            Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => true,
            Err(errno) => {
                tracing::warn!(%errno, "a reply was not taken");
                false
            }
        }
    }

    /// Puts our name back if somebody has removed it.
    fn rename(&mut self, notices: &mut Vec<Notice>) {
        let named = self.directory.socket_file(self.seat);
        if self.named.is_none() || named == self.named {
            return;
        }
        // Nobody finds the old one any more: it ends when all who wait there are taken in.
        for _ in 0..socket::BACKLOG {
            if !self.accept_next(notices) {
                break;
            }
        }
        self.directory.remove_socket(self.seat);
        // Perhaps the last descriptor that can be had.
        self.spare = None;
        let listener =
            self.directory.seats().address(self.seat).and_then(|a| socket::listen_at(&a));
        match listener {
            Ok(listener) => {
                self.listener = listener;
                self.named = self.directory.socket_file(self.seat);
                tracing::warn!(seat = self.seat, "somebody had removed our socket file");
            }
            // Whoever does not find us asks again.
            Err(errno) => {
                tracing::warn!(%errno, "our socket file is gone, and cannot be made anew")
            }
        }
        self.spare = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).ok();
    }

    /// Looks after those that hung up, and greets those again that did not take us in.
    fn look_after(&mut self, notices: &mut Vec<Notice>) {
        let now = Instant::now();
        let due = |conn: &&Conn| conn.later.is_some_and(|later| later.due <= now);
        let due: Vec<_> = self.conns.iter().filter(due).map(|conn| conn.id).collect();
        for id in due {
            let open = self.conns.iter().any(|conn| conn.id == id && conn.socket.is_some());
            let Some(seat) = self.roster.seat_of(id).filter(|_| !open) else {
                // All is well again; or a joiner hung up, and its end is awaited.
                self.postpone(id, None);
                continue;
            };
            let held = self.directory.is_seat_held(seat).unwrap_or(true);
            match (self.roster.member(id), held) {
                _ if held && self.roster.is_unanswered(id) => self.greet(id, seat),
                (Some((seat, incarnation)), false) => {
                    let actions = self.roster.lost(id);
                    self.perform(id, actions, notices);
                    self.postpone(id, None);
                    notices.push(Notice::Vanished(seat, incarnation));
                }
                (None, false) => {
                    let actions = self.roster.lost(id);
                    self.perform(id, actions, notices);
                }
                // It keeps its seat: its steward has failed. Its end is awaited.
                (_, true) => self.postpone(id, Some(Later::next)),
            }
        }
    }

    fn postpone(&mut self, id: ConnId, next: Option<fn(Later) -> Later>) {
        if let Some(conn) = self.conns.iter_mut().find(|conn| conn.id == id) {
            conn.later = conn.later.and_then(|later| next.map(|next| next(later)));
        }
    }

    fn greet(&mut self, id: ConnId, seat: u16) {
        let socket = self.connect(seat);
        self.postpone(id, Some(Later::next));
        // Across PID namespaces all others have number 0; none of another user is a member.
        let user = rustix::process::geteuid().as_raw();
        let pid = |socket: &OwnedFd| {
            peer_of(socket.as_fd()).map_or(-1, |peer| if peer.uid == user { peer.pid } else { -1 })
        };
        let Some(conn) = self.conns.iter_mut().find(|conn| conn.id == id) else { return };
        let Ok(socket) = socket else { return };
        // The same number, but perhaps another process (in another PID namespace), or another stay.
        let Ok(life) = Life::of_peer(socket.as_fd(), conn.pid) else { return };
        let me = self.roster.me();
        let seated = Message::Seated { seat: me.seat, incarnation: me.incarnation };
        if pid(&socket) == conn.pid
            && socket::send(socket.as_fd(), &Message::hello(&self.layout), &[]).is_ok()
            && socket::send(socket.as_fd(), &seated, &[]).is_ok()
        {
            conn.socket = Some(SharedFd::from(socket));
            conn.life = Arc::new(life);
        }
    }

    fn connect(&self, seat: u16) -> Result<OwnedFd, Errno> {
        let address = self.directory.seats().address(seat)?;
        let socket = socket::new_socket()?;
        socket::connect(&socket, &address)?;
        Ok(socket)
    }

    /// A joiner ended half-way: its record can be found. This holds up nobody who is joining.
    fn sweep(&self) {
        let mut known = vec![self.seat];
        known.extend(self.roster.members().map(|(_, seat, _)| seat));
        let occupied = Occupied { known: &known, directory: &self.directory };
        let hooks = &self.hooks;
        failpoint!("sweep.hook.before");
        self.guarded(|| hooks.on_failed_join(&occupied));
        failpoint!("sweep.hook.after");
    }

    fn tell(&mut self, notices: Vec<Notice>) {
        if notices.is_empty() {
            return;
        }
        self.publish();
        let hooks = &self.hooks;
        let (mut sweep, mut uncleared, mut over) = (false, Vec::new(), Vec::new());
        for notice in notices {
            match notice {
                Notice::Joined(seat, incarnation) => {
                    self.guarded(|| hooks.on_joined(seat, incarnation));
                }
                Notice::Died(seat, incarnation) => {
                    count(&self.watch.shared.counters.deaths);
                    tracing::warn!(seat, %incarnation, "a member died");
                    failpoint!("death.tell.before");
                    if self.guarded(|| hooks.on_death(seat, incarnation)) != Some(true) {
                        uncleared.push((seat, incarnation));
                    }
                    failpoint!("death.tell.after");
                }
                Notice::DiedJoining => sweep = true,
                Notice::Vanished(seat, incarnation) => {
                    if self.guarded(|| hooks.on_vanished(seat, incarnation)) == Some(true) {
                        over.extend(self.roster.conn_of(seat, incarnation));
                    } else {
                        tracing::warn!(seat, %incarnation, "a member gave up its seat, but goes on");
                    }
                }
                Notice::Left(seat, incarnation) => {
                    count(&self.watch.shared.counters.leaves);
                    self.guarded(|| hooks.on_leave(seat, incarnation));
                }
            }
        }
        for (seat, incarnation) in uncleared {
            self.roster.keep(seat, incarnation);
        }
        let mut left = Vec::new();
        for id in over {
            let actions = self.roster.over(id);
            self.perform(id, actions, &mut left);
        }
        if sweep {
            self.sweep();
        }
        self.tell(left);
    }

    pub(crate) fn publish(&self) {
        let peers = self.roster.members().filter_map(|(id, seat, incarnation)| {
            let conn = self.conns.iter().find(|conn| conn.id == id)?;
            Some((PeerInfo { seat, incarnation, pid: conn.pid }, Arc::clone(&conn.life)))
        });
        self.watch.publish(|table| {
            table.peers = peers.collect();
            table.fates = self.roster.fates().to_vec();
        });
    }

    fn guarded<T>(&self, hook: impl FnOnce() -> T) -> Option<T> {
        guarded(&self.watch, hook)
    }
}

fn guarded<T>(watch: &PeerWatch, hook: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(hook)).map_err(|panic| watch.poison(panic_text(&*panic))).ok()
}

pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic".into())
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// The process's signal handlers run on the process's own threads.
fn block_signals() {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: fills the set that `all` has room for.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: `all` was filled above; only the calling thread's mask changes.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), std::ptr::null_mut()) };
}
