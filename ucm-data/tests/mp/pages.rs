//! M2 and M3 on real huge pages. The pool of the machine is changed for the length of a test, under
//! a lock that all such tests take, and restored.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rustix::fs::FlockOperation;

use crate::parent::{Instance, Proc, is_root, skip};

const NR_HUGEPAGES: &str = "/proc/sys/vm/nr_hugepages";
const SHMEM_THP: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// Sole use of the machine's huge-page settings.
pub(crate) struct HugePages {
    _lock: File,
    before: u64,
}

impl HugePages {
    /// Takes the lock and sets the number of 2 MiB pages; `None` (after saying SKIP) if that is not
    /// possible here.
    pub(crate) fn set(test: &str, pages: u64) -> Option<Self> {
        if !is_root() || !Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB").is_dir() {
            skip(&format!("{test}: needs root and 2 MiB huge pages"));
            return None;
        }
        let lock = File::create(std::env::temp_dir().join("ucm-hugepages.lock")).unwrap();
        rustix::fs::flock(&lock, FlockOperation::LockExclusive).unwrap();
        let this = Self { _lock: lock, before: number(NR_HUGEPAGES) };
        this.resize(pages);
        if counter("free_hugepages") != pages {
            skip(&format!("{test}: the machine has no {pages} huge pages to give"));
            return None;
        }
        Some(this)
    }

    pub(crate) fn resize(&self, pages: u64) {
        fs::write(NR_HUGEPAGES, pages.to_string()).unwrap();
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        self.resize(self.before);
    }
}

