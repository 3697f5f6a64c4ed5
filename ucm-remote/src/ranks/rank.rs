//! The rank's side: asks the agent, and maps its memory.
//!
//! One connection carries no calls: its end says that the agent has ended, and its memory is let go then, by
//! ranks that ask for nothing as well. So the next agent of the node finds room.
//!
//! **Invariant:** an exchange that did not end leaves a connection that is never used for another, and that
//! stays open until nothing is copied from what came on it.

use std::{
    any::Any,
    fmt,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    thread,
    time::{Duration, Instant},
};

use ucm_data::{Geometry, Segments};
use ucm_transport::{ErrorKind, Memory, TransferError};

use super::{
    socket::{Broken, Reader, Socket, frame},
    wire::{self, Welcome},
};
use crate::{
    GetOutcome, ObjectKey, PageList, PutOutcome, RemoveOutcome, Token,
    agent::Want,
    client::{Begun, Delivered, Events, Happened, Node},
    service::wire::{Fields, Malformed, get_outcome, put_outcome, remove_outcome},
};

/// How long the agent may take to let a rank in.
const HELLO: Duration = Duration::from_secs(10);
/// The agent ends its calls at their deadline; this is for the way from there to here.
const GRACE: Duration = Duration::from_millis(30);
/// Connections that are kept for the next call.
const KEPT: usize = 16;

impl From<Malformed> for Broken {
    fn from(_: Malformed) -> Self {
        Self::Malformed
    }
}

/// The node's agent, as a rank in another process knows it. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Rank(Arc<State>);

struct State {
    path: PathBuf,
    /// Of the agent whose memory is mapped.
    run: Token,
    boot: Option<Token>,
    /// The medium's segments and the arena's, as long as the agent lives.
    memory: Mutex<Option<Arc<[Memory]>>>,
    /// Run when it has ended.
    hooks: Mutex<Vec<Hook>>,
    /// Says when it has ended.
    watched: Socket,
    idle: Mutex<Vec<Connection>>,
}

type Hook = Box<dyn FnOnce() + Send>;

impl Drop for State {
    fn drop(&mut self) {
        // Ends the thread that watches.
        self.watched.shut_down();
    }
}

/// A connection between two exchanges.
struct Connection {
    line: Arc<Line>,
    reader: Reader,
    /// Keys of the last get: the next one for the same does not send them.
    keys: Vec<(ObjectKey, u64)>,
}

/// What keeps a connection open.
#[derive(Debug)]
struct Line {
    socket: Socket,
    /// Whoever sends, sends alone.
    sending: Mutex<Sending>,
}

#[derive(Debug, Default)]
struct Sending {
    /// Pins to be given back before the rank waits for anything.
    done: Vec<u64>,
    /// Somebody takes in what the agent said, and gives pins back together before waiting.
    busy: bool,
}

impl Rank {
    /// Connects to the agent at `path` and maps its memory.
    pub(crate) fn connect(path: &Path) -> Result<Self, TransferError> {
        Self::connect_by(path, Instant::now() + HELLO)
    }

    /// As [`connect`](Self::connect), when the agent answers by then.
    pub(crate) fn connect_by(path: &Path, deadline: Instant) -> Result<Self, TransferError> {
        let down = |broken: Broken| {
            let text = format!("the agent at {}: {broken}", path.display());
            TransferError::new(ErrorKind::PeerDown, text)
        };
        let socket = open(path, deadline).map_err(down)?;
        let welcome = greet(&socket, true, deadline).map_err(down)?;
        let fds = socket.receive_fds(welcome.segments, deadline).map_err(down)?;
        let mut fds = fds.into_iter();
        let mut memory = Vec::new();
        for geometry in &welcome.geometries {
            let refused = |error: ucm_data::DataError| {
                TransferError::new(ErrorKind::Registration, error.to_string())
            };
            let geometry = Geometry::decode(geometry).map_err(refused)?;
            let count = geometry.segments().len();
            let some: Vec<OwnedFd> = fds.by_ref().take(count).collect();
            let segments = Segments::from_fds(geometry, some).map_err(refused)?;
            memory.extend(Memory::of_segments(&segments)?);
        }
        let (run, boot) = (welcome.run, welcome.boot);
        let state = Arc::new(State {
            path: path.to_owned(),
            run,
            boot,
            memory: Mutex::new(Some(memory.into())),
            hooks: Mutex::default(),
            watched: socket.clone(),
            idle: Mutex::default(),
        });
        let weak = Arc::downgrade(&state);
        thread::Builder::new()
            .name("ucm-rank-watch".into())
            .spawn(move || watch(&socket, &weak))
            .map_err(|error| TransferError::new(ErrorKind::Failed, format!("no thread: {error}")))?;
        let rank = Self(state);
        // What is touched goes over connections that are there.
        let first = rank.connection(deadline).map_err(down)?;
        rank.keep(first);
        Ok(rank)
    }

