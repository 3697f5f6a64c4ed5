//! Death and leftovers: real SIGKILL and SIGSTOP.

use std::time::{Duration, Instant};

use crate::parent::{Instance, Proc};

#[test]
fn d6_the_answering_member_is_killed_and_the_next_join_takes_under_500_ms() {
    let instance = Instance::new();
    let mut first = Proc::start();
    let boot = first.enter(&instance.dir()).boot;
    first.write(4, 4_000_037);
    let mut second = Proc::start();
    second.enter(&instance.dir());
    let mut joiner = Proc::start();
    // Not waited for: the join meets the dying process.
    let start = Instant::now();
    first.kill_now();
    let entered = joiner.enter(&instance.dir());
    let elapsed = start.elapsed();
    assert!(elapsed.as_millis() <= 500, "{elapsed:?}");
    assert!(!entered.created);
    assert_eq!(entered.boot, boot);
    assert_eq!(joiner.read(4), 4_000_037);
}

#[test]
fn d6_kill_and_join_at_the_same_moment_fifty_times() {
    let instance = Instance::new();
    let mut stays = vec![Proc::start()];
    let boot = stays[0].enter(&instance.dir()).boot;
    stays[0].write(4, 99);
    for round in 0..50 {
        let mut next = Proc::start();
        stays.push({
            next.begin_enter(&instance.dir(), "");
            next
        });
        if round > 0 {
            // The oldest member has the lowest seat or is about to be replaced on it.
            stays.remove(0).kill();
        }
        let entered = stays.last_mut().unwrap().entered();
        assert!(!entered.created && entered.boot == boot, "round {round}: {entered:?}");
        assert!(entered.ms <= 500, "round {round}: {entered:?}");
        assert_eq!(stays.last_mut().unwrap().read(4), 99, "round {round}");
    }
}

#[test]
fn d2_two_of_four_die_at_once_and_everybody_left_hears_it_exactly_once() {
    let instance = Instance::new();
    let mut procs: Vec<_> = (0..4).map(|_| Proc::start()).collect();
    let entered: Vec<_> = procs.iter_mut().map(|proc| proc.enter(&instance.dir())).collect();
    let dead: Vec<_> = procs.drain(1..3).collect();
    dead.iter().for_each(Proc::kill_now);
    dead.into_iter().for_each(Proc::kill);
    for proc in &mut procs {
        let mut died = [proc.expect("event died"), proc.expect("event died")];
        died.sort();
        let expected = [1, 2].map(|seat| format!("{seat} {}", entered[seat].stay));
        assert_eq!(died, expected);
        let gone = &entered[1].stay;
        assert_eq!(proc.ask(&format!("liveness seat=1 stay={gone}"), "liveness"), "Dead");
        assert_eq!(proc.ask("alive seat=1", "alive"), "false");
    }
    // Their seats are free again, and nothing more was heard about them.
    let mut next = Proc::start();
    assert_eq!(next.enter(&instance.dir()).seat, 1);
    for proc in &mut procs {
        proc.expect("event joined 1");
        assert!(proc.events().iter().all(|event| !event.starts_with("died")));
    }
}

#[test]
fn d2_all_four_die_and_the_next_start_works_unattended() {
    for sockets in ["", "sockets=files"] {
        let instance = Instance::new();
        let mut procs: Vec<_> = (0..4).map(|_| Proc::start()).collect();
        let boot = procs
            .iter_mut()
            .map(|proc| proc.enter_with(&instance.dir(), sockets).boot)
            .next()
            .unwrap();
        procs.iter().for_each(Proc::kill_now);
        procs.into_iter().for_each(Proc::kill);
        let mut next = Proc::start();
        let entered = next.enter_with(&instance.dir(), sockets);
        assert!(entered.created);
        assert_ne!(entered.boot, boot);
        assert_eq!(next.read(0), 0, "bytes of the dead cache came back");
        // Stale socket files were removed on the way.
        let left = if sockets.is_empty() { vec![] } else { vec!["seat-0.sock".to_owned()] };
        assert_eq!(instance.files(), left);
    }
}

