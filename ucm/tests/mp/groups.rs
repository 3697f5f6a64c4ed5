//! S6 across processes: ranks that dump parts of one thing publish all of them or none.
//!
//! **Invariant:** as long as one rank has not voted nobody finds a byte of the others'; afterwards all
//! living ranks end the same way, and nothing is left of a group that is off.
//!
//! Mutants seen to fail here: publishing before the decision, no vote at a death, a queue that closes
//! without taking its vote back, waiting for a shard that another rank of the group fills.

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::parent::{Instance, Proc};

const RANKS: usize = 3;
const SHARDS: u64 = 4;
const ALL: u64 = RANKS as u64 * SHARDS;

struct Group {
    instance: Instance,
    ranks: Vec<Proc>,
}

impl Group {
    fn new() -> Self {
        let mut group = Self { instance: Instance::new(), ranks: Vec::new() };
        for device in 0..3 {
            group.ranks.push(group.joined(device, &[]));
        }
        group
    }

    fn joined(&self, device: u32, environment: &[(&str, &str)]) -> Proc {
        let mut order = self.instance.rank(device, 3, 4);
        order["backend"] = "pattern".into();
        let mut rank = Proc::start_with(environment);
        rank.join(&order);
        rank
    }

    fn dump(&mut self, rank: usize, attempt: u64) -> Value {
        let order = part(rank, attempt);
        self.ranks[rank].ask(&order)
    }

    /// How the rank's part of an attempt ended, one text for all its shards.
    fn ended(&mut self, rank: usize, attempt: u64) -> String {
        let message = self.ranks[rank].expect("dumped");
        assert_eq!(message["attempt"], attempt, "{message}");
        let results: Vec<_> = message["results"].as_array().unwrap().clone();
        assert_eq!(results.len() as u64, SHARDS);
        assert!(results.iter().all(|result| *result == results[0]), "{message}");
        results[0].as_str().unwrap().to_owned()
    }

    fn inspect(&mut self, rank: usize) -> Value {
        self.ranks[rank].ask(&json!({"do": "inspect"}))
    }

    /// All bytes of a committed attempt are there for everybody, without the backend.
    fn assert_loadable(&mut self, rank: usize, attempt: u64, task: u64) {
        let keys: Vec<u64> = (0..RANKS).flat_map(|rank| keys(rank, attempt)).collect();
        let owners = self.inspect(rank)["owners"].clone();
        self.ranks[rank].load(task, &keys);
        self.ranks[rank].loaded(task);
        assert_eq!(self.inspect(rank)["owners"], owners, "a shard was not in the cache");
    }

    /// Nothing is kept by anybody; `ready` shards can be read.
    fn assert_rest(&mut self, rank: usize, ready: u64, why: &str) {
        let expected = json!([[], ready, 0, 0, 0]);
        let begun = std::time::Instant::now();
        loop {
            let seen = self.inspect(rank);
            let fields = ["problems", "ready", "filling", "draining", "pinned"];
            let found = Value::from(fields.map(|field| seen[field].clone()).to_vec());
            if found == expected {
                return;
            }
            assert!(begun.elapsed() < std::time::Duration::from_secs(20), "{why}: {seen}");
        }
    }
}

fn keys(rank: usize, attempt: u64) -> Vec<u64> {
    (0..SHARDS).map(|shard| attempt * 100 + rank as u64 * 10 + shard).collect()
}

fn part(rank: usize, attempt: u64) -> Value {
    json!({"do": "dump_group", "attempt": attempt, "keys": keys(rank, attempt)})
}

#[test]
fn s6_ranks_in_their_own_processes_publish_together_or_not_at_all() {
    let mut group = Group::new();
    for attempt in 1..4 {
        for rank in 0..RANKS - 1 {
            assert_eq!(group.dump(rank, attempt)["error"], Value::Null);
        }
        // The copies of both are in their slots, unpublished.
        let before = (attempt - 1) * ALL;
        while group.inspect(2)["filling"] != json!(2 * SHARDS) {}
        assert_eq!(group.inspect(2)["ready"], before);
        assert!((0..2).all(|rank| group.ranks[rank].drain("dumped").is_empty()));
        group.dump(2, attempt);
        for rank in 0..RANKS {
            assert_eq!(group.ended(rank, attempt), "Ok(())");
        }
        for rank in 0..RANKS {
            group.assert_loadable(rank, attempt, attempt);
        }
        group.assert_rest(0, attempt * ALL, "committed");
    }
    // The whole node dumps the same shards again: they are there.
    for rank in 0..RANKS {
        let mut again = part(rank, 1);
        again["attempt"] = 77.into();
        group.ranks[rank].ask(&again);
    }
    for rank in 0..RANKS {
        assert_eq!(group.ended(rank, 77), "Ok(())");
    }
    group.assert_rest(0, 3 * ALL, "again");
}

