//! The joiner's side: reach every member, hear the first that answers, fetch the offer. Who was not
//! reached is met afterwards (`meet`).
//!
//! **Invariant:** an offer is returned whole or not at all; descriptors of an incomplete one are
//! closed. A member that does not answer is never taken for dead.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use crate::fork::SharedFd;
use crate::rendezvous::config::{LayoutTag, MAX_SEATS, Offer, Token};
use crate::rendezvous::directory::Directory;
use crate::rendezvous::meet::Lack;
use crate::rendezvous::process::{Life, descriptor_limit, limit_or_os, peer_of};
use crate::rendezvous::roster::ConnId;
use crate::rendezvous::socket::{self, Received, Receiver};
use crate::rendezvous::steward::Conn;
use crate::rendezvous::watch::PeerWatch;
use crate::rendezvous::wire::{Message, Refusal, WIRE_VERSION};
use crate::{DataError, ErrorKind};

/// How long one member may take for one piece before another one is asked.
pub(crate) const PATIENCE: Duration = Duration::from_millis(200);

/// Sockets and locks of a process that ends go within moments of each other.
const ENDING: Duration = Duration::from_millis(50);

/// What a member said in its welcome.
#[derive(Clone, Debug)]
pub(crate) struct Welcome {
    /// Who said it.
    pub(crate) seat: u16,
    pub(crate) incarnation: Token,
    pub(crate) boot: Token,
    /// Everybody else who sits, also who has not been proven over yet.
    pub(crate) peers: Vec<(u16, Token)>,
    meta: u32,
    fds: u32,
}

/// A listener that was reached.
pub(crate) struct Prospect {
    pub(crate) seat: u16,
    pub(crate) socket: SharedFd,
    pub(crate) life: Arc<Life>,
    pub(crate) pid: i32,
    pub(crate) since: Instant,
    pub(crate) welcome: Option<Welcome>,
    pub(crate) gone: bool,
    /// It said goodbye: its stay is over.
    pub(crate) left: bool,
    /// Why it is gone, if it said so.
    pub(crate) refusal: Option<Refusal>,
    /// Why it was gone when it was reached before.
    pub(crate) before: Option<Refusal>,
    kept: bool,
}

/// A stay that nobody reaches any more, with its process as another member has passed it on.
pub(crate) struct Told {
    pub(crate) seat: u16,
    pub(crate) incarnation: Token,
    pub(crate) life: Life,
}

/// All listeners that were reached.
pub(crate) struct Reached {
    pub(crate) prospects: Vec<Prospect>,
    pub(crate) told: Vec<Told>,
    /// Seats that are taken, by members (also such as cannot be reached) or by foreign listeners.
    pub(crate) occupied: Vec<u16>,
    /// A seat whose queue is full.
    pub(crate) full: Option<u16>,
}

/// What a connection attempt met.
pub(crate) enum Knock {
    Met(Prospect),
    /// A listener of another user.
    Foreign,
    /// Listening, but its queue is full: stopped, or overrun.
    Full,
    Nobody,
}

/// What came of asking.
pub(crate) enum Answer {
    /// An offer, and the welcome it came with.
    Offer(Offer, Welcome),
    /// Everybody reached has ended or left meanwhile.
    Nobody,
}

/// Connects to all seats and says hello.
pub(crate) fn reach(
    directory: &Directory,
    layout: &LayoutTag,
    watch: &PeerWatch,
) -> Result<Reached, DataError> {
    let mut reached =
        Reached { prospects: Vec::new(), told: Vec::new(), occupied: Vec::new(), full: None };
    for seat in 0..MAX_SEATS {
        match knock(directory, layout, watch, seat)? {
            Knock::Met(prospect) => reached.prospects.push(prospect),
            Knock::Full => reached.full = Some(seat),
            Knock::Foreign => {}
            Knock::Nobody if stays_held(directory, seat)? => {
                tracing::warn!(seat, "a living member's socket is gone; nobody can reach it");
            }
            Knock::Nobody => {
                directory.remove_socket(seat);
                continue;
            }
        }
        reached.occupied.push(seat);
    }
    Ok(reached)
}

/// Connects to a seat and says hello.
pub(crate) fn knock(
    directory: &Directory,
    layout: &LayoutTag,
    watch: &PeerWatch,
    seat: u16,
) -> Result<Knock, DataError> {
    let address = directory
        .seats()
        .address(seat)
        .map_err(|e| DataError::os(format!("address of seat {seat}"), e))?;
    let socket = socket::new_socket().map_err(|e| limit_or_os("socket", e))?;
    match socket::connect(&socket, &address) {
        Ok(()) => {}
        Err(Errno::CONNREFUSED | Errno::NOENT) => return Ok(Knock::Nobody),
        Err(Errno::AGAIN) => return Ok(Knock::Full),
        Err(e) => return Err(limit_or_os(&format!("connecting to seat {seat}"), e)),
    }
    let peer = peer_of(socket.as_fd())?;
    if peer.uid != rustix::process::geteuid().as_raw() {
        watch.shared.counters.foreign_seats.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(seat, uid = peer.uid, "ignored a listener of another user");
        return Ok(Knock::Foreign);
    }
    let life = Arc::new(Life::of_peer(socket.as_fd(), peer.pid)?);
    // Who hung up at once has said why.
    let _ = socket::send(socket.as_fd(), &Message::hello(layout), &[]);
    Ok(Knock::Met(Prospect {
        seat,
        socket: socket.into(),
        life,
        pid: peer.pid,
        since: Instant::now(),
        welcome: None,
        gone: false,
        left: false,
        refusal: None,
        before: None,
        kept: false,
    }))
}

