//! The region in real memory: a sealed memfd shared between processes, or private heap memory.
//!
//! **Invariant:** the memory is only ever accessed as atomics, and stays mapped while a reference lives.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error},
    fmt,
    os::fd::{AsFd, OwnedFd},
    ptr::NonNull,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::{
    fs::{FallocateFlags, MemfdFlags, SealFlags},
    mm::{Advice, MapFlags, ProtFlags},
};

use super::{PoolTables, plan::RegionLayout};
use crate::{
    CtrlError, Geometry, PoolGeometry, fork,
    geometry::free_map_words,
    key::Hasher,
    layout::{
        Bucket, GroupHot, GroupRecord, HEADER_BYTES, Header, LAYOUT_GROUPS, LAYOUT_HEADER_BYTES,
        LAYOUT_MEMBERS, LAYOUT_VERSION, LeaseRecord, MAGIC, MAX_GROUPS, MAX_MEMBERS, MAX_POOLS,
        MemberRecord, Slot,
    },
};

/// A mapped control region.
pub(crate) struct Region {
    base: NonNull<u8>,
    backing: Backing,
    layout: RegionLayout,
    pub(super) pools: Vec<PoolTables>,
    pub(super) geometry: Geometry,
    pub(super) hasher: Hasher,
    /// Epoch of the process that mapped the memory.
    pub(super) epoch: u32,
    boot_token: [u64; 2],
}

enum Backing {
    Heap(Layout),
    /// The descriptor until whoever passes it on has taken it: here it would survive in forked children.
    Map {
        len: usize,
        fd: Mutex<Option<OwnedFd>>,
    },
}

