//! Entering and leaving: the steps under the lock, and the handle a member holds.
//!
//! **Invariant:** a seat is bound, signed in and announced before the lock is released; a member
//! that fails half-way leaves nothing that anybody could wait for.

use std::mem::ManuallyDrop;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;
use rustix::io::Errno;

use crate::failpoint::failpoint;
use crate::rendezvous::config::{Offer, RendezvousConfig, Token, WhenAbsent};
use crate::rendezvous::directory::{Directory, Locked};
use crate::rendezvous::meet::Way;
use crate::rendezvous::probe::{Answer, Reached, Welcome, reach};
use crate::rendezvous::process::limit_or_os;
use crate::rendezvous::roster::{Me, Roster};
use crate::rendezvous::socket::{self, Receiver};
use crate::rendezvous::steward::{Bell, Conn, Steward, StewardHooks, panic_text};
use crate::rendezvous::watch::{Liveness, PeerInfo, PeerWatch, RendezvousStats};
use crate::rendezvous::wire::Message;
use crate::{DataError, ErrorKind};

/// What the caller contributes to entering. `create` and `admit` happen while no other process can enter.
pub trait Enter {
    /// The caller's error.
    type Error: From<DataError>;

    /// Nobody lives: make everything a joiner needs.
    ///
    /// # Errors
    /// The caller's; nothing stays behind.
    fn create(&mut self) -> Result<Offer, Self::Error>;

    /// Attach to what the offer contains and take a seat that is not occupied: first
    /// [hold](Admission::hold) it, then write to its record. Nothing else that others might have to undo is
    /// done here: they do not know this process yet.
    ///
    /// # Errors
    /// The caller's; the process does not become a member.
    fn admit(&mut self, admission: &Admission<'_>) -> Result<Admitted, Self::Error>;

    /// The others know this process by now and would see it die. Records of earlier stays that nobody
    /// has cleared up after may be repaired, see [`Occupied`].
    fn seated(&mut self, occupied: &Occupied<'_>) {
        let _ = occupied;
    }

    /// Entering failed after `admit`: give the seat's record back.
    fn abandon(&mut self, seat: u16) {
        let _ = seat;
    }
}

/// What `admit` may look at.
#[derive(Debug)]
pub struct Admission<'a> {
    /// The offer, made here or received. Clone the descriptors that are needed for longer.
    pub offer: &'a Offer,
    /// Seats that are taken.
    pub occupied: &'a [u16],
    /// Seats below this may be taken.
    pub max_seats: u16,
    /// Names this process's stay.
    pub incarnation: Token,
    /// Names this life of the cache.
    pub boot: Token,
    /// True if this process created the cache.
    pub created: bool,
    /// View of the members, for the hooks.
    pub watch: PeerWatch,
    directory: &'a Directory,
}

impl Admission<'_> {
    /// Shows everybody that this process is about to sit there, until it leaves or ends. To be called
    /// before anything is written to the seat's record: to others, a record at a seat that nobody holds
    /// is a dead process's.
    ///
    /// # Errors
    /// `Os` if the kernel has no lock left.
    pub fn hold(&self, seat: u16) -> Result<(), DataError> {
        self.directory.hold_seat(seat)
    }
}

/// Which seats are taken.
#[derive(Debug)]
pub struct Occupied<'a> {
    pub(crate) known: &'a [u16],
    pub(crate) directory: &'a Directory,
}

impl Occupied<'_> {
    /// True if a member is known at this seat, or a process sits or is about to sit there.
    ///
    /// If not, a stay of which a record was read *before* is of no process that could still touch the
    /// memory, unless that has become another program (`exec`) meanwhile. A member that is ending, and
    /// whose process is not proven over, is known: it belongs to those who see it end.
    #[must_use]
    pub fn is_taken(&self, seat: u16) -> bool {
        self.known.contains(&seat) || self.directory.is_seat_held(seat).unwrap_or(true)
    }
}

/// What `admit` decides.
pub struct Admitted {
    /// The seat taken.
    pub seat: u16,
    /// Called by the steward thread from now on.
    pub hooks: Arc<dyn StewardHooks>,
}

impl std::fmt::Debug for Admitted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admitted").field("seat", &self.seat).finish_non_exhaustive()
    }
}

