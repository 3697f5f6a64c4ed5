//! From fetches to plans, and from the ends of plans to news.
//!
//! **Invariant:** every fetch that is handed in ends exactly once, whatever the engines say, and is
//! reported only when nothing writes its bytes any more.

use std::{
    ops::ControlFlow,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use ucm_transport::{
    Addr, Completion, Hold, Rejected, SourceCheck, Transfer, TransferEngine as _, TransferError,
    TransferPlan,
};

use super::{
    Inner,
    arena::ArenaLease,
    bell::{Bell, Told},
    source::{Source, Way},
    table::Order,
};
use crate::{
    ByteRange, PageList,
    core::{FetchId, Part, walk},
    service::LinkError,
};

/// Bytes on their way to the arena.
#[derive(Debug)]
pub(super) struct ArenaFetch {
    pub(super) bell: Arc<Bell>,
    pub(super) index: usize,
    pub(super) lease: ArenaLease,
}

/// What a plan brings, and what it needs until it has ended. Travels with the plan.
#[derive(Debug)]
struct Flying {
    slots: Vec<(u64, FetchId)>,
    arena: Option<ArenaFetch>,
    foreground: bool,
    bytes: u64,
    /// Keep what the plan reads from.
    sources: Vec<Source>,
}

/// Submits fetches, gathered by their way.
pub(super) fn submit(inner: &Arc<Inner>, orders: Vec<Order>, foreground: bool, deadline: Instant) {
    let mut batch: Vec<Order> = Vec::new();
    let mut bytes = 0;
    let limit = inner.options.batch_bytes;
    for order in orders {
        let full = batch.last().is_some_and(|last| {
            last.alone
                || order.alone
                || bytes + order.fetch.range.len > limit
                || !last.source.is_beside(&order.source)
        });
        if full {
            send(inner, std::mem::take(&mut batch), foreground, deadline);
            bytes = 0;
        }
        bytes += order.fetch.range.len;
        batch.push(order);
    }
    if !batch.is_empty() {
        send(inner, batch, foreground, deadline);
    }
}

fn send(inner: &Arc<Inner>, batch: Vec<Order>, foreground: bool, deadline: Instant) {
    let Some(first) = batch.first().map(|order| order.source.clone()) else { return };
    let (mut items, mut good) = (Vec::with_capacity(batch.len()), true);
    for order in &batch {
        good &= inner.items(
            &order.source,
            order.fetch.range,
            &order.pages,
            order.fetch.range.offset,
            &mut items,
        );
    }
    let flying = Flying {
        slots: batch.iter().map(|order| (order.assembly, order.fetch.id)).collect(),
        arena: None,
        foreground,
        bytes: batch.iter().map(|order| order.fetch.range.len).sum(),
        sources: batch.into_iter().map(|order| order.source).collect(),
    };
    launch(inner, &first, items, flying, good, deadline);
}

/// Brings one round of ranges into the arena.
pub(super) fn submit_arena(
    inner: &Arc<Inner>,
    source: &Source,
    parts: &[Part],
    fetch: ArenaFetch,
    deadline: Instant,
) {
    let (mut items, mut good) = (Vec::with_capacity(parts.len()), true);
    for part in parts {
        good &= inner.items(source, part.range, &fetch.lease.pages, part.at, &mut items);
    }
    let flying = Flying {
        slots: Vec::new(),
        bytes: parts.iter().map(|part| part.range.len).sum(),
        arena: Some(fetch),
        foreground: true,
        sources: vec![source.clone()],
    };
    launch(inner, source, items, flying, good, deadline);
}

fn launch(
    inner: &Arc<Inner>,
    source: &Source,
    items: Vec<Transfer>,
    flying: Flying,
    good: bool,
    deadline: Instant,
) {
    inner.plan_begins(flying.foreground);
    if !good {
        // Pages that do not hold what they should: a defect, which must not cost more than the read.
        return ended(inner, flying, Err(LinkError::Broken));
    }
    let lent = flying.sources.iter().filter_map(|source| match source.way() {
        Way::Tcp(_) => None,
        Way::Shm(mapped) => Some(mapped.until),
    });
    let until = lent.min();
    let plan = TransferPlan { items, holds: vec![Box::new(flying) as Hold] };
    let submitted = match source.way() {
        Way::Tcp(_) => inner.tcp.submit_until(plan, deadline),
        Way::Shm(mapped) => {
            // What is lent for the shortest time decides: all of it is read in one go.
            let until = until.unwrap_or(mapped.until);
            let check: Arc<dyn SourceCheck> = Arc::new(move || Instant::now() < until);
            inner.shm.submit_checked(plan, check)
        }
    };
    match submitted {
        // The shm engine copies in `submit`, the tcp engine may have ended what cannot be sent.
        Ok(_) => inner.turn(),
        Err(Rejected { plan, error }) => finish(inner, plan.holds, &Err(error)),
    }
}

impl Inner {
    /// The pieces of a range of an object, to the place `at` of `pages`. False when they do not fit.
    fn items(
        &self,
        source: &Source,
        range: ByteRange,
        pages: &PageList,
        at: u64,
        items: &mut Vec<Transfer>,
    ) -> bool {
        let engine = match source.way() {
            Way::Tcp(_) => &self.tcp_segments,
            Way::Shm(_) => &self.shm_segments,
        };
        let mut known = true;
        let to = ByteRange { offset: at, len: range.len };
        let walked = walk(pages, to, |fragment| {
            let region =
                usize::try_from(fragment.addr.region.index).ok().and_then(|i| engine.get(i));
            let Some(region) = region else {
                known = false;
                return ControlFlow::Break(());
            };
            let dst = Addr { region: *region, offset: fragment.addr.offset };
            let offset = range.offset + fragment.before;
            match source.way() {
                Way::Tcp(attached) => {
                    items.push(Transfer { src: attached.at(offset), dst, len: fragment.len });
                }
                Way::Shm(mapped) => {
                    // Both sides have pages of their own.
                    let from = ByteRange { offset, len: fragment.len };
                    let read = walk(&mapped.pages, from, |piece| {
                        let dst = Addr { offset: dst.offset + piece.before, ..dst };
                        items.push(Transfer { src: piece.addr, dst, len: piece.len });
                        ControlFlow::<()>::Continue(())
                    });
                    known &= read.is_ok();
                }
            }
            ControlFlow::Continue(())
        });
        known && walked.is_ok()
    }

    /// Takes in what has ended. Called by whoever is woken by an engine; never blocks.
    pub(super) fn turn(self: &Arc<Self>) {
        let mut completions: Vec<Completion> = Vec::new();
        self.tcp.poll(&mut completions);
        self.shm.poll(&mut completions);
        for completion in completions {
            finish(self, completion.holds, &completion.result);
        }
    }
}

fn finish(inner: &Arc<Inner>, holds: Vec<Hold>, result: &Result<u64, TransferError>) {
    for hold in holds {
        if let Ok(flying) = hold.downcast::<Flying>() {
            let result = result.clone().map(drop).map_err(|error| {
                tracing::debug!(%error, "a fetch failed");
                LinkError::from(error)
            });
            ended(inner, *flying, result);
        }
    }
}

fn ended(inner: &Arc<Inner>, flying: Flying, result: Result<(), LinkError>) {
    let counters = &inner.counters;
    match result {
        Ok(()) => {
            counters.wire_bytes.fetch_add(flying.bytes, Ordering::Relaxed);
            if !flying.foreground {
                counters.pulled_bytes.fetch_add(flying.bytes, Ordering::Relaxed);
            }
        }
        Err(error) => {
            counters.failed_fetches.fetch_add(1, Ordering::Relaxed);
            if error == LinkError::Restarted {
                counters.stale.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    // What the peer refuses it refuses as a whole: which of several objects it was, is found out by
    // asking for each alone.
    let objects = flying.slots.iter().map(|(id, _)| id).collect::<std::collections::HashSet<_>>();
    let refused =
        |error| matches!(error, LinkError::Restarted | LinkError::Broken | LinkError::Busy);
    let shared = objects.len() > 1 && result.is_err_and(refused);
    inner.with(|table| {
        for (id, fetch) in &flying.slots {
            match result {
                Ok(()) => table.landed(*id, *fetch),
                Err(error) => table.failed(*id, *fetch, error, shared),
            }
        }
    });
    if let Some(ArenaFetch { bell, index, lease }) = flying.arena {
        match result {
            Ok(()) => bell.tell(index, Told::Landed(lease)),
            Err(error) => {
                drop(lease);
                bell.tell(index, Told::Failed(error, true));
            }
        }
    }
    inner.plan_ended(flying.foreground);
}