/// One rank will not, in each way there is; the others hear of it, and the next attempt succeeds.
#[test]
fn s6_a_rank_that_gives_up_stops_closes_or_is_killed_takes_the_group_back() {
    let mut group = Group::new();
    let mut attempt = 0;
    for how in ["never dumps", "takes back", "leaves", "is killed", "is stopped and killed"] {
        attempt += 1;
        for rank in 0..RANKS - 1 {
            group.dump(rank, attempt);
        }
        let give_up = json!({"do": "give_up", "attempt": attempt});
        match how {
            "never dumps" => {
                group.ranks[2].ask(&give_up);
            }
            "takes back" => {
                // Before anybody else may have decided: rank 1 takes back what it has voted for.
                group.ranks[1].ask(&give_up);
            }
            "leaves" => {
                group.ranks.pop().unwrap().ask(&json!({"do": "leave"}));
            }
            "is killed" => group.ranks.pop().unwrap().kill(),
            _ => {
                let victim = group.ranks.pop().unwrap();
                victim.signal(Signal::STOP);
                victim.kill();
            }
        }
        for rank in 0..RANKS - 1 {
            assert_eq!(group.ended(rank, attempt), "Err(Cancelled)", "rank {rank}: one {how}");
        }
        group.assert_rest(0, 0, how);
        if group.ranks.len() < 3 {
            // Nobody waits for a rank that is not there.
            let refused = group.dump(0, 99);
            assert_eq!(refused["error_kind"], "Refused", "{refused}");
            let again = group.joined(2, &[]);
            group.ranks.push(again);
        }
    }
    attempt += 1;
    for rank in 0..RANKS {
        group.dump(rank, attempt);
    }
    for rank in 0..RANKS {
        assert_eq!(group.ended(rank, attempt), "Ok(())");
    }
    group.assert_loadable(2, attempt, 1);
}

/// Two ranks of a group with one key between them, and two groups that cross: none waits for ever.
#[test]
fn s6_ranks_that_want_the_same_shard_do_not_wait_for_each_other() {
    let mut group = Group::new();
    let order =
        |attempt: u64, keys: &[u64]| json!({"do": "dump_group", "attempt": attempt, "keys": keys});
    for round in 0..10 {
        let (one, two) = (1 + 2 * round, 2 + 2 * round);
        let key = 1000 * (round + 1);
        for (rank, (first, second)) in [(one, two), (two, one), (one, two)].into_iter().enumerate()
        {
            // Rank 0 and 1 dump key + first to one group and key + second to the other.
            group.ranks[rank].tell(&order(first, &[key + rank as u64 % 2]));
            group.ranks[rank].tell(&order(second, &[key + 1 - rank as u64 % 2]));
        }
        let mut committed = Vec::new();
        for rank in &mut group.ranks {
            for _ in 0..2 {
                assert_eq!(rank.expect("answer")["error"], Value::Null);
            }
            for _ in 0..2 {
                let message = rank.expect("dumped");
                let result = message["results"][0].as_str().unwrap().to_owned();
                committed.push((message["attempt"].as_u64().unwrap(), result));
            }
        }
        for attempt in [one, two] {
            let mut results = committed.iter().filter(|(of, _)| *of == attempt);
            let ok = |(_, result): &(u64, String)| result == "Ok(())";
            assert_eq!(results.clone().all(ok), results.any(ok), "{committed:?}");
        }
    }
    group.ranks.truncate(1);
    let ready = group.inspect(0)["ready"].as_u64().unwrap();
    group.assert_rest(0, ready, "crossed");
}

/// A member of a group dies at each point of its vote and of its dump. The others end alike, and with the
/// victim's part missing only if it died after the decision.
#[cfg(feature = "failpoints")]
#[test]
fn s6_d1_death_at_every_point_of_a_group() {
    let points = ["group.", "ungroup.", "dump.", "publish."];
    let of_groups = |name: &&&str| points.iter().any(|point| name.starts_with(point));
    let all = ucm_ctrl::failpoint::NAMES.iter().chain(ucm_queue::failpoint::NAMES);
    let (mut fired, mut committed) = (0, 0);
    for point in all.filter(of_groups) {
        // As the one that opens the group, and as another.
        for seat in [0, 2] {
            let mut group = Group { instance: Instance::new(), ranks: Vec::new() };
            let mut victim = None;
            for device in 0..3 {
                let environment = format!("{point}:1");
                let environment = [("UCM_FAILPOINT", environment.as_str())];
                let is_victim = device == seat;
                let rank = group.joined(device, if is_victim { &environment } else { &[] });
                if is_victim { victim = Some(rank) } else { group.ranks.push(rank) }
            }
            let mut victim = victim.unwrap();
            group.ranks[0].ask(&part(0, 1));
            victim.tell(&part(1, 1));
            group.ranks[1].ask(&part(2, 1));
            let why = format!("{point}, device {seat}");
            let ends = [group.ended(0, 1), group.ended(1, 1)];
            assert_eq!(ends[0], ends[1], "{why}");
            let all = ends[0] == "Ok(())";
            assert!(all || ends[0] == "Err(Cancelled)", "{why}: {ends:?}");
            // Some points belong to ranks that others die before.
            let died = loop {
                if !victim.lives() {
                    break true;
                }
                if !victim.drain("dumped").is_empty() {
                    break false;
                }
            };
            fired += u64::from(died);
            committed += u64::from(died && all);
            victim.kill();
            if all {
                let keys: Vec<u64> = [0, 2].into_iter().flat_map(|rank| keys(rank, 1)).collect();
                group.ranks[0].load(5, &keys);
                group.ranks[0].loaded(5);
            }
            let seen = group.inspect(0)["ready"].as_u64().unwrap();
            assert!(if all { seen >= 2 * SHARDS } else { seen == 0 }, "{why}: {seen}");
            group.assert_rest(0, seen, &why);
        }
    }
    assert!(fired > 20, "{fired}");
    assert!(committed > 0 && committed < fired, "{committed} of {fired}");
}
