//! How much memory there is: huge-page pools, MemAvailable, cgroup limits (v1 and v2).
//!
//! Everything is read below a root path, so that tests use a tree of plain files.
//!
//! **Invariant:** a limit that cannot be read or parsed is treated as absent; the allocation itself
//! stays the proof. Nothing here is cached.

use std::fs;
use std::path::{Path, PathBuf};

use crate::{DataError, ErrorKind, Shortage};

/// Ordinary memory that is left to the machine when a pool is sized.
pub(crate) const HEADROOM_BYTES: u64 = 64 << 20;

/// Refuses what would drive this machine, or this process's memory cgroup, out of memory, before
/// anything is allocated. `what` names it in the error.
///
/// # Errors
/// `Shortage` with wanted and available bytes.
pub fn check_memory(what: &str, wanted_bytes: u64) -> Result<(), DataError> {
    let view = SystemView::real();
    let machine = view.memory_available().map(|free| Limit {
        available_bytes: free.saturating_sub(HEADROOM_BYTES),
        source: "MemAvailable".into(),
    });
    let tightest =
        machine.into_iter().chain(view.cgroup_memory()).min_by_key(|l| l.available_bytes);
    match tightest {
        Some(limit) if limit.available_bytes < wanted_bytes => Err(DataError::new(
            ErrorKind::Shortage,
            format!(
                "{what} wants {wanted_bytes} bytes of memory, available {} ({}); make it smaller or \
                 raise the limit",
                limit.available_bytes, limit.source
            ),
        )
        .with_shortage(Shortage {
            page_bytes: 4096,
            wanted_bytes,
            available_bytes: limit.available_bytes,
        })),
        _ => Ok(()),
    }
}

/// An upper bound and where it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Limit {
    pub(crate) available_bytes: u64,
    pub(crate) source: String,
}

/// Counters of one huge-page pool, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct HugePool {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) reserved: u64,
    pub(crate) surplus: u64,
    pub(crate) overcommit: u64,
}

impl HugePool {
    /// Pages that can still be taken without a reservation.
    pub(crate) fn available(&self) -> u64 {
        self.free.saturating_sub(self.reserved) + self.overcommit.saturating_sub(self.surplus)
    }
}

/// The files of one machine (or of a test).
#[derive(Clone, Debug)]
pub(crate) struct SystemView {
    root: PathBuf,
}

impl SystemView {
    pub(crate) fn real() -> Self {
        Self { root: PathBuf::from("/") }
    }

    #[cfg(test)]
    pub(crate) fn below(root: &Path) -> Self {
        Self { root: root.to_path_buf() }
    }

    /// The pool of pages of this size, `None` if the kernel has none.
    pub(crate) fn huge_pool(&self, page_bytes: u64) -> Option<HugePool> {
        let dir = self.path(&format!("sys/kernel/mm/hugepages/hugepages-{}kB", page_bytes / 1024));
        let number = |name: &str| read_number(&dir.join(name)).unwrap_or(0);
        dir.is_dir().then(|| HugePool {
            total: number("nr_hugepages"),
            free: number("free_hugepages"),
            reserved: number("resv_hugepages"),
            surplus: number("surplus_hugepages"),
            overcommit: number("nr_overcommit_hugepages"),
        })
    }

    /// Free pages of this size on one NUMA node.
    pub(crate) fn huge_free_on_node(&self, page_bytes: u64, node: u32) -> Option<u64> {
        read_number(&self.path(&format!(
            "sys/devices/system/node/node{node}/hugepages/hugepages-{}kB/free_hugepages",
            page_bytes / 1024
        )))
    }

    /// Tightest hugetlb cgroup limit for pages of this size.
    pub(crate) fn cgroup_huge(&self, page_bytes: u64) -> Option<Limit> {
        let size = match page_bytes {
            n if n >= 1 << 30 => format!("{}GB", n >> 30),
            n => format!("{}MB", n >> 20),
        };
        self.tightest("hugetlb", |dir, v2| {
            let (max, used) =
                if v2 { ("max", "current") } else { ("limit_in_bytes", "usage_in_bytes") };
            let file = dir.join(format!("hugetlb.{size}.{max}"));
            let limit = read_number(&file)?;
            let used = read_number(&dir.join(format!("hugetlb.{size}.{used}"))).unwrap_or(0);
            Some((limit, limit.saturating_sub(used), file))
        })
    }

