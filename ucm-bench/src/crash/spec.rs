//! What the parent tells the ranks of a crash measurement, and what they answer.
//!
//! Owns: the orders, the replies, and the notes about wrong bytes, which outlive a killed rank.
//! **Invariant:** a wrong byte is on record before the rank that saw it does anything else.

use std::{fs, path::Path};

use serde::{Deserialize, Serialize};

use crate::{error::BenchError, scratch::Scratch};

/// Generation of all payloads.
pub(crate) const GENERATION: u64 = 1;

/// One measurement.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Spec {
    pub(crate) config: String,
    /// Different blocks asked for.
    pub(crate) keys: u64,
    pub(crate) shard_bytes: u64,
    pub(crate) latency_us: u64,
    pub(crate) seed: u64,
    pub(crate) scratch: String,
}

/// What a rank is told.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) enum Order {
    /// Join and start to work.
    Open { rank: u32, life: u64, spec: Box<Spec> },
    /// Say how much was done.
    Report,
    /// Stop working; answer when everything in flight has ended.
    Finish,
}

/// What a rank answers.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Reply {
    pub(crate) seat: u8,
    pub(crate) generation: u32,
    /// Tasks that ended.
    pub(crate) ops: u64,
    /// Tasks that did not end within seconds.
    pub(crate) stuck: u64,
}

/// Puts a wrong byte on record.
pub(crate) fn note_wrong(spec: &Spec, text: &str) {
    let name = format!("wrong-{}-{}", std::process::id(), crate::clock::now_ns());
    // Without the note the parent would not hear of it: then the process must not go on.
    if fs::write(Path::new(&spec.scratch).join(name), text).is_err() {
        std::process::abort();
    }
}

/// All notes.
pub(crate) fn wrong_notes(scratch: &Scratch) -> Result<Vec<String>, BenchError> {
    let dir = scratch.path("");
    let entries = fs::read_dir(&dir).map_err(|e| BenchError::path("list", &dir, e))?;
    let notes = entries.flatten().filter(|e| e.file_name().to_string_lossy().starts_with("wrong-"));
    Ok(notes.map(|e| fs::read_to_string(e.path()).unwrap_or_default()).collect())
}
