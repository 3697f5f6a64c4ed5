//! How long a transfer probably takes, to choose between ways that bring the same bytes.
//!
//! A line through two measured points: a fixed part for each request, one for each fragment, one for
//! each byte. It never chooses *which* bytes cross the wire: those are the ones asked for.
//!
//! **Invariant:** an estimate moves towards what was measured and stays within its bounds, whatever is
//! reported.

use std::time::Duration;

/// How bytes reach this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transport {
    /// Out of a mapped segment of the same node.
    Shm,
    /// One request, one vectored reply.
    Tcp,
    /// One-sided reads after a resolve.
    Rdma,
}

/// Nanoseconds of a request, a fragment, and a KiB. Plain data; starts with what was measured on a
/// two-core machine and follows what is [observed](Self::observe).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    request_ns: f64,
    fragment_ns: f64,
    kib_ns: f64,
}

/// Share of a new observation.
const WEIGHT: f64 = 1.0 / 16.0;

impl CostModel {
    /// First guess for a transport.
    #[must_use]
    pub fn of(transport: Transport) -> Self {
        let (request_ns, fragment_ns, kib_ns) = match transport {
            Transport::Shm => (300.0, 60.0, 90.0),
            Transport::Tcp => (15_000.0, 120.0, 250.0),
            Transport::Rdma => (5_000.0, 290.0, 40.0),
        };
        Self { request_ns, fragment_ns, kib_ns }
    }

    /// Expected time of one request.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn estimate(&self, fragments: u64, bytes: u64) -> Duration {
        let ns = self.request_ns
            + self.fragment_ns * fragments as f64
            + self.kib_ns * (bytes as f64 / 1024.0);
        // At most a day: the result must be a duration whatever is asked.
        Duration::from_secs_f64((ns / 1e9).clamp(0.0, 86_400.0))
    }

    /// Learns from a request that took `took`. All three parts move by the same factor: one number
    /// cannot tell which of them was wrong.
    pub fn observe(&mut self, fragments: u64, bytes: u64, took: Duration) {
        let expected = self.estimate(fragments, bytes).as_secs_f64().max(1e-9);
        let factor = (took.as_secs_f64() / expected).clamp(0.25, 4.0);
        let step = 1.0 + WEIGHT * (factor - 1.0);
        let follow = |part: &mut f64, least: f64| *part = (*part * step).clamp(least, 1e9);
        follow(&mut self.request_ns, 10.0);
        follow(&mut self.fragment_ns, 1.0);
        follow(&mut self.kib_ns, 1.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_of_anything_costs_more_and_nothing_overflows() {
        for transport in [Transport::Shm, Transport::Tcp, Transport::Rdma] {
            let model = CostModel::of(transport);
            assert!(model.estimate(1, 4096) < model.estimate(2, 4096));
            assert!(model.estimate(1, 4096) < model.estimate(1, 8192));
            assert_eq!(model.estimate(u64::MAX, u64::MAX), Duration::from_secs(86_400));
        }
    }

    #[test]
    fn it_follows_what_is_measured_and_survives_nonsense() {
        let mut model = CostModel::of(Transport::Tcp);
        let truth = model.estimate(8, 1 << 20) * 3;
        for _ in 0..200 {
            model.observe(8, 1 << 20, truth);
        }
        let seen = model.estimate(8, 1 << 20).as_secs_f64() / truth.as_secs_f64();
        assert!((0.95..1.05).contains(&seen), "{seen}");
        for took in [Duration::ZERO, Duration::MAX] {
            (0..10_000).for_each(|_| model.observe(0, 0, took));
            assert!(model.estimate(1, 1) > Duration::ZERO);
        }
    }
}