    /// Runs this when the agent has ended: at once, if it has.
    pub(crate) fn when_over(&self, hook: impl FnOnce() + Send + 'static) {
        let mut hooks = lock(&self.0.hooks);
        if self.is_over() {
            drop(hooks);
            hook();
        } else {
            hooks.push(Box::new(hook));
        }
    }

    /// The run that the agent serves other nodes as.
    pub(crate) fn boot(&self) -> Option<Token> {
        self.0.boot
    }

    fn connection(&self, deadline: Instant) -> Result<Connection, Broken> {
        if let Some(connection) = lock(&self.0.idle).pop() {
            return Ok(connection);
        }
        if self.is_over() {
            return Err(Broken::Closed);
        }
        let deadline = deadline.min(Instant::now() + HELLO);
        let socket = open(&self.0.path, deadline)?;
        let welcome = greet(&socket, false, deadline)?;
        if welcome.run != self.0.run {
            // Another agent, with other memory.
            return Err(Broken::Closed);
        }
        Ok(Connection::new(socket))
    }

    fn keep(&self, connection: Connection) {
        let mut idle = lock(&self.0.idle);
        if idle.len() < KEPT && !self.is_over() {
            idle.push(connection);
        }
    }

    /// One question, one answer of this kind.
    fn exchange(
        &self,
        question: Vec<u8>,
        kind: u8,
        deadline: Instant,
    ) -> Result<(Connection, Vec<u8>), Broken> {
        let mut connection = self.connection(deadline)?;
        connection.line.send(question, deadline)?;
        match connection.reader.next(&connection.line.socket, Some(deadline + GRACE))? {
            (seen, body) if seen == kind => Ok((connection, body)),
            _ => Err(Broken::Malformed),
        }
    }
}

impl Connection {
    fn new(socket: Socket) -> Self {
        let line = Arc::new(Line { socket, sending: Mutex::default() });
        Self { line, reader: Reader::default(), keys: Vec::new() }
    }
}

impl Line {
    fn send(&self, frame: Vec<u8>, deadline: Instant) -> Result<(), Broken> {
        let _alone = lock(&self.sending);
        self.socket.send(frame, Some(deadline))
    }

    /// Gives a pin back: at once, or with others when somebody is about to do so anyway.
    fn done(&self, pin: u64) {
        let mut sending = lock(&self.sending);
        sending.done.push(pin);
        if !sending.busy {
            self.give_back(&mut sending);
        }
    }

    /// Until this is called with `false` again, pins are gathered.
    fn gather(&self, busy: bool) {
        let mut sending = lock(&self.sending);
        sending.busy = busy;
        if !busy {
            self.give_back(&mut sending);
        }
    }

    fn give_back(&self, sending: &mut Sending) {
        if sending.done.is_empty() {
            return;
        }
        let mut done = frame(wire::DONE);
        sending.done.drain(..).for_each(|pin| done.extend_from_slice(&pin.to_le_bytes()));
        // An agent that is gone holds nothing; one that does not read for so long hears of it when the
        // connection is closed.
        let _ = self.socket.send(done, Some(Instant::now() + HELLO));
    }
}

/// Waits for the end of the agent, or of its last user here.
fn watch(socket: &Socket, state: &Weak<State>) {
    socket.wait_for_end();
    let Some(state) = state.upgrade() else { return };
    // What is being copied holds what it needs.
    drop(lock(&state.memory).take());
    lock(&state.idle).clear();
    let hooks = std::mem::take(&mut *lock(&state.hooks));
    hooks.into_iter().for_each(|hook| hook());
    tracing::info!(path = %state.path.display(), "the node's agent has ended; its memory is let go");
}

/// Connects by the deadline: an agent that is stopped lets nobody in, once enough wait.
fn open(path: &Path, deadline: Instant) -> Result<Socket, Broken> {
    Socket::connect(path, deadline)
}

fn greet(socket: &Socket, memory: bool, deadline: Instant) -> Result<Welcome, Broken> {
    let mut hello = frame(wire::HELLO);
    hello.extend_from_slice(&wire::MAGIC);
    hello.push(u8::from(memory));
    socket.send(hello, Some(deadline))?;
    match Reader::exactly(socket, deadline)? {
        (wire::WELCOME, body) => Ok(Welcome::decode(&body)?),
        _ => Err(Broken::Malformed),
    }
}

