//! Entering: who creates, who joins, who is refused.

use std::time::Duration;

use crate::child::say;
use crate::parent::{Instance, Proc, is_root, skip};

#[test]
fn the_first_creates_the_others_join_and_all_see_the_same_bytes() {
    let instance = Instance::new();
    let mut procs = [Proc::start(), Proc::start(), Proc::start()];
    let entered = procs.each_mut().map(|proc| proc.enter(&instance.dir()));
    assert_eq!(entered.each_ref().map(|e| e.created), [true, false, false]);
    assert_eq!(entered.each_ref().map(|e| e.seat), [0, 1, 2]);
    assert!(entered.iter().all(|e| e.boot == entered[0].boot));
    for (proc, slot) in procs.iter_mut().zip([3, 7, 15]) {
        proc.write(slot, u64::from(slot) * 1_000_003);
    }
    for proc in &mut procs {
        for slot in [3, 7, 15] {
            assert_eq!(proc.read(slot), u64::from(slot) * 1_000_003);
        }
    }
    assert_eq!(instance.files(), [""; 0]);
    let [mut first, second, third] = procs;
    assert_eq!(first.ask("peers", "peers"), "1,2");
    second.finish();
    third.finish();
}

#[test]
fn d8_another_layout_is_refused_with_both_versions_named_and_replaces_it_when_all_are_dead() {
    let instance = Instance::new();
    let mut old = Proc::start();
    old.enter_with(&instance.dir(), "version=7");
    let mut new = Proc::start();
    let text = new.refused(&instance.dir(), "version=8");
    assert!(text.contains("kind=Layout"), "{text}");
    for word in ["layout version 7", "test-layout-7", "layout version 8", "test-layout-8"] {
        assert!(text.contains(word), "'{word}' is missing: {text}");
    }
    assert!(old.ask("stats", "stats").contains("refused_layout: 1"));
    old.kill();
    assert!(new.enter_with(&instance.dir(), "version=8").created);
}

#[test]
fn d12_a_scheduler_waits_until_somebody_creates() {
    let instance = Instance::new();
    let mut scheduler = Proc::start();
    scheduler.begin_enter(&instance.dir(), "absent=wait unmapped=1");
    let mut rank = Proc::start();
    let created = rank.enter(&instance.dir());
    assert!(created.created);
    let joined = scheduler.entered();
    assert!(!joined.created);
    assert_eq!(joined.boot, created.boot);
}

#[test]
fn d12_a_scheduler_may_create_and_the_rank_joins_it() {
    let instance = Instance::new();
    let mut scheduler = Proc::start();
    assert!(scheduler.enter_with(&instance.dir(), "absent=create unmapped=1").created);
    let maps = scheduler.ask("resources", "resources");
    assert!(maps.contains("maps: 0"), "{maps}");
    let mut rank = Proc::start();
    assert!(!rank.enter_with(&instance.dir(), "absent=wait").created);
}

#[test]
fn d12_waiting_ends_at_its_deadline_with_a_typed_error() {
    let instance = Instance::new();
    let mut scheduler = Proc::start();
    let text = scheduler.refused(&instance.dir(), "absent=wait deadline=80");
    assert!(text.contains("kind=Deadline") && text.contains("nobody created"), "{text}");
    assert!(text.contains(&instance.dir().display().to_string()), "{text}");
}

#[test]
fn a_seat_that_is_taken_is_a_typed_error_and_the_record_is_given_back() {
    let instance = Instance::new();
    let mut first = Proc::start();
    first.enter(&instance.dir());
    let mut second = Proc::start();
    for seat in [0, 128] {
        let text = second.refused(&instance.dir(), &format!("seat={seat}"));
        assert!(text.contains("kind=Seat") && text.contains("abandoned=1"), "{text}");
    }
    assert_eq!(second.enter(&instance.dir()).seat, 1);
}

#[test]
fn many_descriptors_are_passed_in_pieces() {
    let instance = Instance::new();
    let mut first = Proc::start();
    // 400 segments of one slot and 250 more: four messages, and a geometry in several pieces.
    let shape = "slots=400 segment=4096 fds=250";
    first.enter_with(&instance.dir(), shape);
    first.write(399, 42);
    let mut second = Proc::start();
    assert!(!second.enter_with(&instance.dir(), shape).created);
    assert_eq!(second.read(399), 42);
}

