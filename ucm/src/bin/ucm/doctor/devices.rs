//! What the device engines find, as far as they are built in.
//!
//! **Invariant:** the same code looks that the engines use; a driver that is only on the disk is not
//! called usable.

use super::{Finding, Verdict};

#[cfg(feature = "cuda")]
pub(super) fn cuda() -> Finding {
    opened("CUDA devices", ucm_transport::GpuFamily::Cuda)
}

#[cfg(not(feature = "cuda"))]
pub(super) fn cuda() -> Finding {
    not_built("CUDA devices", "cuda", &["libcuda.so.1"])
}

#[cfg(feature = "rocm")]
pub(super) fn rocm() -> Finding {
    opened("HIP devices", ucm_transport::GpuFamily::Hip)
}

#[cfg(not(feature = "rocm"))]
pub(super) fn rocm() -> Finding {
    let names = ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"];
    not_built("HIP devices", "rocm", &names)
}

#[cfg(any(feature = "cuda", feature = "rocm"))]
fn opened(what: &'static str, family: ucm_transport::GpuFamily) -> Finding {
    use ucm_transport::Gpu;

    let count = match Gpu::count(family) {
        Ok(count) => count,
        Err(reason) => {
            return Finding {
                what,
                verdict: Verdict::Absent,
                seen: reason.reason(),
                used: format!("the {} engine is not used", family.name()),
                remedy: reason.remedy(),
            };
        }
    };
    let mut used = Vec::new();
    let mut seen = Vec::new();
    let mut broken = Vec::new();
    for ordinal in 0..count {
        match Gpu::open(family, ordinal) {
            Ok(gpu) => {
                let info = gpu.info();
                seen.push(format!(
                    "{ordinal}: {} ({} MiB, driver {})",
                    info.name,
                    info.memory_bytes >> 20,
                    info.driver_version
                ));
                let abilities = gpu.abilities();
                let word = |has: bool, name: &str| {
                    if has { name.to_owned() } else { format!("no {name}") }
                };
                used.push(format!(
                    "{ordinal}: {}, {}, {}, {}",
                    word(abilities.batch_copies, "batch copies"),
                    word(abilities.fragment_kernel, "kernel for fragments"),
                    word(abilities.shared_memory, "memory shared with processes"),
                    word(abilities.dmabuf, "dmabuf"),
                ));
            }
            Err(reason) => {
                seen.push(format!("{ordinal}: {}", reason.reason()));
                broken.push(reason.remedy());
            }
        }
    }
    let verdict = if broken.is_empty() { Verdict::Good } else { Verdict::Degraded };
    Finding {
        what,
        verdict,
        seen: seen.join("; "),
        used: used.join("; "),
        remedy: broken.first().cloned().unwrap_or_default(),
    }
}

#[cfg(not(all(feature = "cuda", feature = "rocm")))]
fn not_built(what: &'static str, feature: &str, names: &[&str]) -> Finding {
    use std::path::Path;

    let dirs = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/cuda/lib64",
        "/opt/rocm/lib",
    ];
    let extra = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let found =
        dirs.iter().copied().chain(extra.split(':').filter(|dir| !dir.is_empty())).find_map(
            |dir| names.iter().map(|name| Path::new(dir).join(name)).find(|path| path.exists()),
        );
    let remedy = match found {
        Some(_) => format!("build ucm with the feature `{feature}` to use its devices"),
        None => String::new(),
    };
    Finding {
        what,
        verdict: Verdict::Absent,
        seen: found.map_or_else(
            || format!("{} not found", names.join(", ")),
            |path| path.display().to_string(),
        ),
        used: format!("built without the {feature} engine"),
        remedy,
    }
}
