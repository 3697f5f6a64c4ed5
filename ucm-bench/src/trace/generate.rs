//! A generated trace with the statistics of the conversation trace.
//!
//! Owns: the model of conversations and its constants.
//!
//! All requests share one root block (the system prompt). A request either starts a conversation
//! or goes on with one: it repeats the chain of an earlier request, without the last block (which
//! was partial), and adds new blocks. Conversations that went on before are more likely to go on
//! again. Sometimes a request branches off further up. Lengths and the distance to the continued
//! request (in requests) are log-normal. The constants were fitted to the published trace; a test
//! keeps them honest:
//!
//! | | trace | generated |
//! |---|---|---|
//! | requests | 12,031 | 12,031 |
//! | blocks per request | 24.0 | ± 10 % |
//! | highest possible hit ratio | 36.6 % | ± 2 points |
//! | blocks never used again | 76 % | ± 3 points |
//! | LRU at 5 % and 10 % of unique blocks | 19.6 %, 27.9 % | ± 3 points |
//!
//! **Invariant:** the same seed gives the same trace.

use super::parse::{Request, Trace};
use crate::rng::Rng;

/// Tokens of one block.
const BLOCK_TOKENS: u64 = 512;
/// Mean time between requests.
const STEP_MS: u64 = 294;
/// The longest chain.
const MAX_BLOCKS: u64 = 247;
/// Share of requests that go on with a conversation.
const CONTINUE: f64 = 0.36;
/// Share of those that go on with one that went on before.
const AGAIN: f64 = 0.35;
/// Share of those that branch off instead of appending.
const BRANCH: f64 = 0.12;
/// How many requests are searched for one to go on with.
const SEARCH: usize = 400;
/// Log-normal parameters (mean and deviation of the logarithm): new blocks of a first request, new
/// blocks of a further one, distance between them in requests, tokens of an answer.
const FIRST: (f64, f64) = (2.118, 1.38);
const FURTHER: (f64, f64) = (1.147, 1.13);
const DISTANCE: (f64, f64) = (6.25, 1.1);
const ANSWER: (f64, f64) = (5.6, 0.8);

/// Makes a trace.
#[derive(Debug, Clone)]
pub struct Generator {
    rng: Rng,
    requests: usize,
}

/// One request while the trace is made.
struct Turn {
    chain: Vec<u32>,
    /// It went on with an earlier one.
    further: bool,
    /// A later one went on with it.
    continued: bool,
}

impl Generator {
    /// Like the conversation trace: 12,031 requests in an hour.
    pub fn conversation(seed: u64) -> Self {
        Self { rng: Rng::new(seed), requests: 12_031 }
    }

    /// Another number of requests.
    #[must_use]
    pub fn requests(mut self, requests: usize) -> Self {
        self.requests = requests;
        self
    }

    /// Makes it.
    pub fn generate(mut self) -> Trace {
        let mut turns: Vec<Turn> = Vec::with_capacity(self.requests);
        let mut next_block = 1_u32;
        for _ in 0..self.requests {
            let repeated = self.earlier(&mut turns);
            let further = repeated.is_some();
            let mut chain = repeated.unwrap_or_else(|| vec![0]);
            let room = MAX_BLOCKS.saturating_sub(chain.len() as u64).max(1);
            for _ in 0..self.length(if further { FURTHER } else { FIRST }).min(room) {
                chain.push(next_block);
                next_block = next_block.saturating_add(1);
            }
            turns.push(Turn { chain, further, continued: false });
        }
        let turns = turns.into_iter().enumerate();
        Trace::from_numbered(turns.map(|(at, turn)| self.request(at, turn.chain)).collect())
    }