fn number(path: &str) -> u64 {
    fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

pub(crate) fn counter(name: &str) -> u64 {
    number(&format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}"))
}

fn counters() -> [u64; 3] {
    ["free_hugepages", "resv_hugepages", "surplus_hugepages"].map(counter)
}

#[test]
fn m2_the_second_attach_takes_no_huge_page_and_sees_the_same_bytes() {
    let Some(_pages) = HugePages::set("m2", 6) else { return };
    let instance = Instance::new();
    let mut first = Proc::start();
    let shape = "huge=1 slots=1024 segment=2097152";
    first.enter_with(&instance.dir(), shape);
    assert_eq!(counters(), [4, 0, 0]);
    for slot in [0, 511, 512, 1023] {
        first.write(slot, u64::from(slot) + 7);
    }
    let mut second = Proc::start();
    assert!(!second.enter_with(&instance.dir(), shape).created);
    for slot in [0, 511, 512, 1023] {
        assert_eq!(second.read(slot), u64::from(slot) + 7);
    }
    assert_eq!(counters(), [4, 0, 0]);
    // A07: gone with the last process, however it ends.
    first.kill();
    assert_eq!(second.read(1023), 1030);
    assert_eq!(counters(), [4, 0, 0]);
    second.kill();
    assert_eq!(counters(), [6, 0, 0]);
}

#[test]
fn m3_without_huge_pages_the_ladder_goes_on_and_says_so() {
    let Some(_pages) = HugePages::set("m3", 0) else { return };
    let mut proc = Proc::start();
    let text = proc.ask("alloc slots=16", "allocated");
    assert!(text.contains("reached=Small degraded=true"), "{text}");
    assert!(text.contains("/proc/sys/vm/nr_hugepages"), "the reason is missing: {text}");
    proc.ask("touch", "touched");
}

#[test]
fn m3_strict_names_a_command_that_really_helps() {
    let Some(pages) = HugePages::set("m3 strict", 3) else { return };
    let mut proc = Proc::start();
    let text = proc.ask("alloc slots=16 strict=2m", "short");
    assert!(text.contains("kind=Shortage"), "{text}");
    assert!(text.contains("page_bytes: 2097152, wanted_bytes: 8388608"), "{text}");
    assert!(text.contains("available_bytes: 6291456"), "{text}");
    assert_eq!(counters(), [3, 0, 0], "pages stay taken after the error");
    let (_, command) = text.rsplit_once("echo ").unwrap();
    let (count, file) = command.split_once(" > ").unwrap();
    assert_eq!(file, NR_HUGEPAGES);
    pages.resize(count.parse().unwrap());
    let text = proc.ask("alloc slots=16 strict=2m", "allocated");
    assert!(text.contains("reached=Huge2M degraded=false tiers=Huge2M,Huge2M"), "{text}");
    assert_eq!(counters(), [0, 0, 0], "the command asked for more pages than needed");
    proc.ask("touch", "touched");
    proc.kill();
    assert_eq!(counters(), [8, 0, 0]);
}

#[test]
fn m3_too_few_huge_pages_give_a_mixed_pool_that_is_marked_degraded() {
    let Some(_pages) = HugePages::set("m3 too few", 6) else { return };
    let mut proc = Proc::start();
    let text = proc.ask("alloc slots=24 threads=1", "allocated");
    assert!(text.contains("reached=Small degraded=true tiers=Huge2M,Small,Small"), "{text}");
    // What the failed second segment had taken is free again.
    assert_eq!(counters(), [2, 0, 0]);
    proc.ask("touch", "touched");
}

#[test]
fn a14_a_neighbour_that_eats_all_pages_after_creation_causes_no_sigbus() {
    let Some(pages) = HugePages::set("a14", 8) else { return };
    let mut proc = Proc::start();
    let text = proc.ask("alloc slots=8", "allocated");
    assert!(text.contains("reached=Huge2M"), "{text}");
    let mut neighbour = Proc::start();
    neighbour.ask("alloc slots=8 strict=2m", "allocated");
    pages.resize(0);
    assert_eq!(counter("free_hugepages"), 0);
    proc.ask("touch", "touched");
    neighbour.ask("touch", "touched");
    proc.finish();
    neighbour.finish();
}

#[test]
fn m3_a_small_gigantic_page_request_is_an_error_or_served_never_a_signal() {
    let Some(_pages) = HugePages::set("m3 1 GiB", 0) else { return };
    let mut proc = Proc::start();
    proc.tell("alloc slots=1 slot=1073741824 segment=1073741824 strict=1g");
    let mut short = false;
    proc.expect_any(&["short", "allocated"], |which| short = which == 0);
    let gigantic = "/sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages";
    assert_eq!(short, !Path::new(gigantic).exists() || number(gigantic) == 0);
    proc.finish();
}

#[test]
fn m3_transparent_huge_pages_are_claimed_only_where_they_are_found() {
    let Some(_pages) = HugePages::set("m3 transparent", 0) else { return };
    let before = fs::read_to_string(SHMEM_THP).unwrap_or_default();
    let Some((_, now)) = before.split_once('[') else {
        return skip("m3 transparent: no shmem THP");
    };
    let now = now.split(']').next().unwrap().to_owned();
    let restore = Setting { path: SHMEM_THP.into(), value: now };
    fs::write(SHMEM_THP, "never").unwrap();
    let mut proc = Proc::start();
    let text = proc.ask("alloc slots=16 strict=thp", "short");
    assert!(
        text.contains("echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "{text}"
    );
    // The remedy.
    fs::write(SHMEM_THP, "advise").unwrap();
    let text = proc.ask("alloc slots=16 strict=thp", "allocated");
    assert!(text.contains("reached=Transparent degraded=false"), "{text}");
    proc.ask("touch", "touched");
    // What the process maps is really huge: the kernel counts it.
    let shmem_huge = fs::read_to_string("/proc/meminfo").unwrap();
    let line = shmem_huge.lines().find(|l| l.starts_with("ShmemHugePages:")).unwrap();
    let kib: u64 = line.split_ascii_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(kib >= 8 << 10, "{line}");
    drop(restore);
}

/// A kernel setting that is restored at the end of the test.
struct Setting {
    path: PathBuf,
    value: String,
}

impl Drop for Setting {
    fn drop(&mut self) {
        let _ = fs::write(&self.path, &self.value);
    }
}