/// A delivered piece: given back by dropping it, from any thread. That is short: the agent always reads.
struct Held {
    line: Arc<Line>,
    pin: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.line.done(self.pin);
    }
}

struct Get {
    rank: Rank,
    connection: Option<Connection>,
    deadline: Instant,
    /// Keys that have not ended.
    open: Vec<bool>,
    /// Outcomes of those that the agent will say nothing about any more.
    broken: Option<GetOutcome>,
}

impl Events for Get {
    fn next(&mut self) -> Option<Happened> {
        if self.broken.is_none() {
            match self.hear() {
                Ok(Some(happened)) => return Some(happened),
                Ok(None) => {
                    if let Some(connection) = self.connection.take() {
                        self.rank.keep(connection);
                    }
                    // What the agent did not mention.
                    self.broken = Some(GetOutcome::PeerDown);
                }
                Err(broken) => self.fail(broken),
            }
        }
        let index = self.open.iter().position(|open| *open)?;
        self.close(index);
        Some(Happened::Ended(index, self.broken.unwrap_or(GetOutcome::PeerDown)))
    }

    fn next_at_hand(&mut self) -> Option<Happened> {
        let is_one = self.connection.as_ref().is_some_and(|connection| connection.reader.has_one());
        if is_one { self.next() } else { None }
    }
}

impl Drop for Get {
    fn drop(&mut self) {
        // Nobody gives pins back together any more. An exchange that did not end leaves no connection.
        if let Some(connection) = self.connection.take() {
            connection.line.gather(false);
        }
    }
}

impl Get {
    fn fail(&mut self, broken: Broken) {
        if let Some(connection) = self.connection.take() {
            connection.line.gather(false);
        }
        self.broken = Some(of_get(broken));
    }

    fn close(&mut self, index: usize) {
        if let Some(open) = self.open.get_mut(index) {
            *open = false;
        }
    }

    fn hear(&mut self) -> Result<Option<Happened>, Broken> {
        let Some(connection) = &mut self.connection else { return Err(Broken::Closed) };
        let limit = self.deadline + GRACE;
        // Pins are given back before anything is waited for: the agent may need them to go on.
        connection.line.gather(connection.reader.has_one());
        let (kind, body) = connection.reader.next(&connection.line.socket, Some(limit))?;
        connection.line.gather(kind != wire::OVER);
        match kind {
            wire::OVER => Ok(None),
            wire::ENDED => {
                let mut fields = Fields(&body);
                let (index, outcome) = (wire::take_index(&mut fields)?, get_outcome(fields.u8()?)?);
                self.close(index);
                Ok(Some(Happened::Ended(index, outcome)))
            }
            wire::READY => {
                let ready = wire::Ready::decode(&body)?;
                let hold = Held { line: Arc::clone(&connection.line), pin: ready.pin };
                if ready.last {
                    self.close(ready.index);
                }
                Ok(Some(Happened::Ready(Delivered {
                    index: ready.index,
                    outcome: ready.outcome,
                    pages: Arc::new(ready.pages),
                    parts: ready.parts,
                    last: ready.last,
                    hold: Box::new(hold),
                })))
            }
            _ => Err(Broken::Malformed),
        }
    }
}

fn of_get(broken: Broken) -> GetOutcome {
    if broken == Broken::Timeout { GetOutcome::Timeout } else { GetOutcome::PeerDown }
}

fn of_put(broken: Broken) -> PutOutcome {
    if broken == Broken::Timeout { PutOutcome::Timeout } else { PutOutcome::PeerDown }
}

/// Pages of the agent that this rank fills.
struct Filling {
    rank: Rank,
    pages: PageList,
    connection: Mutex<Option<Connection>>,
    line: Arc<Line>,
}

impl Begun for Filling {
    fn pages(&self) -> &PageList {
        &self.pages
    }

    fn hold(&self) -> Box<dyn Any + Send> {
        // The agent gives the pages up when the connection is closed: not while they are written.
        Box::new(Arc::clone(&self.line))
    }

    fn commit(&self, deadline: Instant) -> PutOutcome {
        let Some(mut connection) = lock(&self.connection).take() else { return PutOutcome::Stale };
        let mut question = frame(wire::COMMIT);
        wire::put_left(&mut question, deadline);
        let answer = connection
            .line
            .send(question, deadline)
            .and_then(|()| connection.reader.next(&connection.line.socket, Some(deadline + GRACE)));
        match answer {
            Ok((wire::OUTCOME, body)) => {
                let outcome = body.first().copied().map(put_outcome);
                self.rank.keep(connection);
                outcome.and_then(Result::ok).unwrap_or(PutOutcome::PeerDown)
            }
            Ok(_) => PutOutcome::PeerDown,
            Err(broken) => of_put(broken),
        }
    }
}

