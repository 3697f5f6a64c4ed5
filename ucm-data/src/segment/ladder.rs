//! The page ladder: allocates one segment on the best tier that really has the pages.
//!
//! Real pages are taken before a segment is announced (`fallocate`, or populating a temporary mapping
//! where transparent huge pages need one), so that a shortage is an error here and never a SIGBUS
//! later. This is the only function of the crate that creates shared memory.
//!
//! **Invariant:** a failed attempt leaves nothing behind: its file is closed, its pages are free.

use std::fs;
use std::os::fd::OwnedFd;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;

use crate::error::Shortage;
use crate::fork::SharedFd;
use crate::segment::config::SMALL_PAGE;
use crate::segment::gate::Gate;
use crate::segment::limits::{HEADROOM_BYTES, SystemView};
use crate::segment::numa::NumaOutcome;
use crate::segment::tier::PageTier;
use crate::segment::window::Window;
use crate::{DataError, ErrorKind};

/// Seals of every segment: its size is fixed for ever.
pub(crate) const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Pages are taken in steps of this size, for progress and for signals.
const STEP_BYTES: u64 = 256 << 20;

/// A segment with all its pages.
#[derive(Debug)]
pub(crate) struct Allocated {
    pub(crate) fd: SharedFd,
    pub(crate) bytes: u64,
    pub(crate) tier: PageTier,
}

/// A tier that was tried and could not serve a segment.
#[derive(Clone, Debug)]
pub struct Fallback {
    /// Index of the segment.
    pub segment: u32,
    /// Tier that could not serve it.
    pub tier: PageTier,
    /// Why, with the numbers and the remedy.
    pub error: DataError,
}

/// What the ladder needs to know for one segment.
pub(crate) struct Request<'a> {
    pub(crate) index: u32,
    /// Bytes that slots occupy.
    pub(crate) used_bytes: u64,
    /// Bytes that this and the segments still to come need: what a remedy has to make room for.
    pub(crate) pool_bytes: u64,
    pub(crate) prefer: PageTier,
    pub(crate) strict: Option<PageTier>,
    pub(crate) numa: &'a NumaOutcome,
    pub(crate) view: &'a SystemView,
    pub(crate) gate: &'a Gate,
    pub(crate) progress: &'a (dyn Fn(u64) + Sync),
}