#[test]
fn a_leave_is_no_death_and_an_exit_without_goodbye_is_one() {
    let instance = Instance::new();
    let mut host = Proc::start();
    host.enter(&instance.dir());
    let mut polite = Proc::start();
    let entered = polite.enter(&instance.dir());
    polite.leave();
    assert_eq!(host.expect("event left"), format!("{} {}", entered.seat, entered.stay));
    let question = format!("liveness seat={} stay={}", entered.seat, entered.stay);
    assert_eq!(host.ask(&question, "liveness"), "Left");
    let mut rude = Proc::start();
    let entered = rude.enter(&instance.dir());
    rude.finish();
    assert_eq!(host.expect("event died"), format!("{} {}", entered.seat, entered.stay));
    let unknown = "00112233445566778899aabbccddeeff";
    assert_eq!(host.ask(&format!("liveness seat=1 stay={unknown}"), "liveness"), "Unknown");
}

#[test]
fn d4_a_stopped_member_is_not_dead_and_joins_go_on_without_it() {
    let instance = Instance::new();
    let mut stopped = Proc::start();
    let entered = stopped.enter(&instance.dir());
    stopped.write(2, 22);
    let mut other = Proc::start();
    other.enter(&instance.dir());
    stopped.signal(libc::SIGSTOP);
    let mut joiner = Proc::start();
    let joined = joiner.enter(&instance.dir());
    assert_eq!((joined.created, joined.seat), (false, 2));
    assert_eq!(joiner.read(2), 22);
    // The joiner knows the stopped member although it has not spoken with it.
    let question = format!("liveness seat=0 stay={}", entered.stay);
    assert_eq!(joiner.ask(&question, "liveness"), "Alive");
    assert_eq!(joiner.ask("peers", "peers"), "0,1");
    stopped.signal(libc::SIGCONT);
    assert_eq!(stopped.expect("event joined 2"), joined.stay);
    // And its death is seen by the joiner all the same.
    stopped.kill();
    assert_eq!(joiner.expect("event died"), format!("0 {}", entered.stay));
}

#[test]
fn a11_a_stay_that_began_and_ended_while_a_member_was_stopped_is_still_heard_of() {
    let instance = Instance::new();
    let mut host = Proc::start();
    host.enter(&instance.dir());
    let mut stopped = Proc::start();
    stopped.enter(&instance.dir());
    stopped.signal(libc::SIGSTOP);
    // Dead and reaped before the stopped member has even accepted the connection.
    let mut dead = Proc::start();
    let first = dead.enter(&instance.dir());
    dead.kill();
    host.expect("event died");
    let mut polite = Proc::start();
    let second = polite.enter(&instance.dir());
    polite.leave();
    assert_eq!((first.seat, second.seat), (2, 2));
    stopped.signal(libc::SIGCONT);
    assert_eq!(stopped.expect("event joined 2"), first.stay);
    assert_eq!(stopped.expect("event joined 2"), second.stay);
    assert_eq!(stopped.expect("event died"), format!("2 {}", first.stay));
    assert_eq!(stopped.expect("event left"), format!("2 {}", second.stay));
    assert_eq!(stopped.ask("peers", "peers"), "0");
}

#[test]
fn d1_a_joiner_killed_while_it_is_admitted_is_reported_and_blocks_nobody() {
    let instance = Instance::new();
    let mut host = Proc::start();
    host.enter(&instance.dir());
    let mut victim = Proc::start();
    victim.begin_enter(&instance.dir(), "stop=1");
    victim.expect("admitting");
    let mut next = Proc::start();
    next.begin_enter(&instance.dir(), "");
    victim.kill();
    host.expect("event failed");
    assert_eq!(next.entered().seat, 1);
    // A creator killed at the same point leaves nothing that a next one could trip over.
    let instance = Instance::new();
    let mut victim = Proc::start();
    victim.begin_enter(&instance.dir(), "stop=1");
    victim.expect("admitting");
    let mut next = Proc::start();
    next.begin_enter(&instance.dir(), "");
    victim.kill();
    assert!(next.entered().created);
}

