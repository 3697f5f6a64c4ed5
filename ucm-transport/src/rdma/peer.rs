//! A peer as the engine knows it: what waits for it, what is under way, and the connection to it.
//!
//! **Invariant:** a part that has operations with an adapter ends only by their good completion, or
//! after their queue pair was destroyed; a peer that restarted is another peer, for good.

use std::{
    collections::{HashMap, VecDeque},
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError},
    time::Instant,
};

use ucm_data::Token;

use super::{
    conn::{Batch, Broken, Conn, Done},
    ends::Job,
    plan::Parcel,
    sys::wc,
    work::Operations,
};
use crate::{
    ErrorKind, TransferError,
    tcp::{Breaker, Secret},
};

#[derive(Debug)]
pub(super) struct Peer {
    pub(super) address: SocketAddr,
    pub(super) secret: Secret,
    /// The run of the peer that this is.
    pub(super) boot: Token,
    /// The owner of memory in that run.
    pub(super) owner: Token,
    state: Mutex<State>,
}

#[derive(Debug)]
pub(super) struct State {
    conn: Option<Conn>,
    dialing: bool,
    pub(super) breaker: Breaker,
    /// Another run answers at its address, or it was let go.
    gone: Option<TransferError>,
    /// All parts that have not ended.
    parts: HashMap<u64, Part>,
    next_part: u64,
    /// Parts with operations to post.
    queue: VecDeque<u64>,
    /// Connections whose queue pair could not be destroyed yet, with the parts on them.
    undead: Vec<(Conn, Vec<Part>)>,
    pub(super) counters: Counters,
}

/// What happened with a peer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counters {
    pub(super) reads: u64,
    pub(super) writes: u64,
    pub(super) doorbells: u64,
    pub(super) signalled: u64,
    pub(super) strangers: u64,
    pub(super) resent: u64,
    pub(super) connected: u64,
    pub(super) broken: u64,
}

/// A plan's work with this peer.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) job: Arc<Job>,
    write: bool,
    host: bool,
    operations: Operations,
    /// Operations that completed well, and those that were posted. They go in order.
    done: usize,
    posted: usize,
    resent: bool,
}

/// What is to be done without the lock.
#[derive(Debug, Default)]
#[must_use]
pub(super) struct Moves {
    /// Parts that have ended.
    pub(super) ended: Vec<(Part, Option<TransferError>)>,
    /// A connection should be made.
    pub(super) dial: bool,
}

impl Moves {
    pub(super) fn is_empty(&self) -> bool {
        self.ended.is_empty() && !self.dial
    }
}

