//! Segments: the shared memory of one pool, as sealed files that any member can pass on and map.
//!
//! **Invariant:** every page of a segment exists and its size is sealed before anybody hears of it;
//! attaching allocates and copies nothing.

mod config;
mod gate;
mod geometry;
mod ladder;
mod limits;
mod map;
mod numa;
mod prefault;
mod register;
mod tier;
mod window;

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

pub use self::config::{Packing, SegmentsConfig};
pub use self::geometry::{Geometry, SegmentInfo, SlotAddr};
pub use self::ladder::Fallback;
pub use self::limits::check_memory;
pub use self::map::Mapped;
pub use self::numa::{NumaOutcome, NumaPolicy};
pub use self::register::{
    Piece, RegisterFailure, RegisterPolicy, RegisterRegion, Registration, RegistrationSummary,
};
pub use self::tier::PageTier;

use self::gate::Gate;
use self::geometry::Addressing;
use self::ladder::{Allocated, Request, SEALS};
use self::limits::SystemView;
use crate::fork::SharedFd;
use crate::{DataError, ErrorKind};

const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// The shared memory of one pool: descriptors and geometry, not mapped.
///
/// Cheap to clone. Thread-safe.
#[derive(Clone, Debug)]
pub struct Segments {
    geometry: Arc<Geometry>,
    fds: Arc<[SharedFd]>,
    fallbacks: Arc<[Fallback]>,
    numa: NumaOutcome,
}

impl Segments {
    /// Allocates all pages of a pool. Maps nothing that stays mapped.
    ///
    /// # Errors
    /// `Invalid` for numbers that overflow or are not aligned; `Shortage`, with wanted, available and
    /// the command that helps, where the ladder ends (or the strict tier is not there).
    pub fn create(config: &SegmentsConfig) -> Result<Self, DataError> {
        Self::create_with_progress(config, &|_, _| {})
    }

    /// As [`create`](Self::create), calling `progress(bytes done, bytes in total)` from the
    /// allocating threads.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn create_with_progress(
        config: &SegmentsConfig,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Self, DataError> {
        Self::create_on(config, &SystemView::real(), progress)
    }

