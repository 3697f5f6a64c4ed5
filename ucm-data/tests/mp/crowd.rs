//! Many at once: create-or-join races, mass attach, join/leave cycles.

use std::time::Instant;

use crate::joining::ROUND_LIMIT;
use crate::parent::{Instance, Proc};

fn rounds(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// All enter at the same moment; exactly one may create.
fn rush(procs: &mut [Proc], instance: &Instance, more: &str) {
    for proc in procs.iter_mut() {
        proc.begin_enter(&instance.dir(), more);
    }
    let entered: Vec<_> = procs.iter_mut().map(Proc::entered).collect();
    let creators = entered.iter().filter(|e| e.created).count();
    assert_eq!(creators, 1, "{entered:?}");
    assert!(entered.iter().all(|e| e.boot == entered[0].boot), "{entered:?}");
    let mut seats: Vec<_> = entered.iter().map(|e| e.seat).collect();
    seats.sort_unstable();
    let expected: Vec<_> = (0..u16::try_from(procs.len()).unwrap()).collect();
    assert_eq!(seats, expected);
}

#[test]
fn d7_sixteen_processes_create_or_join_at_the_same_moment() {
    // UCM_D7_ROUNDS changes the number of rounds; the promise is 200.
    let rounds = rounds("UCM_D7_ROUNDS", 200);
    let start = Instant::now();
    let mut procs: Vec<_> = (0..16).map(|_| Proc::start()).collect();
    let instance = Instance::new();
    for round in 0..rounds {
        rush(&mut procs, &instance, "");
        let word = u64::try_from(round).unwrap() + 1;
        procs[round % 16].write(5, word);
        assert_eq!(procs[(round + 7) % 16].read(5), word);
        for proc in &mut procs {
            proc.tell("leave");
        }
        for proc in &mut procs {
            proc.expect("left");
        }
        assert!(start.elapsed() < ROUND_LIMIT, "round {round} after {:?}", start.elapsed());
    }
    println!("{rounds} rounds of 16 in {:?}", start.elapsed());
    assert_eq!(instance.files(), [""; 0]);
}

#[test]
fn d7_sixteen_processes_on_socket_files() {
    let mut procs: Vec<_> = (0..16).map(|_| Proc::start()).collect();
    let instance = Instance::new();
    for _ in 0..10 {
        rush(&mut procs, &instance, "sockets=files");
        assert_eq!(instance.files().len(), 16);
        for proc in &mut procs {
            proc.tell("leave");
        }
        for proc in &mut procs {
            proc.expect("left");
        }
        assert_eq!(instance.files(), [""; 0]);
    }
}

#[test]
fn a05_everybody_hears_of_everybody_however_the_joins_overlap() {
    let mut procs: Vec<_> = (0..8).map(|_| Proc::start()).collect();
    let instance = Instance::new();
    rush(&mut procs, &instance, "");
    for (index, proc) in procs.iter_mut().enumerate() {
        // Who joined later than this one is announced by an event.
        let mut known = proc.ask("peers", "peers").split(',').filter(|s| !s.is_empty()).count();
        while known < 7 {
            proc.expect("event joined");
            known = proc.ask("peers", "peers").split(',').filter(|s| !s.is_empty()).count();
        }
        assert_eq!(known, 7, "process {index}");
    }
}

#[test]
fn eight_processes_attach_at_once_a_hundred_times() {
    let instance = Instance::new();
    let mut host = Proc::start();
    let boot = host.enter(&instance.dir()).boot;
    host.write(9, 123);
    let mut procs: Vec<_> = (0..8).map(|_| Proc::start()).collect();
    for _ in 0..100 {
        for proc in &mut procs {
            proc.begin_enter(&instance.dir(), "");
        }
        for proc in &mut procs {
            let entered = proc.entered();
            assert!(!entered.created && entered.boot == boot);
        }
        assert_eq!(procs[3].read(9), 123);
        for proc in &mut procs {
            proc.tell("leave");
        }
        for proc in &mut procs {
            proc.expect("left");
        }
    }
    // Every stay was heard of twice: its begin and its orderly end.
    let (mut joined, mut left) = (0, 0);
    while joined < 800 || left < 800 {
        host.expect_any(&["event joined", "event left"], |which| match which {
            0 => joined += 1,
            _ => left += 1,
        });
    }
    let stats = host.ask("stats", "stats");
    assert!(stats.contains("leaves: 800") && stats.contains("deaths: 0"), "{stats}");
}

#[test]
fn d5_a_thousand_joins_and_leaves_leave_nothing_behind_on_either_side() {
    let instance = Instance::new();
    let mut host = Proc::start();
    host.enter(&instance.dir());
    let before = host.ask("resources", "resources");
    let mut guest = Proc::start();
    let command = format!("cycle dir={} count=1000", instance.dir().display());
    let text = guest.ask(&command, "cycled");
    assert!(text.contains("failures=0") && text.contains("same=true"), "{text}");
    for _ in 0..1001 {
        host.expect("event left");
    }
    host.until_resources(&before);
    assert_eq!(host.ask("peers", "peers"), "");
}

#[test]
fn d5_a_thousand_creations_leave_nothing_behind() {
    let instance = Instance::new();
    let mut proc = Proc::start();
    let text = proc.ask(&format!("cycle dir={} count=1000", instance.dir().display()), "cycled");
    assert!(text.contains("failures=0") && text.contains("same=true"), "{text}");
    assert_eq!(instance.files(), [""; 0]);
}