/// True if a process without a socket sits there for longer than one takes that is ending: it lives,
/// and may use the memory.
fn stays_held(directory: &Directory, seat: u16) -> Result<bool, DataError> {
    let since = Instant::now();
    while directory.is_seat_held(seat)? {
        if since.elapsed() >= ENDING {
            return Ok(true);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(false)
}

impl Reached {
    /// Asks until one member has passed the whole offer, all are gone, or the deadline passes.
    pub(crate) fn ask(
        &mut self,
        layout: &LayoutTag,
        deadline: Instant,
    ) -> Result<Answer, DataError> {
        let mut receiver = Receiver::with_fds();
        loop {
            // Members that answered are asked in turn; each gets another chance while time is left.
            for index in 0..self.prospects.len() {
                let Some(prospect) = self.prospects.get_mut(index) else { continue };
                let Some(welcome) = prospect.welcome.clone().filter(|_| !prospect.gone) else {
                    continue;
                };
                let until = deadline.min(Instant::now() + PATIENCE);
                if let Some(offer) = prospect.fetch(&welcome, &mut receiver, until)? {
                    return Ok(Answer::Offer(offer, welcome));
                }
            }
            if self.prospects.iter().all(|prospect| prospect.gone) {
                return Ok(Answer::Nobody);
            }
            if Instant::now() >= deadline {
                return Err(self.no_answer());
            }
            let there = self.prospects.iter().filter(|prospect| !prospect.gone);
            let waiting: Vec<_> = there.clone().filter(|p| p.welcome.is_none()).collect();
            if !waiting.is_empty() {
                let answered = there.count() > waiting.len();
                let limit = if answered { Instant::now() } else { deadline };
                let sockets: Vec<_> = waiting.iter().map(|p| p.socket.as_fd()).collect();
                wait_readable(&sockets, limit.min(deadline))?;
            }
            for prospect in self.prospects.iter_mut().filter(|p| p.welcome.is_none() && !p.gone) {
                prospect.hear(layout, &mut receiver)?;
            }
        }
    }

    /// Why nobody has answered, where members were met.
    pub(crate) fn obstacle(&self) -> Option<DataError> {
        let refused = self.prospects.iter().filter(|prospect| prospect.refusal.is_some());
        let by_prospect = refused.map(|p| Lack::of(p.refusal, p.pid));
        by_prospect.chain(self.full.map(|seat| Lack::Room { seat })).find_map(Lack::error)
    }

    fn no_answer(&self) -> DataError {
        let there = self.prospects.iter().filter(|prospect| !prospect.gone);
        let pids: Vec<_> = there.map(|prospect| prospect.pid).collect();
        DataError::new(
            ErrorKind::Deadline,
            format!(
                "the cache is held by live processes {pids:?}, but none of them answered in time; are \
                 they stopped (SIGSTOP, debugger)? Continue or end them, or allow a longer deadline"
            ),
        )
    }
}

impl Prospect {
    /// Who sits there, if it has said so.
    pub(crate) fn incarnation(&self) -> Option<Token> {
        self.welcome.as_ref().map(|welcome| welcome.incarnation)
    }

    pub(crate) fn into_conn(mut self, id: ConnId) -> Conn {
        self.kept = true;
        Conn::new(id, Some(self.socket.clone()), Arc::clone(&self.life), self.pid)
    }

    /// Takes in a welcome or a refusal, if there is one.
    pub(crate) fn hear(
        &mut self,
        layout: &LayoutTag,
        receiver: &mut Receiver,
    ) -> Result<(), DataError> {
        match receiver.receive(self.socket.as_fd()) {
            Received::Message {
                message: Message::Welcome { seat, incarnation, boot, peers, meta, fds },
                ..
            } if seat == self.seat => {
                self.welcome = Some(Welcome { seat, incarnation, boot, peers, meta, fds });
            }
            Received::Message { message: Message::Refuse { why, layout: theirs }, .. } => {
                return self.refused(why, layout, &theirs);
            }
            Received::Empty => {}
            Received::Message { message: Message::Bye, .. } => {
                (self.gone, self.left) = (true, true)
            }
            Received::Message { .. } | Received::Garbage(_) | Received::Closed => self.gone = true,
        }
        Ok(())
    }

    fn refused(
        &mut self,
        why: Refusal,
        layout: &LayoutTag,
        theirs: &LayoutTag,
    ) -> Result<(), DataError> {
        match why {
            Refusal::Layout => Err(DataError::new(
                ErrorKind::Layout,
                format!(
                    "the live cache has {theirs}; this process has {layout}; use the same build and \
                     configuration, or another instance directory, or end process {}",
                    self.pid
                ),
            )),
            Refusal::Wire => Err(DataError::new(
                ErrorKind::Layout,
                format!(
                    "process {} speaks other rendezvous messages than this build (version \
                     {WIRE_VERSION}); it has {theirs}; this process has {layout}",
                    self.pid
                ),
            )),
            Refusal::Credentials => Err(DataError::new(
                ErrorKind::Denied,
                format!(
                    "process {} runs as another user and refused this one (uid {})",
                    self.pid,
                    rustix::process::geteuid().as_raw()
                ),
            )),
            // Another member may have passed the offer meanwhile; this one is asked again.
            Refusal::DescriptorLimit | Refusal::Crowded => {
                self.refusal = Some(why);
                self.gone = true;
                Ok(())
            }
        }
    }

    /// Fetches the offer piece by piece. `None` if this member is gone or too slow.
    fn fetch(
        &mut self,
        welcome: &Welcome,
        receiver: &mut Receiver,
        until: Instant,
    ) -> Result<Option<Offer>, DataError> {
        let mut meta = Vec::new();
        while meta.len() < welcome.meta as usize {
            let offset = u32::try_from(meta.len()).unwrap_or(u32::MAX);
            let fits = |message: &Message| matches!(message, Message::Meta { offset: o, .. } if *o == offset);
            let want = Message::WantMeta { offset };
            let Some((Message::Meta { bytes, .. }, _)) =
                self.request(&want, fits, receiver, until)?
            else {
                return Ok(None);
            };
            if bytes.is_empty() || meta.len() + bytes.len() > welcome.meta as usize {
                self.gone = true;
                return Ok(None);
            }
            meta.extend_from_slice(&bytes);
        }
        let mut fds: Vec<OwnedFd> = Vec::new();
        while fds.len() < welcome.fds as usize {
            let first = u32::try_from(fds.len()).unwrap_or(u32::MAX);
            let fits =
                |message: &Message| matches!(message, Message::Fds { first: f, .. } if *f == first);
            let want = Message::WantFds { first };
            let Some((Message::Fds { count, .. }, mut more)) =
                self.request(&want, fits, receiver, until)?
            else {
                return Ok(None);
            };
            if more.len() != usize::from(count)
                || more.is_empty()
                || fds.len() + more.len() > welcome.fds as usize
            {
                self.gone = true;
                return Ok(None);
            }
            fds.append(&mut more);
        }
        Ok(Some(Offer { meta, fds: fds.into_iter().map(Into::into).collect() }))
    }

    /// One request and its reply. Replies to earlier, given up requests are dropped.
    pub(crate) fn request(
        &mut self,
        want: &Message,
        fits: impl Fn(&Message) -> bool,
        receiver: &mut Receiver,
        until: Instant,
    ) -> Result<Option<(Message, Vec<OwnedFd>)>, DataError> {
        if socket::send(self.socket.as_fd(), want, &[]).is_err() {
            self.gone = true;
            return Ok(None);
        }
        loop {
            match receiver.receive(self.socket.as_fd()) {
                Received::Message { truncated: true, fds, .. } => {
                    return Err(descriptor_limit(&format!(
                        "only {} descriptors of a message of the live cache could be taken",
                        fds.len()
                    )));
                }
                Received::Message { message, fds, .. } if fits(&message) => {
                    return Ok(Some((message, fds)));
                }
                Received::Message { .. } => {}
                Received::Empty => {
                    if !wait_readable(&[self.socket.as_fd()], until)? {
                        return Ok(None);
                    }
                }
                Received::Garbage(_) | Received::Closed => {
                    self.gone = true;
                    return Ok(None);
                }
            }
        }
    }
}

impl Drop for Prospect {
    fn drop(&mut self) {
        // Giving up is no death: the member need not watch this process any longer.
        if !self.kept {
            let _ = socket::send(self.socket.as_fd(), &Message::Bye, &[]);
        }
    }
}

/// Waits until one socket has something to say; `false` when the time is over.
pub(crate) fn wait_readable(
    sockets: &[std::os::fd::BorrowedFd<'_>],
    until: Instant,
) -> Result<bool, DataError> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).ok();
        let mut polled: Vec<_> = sockets.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        match rustix::event::poll(&mut polled, timeout.as_ref()) {
            Ok(0) if left.is_zero() => return Ok(false),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(e) => return Err(DataError::os("poll", e)),
        }
    }
}