#[test]
fn a18_too_few_descriptors_is_a_typed_error_that_can_be_retried_and_leaks_nothing() {
    let instance = Instance::new();
    let mut member = Proc::start();
    let shape = "slots=3 segment=4096";
    member.enter_with(&instance.dir(), shape);
    let mut joiner = Proc::start();
    let open = joiner.ask("resources", "resources");
    let mut refusals = 0;
    for spare in 0.. {
        assert!(spare < 40, "40 spare descriptors do not suffice");
        joiner.ask(&format!("nofile spare={spare}"), "nofile");
        joiner.begin_enter(&instance.dir(), shape);
        let Some(text) = joiner.refused_or_entered() else { break };
        assert!(text.contains("kind=DescriptorLimit"), "spare {spare}: {text}");
        assert!(text.contains("RLIMIT_NOFILE"), "spare {spare}: {text}");
        joiner.ask("nofile spare=200", "nofile");
        assert_eq!(joiner.ask("resources", "resources"), open, "spare {spare}: leak");
        refusals += 1;
    }
    // Directory, socket, pidfd, three descriptors, …: each missing one was met.
    assert!(refusals >= 6, "only {refusals} limits were met");
    joiner.leave();
    joiner.ask("nofile spare=200", "nofile");
    assert_eq!(joiner.ask("resources", "resources"), open);
}

#[test]
fn a18_a_thousand_failed_attempts_leak_nothing_on_either_side() {
    let instance = Instance::new();
    let mut member = Proc::start();
    let shape = "slots=3 segment=4096";
    member.enter_with(&instance.dir(), shape);
    let mut joiner = Proc::start();
    joiner.enter_with(&instance.dir(), shape);
    joiner.leave();
    member.expect("event left");
    let before = member.ask("resources", "resources");
    // Directory, socket and pidfd fit, and one or two of the three segments.
    joiner.ask("nofile spare=5", "nofile");
    let text =
        joiner.ask(&format!("cycle dir={} count=1000 {shape}", instance.dir().display()), "cycled");
    assert!(text.contains("failures=1001") && text.contains("same=true"), "{text}");
    joiner.ask("nofile spare=200", "nofile");
    joiner.enter_with(&instance.dir(), shape);
    joiner.leave();
    // It may still be hearing of the last ones.
    member.until_resources(&before);
    assert!(member.ask("check", "check").contains("ok"));
}

#[test]
fn d10_a_joiner_of_another_user_is_refused_by_the_directory_and_by_credentials() {
    if !is_root() {
        return skip("d10: needs root to start a process of another user");
    }
    let instance = Instance::new();
    let mut member = Proc::start();
    member.enter(&instance.dir());
    // The other user must be able to execute a copy of this program.
    let public = tempfile::Builder::new()
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .tempdir()
        .unwrap();
    let exe = public.path().join("mp");
    std::fs::copy(std::env::current_exe().unwrap(), &exe).unwrap();
    let mut stranger = Proc::start_as(65_534, &exe);
    let text = stranger.refused(&instance.dir(), "");
    assert!(text.contains("kind=Denied"), "{text}");
    assert!(text.contains(&instance.dir().display().to_string()), "{text}");
    // Past the directory: straight to the socket, whose abstract name anybody can guess.
    use std::os::unix::fs::MetadataExt;
    let meta = std::fs::metadata(instance.dir()).unwrap();
    let name = format!("ucm-{:x}-{:x}-0", meta.dev(), meta.ino());
    let reply = stranger.ask(&format!("knock dir={name} seat=0"), "knocked");
    // Magic, kind 3 (refuse), reason 1 (credentials).
    assert!(reply.starts_with("75636d520301"), "{reply}");
    assert!(member.ask("stats", "stats").contains("refused_credentials: 1"));
    assert_eq!(member.ask("peers", "peers"), "");
}

/// Child: connects to an abstract name and reports the first reply in hex.
pub(crate) fn knock_in_child(name: &str, _seat: u16) {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let flags = SocketFlags::CLOEXEC;
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    rustix::net::connect(&socket, &address).unwrap();
    let mut bytes = [0; 4096];
    let len = rustix::io::read(&socket, &mut bytes).unwrap();
    let hex: String = bytes[..len].iter().map(|byte| format!("{byte:02x}")).collect();
    // Then the connection must be closed.
    assert_eq!(rustix::io::read(&socket, &mut bytes).unwrap(), 0);
    say(&format!("knocked {hex}"));
}

#[test]
fn another_network_namespace_is_a_typed_error_and_files_work_across_it() {
    if !is_root() {
        return skip("network namespace: needs root");
    }
    let instance = Instance::new();
    let mut member = Proc::start();
    let created = member.enter(&instance.dir());
    let mut far = Proc::start();
    if far.ask("net", "net") != "0" {
        return skip("network namespace: unshare(CLONE_NEWNET) is not allowed here");
    }
    let text = far.refused(&instance.dir(), "");
    assert!(text.contains("kind=Unreachable") && text.contains("Files"), "{text}");
    // The live cache is as it was.
    let mut near = Proc::start();
    assert_eq!(near.enter(&instance.dir()).boot, created.boot);

    let other = Instance::new();
    let mut member = Proc::start();
    let created = member.enter_with(&other.dir(), "sockets=files");
    member.write(1, 77);
    assert_eq!(far.enter_with(&other.dir(), "sockets=files").boot, created.boot);
    assert_eq!(far.read(1), 77);
}

