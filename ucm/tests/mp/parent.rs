//! The parent's side: child processes and what they say.

use std::{
    collections::{BTreeSet, VecDeque},
    io::{BufRead as _, BufReader, Write as _},
    os::unix::fs::MetadataExt as _,
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::child::MARK;

/// A generous watchdog: no test waits this long for anything that works.
const WATCHDOG: Duration = Duration::from_secs(60);

/// A child process.
pub(crate) struct Proc {
    child: Child,
    input: ChildStdin,
    lines: Receiver<Value>,
    heard: VecDeque<Value>,
}

impl Proc {
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// As [`start`](Self::start), with more environment.
    pub(crate) fn start_with(environment: &[(&str, &str)]) -> Self {
        Self::start_by(Command::new(std::env::current_exe().unwrap()), environment)
    }

    /// The first process of a PID namespace of its own; `None` where that is not allowed. A signal goes
    /// to its parent, whose death it does not survive.
    pub(crate) fn start_in_pid_namespace() -> Option<Self> {
        let unshare = || {
            let mut command = Command::new("unshare");
            command.args(["--pid", "--fork", "--kill-child", "--"]);
            command
        };
        let allowed = unshare().arg("true").stderr(Stdio::null()).status().ok()?.success();
        allowed.then(|| {
            let mut command = unshare();
            command.arg(std::env::current_exe().unwrap());
            Self::start_by(command, &[])
        })
    }

    fn start_by(mut command: Command, environment: &[(&str, &str)]) -> Self {
        let mut child = command
            .args(["--exact", "child::entry", "--ignored", "--nocapture"])
            .env(MARK, "1")
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (send, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                // The test harness prints before and after; a line of ours may follow its text.
                if let Some((_, text)) = line.split_once("@@")
                    && send.send(serde_json::from_str(text).unwrap()).is_err()
                {
                    return;
                }
            }
        });
        Self { child, input, lines, heard: VecDeque::new() }
    }

    /// Sends an order without waiting.
    pub(crate) fn tell(&mut self, order: &Value) {
        writeln!(self.input, "{order}").unwrap();
    }

    /// Sends an order and waits for its answer (events of other kinds are kept).
    pub(crate) fn ask(&mut self, order: &Value) -> Value {
        self.tell(order);
        self.expect("answer")
    }

    /// The next message of this kind, in order.
    pub(crate) fn expect(&mut self, kind: &str) -> Value {
        let deadline = Instant::now() + WATCHDOG;
        loop {
            if let Some(at) = self.heard.iter().position(|m| m["kind"] == kind) {
                return self.heard.remove(at).unwrap();
            }
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(message) => self.heard.push_back(message),
                Err(RecvTimeoutError::Timeout) => panic!("no {kind:?}; heard {:?}", self.heard),
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("child ended without {kind:?}; heard {:?}", self.heard)
                }
            }
        }
    }

    /// All messages of this kind that have come so far.
    pub(crate) fn drain(&mut self, kind: &str) -> Vec<Value> {
        self.heard.extend(self.lines.try_iter());
        let (wanted, rest) = self.heard.drain(..).partition(|m| m["kind"] == kind);
        self.heard = rest;
        wanted.into()
    }

    pub(crate) fn join(&mut self, join: &Value) -> Value {
        let mut order = join.clone();
        order["do"] = "join".into();
        let answer = self.ask(&order);
        assert_eq!(answer["error"], Value::Null, "{answer}");
        answer
    }

    /// Starts a load; its end comes as "ended".
    pub(crate) fn load(&mut self, task: u64, keys: &[u64]) {
        let answer = self.ask(&json!({"do": "load", "task": task, "keys": keys}));
        assert_eq!(answer["error"], Value::Null, "{answer}");
    }

    /// Waits for a load and checks that every byte is right.
    pub(crate) fn loaded(&mut self, task: u64) {
        let ended = self.expect("ended");
        assert_eq!(
            ended,
            json!({"kind": "ended", "task": task, "outcome": "Loaded", "wrong": Value::Null})
        );
    }

    pub(crate) fn started(&mut self) -> u64 {
        self.expect("started")["key"].as_u64().unwrap()
    }

    pub(crate) fn release(&mut self, key: u64) {
        self.ask(&json!({"do": "release", "key": key}));
    }

    /// Inodes of the cache's memory that this process has open.
    pub(crate) fn shared_memory(&self) -> BTreeSet<u64> {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap();
        let ours = |fd: &std::fs::DirEntry| {
            let target = std::fs::read_link(fd.path()).unwrap_or_default();
            target.to_string_lossy().contains("memfd:ucm")
        };
        // What is closed meanwhile is not open.
        fds.flatten().filter(ours).filter_map(|fd| Some(fd.path().metadata().ok()?.ino())).collect()
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Waits until the process has become another program.
    #[cfg(feature = "failpoints")]
    pub(crate) fn until_another_program(&self) {
        let deadline = Instant::now() + WATCHDOG;
        let name = format!("/proc/{}/comm", self.child.id());
        while std::fs::read_to_string(&name).unwrap() != "sleep\n" {
            assert!(Instant::now() < deadline, "the process goes on as it was");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until the process has stopped itself.
    #[cfg(feature = "failpoints")]
    pub(crate) fn until_stopped(&self, why: &str) {
        let deadline = Instant::now() + WATCHDOG;
        loop {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
            let state = stat.rsplit(')').next().unwrap().trim_start().chars().next();
            if state == Some('T') {
                return;
            }
            assert!(Instant::now() < deadline, "{why}: the process goes on: {state:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for the end of the process; panics if it was not killed.
    #[cfg(feature = "failpoints")]
    pub(crate) fn until_killed(mut self, why: &str) {
        let deadline = Instant::now() + WATCHDOG;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                let signal = std::os::unix::process::ExitStatusExt::signal(&status);
                return assert_eq!(signal, Some(9), "{why}: {status}");
            }
            assert!(Instant::now() < deadline, "{why}: the process goes on");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether the process has not ended.
    #[cfg(feature = "failpoints")]
    pub(crate) fn lives(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// SIGKILL, and waits for the end of the process.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Proc {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Says that a test could not run here. Counted by whoever runs the tests; never a pass.
#[expect(clippy::print_stdout, reason = "this is how a skip is made visible")]
pub(crate) fn skip(reason: &str) {
    println!("SKIP {reason}");
}

/// A cache directory and its usual settings.
pub(crate) struct Instance {
    dir: tempfile::TempDir,
}

impl Instance {
    pub(crate) fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Sockets that somebody listens at in this directory's name.
    pub(crate) fn sockets(&self) -> usize {
        let meta = std::fs::metadata(self.path()).unwrap();
        let name = format!("@ucm-{:x}-{:x}-", meta.dev(), meta.ino());
        let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
        let names: BTreeSet<&str> =
            sockets.lines().filter_map(|line| line.split_whitespace().nth(7)).collect();
        names.into_iter().filter(|socket| socket.starts_with(&name)).count()
    }

    /// How rank `device` of `ranks` joins, with a gated backend of this depth.
    pub(crate) fn rank(&self, device: u32, ranks: u32, depth: usize) -> Value {
        json!({
            "role": "rank", "dir": self.path(), "device": device, "ranks": ranks, "slots": 64,
            "shard_bytes": 4096, "shards_per_block": 1, "backend": "gate", "depth": depth,
        })
    }
}
