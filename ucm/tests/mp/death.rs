//! Death of members, through the whole stack.

use std::{
    collections::BTreeSet,
    io::{BufRead as _, BufReader},
    os::unix::fs::MetadataExt as _,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::parent::{Instance, Proc, skip};

/// D3: an owner is killed in mid-fill, half of the bytes written. A waiter takes over, what it gets
/// is whole, and nothing of the dead member stays.
#[test]
fn d3_an_owner_killed_in_mid_fill_is_replaced_by_a_waiter() {
    let instance = Instance::new();
    let mut procs: Vec<Proc> = (0..3).map(|_| Proc::start()).collect();
    for (device, proc) in (0..).zip(&mut procs) {
        proc.join(&instance.rank(device, 3, 4));
    }
    procs[0].load(1, &[9]);
    assert_eq!(procs[0].started(), 9);
    procs[1].load(1, &[9]);
    procs.remove(0).kill();
    // The survivor that waited becomes the owner by itself.
    assert_eq!(procs[0].started(), 9);
    procs[0].release(9);
    procs[0].loaded(1);
    procs[1].load(1, &[9]);
    procs[1].loaded(1);
    // Whoever reaps counts the death when everything of it is gone.
    while procs[1].ask(&json!({"do": "inspect"}))["deaths"] != 1 {
        std::thread::yield_now();
    }
    let inspection = procs[1].ask(&json!({"do": "inspect"}));
    assert_eq!(inspection["problems"], json!([]));
    assert_eq!((&inspection["members"], &inspection["pinned"]), (&json!(2), &json!(0)));
}

/// D9: a process that a rank has forked keeps nothing of the cache alive, neither bytes nor the control region.
/// Mutant: the region keeps its descriptor.
#[test]
fn d9_d2_a_forked_child_of_a_dead_rank_keeps_no_memory() {
    let instance = Instance::new();
    let mut procs: Vec<Proc> = (0..2).map(|_| Proc::start()).collect();
    for (device, proc) in (0..).zip(&mut procs) {
        proc.join(&instance.rank(device, 2, 4));
    }
    let memory = procs[0].shared_memory();
    assert!(memory.len() >= 2, "a control region and a segment: {memory:?}");
    let children: Vec<i32> = procs
        .iter_mut()
        .map(|proc| {
            i32::try_from(proc.ask(&json!({"do": "fork"}))["pid"].as_i64().unwrap()).unwrap()
        })
        .collect();
    procs.into_iter().for_each(Proc::kill);
    let held = holders(&memory);
    for child in children {
        let pid = rustix::process::Pid::from_raw(child).unwrap();
        rustix::process::kill_process(pid, Signal::KILL).unwrap();
    }
    assert_eq!(held, Vec::<String>::new());
}

/// Ranks in containers see each other by numbers that mean nothing to the other: both know their own
/// process as 1. Each is proven dead all the same, by one inside and by one outside.
/// Mutant: a process is watched by the number it goes by itself (nobody dies, or somebody else).
#[test]
fn d1_death_is_seen_across_pid_namespaces() {
    let instance = Instance::new();
    let [Some(inner), Some(other)] = [(); 2].map(|()| Proc::start_in_pid_namespace()) else {
        return skip("d1: a PID namespace is not allowed here");
    };
    let mut procs = vec![Proc::start(), inner, other];
    for (device, proc) in (0..).zip(&mut procs) {
        proc.join(&instance.rank(device, 3, 4));
    }
    // The one outside dies: those inside see it. Then one inside: the other one sees it, and one outside.
    for (deaths, key) in [(1, 9), (2, 10)] {
        procs[0].load(1, &[key]);
        assert_eq!(procs[0].started(), key);
        for survivor in &mut procs[1..] {
            survivor.load(deaths, &[key]);
        }
        procs.remove(0).kill();
        let owner = crate::loading::first_to_start(&mut procs, 0..2);
        procs[owner].release(key);
        for proc in &mut procs {
            proc.loaded(deaths);
        }
        while procs[0].ask(&json!({"do": "inspect"}))["deaths"] != deaths {
            std::thread::yield_now();
        }
        let seen = procs[0].ask(&json!({"do": "inspect"}));
        let found = [&seen["problems"], &seen["members"], &seen["pinned"], &seen["filling"]];
        assert_eq!(found, [&json!([]), &json!(2), &json!(0), &json!(0)]);
        procs.push(Proc::start());
        procs[2].join(&instance.rank(3, 3, 4));
    }
}

/// D6 and "moves each byte once": the creator is killed, a new rank joins and hits its bytes.
#[test]
fn d6_the_creator_is_killed_and_a_new_rank_hits_its_bytes() {
    let instance = Instance::new();
    let mut creator = Proc::start();
    let mut join = instance.rank(0, 2, 4);
    join["backend"] = "pattern".into();
    assert_eq!(creator.join(&join)["created"], true);
    creator.load(1, &[1, 2, 3]);
    creator.loaded(1);
    let mut keeper = Proc::start();
    assert_eq!(keeper.join(&instance.rank(1, 2, 4))["created"], false);
    creator.kill();
    let mut joiner = Proc::start();
    assert_eq!(joiner.join(&instance.rank(0, 2, 4))["created"], false);
    joiner.load(1, &[1, 2, 3]);
    joiner.loaded(1);
    assert!(joiner.drain("started").is_empty(), "a hit went to the backend");
}

/// W6 and D4: a stopped owner keeps its slot; others go on with other keys; when it continues, its
/// fill is published and right.
#[test]
fn w6_a_stopped_owner_is_not_taken_over_and_its_publish_succeeds_later() {
    let instance = Instance::new();
    let mut procs: Vec<Proc> = (0..2).map(|_| Proc::start()).collect();
    for (device, proc) in (0..).zip(&mut procs) {
        proc.join(&instance.rank(device, 2, 4));
    }
    procs[0].load(1, &[4]);
    assert_eq!(procs[0].started(), 4);
    procs[0].signal(Signal::STOP);
    procs[1].load(1, &[4]);
    procs[1].load(2, &[5, 7]);
    // Rank 1 of 2 starts with the second shard of its task.
    assert_eq!([procs[1].started(), procs[1].started()], [7, 5]);
    procs[1].release(5);
    procs[1].release(7);
    procs[1].loaded(2);
    let inspection = procs[1].ask(&json!({"do": "inspect"}));
    assert_eq!((&inspection["filling"], &inspection["deaths"]), (&json!(1), &json!(0)));
    assert!(procs[1].drain("started").is_empty(), "a stopped owner was taken over");
    procs[0].signal(Signal::CONT);
    procs[0].release(4);
    procs[0].loaded(1);
    procs[1].loaded(1);
}

/// D2: all are killed; the next start needs nobody and finds an empty cache, of another size too.
#[test]
fn d2_after_all_are_killed_the_next_start_works_and_nothing_is_left() {
    let instance = Instance::new();
    let mut procs: Vec<Proc> = (0..4).map(|_| Proc::start()).collect();
    for (device, proc) in (0..).zip(&mut procs) {
        let mut join = instance.rank(device, 4, 4);
        join["backend"] = "pattern".into();
        proc.join(&join);
        proc.load(1, &[1, 2, 3]);
        proc.loaded(1);
    }
    let memory = procs[0].shared_memory();
    assert!(memory.len() >= 2, "a control region and a segment: {memory:?}");
    assert_eq!(instance.sockets(), 4);
    procs.into_iter().for_each(Proc::kill);
    assert_eq!(std::fs::read_dir(instance.path()).unwrap().count(), 0, "files are left");
    assert_eq!(instance.sockets(), 0, "sockets are left");
    assert_eq!(holders(&memory), Vec::<String>::new(), "somebody holds the memory");
    let mut next = Proc::start();
    let mut join = instance.rank(0, 1, 4);
    join["slots"] = 32.into();
    assert_eq!(next.join(&join)["created"], true);
    next.load(1, &[1]);
    assert_eq!(next.started(), 1);
    next.release(1);
    next.loaded(1);
}

/// Descriptors and mappings of all processes that lead to these inodes.
fn holders(memory: &BTreeSet<u64>) -> Vec<String> {
    let mut found = Vec::new();
    for process in std::fs::read_dir("/proc").unwrap().flatten() {
        let Ok(fds) = std::fs::read_dir(process.path().join("fd")) else { continue };
        for fd in fds.flatten() {
            if std::fs::metadata(fd.path()).is_ok_and(|m| memory.contains(&m.ino())) {
                found.push(fd.path().display().to_string());
            }
        }
        let maps = std::fs::read_to_string(process.path().join("maps")).unwrap_or_default();
        let inode = |line: &&str| line.split_whitespace().nth(4).and_then(|ino| ino.parse().ok());
        let ours = |line: &&str| {
            line.contains("memfd:") && inode(line).is_some_and(|i| memory.contains(&i))
        };
        found.extend(maps.lines().filter(ours).map(str::to_owned));
    }
    found
}

/// An operator evicts a rank that is stopped in mid-fill: a waiter takes over, the rank is fenced when
/// it goes on, and everybody can leave.
#[test]
fn w6_a_stopped_rank_is_evicted_by_an_operator() {
    let instance = Instance::new();
    let mut procs: Vec<Proc> = (0..2).map(|_| Proc::start()).collect();
    for (device, proc) in (0..).zip(&mut procs) {
        proc.join(&instance.rank(device, 2, 4));
    }
    procs[0].load(1, &[4]);
    assert_eq!(procs[0].started(), 4);
    procs[1].load(1, &[4]);
    procs[0].signal(Signal::STOP);
    let ucm = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ucm"));
        let dir = format!("cache.dir={}", instance.path().display());
        command.args(["--set", &dir]).args(arguments).output().unwrap()
    };
    let seen: Value = serde_json::from_slice(&ucm(&["inspect", "--json"]).stdout).unwrap();
    let seat = seen["members"].as_array().unwrap().iter().find(|m| m["filling"] == 1).unwrap();
    let seat = seat["seat"].to_string();
    let nobody = ucm(&["evict-rank", "--seat", &seat, "--generation", "77"]);
    assert_eq!(nobody.status.code(), Some(2), "{nobody:?}");
    let done = ucm(&["evict-rank", "--seat", &seat]);
    assert!(done.status.success(), "{done:?}");
    assert!(String::from_utf8_lossy(&done.stdout).contains("1 of its fills"), "{done:?}");
    // The waiter becomes the owner by itself.
    assert_eq!(procs[1].started(), 4);
    procs[1].release(4);
    procs[1].loaded(1);
    // The stopped one goes on. Its bytes arrive, but nobody reads them.
    procs[0].signal(Signal::CONT);
    procs[0].release(4);
    let ended = procs[0].expect("ended");
    assert_eq!(ended["wrong"], Value::Null, "{ended}");
    procs[1].load(2, &[4]);
    procs[1].loaded(2);
    let counts = procs[1].ask(&json!({"do": "inspect"}));
    assert_eq!((&counts["deaths"], &counts["problems"]), (&json!(0), &json!([])));
    procs[0].ask(&json!({"do": "leave"}));
    let counts = procs[1].ask(&json!({"do": "inspect"}));
    let left = ["members", "draining", "pinned", "filling"].map(|name| counts[name].clone());
    assert_eq!(left, [json!(1), json!(0), json!(0), json!(0)]);
}