#[test]
fn two_instances_never_meet() {
    let (x, y) = (Instance::new(), Instance::new());
    let mut a = Proc::start();
    let mut b = Proc::start();
    let first = a.enter(&x.dir());
    let second = b.enter(&y.dir());
    assert!(first.created && second.created);
    assert_ne!(first.boot, second.boot);
    a.write(0, 1);
    b.write(0, 2);
    assert_eq!((a.read(0), b.read(0)), (1, 2));
}

/// Watchdog for whole tests that loop.
pub(crate) const ROUND_LIMIT: Duration = Duration::from_secs(120);

#[test]
fn socket_files_work_below_a_path_too_long_for_a_socket_address() {
    let instance = Instance::new();
    let dir = instance.dir().join("x".repeat(200)).join("y".repeat(200));
    let mut first = Proc::start();
    let created = first.enter_with(&dir, "sockets=files");
    let mut second = Proc::start();
    assert_eq!(second.enter_with(&dir, "sockets=files").boot, created.boot);
    assert!(dir.join("seat-1.sock").exists());
    second.leave();
    assert!(!dir.join("seat-1.sock").exists());
}

/// Somebody cleans up temporary files. Regression: the next joiner took the seat of a living member
/// without a name for free, and cleared up after it; and they never knew each other.
/// Mutants: the seat's lock is not asked for; not taken; nobody tells the member; it does not put its name
/// back; the joiner sits down all the same.
#[test]
fn a04_a_member_whose_socket_file_is_gone_keeps_its_seat_and_puts_it_back() {
    let instance = Instance::new();
    let mut procs = [Proc::start(), Proc::start(), Proc::start(), Proc::start()];
    let [nameless, asked, newcomer, last] = &mut procs;
    let enter = |proc: &mut Proc| proc.enter_with(&instance.dir(), "sockets=files").seat;
    assert_eq!([enter(nameless), enter(asked)], [0, 1]);
    let file = instance.dir().join("seat-0.sock");
    std::fs::remove_file(&file).unwrap();
    // While it is stopped, it cannot.
    nameless.signal(libc::SIGSTOP);
    let text = newcomer.refused(&instance.dir(), "sockets=files deadline=300");
    assert!(text.contains("kind=Deadline") && text.contains("seat 0"), "{text}");
    nameless.signal(libc::SIGCONT);
    assert_eq!(enter(newcomer), 2, "seat 0 is taken");
    assert!(file.exists());
    nameless.expect("event joined 2");
    assert_eq!(nameless.ask("peers", "peers"), "1,2");
    assert_eq!(newcomer.ask("peers", "peers"), "0,1");
    // They need nobody else to hear of each other's end. Then the seat is free.
    asked.leave();
    newcomer.expect("event left 1");
    nameless.kill_now();
    assert!(newcomer.expect("event died").starts_with("0 "));
    assert_eq!(enter(last), 0);
}

/// Regression: the joiner sat down through another member, and the two never knew each other.
/// Mutants: a refusal by one of several is ignored; it is not tried again.
#[test]
fn a18_a_member_out_of_descriptors_and_a_joiner_know_each_other_before_it_sits() {
    let instance = Instance::new();
    let mut procs = [Proc::start(), Proc::start(), Proc::start()];
    let [full, other, joiner] = &mut procs;
    full.enter(&instance.dir());
    other.enter(&instance.dir());
    full.expect("event joined 1");
    full.ask("nofile spare=0", "nofile");
    let text = joiner.refused(&instance.dir(), "deadline=2000");
    assert!(text.contains("kind=DescriptorLimit"), "{text}");
    assert!(text.contains(&full.pid().to_string()), "{text}");
    joiner.begin_enter(&instance.dir(), "");
    let refused = |text: String| !text.contains("refused_descriptors: 0");
    assert!(refused(full.ask("stats", "stats")));
    full.ask("nofile spare=200", "nofile");
    let seat = joiner.entered().seat;
    assert_eq!(full.expect(&format!("event joined {seat}")).len(), 32);
    other.leave();
    joiner.expect("event left 1");
    assert_eq!(joiner.ask("peers", "peers"), "0");
    full.kill_now();
    joiner.expect("event died 0");
}

