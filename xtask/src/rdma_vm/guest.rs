//! The virtual machine: what is in its memory, and its run.
//!
//! **Invariant:** the machine ends by itself, or is ended when its time is up.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use super::{archive::Archive, packages::Root, read};
use crate::shell::{Failure, Shell, fail, say};

const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
/// In the order in which they are wanted; the software adapter needs a checksum that it does not name.
const MODULES: [&str; 4] = ["dummy", "crc32_generic", "rdma_rxe", "ib_uverbs"];

/// The first program of the guest, up to what it is to run.
const INIT: &str = r#"#!/bin/sh
export PATH=/bin HOME=/ RUST_BACKTRACE=1 UCM_VERBS_LAYOUT=/etc/verbs.layout
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
mkdir -p /dev/shm; mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs /tmp
ulimit -l unlimited
for module in $(cat /etc/modules); do insmod "$module" || echo "$module cannot be loaded"; done
ip link set lo up
ip link add d0 type dummy; ip link set d0 mtu 4200; ip addr add 10.77.0.1/24 dev d0; ip link set d0 up
rdma link add rxe0 type rxe netdev d0
rdma link
echo "GUEST-UP $(uname -r)"
"#;

/// The memory disk, as a file.
pub(super) fn disk(
    root: &Root,
    programs: &[PathBuf],
    layout: &[u8],
    script: &str,
) -> Result<PathBuf, Failure> {
    let mut archive = Archive::default();
    for folder in ["proc", "sys", "dev", "tmp", "run", "root"] {
        archive.folder(folder);
    }
    let busybox = root.root.join("bin/busybox");
    let applets = Shell::program(&busybox).args(&["--list"]).quiet().unwrap_or_default();
    for applet in applets.lines().filter(|applet| !["busybox", "ip"].contains(applet)) {
        archive.link(&format!("bin/{applet}"), "busybox");
    }
    archive.file("bin/busybox", read(&busybox)?);
    for tool in ["ip", "rdma"] {
        let places = [format!("bin/{tool}"), format!("sbin/{tool}"), format!("usr/bin/{tool}")];
        let found = root.find(&places.each_ref().map(String::as_str));
        let found = found.ok_or_else(|| Failure::new(format!("no {tool} among the packages")))?;
        add_program(&mut archive, root, &found)?;
    }
    for program in programs {
        add_program(&mut archive, root, program)?;
    }
    add_verbs(&mut archive, root)?;
    add_modules(&mut archive, root)?;
    archive.file("etc/verbs.layout", layout.to_vec());
    archive.file("init", format!("{INIT}{script}echo GUEST-END\npoweroff -f\n").into_bytes());
    let file = root.work.join("disk.img");
    fs::write(&file, archive.pack())
        .map_err(|error| Failure::new(format!("{}: {error}", file.display())))?;
    Ok(file)
}

/// A program without its debug information, and the libraries it is linked with.
fn add_program(archive: &mut Archive, root: &Root, program: &Path) -> Result<(), Failure> {
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let slim = root.work.join("slim");
    let paths = [&slim, program].map(|path| path.to_string_lossy().into_owned());
    let stripped = Shell::program("strip").args(&["-o"]).args(&paths).quiet().is_some();
    archive.file(&format!("bin/{name}"), read(if stripped { &slim } else { program })?);
    add_libraries(archive, root, program)
}

fn add_libraries(archive: &mut Archive, root: &Root, of: &Path) -> Result<(), Failure> {
    let said = Shell::program("ldd")
        .args(&[of.to_string_lossy()])
        .env("LD_LIBRARY_PATH", &root.libraries())
        .quiet()
        .unwrap_or_default();
    let inside = root.root.to_string_lossy();
    for path in said.split_whitespace().filter(|word| word.starts_with('/')) {
        let place = path.strip_prefix(&*inside).unwrap_or(path);
        if !archive.contains(place) {
            archive.file(place, read(Path::new(path))?);
        }
    }
    Ok(())
}

