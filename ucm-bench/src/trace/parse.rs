//! Traces: requests as chains of block ids.
//!
//! Owns: the reader of the Mooncake jsonl form and where trace files are looked for.
//! **Invariant:** blocks are numbered 0..unique in the order of their first use.

use std::{
    collections::HashMap,
    env, fmt,
    fs::File,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
};

use serde::Deserialize;

use super::generate::Generator;
use crate::error::BenchError;

/// One request: its place in time and the chain of its blocks, the prefix root first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Milliseconds since the start of the trace.
    pub timestamp_ms: u64,
    /// Tokens of the prompt.
    pub input_tokens: u64,
    /// Tokens of the answer.
    pub output_tokens: u64,
    /// Block numbers, the prefix root first.
    pub blocks: Vec<u32>,
}

/// Requests in order of time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trace {
    requests: Vec<Request>,
    unique: usize,
}

/// Where a trace comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TraceSource {
    /// A file.
    File(PathBuf),
    /// No file: generated with the statistics of the conversation trace.
    Generated,
}

#[derive(Deserialize)]
struct Row {
    timestamp: u64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

impl Trace {
    /// Reads one JSON object per line; empty lines are skipped.
    ///
    /// # Errors
    /// A line that cannot be read or is no request, with its number.
    pub fn parse(input: impl BufRead, name: &str) -> Result<Self, BenchError> {
        let mut trace = Self::default();
        let mut numbers: HashMap<u64, u32> = HashMap::new();
        for (at, line) in input.lines().enumerate() {
            let place = || format!("{name}:{}", at + 1);
            let line = line.map_err(|error| BenchError::io(place(), error))?;
            if line.trim().is_empty() {
                continue;
            }
            let row: Row = serde_json::from_str(&line)
                .map_err(|error| BenchError::Usage(format!("{}: {error}", place())))?;
            let mut blocks = Vec::with_capacity(row.hash_ids.len());
            for id in row.hash_ids {
                let next = u32::try_from(numbers.len())
                    .map_err(|_| BenchError::Usage(format!("{}: too many blocks", place())))?;
                blocks.push(*numbers.entry(id).or_insert(next));
            }
            trace.requests.push(Request {
                timestamp_ms: row.timestamp,
                input_tokens: row.input_length,
                output_tokens: row.output_length,
                blocks,
            });
        }
        trace.unique = numbers.len();
        Ok(trace)
    }

    /// From requests whose blocks are numbered in order of first use.
    pub(super) fn from_numbered(requests: Vec<Request>) -> Self {
        let mut trace = Self { requests, unique: 0 };
        trace.count_unique();
        trace
    }

    /// The first `requests` requests.
    #[must_use]
    pub fn first(mut self, requests: usize) -> Self {
        if requests < self.requests.len() {
            self.requests.truncate(requests);
            self.count_unique();
        }
        self
    }

    /// The requests in order.
    pub fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// How many different blocks there are.
    pub fn unique_blocks(&self) -> usize {
        self.unique
    }

    /// How many blocks are asked for in total.
    pub fn references(&self) -> u64 {
        self.requests.iter().map(|request| request.blocks.len() as u64).sum()
    }

    /// Share of the unique blocks that occur only once.
    pub fn never_used_again_ratio(&self) -> f64 {
        let mut uses = vec![0_u32; self.unique];
        for block in self.requests.iter().flat_map(|request| &request.blocks) {
            if let Some(count) = uses.get_mut(*block as usize) {
                *count += 1;
            }
        }
        uses.iter().filter(|count| **count == 1).count() as f64 / self.unique.max(1) as f64
    }

    fn count_unique(&mut self) {
        let largest = self.requests.iter().flat_map(|request| &request.blocks).max();
        self.unique = largest.map_or(0, |block| *block as usize + 1);
    }
}

impl TraceSource {
    /// A path is taken as it is; the names `conversation` and `synthetic` are searched.
    ///
    /// # Errors
    /// [`BenchError::Environment`] when a file is named that does not exist, or `synthetic` is not
    /// found (only `conversation` can be generated).
    pub fn find(name: &str) -> Result<Self, BenchError> {
        if !matches!(name, "conversation" | "synthetic") {
            let path = PathBuf::from(name);
            return if path.is_file() {
                Ok(Self::File(path))
            } else {
                Err(BenchError::Environment(format!("there is no trace file {name}")))
            };
        }
        let file = format!("{name}_trace.jsonl");
        let found = folders().into_iter().map(|folder| folder.join(&file)).find(|f| f.is_file());
        match found {
            Some(path) => Ok(Self::File(path)),
            None if name == "conversation" => Ok(Self::Generated),
            None => Err(BenchError::Environment(format!(
                "{file} not found: set UCM_TRACES to its folder, or use --trace conversation"
            ))),
        }
    }

    /// Reads or generates the trace.
    ///
    /// # Errors
    /// As [`Trace::parse`].
    pub fn load(&self, seed: u64) -> Result<Trace, BenchError> {
        match self {
            Self::File(path) => {
                let file = File::open(path).map_err(|e| BenchError::path("open", path, e))?;
                Trace::parse(BufReader::new(file), &path.display().to_string())
            }
            Self::Generated => Ok(Generator::conversation(seed).generate()),
        }
    }
}

impl fmt::Display for TraceSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => {
                f.write_str(&path.file_name().unwrap_or(path.as_os_str()).to_string_lossy())
            }
            Self::Generated => f.write_str("generated (statistics of the conversation trace)"),
        }
    }
}

/// `$UCM_TRACES`, else `shared/traces` in the current folder or one above it.
fn folders() -> Vec<PathBuf> {
    if let Some(folder) = env::var_os("UCM_TRACES") {
        return vec![folder.into()];
    }
    let here = env::current_dir().unwrap_or_default();
    here.ancestors().map(|above: &Path| above.join("shared/traces")).collect()
}

#[cfg(test)]
mod tests {
    use super::{Trace, TraceSource};

    const TWO: &str = r#"{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [9, 4]}

{"timestamp": 3, "input_length": 1100, "output_length": 6, "hash_ids": [9, 4, 1000000000000]}
"#;

    #[test]
    fn lines_become_requests_with_numbered_blocks() {
        let trace = Trace::parse(TWO.as_bytes(), "two").unwrap();
        assert_eq!(trace.unique_blocks(), 3);
        assert_eq!(trace.references(), 5);
        let second = &trace.requests()[1];
        assert_eq!(second.blocks, [0, 1, 2]);
        assert_eq!((second.timestamp_ms, second.input_tokens, second.output_tokens), (3, 1100, 6));
        assert!((trace.never_used_again_ratio() - 1.0 / 3.0).abs() < 1e-12);
        let first = trace.first(1);
        assert_eq!((first.requests().len(), first.unique_blocks()), (1, 2));
    }

    #[test]
    fn a_bad_line_is_named() {
        let error = Trace::parse("\n{\"timestamp\": 1}\n".as_bytes(), "bad").unwrap_err();
        assert!(error.to_string().starts_with("bad:2: "), "{error}");
        assert_eq!(error.exit_code(), 2);
    }

    #[test]
    fn a_named_file_must_exist() {
        let error = TraceSource::find("no/such/trace.jsonl").unwrap_err();
        assert_eq!(error.exit_code(), 3);
    }
}
