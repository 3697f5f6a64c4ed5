//! Knows whether this process is the one that mapped a region, or a child forked from it.
//!
//! A child gets the parent's handles as a copy, but none of its rights: it must neither release
//! pins nor count as alive. It may attach to the cache and join for itself, though.
//!
//! **Invariant:** the epoch lives in a page that the kernel zeroes in children, so no epoch of the
//! parent is ever the current one in a child.

#[cfg(not(ucm_loom))]
mod imp {
    use std::sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    };

    use rustix::mm::{Advice, MapFlags, ProtFlags};

    /// Current epoch of this process: 0 right after a fork.
    static EPOCH: OnceLock<Option<&'static AtomicU32>> = OnceLock::new();
    /// Last epoch given out in this process or its parents; copied by fork like all memory.
    static LAST: AtomicU32 = AtomicU32::new(0);

    fn make() -> Option<&'static AtomicU32> {
        const PAGE: usize = 4096;
        // SAFETY: a fresh private mapping at an address of the kernel's choice.
        let raw = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                PAGE,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .ok()?;
        // SAFETY: advice on the page just mapped.
        unsafe { rustix::mm::madvise(raw, PAGE, Advice::LinuxWipeOnFork) }.ok()?;
        // SAFETY: the page is mapped for ever, zeroed, aligned, and only used as this atomic.
        Some(unsafe { &*raw.cast::<AtomicU32>() })
    }

    /// The epoch of this process, to be remembered with a mapping.
    pub(crate) fn current() -> u32 {
        // A kernel without the advice (before 4.14): nothing can be told, all have epoch 0.
        let Some(epoch) = EPOCH.get_or_init(make) else { return 0 };
        if epoch.load(Ordering::SeqCst) == 0 {
            let new = LAST.fetch_add(1, Ordering::SeqCst) + 1;
            // A second thread may have been faster; its epoch is as good.
            let _ = epoch.compare_exchange(0, new, Ordering::SeqCst, Ordering::SeqCst);
        }
        epoch.load(Ordering::SeqCst)
    }

    /// False in a child forked since [`current`] gave out `epoch`.
    pub(crate) fn is_still(epoch: u32) -> bool {
        match EPOCH.get() {
            Some(Some(now)) => now.load(Ordering::Relaxed) == epoch,
            _ => true,
        }
    }
}

#[cfg(ucm_loom)]
mod imp {
    pub(crate) fn current() -> u32 {
        0
    }

    pub(crate) fn is_still(_: u32) -> bool {
        true
    }
}

pub(crate) use imp::{current, is_still};

#[cfg(all(test, not(ucm_loom)))]
mod tests {
    use std::{
        panic::{AssertUnwindSafe, catch_unwind},
        sync::mpsc,
        thread,
    };

    use crate::{
        Acquired, BlockId, Control, FailKind, Geometry, Key, MemberSpec, Phase, PoolId,
        bucket::Patience,
    };

    /// Regression: the child's copy of a member detached the thread that has the number of the parent's
    /// `ucm-leftovers` in the child: one of its own.
    #[test]
    fn d9_a_childs_copy_of_a_member_leaves_the_childs_threads_alone() {
        let control = Control::private(&Geometry::single(1, 0, 1, 4096)).unwrap();
        let pool = || control.join(MemberSpec::rank(0, 1)).unwrap().pool(PoolId(0)).unwrap();
        let (stopped, resting) = (pool(), pool());
        let key = Key::new(BlockId::from_halves(1, 2), 0);
        let Acquired::Owner(fill) = resting.acquire(&key).unwrap() else { panic!() };
        let tables = control.region.pool(0).unwrap();
        let held = tables.lock(&stopped.member, resting.raw(&key).hashed, Patience::Brief);
        let token = fill.start_io();
        fill.abandon_draining(FailKind::Io);
        drop(token);
        assert!(resting.member.has_leftovers());
        // SAFETY: the child starts threads, which works after fork with this libc, drops its copies
        // and ends with `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends the child should it hang.
            unsafe { libc::alarm(60) };
            let (goes_on, waits) = mpsc::channel::<()>();
            let waits = std::sync::Arc::new(std::sync::Mutex::new(waits));
            let threads = Vec::from_iter((0..8).map(|_| {
                let waits = waits.clone();
                thread::spawn(move || drop(waits.lock().map(|waits| waits.recv())))
            }));
            drop(resting);
            drop(goes_on);
            let all = || threads.into_iter().all(|thread| thread.join().is_ok());
            let joined = catch_unwind(AssertUnwindSafe(all));
            // SAFETY: ends the child without running anything of its parent.
            unsafe { libc::_exit(i32::from(!matches!(joined, Ok(true)))) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above, with a valid pointer.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
        drop(held);
        // By this thread or by the one that tries again and again.
        while !resting.member.retry_leftovers() {
            thread::yield_now();
        }
        assert_eq!(tables.slots[0].load().phase(), Phase::Free);
    }
}
