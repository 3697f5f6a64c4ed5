//! D9: fork without exec.

use crate::child::say;
use crate::parent::{Instance, Proc};

/// In a child: forks; the grandchild looks at its copy of the stay, drops it, and goes on living until
/// its standard input is closed.
pub(crate) fn fork_in_child<T>(stay: T, look: impl FnOnce(&T) -> String) {
    // SAFETY: the grandchild is single-threaded and uses only what works after fork here: looking at
    // and dropping its copies, writing to a pipe, reading from a pipe.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let seen = look(&stay);
        drop(stay);
        say(&format!("forked {seen}"));
        let mut byte = [0u8; 1];
        loop {
            let stdin = std::io::stdin();
            match rustix::io::read(std::os::fd::AsFd::as_fd(&stdin), &mut byte) {
                Ok(0) | Err(_) => break,
                Ok(_) => {}
            }
        }
        // SAFETY: ends the grandchild without running anything of its parent.
        unsafe { libc::_exit(0) };
    }
    // The parent keeps its stay, and leaves reading the commands to the grandchild.
    let _stay = std::mem::ManuallyDrop::new(stay);
    loop {
        std::thread::park();
    }
}

#[test]
fn d9_a_forked_child_cannot_leave_for_its_parent_nor_keep_it_alive() {
    let instance = Instance::new();
    let mut observer = Proc::start();
    observer.enter(&instance.dir());
    let mut parent = Proc::start();
    let entered = parent.enter(&instance.dir());
    // What the grandchild inherited answers by refusing, and its memory is not mapped there.
    let seen = parent.ask("fork", "forked");
    assert_eq!(seen, "maps=0 slot=None read=Forked check=Forked peers=0 poke=Forked");
    // The grandchild dropped its copy of the membership: nobody may have heard a leave.
    assert!(observer.events().iter().all(|event| !event.starts_with("left")));
    assert_eq!(observer.ask("alive seat=1", "alive"), "true");
    // A joiner is still answered by the parent's steward.
    let mut joiner = Proc::start();
    assert!(!joiner.enter(&instance.dir()).created);
    joiner.leave();
    // The parent dies, the grandchild lives on: the death is seen at once.
    parent.kill_now();
    assert_eq!(observer.expect("event died"), format!("1 {}", entered.stay));
}

#[test]
fn d9_when_all_members_are_dead_a_forked_child_does_not_hold_the_cache() {
    let instance = Instance::new();
    let mut parent = Proc::start();
    let boot = parent.enter(&instance.dir()).boot;
    parent.ask("fork", "forked");
    parent.kill_now();
    // The grandchild inherited listener, lock and memory; none of them may count.
    let mut next = Proc::start();
    let entered = next.enter(&instance.dir());
    assert!(entered.created);
    assert_ne!(entered.boot, boot);
}

/// Regression: the guard needed a descriptor when the process entered for the first time; without one, it
/// was off for ever.
/// Mutant: the dead descriptor is made before there is room for it.
#[test]
fn d9_a_process_that_was_out_of_descriptors_once_is_guarded_all_the_same() {
    let instance = Instance::new();
    let mut parent = Proc::start();
    parent.ask("nofile spare=10", "nofile");
    // Enough to open the directory.
    parent.ask("fill leave=1", "filled");
    let text = parent.refused(&instance.dir(), "");
    assert!(text.contains("kind=DescriptorLimit"), "{text}");
    parent.ask("nofile spare=200", "nofile");
    let boot = parent.enter(&instance.dir()).boot;
    // Nor is there one when it forks.
    parent.ask("fill leave=0", "filled");
    parent.ask("fork", "forked");
    parent.kill_now();
    let mut next = Proc::start();
    let entered = next.enter(&instance.dir());
    assert!(entered.created);
    assert_ne!(entered.boot, boot);
}