/// An evicted rank is the only one that sees another die in mid-fill.
/// Regression: it could not clear up and forgot the dead one, whose slots were lost while the cache lived.
/// Mutant: an expelled member clears up after nobody.
#[test]
fn w6_d1_an_evicted_rank_still_clears_up_after_the_dead() {
    let instance = Instance::new();
    let mut procs: Vec<Proc> = (0..3).map(|_| Proc::start()).collect();
    procs[0].join(&instance.rank(0, 2, 4));
    procs[1].join(&instance.rank(1, 2, 4));
    let mut command = Command::new(env!("CARGO_BIN_EXE_ucm"));
    let dir = format!("cache.dir={}", instance.path().display());
    let done = command.args(["--set", &dir, "evict-rank", "--seat", "0"]).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    procs[1].load(1, &[5]);
    assert_eq!(procs[1].started(), 5);
    procs.remove(1).kill();
    procs[1].join(&instance.rank(1, 2, 4));
    procs[1].load(1, &[5]);
    assert_eq!(procs[1].started(), 5);
    procs[1].release(5);
    procs[1].loaded(1);
    let counts = procs[1].ask(&json!({"do": "inspect"}));
    let left = ["deaths", "draining", "pinned", "filling"].map(|name| counts[name].clone());
    assert_eq!(left, [json!(1), json!(0), json!(0), json!(0)]);
}