impl Request<'_> {
    /// Goes down the ladder. Tiers passed on the way are appended to `fallbacks`.
    pub(crate) fn allocate(&self, fallbacks: &mut Vec<Fallback>) -> Result<Allocated, DataError> {
        if let Some(tier) = self.strict {
            return self.on_tier(tier);
        }
        let mut last = None;
        for &tier in self.prefer.and_below() {
            let gib = PageTier::Huge1G.page_bytes();
            if tier == PageTier::Huge1G && !self.used_bytes.is_multiple_of(gib) {
                continue;
            }
            match self.on_tier(tier) {
                Ok(segment) => return Ok(segment),
                Err(error) => {
                    last = Some(error.clone());
                    fallbacks.push(Fallback { segment: self.index, tier, error });
                }
            }
        }
        Err(last.unwrap_or_else(|| DataError::invalid("no page tier is allowed")))
    }

    fn on_tier(&self, tier: PageTier) -> Result<Allocated, DataError> {
        let bytes =
            self.used_bytes.checked_next_multiple_of(tier.page_bytes()).ok_or_else(|| {
                DataError::invalid(format!("segment of {} bytes overflows", self.used_bytes))
            })?;
        let _permit = self.gate.pass(bytes, |others| self.check_limits(tier, bytes, others))?;
        let fd = create_file(tier, bytes)?;
        rustix::fs::ftruncate(&fd, bytes)
            .map_err(|e| DataError::os(format!("sizing a segment to {bytes} bytes"), e))?;
        let len = usize::try_from(bytes)
            .map_err(|_| DataError::invalid(format!("segment of {bytes} bytes overflows")))?;

        // Pages follow the policy of the file; it can only be set through a mapping.
        let window = if self.numa.is_placed() || tier == PageTier::Transparent {
            let align = usize::try_from(tier.page_bytes()).unwrap_or(4096);
            Some(Window::map(&fd, len, align)?)
        } else {
            None
        };
        if let Some(window) = &window {
            self.numa.apply(window, self.index as usize)?;
        }
        let mut reached = tier;
        match (&window, tier) {
            (Some(window), PageTier::Transparent) => {
                window
                    .advise_huge()
                    .map_err(|e| DataError::os("asking for transparent huge pages", e))?;
                self.in_steps(tier, bytes, |at, step| {
                    let (Ok(at), Ok(step)) = (usize::try_from(at), usize::try_from(step)) else {
                        return Err(DataError::invalid("segment does not fit the address space"));
                    };
                    window.populate(at, step, 4096)
                })?;
                if huge_mapped_bytes(window) < bytes / 2 {
                    reached = PageTier::Small;
                }
            }
            _ => self.in_steps(tier, bytes, |at, step| {
                loop {
                    match rustix::fs::fallocate(&fd, FallocateFlags::empty(), at, step) {
                        Ok(()) => return Ok(()),
                        Err(Errno::INTR | Errno::AGAIN) => {}
                        Err(e) => return Err(self.refused(tier, bytes, e)),
                    }
                }
            })?,
        }
        rustix::fs::fcntl_add_seals(&fd, SEALS).map_err(|e| DataError::os("sealing", e))?;
        if reached != self.strict.unwrap_or(reached) {
            return Err(DataError::new(
                ErrorKind::Shortage,
                "the kernel gave mostly small pages where transparent huge pages were required; \
                 compact memory (echo 1 > /proc/sys/vm/compact_memory) or allow another tier",
            )
            .with_shortage(shortage(tier, bytes, 0)));
        }
        Ok(Allocated { fd: fd.into(), bytes, tier: reached })
    }

    fn in_steps(
        &self,
        tier: PageTier,
        bytes: u64,
        mut take: impl FnMut(u64, u64) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut at = 0;
        while at < bytes {
            let step = STEP_BYTES.max(tier.page_bytes()).min(bytes - at);
            take(at, step)?;
            at += step;
            (self.progress)(step);
        }
        Ok(())
    }

    /// Compares with every limit; `others` bytes are promised to segments being allocated now.
    fn check_limits(&self, tier: PageTier, bytes: u64, others: u64) -> Result<(), DataError> {
        if tier.is_hugetlb() {
            self.check_huge(tier, bytes, others)
        } else {
            self.check_memory(tier, bytes, others)
        }
    }

    fn check_huge(&self, tier: PageTier, bytes: u64, others: u64) -> Result<(), DataError> {
        let page = tier.page_bytes();
        let pool = self.view.huge_pool(page).unwrap_or_default();
        let on_node = self
            .numa
            .node_of(self.index as usize)
            .and_then(|node| Some((node, self.view.huge_free_on_node(page, node)?)));
        if let Some((node, free)) = on_node
            && free < bytes / page
        {
            return Err(DataError::new(
                ErrorKind::Shortage,
                format!(
                    "segment {} wants {} pages ({tier}) on NUMA node {node}, available {free}; run: \
                     echo {} > /sys/devices/system/node/node{node}/hugepages/hugepages-{}kB/nr_hugepages",
                    self.index,
                    bytes / page,
                    pool.total + bytes / page - free,
                    page / 1024
                ),
            )
            .with_shortage(shortage(tier, bytes, free * page)));
        }
        if pool.available() < (bytes + others).div_ceil(page) {
            return Err(self.too_few(tier, bytes));
        }
        if let Some(limit) = self.view.cgroup_huge(page)
            && limit.available_bytes < bytes + others
        {
            return Err(self.cgroup_refused(tier, bytes, &limit.source, limit.available_bytes));
        }
        Ok(())
    }

    fn check_memory(&self, tier: PageTier, bytes: u64, others: u64) -> Result<(), DataError> {
        if tier == PageTier::Transparent && !self.view.shmem_thp() {
            return Err(DataError::new(
                ErrorKind::Shortage,
                "transparent huge pages are off for shared memory; run: echo advise > \
                 /sys/kernel/mm/transparent_hugepage/shmem_enabled",
            )
            .with_shortage(shortage(tier, bytes, 0)));
        }
        if let Some(free) = self.view.memory_available() {
            let free = free.saturating_sub(HEADROOM_BYTES);
            if free < bytes + others {
                return Err(DataError::new(
                    ErrorKind::Shortage,
                    format!(
                        "segment {} wants {bytes} bytes of memory, available {free} (MemAvailable \
                         less {HEADROOM_BYTES}); make the pool smaller by {} bytes",
                        self.index,
                        self.pool_bytes.saturating_sub(free)
                    ),
                )
                .with_shortage(shortage(tier, bytes, free)));
            }
        }
        if let Some(limit) = self.view.cgroup_memory()
            && limit.available_bytes < bytes + others
        {
            return Err(self.cgroup_refused(tier, bytes, &limit.source, limit.available_bytes));
        }
        Ok(())
    }

    /// `fallocate` said no.
    fn refused(&self, tier: PageTier, bytes: u64, errno: Errno) -> DataError {
        match errno {
            Errno::NOSPC | Errno::NOMEM if tier.is_hugetlb() => {
                let page = tier.page_bytes();
                match self.view.cgroup_huge(page) {
                    Some(limit) if limit.available_bytes < bytes => {
                        self.cgroup_refused(tier, bytes, &limit.source, limit.available_bytes)
                    }
                    _ => self.too_few(tier, bytes),
                }
            }
            Errno::NOSPC | Errno::NOMEM => {
                let free = self.view.memory_available().unwrap_or(0);
                DataError::new(
                    ErrorKind::Shortage,
                    format!(
                        "wanted {bytes} bytes of memory, available {free}; make the pool smaller"
                    ),
                )
                .with_shortage(shortage(tier, bytes, free))
            }
            e => return DataError::os(format!("allocating {bytes} bytes of {tier}"), e),
        }
        .with_errno(errno)
    }

    fn too_few(&self, tier: PageTier, bytes: u64) -> DataError {
        let page = tier.page_bytes();
        let pool = self.view.huge_pool(page).unwrap_or_default();
        let wanted = bytes / page;
        let whole = self.pool_bytes.div_ceil(page).max(wanted);
        let need = pool.total + whole.saturating_sub(pool.available());
        let file = if page == 2 << 20 {
            "/proc/sys/vm/nr_hugepages".to_owned()
        } else {
            format!("/sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages", page / 1024)
        };
        DataError::new(
            ErrorKind::Shortage,
            format!(
                "segment {} wants {wanted} pages ({tier}), available {} of {}; the rest of the pool \
                 wants {whole}; run: echo {need} > {file}",
                self.index,
                pool.available(),
                pool.total
            ),
        )
        .with_shortage(shortage(tier, bytes, pool.available() * page))
    }

    fn cgroup_refused(&self, tier: PageTier, bytes: u64, file: &str, free: u64) -> DataError {
        DataError::new(
            ErrorKind::Shortage,
            format!(
                "segment {} wants {bytes} bytes ({tier}), the control group allows {free} more; raise \
                 {file} by at least {}",
                self.index,
                self.pool_bytes.max(bytes).saturating_sub(free)
            ),
        )
        .with_shortage(shortage(tier, bytes, free))
    }
}