    /// Tightest memory cgroup limit. Page cache of files counts as available.
    pub(crate) fn cgroup_memory(&self) -> Option<Limit> {
        self.tightest("memory", |dir, v2| {
            let (max, used, prefix) = if v2 {
                ("memory.max", "memory.current", "")
            } else {
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            };
            let file = dir.join(max);
            let limit = read_number(&file)?;
            let used = read_number(&dir.join(used)).unwrap_or(0);
            let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
            let cache = ["inactive_file", "active_file"]
                .into_iter()
                .filter_map(|name| keyed_number(&stat, &format!("{prefix}{name}")))
                .fold(0u64, u64::saturating_add);
            let left = limit.saturating_sub(used).saturating_add(cache).min(limit);
            Some((limit, left, file))
        })
    }

    /// MemAvailable of the machine in bytes.
    pub(crate) fn memory_available(&self) -> Option<u64> {
        let text = fs::read_to_string(self.path("proc/meminfo")).ok()?;
        keyed_number(&text, "MemAvailable:").map(|kib| kib.saturating_mul(1024))
    }

    /// True if shared memory of this process may get transparent huge pages on request.
    pub(crate) fn shmem_thp(&self) -> bool {
        let file = self.path("sys/kernel/mm/transparent_hugepage/shmem_enabled");
        let text = fs::read_to_string(file).unwrap_or_default();
        ["[always]", "[within_size]", "[advise]", "[force]"].iter().any(|w| text.contains(w))
    }

    pub(crate) fn path(&self, relative: &str) -> PathBuf {
        self.root.join(relative)
    }

    /// The smallest value of `read` over the process's cgroup of `controller` and its ancestors.
    fn tightest(
        &self,
        controller: &str,
        read: impl Fn(&Path, bool) -> Option<(u64, u64, PathBuf)>,
    ) -> Option<Limit> {
        let mut best: Option<Limit> = None;
        for (mount, below, v2) in self.cgroup_dirs(controller) {
            for relative in below.ancestors() {
                let dir = mount.join(relative);
                // v1 writes "unlimited" as a number near i64::MAX, in whole pages.
                let Some((limit, available_bytes, file)) = read(&dir, v2) else { continue };
                let unlimited = limit > i64::MAX as u64 - (1 << 21);
                if !unlimited && best.as_ref().is_none_or(|b| available_bytes < b.available_bytes) {
                    best = Some(Limit { available_bytes, source: file.display().to_string() });
                }
            }
        }
        best
    }

    /// (mount point, path of this process's group below it, is it v2).
    fn cgroup_dirs(&self, controller: &str) -> Vec<(PathBuf, PathBuf, bool)> {
        let groups = fs::read_to_string(self.path("proc/self/cgroup")).unwrap_or_default();
        let mounts = fs::read_to_string(self.path("proc/self/mountinfo")).unwrap_or_default();
        let mut dirs = Vec::new();
        for mount in mounts.lines().filter_map(CgroupMount::parse) {
            let group = groups.lines().find_map(|line| {
                let mut fields = line.splitn(3, ':');
                let _hierarchy = fields.next()?;
                let controllers = fields.next()?;
                let path = fields.next()?;
                let here = if mount.v2 {
                    controllers.is_empty()
                } else {
                    controllers.split(',').any(|c| c == controller)
                };
                here.then(|| path.to_owned())
            });
            let Some(group) = group else { continue };
            if !mount.v2 && !mount.options.split(',').any(|o| o == controller) {
                continue;
            }
            // A group outside the mounted part (another cgroup namespace) falls back to its root.
            let below = Path::new(&group)
                .strip_prefix(mount.root)
                .ok()
                .filter(|p| p.components().all(|c| matches!(c, std::path::Component::Normal(_))))
                .map(Path::to_path_buf)
                .unwrap_or_default();
            dirs.push((self.path(mount.point.trim_start_matches('/')), below, mount.v2));
        }
        dirs
    }
}

struct CgroupMount<'a> {
    root: &'a str,
    point: &'a str,
    options: &'a str,
    v2: bool,
}

impl<'a> CgroupMount<'a> {
    /// One line of mountinfo: `id parent dev root point options fields… - type source superoptions`.
    fn parse(line: &'a str) -> Option<Self> {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ').skip(3);
        let (root, point) = (left.next()?, left.next()?);
        let mut right = right.split(' ');
        let v2 = match right.next()? {
            "cgroup2" => true,
            "cgroup" => false,
            _ => return None,
        };
        Some(Self { root, point, options: right.nth(1).unwrap_or(""), v2 })
    }
}