#[test]
fn a04_processes_killed_at_random_moments_of_entering_never_disturb_the_next() {
    for sockets in ["", "sockets=files"] {
        let instance = Instance::new();
        for round in 0u64..40 {
            let mut victim = Proc::start();
            victim.begin_enter(&instance.dir(), sockets);
            // The moment of the fault: 0 to 4 ms into the entry.
            std::thread::sleep(Duration::from_micros(round.wrapping_mul(2_654_435_761) % 4000));
            victim.kill_now();
            let mut next = Proc::start();
            let entered = next.enter_with(&instance.dir(), sockets);
            assert!(entered.created, "round {round}: joined the dead");
            assert!(entered.ms <= 2000, "round {round}: {entered:?}");
            assert_eq!(next.read(0), 0);
            next.kill();
        }
    }
}

#[test]
fn w6_when_every_member_is_stopped_the_error_names_them_and_nobody_creates() {
    let instance = Instance::new();
    let mut stopped = Proc::start();
    let boot = stopped.enter(&instance.dir()).boot;
    stopped.signal(libc::SIGSTOP);
    let mut joiner = Proc::start();
    let text = joiner.refused(&instance.dir(), "deadline=300");
    assert!(text.contains("kind=Deadline"), "{text}");
    assert!(text.contains(&stopped.pid().to_string()), "{text}");
    // A join in flight goes through as soon as the member continues.
    joiner.begin_enter(&instance.dir(), "");
    stopped.signal(libc::SIGCONT);
    let entered = joiner.entered();
    assert!(!entered.created && entered.boot == boot);
}

#[test]
fn a07_memory_is_gone_with_the_last_process_even_if_nobody_else_ever_mapped_it() {
    let instance = Instance::new();
    let mut proc = Proc::start();
    proc.enter_with(&instance.dir(), "unmapped=1");
    let held = |pid: i32| {
        let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        fds.filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok())
            .filter(|target| target.to_string_lossy().contains("memfd:ucm-segment"))
            .count()
    };
    assert!(held(proc.pid()) > 0, "the test looks at the wrong descriptors");
    proc.kill();
    // A memfd lives only through descriptors and mappings, and has no name in any file system.
    assert_eq!(instance.files(), [""; 0]);
    let leftovers = std::fs::read_dir("/dev/shm").map(|dir| {
        dir.filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().contains("ucm-segment"))
            .count()
    });
    assert_eq!(leftovers.unwrap_or(0), 0);
}

/// A member has become another program: its sockets and its seat are given up, its pidfd is silent. So
/// looks a killed process, too, whose descriptors are closed while its last ones (of a device, of a ring)
/// still work: the kernel closes the cache's first.
/// Regression: nobody heard of it, and a joiner took the seat and cleared up after it.
/// Mutants: the joiner looks only at sockets and seats; it is not passed the process; nobody looks after
/// a member that hung up; a joiner of somebody else does not.
#[test]
fn d1_a_member_that_gave_up_its_seat_keeps_it_until_its_process_is_over() {
    let instance = Instance::new();
    let mut procs = [Proc::start(), Proc::start(), Proc::start(), Proc::start()];
    let [host, other, joiner, last] = &mut procs;
    host.enter(&instance.dir());
    let stay = other.enter(&instance.dir()).stay;
    host.expect("event joined 1");
    other.tell("exec");
    assert_eq!(host.expect("event vanished 1"), stay);
    assert_eq!(joiner.enter(&instance.dir()).seat, 2);
    assert_eq!(joiner.expect("event vanished 1"), stay);
    assert_eq!(joiner.ask("peers", "peers"), "0,1");
    let question = format!("liveness seat=1 stay={stay}");
    assert_eq!(joiner.ask(&question, "liveness"), "Alive");
    // The joiner needs nobody to hear of the end.
    host.leave();
    joiner.expect("event left 0");
    assert_eq!(last.enter(&instance.dir()).seat, 0);
    other.kill_now();
    assert_eq!(joiner.expect("event died 1"), stay);
    assert_eq!(last.expect("event died 1"), stay);
    assert_eq!(joiner.ask(&question, "liveness"), "Dead");
}

