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