/// The member was stopped while the joiner sat down, and has no descriptor for it when it goes on.
/// Mutant: a member that refuses later is not greeted again.
#[test]
fn a18_a_member_that_goes_on_without_descriptors_hears_of_the_joiner_in_the_end() {
    let instance = Instance::new();
    let mut procs = [Proc::start(), Proc::start(), Proc::start()];
    let [full, other, joiner] = &mut procs;
    full.enter(&instance.dir());
    other.enter(&instance.dir());
    full.expect("event joined 1");
    full.ask("nofile spare=0", "nofile");
    full.signal(libc::SIGSTOP);
    let joined = joiner.enter(&instance.dir());
    full.signal(libc::SIGCONT);
    while full.ask("stats", "stats").contains("refused_descriptors: 0") {}
    full.ask("nofile spare=200", "nofile");
    assert_eq!(full.expect("event joined 2"), joined.stay);
    other.leave();
    full.expect("event left 1");
    procs[2].kill_now();
    assert_eq!(procs[0].expect("event died 2"), joined.stay);
}

/// Regression: the joiner sat down, and the stopped member never heard of it.
/// Mutant: a full queue is no reason to wait.
#[test]
fn w6_a_joiner_waits_for_a_stopped_member_whose_queue_is_full() {
    let instance = Instance::new();
    let mut procs = [Proc::start(), Proc::start(), Proc::start(), Proc::start()];
    let [stopped, other, joiner, crowd] = &mut procs;
    stopped.enter(&instance.dir());
    other.enter(&instance.dir());
    stopped.signal(libc::SIGSTOP);
    let many = crowd.ask(&format!("crowd dir={} seat=0", instance.dir().display()), "crowded");
    assert!(many.parse::<u32>().unwrap() > 100, "{many}");
    let text = joiner.refused(&instance.dir(), "deadline=300");
    assert!(text.contains("kind=Deadline") && text.contains("seat 0"), "{text}");
    joiner.begin_enter(&instance.dir(), "");
    stopped.signal(libc::SIGCONT);
    let joined = joiner.entered();
    assert_eq!(stopped.expect("event joined 2"), joined.stay);
    assert_eq!(stopped.ask("peers", "peers"), "1,2");
}

/// Others of the same user knock and say nothing while a joiner has its offer and is slow.
/// Regression: it had to give way, and the member never heard of it.
/// Mutant: the oldest connection gives way, whoever it is.
#[cfg(feature = "failpoints")]
#[test]
fn a05_a_joiner_that_has_been_welcomed_gives_way_to_nobody() {
    let instance = Instance::new();
    let mut member = Proc::start();
    member.enter(&instance.dir());
    let mut joiner = Proc::start_armed("enter.meet.after:1:stop");
    joiner.begin_enter(&instance.dir(), "");
    joiner.until_stopped();
    let mut crowd = Proc::start();
    let order = format!("crowd dir={} seat=0 count=100 stay=1", instance.dir().display());
    assert_eq!(crowd.ask(&order, "crowded"), "100");
    joiner.signal(libc::SIGCONT);
    assert_eq!(member.expect("event joined 1"), joiner.entered().stay);
}

/// A member leaves, and meanwhile somebody sits down whom it never takes in.
/// Regression: the newcomer heard of no goodbye, and took the member for one that had become another program.
/// Mutant: who waits in the queue is not told.
#[cfg(feature = "failpoints")]
#[test]
fn d5_a_leave_is_heard_by_those_who_wait_at_the_door() {
    let instance = Instance::new();
    let mut leaver = Proc::start_armed("leave.name.after:1:stop");
    let stay = leaver.enter(&instance.dir()).stay;
    let mut member = Proc::start();
    member.enter(&instance.dir());
    leaver.tell("leave");
    leaver.until_stopped();
    let mut joiner = Proc::start();
    assert_eq!(joiner.enter(&instance.dir()).seat, 2);
    leaver.signal(libc::SIGCONT);
    for proc in [&mut member, &mut joiner] {
        assert_eq!(proc.expect("event left 0"), stay);
    }
    leaver.expect("left");
    assert!(joiner.events().iter().all(|event| !event.starts_with("vanished")));
}

/// The only member is stopped, and its queue is full.
/// Regression: after two seconds it was taken for one in another network namespace, for good.
/// Mutant: a full queue is no reason.
#[test]
fn a05_a_single_stopped_member_whose_queue_is_full_is_named() {
    let instance = Instance::new();
    let mut member = Proc::start();
    let created = member.enter(&instance.dir());
    member.signal(libc::SIGSTOP);
    let mut crowd = Proc::start();
    crowd.ask(&format!("crowd dir={} seat=0", instance.dir().display()), "crowded");
    let mut joiner = Proc::start();
    let text = joiner.refused(&instance.dir(), "deadline=2500");
    assert!(text.contains("kind=Deadline") && text.contains("seat 0"), "{text}");
    crowd.kill();
    member.signal(libc::SIGCONT);
    assert_eq!(joiner.enter(&instance.dir()).boot, created.boot);
}
