//! Device memory, pinned host memory, handles for other processes.
//!
//! **Invariant:** device memory is a memfd mapped once, so that its handle names real bytes in any
//! process; its address is unmapped only by the call that frees it.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::{
    ALREADY_PINNED, Answer, INVALID_CONTEXT, INVALID_VALUE, NOT_PINNED, OUT_OF_MEMORY, control,
    stream,
};

struct Allocation {
    len: usize,
    mapped: usize,
    fd: i32,
    imported: bool,
}

#[derive(Default)]
struct All {
    device: BTreeMap<usize, Allocation>,
    host: BTreeMap<usize, usize>,
    pins: BTreeMap<usize, usize>,
}

static ALL: Mutex<Option<All>> = Mutex::new(None);

const PAGE: usize = 4096;
const HANDLE_MAGIC: u32 = 0x4650_4721;

fn with<T>(f: impl FnOnce(&mut All) -> T) -> T {
    let mut all: MutexGuard<'_, _> = ALL.lock().unwrap_or_else(PoisonError::into_inner);
    f(all.get_or_insert_with(All::default))
}

pub(crate) fn alloc(len: usize) -> Result<usize, i32> {
    if len == 0 {
        return Err(INVALID_VALUE);
    }
    let mapped = len.checked_next_multiple_of(PAGE).ok_or(OUT_OF_MEMORY)?;
    unsafe {
        let fd = libc::memfd_create(c"fake-gpu".as_ptr(), libc::MFD_CLOEXEC);
        let size = i64::try_from(mapped).map_err(|_| OUT_OF_MEMORY)?;
        if fd < 0 || libc::ftruncate(fd, size) != 0 {
            return Err(OUT_OF_MEMORY);
        }
        map(fd, len, mapped, false)
    }
}

unsafe fn map(fd: i32, len: usize, mapped: usize, imported: bool) -> Result<usize, i32> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let at = libc::mmap(std::ptr::null_mut(), mapped, protection, libc::MAP_SHARED, fd, 0);
    if at == libc::MAP_FAILED {
        libc::close(fd);
        return Err(OUT_OF_MEMORY);
    }
    let at = at as usize;
    with(|all| all.device.insert(at, Allocation { len, mapped, fd, imported }));
    Ok(at)
}

pub(crate) fn free(at: usize, imported: bool) -> Answer {
    let found = with(|all| match all.device.get(&at) {
        Some(one) if one.imported == imported => all.device.remove(&at),
        _ => None,
    });
    let Some(one) = found else {
        control::violation();
        return Err(INVALID_VALUE);
    };
    if stream::touches((at, one.len)) {
        // Kept mapped: the test fails by this count, not by a fault in a worker.
        control::violation();
        return Ok(());
    }
    unsafe {
        libc::munmap(at as *mut libc::c_void, one.mapped);
        libc::close(one.fd);
    }
    Ok(())
}

pub(crate) fn range(at: usize) -> Result<(usize, usize), i32> {
    with(|all| {
        let (base, one) = all.device.range(..=at).next_back().ok_or(INVALID_VALUE)?;
        if at < base + one.len { Ok((*base, one.len)) } else { Err(INVALID_VALUE) }
    })
}

pub(crate) fn host_alloc(len: usize) -> Result<usize, i32> {
    let layout = std::alloc::Layout::from_size_align(len.max(1), 64).map_err(|_| OUT_OF_MEMORY)?;
    let at = unsafe { std::alloc::alloc_zeroed(layout) } as usize;
    with(|all| all.host.insert(at, len));
    Ok(at)
}

pub(crate) fn host_free(at: usize) -> Answer {
    let Some(len) = with(|all| all.host.remove(&at)) else {
        control::violation();
        return Err(INVALID_VALUE);
    };
    if stream::touches((at, len)) {
        control::violation();
        return Ok(());
    }
    let layout = std::alloc::Layout::from_size_align(len.max(1), 64).map_err(|_| INVALID_VALUE)?;
    unsafe { std::alloc::dealloc(at as *mut u8, layout) };
    Ok(())
}