/// The verbs library, which programs load at run time, and its driver of the software adapter.
fn add_verbs(archive: &mut Archive, root: &Root) -> Result<(), Failure> {
    let library = root.root.join(LIBRARIES).join("libibverbs.so.1");
    archive.file(&format!("{LIBRARIES}/libibverbs.so.1"), read(&library)?);
    add_libraries(archive, root, &library)?;
    let drivers = root.root.join(LIBRARIES).join("libibverbs");
    let entries = fs::read_dir(&drivers)
        .map_err(|error| Failure::new(format!("{}: {error}", drivers.display())))?;
    for driver in entries.flatten() {
        let name = driver.file_name().to_string_lossy().into_owned();
        if name.starts_with("librxe") {
            archive.file(&format!("{LIBRARIES}/libibverbs/{name}"), read(&driver.path())?);
            add_libraries(archive, root, &driver.path())?;
        }
    }
    archive.file("etc/libibverbs.d/rxe.driver", b"driver rxe\n".to_vec());
    Ok(())
}

/// Modules with what they need, in the order of loading.
fn add_modules(archive: &mut Archive, root: &Root) -> Result<(), Failure> {
    let dir = root.root.join("lib/modules").join(&root.kernel);
    let list = String::from_utf8_lossy(&read(&dir.join("modules.dep"))?).into_owned();
    let mut order: Vec<&str> = Vec::new();
    for wanted in MODULES {
        let file = |line: &&str| {
            let module = line.split(':').next().unwrap_or_default();
            let name = module.rsplit('/').next().unwrap_or_default();
            name.split('.').next() == Some(wanted)
        };
        // A module that is not there is part of the kernel, or the guest will say what is missing.
        let Some(line) = list.lines().find(file) else { continue };
        let (module, needs) = line.split_once(':').unwrap_or((line, ""));
        for one in needs.split_whitespace().rev().chain([module]) {
            if !order.contains(&one) {
                order.push(one);
            }
        }
    }
    let mut names = String::new();
    for module in order {
        let place = format!("lib/modules/{module}");
        archive.file(&place, read(&dir.join(module))?);
        names.push_str(&format!("/{place}\n"));
    }
    archive.file("etc/modules", names.into_bytes());
    Ok(())
}

/// Runs the machine; each line of its console goes to `line`. Says whether it ended in time.
pub(super) fn boot(
    root: &Root,
    disk: &Path,
    limit: u64,
    mut line: impl FnMut(&str),
) -> Result<bool, Failure> {
    let Some(program) = root.find(&["usr/bin/qemu-system-x86_64"]) else {
        return fail("no qemu-system-x86_64 among the packages");
    };
    let kernel = root.root.join("boot").join(format!("vmlinuz-{}", root.kernel));
    let share = |name: &str| root.root.join("usr/share").join(name);
    let mut command = Command::new(program);
    command.arg("-L").arg(share("qemu")).arg("-L").arg(share("seabios"));
    // Some hosts' KVM runs only kernels that know of it.
    let writable = fs::File::options().write(true).open("/dev/kvm").is_ok();
    if writable && !Path::new("/sys/module/kvm_pvm").exists() {
        command.args(["-accel", "kvm", "-cpu", "host"]);
    } else {
        command.args(["-accel", "tcg,thread=multi", "-cpu", "max"]);
    }
    command
        .args(["-M", "q35", "-smp", "2", "-m", "2048", "-nodefaults", "-display", "none"])
        .args(["-no-reboot", "-serial", "stdio", "-monitor", "none"])
        .arg("-kernel")
        .arg(kernel)
        .arg("-initrd")
        .arg(disk)
        .args(["-append", "console=ttyS0 quiet panic=-1 mitigations=off nokaslr"])
        .env("LD_LIBRARY_PATH", root.libraries())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit());
    say(&format!("$ {command:?}"));
    let mut child =
        command.spawn().map_err(|error| Failure::new(format!("cannot run qemu: {error}")))?;
    let out = child.stdout.take();
    let deadline = Instant::now() + Duration::from_secs(limit);
    // The watchdog has the process: it ends it, or sees it end.
    let watchdog = std::thread::spawn(move || {
        loop {
            if let Ok(Some(status)) = child.try_wait() {
                return status.success();
            }
            if Instant::now() > deadline {
                let _ = child.kill();
                let _ = child.wait();
                return false;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let mut whole = false;
    if let Some(out) = out {
        for bytes in BufReader::new(out).split(b'\n').map_while(Result::ok) {
            let text = String::from_utf8_lossy(&bytes);
            let text = text.trim_end_matches('\r');
            whole |= text == "GUEST-END";
            line(text);
        }
    }
    let ended = watchdog.join().unwrap_or(false);
    Ok(ended && whole)
}
