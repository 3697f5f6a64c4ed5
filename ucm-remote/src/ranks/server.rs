//! The agent's side: lets ranks in, answers them, and holds what they read.
//!
//! A connection has two threads: one reads what the rank sends, one works on its calls, one at a time.
//!
//! **Invariant:** what was delivered to a rank stays until the rank says that it is done, or its end of the
//! connection is closed, which its death does and a rank that copies does not.

use std::{
    collections::HashMap,
    fmt, io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::{fs::PermissionsExt as _, net::UnixListener},
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{
    socket::{Broken, Reader, Socket, frame, seal},
    wire,
};
use crate::{
    GetOutcome, ObjectKey, PutOutcome,
    agent::{Call, Event, Inner, Pin, Put, Shared, Want},
    service::wire::{Fields, Malformed},
};

/// How long a rank may take to say hello.
const HELLO: Duration = Duration::from_secs(10);
/// Bytes of messages that are sent together.
const TOGETHER: usize = 16 << 10;

/// Serves ranks at a socket in the file system. Dropping it ends all calls; the file goes with it.
pub(crate) struct RankServer {
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

struct State {
    inner: Arc<Inner>,
    shared: Shared,
    path: PathBuf,
    listener: UnixListener,
    stopping: AtomicBool,
    connections: Mutex<HashMap<u64, Socket>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    next: AtomicU64,
}

impl RankServer {
    /// Listens at `path`, which only this user can connect to.
    pub(crate) fn start(inner: &Arc<Inner>, shared: Shared, path: &Path) -> io::Result<Self> {
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        let state = Arc::new(State {
            inner: Arc::clone(inner),
            shared,
            path: path.to_owned(),
            listener,
            stopping: AtomicBool::new(false),
            connections: Mutex::default(),
            threads: Mutex::default(),
            next: AtomicU64::new(0),
        });
        let of_thread = Arc::clone(&state);
        let thread =
            thread::Builder::new().name("ucm-ranks".into()).spawn(move || accept(&of_thread))?;
        Ok(Self { state, thread: Some(thread) })
    }
}

impl Drop for RankServer {
    fn drop(&mut self) {
        let state = &self.state;
        state.stopping.store(true, Ordering::SeqCst);
        // Wakes the one that accepts.
        let _ = rustix::net::shutdown(&state.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that lets ranks in ended by a panic");
        }
        let _ = std::fs::remove_file(&state.path);
        lock(&state.connections).values().for_each(Socket::shut_down);
        let threads = std::mem::take(&mut *lock(&state.threads));
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a thread that serves a rank ended by a panic");
            }
        }
    }
}

impl fmt::Debug for RankServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RankServer")
            .field("path", &self.state.path)
            .field("connections", &lock(&self.state.connections).len())
            .finish_non_exhaustive()
    }
}

fn accept(state: &Arc<State>) {
    loop {
        let stream = match state.listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                if state.stopping.load(Ordering::SeqCst) {
                    return;
                }
                tracing::warn!(%error, "a rank could not be let in");
                thread::sleep(Duration::from_millis(5));
                continue;
            }
        };
        if state.stopping.load(Ordering::SeqCst) {
            return;
        }
        // The file's mode says so, too, but not while it is being made.
        let user = rustix::net::sockopt::socket_peercred(&stream).map(|peer| peer.uid);
        if !user.is_ok_and(|user| user == rustix::process::geteuid() || user.is_root()) {
            tracing::warn!(?user, "another user was not let in");
            continue;
        }
        let socket = Socket::new(OwnedFd::from(stream));
        let id = state.next.fetch_add(1, Ordering::Relaxed);
        lock(&state.connections).insert(id, socket.clone());
        let of_thread = Arc::clone(state);
        let spawned = thread::Builder::new().name("ucm-rank".into()).spawn(move || {
            if let Err(error) = serve(&of_thread, &socket) {
                tracing::debug!(%error, "a rank's connection ended");
            }
            // The descriptor is closed with its last reference: the table's.
            drop(socket);
            lock(&of_thread.connections).remove(&id);
        });
        let mut threads = lock(&state.threads);
        threads.retain(|thread| !thread.is_finished());
        match spawned {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                tracing::warn!(%error, "no thread for a rank");
                lock(&state.connections).remove(&id);
            }
        }
    }
}

