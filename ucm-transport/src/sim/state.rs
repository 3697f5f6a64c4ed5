//! Streams, plans in flight and ends of a simulated device.
//!
//! **Invariant:** plans of one stream end in the order they were submitted.

use std::{
    collections::VecDeque,
    task::Waker,
    time::{Duration, Instant},
};

use super::{DeviceFault, DeviceRates, DeviceStats};
use crate::{Completion, Quiesce, RegionLease, Ticket, TransferPlan};

/// A plan the device has and has not ended.
pub(super) struct Running {
    pub(super) ticket: Ticket,
    pub(super) plan: TransferPlan,
    pub(super) lease: RegionLease<()>,
    pub(super) fault: Option<DeviceFault>,
    stream: usize,
    /// Time it takes once its stream has come to it.
    takes: Duration,
    /// `None` while it stalls, or waits behind one that does.
    pub(super) due: Option<Instant>,
}

/// All state of a device.
pub(super) struct State {
    /// The time of a manual device.
    manual: Option<Instant>,
    /// When each stream has ended what it was given; `None` while it stalls.
    free_at: Vec<Option<Instant>>,
    pub(super) next_ticket: u64,
    /// In the order of submission.
    pub(super) running: Vec<Running>,
    /// Plans whose bytes are being moved now.
    pub(super) ending: usize,
    pub(super) done: Vec<Completion>,
    pub(super) faults: VecDeque<DeviceFault>,
    pub(super) waker: Option<Waker>,
    pub(super) stats: DeviceStats,
    pub(super) stopping: bool,
}

impl State {
    pub(super) fn new(streams: usize, manual: Option<Instant>) -> Self {
        let start = manual.unwrap_or_else(Instant::now);
        Self {
            manual,
            free_at: vec![Some(start); streams.max(1)],
            next_ticket: 0,
            running: Vec::new(),
            ending: 0,
            done: Vec::new(),
            faults: VecDeque::new(),
            waker: None,
            stats: DeviceStats::default(),
            stopping: false,
        }
    }

    pub(super) fn now(&self) -> Instant {
        self.manual.unwrap_or_else(Instant::now)
    }

    pub(super) fn set_now(&mut self, now: Instant) {
        if let Some(manual) = &mut self.manual {
            *manual = now;
        }
    }

    /// Plans accepted and not told as ended.
    pub(super) fn in_flight(&self) -> usize {
        self.running.len() + self.ending
    }

    /// Puts a plan on the stream that is free first.
    pub(super) fn start(
        &mut self,
        plan: TransferPlan,
        lease: RegionLease<()>,
        fault: Option<DeviceFault>,
        rates: &DeviceRates,
    ) -> Ticket {
        let now = self.now();
        self.next_ticket += 1;
        let ticket = Ticket(self.next_ticket);
        let bytes: u64 = plan.items.iter().map(|item| item.len).sum();
        let items = u32::try_from(plan.items.len()).unwrap_or(u32::MAX);
        let mut takes = rates.per_item * items + time_of(bytes, rates.bytes_per_s);
        if let Some(DeviceFault::Delays(more)) = fault {
            takes += more;
        }
        // A stalled stream counts as free last.
        let earliest = self.free_at.iter().enumerate().min_by_key(|(_, at)| (at.is_none(), **at));
        let stream = earliest.map_or(0, |(stream, _)| stream);
        let mut due = None;
        if let Some(free_at) = self.free_at.get_mut(stream) {
            let begin = free_at.map(|at| at.max(now + rates.launch));
            due = begin.map(|at| at + takes).filter(|_| fault != Some(DeviceFault::Stalls));
            *free_at = due;
        }
        self.stats.busy += takes;
        self.running.push(Running { ticket, plan, lease, fault, stream, takes, due });
        self.stats.in_flight_max = self.stats.in_flight_max.max(self.in_flight());
        ticket
    }

    pub(super) fn next_due(&self) -> Option<Instant> {
        self.running.iter().filter_map(|plan| plan.due).min()
    }

    /// Takes the plan that is due first, if any is due at `now`.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<Running> {
        let (at, due) = self
            .running
            .iter()
            .enumerate()
            .filter_map(|(at, plan)| Some((at, plan.due?)))
            .min_by_key(|(at, due)| (*due, *at))?;
        if due > now {
            return None;
        }
        self.ending += 1;
        Some(self.running.remove(at))
    }

    /// Makes everything that stalls go on from `now`, in order.
    pub(super) fn resume(&mut self, now: Instant) {
        for (stream, free_at) in self.free_at.iter_mut().enumerate() {
            if free_at.is_some() {
                continue;
            }
            let mut at = now;
            for plan in self.running.iter_mut().filter(|plan| plan.stream == stream) {
                match plan.due {
                    Some(due) => at = at.max(due),
                    None => {
                        at += plan.takes;
                        plan.due = Some(at);
                    }
                }
            }
            *free_at = Some(at);
        }
    }

    /// Whether anything submitted up to ticket `before` keeps `target` from having ended.
    pub(super) fn holds_back(&self, target: Quiesce, before: u64) -> bool {
        // What is being moved now ends soon and is not looked at closer.
        self.ending > 0
            || self.running.iter().any(|running| match target {
                Quiesce::All => running.ticket.0 <= before,
                Quiesce::Ticket(ticket) => running.ticket == ticket,
                Quiesce::Region(id) => running.lease.find(id).is_some(),
            })
    }

    /// Takes everything out, for the end of the device.
    pub(super) fn abandon(&mut self) -> (Vec<Running>, Vec<Completion>) {
        (std::mem::take(&mut self.running), std::mem::take(&mut self.done))
    }
}

/// Time of this many bytes at this rate; none at rate zero.
fn time_of(bytes: u64, bytes_per_s: u64) -> Duration {
    if bytes_per_s == 0 {
        return Duration::ZERO;
    }
    let ns = u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_s);
    Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
}
