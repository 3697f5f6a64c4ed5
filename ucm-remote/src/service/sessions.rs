//! Who writes what: the pending objects of each client's run, and the writes in flight on them. No IO.
//!
//! **Invariant:** no two writes of an object share a byte, now or before; an object with a write in flight
//! is neither committed nor aborted; a run without connections has no objects, and no leases but those whose time
//! has not come: a neighbour reads what it was lent without asking, whatever becomes of its connections.

use std::{collections::HashMap, time::Instant};

use ucm_transport::{Refusal, RefusalKind};

use crate::{ByteRange, PageList, Pending, PutOutcome, Token, check_ranges, core::ExtentSet};

/// Names a write in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct WriteId(u64);

#[derive(Debug, Default)]
pub(super) struct Sessions {
    runs: HashMap<Token, Run>,
    next: u64,
}

#[derive(Debug, Default)]
struct Run {
    connections: usize,
    objects: HashMap<Pending, Object>,
    /// Until when each lasts.
    leases: HashMap<u64, Instant>,
}

#[derive(Debug)]
struct Object {
    pages: PageList,
    /// What has been written, or is being written.
    claimed: ExtentSet,
    writes: HashMap<WriteId, Vec<ByteRange>>,
}

impl Sessions {
    pub(super) fn opened(&mut self, client: Token) {
        self.runs.entry(client).or_default().connections += 1;
    }

    /// The objects that the run leaves behind, when this was its last connection. Its writes have ended:
    /// each ends before its connection does.
    pub(super) fn closed(&mut self, client: Token) -> Vec<Pending> {
        let Some(run) = self.runs.get_mut(&client) else { return Vec::new() };
        run.connections = run.connections.saturating_sub(1);
        if run.connections > 0 {
            return Vec::new();
        }
        let objects = std::mem::take(&mut run.objects);
        if run.leases.is_empty() {
            self.runs.remove(&client);
        }
        objects.into_keys().collect()
    }

    /// Leases that have run out are forgotten: the medium has ended them.
    pub(super) fn leased(&mut self, client: Token, lease: u64, now: Instant, until: Instant) {
        self.runs.retain(|_, run| {
            run.leases.retain(|_, until| *until > now);
            run.connections > 0 || !run.leases.is_empty()
        });
        self.runs.entry(client).or_default().leases.insert(lease, until);
    }

    /// Whether this was a lease of the run.
    pub(super) fn released(&mut self, client: Token, lease: u64) -> bool {
        self.runs.get_mut(&client).is_some_and(|run| run.leases.remove(&lease).is_some())
    }

    pub(super) fn allocated(&mut self, client: Token, pending: Pending, pages: PageList) {
        let object = Object { pages, claimed: ExtentSet::default(), writes: HashMap::new() };
        // Asked by a connection of the run, which is therefore known.
        self.runs.entry(client).or_default().objects.insert(pending, object);
    }

    /// Claims the bytes of a write.
    pub(super) fn begin_write(
        &mut self,
        client: Token,
        pending: Pending,
        ranges: &[ByteRange],
    ) -> Result<(WriteId, PageList), Refusal> {
        let object = self.runs.get_mut(&client).and_then(|run| run.objects.get_mut(&pending));
        let Some(object) = object else {
            return Err(Refusal::new(RefusalKind::Stale, "no such object is being written"));
        };
        check_ranges(ranges, object.pages.len)
            .map_err(|error| Refusal::new(RefusalKind::Invalid, error.to_string()))?;
        if ranges.iter().any(|range| object.claimed.present(*range).next().is_some()) {
            return Err(Refusal::new(RefusalKind::Invalid, "bytes that were written already"));
        }
        object.claimed.extend(ranges.iter().copied());
        self.next += 1;
        let write = WriteId(self.next);
        object.writes.insert(write, ranges.to_vec());
        Ok((write, object.pages.clone()))
    }

    /// The write is over. Bytes of one that was not good may be written again.
    pub(super) fn end_write(&mut self, client: Token, pending: Pending, id: WriteId, good: bool) {
        let object = self.runs.get_mut(&client).and_then(|run| run.objects.get_mut(&pending));
        let Some(object) = object else { return };
        if let Some(ranges) = object.writes.remove(&id)
            && !good
        {
            ranges.into_iter().for_each(|range| object.claimed.remove(range));
        }
    }