/// A stay in a cache. Dropping it leaves in good order (not in a forked child).
///
/// Stop using the shared memory before: others may take the seat from that moment. Thread-safe.
#[derive(Debug)]
pub struct Membership {
    seat: u16,
    incarnation: Token,
    boot: Token,
    created: bool,
    watch: PeerWatch,
    bell: Arc<Bell>,
    _directory: Arc<Directory>,
    steward: Option<JoinHandle<()>>,
}

/// Creates or joins the cache of a directory.
#[derive(Clone, Copy, Debug)]
pub struct Rendezvous;

impl Rendezvous {
    /// Becomes a member: joins if anybody lives, else creates (or waits, see
    /// [`RendezvousConfig::when_absent`]).
    ///
    /// # Errors
    /// `Denied` for a directory or member of another user, `Layout` for another layout (both named),
    /// `Unreachable` if members live but none was met until the deadline (another network namespace),
    /// `Deadline` if nobody answers or
    /// nobody creates in time, or if a member cannot be told of this one (both can be retried, as can
    /// `DescriptorLimit` of this process or of a member), `Seat` for a seat that is taken; the caller's
    /// errors of `create` and `admit`.
    pub fn enter<E: Enter>(
        config: &RendezvousConfig,
        caller: &mut E,
    ) -> Result<Membership, E::Error> {
        config.validate()?;
        // An unrepresentable deadline is no deadline to speak of.
        let now = Instant::now();
        let deadline =
            now.checked_add(config.deadline).unwrap_or(now + Duration::from_secs(1 << 30));
        let mut pause = Duration::from_millis(1);
        let mut obstacle = None;
        loop {
            let directory = Directory::open(&config.dir, config.sockets)?;
            let watch = PeerWatch::new();
            // Who only waits stays out of the creators' way until somebody is there.
            if config.when_absent == WhenAbsent::Create || directory.has_members()? {
                let locked = directory.lock(deadline)?;
                failpoint!("enter.lock.after");
                let mut reached = reach(&directory, &config.layout, &watch)?;
                failpoint!("enter.hello.after");
                let entry = |reached, offer, welcome| {
                    let (directory, watch) = (Arc::clone(&directory), watch.clone());
                    Entry { config, directory, watch, reached, offer, welcome }
                };
                match reached.ask(&config.layout, deadline)? {
                    Answer::Offer(offer, welcome) => {
                        failpoint!("enter.offer.after");
                        let way =
                            Way { directory: &directory, layout: &config.layout, watch: &watch };
                        if reached.meet(&way, &welcome, deadline)? {
                            failpoint!("enter.meet.after");
                            return entry(reached, offer, Some(welcome)).sit(caller, locked);
                        }
                    }
                    Answer::Nobody if directory.has_members()? => {
                        obstacle = reached.obstacle();
                    }
                    Answer::Nobody if config.when_absent == WhenAbsent::Create => {
                        let offer = caller.create()?;
                        offer.validate()?;
                        failpoint!("enter.create.after");
                        return entry(reached, offer, None).sit(caller, locked);
                    }
                    Answer::Nobody => {}
                }
            }
            // Nobody yet, or somebody in the middle of leaving or ending.
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(match obstacle {
                    _ if !directory.has_members()? => nobody_came(config).into(),
                    Some(obstacle) => obstacle.into(),
                    None => unreachable(&directory).into(),
                });
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }
}

impl Membership {
    /// The seat taken.
    #[must_use]
    pub fn seat(&self) -> u16 {
        self.seat
    }

    /// Names this stay.
    #[must_use]
    pub fn incarnation(&self) -> Token {
        self.incarnation
    }

    /// Names this life of the cache; another one means other memory.
    #[must_use]
    pub fn boot_token(&self) -> Token {
        self.boot
    }

    /// True if this process created the cache.
    #[must_use]
    pub fn created(&self) -> bool {
        self.created
    }

    /// All other members.
    #[must_use]
    pub fn peers(&self) -> Vec<PeerInfo> {
        self.watch.peers()
    }

    /// Is this stay on this seat over?
    #[must_use]
    pub fn liveness(&self, seat: u16, incarnation: Token) -> Liveness {
        if (seat, incarnation) == (self.seat, self.incarnation) {
            return Liveness::Alive;
        }
        self.watch.liveness(seat, incarnation)
    }

    /// True if a known member on this seat runs (the own seat included). `false` proves nothing.
    #[must_use]
    pub fn is_alive(&self, seat: u16) -> bool {
        seat == self.seat || self.watch.is_alive(seat)
    }

