//! Loads: ranged reads into the operation's memory.
//!
//! **Invariant:** the length is compared before the first byte of payload is written, and each piece must
//! have exactly the bytes that were asked for; the hash is that of the bytes in the memory.

use std::{hash::Hasher as _, ops::Range, sync::atomic::Ordering};

use futures_util::{StreamExt as _, stream};
use object_store::{GetOptions, GetRange, ObjectStore as _, ObjectStoreExt as _, path::Path};
use twox_hash::XxHash3_64;

use super::{Inner, failed};
use crate::{
    ErrorKind, IoMemory, Op, StoreError,
    header::{HEADER_BYTES, Header, HeaderBlock},
    op,
};

/// Parts of one object on their way at once.
const PARTS_AT_ONCE: usize = 4;
/// Tries to read an object that is replaced meanwhile.
const REPLACED: usize = 16;
/// Bytes copied and hashed at once.
const STEP: usize = 16 << 10;

impl Inner {
    pub(super) async fn load(&self, op: &Op) -> Result<(), StoreError> {
        op::refuse_empty(op)?;
        let key = (*op.block(), op.shard());
        let path = self.path(&key);
        let first = self.read(&path, op, op.memory()).await;
        let hash = match first {
            Ok(hash) => hash,
            Err(Wrong::Proved(error)) => {
                self.put_aside(&path, &error).await;
                return Err(error);
            }
            Err(Wrong::Unproved(error) | Wrong::Replaced(error)) => return Err(error),
        };
        if hash == hash_of(op.memory())? {
            return Ok(());
        }
        // Somebody else may have written into the memory. Private bytes prove it.
        let private = IoMemory::private(op.memory().len())?;
        let proved = match self.read(&path, op, &private).await {
            Ok(hash) => hash != hash_of(&private)?,
            Err(wrong) => matches!(wrong, Wrong::Proved(_)),
        };
        let error = StoreError::new(ErrorKind::Corrupt, "the hash of the payload differs");
        if proved {
            self.put_aside(&path, &error).await;
        }
        Err(error)
    }

    /// Reads a whole object; says what the hash of its payload must be.
    async fn read(&self, path: &Path, op: &Op, memory: &IoMemory) -> Result<u64, Wrong> {
        let mut result = self.read_once(path, op, memory).await;
        for _ in 1..REPLACED {
            if !matches!(result, Err(Wrong::Replaced(_))) {
                break;
            }
            result = self.read_once(path, op, memory).await;
        }
        result
    }

    async fn read_once(&self, path: &Path, op: &Op, memory: &IoMemory) -> Result<u64, Wrong> {
        let len = memory.len();
        let total = (HEADER_BYTES + len) as u64;
        let first = len.min(self.part_bytes);
        let mut block = HeaderBlock([0; HEADER_BYTES]);
        let got = match self.get(path, 0..HEADER_BYTES + first, None).await {
            Err(Wrong::Unproved(e)) if e.kind() == ErrorKind::Io => {
                return Err(self.explained(path, e).await);
            }
            got => got?,
        };
        if got.meta.size < HEADER_BYTES as u64 {
            let what = format!("{} bytes, less than a header", got.meta.size);
            return Err(Wrong::Proved(StoreError::new(ErrorKind::Corrupt, what)));
        }
        let (size, version) = (got.meta.size, got.meta.e_tag.clone());
        // Of a shorter object less comes; its header says whether it is whole.
        let expected = size.min((HEADER_BYTES + first) as u64);
        if got.range != (0..expected) {
            return Err(Wrong::Unproved(corrupt(format!(
                "bytes {:?} were sent for 0..{expected}",
                got.range
            ))));
        }
        let mut at = 0;
        let mut bytes = got.into_stream();
        let mut checked = None;
        while let Some(piece) = bytes.next().await {
            let piece = piece.map_err(|e| failed("get", &e))?;
            let (head, rest) = piece.split_at(HEADER_BYTES.saturating_sub(at).min(piece.len()));
            if let Some(into) = block.0.get_mut(at..at + head.len()) {
                into.copy_from_slice(head);
            }
            at += head.len();
            if at == HEADER_BYTES && checked.is_none() {
                checked = Some(self.check(&block, op, size, total)?);
            }
            at += rest.len();
            if at as u64 > expected {
                return Err(Wrong::Unproved(corrupt(format!("more than {expected} bytes came"))));
            }
            if !rest.is_empty() {
                memory.write(at - rest.len() - HEADER_BYTES, rest)?;
            }
        }
        let Some(hash) = checked.filter(|_| at as u64 == expected) else {
            let what = format!("{at} bytes came, not {expected}");
            return Err(Wrong::Unproved(StoreError::new(ErrorKind::Io, what)));
        };
        let starts = (first..len).step_by(self.part_bytes);
        let parts = starts.map(|from| {
            self.part(path, from..(from + self.part_bytes).min(len), version.clone(), memory)
        });
        let mut parts = stream::iter(parts).buffer_unordered(PARTS_AT_ONCE);
        while let Some(part) = parts.next().await {
            part?;
        }
        Ok(hash)
    }

