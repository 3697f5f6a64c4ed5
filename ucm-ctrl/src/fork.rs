//! Knows whether this process is the one that joined, or a child forked from it.
//!
//! **Invariant:** a forked child neither touches the control region nor releases anything of its
//! parent: the flag below lives in a page that the kernel zeroes in children.

#[cfg(not(ucm_loom))]
mod imp {
    use std::sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    };

    use rustix::mm::{Advice, MapFlags, ProtFlags};

    static FLAG: OnceLock<Option<&'static AtomicU32>> = OnceLock::new();

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
        let flag = unsafe { &*raw.cast::<AtomicU32>() };
        flag.store(1, Ordering::Relaxed);
        Some(flag)
    }

    /// Call once before the first use of shared memory.
    pub(crate) fn prepare() {
        FLAG.get_or_init(make);
    }

    /// False in a child made by fork after [`prepare`].
    pub(crate) fn is_original() -> bool {
        match FLAG.get() {
            Some(Some(flag)) => flag.load(Ordering::Relaxed) != 0,
            // A kernel without the advice (before 4.14): nothing can be told.
            _ => true,
        }
    }
}

#[cfg(ucm_loom)]
mod imp {
    pub(crate) fn prepare() {}

    pub(crate) fn is_original() -> bool {
        true
    }
}

pub(crate) use imp::{is_original, prepare};