    fn create_on(
        config: &SegmentsConfig,
        view: &SystemView,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Self, DataError> {
        let plan = config.plan()?;
        let numa = NumaOutcome::resolve(&config.numa, view)?;
        let total: u64 = (0..plan.segments).map(|i| plan.used_bytes(config.slots, i)).sum();
        let done = AtomicU64::new(0);
        let report = |bytes: u64| {
            let before = done.fetch_add(bytes, Ordering::Relaxed);
            progress((before + bytes).min(total), total);
        };
        let gate = Gate::default();
        let allocate = |index: u32, fallbacks: &mut Vec<Fallback>| {
            Request {
                index,
                used_bytes: plan.used_bytes(config.slots, index),
                pool_bytes: (index..plan.segments).map(|i| plan.used_bytes(config.slots, i)).sum(),
                prefer: config.prefer,
                strict: config.strict,
                numa: &numa,
                view,
                gate: &gate,
                progress: &report,
            }
            .allocate(fallbacks)
        };
        let (allocated, fallbacks) = in_parallel(plan.segments, config.threads, &allocate)?;

        let infos = allocated.iter().enumerate().map(|(index, segment)| SegmentInfo {
            bytes: segment.bytes,
            tier: segment.tier,
            node: numa.node_of(index),
        });
        let geometry = Geometry::new(
            config.slot_bytes,
            Addressing::new(config.slots, plan.per_segment, plan.stride),
            config.strict.unwrap_or(config.prefer),
            infos.collect(),
        )?;
        if geometry.is_degraded() {
            tracing::warn!(
                preferred = %geometry.preferred(),
                reached = %geometry.reached(),
                bytes = geometry.degraded_bytes(),
                reason = fallbacks.first().map(|f| f.error.to_string()),
                "pool is on smaller pages than asked for"
            );
        }
        Ok(Self {
            geometry: Arc::new(geometry),
            fds: allocated.into_iter().map(|s| s.fd).collect(),
            fallbacks: fallbacks.into(),
            numa,
        })
    }

    /// Adopts descriptors received from another member, after checking each one's size, seals and
    /// kind of memory.
    ///
    /// # Errors
    /// `Corrupt` if anything differs from the geometry.
    pub fn from_fds(
        geometry: Geometry,
        fds: impl IntoIterator<Item = impl Into<SharedFd>>,
    ) -> Result<Self, DataError> {
        let fds: Arc<[SharedFd]> = fds.into_iter().map(Into::into).collect();
        if fds.len() != geometry.segments().len() {
            return Err(DataError::corrupt(format!(
                "{} descriptors for {} segments",
                fds.len(),
                geometry.segments().len()
            )));
        }
        for (index, (fd, info)) in fds.iter().zip(geometry.segments()).enumerate() {
            verify(index, fd, *info)?;
        }
        Ok(Self {
            geometry: Arc::new(geometry),
            fds,
            fallbacks: Arc::new([]),
            numa: NumaOutcome::NotRequested,
        })
    }

    /// Maps all segments into this process. Page tables are filled on first touch, or by
    /// [`Mapped::prefault`].
    ///
    /// # Errors
    /// `Os` if a mapping is refused (address space, `vm.max_map_count`).
    pub fn map(&self) -> Result<Arc<Mapped>, DataError> {
        Mapped::new(self.clone()).map(Arc::new)
    }

    /// Descriptors, one per segment, to pass on.
    #[must_use]
    pub fn fds(&self) -> &[SharedFd] {
        &self.fds
    }

    /// Geometry; tiers reached are in its segments.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Tiers that were tried in vain, in the creating process only.
    #[must_use]
    pub fn fallbacks(&self) -> &[Fallback] {
        &self.fallbacks
    }

    /// What became of the NUMA policy, in the creating process only.
    #[must_use]
    pub fn numa(&self) -> &NumaOutcome {
        &self.numa
    }
}

type AllocateFn<'a> = dyn Fn(u32, &mut Vec<Fallback>) -> Result<Allocated, DataError> + Sync + 'a;

/// Allocates `count` segments on several threads; the first failure stops the rest.
fn in_parallel(
    count: u32,
    threads: usize,
    allocate: &AllocateFn<'_>,
) -> Result<(Vec<Allocated>, Vec<Fallback>), DataError> {
    struct Progress {
        segments: Vec<(u32, Allocated)>,
        fallbacks: Vec<Fallback>,
        error: Option<DataError>,
    }
    let next = AtomicU32::new(0);
    let state = Mutex::new(Progress { segments: Vec::new(), fallbacks: Vec::new(), error: None });
    let lock = || state.lock().unwrap_or_else(PoisonError::into_inner);
    let work = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count || lock().error.is_some() {
                return;
            }
            let mut fallbacks = Vec::new();
            let result = allocate(index, &mut fallbacks);
            let mut state = lock();
            state.fallbacks.append(&mut fallbacks);
            match result {
                Ok(segment) => state.segments.push((index, segment)),
                Err(error) => {
                    state.error.get_or_insert(error);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.min(count as usize) {
            scope.spawn(work);
        }
        work();
    });
    let mut state = state.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(error) = state.error {
        return Err(error);
    }
    state.segments.sort_by_key(|(index, _)| *index);
    state.fallbacks.sort_by_key(|f| (f.segment, f.tier));
    if state.segments.len() != count as usize {
        return Err(DataError::new(ErrorKind::Poisoned, "an allocating thread panicked"));
    }
    Ok((state.segments.into_iter().map(|(_, s)| s).collect(), state.fallbacks))
}

fn verify(index: usize, fd: &SharedFd, info: SegmentInfo) -> Result<(), DataError> {
    let os = |what: &str, e| DataError::os(format!("{what} of segment {index}"), e);
    let stat = rustix::fs::fstat(fd.as_fd()).map_err(|e| os("fstat", e))?;
    if u64::try_from(stat.st_size) != Ok(info.bytes) {
        return Err(DataError::corrupt(format!(
            "segment {index} has {} bytes, geometry says {}",
            stat.st_size, info.bytes
        )));
    }
    let seals = rustix::fs::fcntl_get_seals(fd.as_fd()).map_err(|e| os("F_GET_SEALS", e))?;
    if !seals.contains(SEALS) {
        return Err(DataError::corrupt(format!(
            "segment {index} is not sealed against resizing (seals {:#x})",
            seals.bits()
        )));
    }
    let fs = rustix::fs::fstatfs(fd.as_fd()).map_err(|e| os("fstatfs", e))?;
    let is_hugetlb = u64::try_from(fs.f_type) == Ok(HUGETLBFS_MAGIC);
    let page = u64::try_from(stat.st_blksize).unwrap_or(0);
    if is_hugetlb != info.tier.is_hugetlb() || (is_hugetlb && page != info.tier.page_bytes()) {
        return Err(DataError::corrupt(format!(
            "segment {index} should be on {} but has pages of {page} bytes (hugetlb: {is_hugetlb})",
            info.tier
        )));
    }
    Ok(())
}
