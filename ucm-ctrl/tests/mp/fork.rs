//! D9: fork without exec.
//!
//! **Invariant:** a forked child changes nothing in its parent's name; for itself it may join.

use ucm_ctrl::{Acquired, Control, ErrorKind, Geometry, MemberId};

use crate::{
    child::{hear, say},
    key, own,
    parent::{Proc, Shared},
    rank,
};

/// In a child of the test: forks a grandchild that tries everything with its copies.
pub(crate) fn forker(control: &Control) {
    let (member, pool) = rank(control);
    let pin = own(&pool, &key(1)).publish().unwrap();
    let fill = own(&pool, &key(2));
    let token = fill.start_io();
    let fills = [own(&pool, &key(3)), own(&pool, &key(4))];
    let lease = match pool.lease(&[key(1)], 1, std::time::Instant::now() + crate::WATCHDOG) {
        Ok(ucm_ctrl::LeaseOutcome::Leased(lease)) => lease,
        other => panic!("{other:?}"),
    };
    // The region's memory is open in no process but the parent's.
    assert!(control.fd().unwrap().is_none());
    let region = std::env::var("UCM_MP_REGION").unwrap();
    // SAFETY: the grandchild uses only what works after fork with this libc: its copies, memory,
    // files and pipes; it starts no thread.
    let grandchild = unsafe { libc::fork() };
    if grandchild == 0 {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        say(&format!("mapped {}", maps.matches("memfd:ucm-ctrl").count()));
        let refused = pool.acquire(&key(1)).unwrap_err();
        say(&format!("refused {}", refused.kind() == ErrorKind::Fenced));
        member.doorbell().ring();
        say(&format!("reaped {}", member.reap(MemberId(0), None).done));
        lease.release();
        drop(pin);
        drop(token);
        say(&format!("published {}", fill.publish().is_ok()));
        let [dropped, failed] = fills;
        drop(dropped);
        failed.fail(ucm_ctrl::FailKind::Io);
        let looked = (
            control.inspect().members.len(),
            control.statistics().owners,
            control.inspect_members().len(),
        );
        say(&format!("looked {looked:?}"));
        let join = control.join(ucm_ctrl::MemberSpec::rank(0, 1)).map(|_| ()).unwrap_err();
        say(&format!("rejoined {:?}", join.kind()));
        drop((pool, member));
        say("dropped");
        // On its own account it is as good as anybody.
        let own_control = crate::attach(&region);
        let (own_member, own_pool) = rank(&own_control);
        let hit = matches!(own_pool.acquire(&key(1)).unwrap(), Acquired::Hit(_));
        say(&format!("joined {} {hit}", own_member.id().0));
        drop((own_pool, own_member, own_control));
        say("left");
        while hear().is_some() {}
        // SAFETY: ends the grandchild without running anything of its parent.
        unsafe { libc::_exit(0) };
    }
    // The grandchild listens to the commands; this process only keeps what it has.
    let _kept = (member, pool, pin, fill, fills, token, lease);
    loop {
        std::thread::park();
    }
}

#[test]
fn d9_a_forked_child_releases_nothing_and_keeps_nobody_alive() {
    let control = Control::create(&Geometry::single(4, 0, 1, 4096), [7; 16]).unwrap();
    let shared = Shared::of(&control);
    let (member, pool) = rank(&control);
    let mut forker = Proc::start("forker", &shared, &[]);
    for said in [
        "mapped 0",
        "refused true",
        "reaped false",
        "published false",
        "looked (0, 0, 0)",
        "rejoined Fenced",
        "dropped",
    ] {
        forker.expect(said);
    }
    forker.expect("joined 2 true");
    forker.expect("left");
    // The parent's pins, fill and seat are untouched.
    let seen = control.inspect();
    assert_eq!(seen.problems, Vec::<String>::new());
    assert_eq!((seen.pools[0].filling, seen.pools[0].pinned), (3, 4));
    assert_eq!(seen.members.iter().map(|m| m.index).collect::<Vec<_>>(), [0, 1]);
    assert!(matches!(pool.acquire(&key(2)).unwrap(), Acquired::Waiter(_)));
    // Its death is proven while the grandchild lives on (it holds our pipe).
    forker.kill();
    let reaped = member.reap(MemberId(1), None);
    assert_eq!((reaped.done, reaped.slots, reaped.pins), (true, 3, 4));
    drop(own(&pool, &key(2)));
    assert_eq!(control.inspect().pools[0].pinned, 0);
}
