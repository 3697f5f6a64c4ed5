//! The peer service: a medium as other nodes reach it, over the tcp engine's server.
//!
//! A read is one exchange: its descriptor names key, generation and length, the owner looks at all three,
//! leases the object while its bytes are sent, and sends them from the pages. A put allocates, writes and
//! commits; what was allocated belongs to the client's run and goes with the last of its connections.
//!
//! **Invariant:** pages of a pending object are freed only when no connection can write them, and an
//! object is committed only when nothing writes it any more.

mod links;
mod sessions;
pub(crate) mod wire;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use ucm_transport::{Pieces, Refusal, RefusalKind, Request, Serve, Served, Session};

pub(crate) use self::links::{Link, LinkError, Links};
use self::{
    sessions::{Sessions, WriteId},
    wire::{Descriptor, Fields, Malformed, Op},
};
use crate::{
    ByteRange, Generation, GetOutcome, HostMedium, Medium as _, ObjectKey, PageList, PagedMedium,
    PeerUsage, Pending, PutOutcome,
    core::{WalkError, walk},
};

/// A lease of the owner itself, given back by whoever holds it: it does not run out.
pub(crate) const LEASE: Duration = Duration::from_secs(10 * 365 * 86_400);

/// Serves a medium to peers. Give it to a [`TcpServer`](ucm_transport::TcpServer).
#[derive(Debug)]
pub struct PeerService {
    medium: HostMedium,
    sessions: Arc<Mutex<Sessions>>,
    /// How long pages are lent.
    lend: Duration,
    changed: Changed,
}

/// Called when somebody else has changed the medium.
struct Changed(Box<dyn Fn() + Send + Sync>);

impl std::fmt::Debug for Changed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Changed")
    }
}

/// Gives a lease back when it is dropped.
#[derive(Debug)]
pub(crate) struct Leased {
    medium: Arc<PagedMedium>,
    lease: u64,
}

impl Leased {
    pub(crate) fn new(medium: &Arc<PagedMedium>, lease: u64) -> Self {
        Self { medium: Arc::clone(medium), lease }
    }
}

impl Drop for Leased {
    fn drop(&mut self) {
        self.medium.release(self.lease);
    }
}

impl From<Malformed> for Refusal {
    fn from(error: Malformed) -> Self {
        Self::new(RefusalKind::Invalid, error.to_string())
    }
}

