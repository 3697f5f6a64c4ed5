//! The parent side: starting peers, talking to them, ending them.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, Command, Stdio},
    sync::mpsc::{self, Receiver},
};

use rustix::process::{Pid, Signal, kill_process};
use ucm_transport::testing::WATCHDOG;

use crate::child::MARK;

/// A peer process. Killed when dropped.
pub(crate) struct Proc {
    child: Child,
    lines: Receiver<String>,
}

impl Proc {
    /// Starts a peer of this kind (see `child::entry`) with one argument.
    pub(crate) fn start(kind: &str, argument: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["child::entry", "--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .env(MARK, format!("{kind} {argument}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
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
        Self { child, lines }
    }

    /// The next answer, which must start with `word`; returned without it.
    pub(crate) fn expect(&mut self, word: &str) -> String {
        match self.lines.recv_timeout(WATCHDOG) {
            Ok(line) if line.starts_with(word) => line[word.len()..].trim_start().to_owned(),
            other => panic!("no '{word}' but {other:?}; it is {:?}", self.child.try_wait()),
        }
    }

    pub(crate) fn ask(&mut self, command: &str, word: &str) -> String {
        writeln!(self.child.stdin.as_mut().unwrap(), "{command}").unwrap();
        self.expect(word)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Ends it with SIGKILL, and returns when it is gone.
    pub(crate) fn kill(mut self) {
        self.signal(Signal::KILL);
        self.child.wait().unwrap();
    }
}

impl Drop for Proc {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