fn create_file(tier: PageTier, bytes: u64) -> Result<OwnedFd, DataError> {
    let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match tier {
        PageTier::Huge1G => flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
        PageTier::Huge2M => flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
        PageTier::Transparent | PageTier::Small => {}
    }
    // Kernels before 6.3 do not know NOEXEC_SEAL; hardened ones demand it.
    rustix::fs::memfd_create("ucm-segment", flags | MemfdFlags::NOEXEC_SEAL)
        .or_else(|_| rustix::fs::memfd_create("ucm-segment", flags))
        .map_err(|e| match e {
            Errno::NODEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP => {
                DataError::new(ErrorKind::Shortage, format!("this kernel has no {tier}"))
                    .with_errno(e)
                    .with_shortage(shortage(tier, bytes, 0))
            }
            e => DataError::os(format!("memfd_create for {tier}"), e),
        })
}

fn shortage(tier: PageTier, wanted_bytes: u64, available_bytes: u64) -> Shortage {
    let page_bytes = if tier.is_hugetlb() { tier.page_bytes() } else { SMALL_PAGE };
    Shortage { page_bytes, wanted_bytes, available_bytes }
}

/// Bytes of the window that are mapped by huge pages at this moment.
fn huge_mapped_bytes(window: &Window) -> u64 {
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    let start = format!("{:x}-", window.base().addr());
    smaps
        .lines()
        .skip_while(|line| !line.starts_with(&start))
        .find_map(|line| line.strip_prefix("ShmemPmdMapped:"))
        .and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<u64>().ok())
        .map_or(0, |kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::limits::HugePool;

    #[test]
    fn a14_pages_that_are_gone_between_look_and_take_are_a_shortage_and_leave_nothing() {
        let page = PageTier::Huge1G.page_bytes();
        let real = SystemView::real().huge_pool(page);
        if real.unwrap_or_default() != HugePool::default() {
            return println!("SKIP a14: this machine has 1 GiB pages to give");
        }
        // A machine that claims five free pages where there are none.
        let dir = tempfile::tempdir().unwrap();
        let pool = dir.path().join("sys/kernel/mm/hugepages/hugepages-1048576kB");
        fs::create_dir_all(&pool).unwrap();
        fs::write(pool.join("free_hugepages"), "5\n").unwrap();
        let request = Request {
            index: 3,
            used_bytes: 2 * page,
            pool_bytes: 4 * page,
            prefer: PageTier::Huge1G,
            strict: Some(PageTier::Huge1G),
            numa: &NumaOutcome::NotRequested,
            view: &SystemView::below(dir.path()),
            gate: &Gate::default(),
            progress: &|_| panic!("progress without pages"),
        };
        let error = request.allocate(&mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Shortage, "{error}");
        assert_eq!(error.shortage().unwrap().wanted_bytes, 2 * page);
        // Without 1 GiB pages in the kernel the file is refused, with them the pages are.
        assert!(error.errno().is_some(), "{error}");
        assert_eq!(SystemView::real().huge_pool(page), real);
    }
}