/// A rank becomes another program in mid-fill: it has given up its sockets and its seat, and nothing says
/// that its process is over. A killed rank looks the same while a device still writes for it.
/// It is expelled; what it filled stays in quarantine until its process is over, whoever joins.
/// Regression: nobody heard of it, waiters hung, and the next joiner handed its slots on.
/// Mutants: the joiner repairs what has no socket and no seat; the member that vanished is not expelled.
#[test]
fn d1_a_rank_that_gave_up_its_seat_is_expelled_and_its_slots_wait_for_its_end() {
    let instance = Instance::new();
    let mut procs: Vec<Proc> = (0..3).map(|_| Proc::start()).collect();
    procs[0].join(&instance.rank(0, 3, 4));
    procs[1].join(&instance.rank(1, 3, 4));
    procs[1].load(1, &[9]);
    assert_eq!(procs[1].started(), 9);
    procs[0].load(1, &[9]);
    procs[1].tell(&json!({"do": "exec"}));
    // The waiter becomes the owner by itself.
    assert_eq!(procs[0].started(), 9);
    procs[2].join(&instance.rank(1, 3, 4));
    procs[0].release(9);
    procs[0].loaded(1);
    let counts = |proc: &mut Proc| {
        let seen = proc.ask(&json!({"do": "inspect"}));
        let left = ["members", "draining", "pinned", "filling", "deaths"];
        (left.map(|name| seen[name].as_u64().unwrap()), seen["problems"].clone())
    };
    let (left, problems) = counts(&mut procs[2]);
    assert_eq!((left[..2].to_vec(), left[4], problems), (vec![3, 1], 0, json!([])));
    procs[2].load(1, &[9]);
    procs[2].loaded(1);
    procs.remove(1).kill();
    while counts(&mut procs[1]) != ([2, 0, 0, 0, 1], json!([])) {
        std::thread::yield_now();
    }
}