    pub(super) fn is_open(&self, client: Token, pending: Pending) -> bool {
        self.runs.get(&client).is_some_and(|run| run.objects.contains_key(&pending))
    }

    /// `Created` when nothing writes the object; `Busy`, or `Stale` for an unknown one.
    pub(super) fn may_end(&self, client: Token, pending: Pending) -> PutOutcome {
        match self.runs.get(&client).and_then(|run| run.objects.get(&pending)) {
            None => PutOutcome::Stale,
            Some(object) if !object.writes.is_empty() => PutOutcome::Busy,
            Some(_) => PutOutcome::Created,
        }
    }

    pub(super) fn forget(&mut self, client: Token, pending: Pending) {
        if let Some(run) = self.runs.get_mut(&client) {
            run.objects.remove(&pending);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Generation;

    const ME: Token = Token([1; 16]);
    const OTHER: Token = Token([2; 16]);

    fn pages(len: u64) -> PageList {
        PageList { pages: Vec::new(), page_bytes: 1, len }
    }

    fn range(offset: u64, len: u64) -> ByteRange {
        ByteRange { offset, len }
    }

    #[test]
    fn a_byte_is_written_once_by_its_owner_only() {
        let mut sessions = Sessions::default();
        let pending = Pending { id: 7, generation: Generation(7) };
        sessions.opened(ME);
        sessions.opened(OTHER);
        sessions.allocated(ME, pending, pages(10));
        let kind = |r: Result<_, Refusal>| r.map(|_: (WriteId, PageList)| ()).unwrap_err().kind();
        assert_eq!(kind(sessions.begin_write(OTHER, pending, &[range(0, 1)])), RefusalKind::Stale);
        assert_eq!(kind(sessions.begin_write(ME, pending, &[range(9, 2)])), RefusalKind::Invalid);
        let (first, _) = sessions.begin_write(ME, pending, &[range(0, 4), range(6, 1)]).unwrap();
        assert_eq!(kind(sessions.begin_write(ME, pending, &[range(6, 2)])), RefusalKind::Invalid);
        assert_eq!(sessions.may_end(ME, pending), PutOutcome::Busy);
        sessions.end_write(ME, pending, first, false);
        // It was not good: the same bytes once more.
        let (again, _) = sessions.begin_write(ME, pending, &[range(6, 2)]).unwrap();
        sessions.end_write(ME, pending, again, true);
        assert_eq!(kind(sessions.begin_write(ME, pending, &[range(6, 2)])), RefusalKind::Invalid);
        assert_eq!(sessions.may_end(OTHER, pending), PutOutcome::Stale);
        assert_eq!(sessions.may_end(ME, pending), PutOutcome::Created);
        sessions.forget(ME, pending);
        assert_eq!(sessions.may_end(ME, pending), PutOutcome::Stale);
    }

    #[test]
    fn a_run_leaves_its_objects_with_its_last_connection() {
        let mut sessions = Sessions::default();
        let pending = Pending { id: 7, generation: Generation(7) };
        sessions.opened(ME);
        sessions.opened(ME);
        sessions.allocated(ME, pending, pages(10));
        let now = Instant::now();
        let until = now + Duration::from_secs(1);
        sessions.leased(ME, 4, now, until);
        sessions.leased(ME, 5, now, until);
        assert!(sessions.released(ME, 4) && !sessions.released(ME, 4));
        assert!(!sessions.released(OTHER, 5));
        assert_eq!(sessions.closed(ME), []);
        assert!(sessions.is_open(ME, pending));
        assert_eq!(sessions.closed(ME), [pending]);
        assert!(!sessions.is_open(ME, pending));
        assert_eq!(sessions.closed(ME), []);
        // The lease lasts; it can be given back by another connection, and is forgotten after its time.
        sessions.opened(ME);
        assert!(sessions.released(ME, 5));
        sessions.leased(ME, 6, now, until);
        assert_eq!(sessions.closed(ME), []);
        sessions.leased(OTHER, 7, until, until + Duration::from_secs(1));
        assert!(!sessions.released(ME, 6) && !sessions.runs.contains_key(&ME));
    }
}
