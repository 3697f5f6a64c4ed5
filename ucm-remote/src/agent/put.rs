//! Storing, asking, removing.
//!
//! **Invariant:** an object is published where all of its bytes were written, and nowhere else; what a
//! put has taken is given back whatever becomes of it.

use std::{
    collections::HashMap,
    ops::ControlFlow,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use ucm_transport::{Addr, Transfer, TransferPlan};

use super::{Inner, source::Attached};
use crate::{
    ByteRange, DirectoryError, GetOutcome, Medium as _, Member, ObjectKey, PageList, PeerId,
    PeerUsage, Pending, PutOutcome, Record, RemoveOutcome, Token,
    core::walk,
    directory::PLACES,
    service::{LEASE, Leased, Link, LinkError},
};

/// How long others may take to be told that something was used.
const TOUCH: Duration = Duration::from_secs(1);

/// An object that is being put: its bytes are gathered in this node's medium, and go on from there. The
/// pages are given back with the last reference, if they were not committed.
#[derive(Debug)]
pub(crate) struct Put {
    inner: Arc<Inner>,
    key: ObjectKey,
    pending: Pending,
    pages: PageList,
    /// It stays here.
    keep: bool,
    /// Who else is to have it.
    others: Vec<Member>,
    ended: AtomicBool,
}

impl Put {
    /// Where its bytes go.
    pub(crate) fn pages(&self) -> &PageList {
        &self.pages
    }

    /// All bytes are there, and nothing writes them any more: publishes the object. The first place counts;
    /// further ones that fail are counted.
    pub(crate) fn commit(&self, deadline: Instant) -> PutOutcome {
        let medium = self.inner.medium.medium();
        if !medium.written(self.pending, ByteRange { offset: 0, len: self.pages.len }) {
            return PutOutcome::Invalid;
        }
        let mut kept = None;
        let mut outcome = None;
        if self.keep {
            match medium.commit_leased(self.pending, Instant::now() + LEASE) {
                // Nothing evicts it while copies of it are made.
                Ok(lease) => kept = Some(Leased::new(medium, lease)),
                Err(failed) => return failed,
            }
            self.ended.store(true, Ordering::SeqCst);
            self.inner.announcer.ring();
            outcome = Some(PutOutcome::Created);
        }
        for member in &self.others {
            let sent = self.send(member, deadline).unwrap_or_else(LinkError::of_put);
            if outcome.is_some() && !sent.is_stored() {
                self.inner.counters.lost_copies.fetch_add(1, Ordering::Relaxed);
            }
            outcome.get_or_insert(sent);
        }
        drop(kept);
        self.inner.routes.forget(&self.key);
        outcome.unwrap_or(PutOutcome::NoSpace)
    }

    /// Puts a copy elsewhere.
    fn send(&self, member: &Member, deadline: Instant) -> Result<PutOutcome, LinkError> {
        let link = self.inner.links.link(member, deadline)?;
        let len = self.pages.len;
        let allocated = link.allocate(&[(self.key, len)], deadline)?.pop();
        let pending = match allocated.ok_or(LinkError::Broken)? {
            Ok(pending) => pending,
            Err(outcome) => return Ok(outcome),
        };
        let written = self.write(&link, pending, deadline);
        // What cannot be committed is given back; if even that fails, it goes with our connections.
        let ended = link.end(&[pending], written.is_ok(), deadline)?.pop();
        written?;
        ended.ok_or(LinkError::Broken)
    }

    fn write(&self, link: &Link, pending: Pending, deadline: Instant) -> Result<(), LinkError> {
        let inner = &self.inner;
        let len = self.pages.len;
        let to =
            Attached { engine: Arc::clone(&inner.tcp), region: link.attach_write(pending, len)? };
        let mut items = Vec::with_capacity(self.pages.pages.len());
        let mut known = true;
        let walked = walk(&self.pages, ByteRange { offset: 0, len }, |fragment| {
            let index = usize::try_from(fragment.addr.region.index).ok();
            match index.and_then(|index| inner.tcp_segments.get(index)) {
                Some(region) => {
                    let src = Addr { region: *region, offset: fragment.addr.offset };
                    items.push(Transfer { src, dst: to.at(fragment.before), len: fragment.len });
                }
                None => known = false,
            }
            ControlFlow::<()>::Continue(())
        });
        if walked.is_err() || !known {
            return Err(LinkError::Broken);
        }
        let plan = TransferPlan { items, holds: Vec::new() };
        // When this returns, nothing reads the pages for it any more.
        let completion = inner.tcp.transfer(plan, deadline).map_err(|rejected| rejected.error)?;
        completion.result?;
        Ok(())
    }
}

impl Drop for Put {
    fn drop(&mut self) {
        if !self.ended.load(Ordering::SeqCst) {
            // Whoever copied into the pages held a reference.
            self.inner.medium.medium().abort(self.pending, true);
        }
    }
}

impl Inner {
    /// Takes memory for an object, and decides where it goes.
    pub(crate) fn begin_put(
        self: &Arc<Self>,
        key: &ObjectKey,
        len: u64,
        deadline: Instant,
    ) -> Result<Arc<Put>, PutOutcome> {
        if self.stopping.load(Ordering::SeqCst) {
            return Err(PutOutcome::PeerDown);
        }
        let (keep, others) = self.place(key, len, deadline)?;
        let (pending, pages) = self.with(|table| table.allocate_put(key, len))?;
        Ok(Arc::new(Put {
            inner: Arc::clone(self),
            key: *key,
            pending,
            pages,
            keep,
            others,
            ended: AtomicBool::new(false),
        }))
    }

    fn place(
        &self,
        key: &ObjectKey,
        len: u64,
        deadline: Instant,
    ) -> Result<(bool, Vec<Member>), PutOutcome> {
        let Some((strategy, copies)) = &self.options.placement else {
            return Ok((true, Vec::new()));
        };
        let members = self.routes.members(deadline).map_err(|error| match error {
            DirectoryError::Timeout => PutOutcome::Timeout,
            _ => PutOutcome::PeerDown,
        })?;
        let chosen = strategy.place(key, len, &members, *copies).0;
        if chosen.is_empty() {
            return Err(PutOutcome::TooLarge);
        }
        let keep = chosen.contains(&self.options.me);
        let others = chosen.iter().filter(|peer| **peer != self.options.me);
        let find = |peer: &PeerId| members.iter().find(|member| member.peer == *peer).cloned();
        Ok((keep, others.filter_map(find).collect()))
    }

    /// The peers that the directory knows, and how their memory is used, as far as they answer.
    pub(super) fn peers(
        &self,
        deadline: Instant,
    ) -> Result<Vec<(Member, Option<PeerUsage>)>, DirectoryError> {
        let ask = |member: Member| {
            let usage = self.links.link(&member, deadline).and_then(|link| link.usage(deadline));
            (member, usage.ok())
        };
        Ok(self.routes.members(deadline)?.into_iter().map(ask).collect())
    }

    /// Who has what, by our own knowledge and the directory's.
    pub(crate) fn exists(
        &self,
        keys: &[ObjectKey],
        deadline: Instant,
    ) -> Vec<Result<Option<u64>, GetOutcome>> {
        let medium = self.medium.medium();
        let mut answers: Vec<Option<u64>> =
            keys.iter().map(|key| medium.find(key).map(|(_, len)| len)).collect();
        let absent: Vec<ObjectKey> = keys
            .iter()
            .zip(&answers)
            .filter(|(_, answer)| answer.is_none())
            .map(|(key, _)| *key)
            .collect();
        let mut located = self.routes.locate(&absent, deadline).into_iter();
        let mut all = Vec::with_capacity(keys.len());
        for answer in answers.drain(..) {
            all.push(match answer {
                Some(len) => Ok(Some(len)),
                None => match located.next() {
                    Some(Ok(records)) => Ok(records
                        .iter()
                        .find(|record| record.peer != self.options.me)
                        .map(|record| record.len)),
                    Some(Err(crate::DirectoryError::Timeout)) => Err(GetOutcome::Timeout),
                    _ => Err(GetOutcome::PeerDown),
                },
            });
        }
        all
    }

    /// Takes objects away wherever they are.
    pub(crate) fn remove(
        self: &Arc<Self>,
        keys: &[ObjectKey],
        deadline: Instant,
    ) -> Vec<RemoveOutcome> {
        let mut outcomes: Vec<_> =
            self.with(|table| keys.iter().map(|key| table.remove(key)).collect());
        let mut places: Vec<(ObjectKey, &mut RemoveOutcome)> =
            keys.iter().copied().zip(&mut outcomes).collect();
        // A directory may tell only some of the places, and others when those are gone.
        while !places.is_empty() {
            places = self.remove_where_told(places, deadline);
        }
        self.announcer.ring();
        outcomes
    }

    /// Takes objects away from where the directory says that they are; those that may be elsewhere as well.
    fn remove_where_told<'a>(
        &self,
        keys: Vec<(ObjectKey, &'a mut RemoveOutcome)>,
        deadline: Instant,
    ) -> Vec<(ObjectKey, &'a mut RemoveOutcome)> {
        let names: Vec<_> = keys.iter().map(|(key, _)| *key).collect();
        names.iter().for_each(|key| self.routes.forget(key));
        let located = self.routes.locate(&names, deadline);
        // Told of at once: the owners do so when they come to it.
        let mut gone: Vec<(ObjectKey, Record)> = Vec::new();
        let mut again = Vec::new();
        for ((key, outcome), located) in keys.into_iter().zip(located) {
            let Ok(records) = located else {
                *outcome = RemoveOutcome::PeerDown;
                continue;
            };
            let (told, before) = (records.len(), gone.len());
            for record in records {
                if record.peer == self.options.me {
                    gone.push((key, record));
                    continue;
                }
                let removed = self
                    .link(&record, deadline)
                    .and_then(|link| link.remove(&[key], deadline))
                    .map(|mut all| all.pop());
                if matches!(removed, Ok(_) | Err(LinkError::Restarted)) {
                    gone.push((key, record));
                }
                *outcome = match (removed, *outcome) {
                    (Ok(Some(RemoveOutcome::Removed)), RemoveOutcome::Miss) => {
                        RemoveOutcome::Removed
                    }
                    // Another run has nothing of this one's.
                    (Ok(_) | Err(LinkError::Restarted), outcome) => outcome,
                    (Err(LinkError::Timeout), _) => RemoveOutcome::Timeout,
                    (Err(_), _) => RemoveOutcome::PeerDown,
                };
            }
            self.routes.forget(&key);
            // Only if it tells others the next time.
            if told >= PLACES && gone.len() - before == told {
                again.push((key, outcome));
            }
        }
        if !gone.is_empty()
            && let Err(error) = self.routes.directory().withdraw(&gone, deadline)
        {
            tracing::debug!(%error, "the directory still tells of removed objects");
            again.clear();
        }
        again
    }

    /// Marks objects as used: here at once, where else they are soon.
    pub(crate) fn touch(&self, keys: &[ObjectKey]) {
        let medium = self.medium.medium();
        medium.touch(keys);
        self.toucher.want(keys.iter().filter(|key| medium.find(key).is_none()).copied());
    }

    /// Tells peers of it; what fails costs only that.
    pub(super) fn touch_away(&self, away: &[ObjectKey]) {
        let deadline = Instant::now() + TOUCH;
        let located = self.routes.locate(away, deadline);
        let mut by_peer: HashMap<(PeerId, Token), (Record, Vec<ObjectKey>)> = HashMap::new();
        for (key, records) in away.iter().zip(located) {
            for record in records.into_iter().flatten().filter(|r| r.peer != self.options.me) {
                let name = (record.peer.clone(), record.boot);
                by_peer.entry(name).or_insert_with(|| (record, Vec::new())).1.push(*key);
            }
        }
        for (record, keys) in by_peer.into_values() {
            let touched = self.link(&record, deadline).and_then(|link| link.touch(&keys, deadline));
            if let Err(error) = touched {
                tracing::debug!(?error, peer = %record.peer, "objects could not be touched");
            }
        }
    }
}
