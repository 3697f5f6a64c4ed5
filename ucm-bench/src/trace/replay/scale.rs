//! How much of the real geometry this machine can hold.
//!
//! Owns: the choice of the working set, of the number of layers, and what is said about it.
//! **Invariant:** what was chosen follows from memory, disk and options alone, so a run on the same
//! machine can be repeated.

use std::{fs, path::Path};

use crate::error::BenchError;

/// qwen3-8b: one layer's keys and values of 128 tokens (2 × 128 × 8 heads × 128 × 2 bytes).
pub(super) const SHARD_BYTES: u64 = 524_288;
pub(super) const LAYERS: u32 = 36;
pub(super) const BLOCK_TOKENS: u64 = 128;

/// Fewer layers would not show that they arrive one after the other.
const LEAST_LAYERS: u32 = 2;
/// Different blocks wanted before more layers are: enough conversations for hits and misses.
const WANTED_BLOCKS: u64 = 1024;
/// More than this makes a run longer, not better.
const MOST_BYTES: u64 = 4 << 30;

/// The geometry of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scale {
    pub(super) layers: u32,
    /// Different blocks that may be stored.
    pub(super) blocks: usize,
}

/// What limits the working set, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) memory: u64,
    pub(super) disk: u64,
}

impl Limits {
    /// Of this machine (or container), and of the file system of `dir`.
    pub(super) fn read(dir: &Path) -> Result<Self, BenchError> {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let container = fs::read_to_string("/sys/fs/cgroup/memory.max").unwrap_or_default();
        let disk =
            rustix::fs::statvfs(dir).map_err(|e| BenchError::path("measure", dir, e.into()))?;
        Ok(Self {
            memory: memory(&meminfo, &container),
            disk: disk.f_bavail.saturating_mul(disk.f_frsize),
        })
    }

    /// An eighth of the memory, a quarter of the disk: the page cache holds the files a second time,
    /// and other programs go on.
    fn working_set(self) -> u64 {
        (self.memory / 8).min(self.disk / 4).min(MOST_BYTES)
    }
}

fn memory(meminfo: &str, container: &str) -> u64 {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    let machine = kib.unwrap_or(0).saturating_mul(1024);
    container.trim().parse().map_or(machine, |limit: u64| machine.min(limit))
}

impl Scale {
    /// Chooses within the limits, or as the options say.
    pub(super) fn choose(
        limits: Limits,
        shard_bytes: u64,
        layers: Option<u32>,
        working_set: Option<u64>,
    ) -> Result<Self, BenchError> {
        let bytes = working_set.unwrap_or_else(|| limits.working_set());
        let layers = layers.unwrap_or_else(|| {
            let fitting = bytes / shard_bytes.saturating_mul(WANTED_BLOCKS);
            u32::try_from(fitting).unwrap_or(LAYERS).clamp(LEAST_LAYERS, LAYERS)
        });
        let block_bytes = shard_bytes.saturating_mul(u64::from(layers));
        let blocks = bytes / block_bytes.max(1);
        if blocks < 16 {
            return Err(BenchError::Environment(format!(
                "a working set of {bytes} bytes has room for {blocks} blocks of {block_bytes} bytes, \
                 16 are needed: memory available {}, disk free {}; free some, or give \
                 --working-set-bytes and --dir",
                limits.memory, limits.disk
            )));
        }
        Ok(Self { layers, blocks: usize::try_from(blocks).unwrap_or(usize::MAX) })
    }
}

#[cfg(test)]
mod tests {
    use super::{LAYERS, Limits, SHARD_BYTES, Scale, memory};

    fn choose(memory: u64, disk: u64) -> Scale {
        Scale::choose(Limits { memory, disk }, SHARD_BYTES, None, None).unwrap()
    }

    #[test]
    fn blocks_come_before_layers_and_both_stay_within_limits() {
        let gib = 1 << 30;
        assert_eq!(choose(16 * gib, 1 << 40), Scale { layers: 4, blocks: 1024 });
        assert_eq!(choose(2 * gib, 1 << 40), Scale { layers: 2, blocks: 256 });
        assert_eq!(choose(1 << 40, 1 << 40), Scale { layers: 8, blocks: 1024 });
        assert_eq!(choose(1 << 40, 4 * gib), Scale { layers: 2, blocks: 1024 });
        let all = Limits { memory: 1 << 40, disk: 1 << 40 };
        let whole = Scale::choose(all, SHARD_BYTES, Some(LAYERS), Some(36 * gib)).unwrap();
        assert_eq!(whole, Scale { layers: 36, blocks: 2048 });
    }

    #[test]
    fn too_little_is_an_error_with_the_numbers() {
        let poor = Limits { memory: 64 << 20, disk: 1 << 40 };
        let error = Scale::choose(poor, SHARD_BYTES, None, None).unwrap_err();
        assert_eq!(error.exit_code(), 3);
        assert!(error.to_string().contains("67108864"), "{error}");
    }

    #[test]
    fn a_container_may_have_less_than_its_machine() {
        let meminfo = "MemTotal: 9 kB\nMemAvailable:   1000 kB\n";
        assert_eq!(memory(meminfo, "max\n"), 1_024_000);
        assert_eq!(memory(meminfo, "4096\n"), 4096);
        assert_eq!(memory("", ""), 0);
    }
}
