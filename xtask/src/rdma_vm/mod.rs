//! `cargo xtask rdma-vm`: the tests of the rdma engine over real verbs, in a virtual machine.
//!
//! Few machines have an RDMA adapter, and few kernels the software one (`rdma_rxe`). Debian's kernel has
//! it; QEMU boots that kernel in seconds, with the tests and the verbs library in its memory disk.
//! Packages are downloaded and unpacked below the target folder, nothing is installed.
//!
//! Owns: the order of the steps, and what their outcome counts as.
//! **Invariant:** tests that did not run are never counted as passed; a guest that hangs is ended.

mod archive;
mod guest;
mod packages;
mod verbs;

use std::{fs, path::PathBuf, time::Instant};

use cargo_metadata::Message;

use crate::{
    shell::{Failure, Shell, fail, print, say},
    summary::{LibtestReader, Summary},
    workspace::Workspace,
};

/// Options of `cargo xtask rdma-vm`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only tests whose name contains this
    #[arg(value_name = "FILTER")]
    filter: Option<String>,
    /// End the guest after so many seconds
    #[arg(long, default_value_t = 900)]
    limit: u64,
    /// Run this command of the guest's shell instead of the tests
    #[arg(long, value_name = "COMMAND")]
    command: Option<String>,
    /// Put this program into the guest's /bin, too
    #[arg(long, value_name = "PROGRAM")]
    program: Vec<PathBuf>,
}

impl Args {
    /// What continuous integration runs.
    pub(crate) fn standard() -> Self {
        Self { filter: None, limit: 900, command: None, program: Vec::new() }
    }
}

/// The benchmark, as the guest runs it.
const BENCH: &str = "/bin/ucm-bench net --quiet --engine rdma --case 4096,61x1728,2602x1728,1048576 \
    --case-ms 50 --runs 1; echo \"GUEST-RC=$?\"\n";

/// What became of it.
#[derive(Debug)]
pub(crate) enum Ran {
    /// The tests ran; none failed.
    Tests(Summary),
    /// Why they cannot run here.
    CannotRun(String),
}

/// Runs the tests for a person.
pub(crate) fn run(args: &Args, workspace: &Workspace) -> Result<(), Failure> {
    match run_counted(args, workspace)? {
        Ran::Tests(summary) => print(&summary.to_string()),
        Ran::CannotRun(reason) => {
            print(&format!("SKIP {reason}"));
            print("0 passed, 0 failed, 1 skipped");
        }
    }
    Ok(())
}

/// Runs the tests.
pub(crate) fn run_counted(args: &Args, workspace: &Workspace) -> Result<Ran, Failure> {
    let begin = Instant::now();
    let phase = |what: &str| say(&format!("[{:3} s] {what}", begin.elapsed().as_secs()));
    phase("packages");
    let root = match packages::unpacked(&workspace.target().join("rdma-vm")) {
        Ok(root) => root,
        Err(reason) => return Ok(Ran::CannotRun(reason)),
    };
    phase("tests");
    let tests = build(workspace)?;
    let bench = build_bench(workspace)?;
    let layout = verbs::layout(&root, workspace)?;
    phase("memory disk");
    let script = match &args.command {
        Some(command) => format!("{command}; echo \"GUEST-RC=$?\"\n"),
        None => script(&tests, args.filter.as_deref()),
    };
    // Speed means nothing here; that it runs, and brings the right bytes, does.
    let benches = args.command.is_none() && args.filter.is_none();
    let script = if benches { script + BENCH } else { script };
    let mut programs: Vec<PathBuf> = tests.iter().map(|(_, program)| program.clone()).collect();
    programs.push(bench);
    programs.extend(args.program.iter().cloned());
    let disk = guest::disk(&root, &programs, &layout, &script)?;
    phase("guest");
    let mut reader = LibtestReader::default();
    let mut codes = Vec::new();
    let ended = guest::boot(&root, &disk, args.limit, |line| {
        // The console's first lines begin with what clears a screen.
        print(line);
        reader.line(line);
        codes.extend(line.strip_prefix("GUEST-RC=").map(str::to_owned));
    })?;
    phase("end");
    let wanted = if args.command.is_some() { 1 } else { tests.len() + usize::from(benches) };
    let good = ended && codes.len() == wanted && codes.iter().all(|code| code == "0");
    let mut summary = reader.finish();
    if !good {
        summary.broken_run();
        print(&summary.to_string());
        let why = if ended { "" } else { "the guest did not end in time: see above" };
        return fail(why);
    }
    if args.command.is_none() && summary.total() == 0 {
        return fail("no test matches");
    }
    if summary.skipped() > 0 {
        summary.reasons().for_each(|reason| print(&reason));
        return fail("tests were skipped where they should run: the adapter did not come up");
    }
    Ok(Ran::Tests(summary))
}

/// Builds the tests: what they are, and the programs.
fn build(workspace: &Workspace) -> Result<Vec<(&'static str, PathBuf)>, Failure> {
    let said = Shell::cargo(&["test", "--no-run", "-p", "ucm-transport"])
        .args(&["--features", "rdma,testing", "--lib", "--test", "rdma"])
        .args(&["--message-format", "json-render-diagnostics"])
        .dir(workspace.root())
        .stdout()?;
    let mut programs = Vec::new();
    for message in Message::parse_stream(said.as_bytes()) {
        if let Ok(Message::CompilerArtifact(artifact)) = message
            && let Some(program) = artifact.executable
        {
            let kind = if artifact.target.is_test() { "rdma" } else { "lib" };
            programs.push((kind, program.into_std_path_buf()));
        }
    }
    if programs.len() == 2 { Ok(programs) } else { fail(format!("no tests: {programs:?}")) }
}

/// Builds the benchmark; the program.
fn build_bench(workspace: &Workspace) -> Result<PathBuf, Failure> {
    let said = Shell::cargo(&["build", "-p", "ucm-bench", "--bin", "ucm-bench"])
        .args(&["--message-format", "json-render-diagnostics"])
        .dir(workspace.root())
        .stdout()?;
    let programs = Message::parse_stream(said.as_bytes()).filter_map(|message| match message {
        Ok(Message::CompilerArtifact(artifact)) => artifact.executable,
        _ => None,
    });
    match programs.last() {
        Some(program) => Ok(program.into_std_path_buf()),
        None => fail("no program of ucm-bench"),
    }
}

/// What the guest runs.
fn script(tests: &[(&str, PathBuf)], filter: Option<&str>) -> String {
    let mut script = String::new();
    for (kind, program) in tests {
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        let which = match (*kind, filter) {
            ("lib", Some(filter)) => format!("{filter} --skip tcp::"),
            ("lib", None) => "rdma::".to_owned(),
            (_, filter) => format!("{} --skip peer::entry", filter.unwrap_or_default()),
        };
        // One at a time: some count what the process has.
        let options = "--include-ignored --show-output --test-threads=1";
        script.push_str(&format!("/bin/{name} {options} {which}; echo \"GUEST-RC=$?\"\n"));
    }
    script
}

/// Reads a file of ours.
fn read(path: &std::path::Path) -> Result<Vec<u8>, Failure> {
    fs::read(path).map_err(|error| Failure::new(format!("{}: {error}", path.display())))
}