    /// View of the members that can be cloned and kept.
    #[must_use]
    pub fn watch(&self) -> &PeerWatch {
        &self.watch
    }

    /// Counters since `enter`.
    #[must_use]
    pub fn stats(&self) -> RendezvousStats {
        self.watch.stats()
    }

    /// Makes the steward ask its hooks for the next deadline again.
    ///
    /// # Errors
    /// `Poisoned` once the steward has panicked or its descriptors were closed, `Forked` in a forked child.
    pub fn poke(&self) -> Result<(), DataError> {
        self.watch.check()?;
        if self.bell.ring() { Ok(()) } else { Err(DataError::new(ErrorKind::Poisoned, ROBBED)) }
    }

    /// Fails once a hook or the steward itself has panicked, and in a forked child.
    ///
    /// # Errors
    /// `Poisoned` with the panic's message, `Forked` in a forked child.
    pub fn check(&self) -> Result<(), DataError> {
        self.watch.check()
    }

    /// Leaves in good order: the others hear a leave, not a death. The same as dropping.
    pub fn leave(self) {
        drop(self);
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        let Some(steward) = self.steward.take() else { return };
        if !self.watch.shared.birthplace.is_here() {
            // The thread exists in the parent only; its handle must not be touched here.
            let _never_dropped = ManuallyDrop::new(steward);
            return;
        }
        if !self.bell.stop() {
            // It may sleep on what was closed and hear nothing: it is left behind.
            tracing::error!(why = ROBBED, "the steward thread cannot be told to end");
            return;
        }
        // Dropped inside a hook, it cannot wait for itself; the steward ends after the hook.
        if steward.thread().id() != std::thread::current().id() && steward.join().is_err() {
            tracing::error!("the steward thread ended by a panic");
        }
    }
}

/// Everything gathered before sitting down.
struct Entry<'a> {
    config: &'a RendezvousConfig,
    directory: Arc<Directory>,
    watch: PeerWatch,
    reached: Reached,
    offer: Offer,
    welcome: Option<Welcome>,
}

