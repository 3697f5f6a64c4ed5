//! Runs a test once for each family of devices, in a process of its own that finds the fake driver.

use std::{
    fs,
    io::Read as _,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use ucm_transport::GpuFamily;

/// Tells a process that it is the child of a test, and for which family.
const MARK: &str = "UCM_GPU_CHILD";
/// Nothing a child does takes as long; only a hang is ended by it.
const WATCHDOG: Duration = Duration::from_secs(240);

pub(crate) const FAMILIES: [GpuFamily; 2] = [GpuFamily::Cuda, GpuFamily::Hip];

/// Names under which the families' libraries are looked for.
const NAMES: [&str; 6] = [
    "libcuda.so",
    "libcuda.so.1",
    "libamdhip64.so.7",
    "libamdhip64.so.6",
    "libamdhip64.so.5",
    "libamdhip64.so",
];

/// What the child finds instead of a driver.
pub(crate) enum Library<'a> {
    Fake,
    /// The fake, but for these functions.
    Without(&'a [&'a str]),
    /// Files that are no libraries.
    Garbage,
}

/// What a child runs with.
pub(crate) struct Setting<'a> {
    pub(crate) library: Library<'a>,
    pub(crate) env: &'a [(&'a str, &'a str)],
}

impl Setting<'_> {
    pub(crate) const PLAIN: Setting<'static> = Setting { library: Library::Fake, env: &[] };
}

/// Runs `body` for both families, each in a child that finds the fake driver.
pub(crate) fn both(test: &str, body: impl FnOnce(GpuFamily)) {
    each(test, |_| Setting::PLAIN, body);
}

/// Runs `body` for both families, each in a child with this setting. `test` is the full name of the
/// test that calls.
pub(crate) fn each<'a>(
    test: &str,
    setting: impl Fn(GpuFamily) -> Setting<'a>,
    body: impl FnOnce(GpuFamily),
) {
    match std::env::var(MARK).ok() {
        Some(name) => body(FAMILIES.into_iter().find(|family| family.name() == name).unwrap()),
        None => FAMILIES.into_iter().for_each(|family| run(test, family, &setting(family))),
    }
}

/// A further child of a child, which runs another test for the same family.
pub(crate) fn again(test: &str, family: GpuFamily, env: &[(&str, &str)]) {
    let libraries = std::env::var("LD_LIBRARY_PATH").unwrap();
    start(test, family, Path::new(&libraries), env);
}

fn run(test: &str, family: GpuFamily, setting: &Setting<'_>) {
    let dir = tempfile::tempdir().unwrap();
    match setting.library {
        Library::Fake => NAMES.iter().for_each(|name| {
            symlink(fake(), dir.path().join(name)).unwrap();
        }),
        Library::Without(functions) => {
            let mut bytes = fs::read(fake()).unwrap();
            functions.iter().for_each(|name| hide(&mut bytes, name));
            fs::write(dir.path().join("fake"), bytes).unwrap();
            NAMES.iter().for_each(|name| symlink("fake", dir.path().join(name)).unwrap());
        }
        Library::Garbage => NAMES.iter().for_each(|name| {
            fs::write(dir.path().join(name), b"this is no library").unwrap();
        }),
    }
    start(test, family, dir.path(), setting.env);
}

fn start(test: &str, family: GpuFamily, libraries: &Path, env: &[(&str, &str)]) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--include-ignored", "--nocapture"])
        .env("LD_LIBRARY_PATH", libraries)
        .env(MARK, family.name())
        .envs(env.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut out, mut err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let reader = thread::spawn(move || {
        let mut text = String::new();
        let _ = out.read_to_string(&mut text);
        text
    });
    let errors = thread::spawn(move || {
        let mut text = String::new();
        let _ = err.read_to_string(&mut text);
        text
    });
    let deadline = Instant::now() + WATCHDOG;
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if Instant::now() > deadline => {
                child.kill().unwrap();
                child.wait().unwrap();
                break None;
            }
            None => thread::sleep(Duration::from_millis(5)),
        }
    };
    let (text, errors) = (reader.join().unwrap(), errors.join().unwrap());
    let good = status.is_some_and(|status| status.success()) && text.contains("1 passed");
    assert!(good, "{test} for {}: {status:?}\n{text}\n{errors}", family.name());
}

/// The fake library lies where cargo puts what tests depend on.
fn fake() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    let dir = exe.parent().unwrap();
    let names = [dir.join("libucm_fake_gpu.so"), dir.join("../libucm_fake_gpu.so")];
    names.into_iter().find(|path| path.exists()).expect("the fake driver was not built")
}

/// Gives a function another name, so that it is not found.
fn hide(library: &mut [u8], function: &str) {
    let name = [b"\0", function.as_bytes(), b"\0"].concat();
    let at = library.windows(name.len()).position(|window| window == name).unwrap();
    library[at + 1] = b'_';
}
