//! What the fields of documents mean, in a few words.
//!
//! Owns: the texts beside the results in the report.
//! **Invariant:** a field has one meaning in all subcommands.

const MEANINGS: &[(&str, &str)] = &[
    // ranges
    (
        "amplification",
        "bytes on the wire by bytes that had to come, the worst of all; 1 is the least",
    ),
    ("arena_wait_us", "time that calls waited for the arena"),
    ("by_ranks", "the same for each number of ranks"),
    ("copy_bytes", "bytes that ranks copied to their destinations"),
    ("exchanges", "requests to the owner, of all sizes"),
    ("get_bytes_per_s", "delivered to all ranks together"),
    ("local_install_bytes", "objects that stayed on the node"),
    ("per_pool", "the pools of the shape"),
    ("remote_calls", "questions to the directory, and times that requests were sent together"),
    ("repeat_remote", "bytes on the wire when the first groups were read once more"),
    ("restore_us_p50", "from the first group's request to the last group's bytes"),
    ("restore_us_p99", "the slowest of a run"),
    ("stall_us", "time that computation waited for bytes"),
    ("ttfl_ratio", "first group with the most ranks by that with the fewest"),
    ("ttfl_us_p50", "until the first group of layers was there"),
    ("ttfl_us_p99", "the slowest of a run"),
    ("unique_bytes", "bytes that had to come, once for all ranks"),
    ("verified", "whether every byte was compared"),
    ("whole_bytes", "bytes that were pulled in the background"),
    ("wire_bytes", "bytes that came from the owner"),
    // load, replay
    ("backend_inflight_max", "most reads in flight at once, over all ranks"),
    ("backend_inflight_mean", "reads in flight on average while there was at least one"),
    ("backend_loads", "reads that reached the storage below the cache"),
    ("block_references", "blocks that requests ask for"),
    ("bytes_per_s", "delivered to all ranks together"),
    ("capacity_blocks", "blocks the cache has room for"),
    ("capacity_bytes", "memory of the cache"),
    ("capacity_pct", "cache size in percent of all different blocks"),
    ("cold_bytes_per_s", "delivered to all ranks when nothing was in the cache"),
    ("cold_cpu_ms", "processor time of all ranks meanwhile"),
    ("cold_hit_ratio", "blocks resident when their request came, cold pass"),
    ("cold_model_hit_ratio", "the same in the model of the policy"),
    ("cold_shards", "where the shards of the cold pass came from, over all ranks and runs"),
    ("cold_wall_us", "from the first rank's start to the last rank's end, cold"),
    ("conversations", "conversations in the replayed slice"),
    ("cpu_s", "processor time of all ranks in all loads"),
    ("delivered_bytes", "bytes that all ranks received in the warm pass"),
    ("dump_bytes_per_s", "from rank memory through the cache into files"),
    ("dumped_bytes", "bytes stored in the cold pass"),
    ("floor_ratio", "bytes_per_s by its memcpy floor"),
    ("hit_difference", "hits in which cache and model differ; must be 0"),
    ("hit_ratio", "blocks resident when their request came"),
    ("lockstep_wall_us", "the old way: each shard waited for before the next"),
    ("max_hit_ratio", "no cache can hit more: every block misses once"),
    ("memcpy_floor_bytes_per_s", "plain memcpy of the same bytes in the same processes"),
    ("model_hit_ratio", "hits of the policy's model on the same requests"),
    ("model_hits", "hits of the policy's model"),
    ("never_used_again_ratio", "blocks that are asked for only once"),
    ("optimal", "hit ratio of the best possible policy"),
    ("lru", "hit ratio of least recently used"),
    ("owner_share", "share of the reads that each rank did"),
    ("prefill_s", "time to compute the same tokens instead, at the assumed speed"),
    ("prefix_hit_ratio", "hits before the first miss of a request"),
    ("references", "blocks that requests ask for"),
    ("replay_hits", "blocks resident when their request came"),
    ("request_us_p50", "until the last rank has every byte of a request: half of them"),
    ("request_us_p99", "the same: 99 of 100"),
    ("restore_s", "time to load all requests, extrapolated to all layers of the model"),
    ("shards", "where the shards came from"),
    ("speedup_vs_lockstep", "lockstep_wall_us by cold_wall_us"),
    ("task_us_p50", "duration of a task of one rank: half of them"),
    ("task_us_p99", "the same: 99 of 100"),
    ("ttft_saved_s", "prefill_s less restore_s: negative where computing would be faster"),
    ("unique_blocks", "different blocks"),
    ("unique_shards", "different shards; each should be read once"),
    ("verified_bytes", "compared byte by byte with what they must be"),
    ("warm_bytes_per_s", "delivered to all ranks when everything was in the cache"),
    ("warm_ratio", "warm_bytes_per_s by its memcpy floor"),
    ("warm_shards", "where the shards of the warm pass came from, over all ranks and runs"),
    ("warm_wall_us", "time of all loads of the warm pass"),
    ("working_set_bytes", "all different blocks together"),
    ("wrong_bytes", "bytes that differ from what was stored; must be 0"),
    // ctrl
    ("bytes_per_slot", "shared memory of the index for each slot"),
    ("futex_floor_us_p50", "a bare wake-up between processes, without ucm: half of them"),
    ("futex_floor_us_p99", "the same: 99 of 100"),
    ("hit_floor_ns", "the same number of independent reads in tables of the same size"),
    ("hit_growth", "hit_ns in the largest table by that in the smallest, both over their floor"),
    ("hit_over_floor_ns", "hit_ns less hit_floor_ns"),
    ("prealloc_ns", "reserve a slot ahead"),
    ("prealloc_saved_ns", "unprepared_acquire_ns less prealloc_acquire_ns"),
    ("unprepared_acquire_ns", "acquire a shard whose slot must be found first"),
    ("waiters_cpu_ms", "processor time of all waiting processes together"),
    ("hit_ns", "find, pin and release a resident shard"),
    ("idle_wakeups", "wake-ups of ranks that have nothing to do; must be 0"),
    ("lookup_ns_per_block", "ask whether a block is there, in batches"),
    ("miss_ns", "take a slot, publish it, evict another for it later"),
    ("prealloc_acquire_ns", "acquire a shard whose slot was reserved before"),
    ("prefix_lookup_ns_per_block", "find how many leading blocks are there"),
    ("waiter_cpu_ms_per_s", "processor time of a waiting process"),
    ("waiting_wakeups", "wake-ups of ranks that wait for one fill"),
    ("wake_ratio", "wake_us_p50 by its futex floor"),
    ("wake_us_p50", "from publishing to the waiter running: half of them"),
    ("wake_us_p99", "the same: 99 of 100"),
    // crash
    ("ops", "loads that ranks did meanwhile"),
    ("ops_during_recovery", "loads of the others while a dead rank was cleared up after"),
    ("ops_while_stopped", "loads of the others while a rank was stopped"),
    ("kills", "rank processes killed"),
    ("leaked_bytes", "memory that no one can use any more; must be 0"),
    ("leaked_pins", "pins left by the dead; must be 0"),
    ("leaked_slots", "slots left by the dead; must be 0"),
    ("recovery_ms_max", "longest time until the others could go on"),
    ("recovery_ms_p50", "time until the others could go on: half of them"),
    ("stuck_waiters", "ranks that waited for a dead one for ever; must be 0"),
];

/// What a field means, if it needs words.
pub(super) fn meaning(field: &str) -> Option<&'static str> {
    MEANINGS.iter().find(|(name, _)| *name == field).map(|(_, meaning)| *meaning)
}

#[cfg(test)]
mod tests {
    use super::{MEANINGS, meaning};

    #[test]
    fn fields_have_one_short_meaning() {
        for (at, (name, text)) in MEANINGS.iter().enumerate() {
            assert_eq!(meaning(name), Some(*text), "{name} stands there twice");
            assert!(text.len() <= 80, "{name}");
            assert!(MEANINGS.iter().skip(at + 1).all(|(other, _)| other != name), "{name}");
        }
        assert_eq!(meaning("no such field"), None);
    }
}