// SAFETY: the memory behind `base` is only ever accessed as atomics.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Makes a region in a sealed memfd. The magic is written last.
    pub(crate) fn create_shared(
        geometry: &Geometry,
        boot_token: [u64; 2],
    ) -> Result<Self, CtrlError> {
        let layout = RegionLayout::of(geometry)?;
        let fd =
            rustix::fs::memfd_create("ucm-ctrl", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
                .map_err(|e| CtrlError::os("create a memfd for the control region", e))?;
        rustix::fs::ftruncate(&fd, layout.total as u64)
            .map_err(|e| CtrlError::os("size the control region", e))?;
        // Real pages now: a later shortage must be an error here, not a SIGBUS later.
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, layout.total as u64)
            .map_err(|e| CtrlError::os("allocate the pages of the control region", e))?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|e| CtrlError::os("seal the control region", e))?;
        let base = map(&fd, layout.total)?;
        let backing = Backing::Map { len: layout.total, fd: Mutex::new(Some(fd)) };
        Ok(Self::initialise(base, backing, layout, geometry, boot_token))
    }

    /// Makes a region in this process's own memory.
    pub(crate) fn create_private(
        geometry: &Geometry,
        boot_token: [u64; 2],
    ) -> Result<Self, CtrlError> {
        let layout = RegionLayout::of(geometry)?;
        let heap = Layout::from_size_align(layout.total, 4096).map_err(|_| {
            CtrlError::Geometry(format!("{} bytes do not fit into memory", layout.total))
        })?;
        // SAFETY: the size is at least a header.
        let raw = unsafe { alloc_zeroed(heap) };
        let Some(base) = NonNull::new(raw) else { handle_alloc_error(heap) };
        Ok(Self::initialise(base, Backing::Heap(heap), layout, geometry, boot_token))
    }

    fn initialise(
        base: NonNull<u8>,
        backing: Backing,
        layout: RegionLayout,
        geometry: &Geometry,
        boot_token: [u64; 2],
    ) -> Self {
        let mut region = Self {
            base,
            backing,
            layout,
            pools: Vec::new(),
            geometry: geometry.clone(),
            hasher: Hasher { seed: (boot_token[0], boot_token[1]), mask: u64::MAX },
            epoch: fork::current(),
            boot_token,
        };
        let header = region.header();
        header.layout_version.store(LAYOUT_VERSION, Ordering::Relaxed);
        header.header_bytes.store(LAYOUT_HEADER_BYTES, Ordering::Relaxed);
        for (to, from) in header.boot_token.iter().zip(boot_token) {
            to.store(from, Ordering::Relaxed);
        }
        header.total_bytes.store(region.layout.total as u64, Ordering::Relaxed);
        header
            .pools
            .store(u32::try_from(geometry.pools.len()).unwrap_or(u32::MAX), Ordering::Relaxed);
        header.members.store(LAYOUT_MEMBERS, Ordering::Relaxed);
        header.leases.store(geometry.leases, Ordering::Relaxed);
        header.groups.store(LAYOUT_GROUPS, Ordering::Relaxed);
        for (to, from) in header.pool.iter().zip(&geometry.pools) {
            to.slots.store(from.slots, Ordering::Relaxed);
            to.reserved.store(from.reserved, Ordering::Relaxed);
            to.shards_per_block.store(from.shards_per_block, Ordering::Relaxed);
            to.shard_bytes.store(from.shard_bytes, Ordering::Relaxed);
        }
        region.find_tables();
        for (tables, pool) in region.pools.iter().zip(&geometry.pools) {
            tables.fill_free_maps(pool);
        }
        let header = region.header();
        header.magic.store(MAGIC, Ordering::Release);
        region
    }

    /// Maps a region that another process made.
    pub(crate) fn attach(fd: OwnedFd) -> Result<Self, CtrlError> {
        let stat =
            rustix::fs::fstat(&fd).map_err(|e| CtrlError::os("look at the control region", e))?;
        let len = usize::try_from(stat.st_size).unwrap_or(0);
        if len < HEADER_BYTES {
            return Err(CtrlError::Corrupt(format!(
                "{len} bytes are too few for a header of {HEADER_BYTES}"
            )));
        }
        let seals = rustix::fs::fcntl_get_seals(&fd)
            .map_err(|e| CtrlError::os("read the seals of the control region", e))?;
        if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
            return Err(CtrlError::Corrupt("the memory is not sealed against resizing".into()));
        }
        let base = map(&fd, len)?;
        let mut region = Self {
            base,
            backing: Backing::Map { len, fd: Mutex::default() },
            layout: RegionLayout {
                members: 0,
                leases: 0,
                group_hot: 0,
                groups: 0,
                pools: Vec::new(),
                total: len,
            },
            pools: Vec::new(),
            geometry: Geometry { pools: Vec::new(), leases: 0 },
            hasher: Hasher { seed: (0, 0), mask: u64::MAX },
            epoch: fork::current(),
            boot_token: [0; 2],
        };
        let header = region.header();
        if header.magic.load(Ordering::Acquire) != MAGIC {
            return Err(CtrlError::Corrupt(
                "no magic number: not a finished control region".into(),
            ));
        }
        let found = header.layout_version.load(Ordering::Relaxed);
        if found != LAYOUT_VERSION {
            return Err(CtrlError::Version { found, expected: LAYOUT_VERSION });
        }
        let geometry = read_geometry(header)?;
        let layout = RegionLayout::of(&geometry)?;
        if layout.total != len
            || header.members.load(Ordering::Relaxed) != LAYOUT_MEMBERS
            || header.groups.load(Ordering::Relaxed) != LAYOUT_GROUPS
        {
            return Err(CtrlError::Corrupt(format!(
                "the region has {len} bytes, its geometry needs {}",
                layout.total
            )));
        }
        let boot_token = [
            header.boot_token[0].load(Ordering::Relaxed),
            header.boot_token[1].load(Ordering::Relaxed),
        ];
        region.hasher.seed = (boot_token[0], boot_token[1]);
        region.boot_token = boot_token;
        region.geometry = geometry;
        region.layout = layout;
        region.find_tables();
        Ok(region)
    }

    /// Narrows the index hash, to force collisions in tests.
    #[cfg(test)]
    pub(crate) fn narrow_hash(&mut self, mask: u64) {
        self.hasher.mask = mask;
    }

    pub(crate) fn boot_token(&self) -> [u64; 2] {
        self.boot_token
    }

    pub(crate) fn total_bytes(&self) -> usize {
        self.layout.total
    }

    /// A duplicate of the descriptor, to be passed to another process.
    pub(crate) fn fd(&self) -> Result<Option<OwnedFd>, CtrlError> {
        match &self.backing {
            Backing::Heap(_) => Ok(None),
            Backing::Map { fd, .. } => {
                let fd = fd.lock().unwrap_or_else(PoisonError::into_inner);
                let copy = fd.as_ref().map(OwnedFd::try_clone).transpose();
                copy.map_err(|source| CtrlError::Os {
                    what: "duplicate the descriptor of the control region",
                    source,
                })
            }
        }
    }

    pub(crate) fn take_fd(&self) -> Option<OwnedFd> {
        match &self.backing {
            Backing::Heap(_) => None,
            Backing::Map { fd, .. } => fd.lock().unwrap_or_else(PoisonError::into_inner).take(),
        }
    }

    fn header(&self) -> &Header {
        // SAFETY: every region has at least a header; all its fields are atomics.
        unsafe { self.base.cast::<Header>().as_ref() }
    }

    /// Items of a table.
    ///
    /// # Safety
    /// `offset` must be the start of `len` items of type `T` in the layout of this region, and `T`
    /// must consist of atomics only. The table must not outlive the region.
    unsafe fn table<T>(&self, offset: usize, len: usize) -> Table<T> {
        // SAFETY: the caller names a table inside the region.
        let start = unsafe { self.base.add(offset) };
        Table { start: start.cast(), len }
    }

    /// None in a forked child, which has no mapping.
    pub(crate) fn members(&self) -> &[MemberRecord] {
        if !self.is_ours() {
            return &[];
        }
        // SAFETY: the member table of this layout, which lies inside the region.
        let start = unsafe { self.base.add(self.layout.members) };
        // SAFETY: aligned, atomics only, zero is a valid value; mapped while `self` lives.
        unsafe { std::slice::from_raw_parts(start.cast().as_ptr(), MAX_MEMBERS) }
    }

    /// As [`members`](Self::members).
    pub(crate) fn leases(&self) -> &[LeaseRecord] {
        if !self.is_ours() {
            return &[];
        }
        // SAFETY: the lease table of this layout, which lies inside the region.
        let start = unsafe { self.base.add(self.layout.leases) };
        // SAFETY: aligned, atomics only, zero is a valid value; mapped while `self` lives.
        unsafe { std::slice::from_raw_parts(start.cast().as_ptr(), self.geometry.leases as usize) }
    }

    /// As [`members`](Self::members).
    pub(crate) fn groups(&self) -> &[GroupRecord] {
        if !self.is_ours() {
            return &[];
        }
        // SAFETY: the group table of this layout, which lies inside the region.
        let start = unsafe { self.base.add(self.layout.groups) };
        // SAFETY: aligned, atomics only, zero is a valid value; mapped while `self` lives.
        unsafe { std::slice::from_raw_parts(start.cast().as_ptr(), MAX_GROUPS) }
    }

    /// As [`members`](Self::members).
    pub(crate) fn group_hot(&self) -> Option<&GroupHot> {
        if !self.is_ours() {
            return None;
        }
        // SAFETY: the groups' hot line of this layout, which lies inside the region.
        let start = unsafe { self.base.add(self.layout.group_hot) };
        // SAFETY: aligned, atomics only, zero is a valid value; mapped while `self` lives.
        Some(unsafe { start.cast().as_ref() })
    }

    /// All of the region as words, for a test that writes nonsense.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: the region is mapped with this size while `self` lives, page-aligned, and consists
        // of atomics, of which every value is valid.
        unsafe { std::slice::from_raw_parts(self.base.cast().as_ptr(), self.layout.total / 8) }
    }

    fn find_tables(&mut self) {
        let tables = self.layout.pools.iter().zip(&self.geometry.pools).map(|(at, pool)| {
            let total = pool.total();
            PoolTables {
                // SAFETY: the pool's hot lines of this layout.
                hot: unsafe { self.table(at.hot, 1) },
                // SAFETY: the pool's buckets of this layout.
                buckets: unsafe { self.table::<Bucket>(at.buckets, pool.buckets() as usize) },
                // SAFETY: the pool's slots of this layout.
                slots: unsafe { self.table::<Slot>(at.slots, total as usize) },
                // SAFETY: the pool's access bits of this layout.
                accessed: unsafe { self.table(at.accessed, total.div_ceil(64) as usize) },
                free_regular: self.free_map(at.free_regular, pool.slots),
                free_reserved: self.free_map(at.free_reserved, pool.reserved),
                regular: pool.slots,
                shards_per_block: pool.shards_per_block,
            }
        });
        self.pools = tables.collect();
    }

    fn free_map(&self, offset: usize, slots: u32) -> [Table<AtomicU64>; 3] {
        let mut at = offset;
        free_map_words(slots).map(|words| {
            // SAFETY: one level of a free map of this layout; levels follow each other.
            let level = unsafe { self.table(at, words) };
            at += words * 8;
            level
        })
    }
}