impl Entry<'_> {
    /// `locked` goes when the others know the caller, or it has given its record back.
    fn sit<E: Enter>(mut self, caller: &mut E, locked: Locked) -> Result<Membership, E::Error> {
        self.directory.sign_in()?;
        failpoint!("enter.sign.after");
        let incarnation = Token::random()?;
        let boot = match &self.welcome {
            Some(welcome) => welcome.boot,
            None => Token::random()?,
        };
        self.reached.occupied.sort_unstable();
        let admitted = caller.admit(&Admission {
            offer: &self.offer,
            occupied: &self.reached.occupied,
            max_seats: self.config.max_seats,
            incarnation,
            boot,
            created: self.welcome.is_none(),
            watch: self.watch.clone(),
            directory: &self.directory,
        })?;
        failpoint!("enter.admit.after");
        let seat = admitted.seat;
        let known = self.reached.occupied.clone();
        let directory = Arc::clone(&self.directory);
        let sits = self.sit_at(admitted, incarnation, boot);
        if sits.is_err() {
            caller.abandon(seat);
        }
        failpoint!("enter.unlock.before");
        drop(locked);
        failpoint!("enter.unlock.after");
        let membership = sits?;
        caller.seated(&Occupied { known: &known, directory: &directory });
        Ok(membership)
    }

    fn sit_at(
        self,
        admitted: Admitted,
        incarnation: Token,
        boot: Token,
    ) -> Result<Membership, DataError> {
        let Self { config, directory, watch, reached, offer, welcome } = self;
        let Admitted { seat, hooks } = admitted;
        if seat >= config.max_seats || reached.occupied.contains(&seat) {
            return Err(DataError::new(
                ErrorKind::Seat,
                format!(
                    "seat {seat} was chosen; seats 0 to {} exist and {:?} are occupied",
                    config.max_seats - 1,
                    reached.occupied
                ),
            ));
        }
        directory.hold_seat(seat)?;
        let address = directory
            .seats()
            .address(seat)
            .map_err(|e| DataError::os(format!("address of seat {seat}"), e))?;
        let listener = socket::listen_at(&address).map_err(|e| match e {
            Errno::ADDRINUSE => DataError::new(
                ErrorKind::Seat,
                format!("seat {seat} of {} is in use by another process", config.dir.display()),
            )
            .with_errno(e),
            e => limit_or_os(&format!("listening at seat {seat}"), e),
        })?;
        let me = Me {
            seat,
            incarnation,
            boot,
            layout: config.layout.clone(),
            meta: u32::try_from(offer.meta.len()).unwrap_or(u32::MAX),
            fds: u32::try_from(offer.fds.len()).unwrap_or(u32::MAX),
        };
        failpoint!("enter.listen.after");
        let bell = Arc::new(Bell::new()?);
        let (roster, conns) = acquaint(me, reached, welcome.as_ref());
        let steward = Steward {
            seat,
            directory: Arc::clone(&directory),
            listener,
            next_id: conns.len() as u64,
            conns,
            roster,
            layout: config.layout.clone(),
            offer,
            watch: watch.clone(),
            hooks,
            bell: Arc::clone(&bell),
            receiver: Receiver::without_fds(),
            named: directory.socket_file(seat),
            spare: rustix::event::eventfd(0, EventfdFlags::CLOEXEC).ok(),
        };
        steward.publish();
        let (hand_over, taken) = std::sync::mpsc::sync_channel::<Box<Steward>>(1);
        let poison = watch.clone();
        let thread = std::thread::Builder::new()
            .name(format!("ucm-steward-{seat}"))
            .stack_size(512 * 1024)
            .spawn(move || {
                let Ok(steward) = taken.recv() else { return };
                if let Err(panic) = catch_unwind(AssertUnwindSafe(|| steward.run())) {
                    poison.poison(panic_text(&*panic));
                }
            })
            .map_err(|error| {
                // Giving up is no death.
                for socket in steward.conns.iter().filter_map(|conn| conn.socket.as_ref()) {
                    let _ = socket::send(socket.as_fd(), &Message::Bye, &[]);
                }
                DataError::new(ErrorKind::Os, format!("starting the steward thread: {error}"))
            })?;
        failpoint!("enter.thread.after");
        // From here on nothing can fail: the others may hear of it.
        for socket in steward.conns.iter().filter_map(|conn| conn.socket.as_ref()) {
            let seated = Message::Seated { seat, incarnation };
            // A member that takes no message is ending; its process is watched.
            let _ = socket::send(socket.as_fd(), &seated, &[]);
            failpoint!("enter.seated.after");
        }
        let _ = hand_over.send(Box::new(steward));
        let created = welcome.is_none();
        let steward = Some(thread);
        Ok(Membership {
            seat,
            incarnation,
            boot,
            created,
            watch,
            bell,
            _directory: directory,
            steward,
        })
    }
}

/// Turns everybody who was reached, or told of, into connections the steward watches.
fn acquaint(me: Me, reached: Reached, welcome: Option<&Welcome>) -> (Roster, Vec<Conn>) {
    let mut roster = Roster::new(me);
    let mut conns = Vec::new();
    // In a cache made anew there is nobody.
    let met = reached.prospects.into_iter().filter(|_| welcome.is_some());
    for (id, prospect) in (0u64..).zip(met) {
        let told = welcome.and_then(|welcome| {
            welcome.peers.iter().find(|(seat, _)| *seat == prospect.seat).map(|(_, token)| *token)
        });
        let incarnation = prospect.incarnation().or(told);
        roster.reached(id, prospect.seat, incarnation, prospect.incarnation().is_some());
        conns.push(prospect.into_conn(id));
    }
    for (id, told) in (conns.len() as u64..).zip(reached.told) {
        roster.told_of(id, told.seat, told.incarnation);
        conns.push(Conn::told(id, told.life));
    }
    (roster, conns)
}

/// Somebody has closed what is the cache's.
pub(crate) const ROBBED: &str = "another part of this program has closed descriptors of the cache (close_range, \
                                 closefrom); keep it from that and restart";

fn unreachable(directory: &Directory) -> DataError {
    DataError::new(
        ErrorKind::Unreachable,
        format!(
            "a live cache uses {}, but its sockets are not reachable from this network namespace; use \
             Sockets::Files in all members (who holds the lock: lslocks)",
            directory.path().display()
        ),
    )
}

fn nobody_came(config: &RendezvousConfig) -> DataError {
    DataError::new(
        ErrorKind::Deadline,
        format!(
            "nobody created a cache in {} within {:?}; start a rank, or use WhenAbsent::Create",
            config.dir.display(),
            config.deadline
        ),
    )
}