pub(crate) fn pin(at: usize, len: usize) -> Answer {
    if len == 0 {
        return Err(INVALID_VALUE);
    }
    let pages = |at: usize, len: usize| (at / PAGE, (at + len - 1) / PAGE);
    let (first, last) = pages(at, len);
    with(|all| {
        let meets = all.pins.iter().any(|(&other, &other_len)| {
            let (other_first, other_last) = pages(other, other_len);
            first <= other_last && other_first <= last
        });
        if meets {
            return Err(ALREADY_PINNED);
        }
        all.pins.insert(at, len);
        Ok(())
    })
}

pub(crate) fn unpin(at: usize) -> Answer {
    let len = with(|all| all.pins.remove(&at)).ok_or(NOT_PINNED)?;
    if stream::touches((at, len)) {
        control::violation();
    }
    Ok(())
}

/// A copy may lie in a pin, or outside of all, but not cross the border of one.
pub(crate) fn check_copy(at: usize, len: usize) -> Answer {
    let crosses = with(|all| {
        all.pins.range(..at + len).next_back().is_some_and(|(&pin, &pin_len)| {
            let (end, pin_end) = (at + len, pin + pin_len);
            at < pin_end && (at < pin || end > pin_end)
        })
    });
    if crosses { Err(INVALID_VALUE) } else { Ok(()) }
}

pub(crate) fn export(at: usize) -> Result<[u8; 64], i32> {
    let (base, _) = range(at)?;
    with(|all| {
        let one = all.device.get(&base).ok_or(INVALID_VALUE)?;
        let mut handle = [0; 64];
        let words = [u64::from(HANDLE_MAGIC), u64::from(std::process::id()), one.fd as u64];
        for (place, word) in
            handle.chunks_exact_mut(8).zip(words.into_iter().chain([one.len as u64]))
        {
            place.copy_from_slice(&word.to_le_bytes());
        }
        Ok(handle)
    })
}

/// As the drivers, not in the process that exported it.
pub(crate) fn import(handle: &[u8; 64]) -> Result<usize, i32> {
    let word = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&handle[at * 8..at * 8 + 8]);
        u64::from_le_bytes(bytes)
    };
    if word(0) != u64::from(HANDLE_MAGIC) {
        return Err(INVALID_VALUE);
    }
    if word(1) == u64::from(std::process::id()) {
        return Err(INVALID_CONTEXT);
    }
    let path = format!("/proc/{}/fd/{}\0", word(1), word(2));
    let len = usize::try_from(word(3)).map_err(|_| INVALID_VALUE)?;
    unsafe {
        let fd = libc::open(path.as_ptr().cast(), libc::O_RDWR | libc::O_CLOEXEC);
        if fd < 0 {
            return Err(INVALID_VALUE);
        }
        map(fd, len, len.next_multiple_of(PAGE), true)
    }
}

/// A descriptor of the allocation; both must be whole pages, as the driver wants it.
pub(crate) fn dmabuf(at: usize, len: usize) -> Result<i32, i32> {
    if !at.is_multiple_of(PAGE) || !len.is_multiple_of(PAGE) || len == 0 {
        return Err(INVALID_VALUE);
    }
    let (base, _) = range(at)?;
    let fd = with(|all| all.device.get(&base).map(|one| one.fd)).ok_or(INVALID_VALUE)?;
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 { Err(OUT_OF_MEMORY) } else { Ok(copy) }
}

pub(crate) fn allocations() -> usize {
    with(|all| all.device.values().filter(|one| !one.imported).count())
}

pub(crate) fn imports() -> usize {
    with(|all| all.device.values().filter(|one| one.imported).count())
}

pub(crate) fn host_allocations() -> usize {
    with(|all| all.host.len())
}

pub(crate) fn pins() -> usize {
    with(|all| all.pins.len())
}

/// Puts a copy on a stream.
pub(crate) fn copy(dst: usize, src: usize, len: usize, to: usize) -> Answer {
    check_copy(dst, len)?;
    check_copy(src, len)?;
    stream::push(to, vec![(dst, len), (src, len)], move || {
        unsafe { std::ptr::copy(src as *const u8, dst as *mut u8, len) };
    })
}