/// A table of atomics in the region. Only handed out by reference from the region that maps it.
#[derive(Debug)]
pub(crate) struct Table<T> {
    start: NonNull<T>,
    len: usize,
}

// SAFETY: a table is a view of atomics.
unsafe impl<T: Sync> Send for Table<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Table<T> {}

impl<T> std::ops::Deref for Table<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: made by `Region::table` for a table of atomics in its layout, aligned to a cache
        // line, of which zero is a valid value; the region outlives all references to its tables.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        match self.backing {
            // SAFETY: allocated with this layout, freed once; no reference outlives `self`.
            Backing::Heap(layout) => unsafe { dealloc(self.base.as_ptr(), layout) },
            // Not part of a forked child, which may have something else there by now.
            Backing::Map { .. } if !self.is_ours() => {}
            Backing::Map { len, .. } => {
                // SAFETY: mapped by `map` with this length, unmapped once.
                let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), len) };
            }
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("geometry", &self.geometry).finish_non_exhaustive()
    }
}

fn map(fd: impl AsFd, len: usize) -> Result<NonNull<u8>, CtrlError> {
    // SAFETY: a fresh shared mapping at an address of the kernel's choice.
    let raw = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            len,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            fd,
            0,
        )
    }
    .map_err(|e| CtrlError::os("map the control region", e))?;
    // A child made by fork must not touch the cache of its parent.
    // SAFETY: advice on the mapping just made; it changes what fork copies, nothing else.
    unsafe { rustix::mm::madvise(raw, len, Advice::LinuxDontFork) }
        .map_err(|e| CtrlError::os("keep the control region out of forked children", e))?;
    NonNull::new(raw.cast())
        .ok_or_else(|| CtrlError::Corrupt("the kernel mapped address zero".into()))
}

fn read_geometry(header: &Header) -> Result<Geometry, CtrlError> {
    let pools = header.pools.load(Ordering::Relaxed) as usize;
    if pools > MAX_POOLS {
        return Err(CtrlError::Corrupt(format!("{pools} pools, at most {MAX_POOLS} are possible")));
    }
    let pools = header.pool.iter().take(pools).map(|pool| PoolGeometry {
        slots: pool.slots.load(Ordering::Relaxed),
        reserved: pool.reserved.load(Ordering::Relaxed),
        shards_per_block: pool.shards_per_block.load(Ordering::Relaxed),
        shard_bytes: pool.shard_bytes.load(Ordering::Relaxed),
    });
    Ok(Geometry { pools: pools.collect(), leases: header.leases.load(Ordering::Relaxed) })
}
