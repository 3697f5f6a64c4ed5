//! Children as the tests see them.
//!
//! **Invariant:** no child outlives its test: its standard input is closed, it is killed and waited
//! for; a child that says nothing for a minute is killed, which its test notices.

use std::{
    io::{BufRead, BufReader, Write},
    os::fd::{AsRawFd, OwnedFd},
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    sync::mpsc,
    thread::{self, JoinHandle},
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags},
    process::{Pid, PidfdFlags, Signal},
};
use ucm_ctrl::{Control, MemberId};

use crate::WATCHDOG;

/// Makes a region's descriptor reachable for children while the value lives.
pub(crate) struct Shared(OwnedFd);

impl Shared {
    pub(crate) fn of(control: &Control) -> Self {
        Self(control.fd().unwrap().unwrap())
    }

    pub(crate) fn new(fd: OwnedFd) -> Self {
        Self(fd)
    }

    pub(crate) fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }
}

/// A child process in one of the roles of `child.rs`.
pub(crate) struct Proc {
    child: Child,
    commands: Option<ChildStdin>,
    lines: BufReader<ChildStdout>,
    calm: Option<mpsc::Sender<()>>,
    watchdog: Option<JoinHandle<()>>,
}

impl Proc {
    pub(crate) fn start(role: &str, region: &Shared, arguments: &[String]) -> Self {
        Self::start_with(role, region, arguments, &[], WATCHDOG * 2)
    }

    /// As [`start`](Self::start), with more environment, and killed when it lives longer.
    pub(crate) fn start_with(
        role: &str,
        region: &Shared,
        arguments: &[String],
        environment: &[(&str, String)],
        longest: Duration,
    ) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child::entry", "--ignored", "--nocapture", "--test-threads=1"])
            .env("UCM_MP_ROLE", role)
            .env("UCM_MP_REGION", region.path())
            .env("UCM_MP_ARGUMENTS", arguments.join(" "))
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let commands = child.stdin.take();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let pid = pid_of(&child);
        let (calm, alarm) = mpsc::channel();
        let watchdog = thread::spawn(move || {
            if alarm.recv_timeout(longest) == Err(mpsc::RecvTimeoutError::Timeout) {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
        });
        Self { child, commands, lines, calm: Some(calm), watchdog: Some(watchdog) }
    }

    pub(crate) fn pid(&self) -> Pid {
        pid_of(&self.child)
    }

    /// The next thing the child says; empty when it has ended.
    pub(crate) fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            if self.lines.read_line(&mut line).unwrap() == 0 {
                return String::new();
            }
            // Everything else is the test harness's.
            if let Some((_, said)) = line.trim_end().split_once("@ ") {
                return said.to_owned();
            }
        }
    }

    pub(crate) fn expect(&mut self, said: &str) {
        assert_eq!(self.hear(), said);
    }

    pub(crate) fn tell(&mut self, command: &str) {
        let _ = writeln!(self.commands.as_mut().unwrap(), "{command}");
    }

    pub(crate) fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.pid(), signal).unwrap();
    }

    /// SIGKILL, and proof of death.
    pub(crate) fn kill(&mut self) {
        let proof = pidfd(self.pid());
        self.signal(Signal::KILL);
        until_dead(&proof);
    }

    /// Closes the child's input and returns how it ended.
    pub(crate) fn end(mut self) -> ExitStatus {
        self.commands = None;
        self.child.wait().unwrap()
    }
}

impl Drop for Proc {
    fn drop(&mut self) {
        self.commands = None;
        self.calm = None;
        if self.child.try_wait().ok().flatten().is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        if let Some(watchdog) = self.watchdog.take() {
            let _ = watchdog.join();
        }
    }
}

fn pid_of(child: &Child) -> Pid {
    Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap()
}

pub(crate) fn pidfd(pid: Pid) -> OwnedFd {
    rustix::process::pidfd_open(pid, PidfdFlags::empty()).unwrap()
}

/// Proof of death by the kernel, for the process that the region names.
#[derive(Debug)]
pub(crate) struct Proof(pub(crate) Control);

impl ucm_ctrl::Liveness for Proof {
    fn is_dead(&self, member: MemberId) -> bool {
        let seen = self.0.inspect().members;
        let Some(record) = seen.iter().find(|m| m.index == member.0) else { return false };
        let pid = Pid::from_raw(i32::try_from(record.pid).unwrap()).unwrap();
        match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
            Ok(proof) => {
                let mut fds = [PollFd::new(&proof, PollFlags::IN)];
                let now = rustix::fs::Timespec::default();
                rustix::event::poll(&mut fds, Some(&now)) == Ok(1)
            }
            Err(error) => error == rustix::io::Errno::SRCH,
        }
    }
}

/// Returns when the kernel says that the process is dead.
pub(crate) fn until_dead(proof: &OwnedFd) {
    let mut fds = [PollFd::new(proof, PollFlags::IN)];
    let watchdog = rustix::fs::Timespec::try_from(WATCHDOG).unwrap();
    while fds[0].revents().is_empty() {
        match rustix::event::poll(&mut fds, Some(&watchdog)) {
            Ok(0) => panic!("the process does not die"),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("{error}"),
        }
    }
}