    /// One further part of the payload, of the same version of the object.
    async fn part(
        &self,
        path: &Path,
        range: Range<usize>,
        version: Option<String>,
        memory: &IoMemory,
    ) -> Result<(), Wrong> {
        let Range { start, end } = range;
        let got = self.get(path, start + HEADER_BYTES..end + HEADER_BYTES, version).await?;
        if got.range != ((start + HEADER_BYTES) as u64..(end + HEADER_BYTES) as u64) {
            return Err(Wrong::Unproved(corrupt(format!("bytes {:?} were sent", got.range))));
        }
        let mut at = start;
        let mut bytes = got.into_stream();
        while let Some(piece) = bytes.next().await {
            let piece = piece.map_err(|e| failed("get", &e))?;
            if piece.len() > end - at {
                return Err(Wrong::Unproved(corrupt("more bytes came than were asked for".into())));
            }
            memory.write(at, &piece)?;
            at += piece.len();
        }
        if at < end {
            let what = format!("{} bytes of a part came, not {}", at - start, end - start);
            return Err(Wrong::Unproved(StoreError::new(ErrorKind::Io, what)));
        }
        Ok(())
    }

    async fn get(
        &self,
        path: &Path,
        range: Range<usize>,
        version: Option<String>,
    ) -> Result<object_store::GetResult, Wrong> {
        let range = GetRange::Bounded(range.start as u64..range.end as u64);
        let options = GetOptions { range: Some(range), if_match: version, ..GetOptions::default() };
        match self.store.get_opts(path, options).await {
            Ok(got) => Ok(got),
            Err(e @ object_store::Error::NotFound { .. }) => {
                Err(Wrong::Unproved(StoreError::new(ErrorKind::Missing, e.to_string())))
            }
            Err(e @ object_store::Error::Precondition { .. }) => {
                Err(Wrong::Replaced(failed("get", &e)))
            }
            Err(e) => Err(Wrong::Unproved(failed("get", &e))),
        }
    }

    /// Services cannot send a range of an object without bytes.
    async fn explained(&self, path: &Path, error: StoreError) -> Wrong {
        match self.store.head(path).await {
            Ok(meta) if meta.size == 0 => Wrong::Proved(corrupt("an object without bytes".into())),
            _ => Wrong::Unproved(error),
        }
    }

    /// Whether it is the object that is asked for; says its hash.
    fn check(&self, block: &HeaderBlock, op: &Op, size: u64, total: u64) -> Result<u64, Wrong> {
        let header = Header::parse(block).map_err(Wrong::Proved)?;
        header.check_identity(op.block(), op.shard(), &self.descriptor).map_err(Wrong::Proved)?;
        if header.payload_bytes.checked_add(HEADER_BYTES as u64) != Some(size) {
            return Err(Wrong::Proved(corrupt(format!(
                "an object of {size} bytes whose header says {} of payload",
                header.payload_bytes
            ))));
        }
        if size != total {
            // It is whole: the question is wrong.
            return Err(Wrong::Unproved(corrupt(format!(
                "the object has {} bytes, not {}",
                header.payload_bytes,
                op.memory().len()
            ))));
        }
        Ok(header.payload_hash)
    }

    /// Takes a corrupt object out of the store; its bytes are kept where they do not count.
    async fn put_aside(&self, path: &Path, error: &StoreError) {
        tracing::warn!(%error, object = %path, "a corrupt object");
        let name = path.filename().unwrap_or_default().to_owned();
        let aside = self.prefix.clone().join("quarantine").join(name);
        // One copy for each object: the last.
        if let Err(error) = self.store.copy(path, &aside).await {
            tracing::warn!(%error, "a corrupt object could not be kept");
        }
        match self.delete(path).await {
            Ok(()) => {
                self.counters.quarantined.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => tracing::warn!(%error, "a corrupt object stays in the store"),
        }
    }
}

/// Why there are no bytes.
enum Wrong {
    /// The object itself is corrupt.
    Proved(StoreError),
    /// Replaced by another between two of its parts: another try finds the new one.
    Replaced(StoreError),
    /// Anything else.
    Unproved(StoreError),
}

impl From<StoreError> for Wrong {
    fn from(error: StoreError) -> Self {
        Self::Unproved(error)
    }
}

fn corrupt(what: String) -> StoreError {
    StoreError::new(ErrorKind::Corrupt, what)
}

/// The hash of the bytes that lie in the memory now.
fn hash_of(memory: &IoMemory) -> Result<u64, StoreError> {
    let mut hash = XxHash3_64::new();
    let mut step = vec![0; STEP.min(memory.len())];
    for at in (0..memory.len()).step_by(STEP) {
        let (bytes, _) = step.split_at_mut(STEP.min(memory.len() - at));
        memory.read(at, bytes)?;
        hash.write(bytes);
    }
    Ok(hash.finish())
}
