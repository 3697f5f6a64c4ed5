//! Packages of Debian, downloaded and unpacked.
//!
//! Owns: which packages, and the folder they are unpacked in.
//! **Invariant:** nothing outside that folder changes; what is whole is not made again.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::shell::Shell;

/// With what they need and the machine has not.
const WITH_DEPENDENCIES: [&str; 5] =
    ["qemu-system-x86", "busybox-static", "libibverbs-dev", "ibverbs-providers", "iproute2"];
/// These even if the machine has them: the guest gets them.
const ALWAYS: [&str; 7] = [
    "busybox-static",
    "libibverbs1",
    "libibverbs-dev",
    "ibverbs-providers",
    "libnl-3-200",
    "libnl-route-3-200",
    "iproute2",
];
/// Folders of the kernel's modules that the guest needs something of.
const MODULES: [&str; 8] = [
    "modules.*",
    "kernel/drivers/infiniband/*",
    "kernel/net/ipv4/udp_tunnel.ko*",
    "kernel/net/ipv6/ip6_udp_tunnel.ko*",
    "kernel/drivers/net/dummy.ko*",
    "kernel/fs/configfs/*",
    "kernel/crypto/crc32*",
    "kernel/lib/*",
];

/// Unpacked packages.
#[derive(Debug)]
pub(super) struct Root {
    pub(super) work: PathBuf,
    pub(super) root: PathBuf,
    /// Version of the kernel.
    pub(super) kernel: String,
}

impl Root {
    /// Where shared libraries lie, for the loader.
    pub(super) fn libraries(&self) -> String {
        let dirs = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];
        dirs.map(|dir| self.root.join(dir).to_string_lossy().into_owned()).join(":")
    }

    /// The first of these files that there is.
    pub(super) fn find(&self, files: &[&str]) -> Option<PathBuf> {
        files.iter().map(|file| self.root.join(file)).find(|file| file.exists())
    }
}

/// Sees to it that the packages are there.
///
/// # Errors
/// Why this machine cannot have them.
pub(super) fn unpacked(work: &Path) -> Result<Root, String> {
    if std::env::consts::ARCH != "x86_64" {
        return Err(format!("the guest is an x86-64 machine, this is {}", std::env::consts::ARCH));
    }
    for tool in ["apt-get", "dpkg", "ldd", "cc"] {
        if Shell::program(tool).args(&["--version"]).quiet().is_none() {
            return Err(format!("no {tool}: the guest is made of Debian's packages"));
        }
    }
    let root = work.join("root");
    // A kernel once unpacked serves on, also when there is a newer one.
    if let Ok(kernel) = fs::read_to_string(work.join("unpacked")) {
        return Ok(Root { work: work.to_owned(), root, kernel });
    }
    let io = |error: std::io::Error| format!("{}: {error}", work.display());
    for dir in [&root, &work.join("debs/partial")] {
        fs::create_dir_all(dir).map_err(io)?;
    }
    let image = kernel_package().or_else(|| apt(work, &["update"]).then(kernel_package).flatten());
    let image = image.ok_or("no package of a kernel: is this Debian, and is there a network?")?;
    let kernel = image.strip_prefix("linux-image-").unwrap_or(&image).to_owned();
    let get = |image: &str| {
        let install = ["install", "--download-only", "--no-install-recommends"];
        let download = [&["download", image][..], &ALWAYS].concat();
        apt(work, &[&install[..], &WITH_DEPENDENCIES].concat()) && apt(work, &download)
    };
    // Lists may be old: packages that they name are gone then.
    let got = get(&image) || (apt(work, &["update"]) && get(&image));
    if !got {
        return Err("packages cannot be downloaded: no network, or no rights".into());
    }
    unpack(work, &root, &kernel)?;
    fs::write(work.join("unpacked"), &kernel).map_err(io)?;
    Ok(Root { work: work.to_owned(), root, kernel })
}

fn kernel_package() -> Option<String> {
    let said = Shell::program("apt-cache").args(&["depends", "linux-image-amd64"]).quiet()?;
    let words = said.split_whitespace();
    let fits = |word: &&str| word.starts_with("linux-image-") && word.ends_with("-amd64");
    // The package that is asked about comes first.
    words.filter(fits).find(|word| *word != "linux-image-amd64").map(str::to_owned)
}

fn apt(work: &Path, args: &[&str]) -> bool {
    let debs = work.join("debs");
    let archives = format!("Dir::Cache::archives={}", debs.display());
    Shell::program("apt-get")
        .args(&["-qq", "-y", "-o", &archives, "-o", "APT::Sandbox::User=root"])
        .args(&["-o", "DPkg::Lock::Timeout=300"])
        .args(args)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .dir(&debs)
        .status()
        .unwrap_or(false)
}

fn unpack(work: &Path, root: &Path, kernel: &str) -> Result<(), String> {
    let debs = fs::read_dir(work.join("debs")).map_err(|error| error.to_string())?;
    for deb in debs.flatten().map(|entry| entry.path()) {
        let name = deb.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !name.ends_with(".deb") {
            continue;
        }
        let (deb, to) = (deb.to_string_lossy(), root.to_string_lossy());
        // The whole package of a kernel takes 400 MB.
        let unpacked = if name.starts_with("linux-image") {
            let mut wanted = format!("./boot/vmlinuz-{kernel}");
            for module in MODULES {
                wanted.push_str(&format!(" './lib/modules/{kernel}/{module}'"));
            }
            let both =
                format!("dpkg --fsys-tarfile '{deb}' | tar -x -C '{to}' --wildcards {wanted}");
            Shell::program("sh").args(&["-c", &both]).status()
        } else {
            Shell::program("dpkg").args(&["-x", &deb, &to]).status()
        };
        if !unpacked.unwrap_or(false) {
            return Err(format!("{name} cannot be unpacked"));
        }
    }
    let busybox = root.join("bin/busybox");
    let depmod = Shell::program(busybox)
        .args(&["depmod", "-b", &root.to_string_lossy(), kernel])
        .dir(root)
        .status();
    if depmod.unwrap_or(false) { Ok(()) } else { Err("depmod failed".into()) }
}