/// One connection, from hello to its end.
fn serve(state: &Arc<State>, socket: &Socket) -> Result<(), Broken> {
    let mut reader = Reader::default();
    let (kind, body) = reader.next(socket, Some(Instant::now() + HELLO))?;
    if kind != wire::HELLO || body.len() != 9 || !body.starts_with(&wire::MAGIC) {
        return Err(Broken::Malformed);
    }
    let wants_memory = body.last() == Some(&1);
    let shared = &state.shared;
    let welcome = wire::Welcome {
        run: state.inner.run(),
        boot: state.inner.boot(),
        segments: if wants_memory { shared.fds() } else { 0 },
        geometries: if wants_memory { shared.geometries() } else { Vec::new() },
    };
    socket.send(welcome.encode(), None)?;
    if wants_memory {
        let segments = shared.segments();
        let fds: Vec<_> = segments.iter().flat_map(|s| s.fds()).map(|fd| fd.as_fd()).collect();
        socket.send_fds(&fds)?;
    }
    let pins: Arc<Pins> = Arc::default();
    let (orders, work) = mpsc::channel();
    let worker = Worker {
        inner: Arc::clone(&state.inner),
        socket: socket.clone(),
        pins: Arc::clone(&pins),
        put: None,
    };
    let thread = thread::Builder::new()
        .name("ucm-rank-work".into())
        .spawn(move || worker.run(&work))
        .map_err(|_| Broken::Malformed)?;
    let ended = listen(socket, &mut reader, &pins, &orders);
    // The rank is gone, or speaks nonsense. Its calls end; what it reads stays while its end is open.
    pins.end_calls();
    drop(orders);
    if !matches!(ended, Broken::Closed) {
        let _ = rustix::net::shutdown(socket.fd(), rustix::net::Shutdown::Write);
        while !matches!(reader.next(socket, None), Err(Broken::Closed | Broken::Os(_))) {
            reader = Reader::default();
        }
    }
    if thread.join().is_err() {
        tracing::error!("a thread that works for a rank ended by a panic");
    }
    pins.clear();
    Err(ended)
}

fn listen(
    socket: &Socket,
    reader: &mut Reader,
    pins: &Pins,
    orders: &mpsc::Sender<Order>,
) -> Broken {
    let mut keys: Vec<(ObjectKey, u64)> = Vec::new();
    loop {
        let (kind, body) = match reader.next(socket, None) {
            Ok(frame) => frame,
            Err(broken) => return broken,
        };
        if kind == wire::DONE {
            let (numbers, rest) = body.as_chunks();
            if !rest.is_empty() {
                return Broken::Malformed;
            }
            numbers.iter().for_each(|pin| pins.remove(u64::from_le_bytes(*pin)));
            continue;
        }
        match Order::parse(kind, &body, &mut keys) {
            Ok(order) => {
                // When nobody works any more, the rank has been told, and closes its end.
                let _ = orders.send(order);
            }
            Err(_) => return Broken::Malformed,
        }
    }
}

/// What a rank asks for.
#[derive(Debug)]
enum Order {
    Get(Vec<Want>, Instant),
    Put(ObjectKey, u64, Instant),
    Commit(Instant),
    GiveUp,
    Exists(Vec<ObjectKey>, Instant),
    Remove(Vec<ObjectKey>, Instant),
    Touch(Vec<ObjectKey>),
}

impl Order {
    fn parse(kind: u8, body: &[u8], keys: &mut Vec<(ObjectKey, u64)>) -> Result<Self, Malformed> {
        let mut fields = Fields(body);
        if kind == wire::GIVE_UP {
            fields.end()?;
            return Ok(Self::GiveUp);
        }
        let deadline = wire::take_left(&mut fields)?;
        Ok(match kind {
            wire::GET => {
                *keys = wire::take_keys(&mut fields)?;
                Self::Get(wire::take_wants(&mut fields, keys)?, deadline)
            }
            wire::GET_AGAIN => Self::Get(wire::take_wants(&mut fields, keys)?, deadline),
            wire::PUT => {
                let (key, len) = (fields.key()?, fields.u64()?);
                fields.end()?;
                Self::Put(key, len, deadline)
            }
            wire::COMMIT => {
                fields.end()?;
                Self::Commit(deadline)
            }
            wire::EXISTS => Self::Exists(wire::take_plain_keys(&mut fields)?, deadline),
            wire::REMOVE => Self::Remove(wire::take_plain_keys(&mut fields)?, deadline),
            wire::TOUCH => Self::Touch(wire::take_plain_keys(&mut fields)?),
            _ => return Err(Malformed("a message that ranks do not send")),
        })
    }
}

/// What a rank reads from, by number, and how to end its call.
#[derive(Debug, Default)]
struct Pins(Mutex<Held>);

#[derive(Debug, Default)]
struct Held {
    next: u64,
    pins: HashMap<u64, Pin>,
    stop: Option<crate::agent::Stop>,
    ended: bool,
}

