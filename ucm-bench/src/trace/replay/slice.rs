//! A part of a trace that is small enough to be replayed with real bytes.
//!
//! Owns: the choice of conversations. The first requests of a trace would be a bad sample: blocks
//! are used again only hundreds of requests later. Whole conversations, drawn at random from the
//! full length of the trace, keep the share of blocks that are used again.
//!
//! **Invariant:** a request's chain is cut at its end only, so what is known of it is a prefix.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::super::parse::{Request, Trace};
use crate::rng::Rng;

/// Some conversations of a trace.
#[derive(Debug)]
pub(super) struct Slice {
    pub(super) trace: Trace,
    /// How many were chosen, of how many.
    pub(super) conversations: usize,
    pub(super) conversations_in_trace: usize,
}

/// Draws conversations while their blocks, `max_blocks` of each request, stay within `limit`
/// different ones. The first one drawn is taken in any case.
pub(super) fn conversations(trace: &Trace, max_blocks: usize, limit: usize, seed: u64) -> Slice {
    // All requests share the root; the block after it tells conversations apart.
    let mut members: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (number, request) in trace.requests().iter().enumerate() {
        let name = request.blocks.get(1).or_else(|| request.blocks.first());
        members.entry(name.copied().unwrap_or(0)).or_default().push(number);
    }
    let conversations_in_trace = members.len();
    let mut drawn: Vec<_> = members.into_iter().collect();
    drawn.sort_by_key(|(name, _)| Rng::new(seed ^ (u64::from(*name) << 20)).bits());

    let chain = |number: usize| {
        let blocks = trace.requests().get(number).map_or(&[][..], |request| &request.blocks);
        blocks.iter().take(max_blocks).copied()
    };
    let mut unique = HashSet::new();
    let mut chosen = Vec::new();
    let mut conversations = 0;
    for (_, requests) in drawn {
        let more: HashSet<u32> = requests.iter().flat_map(|number| chain(*number)).collect();
        let added = more.difference(&unique).count();
        if conversations > 0 && unique.len() + added > limit {
            break;
        }
        unique.extend(more);
        chosen.extend(requests);
        conversations += 1;
    }
    chosen.sort_unstable();
    let trace = renumbered(trace, &chosen, chain);
    Slice { trace, conversations, conversations_in_trace }
}

fn renumbered<I: Iterator<Item = u32>>(
    trace: &Trace,
    chosen: &[usize],
    chain: impl Fn(usize) -> I,
) -> Trace {
    let mut numbers: HashMap<u32, u32> = HashMap::new();
    let mut requests = Vec::with_capacity(chosen.len());
    for number in chosen {
        let Some(request) = trace.requests().get(*number) else { continue };
        let blocks = chain(*number).map(|block| {
            let next = u32::try_from(numbers.len()).unwrap_or(u32::MAX);
            *numbers.entry(block).or_insert(next)
        });
        requests.push(Request { blocks: blocks.collect(), ..request.clone() });
    }
    Trace::from_numbered(requests)
}

#[cfg(test)]
mod tests {
    use super::conversations;
    use crate::trace::Generator;

    #[test]
    fn slices_keep_the_share_of_blocks_used_again() {
        let whole = Generator::conversation(4).generate();
        let best = |trace: &crate::trace::Trace| {
            1.0 - trace.unique_blocks() as f64 / trace.references() as f64
        };
        let slice = conversations(&whole, 32, 2_000, 7);
        let unique = slice.trace.unique_blocks();
        assert!((1_500..=2_000).contains(&unique), "{unique} blocks");
        assert!(slice.trace.requests().iter().all(|request| request.blocks.len() <= 32));
        let (kept, all) = (best(&slice.trace), best(&whole));
        assert!((kept - all).abs() < 0.12, "{kept:.3} of {all:.3}");
        assert!(slice.conversations < slice.conversations_in_trace / 10);
        // The first requests of the trace would not have kept it.
        let first = whole.first(slice.trace.requests().len());
        assert!(best(&first) < 0.5 * all, "{:.3}", best(&first));
    }

    #[test]
    fn the_same_seed_gives_the_same_slice_in_order_of_time() {
        let whole = Generator::conversation(4).requests(3_000).generate();
        let slice = conversations(&whole, 16, 500, 1).trace;
        assert_eq!(slice, conversations(&whole, 16, 500, 1).trace);
        assert_ne!(slice, conversations(&whole, 16, 500, 2).trace);
        assert!(slice.requests().is_sorted_by_key(|request| request.timestamp_ms));
        let mut next = 0;
        for block in slice.requests().iter().flat_map(|request| &request.blocks) {
            assert!(*block <= next, "numbers follow first use");
            next = next.max(block + 1);
        }
    }

    #[test]
    fn one_conversation_is_always_taken() {
        let whole = Generator::conversation(4).requests(50).generate();
        let slice = conversations(&whole, 8, 1, 1);
        assert_eq!(slice.conversations, 1);
        assert!(slice.trace.references() > 0);
    }
}