/// `ucm top` shows what happens, and keeps no cache alive: when its ranks have gone, so has the memory.
/// Mutants: an observer counts as somebody; a look that finds nobody does not leave.
#[test]
fn a07_watching_a_cache_does_not_keep_it() {
    let instance = Instance::new();
    let mut procs: Vec<Proc> = (0..2).map(|_| Proc::start()).collect();
    for (device, proc) in (0..2).zip(&mut procs) {
        proc.join(&instance.rank(device, 2, 4));
    }
    let dir = format!("cache.dir={}", instance.path().display());
    let mut command = Command::new(env!("CARGO_BIN_EXE_ucm"));
    command.args(["--set", &dir, "top", "--interval-ms", "20"]).stdout(Stdio::piped());
    // The second one must not be the reason for the first to stay.
    let mut tops: Vec<_> = (0..2).map(|_| Top(command.spawn().unwrap())).collect();
    let mut lines: Vec<_> =
        tops.iter_mut().map(|top| BufReader::new(top.0.stdout.take().unwrap()).lines()).collect();
    let mut until = |what: &str| {
        for lines in &mut lines {
            lines.find(|line| line.as_ref().unwrap().contains(what)).expect(what).unwrap();
        }
    };
    until("ready    [    ");
    procs[0].load(1, &[4]);
    assert_eq!(procs[0].started(), 4);
    procs[0].release(4);
    procs[0].loaded(1);
    until("] 1 (");
    until("device 1");
    procs.remove(1).kill();
    until("deaths 1  ");
    procs.remove(0).kill();
    until("waiting");
    let maps = |top: &Top| {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", top.0.id())).unwrap();
        maps.lines().filter(|line| line.contains("memfd:ucm")).count()
    };
    // Each of them looks now and then whether the other one is somebody.
    let watchdog = Instant::now() + Duration::from_secs(60);
    while tops.iter().map(maps).sum::<usize>() > 0 {
        assert!(Instant::now() < watchdog, "they keep each other's cache");
    }
    let mut next = Proc::start();
    next.join(&instance.rank(0, 2, 4));
    until("device 0");
}

/// Ends with the test, also when that fails.
struct Top(Child);

impl Drop for Top {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
