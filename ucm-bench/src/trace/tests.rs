//! The models against the published figures, and the optimum against exhaustive search.

use super::{PolicyKind, Request, Simulation, Trace, TraceSource, optimal_next_use, simulate};
use crate::rng::Rng;

/// The published table: trace, policy, hit ratio in percent at 1, 5, 10, 30 % of unique blocks.
const TABLE: [(&str, PolicyKind, [f64; 4]); 6] = [
    ("conversation", PolicyKind::Lru, [5.25, 19.58, 27.89, 35.77]),
    ("conversation", PolicyKind::Clock, [5.29, 20.28, 28.31, 35.68]),
    ("conversation", PolicyKind::Optimal, [24.64, 36.64, 36.64, 36.64]),
    ("synthetic", PolicyKind::Lru, [3.81, 15.66, 26.23, 48.78]),
    ("synthetic", PolicyKind::Clock, [3.78, 15.64, 25.02, 49.36]),
    ("synthetic", PolicyKind::Optimal, [18.53, 39.56, 50.63, 63.96]),
];

fn file(name: &str) -> Option<Trace> {
    match TraceSource::find(name) {
        Ok(source @ TraceSource::File(_)) => Some(source.load(0).unwrap()),
        _ => {
            println!("SKIP the {name} trace is not here (set UCM_TRACES to its folder)");
            None
        }
    }
}

fn run(trace: &Trace, policy: PolicyKind, capacity: usize) -> Simulation {
    let mut model = policy.build(capacity, trace.unique_blocks());
    simulate(trace, &optimal_next_use(trace), model.as_mut())
}

fn check_table(name: &str) {
    let Some(trace) = file(name) else { return };
    for (_, policy, expected) in TABLE.iter().filter(|(of, ..)| *of == name) {
        for (percent, expected) in [1, 5, 10, 30].into_iter().zip(expected) {
            let outcome = run(&trace, *policy, trace.unique_blocks() * percent / 100);
            let found = 100.0 * outcome.hit_ratio();
            let what = format!("{name} {} at {percent} %: {found:.3}", policy.name());
            println!("{what}");
            assert!((found - expected).abs() <= 0.1, "{what}, published {expected}");
        }
    }
}

#[test]
fn conversation_trace_gives_the_published_table() {
    check_table("conversation");
}

#[test]
fn synthetic_trace_gives_the_published_table() {
    check_table("synthetic");
}

#[test]
fn traces_have_the_published_size() {
    let published = [
        ("conversation", 12_031, 288_500, 182_790, 36.64),
        ("synthetic", 3_993, 121_877, 43_924, 63.96),
    ];
    for (name, requests, references, unique, best) in published {
        let Some(trace) = file(name) else { continue };
        assert_eq!(trace.requests().len(), requests);
        assert_eq!((trace.references(), trace.unique_blocks()), (references, unique));
        let everything = run(&trace, PolicyKind::Lru, trace.unique_blocks());
        assert!((100.0 * everything.hit_ratio() - best).abs() < 0.005);
        assert_eq!(everything.prefix_hits, everything.hits, "ids form prefix chains");
    }
}

#[test]
fn no_policy_beats_the_optimum() {
    let trace = super::Generator::conversation(3).requests(2_000).generate();
    for capacity in [1, 10, 300, 3_000] {
        let best = run(&trace, PolicyKind::Optimal, capacity).hits;
        for policy in PolicyKind::all() {
            assert!(run(&trace, *policy, capacity).hits <= best, "{policy:?} at {capacity}");
        }
    }
}

#[test]
fn optimum_equals_exhaustive_search() {
    let mut rng = Rng::new(11);
    for round in 0..200 {
        let capacity = 1 + round % 4;
        let chains: Vec<Vec<u32>> = (0..12)
            .map(|_| {
                let mut chain: Vec<u32> = (0..7).collect();
                chain.retain(|_| rng.below(3) == 0);
                chain
            })
            .collect();
        let requests = chains.iter().map(|blocks| Request {
            timestamp_ms: 0,
            input_tokens: 0,
            output_tokens: 0,
            blocks: blocks.clone(),
        });
        let trace = Trace::from_numbered(requests.collect());
        let found = run(&trace, PolicyKind::Optimal, capacity).hits;
        assert_eq!(found, exhaustive(&chains, capacity), "capacity {capacity}: {chains:?}");
    }
}

/// The most hits over all ways to choose what stays after each request.
fn exhaustive(chains: &[Vec<u32>], capacity: usize) -> u64 {
    let mut best: Vec<Option<u64>> = vec![None; 1 << 7];
    best[0] = Some(0);
    for chain in chains {
        let asked: u32 = chain.iter().map(|block| 1 << block).sum();
        let mut next: Vec<Option<u64>> = vec![None; 1 << 7];
        for (cached, hits) in best.iter().enumerate() {
            let Some(hits) = hits else { continue };
            let cached = u32::try_from(cached).unwrap();
            let hits = hits + u64::from((cached & asked).count_ones());
            let could_stay = cached | asked;
            for stays in 0..1_u32 << 7 {
                if stays & !could_stay == 0 && stays.count_ones() as usize <= capacity {
                    let entry = &mut next[stays as usize];
                    *entry = (*entry).max(Some(hits));
                }
            }
        }
        best = next;
    }
    best.into_iter().flatten().max().unwrap()
}