impl Drop for Filling {
    fn drop(&mut self) {
        // Not committed, and nothing writes it: whoever copied has ended.
        if let Some(connection) = lock(&self.connection).take()
            && connection.line.send(frame(wire::GIVE_UP), Instant::now() + HELLO).is_ok()
        {
            self.rank.keep(connection);
        }
    }
}

impl Node for Rank {
    fn is_over(&self) -> bool {
        lock(&self.0.memory).is_none()
    }

    fn segments(&self) -> Arc<[Memory]> {
        lock(&self.0.memory).clone().unwrap_or_default()
    }

    fn call(&self, wants: Vec<Want>, deadline: Instant) -> Box<dyn Events> {
        let open = vec![true; wants.len()];
        let mut get = Get { rank: self.clone(), connection: None, deadline, open, broken: None };
        let begun = self.connection(deadline).and_then(|mut connection| {
            let keys: Vec<_> = wants.iter().map(|want| (want.key, want.len)).collect();
            let again = !keys.is_empty() && keys == connection.keys;
            connection.line.send(wire::get(&wants, again, deadline), deadline)?;
            connection.keys = keys;
            Ok(connection)
        });
        match begun {
            Ok(connection) => get.connection = Some(connection),
            Err(broken) => get.broken = Some(of_get(broken)),
        }
        Box::new(get)
    }

    fn begin_put(
        &self,
        key: &ObjectKey,
        len: u64,
        deadline: Instant,
    ) -> Result<Box<dyn Begun>, PutOutcome> {
        let mut question = frame(wire::PUT);
        wire::put_left(&mut question, deadline);
        crate::service::wire::put_key(&mut question, key);
        question.extend_from_slice(&len.to_le_bytes());
        let (connection, body) = self.exchange(question, wire::PLACE, deadline).map_err(of_put)?;
        let mut fields = Fields(&body);
        let outcome = fields.u8().and_then(put_outcome).map_err(|_| PutOutcome::PeerDown)?;
        if outcome != PutOutcome::Created {
            self.keep(connection);
            return Err(outcome);
        }
        let pages = wire::take_pages(&mut fields).map_err(|_| PutOutcome::PeerDown)?;
        let line = Arc::clone(&connection.line);
        let connection = Mutex::new(Some(connection));
        Ok(Box::new(Filling { rank: self.clone(), pages, connection, line }))
    }

    fn exists(
        &self,
        keys: &[ObjectKey],
        deadline: Instant,
    ) -> Vec<Result<Option<u64>, GetOutcome>> {
        let ask = || -> Result<Vec<_>, Broken> {
            let question = wire::keys(wire::EXISTS, keys, deadline);
            let (connection, body) = self.exchange(question, wire::LENGTHS, deadline)?;
            let mut fields = Fields(&body);
            let mut answers = Vec::with_capacity(keys.len());
            for _ in keys {
                answers.push(match (get_outcome(fields.u8()?)?, fields.u64()?) {
                    (GetOutcome::Local, len) => Ok(Some(len)),
                    (GetOutcome::Miss, _) => Ok(None),
                    (other, _) => Err(other),
                });
            }
            fields.end()?;
            self.keep(connection);
            Ok(answers)
        };
        ask().unwrap_or_else(|broken| vec![Err(of_get(broken)); keys.len()])
    }

    fn remove(&self, keys: &[ObjectKey], deadline: Instant) -> Vec<RemoveOutcome> {
        let ask = || -> Result<Vec<_>, Broken> {
            let question = wire::keys(wire::REMOVE, keys, deadline);
            let (connection, body) = self.exchange(question, wire::REMOVED, deadline)?;
            if body.len() != keys.len() {
                return Err(Broken::Malformed);
            }
            let outcomes = body.into_iter().map(remove_outcome).collect::<Result<Vec<_>, _>>()?;
            self.keep(connection);
            Ok(outcomes)
        };
        ask().unwrap_or_else(|broken| {
            let timeout = broken == Broken::Timeout;
            let outcome = if timeout { RemoveOutcome::Timeout } else { RemoveOutcome::PeerDown };
            vec![outcome; keys.len()]
        })
    }

    fn touch(&self, keys: &[ObjectKey]) {
        // Nobody waits for it, and it waits for nobody.
        let Some(connection) = lock(&self.0.idle).pop() else { return };
        let deadline = Instant::now();
        if connection.line.send(wire::keys(wire::TOUCH, keys, deadline), deadline).is_ok() {
            self.keep(connection);
        }
    }
}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rank")
            .field("path", &self.0.path)
            .field("is_over", &self.is_over())
            .finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