/// The same when the member that answers has not seen yet that the other one hung up.
/// Mutants: as above.
#[test]
fn d1_a_joiner_that_comes_at_that_very_moment_leaves_the_seat_alone() {
    let instance = Instance::new();
    let mut procs = [Proc::start(), Proc::start(), Proc::start()];
    let [host, other, joiner] = &mut procs;
    host.enter(&instance.dir());
    let stay = other.enter(&instance.dir()).stay;
    host.expect("event joined 1");
    host.signal(libc::SIGSTOP);
    other.tell("exec");
    // Its descriptors are closed when it is another program.
    while std::fs::read_to_string(format!("/proc/{}/comm", other.pid())).unwrap() != "sleep\n" {}
    joiner.begin_enter(&instance.dir(), "");
    host.signal(libc::SIGCONT);
    assert_eq!(joiner.entered().seat, 2);
    assert_eq!(joiner.ask("peers", "peers"), "0,1");
    other.kill_now();
    assert_eq!(joiner.expect("event died 1"), stay);
}

/// Another process knocks and knocks. A death is heard between any two handfuls of newcomers.
/// Regression: it was heard when nobody knocked any more.
/// Mutants: all newcomers are taken in one go; newcomers come before deaths.
#[cfg(feature = "failpoints")]
#[test]
fn d2_a_death_is_heard_while_others_knock() {
    let instance = Instance::new();
    let mut host = Proc::start_armed("answer.accept.before:4:stop,answer.accept.before:70:stop");
    host.enter(&instance.dir());
    // The first and the second knock end with a look that finds nobody.
    let mut victim = Proc::start();
    let stay = victim.enter(&instance.dir()).stay;
    host.expect("event joined 1");
    let mut crowd = Proc::start();
    crowd.tell(&format!("crowd dir={} seat=0 count=2000", instance.dir().display()));
    host.until_stopped();
    crowd.expect("crowded");
    victim.kill_now();
    victim.until_over();
    host.signal(libc::SIGCONT);
    assert_eq!(host.expect("event died 1"), stay);
    host.until_stopped();
}

/// The program closes all descriptors, the cache's among them: leaving does not wait for a thread that
/// cannot hear, whether or not the member has noticed. Mutants: leaving waits for the steward; a descriptor
/// that is none is overlooked.
#[test]
fn d1_a_member_whose_descriptors_were_closed_is_poisoned_and_can_go() {
    let instance = Instance::new();
    let mut lone = Proc::start();
    lone.enter(&instance.dir());
    lone.ask("rob", "robbed");
    assert!(lone.ask("check-robbed", "check").contains("Ok"), "nothing has woken it");
    lone.ask("leave-robbed", "gone");

    let instance = Instance::new();
    let (mut lone, mut next) = (Proc::start(), Proc::start());
    lone.enter(&instance.dir());
    lone.ask("rob", "robbed");
    // Its listener lives as long as it sleeps there; its locks do not.
    assert!(next.enter(&instance.dir()).created);
    lone.until_robbed();
    lone.ask("leave-robbed", "gone");

    let instance = Instance::new();
    let (mut robbed, mut other) = (Proc::start(), Proc::start());
    robbed.enter(&instance.dir());
    other.enter(&instance.dir());
    robbed.ask("rob", "robbed");
    // What it sleeps on still is the other one's process.
    other.kill();
    robbed.until_robbed();
    robbed.ask("leave-robbed", "gone");
}
