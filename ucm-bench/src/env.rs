//! Where a measurement was made.
//!
//! Owns: what is read from the machine; workloads add what they got (page tier, engine, features).
//! **Invariant:** what cannot be found out is empty, never guessed.

use std::{fs, process::Command, thread};

use serde::{Deserialize, Serialize};

/// The machine and the program under measurement.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Env {
    /// The processor's name.
    pub cpu_model: String,
    /// Cores this process may use.
    pub cores: u64,
    /// Name and release of the kernel.
    pub kernel: String,
    /// Which pages the data plane got, if the workload has one.
    pub page_tier: Option<String>,
    /// Which transfer engine moved the bytes, if any.
    pub engine: Option<String>,
    /// Optional features in use.
    pub features: Vec<String>,
    /// The source revision; with `-dirty` when files differ from it.
    pub git_revision: Option<String>,
    /// Load average over the last 1, 5 and 15 minutes, at start.
    pub load_average: Vec<f64>,
    /// Memory of the machine in bytes.
    pub memory_bytes: u64,
}

impl Env {
    /// Reads it from this machine.
    pub fn collect() -> Self {
        let uname = rustix::system::uname();
        let part = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
        Self {
            cpu_model: cpu_model(&read("/proc/cpuinfo")),
            cores: thread::available_parallelism().map_or(0, |n| n.get() as u64),
            kernel: format!("{} {}", part(uname.sysname()), part(uname.release())),
            page_tier: None,
            engine: None,
            features: Vec::new(),
            git_revision: git_revision(),
            load_average: load_average(&read("/proc/loadavg")),
            memory_bytes: memory_bytes(&read("/proc/meminfo")),
        }
    }
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn cpu_model(cpuinfo: &str) -> String {
    let names = ["model name", "Processor", "cpu model", "Hardware"];
    let value = |name: &&str| {
        let line = cpuinfo.lines().find(|line| line.starts_with(*name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    names.iter().find_map(value).unwrap_or_default()
}

fn load_average(loadavg: &str) -> Vec<f64> {
    loadavg.split_whitespace().take(3).filter_map(|number| number.parse().ok()).collect()
}

fn memory_bytes(meminfo: &str) -> u64 {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0).saturating_mul(1024)
}

fn git_revision() -> Option<String> {
    if let Some(built_from) = option_env!("UCM_GIT_REVISION") {
        return Some(built_from.to_owned());
    }
    let output = Command::new("git")
        .args(["describe", "--always", "--dirty", "--abbrev=12"])
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    (output.status.success() && !text.trim().is_empty()).then(|| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::{Env, cpu_model, load_average, memory_bytes};

    #[test]
    fn proc_files_are_read() {
        assert_eq!(cpu_model("processor\t: 0\nmodel name\t: Fast CPU 9\n"), "Fast CPU 9");
        assert_eq!(cpu_model("processor\t: 0\n"), "");
        assert_eq!(load_average("0.50 1.25 2.00 1/99 4242\n"), [0.5, 1.25, 2.0]);
        assert_eq!(memory_bytes("MemTotal:       2048 kB\nMemFree: 1 kB\n"), 2 << 20);
        assert_eq!(memory_bytes(""), 0);
    }

    #[test]
    fn this_machine_is_described() {
        let env = Env::collect();
        assert!(env.cores >= 1);
        assert!(env.kernel.starts_with("Linux "), "{}", env.kernel);
        assert_eq!(env.load_average.len(), 3);
        assert!(env.memory_bytes > 0);
    }
}
