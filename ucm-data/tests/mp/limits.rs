//! Control group limits: an error with numbers, never an OOM kill and never a SIGBUS.

use std::fs;
use std::path::{Path, PathBuf};

use crate::pages::{HugePages, counter};
use crate::parent::{Proc, is_root, skip};

/// A control group of this test, removed at the end.
struct Group(PathBuf);

impl Group {
    fn make(parent: &Path, test: &str) -> Option<Self> {
        let dir = parent.join(format!("ucm-test-{test}-{}", std::process::id()));
        match fs::create_dir(&dir) {
            Ok(()) => Some(Self(dir)),
            Err(error) => {
                skip(&format!("{test}: {}: {error}", dir.display()));
                None
            }
        }
    }

    fn set(&self, file: &str, value: &str) -> bool {
        fs::write(self.0.join(file), value).is_ok()
    }

    fn take_in(&self, proc: &Proc) {
        fs::write(self.0.join("cgroup.procs"), proc.pid().to_string()).unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// Directory of this process's group in the hierarchy of `controller` (v1), or the v2 root.
fn hierarchy(controller: &str) -> Option<(PathBuf, bool)> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mount = |kind: &str, option: &str| {
        mounts.lines().find_map(|line| {
            let (left, right) = line.split_once(" - ")?;
            let fits = right.starts_with(&format!("{kind} "))
                && (option.is_empty() || right.rsplit(' ').next()?.split(',').any(|o| o == option));
            fits.then(|| PathBuf::from(left.split(' ').nth(4).unwrap()))
        })
    };
    if let Some(mount) = mount("cgroup", controller) {
        let path =
            groups.lines().find_map(|l| l.split_once(&format!(":{controller}:"))?.1.into())?;
        return Some((mount.join(path.trim_start_matches('/')), false));
    }
    let mount = mount("cgroup2", "")?;
    let offered = fs::read_to_string(mount.join("cgroup.controllers")).ok()?;
    offered.split_ascii_whitespace().any(|c| c == controller).then_some((mount, true))
}

#[test]
fn m3_a_memory_limit_below_the_pool_is_an_error_not_an_oom_kill() {
    if !is_root() {
        return skip("m3 memory limit: needs root");
    }
    let Some((parent, v2)) = hierarchy("memory") else {
        return skip("m3 memory limit: no memory controller");
    };
    if v2 {
        let _ = fs::write(parent.join("cgroup.subtree_control"), "+memory");
    }
    let Some(group) = Group::make(&parent, "m3-memory") else { return };
    let file = if v2 { "memory.max" } else { "memory.limit_in_bytes" };
    if !group.set(file, &(64 << 20).to_string()) {
        return skip("m3 memory limit: the limit cannot be set");
    }
    let mut proc = Proc::start();
    group.take_in(&proc);
    let text = proc.ask("alloc slots=256 prefer=small segment=268435456", "short");
    assert!(text.contains("kind=Shortage"), "{text}");
    assert!(text.contains("wanted_bytes: 268435456"), "{text}");
    assert!(text.contains(&group.0.join(file).display().to_string()), "{text}");
    // In small segments on several threads: still no kill, the sum is what counts.
    let text = proc.ask("alloc slots=256 prefer=small threads=4", "short");
    assert!(text.contains("kind=Shortage"), "{text}");
    // What fits is served and can be used.
    let text = proc.ask("alloc slots=32 prefer=small threads=4", "allocated");
    assert!(text.contains("reached=Small degraded=false"), "{text}");
    proc.ask("touch", "touched");
    proc.finish();
}

#[test]
fn m3_a_hugetlb_limit_below_the_pool_falls_to_the_next_tier_or_is_a_strict_error() {
    let Some(_pages) = HugePages::set("m3 hugetlb limit", 16) else { return };
    let Some((parent, v2)) = hierarchy("hugetlb") else {
        return skip("m3 hugetlb limit: no hugetlb controller");
    };
    if v2 {
        let _ = fs::write(parent.join("cgroup.subtree_control"), "+hugetlb");
    }
    let Some(group) = Group::make(&parent, "m3-hugetlb") else { return };
    let file = if v2 { "hugetlb.2MB.max" } else { "hugetlb.2MB.limit_in_bytes" };
    if !group.set(file, &(12 << 20).to_string()) {
        return skip("m3 hugetlb limit: the limit cannot be set");
    }
    let mut proc = Proc::start();
    group.take_in(&proc);
    let text = proc.ask("alloc slots=16 strict=2m threads=1", "short");
    assert!(text.contains("kind=Shortage"), "{text}");
    assert!(text.contains(&group.0.join(file).display().to_string()), "{text}");
    assert!(text.contains("wanted_bytes: 8388608, available_bytes: 4194304"), "{text}");
    assert_eq!(counter("free_hugepages"), 16, "the first segment's pages stay taken");
    let text = proc.ask("alloc slots=16 threads=1", "allocated");
    assert!(text.contains("degraded=true tiers=Huge2M,Small"), "{text}");
    assert_eq!(counter("free_hugepages"), 12);
    proc.ask("touch", "touched");
    proc.finish();
}