fn read_number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn keyed_number(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next()? == key).then(|| words.next()?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn file(self, path: &str, text: &str) -> Self {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
            self
        }

        fn view(&self) -> SystemView {
            SystemView::below(self.0.path())
        }
    }

    const V2_MOUNT: &str = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn v2_limits_are_the_tightest_of_all_ancestors() {
        let tree = Tree::new()
            .file("proc/self/mountinfo", V2_MOUNT)
            .file("proc/self/cgroup", "0::/pod/box\n")
            .file("sys/fs/cgroup/pod/memory.max", "1000\n")
            .file("sys/fs/cgroup/pod/memory.current", "900\n")
            .file("sys/fs/cgroup/pod/memory.stat", "inactive_file 30\nactive_file 20\nshmem 700\n")
            .file("sys/fs/cgroup/pod/box/memory.max", "max\n")
            .file("sys/fs/cgroup/pod/box/memory.current", "800\n")
            .file("sys/fs/cgroup/pod/box/hugetlb.2MB.max", "8388608\n")
            .file("sys/fs/cgroup/pod/box/hugetlb.2MB.current", "2097152\n")
            .file("sys/fs/cgroup/pod/box/hugetlb.1GB.max", "max\n");
        let memory = tree.view().cgroup_memory().unwrap();
        assert_eq!(memory.available_bytes, 150);
        assert!(memory.source.ends_with("/sys/fs/cgroup/pod/memory.max"), "{}", memory.source);
        assert_eq!(tree.view().cgroup_huge(2 << 20).unwrap().available_bytes, 6 << 20);
        assert_eq!(tree.view().cgroup_huge(1 << 30), None);
    }

    #[test]
    fn v1_limits_and_the_unlimited_number() {
        let tree = Tree::new()
            .file(
                "proc/self/mountinfo",
                "40 30 0:30 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
                 41 30 0:31 / /sys/fs/cgroup/hugetlb rw,relatime - cgroup cgroup rw,hugetlb\n",
            )
            .file("proc/self/cgroup", "4:memory:/job\n3:hugetlb:/\n1:name=systemd:/x\n")
            .file("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
            .file("sys/fs/cgroup/memory/memory.usage_in_bytes", "5\n")
            .file("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "4096\n")
            .file("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "1096\n")
            .file("sys/fs/cgroup/hugetlb/hugetlb.1GB.limit_in_bytes", "2147483648\n")
            .file("sys/fs/cgroup/hugetlb/hugetlb.1GB.usage_in_bytes", "1073741824\n");
        assert_eq!(tree.view().cgroup_memory().unwrap().available_bytes, 3000);
        assert_eq!(tree.view().cgroup_huge(1 << 30).unwrap().available_bytes, 1 << 30);
    }

    #[test]
    fn a_group_outside_the_mounted_part_uses_the_mount_root() {
        let tree = Tree::new()
            .file("proc/self/mountinfo", "30 23 0:26 /docker/a /sys/fs/cgroup rw - cgroup2 c rw\n")
            .file("proc/self/cgroup", "0::/../../other\n")
            .file("sys/fs/cgroup/memory.max", "77\n");
        assert_eq!(tree.view().cgroup_memory().unwrap().available_bytes, 77);
    }

    #[test]
    fn nothing_readable_means_no_limit() {
        let view = Tree::new().view();
        assert_eq!(view.cgroup_memory(), None);
        assert_eq!(view.memory_available(), None);
        assert_eq!(view.huge_pool(2 << 20), None);
        assert!(!view.shmem_thp());
    }

    #[test]
    fn huge_pool_counts_overcommit_and_reservations() {
        let dir = "sys/kernel/mm/hugepages/hugepages-2048kB";
        let tree = Tree::new()
            .file(&format!("{dir}/nr_hugepages"), "10\n")
            .file(&format!("{dir}/free_hugepages"), "6\n")
            .file(&format!("{dir}/resv_hugepages"), "2\n")
            .file(&format!("{dir}/surplus_hugepages"), "1\n")
            .file(&format!("{dir}/nr_overcommit_hugepages"), "4\n")
            .file("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:   3 kB\n")
            .file("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [advise] never\n");
        assert_eq!(tree.view().huge_pool(2 << 20).unwrap().available(), 7);
        assert_eq!(tree.view().memory_available(), Some(3 * 1024));
        assert!(tree.view().shmem_thp());
    }
}
