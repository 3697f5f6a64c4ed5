//! The probes of `ucm doctor`.
//!
//! **Invariant:** a probe that cannot tell says so; it never guesses.

use std::{fs, os::unix::fs::MetadataExt, path::Path};

use rustix::process::{Resource, getrlimit};
use ucm::{BackendKind, Config, Pages};

use super::{Finding, Verdict, devices};

pub(crate) fn all(config: &Config) -> Vec<Finding> {
    vec![
        kernel(),
        huge_pages(config),
        transparent_huge_pages(),
        memory(config),
        memlock(),
        open_files(),
        instance_directory(config),
        backend(config),
        numa(),
        io_uring(),
        devices::cuda(),
        devices::rocm(),
    ]
}

fn read(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn number(path: impl AsRef<Path>) -> Option<u64> {
    read(path)?.parse().ok()
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes >> 20)
}

fn wanted_bytes(config: &Config) -> u64 {
    let pool = |p: &ucm::PoolConfig| {
        (u64::from(p.slots_in_force()) + u64::from(p.reserved)).saturating_mul(p.shard_bytes)
    };
    config.pool.iter().map(pool).fold(0, u64::saturating_add)
}

fn kernel() -> Finding {
    let release = read("/proc/sys/kernel/osrelease").unwrap_or_else(|| "unknown".into());
    let mut parts = release.split(['.', '-']).map_while(|p| p.parse::<u32>().ok());
    let version = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    let (verdict, used, remedy) = if version >= (6, 5) {
        (Verdict::Good, "deaths are proved by pidfds taken from sockets", "")
    } else if version >= (5, 3) {
        (
            Verdict::Degraded,
            "deaths are proved by pidfds opened by process id; ranks must share a pid namespace",
            "Linux 6.5 or newer",
        )
    } else {
        (
            Verdict::Broken,
            "no pidfd: deaths cannot be proved",
            "Linux 5.3 or newer is needed, 6.5 recommended",
        )
    };
    Finding { what: "kernel", verdict, seen: release, used: used.into(), remedy: remedy.into() }
}

fn huge_pages(config: &Config) -> Finding {
    let wanted = wanted_bytes(config);
    let size = |kib: u64| {
        let dir = format!("/sys/kernel/mm/hugepages/hugepages-{kib}kB");
        Some((number(format!("{dir}/nr_hugepages"))?, number(format!("{dir}/free_hugepages"))?))
    };
    let (two, one) = (size(2048), size(1 << 20));
    let show = |name: &str, pages: Option<(u64, u64)>| match pages {
        Some((all, free)) => format!("{name}: {free} of {all} free"),
        None => format!("{name}: not supported"),
    };
    let free_bytes = two.map_or(0, |(_, free)| free << 21);
    let needed = wanted.div_ceil(2 << 20);
    let asked = matches!(config.cache.pages, Pages::Huge2M | Pages::Huge1G);
    let (verdict, used, remedy) = if !asked {
        (
            Verdict::Good,
            format!("not asked for (cache.pages = {:?})", config.cache.pages),
            String::new(),
        )
    } else if wanted == 0 {
        (Verdict::Absent, "no pool is configured, nothing to compare with".into(), String::new())
    } else if free_bytes >= wanted {
        (Verdict::Good, format!("the pools of {} fit", mib(wanted)), String::new())
    } else {
        let broken = config.cache.strict_pages;
        (
            if broken { Verdict::Broken } else { Verdict::Degraded },
            format!(
                "the pools of {} go to a smaller page tier{}",
                mib(wanted),
                if broken { ", which cache.strict_pages forbids" } else { "" }
            ),
            format!(
                "as root: echo {needed} > /proc/sys/vm/nr_hugepages (in containers also hugetlb.2MB.max)"
            ),
        )
    };
    Finding {
        what: "huge pages",
        verdict,
        seen: format!("{}; {}", show("2 MiB", two), show("1 GiB", one)),
        used,
        remedy,
    }
}

