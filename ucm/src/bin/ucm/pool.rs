//! `ucm pool`: looks at the remote pool, gets, puts and removes objects.
//!
//! **Invariant:** an object that is not there ends as 1, and prints nothing to standard output.

use std::{
    io::{Read as _, Write as _},
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Subcommand;
use serde_json::json;
use ucm::{Config, Error, Fetched, GetOutcome, ObjectKey, PoolVisitor, PutOutcome, RemoveOutcome};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Lists the peers and how their memory is used.
    Stat {
        /// One JSON document instead of text.
        #[arg(long)]
        json: bool,
    },
    /// Writes an object, or a part of it, to standard output or a file.
    Get {
        /// BLOCK:IDENTITY in hexadecimal (32 and 64 digits), or any other text, which is hashed.
        key: String,
        /// File to write instead of standard output.
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
        /// First byte.
        #[arg(long, default_value_t = 0)]
        offset: u64,
        /// Bytes; all that follow by default.
        #[arg(long)]
        length: Option<u64>,
    },
    /// Puts a file as an object where the pool has most room.
    Put {
        /// As for `get`.
        key: String,
        /// The file; `-` is standard input.
        file: PathBuf,
    },
    /// Removes an object from all peers that have it.
    Rm {
        /// As for `get`.
        key: String,
    },
}

pub(crate) fn run(config: &Config, command: &Command, timeout_ms: u64) -> Result<ExitCode, Error> {
    let deadline = Instant::now() + Duration::from_millis(timeout_ms);
    match command {
        Command::Stat { json } => stat(config, *json, deadline),
        Command::Get { key, output, offset, length } => {
            let visitor = PoolVisitor::open(config, 0)?;
            match visitor.get(object_key(key), *offset, *length, deadline)? {
                Fetched::Bytes(bytes) => write(output.as_deref(), &bytes),
                Fetched::Not(outcome) => Ok(ended(key, outcome, of_get(outcome))),
                _ => Ok(ExitCode::from(4)),
            }
        }
        Command::Put { key, file } => {
            let bytes = read(file)?;
            let visitor = PoolVisitor::open(config, bytes.len() as u64)?;
            let outcome = visitor.put(object_key(key), &bytes, deadline)?;
            Ok(ended(key, outcome, of_put(outcome)))
        }
        Command::Rm { key } => {
            let visitor = PoolVisitor::open(config, 0)?;
            let outcome = visitor.remove(object_key(key), deadline);
            let outcome = outcome.unwrap_or(RemoveOutcome::Timeout);
            let code = match outcome {
                RemoveOutcome::Removed => 0,
                RemoveOutcome::Miss => 1,
                _ => 4,
            };
            Ok(ended(key, outcome, code))
        }
    }
}

fn of_get(outcome: GetOutcome) -> u8 {
    match outcome {
        GetOutcome::Miss => 1,
        GetOutcome::Invalid => 2,
        GetOutcome::TooLarge | GetOutcome::Busy => 8,
        GetOutcome::Corrupt => 5,
        _ => 4,
    }
}

fn of_put(outcome: PutOutcome) -> u8 {
    match outcome {
        PutOutcome::Created | PutOutcome::AlreadyExists => 0,
        PutOutcome::Invalid => 2,
        PutOutcome::Conflict | PutOutcome::TooLarge | PutOutcome::NoSpace | PutOutcome::Busy => 8,
        _ => 4,
    }
}

fn ended(key: &str, outcome: impl std::fmt::Debug, code: u8) -> ExitCode {
    eprintln!("ucm: {key}: {outcome:?}");
    ExitCode::from(code)
}

fn stat(config: &Config, as_json: bool, deadline: Instant) -> Result<ExitCode, Error> {
    let peers = PoolVisitor::open(config, 0)?.peers(deadline)?;
    if as_json {
        let list = peers.iter().map(|(member, usage)| {
            json!({
                "peer": member.peer.as_str(), "address": member.address, "answers": usage.is_some(),
                "capacity_bytes": usage.map_or(member.capacity_bytes, |u| u.medium.capacity_bytes),
                "committed_bytes": usage.map(|u| u.medium.committed_bytes),
                "pending_bytes": usage.map(|u| u.medium.pending_bytes),
                "quarantine_bytes": usage.map(|u| u.medium.quarantine_bytes),
                "leases": usage.map(|u| u.medium.leases),
                "objects": usage.map(|u| u.objects), "evictions": usage.map(|u| u.evictions),
                "page_bytes": usage.map(|u| u.page_bytes),
            })
        });
        crate::print(&format!("{:#}\n", json!({ "peers": list.collect::<Vec<_>>() })));
        return Ok(ExitCode::SUCCESS);
    }
    let head = ["peer", "address", "objects", "bytes", "of", "leases", "evictions"];
    let [peer, address, objects, bytes, of, leases, evictions] = head;
    crate::print(&format!(
        "{peer:<20} {address:<22} {objects:>10} {bytes:>16} {of:>16} {leases:>7} {evictions:>10}\n"
    ));
    for (member, usage) in peers {
        let rest = usage.map_or_else(
            || "does not answer".to_owned(),
            |u| {
                format!(
                    "{:>10} {:>16} {:>16} {:>7} {:>10}",
                    u.objects,
                    u.medium.committed_bytes,
                    u.medium.capacity_bytes,
                    u.medium.leases,
                    u.evictions
                )
            },
        );
        crate::print(&format!("{:<20} {:<22} {rest}\n", member.peer.as_str(), member.address));
    }
    Ok(ExitCode::SUCCESS)
}

fn object_key(text: &str) -> ObjectKey {
    let exact = text.split_once(':').and_then(|(block, identity)| {
        Some(ObjectKey { block: hex(block)?, identity: hex(identity)? })
    });
    exact.unwrap_or_else(|| {
        let identity = *blake3::hash(text.as_bytes()).as_bytes();
        let mut block = [0; 16];
        block.iter_mut().zip(identity).for_each(|(to, from)| *to = from);
        ObjectKey { block, identity }
    })
}

fn hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    if text.len() != 2 * N || !text.is_ascii() {
        return None;
    }
    let mut bytes = [0; N];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(bytes)
}

fn read(file: &Path) -> Result<Vec<u8>, Error> {
    let failed = |source| Error::Os { what: format!("read {}", file.display()), source };
    if file.as_os_str() != "-" {
        return std::fs::read(file).map_err(failed);
    }
    let mut bytes = Vec::new();
    std::io::stdin().lock().read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

fn write(file: Option<&Path>, bytes: &[u8]) -> Result<ExitCode, Error> {
    let (written, name) = match file {
        Some(path) => (std::fs::write(path, bytes), path.display().to_string()),
        None => {
            let mut out = std::io::stdout().lock();
            (out.write_all(bytes).and_then(|()| out.flush()), "standard output".into())
        }
    };
    written.map_err(|source| Error::Os { what: format!("write {name}"), source })?;
    Ok(ExitCode::SUCCESS)
}