fn lock(sessions: &Mutex<Sessions>) -> MutexGuard<'_, Sessions> {
    // Nothing panics while it is held.
    sessions.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PeerService {
    /// Serves this medium.
    #[must_use]
    pub fn new(medium: HostMedium) -> Self {
        let lend = Duration::from_secs(30);
        Self { medium, sessions: Arc::default(), lend, changed: Changed(Box::new(|| {})) }
    }

    /// Calls this when a peer has stored or removed something. It must not block.
    #[must_use]
    pub fn notify(self, changed: impl Fn() + Send + Sync + 'static) -> Self {
        Self { changed: Changed(Box::new(changed)), ..self }
    }

    /// How long pages are lent to neighbours that read them without us. Default 30 s.
    #[must_use]
    pub fn lend_for(self, time: Duration) -> Self {
        Self { lend: time, ..self }
    }

    fn paged(&self) -> &Arc<PagedMedium> {
        self.medium.medium()
    }

    /// Leases exactly this storing of an object.
    fn lease(
        &self,
        key: &ObjectKey,
        generation: Generation,
        len: u64,
    ) -> Result<(Leased, PageList), Refusal> {
        let Some(stored) = self.paged().lease(key, Instant::now() + LEASE) else {
            return Err(match self.paged().find(key) {
                Some(_) => Refusal::new(RefusalKind::Busy, "too many leases are out"),
                None => Refusal::new(RefusalKind::Missing, "the object is not here"),
            });
        };
        let leased = Leased::new(self.paged(), stored.lease);
        if stored.generation != generation || stored.pages.len != len {
            let text = format!(
                "generation {} of {} bytes is here, not {} of {len}",
                stored.generation.0, stored.pages.len, generation.0
            );
            return Err(Refusal::new(RefusalKind::Stale, text));
        }
        Ok((leased, stored.pages))
    }

    /// Names the memory of ranges of an object.
    fn name(
        &self,
        pages: &PageList,
        request: &Request<'_>,
        into: &mut Pieces,
    ) -> Result<(), Refusal> {
        for range in request.ranges {
            let range = ByteRange { offset: range.offset, len: u64::from(range.len) };
            let mut pushed = Ok(());
            let walked = walk(pages, range, |fragment| {
                pushed = match self.medium.memory(fragment.addr) {
                    Some(memory) => into.push(memory, fragment.addr.offset, fragment.len),
                    None => Err(Refusal::new(RefusalKind::Failed, "a page in no segment")),
                };
                if pushed.is_ok() {
                    std::ops::ControlFlow::Continue(())
                } else {
                    std::ops::ControlFlow::Break(())
                }
            });
            pushed?;
            walked.map(drop).map_err(|error| {
                let kind = match error {
                    WalkError::Outside { .. } => RefusalKind::OutOfBounds,
                    _ => RefusalKind::Invalid,
                };
                Refusal::new(kind, error.to_string())
            })?;
        }
        Ok(())
    }

    fn resolve(&self, fields: &mut Fields<'_>, out: &mut Vec<u8>) -> Result<(), Malformed> {
        let key = fields.key()?;
        let (status, generation, len) = match self.paged().find(&key) {
            Some((generation, len)) => (GetOutcome::Remote, generation.0, len),
            None if self.paged().is_writing(&key) => (GetOutcome::Busy, 0, 0),
            None => (GetOutcome::Miss, 0, 0),
        };
        out.push(status as u8);
        out.extend_from_slice(&generation.to_le_bytes());
        out.extend_from_slice(&len.to_le_bytes());
        Ok(())
    }

    fn allocate(
        &self,
        session: &Session,
        fields: &mut Fields<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), Malformed> {
        let (key, len) = (fields.key()?, fields.u64()?);
        let (status, pending) = match self.paged().allocate(&key, len) {
            Ok((pending, pages)) => {
                lock(&self.sessions).allocated(session.client, pending, pages);
                (PutOutcome::Created, pending)
            }
            Err(outcome) => (outcome, Pending { id: 0, generation: Generation(0) }),
        };
        out.push(status as u8);
        wire::put_pending(out, pending);
        Ok(())
    }

    /// Leases an object to somebody who reads its pages without us.
    fn lend(&self, session: &Session, key: &ObjectKey, out: &mut Vec<u8>) {
        let now = Instant::now();
        match self.paged().lease(key, now + self.lend) {
            Some(stored) => {
                lock(&self.sessions).leased(session.client, stored.lease, now, now + self.lend);
                out.push(GetOutcome::Remote as u8);
                for number in [stored.generation.0, stored.pages.len, stored.lease] {
                    out.extend_from_slice(&number.to_le_bytes());
                }
                let ms = u32::try_from(self.lend.as_millis()).unwrap_or(u32::MAX);
                out.extend_from_slice(&ms.to_le_bytes());
                wire::put_pages(out, &stored.pages);
            }
            None => {
                let there = self.paged().find(key).is_some() || self.paged().is_writing(key);
                let status = if there { GetOutcome::Busy } else { GetOutcome::Miss };
                out.push(status as u8);
            }
        }
    }

    fn end_put(&self, session: &Session, pending: Pending, commit: bool) -> PutOutcome {
        let mut sessions = lock(&self.sessions);
        match sessions.may_end(session.client, pending) {
            PutOutcome::Created => {}
            other => return other,
        }
        // Nothing writes it: it can be ended for good.
        let outcome = if commit { self.paged().commit(pending) } else { PutOutcome::Created };
        if !commit || outcome != PutOutcome::Invalid {
            sessions.forget(session.client, pending);
        }
        drop(sessions);
        if !commit {
            self.paged().abort(pending, true);
        }
        outcome
    }

    fn usage(&self) -> PeerUsage {
        PeerUsage {
            medium: self.paged().usage(),
            objects: self.paged().objects() as u64,
            evictions: self.paged().evictions(),
            page_bytes: self.paged().page_bytes(),
        }
    }
}

