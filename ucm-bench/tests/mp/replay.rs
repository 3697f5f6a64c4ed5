//! `trace --replay` through the real cache.

use serde_json::json;

use crate::{bench, number, results, text, written};

#[test]
fn one_rank_hits_exactly_where_the_model_hits() {
    let replay = results(&["trace", "--replay", "--requests", "400", "--capacity-pct", "0.1,3,60"]);
    assert_eq!(replay["replay_hits"], replay["model_hits"]);
    assert_eq!(number(&replay, "hit_difference"), 0);
    assert_eq!(number(&replay, "wrong_bytes"), 0);
    let hits: Vec<u64> =
        replay["replay_hits"].as_array().unwrap().iter().map(|h| h.as_u64().unwrap()).collect();
    assert!(hits.is_sorted() && hits[0] < hits[2], "{hits:?}");
    // Every reference was loaded and compared.
    assert_eq!(number(&replay, "verified_bytes"), 3 * 4096 * number(&replay, "references"));
    let loads: u64 =
        replay["backend_loads"].as_array().unwrap().iter().map(|l| l.as_u64().unwrap()).sum();
    assert_eq!(loads, 3 * number(&replay, "references") - hits.iter().sum::<u64>());
}

/// Chains that name a block twice, a cache of one slot, a chain longer than the cache.
#[test]
fn odd_chains_hit_as_the_model_says() {
    let dir = tempfile::tempdir().unwrap();
    let chains = [vec![1, 2, 1], vec![1, 2, 1, 3, 3], vec![], vec![5], vec![5, 5, 1, 2, 3, 4]];
    let lines: Vec<String> = chains
        .iter()
        .map(|ids| {
            json!({"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ids})
                .to_string()
        })
        .collect();
    let file = written(dir.path(), "odd.jsonl", &lines.join("\n"));
    for percent in ["1", "40", "60", "100"] {
        let replay = results(&["trace", "--replay", "--trace", &file, "--capacity-pct", percent]);
        assert_eq!(replay["replay_hits"], replay["model_hits"], "{percent} %");
        assert_eq!(number(&replay, "hit_difference"), 0);
        assert_eq!(number(&replay, "wrong_bytes"), 0);
    }
}

#[test]
fn four_ranks_get_every_byte_cold_and_warm() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("bench").display().to_string();
    let words = ["trace", "--replay", "--ranks", "4", "--runs", "1", "--max-blocks", "8"];
    let sized = ["--working-set-bytes", "50331648", "--dir", &place];
    let replay = results(&[&words[..], &sized[..]].concat());
    let block = 2 * 524_288;
    let references = number(&replay, "references");
    assert_eq!(number(&replay, "wrong_bytes"), 0);
    assert_eq!(number(&replay, "delivered_bytes"), references * block * 4);
    assert_eq!(number(&replay, "dumped_bytes"), number(&replay, "unique_blocks") * block);
    assert_eq!(number(&replay, "working_set_bytes"), number(&replay, "unique_blocks") * block);

    // In the cold pass the references that are no first ones are loads.
    let cold_loads = (references - number(&replay, "unique_blocks")) * block * 4;
    assert_eq!(number(&replay, "verified_bytes"), cold_loads + references * block * 4);
    let shards = |pass: &str, source: &str| replay[pass][source].as_u64().unwrap();
    let all = |pass: &str| -> u64 {
        ["hit", "waited", "owned", "bypass"].iter().map(|source| shards(pass, source)).sum()
    };
    assert_eq!(all("cold_shards") * 524_288, cold_loads);
    assert_eq!(all("warm_shards") * 524_288, references * block * 4);
    assert_eq!(
        number(&replay, "backend_loads"),
        shards("warm_shards", "owned") + shards("warm_shards", "bypass")
    );
    // The cache is smaller than the working set: both tiers were at work.
    assert!(number(&replay, "capacity_blocks") < number(&replay, "unique_blocks"));
    assert!(shards("warm_shards", "owned") > 0 && shards("warm_shards", "hit") > 0);
    // At most one load of a shard for each reference that was no hit.
    let misses = (references - number(&replay, "replay_hits")) * 2;
    assert!(number(&replay, "backend_loads") >= misses);
    assert!(replay["ttft_saved_s"].is_f64() && replay["request_us_p99"].is_f64());
    // The directory was the caller's; what was stored in it is gone.
    assert!(!dir.path().join("bench/objects-0").exists());
}

#[test]
fn impossible_replays_are_refused_with_the_numbers() {
    let output = bench(&["trace", "--replay", "--ranks", "2", "--working-set-bytes", "1000000"]);
    assert_eq!(output.status.code(), Some(3), "{}", text(&output));
    assert!(text(&output).contains("1000000"), "{}", text(&output));
    let output = bench(&["trace", "--replay", "--ranks", "2", "--capacity-pct", "1,2"]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output));
    let output = bench(&["trace", "--replay", "--ranks", "0"]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output));
    let output = bench(&["trace", "--replay", "--trace", "synthetic"]);
    assert_eq!(output.status.code(), Some(3), "{}", text(&output));
}
