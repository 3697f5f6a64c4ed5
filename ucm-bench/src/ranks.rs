//! Rank processes: this program started again, one process a rank, spoken to over pipes.
//!
//! Owns: the line protocol (one JSON value a line) and the life of the children.
//! **Invariant:** no child outlives the value that started it, whatever way that ends.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use serde::{Serialize, de::DeserializeOwned};

use crate::error::BenchError;

/// The processes of one measurement, in rank order.
#[derive(Debug)]
pub(crate) struct Ranks {
    children: Vec<Rank>,
}

#[derive(Debug)]
struct Rank {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Ranks {
    /// Starts `count` processes of the hidden subcommand `rank` for this workload.
    pub(crate) fn start(workload: &str, count: u32) -> Result<Self, BenchError> {
        let children = (0..count).map(|_| Rank::start(workload)).collect::<Result<_, _>>()?;
        Ok(Self { children })
    }

    /// Number of ranks.
    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.children.len()).unwrap_or(u32::MAX)
    }

    /// Sends a signal to one rank.
    pub(crate) fn signal(&mut self, index: u32, signal: Signal) -> Result<(), BenchError> {
        let pid = Pid::from_child(&self.rank(index)?.child);
        kill_process(pid, signal)
            .map_err(|e| BenchError::io(format!("signal rank {index}"), e.into()))
    }

    /// Puts a new process in the place of one that was killed.
    pub(crate) fn replace(&mut self, workload: &str, index: u32) -> Result<(), BenchError> {
        let rank = self.rank(index)?;
        let _ = rank.child.kill();
        let _ = rank.child.wait();
        *rank = Rank::start(workload)?;
        Ok(())
    }

    fn rank(&mut self, index: u32) -> Result<&mut Rank, BenchError> {
        self.children
            .get_mut(index as usize)
            .ok_or_else(|| BenchError::Usage(format!("there is no rank {index}")))
    }

    /// Sends one order to each rank (made by `order` from its number) and takes one reply of each.
    pub(crate) fn ask<O: Serialize, R: DeserializeOwned>(
        &mut self,
        order: impl Fn(u32) -> O,
    ) -> Result<Vec<R>, BenchError> {
        for (index, rank) in (0..).zip(&mut self.children) {
            rank.send(index, &order(index))?;
        }
        (0..).zip(&mut self.children).map(|(index, rank)| rank.receive(index)).collect()
    }

    /// Sends one order to one rank and takes its reply.
    pub(crate) fn ask_one<O: Serialize, R: DeserializeOwned>(
        &mut self,
        index: u32,
        order: &O,
    ) -> Result<R, BenchError> {
        let rank = self.rank(index)?;
        rank.send(index, order)?;
        rank.receive(index)
    }
}

impl Rank {
    fn start(workload: &str) -> Result<Self, BenchError> {
        let program =
            std::env::current_exe().map_err(|e| BenchError::io("find this program", e))?;
        let mut child = Command::new(&program)
            .args(["rank", workload])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| BenchError::path("start", &program, e))?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(input), Some(output)) => {
                Ok(Self { child, input, output: BufReader::new(output) })
            }
            _ => Err(BenchError::Peer("a rank process has no pipes".into())),
        }
    }

    fn send(&mut self, index: u32, order: &impl Serialize) -> Result<(), BenchError> {
        let line =
            serde_json::to_string(order).map_err(|e| BenchError::io("form an order", e.into()))?;
        writeln!(self.input, "{line}")
            .map_err(|e| BenchError::io(format!("send to rank {index}"), e))
    }

    fn receive<R: DeserializeOwned>(&mut self, index: u32) -> Result<R, BenchError> {
        let mut line = String::new();
        let read = self
            .output
            .read_line(&mut line)
            .map_err(|e| BenchError::io(format!("hear rank {index}"), e))?;
        if read == 0 {
            let status =
                self.child.wait().map_or_else(|e| e.to_string(), |status| status.to_string());
            return Err(BenchError::Peer(format!("rank {index} ended early ({status})")));
        }
        match serde_json::from_str::<Result<R, String>>(&line) {
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(text)) => Err(BenchError::Peer(format!("rank {index}: {text}"))),
            Err(error) => {
                Err(BenchError::Peer(format!("rank {index} sent nonsense ({error}): {line}")))
            }
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in self.children.drain(..) {
            let Rank { mut child, input, output } = rank;
            // A closed pipe is the order to leave.
            drop(input);
            drop(output);
            let left = (0..200).any(|_| {
                let ended = matches!(child.try_wait(), Ok(Some(_)));
                if !ended {
                    std::thread::sleep(Duration::from_millis(10));
                }
                ended
            });
            if !left {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

/// The child's side: answers orders with `serve` until the parent closes the pipe.
pub(crate) fn serve<O: DeserializeOwned, R: Serialize>(
    mut serve: impl FnMut(O) -> Result<R, BenchError>,
) -> Result<(), BenchError> {
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|e| BenchError::io("hear the parent", e))?;
        let order = serde_json::from_str(&line)
            .map_err(|e| BenchError::io("understand the parent", e.into()))?;
        let reply: Result<R, String> = serve(order).map_err(|error| error.to_string());
        let text =
            serde_json::to_string(&reply).map_err(|e| BenchError::io("form a reply", e.into()))?;
        crate::cli::print(&text)?;
    }
    Ok(())
}