impl Serve for PeerService {
    fn opened(&self, session: &Session) {
        lock(&self.sessions).opened(session.client);
    }

    fn closed(&self, session: &Session) {
        // The last connection of a run is gone: nobody can write what it had allocated.
        // It may read what it was lent, though, until the time is over.
        let left = lock(&self.sessions).closed(session.client);
        for pending in left {
            self.paged().abort(pending, true);
        }
    }

    fn read(&self, request: &Request<'_>, pieces: &mut Pieces) -> Result<Served, Refusal> {
        let Descriptor::Read { key, generation, len } = Descriptor::decode(request.descriptor)?
        else {
            return Err(Refusal::new(RefusalKind::Denied, "what is being written is not read"));
        };
        let (leased, pages) = self.lease(&key, generation, len)?;
        self.name(&pages, request, pieces)?;
        Ok(Served::holding(leased))
    }

    fn write(&self, request: &Request<'_>, pieces: &mut Pieces) -> Result<Served, Refusal> {
        let Descriptor::Write(pending) = Descriptor::decode(request.descriptor)? else {
            return Err(Refusal::new(RefusalKind::Denied, "what is stored is not written"));
        };
        let client = request.session.client;
        let ranges: Vec<ByteRange> = request
            .ranges
            .iter()
            .map(|range| ByteRange { offset: range.offset, len: u64::from(range.len) })
            .collect();
        let (write, pages) = lock(&self.sessions).begin_write(client, pending, &ranges)?;
        let begun = Begun {
            sessions: Arc::clone(&self.sessions),
            medium: Arc::clone(self.paged()),
            client,
            pending,
            write,
            ranges,
        };
        // Dropping it ends the write.
        self.name(&pages, request, pieces)?;
        Ok(Served::asking(move |all| begun.end(all)))
    }

    fn call(&self, session: &Session, request: &[u8], reply: &mut Vec<u8>) -> Result<(), Refusal> {
        let (op, items, mut fields) = wire::parse_call(request)?;
        if op == Op::Stat {
            wire::put_usage(reply, &self.usage());
            return Ok(());
        }
        for _ in 0..items {
            match op {
                Op::Resolve => self.resolve(&mut fields, reply)?,
                Op::Allocate => self.allocate(session, &mut fields, reply)?,
                Op::Commit | Op::Abort => {
                    let outcome = self.end_put(session, fields.pending()?, op == Op::Commit);
                    reply.push(outcome as u8);
                }
                Op::Remove => reply.push(self.paged().remove(&fields.key()?) as u8),
                Op::Touch => self.paged().touch(&[fields.key()?]),
                Op::Lease => self.lend(session, &fields.key()?, reply),
                Op::Release => {
                    let lease = fields.u64()?;
                    if lock(&self.sessions).released(session.client, lease) {
                        self.paged().release(lease);
                    }
                }
                Op::Stat => {}
            }
        }
        if matches!(op, Op::Commit | Op::Remove) {
            (self.changed.0)();
        }
        Ok(())
    }
}

/// A write that may still touch pages.
struct Begun {
    sessions: Arc<Mutex<Sessions>>,
    medium: Arc<PagedMedium>,
    client: crate::Token,
    pending: Pending,
    write: WriteId,
    ranges: Vec<ByteRange>,
}

impl Begun {
    fn end(self, all: bool) -> Result<(), Refusal> {
        let mut sessions = lock(&self.sessions);
        if !sessions.is_open(self.client, self.pending) {
            let text = "the object was given up meanwhile";
            return Err(Refusal::new(RefusalKind::Stale, text));
        }
        let good = all && self.ranges.iter().all(|range| self.medium.written(self.pending, *range));
        sessions.end_write(self.client, self.pending, self.write, good);
        if good { Ok(()) } else { Err(Refusal::new(RefusalKind::Stale, "not written")) }
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        // Without effect after `end`.
        lock(&self.sessions).end_write(self.client, self.pending, self.write, false);
    }
}

#[cfg(test)]
mod tests;
