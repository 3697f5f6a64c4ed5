//! The parent side: starting children, talking to them, ending them.

use std::collections::{HashMap, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use crate::child::MARK;

/// Nothing a child does takes as long; only a hang is ended by it.
const WATCHDOG: Duration = Duration::from_secs(60);

/// A child process. Killed when dropped.
pub(crate) struct Proc {
    child: Child,
    lines: Receiver<String>,
    kept: VecDeque<String>,
}

impl Proc {
    pub(crate) fn start() -> Self {
        Self::start_with(&std::env::current_exe().unwrap(), |_| {})
    }

    pub(crate) fn start_as(uid: u32, exe: &Path) -> Self {
        Self::start_with(exe, |command| {
            command.uid(uid).gid(uid);
        })
    }

    /// One that stops or dies at these failpoints.
    #[cfg(feature = "failpoints")]
    pub(crate) fn start_armed(points: &str) -> Self {
        Self::start_with(&std::env::current_exe().unwrap(), |command| {
            command.env(ucm_failpoint::VARIABLE, points);
        })
    }

    fn start_with(exe: &Path, set_up: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(exe);
        command
            .args(["child::entry", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env(MARK, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        set_up(&mut command);
        let mut child = command.spawn().unwrap();
        let out = child.stdout.take().unwrap();
        let (tx, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                // The harness prints "test … " without a line end before the first answer.
                if let Some((_, text)) = line.split_once("@@")
                    && tx.send(text.to_owned()).is_err()
                {
                    return;
                }
            }
        });
        let mut proc = Self { child, lines, kept: VecDeque::new() };
        proc.expect("ready");
        proc
    }

    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    pub(crate) fn tell(&mut self, command: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{command}").unwrap();
    }

    /// The first line that starts with `word`, without it; other lines are kept for later.
    pub(crate) fn expect(&mut self, word: &str) -> String {
        let until = Instant::now() + WATCHDOG;
        loop {
            let found = self.kept.iter().position(|line| matches(line, word));
            if let Some(line) = found.and_then(|at| self.kept.remove(at)) {
                return line[word.len()..].trim_start().to_owned();
            }
            let left = until.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => self.kept.push_back(line),
                Err(error) => panic!(
                    "process {} said no '{word}' ({error}); it said {:?}; it is {:?}",
                    self.pid(),
                    self.kept,
                    self.child.try_wait()
                ),
            }
        }
    }

    pub(crate) fn ask(&mut self, command: &str, word: &str) -> String {
        self.tell(command);
        self.expect(word)
    }

    /// Waits until it has noticed that its descriptors were closed.
    #[track_caller]
    pub(crate) fn until_robbed(&mut self) {
        let deadline = Instant::now() + WATCHDOG;
        while !self.ask("check-robbed", "check").contains("closed descriptors") {
            assert!(Instant::now() < deadline, "it has not noticed");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until it holds no more, and no less, than it did.
    #[track_caller]
    pub(crate) fn until_resources(&mut self, before: &str) {
        let deadline = Instant::now() + WATCHDOG;
        loop {
            let now = self.ask("resources", "resources");
            if now == before {
                return;
            }
            assert!(Instant::now() < deadline, "{now} instead of {before}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Events heard so far; an exchange makes sure that earlier ones have arrived.
    pub(crate) fn events(&mut self) -> Vec<String> {
        self.ask("resources", "resources");
        let (events, rest) = self.kept.drain(..).partition(|line| matches(line, "event"));
        self.kept = rest;
        let events: Vec<String> = events.into();
        events.iter().map(|line| line["event ".len()..].to_owned()).collect()
    }

    pub(crate) fn enter(&mut self, dir: &Path) -> Entered {
        self.enter_with(dir, "")
    }

    pub(crate) fn enter_with(&mut self, dir: &Path, more: &str) -> Entered {
        self.begin_enter(dir, more);
        self.entered()
    }

    pub(crate) fn begin_enter(&mut self, dir: &Path, more: &str) {
        self.tell(&format!("enter dir={} {more}", dir.display()));
    }

    pub(crate) fn entered(&mut self) -> Entered {
        let until = Instant::now() + WATCHDOG;
        loop {
            if self.kept.iter().any(|line| matches(line, "refused")) {
                panic!("process {} was refused: {}", self.pid(), self.expect("refused"));
            }
            if self.kept.iter().any(|line| matches(line, "entered")) {
                return Entered::parse(&self.expect("entered"));
            }
            let left = until.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left);
            self.kept.push_back(line.unwrap_or_else(|error| {
                panic!("process {} did not enter: {error}, {:?}", self.pid(), self.kept)
            }));
        }
    }

    /// Tries to enter and must be refused; the answer names kind and text.
    pub(crate) fn refused(&mut self, dir: &Path, more: &str) -> String {
        self.begin_enter(dir, more);
        self.expect("refused")
    }

    pub(crate) fn leave(&mut self) {
        self.ask("leave", "left");
    }

    pub(crate) fn write(&mut self, slot: u32, word: u64) {
        self.ask(&format!("write slot={slot} word={word}"), "written");
    }

    pub(crate) fn read(&mut self, slot: u32) -> u64 {
        let answer = self.ask(&format!("read slot={slot}"), "word");
        let (word, same) = answer.split_once(" same ").unwrap();
        assert_eq!(same, "true", "slot {slot} is torn");
        word.parse().unwrap()
    }

    pub(crate) fn signal(&self, signal: i32) {
        // SAFETY: plain system call on our own child, which has not been waited for.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
    }

    /// Waits until the process is over; it is not reaped.
    #[cfg(feature = "failpoints")]
    pub(crate) fn until_over(&self) {
        // SAFETY: all zero bytes are a valid siginfo_t.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        let (id, flags) = (self.child.id(), libc::WEXITED | libc::WNOWAIT);
        // SAFETY: waits for our own child; `info` is alive.
        assert_eq!(unsafe { libc::waitid(libc::P_PID, id, &raw mut info, flags) }, 0);
    }

    /// Waits until the process has stopped itself.
    #[cfg(feature = "failpoints")]
    pub(crate) fn until_stopped(&self) {
        let until = Instant::now() + WATCHDOG;
        loop {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap();
            let state = stat.rsplit(')').next().unwrap().trim_start().chars().next();
            if state == Some('T') {
                return;
            }
            assert!(Instant::now() < until, "process {} goes on: {state:?}", self.pid());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends the process with SIGKILL and waits for the end.
    pub(crate) fn kill(mut self) {
        self.signal(libc::SIGKILL);
        let status = self.child.wait().unwrap();
        assert_eq!(status.signal(), Some(libc::SIGKILL), "it ended before it was killed: {status}");
    }

    /// Ends the process with SIGKILL without waiting for it.
    pub(crate) fn kill_now(&self) {
        self.signal(libc::SIGKILL);
    }

    /// Asks the process to end and checks that it was still well.
    pub(crate) fn finish(mut self) {
        drop(self.child.stdin.take());
        let status = self.child.wait().unwrap();
        assert!(status.success(), "child ended with {status}");
    }
}

impl Drop for Proc {
    fn drop(&mut self) {
        // A failed test must leave nothing behind; a stopped child is ended as well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a child says about its stay.
#[derive(Clone, Debug)]
pub(crate) struct Entered {
    pub(crate) created: bool,
    pub(crate) seat: u16,
    pub(crate) boot: String,
    pub(crate) stay: String,
    pub(crate) ms: u64,
}

impl Entered {
    fn parse(text: &str) -> Self {
        let fields: HashMap<_, _> = text.split(' ').filter_map(|w| w.split_once('=')).collect();
        Self {
            created: fields["created"] == "true",
            seat: fields["seat"].parse().unwrap(),
            boot: fields["boot"].to_owned(),
            stay: fields["stay"].to_owned(),
            ms: fields["ms"].parse().unwrap(),
        }
    }
}

/// A fresh directory for one instance; the instance directory itself does not exist yet.
pub(crate) struct Instance(tempfile::TempDir);

impl Instance {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn dir(&self) -> std::path::PathBuf {
        self.0.path().join("instance")
    }

    pub(crate) fn files(&self) -> Vec<String> {
        let dir = std::fs::read_dir(self.dir()).unwrap();
        dir.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }
}

/// Says that a test could not run here. Counted by whoever runs the tests; never a pass.
#[expect(clippy::print_stdout, reason = "this is how a skip is made visible")]
pub(crate) fn skip(reason: &str) {
    println!("SKIP {reason}");
}

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn matches(line: &str, word: &str) -> bool {
    line.split(' ').next() == Some(word.split(' ').next().unwrap()) && line.starts_with(word)
}

impl Proc {
    /// The next line that starts with one of `words`.
    pub(crate) fn expect_any(&mut self, words: &[&str], found: impl FnOnce(usize)) {
        let until = Instant::now() + WATCHDOG;
        loop {
            let hit = self.kept.iter().enumerate().find_map(|(at, line)| {
                Some((at, words.iter().position(|word| matches(line, word))?))
            });
            if let Some((at, which)) = hit {
                self.kept.remove(at);
                return found(which);
            }
            let left = until.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left);
            self.kept.push_back(line.unwrap_or_else(|error| {
                panic!("process {} said none of {words:?}: {error}", self.pid())
            }));
        }
    }

    /// The refusal's text, or `None` if the entry succeeded.
    pub(crate) fn refused_or_entered(&mut self) -> Option<String> {
        let mut refused = false;
        self.expect_any_peek(&["refused", "entered"], |which| refused = which == 0);
        if refused {
            return Some(self.expect("refused"));
        }
        self.expect("entered");
        None
    }

    fn expect_any_peek(&mut self, words: &[&str], found: impl FnOnce(usize)) {
        let until = Instant::now() + WATCHDOG;
        loop {
            let hit =
                self.kept.iter().find_map(|line| words.iter().position(|word| matches(line, word)));
            if let Some(which) = hit {
                return found(which);
            }
            let left = until.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left);
            self.kept.push_back(line.unwrap_or_else(|error| {
                panic!("process {} said none of {words:?}: {error}", self.pid())
            }));
        }
    }
}