fn transparent_huge_pages() -> Finding {
    let shmem = read("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
    let on = ["[always]", "[advise]", "[within_size]", "[force]"]
        .iter()
        .any(|mode| shmem.contains(mode));
    Finding {
        what: "transparent huge pages for shared memory",
        verdict: if on { Verdict::Good } else { Verdict::Absent },
        seen: if shmem.is_empty() { "not supported".into() } else { shmem },
        used: if on {
            "second step of the page ladder".into()
        } else {
            "this step of the page ladder is skipped".into()
        },
        remedy: if on {
            String::new()
        } else {
            "as root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled".into()
        },
    }
}

fn memory(config: &Config) -> Finding {
    let available = read("/proc/meminfo").and_then(|text| {
        let line =
            text.lines().find_map(|line| line.strip_prefix("MemAvailable:").map(str::to_owned))?;
        line.trim().trim_end_matches(" kB").trim().parse::<u64>().ok().map(|kib| kib << 10)
    });
    let limit = cgroup_limit();
    let wanted = wanted_bytes(config);
    let bound =
        [available, limit.map(|(max, used)| max.saturating_sub(used))].into_iter().flatten().min();
    let seen = format!(
        "{} available{}",
        available.map_or_else(|| "unknown".into(), mib),
        limit.map_or_else(String::new, |(max, used)| format!(
            ", cgroup limit {} with {} in use",
            mib(max),
            mib(used)
        ))
    );
    match bound {
        Some(bound) if wanted > bound => Finding {
            what: "memory",
            verdict: Verdict::Broken,
            seen,
            used: format!("the pools want {}", mib(wanted)),
            remedy: format!(
                "lower pool.*.slots or bytes to {} in total, or raise the limit",
                mib(bound)
            ),
        },
        _ => Finding {
            what: "memory",
            verdict: Verdict::Good,
            seen,
            used: format!("the pools want {}", mib(wanted)),
            remedy: String::new(),
        },
    }
}

/// Limit and usage of this process's memory cgroup, version 2 or 1.
fn cgroup_limit() -> Option<(u64, u64)> {
    let own = read("/proc/self/cgroup")?;
    let v2 = own.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or("/");
    let dirs = [format!("/sys/fs/cgroup{v2}"), "/sys/fs/cgroup".into()];
    dirs.iter()
        .find_map(|dir| {
            Some((number(format!("{dir}/memory.max"))?, number(format!("{dir}/memory.current"))?))
        })
        .or_else(|| {
            let dir = "/sys/fs/cgroup/memory";
            let limit = number(format!("{dir}/memory.limit_in_bytes"))?;
            // Version 1 says "unlimited" with a huge number.
            (limit < 1 << 60).then_some((limit, number(format!("{dir}/memory.usage_in_bytes"))?))
        })
}

fn memlock() -> Finding {
    let limit = getrlimit(Resource::Memlock).current;
    let (verdict, seen) = match limit {
        None => (Verdict::Good, "unlimited".into()),
        Some(bytes) if bytes >= 1 << 30 => (Verdict::Good, mib(bytes)),
        Some(bytes) => (Verdict::Degraded, mib(bytes)),
    };
    Finding {
        what: "locked memory (RLIMIT_MEMLOCK)",
        verdict,
        seen,
        used: "registered buffers of io_uring and RDMA count against it; the cache itself does not"
            .into(),
        remedy: if verdict == Verdict::Good {
            String::new()
        } else {
            "ulimit -l unlimited, LimitMEMLOCK=infinity, or --ulimit memlock=-1".into()
        },
    }
}

fn open_files() -> Finding {
    let limit = getrlimit(Resource::Nofile).current;
    let enough = limit.is_none_or(|files| files >= 1024);
    Finding {
        what: "open files (RLIMIT_NOFILE)",
        verdict: if enough { Verdict::Good } else { Verdict::Degraded },
        seen: limit.map_or_else(|| "unlimited".into(), |files| files.to_string()),
        used: "one per segment and two per member".into(),
        remedy: if enough { String::new() } else { "ulimit -n 4096".into() },
    }
}

fn instance_directory(config: &Config) -> Finding {
    let dir = config.instance_dir();
    let me = rustix::process::geteuid().as_raw();
    let (verdict, used, remedy) = match fs::metadata(&dir) {
        Ok(meta) if !meta.is_dir() => {
            (Verdict::Broken, "is no directory".into(), "choose another cache.dir")
        }
        Ok(meta) if meta.uid() != me => (
            Verdict::Broken,
            format!("belongs to user {}, this is user {me}", meta.uid()),
            "choose a cache.dir of this user",
        ),
        Ok(_) => (Verdict::Good, "members meet here".into(), ""),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            (Verdict::Good, "will be created by the first member".into(), "")
        }
        Err(error) => {
            (Verdict::Broken, error.to_string(), "choose a cache.dir that this user can reach")
        }
    };
    Finding {
        what: "instance directory",
        verdict,
        seen: dir.display().to_string(),
        used,
        remedy: remedy.into(),
    }
}

fn backend(config: &Config) -> Finding {
    let finding = |verdict, seen: String, used: String, remedy: &str| Finding {
        what: "backend",
        verdict,
        seen,
        used,
        remedy: remedy.into(),
    };
    match config.backend.kind {
        BackendKind::File => {
            let dir = &config.backend.dir;
            let writable =
                rustix::fs::access(dir, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK);
            match (dir.exists(), writable) {
                (true, Ok(())) => finding(
                    Verdict::Good,
                    dir.display().to_string(),
                    "files, buffered reads and writes".into(),
                    "",
                ),
                (true, Err(error)) => finding(
                    Verdict::Broken,
                    dir.display().to_string(),
                    format!("cannot be written: {error}"),
                    "give this user the directory, or choose another backend.dir",
                ),
                (false, _) => {
                    finding(Verdict::Good, dir.display().to_string(), "will be created".into(), "")
                }
            }
        }
        BackendKind::Memory => finding(
            Verdict::Degraded,
            "memory".into(),
            "each process keeps its own; nothing survives it".into(),
            "backend.kind = \"file\" for real use",
        ),
        _ => finding(
            Verdict::Absent,
            "none".into(),
            "what is not in the cache must be recomputed".into(),
            "",
        ),
    }
}

fn numa() -> Finding {
    let nodes = read("/sys/devices/system/node/has_memory").unwrap_or_else(|| "unknown".into());
    let one = nodes == "0";
    Finding {
        what: "NUMA nodes with memory",
        verdict: if one { Verdict::Good } else { Verdict::Degraded },
        seen: nodes,
        used: if one {
            "one node: nothing to place".into()
        } else {
            "pages lie where the creating process runs".into()
        },
        remedy: String::new(),
    }
}

fn io_uring() -> Finding {
    let disabled = number("/proc/sys/kernel/io_uring_disabled");
    let (verdict, seen) = match disabled {
        Some(0) => (Verdict::Good, "allowed"),
        Some(1) => (Verdict::Degraded, "allowed for privileged processes only"),
        Some(_) => (Verdict::Degraded, "disabled by kernel.io_uring_disabled"),
        None if Path::new("/proc/sys/kernel").exists() => {
            (Verdict::Good, "no switch for it in this kernel")
        }
        None => (Verdict::Absent, "cannot tell"),
    };
    Finding {
        what: "io_uring",
        verdict,
        seen: seen.into(),
        used: "not used yet: the file backend reads and writes in threads".into(),
        remedy: String::new(),
    }
}