    /// The part of an earlier chain that the next request repeats, if it goes on with one: the
    /// nearest at or before a drawn distance that fits.
    fn earlier(&mut self, turns: &mut [Turn]) -> Option<Vec<u32>> {
        if self.rng.unit() >= CONTINUE {
            return None;
        }
        let distance = usize::try_from(self.length(DISTANCE)).ok()?;
        let candidates = turns.len().checked_sub(distance)? + 1;
        let branch = self.rng.unit() < BRANCH;
        let again = self.rng.unit() < AGAIN;
        let turn = turns.get_mut(..candidates)?.iter_mut().rev().take(SEARCH).find(|turn| {
            turn.chain.len() >= 3 && (branch || !turn.continued) && (turn.further || !again)
        })?;
        turn.continued = true;
        let whole = turn.chain.len() as u64 - 1;
        let kept = if branch { 2 + self.rng.below(whole - 1) } else { whole };
        Some(turn.chain.iter().copied().take(usize::try_from(kept).ok()?).collect())
    }

    fn length(&mut self, (mean, deviation): (f64, f64)) -> u64 {
        whole(self.rng.log_normal(mean, deviation)).max(1)
    }

    fn request(&mut self, at: usize, blocks: Vec<u32>) -> Request {
        let full = (blocks.len() as u64).saturating_sub(1) * BLOCK_TOKENS;
        Request {
            timestamp_ms: at as u64 * STEP_MS,
            input_tokens: full + 1 + self.rng.below(BLOCK_TOKENS),
            output_tokens: self.length(ANSWER).min(2_000),
            blocks,
        }
    }
}

/// The nearest whole number; the values here are small and positive.
fn whole(value: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "saturates, and log-normal values are positive"
    )]
    let number = value.round() as u64;
    number
}

#[cfg(test)]
mod tests {
    use super::Generator;
    use crate::trace::{PolicyKind, optimal_next_use, simulate};

    #[test]
    fn statistics_are_those_of_the_trace_for_several_seeds() {
        for seed in [1, 2, 9] {
            let trace = Generator::conversation(seed).generate();
            let unique = trace.unique_blocks();
            let best = 100.0 * (1.0 - unique as f64 / trace.references() as f64);
            let mean = trace.references() as f64 / trace.requests().len() as f64;
            let once = 100.0 * trace.never_used_again_ratio();
            let next_use = optimal_next_use(&trace);
            let lru = |percent: usize| {
                let mut model = PolicyKind::Lru.build(unique * percent / 100, unique);
                100.0 * simulate(&trace, &next_use, model.as_mut()).hit_ratio()
            };
            let (lru5, lru10) = (lru(5), lru(10));
            let text = format!(
                "seed {seed}: mean {mean:.1} best {best:.2} once {once:.1} LRU {lru5:.2} {lru10:.2}"
            );
            println!("{text}");
            assert_eq!(trace.requests().len(), 12_031);
            assert!((mean / 24.0 - 1.0).abs() <= 0.1, "{text}");
            assert!((best - 36.64).abs() <= 2.0, "{text}");
            assert!((once - 76.0).abs() <= 3.0, "{text}");
            assert!((lru5 - 19.58).abs() <= 3.0, "{text}");
            assert!((lru10 - 27.89).abs() <= 3.0, "{text}");
        }
    }

    #[test]
    fn seeds_repeat_and_chains_are_true_prefix_chains() {
        let trace = Generator::conversation(5).requests(800).generate();
        assert_eq!(trace, Generator::conversation(5).requests(800).generate());
        assert_ne!(trace, Generator::conversation(6).requests(800).generate());
        let mut parent = vec![None; trace.unique_blocks()];
        for request in trace.requests() {
            assert_eq!(request.blocks[0], 0);
            for pair in request.blocks.windows(2) {
                let known = &mut parent[pair[1] as usize];
                assert!(known.is_none_or(|before| before == pair[0]), "{pair:?}");
                *known = Some(pair[0]);
            }
            let blocks = request.input_tokens.div_ceil(512);
            assert_eq!(blocks, request.blocks.len() as u64);
        }
    }
}
