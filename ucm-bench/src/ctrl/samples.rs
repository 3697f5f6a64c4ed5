//! What has been measured so far.
//!
//! Owns: the samples of all runs.
//! **Invariant:** samples of one run stand at the same place in all lists.

use super::{
    Args, peer,
    spec::{Instants, Prealloc, Size, Speeds, Together},
};
use crate::{error::BenchError, figure::Figure, stats::percentile};

/// All samples of a measurement.
#[derive(Debug, Default)]
pub(crate) struct Samples {
    /// The main size, then the curve.
    pub(crate) sizes: Vec<OfSize>,
    pub(crate) together: Vec<OfRanks>,
    pub(crate) miss_ns: Vec<f64>,
    pub(crate) prealloc: Vec<Prealloc>,
    pub(crate) wake: Wakes,
    pub(crate) futex: Wakes,
    pub(crate) waiters_cpu_ms: Vec<f64>,
    pub(crate) idle: Idle,
    pub(crate) waiting: Idle,
}

/// Tables of one size.
#[derive(Debug)]
pub(crate) struct OfSize {
    pub(crate) size: Size,
    pub(crate) bytes: u64,
    pub(crate) speeds: Vec<Speeds>,
}

/// This many processes at once.
#[derive(Debug)]
pub(crate) struct OfRanks {
    pub(crate) ranks: u32,
    pub(crate) wall_ns: Vec<f64>,
    pub(crate) cpu_ns: Vec<f64>,
}

/// Delays of wake-ups in microseconds.
#[derive(Debug, Default)]
pub(crate) struct Wakes {
    /// Of each run.
    pub(crate) p50: Vec<f64>,
    pub(crate) p99: Vec<f64>,
    /// Of all runs.
    pub(crate) all: Vec<f64>,
}

/// Ranks that were watched.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Idle {
    pub(crate) wakeups: u64,
    /// Per rank.
    pub(crate) cpu_ms_per_s: f64,
    pub(crate) threads: u64,
}

impl Samples {
    pub(crate) fn new(args: &Args, sizes: Vec<Size>) -> Self {
        let size = |size| OfSize { size, bytes: 0, speeds: Vec::new() };
        let ranks = |ranks: &u32| OfRanks { ranks: *ranks, wall_ns: vec![], cpu_ns: vec![] };
        Self {
            sizes: sizes.into_iter().map(size).collect(),
            together: args.ranks.iter().map(ranks).collect(),
            ..Self::default()
        }
    }

    /// Adds the wake-ups of one run.
    pub(crate) fn wakes(&mut self, rung: &Instants, heard: &Instants) -> Result<(), BenchError> {
        self.wake.add(&rung.cache_ns, &heard.cache_ns)?;
        self.futex.add(&rung.futex_ns, &heard.futex_ns)
    }
}

impl OfSize {
    /// One of its speeds over the runs.
    pub(crate) fn figure(&self, pick: impl Fn(&Speeds) -> f64) -> Result<Figure, BenchError> {
        figure(self.speeds.iter().map(pick))
    }
}

impl OfRanks {
    /// Adds one run: the mean over its processes.
    pub(crate) fn push(&mut self, replies: impl Iterator<Item = Together>) {
        let replies: Vec<Together> = replies.collect();
        let mean = |pick: fn(&Together) -> f64| {
            replies.iter().map(pick).sum::<f64>() / replies.len() as f64
        };
        self.wall_ns.push(mean(|reply| reply.wall_ns));
        self.cpu_ns.push(mean(|reply| reply.cpu_ns));
    }
}

impl Wakes {
    fn add(&mut self, rung_ns: &[u64], heard_ns: &[u64]) -> Result<(), BenchError> {
        if rung_ns.len() != heard_ns.len() || rung_ns.is_empty() {
            return Err(peer(format!("{} rings, {} wake-ups", rung_ns.len(), heard_ns.len())));
        }
        let mut delays = Vec::with_capacity(rung_ns.len());
        for (rung, heard) in rung_ns.iter().zip(heard_ns) {
            let delay = heard.checked_sub(*rung);
            delays
                .push(delay.ok_or_else(|| peer("a waiter ran before it was woken"))? as f64 / 1e3);
        }
        self.all.extend(&delays);
        delays.sort_by(f64::total_cmp);
        self.p50.push(percentile(&delays, 0.5));
        self.p99.push(percentile(&delays, 0.99));
        Ok(())
    }

    /// (percentile, microseconds) over all runs.
    pub(crate) fn distribution(&self) -> Vec<(f64, f64)> {
        let mut sorted = self.all.clone();
        sorted.sort_by(f64::total_cmp);
        (1..100).map(f64::from).map(|p| (p, percentile(&sorted, p / 100.0))).collect()
    }
}

/// A figure over the runs.
pub(crate) fn figure(samples: impl IntoIterator<Item = f64>) -> Result<Figure, BenchError> {
    Figure::of(samples).ok_or_else(|| peer("a figure has no samples"))
}

#[cfg(test)]
mod tests {
    use super::{OfRanks, Together, Wakes};

    #[test]
    fn w3_delays_are_paired_and_summarised() {
        let mut wakes = Wakes::default();
        let rung: Vec<u64> = (0..100).map(|n| n * 1_000_000).collect();
        let heard: Vec<u64> = (0..100).map(|n| n * 1_000_000 + (n + 1) * 1000).collect();
        wakes.add(&rung, &heard).unwrap();
        assert_eq!((wakes.p50[0], wakes.p99[0]), (50.0, 99.0));
        assert_eq!(wakes.distribution()[0], (1.0, 1.0));
        assert_eq!(wakes.distribution().len(), 99);
        assert!(wakes.add(&rung, &heard[1..]).is_err());
        assert!(wakes.add(&heard, &rung).is_err());
        assert!(wakes.add(&[], &[]).is_err());
    }

    #[test]
    fn processes_at_once_count_by_their_mean() {
        let mut of = OfRanks { ranks: 2, wall_ns: vec![], cpu_ns: vec![] };
        let reply = |ns| Together { wall_ns: ns, cpu_ns: ns / 2.0 };
        of.push([reply(40.0), reply(60.0)].into_iter());
        assert_eq!((of.wall_ns[0], of.cpu_ns[0]), (50.0, 25.0));
    }
}
