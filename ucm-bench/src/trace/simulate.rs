//! Requests against a policy.
//!
//! Owns: the order in which a request uses blocks, and the counting.
//!
//! A request first looks up its whole chain (a block that is resident now is a hit), then uses the
//! hits, then loads the misses; both from the deepest block to the prefix root, so that the root is
//! always the most recently used. This is what an engine does: it asks for the prompt's prefix,
//! reads what is there, and stores what it computed afterwards.
//! **Invariant:** whether a block is a hit is decided before the request changes anything.

use std::collections::HashMap;

use super::{admitted::Admitted, clock::Clock, lru::Lru, optimal::Optimal, parse::Trace};

/// "No later request uses it."
pub(super) const NEVER: u32 = u32::MAX;

/// A model of a cache that holds a number of blocks. `next_use` is the number of the next request
/// that uses the block (`u32::MAX`: none); only the optimum looks at it.
pub trait Policy {
    /// Is the block resident?
    fn contains(&self, block: u32) -> bool;
    /// A resident block is used.
    fn hit(&mut self, block: u32, next_use: u32);
    /// A block that is not resident was loaded; the policy decides what leaves, or that the block
    /// is not kept.
    fn load(&mut self, block: u32, next_use: u32);
}

/// Which model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum PolicyKind {
    /// CLOCK; a loaded block starts with its bit clear and earns its second chance by a hit
    Clock,
    /// CLOCK as the node cache does it: a load sets the bit as well
    ClockCache,
    /// Least recently used
    Lru,
    /// Least recently used, of what the tiers' admission keeps
    Admission,
    /// Least recently used, of what was used before at any time
    SecondUse,
    /// Belady's optimum; a block that is used later than all residents is not kept
    Optimal,
}

impl PolicyKind {
    /// A model with `capacity` blocks for a trace of `unique` blocks.
    pub fn build(self, capacity: usize, unique: usize) -> Box<dyn Policy> {
        match self {
            Self::Clock => Box::new(Clock::new(capacity, unique, false)),
            Self::ClockCache => Box::new(Clock::new(capacity, unique, true)),
            Self::Lru => Box::new(Lru::new(capacity, unique)),
            Self::Admission => Box::new(Admitted::by_models(capacity, unique)),
            Self::SecondUse => Box::new(Admitted::second_use(capacity, unique)),
            Self::Optimal => Box::new(Optimal::new(capacity, unique)),
        }
    }
}

/// What a run of a trace gave.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Simulation {
    /// Blocks asked for.
    pub references: u64,
    /// Blocks that were resident when their request came.
    pub hits: u64,
    /// Hits before the first miss of their request: what an engine can use without recomputing.
    pub prefix_hits: u64,
    /// Blocks that were not resident and were kept.
    pub writes: u64,
}

impl Simulation {
    /// Hits per block asked for.
    pub fn hit_ratio(&self) -> f64 {
        self.hits as f64 / self.references.max(1) as f64
    }

    /// Blocks kept per block asked for: what filling the cache costs.
    pub fn write_ratio(&self) -> f64 {
        self.writes as f64 / self.references.max(1) as f64
    }

    /// Prefix hits per block asked for.
    pub fn prefix_hit_ratio(&self) -> f64 {
        self.prefix_hits as f64 / self.references.max(1) as f64
    }
}

/// For each request and each of its blocks, the number of the next request that uses the block;
/// request after request in one list.
pub fn optimal_next_use(trace: &Trace) -> Vec<u32> {
    let mut next: HashMap<u32, u32> = HashMap::new();
    let mut uses = Vec::new();
    for (number, request) in trace.requests().iter().enumerate().rev() {
        let number = u32::try_from(number).unwrap_or(NEVER);
        uses.extend(
            request.blocks.iter().rev().map(|block| next.get(block).copied().unwrap_or(NEVER)),
        );
        next.extend(request.blocks.iter().map(|block| (*block, number)));
    }
    uses.reverse();
    uses
}

/// Runs the whole trace. `next_use` comes from [`optimal_next_use`].
pub fn simulate(trace: &Trace, next_use: &[u32], policy: &mut dyn Policy) -> Simulation {
    let mut outcome = Simulation::default();
    let mut next_use = next_use.iter().copied();
    let mut found = Vec::new();
    for request in trace.requests() {
        found.clear();
        for block in &request.blocks {
            let next = next_use.next().unwrap_or(NEVER);
            found.push((*block, next, policy.contains(*block)));
        }
        outcome.references += found.len() as u64;
        outcome.hits += found.iter().filter(|(.., hit)| *hit).count() as u64;
        outcome.prefix_hits += found.iter().take_while(|(.., hit)| *hit).count() as u64;
        for (block, next, hit) in found.iter().rev() {
            if *hit {
                policy.hit(*block, *next);
            }
        }
        for (block, next, hit) in found.iter().rev() {
            // A chain that names a block twice loads it once.
            if !hit && !policy.contains(*block) {
                policy.load(*block, *next);
                outcome.writes += u64::from(policy.contains(*block));
            }
        }
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::{NEVER, Policy, optimal_next_use, simulate};
    use crate::trace::{Request, Trace};

    #[derive(Default)]
    struct Log(Vec<String>);

    impl Policy for Log {
        fn contains(&self, block: u32) -> bool {
            block < 2
        }
        fn hit(&mut self, block: u32, next_use: u32) {
            self.0.push(format!("hit {block} {next_use}"));
        }
        fn load(&mut self, block: u32, next_use: u32) {
            self.0.push(format!("load {block} {next_use}"));
        }
    }

    fn trace(chains: &[&[u32]]) -> Trace {
        let request = |blocks: &&[u32]| Request {
            timestamp_ms: 0,
            input_tokens: 0,
            output_tokens: 0,
            blocks: blocks.to_vec(),
        };
        Trace::from_numbered(chains.iter().map(request).collect())
    }

    #[test]
    fn hits_come_first_and_both_kinds_deepest_first() {
        let trace = trace(&[&[0, 2, 1, 3], &[0, 3]]);
        let next_use = optimal_next_use(&trace);
        assert_eq!(next_use, [1, NEVER, NEVER, 1, NEVER, NEVER]);
        let mut log = Log::default();
        let outcome = simulate(&trace, &next_use, &mut log);
        assert_eq!((outcome.references, outcome.hits, outcome.prefix_hits), (6, 3, 2));
        let never = NEVER;
        let expected = [
            format!("hit 1 {never}"),
            "hit 0 1".to_owned(),
            "load 3 1".to_owned(),
            format!("load 2 {never}"),
            format!("hit 0 {never}"),
            format!("load 3 {never}"),
        ];
        assert_eq!(log.0, expected);
    }
}