impl Peer {
    pub(super) fn new(
        address: SocketAddr,
        secret: Secret,
        (boot, owner): (Token, Token),
        breaker: Breaker,
        conn: Conn,
    ) -> Arc<Self> {
        let state = State {
            conn: Some(conn),
            dialing: false,
            breaker,
            gone: None,
            parts: HashMap::new(),
            next_part: 1,
            queue: VecDeque::new(),
            undead: Vec::new(),
            counters: Counters { connected: 1, ..Counters::default() },
        };
        Arc::new(Self { address, secret, boot, owner, state: Mutex::new(state) })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // No foreign code runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, unless somebody else has it.
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl Part {
    pub(super) fn new(job: Arc<Job>, parcel: Parcel) -> Self {
        let Parcel { write, host, operations, .. } = parcel;
        Self { job, write, host, operations, done: 0, posted: 0, resent: false }
    }

    fn is_with_adapter(&self) -> bool {
        self.posted > self.done
    }
}

impl State {
    /// Takes a part in, and posts what can be posted.
    pub(super) fn begin(&mut self, part: Part, now: Instant, moves: &mut Moves) {
        let number = self.next_part;
        self.next_part += 1;
        self.parts.insert(number, part);
        self.queue.push_back(number);
        self.pump(now, moves);
    }

    /// Posts what waits, as far as the send queue has places.
    pub(super) fn pump(&mut self, now: Instant, moves: &mut Moves) {
        if let Some(error) = self.gone.clone() {
            self.fail_waiting(&error, moves);
            return;
        }
        loop {
            self.skip_failed(moves);
            if self.queue.is_empty() {
                return;
            }
            if self.conn.is_none() {
                self.ask_for_connection(now, moves);
                return;
            }
            match self.post() {
                Ok(0) => return,
                Ok(_) => {}
                Err(broken) => {
                    self.break_up(&broken, now, moves);
                    return;
                }
            }
        }
    }

    /// Takes parts of failed plans off the front of the queue.
    fn skip_failed(&mut self, moves: &mut Moves) {
        while let Some(number) = self.queue.front().copied() {
            let part = self.parts.get(&number);
            if part.is_some_and(|part| !part.job.is_over()) {
                return;
            }
            self.queue.pop_front();
            self.end_unless_carried(number, moves);
        }
    }

    /// What is posted of a failed part completes first.
    fn end_unless_carried(&mut self, number: u64, moves: &mut Moves) {
        if self.parts.get(&number).is_some_and(|part| !part.is_with_adapter())
            && let Some(part) = self.parts.remove(&number)
        {
            moves.ended.push((part, None));
        }
    }

    fn fail_waiting(&mut self, error: &TransferError, moves: &mut Moves) {
        for number in std::mem::take(&mut self.queue) {
            if let Some(part) = self.parts.remove(&number) {
                moves.ended.push((part, Some(error.clone())));
            }
        }
    }

    fn ask_for_connection(&mut self, now: Instant, moves: &mut Moves) {
        if self.dialing {
            return;
        }
        match self.breaker.admit(now) {
            Ok(()) => {
                self.dialing = true;
                moves.dial = true;
            }
            Err(left) => {
                let text =
                    format!("the peer failed before; it is tried again in {} ms", left.as_millis());
                self.fail_waiting(&TransferError::new(ErrorKind::PeerDown, text), moves);
            }
        }
    }

    /// Posts from the front of the queue by one doorbell; says how many operations.
    fn post(&mut self) -> Result<usize, Broken> {
        let Some(conn) = &mut self.conn else { return Ok(0) };
        let mut room = conn.free();
        let mut batches = Vec::new();
        let mut plan = Vec::new();
        for number in &self.queue {
            let Some(part) = self.parts.get(number) else { continue };
            let count = (part.operations.all.len() - part.posted).min(room);
            if count == 0 || part.job.is_over() {
                break;
            }
            room -= count;
            batches.push(Batch {
                part: *number,
                inline: if part.host { conn.inline_bytes() } else { 0 },
                operations: &part.operations,
                from: part.posted,
                count,
            });
            plan.push((*number, count));
        }
        if batches.is_empty() {
            return Ok(0);
        }
        // SAFETY: the near memory lies in regions that the plan's lease keeps registered; the part
        // stays here, and with it the lease, until the operations have completed well or the queue
        // pair is destroyed.
        let posted = unsafe { conn.post(&batches) };
        drop(batches);
        let mut all = 0;
        for (number, count) in plan {
            all += count;
            // Also after an error: nobody knows how much of it the adapter has.
            if let Some(part) = self.parts.get_mut(&number) {
                part.posted += count;
                let counter =
                    if part.write { &mut self.counters.writes } else { &mut self.counters.reads };
                *counter += count as u64;
            }
        }
        let parts = &self.parts;
        self.queue.retain(|number| {
            parts.get(number).is_some_and(|part| part.posted < part.operations.all.len())
        });
        self.counters.doorbells += 1;
        self.counters.signalled += posted?;
        Ok(all)
    }

    /// Takes completions, and posts what waited for places. Says whether there were any.
    pub(super) fn look(&mut self, now: Instant, moves: &mut Moves) -> bool {
        let Some(conn) = &mut self.conn else { return false };
        let mut done = Vec::new();
        let looked = conn.poll(&mut done, &mut self.counters.strangers);
        let some = !done.is_empty() || looked.is_err();
        for Done { part, count } in done {
            let Some(known) = self.parts.get_mut(&part) else { continue };
            known.done += count as usize;
            let whole = known.done == known.operations.all.len();
            let over = known.job.is_over() && !known.is_with_adapter();
            if (whole || over)
                && let Some(part) = self.parts.remove(&part)
            {
                moves.ended.push((part, None));
            }
        }
        match looked {
            Err(broken) => self.break_up(&broken, now, moves),
            Ok(()) if some => self.pump(now, moves),
            Ok(()) => {}
        }
        some
    }

    /// Ends the connection because of an error on it.
    fn break_up(&mut self, broken: &Broken, now: Instant, moves: &mut Moves) {
        let (kind, text) = told(broken);
        let error = TransferError::new(kind, text);
        let guilty = match broken {
            Broken::Work { part: Some(part), .. } if !broken.may_be_repaired() => {
                self.parts.get(part)
            }
            _ => None,
        };
        let Some(guilty) = guilty else { return self.tear_down(&error, now, moves) };
        guilty.job.fail(error);
        // The others did nothing wrong.
        let text = "the connection broke because of another plan; submit this one again";
        self.tear_down(&TransferError::new(ErrorKind::PeerDown, text), now, moves);
    }

    /// Destroys the connection. Parts that it carried begin again on another one, once, if they are
    /// reads of plans that have not failed; the others end.
    pub(super) fn tear_down(&mut self, error: &TransferError, now: Instant, moves: &mut Moves) {
        let Some(mut conn) = self.conn.take() else { return };
        self.counters.broken += 1;
        conn.stop();
        let carried: Vec<u64> = self
            .parts
            .iter()
            .filter_map(|(number, part)| part.is_with_adapter().then_some(*number))
            .collect();
        let on_it: Vec<(u64, Part)> = carried
            .into_iter()
            .filter_map(|number| Some((number, self.parts.remove(&number)?)))
            .collect();
        self.queue.retain(|number| self.parts.contains_key(number));
        if let Err(verb) = conn.destroy() {
            tracing::error!("a queue pair is not destroyed, its plans wait: {verb}");
            for (_, part) in &on_it {
                part.job.fail(error.clone());
            }
            self.undead.push((conn, on_it.into_iter().map(|(_, part)| part).collect()));
        } else {
            drop(conn);
            self.go_on_without(on_it, error, moves);
        }
        self.pump(now, moves);
    }

    fn go_on_without(
        &mut self,
        mut parts: Vec<(u64, Part)>,
        error: &TransferError,
        moves: &mut Moves,
    ) {
        // Oldest at the front of the queue.
        parts.sort_unstable_by_key(|(number, _)| std::cmp::Reverse(*number));
        for (number, mut part) in parts {
            let again = !part.write && !part.resent && !part.job.is_over() && self.gone.is_none();
            if again {
                part.posted = part.done;
                part.resent = true;
                self.counters.resent += 1;
                self.parts.insert(number, part);
                self.queue.push_front(number);
            } else {
                moves.ended.push((part, Some(error.clone())));
            }
        }
    }

    /// Ends what this failed plan still has here. Its connection goes, if it carries any of it.
    pub(super) fn expel(&mut self, job: &Arc<Job>, now: Instant, moves: &mut Moves) {
        let its: Vec<(u64, bool)> = self
            .parts
            .iter()
            .filter(|(_, part)| Arc::ptr_eq(&part.job, job))
            .map(|(number, part)| (*number, part.is_with_adapter()))
            .collect();
        for (number, _) in &its {
            self.queue.retain(|queued| queued != number);
            self.end_unless_carried(*number, moves);
        }
        if its.iter().any(|(_, carried)| *carried) {
            let text = "the connection was given up because another plan was cancelled, or did not \
                        end in time; submit this one again";
            self.tear_down(&TransferError::new(ErrorKind::PeerDown, text), now, moves);
        }
    }

    /// A connection was made, or not.
    pub(super) fn dialed(
        &mut self,
        outcome: Result<Conn, TransferError>,
        now: Instant,
        moves: &mut Moves,
    ) {
        self.dialing = false;
        match outcome {
            Ok(conn) => {
                self.breaker.succeeded();
                if self.gone.is_none() {
                    self.counters.connected += 1;
                    self.conn = Some(conn);
                }
            }
            Err(error) if error.kind() == ErrorKind::Stale => {
                self.breaker.succeeded();
                self.gone.get_or_insert(error);
            }
            Err(error) => {
                self.breaker.failed(now);
                self.fail_waiting(&error, moves);
            }
        }
        self.pump(now, moves);
    }

    /// Ends everything with this peer.
    pub(super) fn let_go(&mut self, error: &TransferError, now: Instant, moves: &mut Moves) {
        self.gone.get_or_insert_with(|| error.clone());
        self.tear_down(error, now, moves);
        self.pump(now, moves);
    }

    /// Tries again to destroy queue pairs; their plans end then. Says how many are left.
    pub(super) fn bury(&mut self, moves: &mut Moves) -> usize {
        for (mut conn, parts) in std::mem::take(&mut self.undead) {
            if conn.destroy().is_ok() {
                moves.ended.extend(parts.into_iter().map(|part| (part, None)));
            } else {
                self.undead.push((conn, parts));
            }
        }
        self.undead.len()
    }

    /// Gives up what cannot be destroyed: with its memory it stays until the process ends.
    pub(super) fn take_undead(&mut self) -> Vec<(Conn, Vec<Part>)> {
        std::mem::take(&mut self.undead)
    }

    /// Asks to be told of the next completion.
    pub(super) fn arm(&mut self, now: Instant, moves: &mut Moves) {
        if let Some(conn) = &mut self.conn
            && let Err(broken) = conn.arm()
        {
            self.break_up(&broken, now, moves);
        }
    }

    /// An announcement has come, perhaps for this connection.
    pub(super) fn disarm(&mut self) {
        if let Some(conn) = &mut self.conn {
            conn.armed = false;
        }
    }

    pub(super) fn conn(&self) -> Option<&Conn> {
        self.conn.as_ref()
    }

    pub(super) fn is_busy(&self) -> bool {
        self.conn.as_ref().is_some_and(|conn| !conn.is_idle())
    }

    pub(super) fn waiting(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn gone(&self) -> Option<&TransferError> {
        self.gone.as_ref()
    }

    /// Plans in quarantine.
    pub(super) fn quarantined(&self) -> usize {
        self.undead.iter().map(|(_, parts)| parts.len()).sum()
    }
}

/// What a broken connection means to a plan.
fn told(broken: &Broken) -> (ErrorKind, String) {
    match broken {
        Broken::Verb(error) => (ErrorKind::Failed, format!("the adapter refuses work: {error}")),
        Broken::Work { status, name, vendor, .. } => {
            let text = format!("{name} (status {status}, vendor {vendor:#x})");
            match *status {
                wc::REM_ACCESS_ERR => (
                    ErrorKind::Stale,
                    format!("the peer has revoked this memory; attach it again: {text}"),
                ),
                wc::RETRY_EXC_ERR | wc::RNR_RETRY_EXC_ERR | wc::RESP_TIMEOUT_ERR => {
                    (ErrorKind::PeerDown, format!("the peer's adapter does not answer: {text}"))
                }
                wc::WR_FLUSH_ERR => (ErrorKind::PeerDown, format!("the connection ended: {text}")),
                _ => (ErrorKind::Failed, text),
            }
        }
    }
}