impl Pins {
    fn add(&self, pin: Pin) -> u64 {
        let mut held = lock(&self.0);
        held.next += 1;
        let number = held.next;
        held.pins.insert(number, pin);
        number
    }

    fn remove(&self, number: u64) {
        let pin = lock(&self.0).pins.remove(&number);
        // Without the lock.
        drop(pin);
    }

    fn clear(&self) {
        let pins = std::mem::take(&mut lock(&self.0).pins);
        drop(pins);
    }

    fn begin_call(&self, stop: crate::agent::Stop) {
        let mut held = lock(&self.0);
        if held.ended {
            drop(held);
            stop.stop();
        } else {
            held.stop = Some(stop);
        }
    }

    fn end_calls(&self) {
        let mut held = lock(&self.0);
        held.ended = true;
        let stop = held.stop.take();
        drop(held);
        if let Some(stop) = stop {
            stop.stop();
        }
    }
}

struct Worker {
    inner: Arc<Inner>,
    socket: Socket,
    pins: Arc<Pins>,
    put: Option<Arc<Put>>,
}

impl Worker {
    fn run(mut self, work: &mpsc::Receiver<Order>) {
        while let Ok(order) = work.recv() {
            if let Err(error) = self.answer(order) {
                tracing::debug!(%error, "a rank could not be answered");
                // Only this way: the end of the other one says that the rank copies nothing any more.
                let _ = rustix::net::shutdown(self.socket.fd(), rustix::net::Shutdown::Write);
                break;
            }
        }
        // What was put and not committed is given up only now: nobody writes it any more.
    }

    fn answer(&mut self, order: Order) -> Result<(), Broken> {
        match order {
            Order::Get(wants, deadline) => self.get(wants, deadline),
            Order::Put(key, len, deadline) => {
                self.put = None;
                let mut out = frame(wire::PLACE);
                match self.inner.begin_put(&key, len, deadline) {
                    Ok(put) => {
                        out.push(PutOutcome::Created as u8);
                        wire::put_pages(&mut out, put.pages());
                        self.put = Some(put);
                    }
                    Err(outcome) => out.push(outcome as u8),
                }
                self.socket.send(out, None)
            }
            Order::Commit(deadline) => {
                let put = self.put.take();
                let outcome = put.map_or(PutOutcome::Invalid, |put| put.commit(deadline));
                let mut out = frame(wire::OUTCOME);
                out.push(outcome as u8);
                self.socket.send(out, None)
            }
            Order::GiveUp => {
                self.put = None;
                Ok(())
            }
            Order::Exists(keys, deadline) => {
                let mut out = frame(wire::LENGTHS);
                for answer in self.inner.exists(&keys, deadline) {
                    let (outcome, len) = match answer {
                        Ok(Some(len)) => (GetOutcome::Local, len),
                        Ok(None) => (GetOutcome::Miss, 0),
                        Err(outcome) => (outcome, 0),
                    };
                    out.push(outcome as u8);
                    out.extend_from_slice(&len.to_le_bytes());
                }
                self.socket.send(out, None)
            }
            Order::Remove(keys, deadline) => {
                let mut out = frame(wire::REMOVED);
                let outcomes = self.inner.remove(&keys, deadline);
                out.extend(outcomes.into_iter().map(|outcome| outcome as u8));
                self.socket.send(out, None)
            }
            Order::Touch(keys) => {
                self.inner.touch(&keys);
                Ok(())
            }
        }
    }

    fn get(&self, wants: Vec<Want>, deadline: Instant) -> Result<(), Broken> {
        let mut call = Call::new(&self.inner, wants, deadline);
        self.pins.begin_call(call.stop());
        while let Some(event) = call.next() {
            // What is ready together goes together.
            let mut out = self.tell(event)?;
            while out.len() < TOGETHER
                && let Some(event) = call.next_at_hand()
            {
                out.extend(self.tell(event)?);
            }
            self.socket.send_sealed(&out, None)?;
        }
        self.socket.send(frame(wire::OVER), None)
    }

    fn tell(&self, event: Event) -> Result<Vec<u8>, Broken> {
        seal(match event {
            Event::Ended(index, outcome) => wire::ended(index, outcome),
            Event::Ready(delivery) => {
                let head = (delivery.index, delivery.outcome, delivery.last);
                // Before the rank hears of it, so that its end cannot come first.
                let pin = self.pins.add(delivery.pin);
                wire::Ready::encode(head, pin, &delivery.pages, &delivery.parts)
            }
        })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
