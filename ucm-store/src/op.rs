//! One load or dump in flight: its key, its memory, and the way it ends.
//!
//! **Invariant:** an [`Op`] reaches its [`Sink`] exactly once; dropping it unfinished counts as a
//! failure (`Lost`), so a lost request is impossible by construction.

use std::{
    any::Any,
    fmt,
    ptr::NonNull,
    sync::{Arc, Mutex, PoisonError},
};

use crate::{ErrorKind, StoreError, raw};

/// Memory lent to a backend for one operation.
///
/// The bytes may be shared with other processes: only raw copies, no slices. What the owner
/// attached as `hold` is dropped with the value, which is the owner's proof that the IO has ended.
pub struct IoMemory {
    base: NonNull<u8>,
    len: usize,
    hold: Option<Box<dyn Any + Send>>,
}

// SAFETY: a pointer plus a Send keep-alive; the bytes are touched by raw copies only.
unsafe impl Send for IoMemory {}
// SAFETY: a shared reference gives the address and raw copies; the hold is reached by value only.
unsafe impl Sync for IoMemory {}

impl IoMemory {
    /// Describes `len` bytes at `base`.
    ///
    /// # Safety
    /// The range must stay valid for reads and writes until `hold` is dropped, and no Rust
    /// reference to it may exist in this process meanwhile.
    pub unsafe fn from_raw(base: NonNull<u8>, len: usize, hold: Box<dyn Any + Send>) -> Self {
        Self { base, len, hold: Some(hold) }
    }

    /// Length in bytes; a load fills exactly this many.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for an operation of no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Memory of this process alone, zeroed, aligned to 4096 bytes; it frees itself.
    ///
    /// # Errors
    /// `Invalid` for zero bytes or more than can be allocated.
    pub fn private(len: usize) -> Result<Self, StoreError> {
        let pages = raw::Pages::new(len)?;
        // SAFETY: the pages live as long as the hold, and nothing else refers to them.
        Ok(unsafe { Self::from_raw(pages.base(), len, Box::new(pages)) })
    }

    /// First byte. Using it is subject to the rules of [`IoMemory::from_raw`].
    #[must_use]
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.base
    }

    /// Copies `from` to `offset`. Bytes that would leave the memory are refused.
    ///
    /// # Errors
    /// `Invalid` when the range leaves the memory; nothing is written then.
    pub fn write(&self, offset: usize, from: &[u8]) -> Result<(), StoreError> {
        let dst = self.range(offset, from.len())?;
        // SAFETY: the range was checked, and `from_raw` promised it valid for writes.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), dst.as_ptr(), from.len()) };
        Ok(())
    }

    /// Copies from `offset` into `into`.
    ///
    /// # Errors
    /// `Invalid` when the range leaves the memory.
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<(), StoreError> {
        let src = self.range(offset, into.len())?;
        // SAFETY: the range was checked, and `from_raw` promised it valid for reads.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Takes back what the owner attached.
    pub fn into_hold(mut self) -> Box<dyn Any + Send> {
        self.hold.take().unwrap_or_else(|| Box::new(()))
    }

    fn range(&self, offset: usize, len: usize) -> Result<NonNull<u8>, StoreError> {
        match offset.checked_add(len) {
            // SAFETY: offset <= len of the memory.
            Some(end) if end <= self.len => Ok(unsafe { self.base.add(offset) }),
            _ => Err(StoreError::new(
                ErrorKind::Invalid,
                format!("{len} bytes at offset {offset} leave a buffer of {} bytes", self.len),
            )),
        }
    }
}

impl fmt::Debug for IoMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IoMemory").field("len", &self.len).finish_non_exhaustive()
    }
}

/// The end of one operation.
#[derive(Debug)]
pub struct Completed {
    /// The number the owner gave the operation.
    pub token: u64,
    /// `Ok` only when every byte was moved and verified.
    pub result: Result<(), StoreError>,
    /// The memory, free of any IO again.
    pub memory: IoMemory,
}

/// Where operations end. Called on backend threads: it must neither block nor panic.
pub trait Sink: Send + Sync {
    /// Takes one ended operation.
    fn complete(&self, completed: Completed);

    /// Takes operations that ended together. Worth implementing where one wake-up can serve all.
    fn complete_all(&self, batch: Vec<Completed>) {
        for completed in batch {
            self.complete(completed);
        }
    }
}

/// One load or dump of one object.
pub struct Op {
    block: [u8; 16],
    shard: u32,
    token: u64,
    rest: Option<(IoMemory, Arc<dyn Sink>)>,
}

impl Op {
    /// A new operation on shard `shard` of block `block`; it ends in `sink` with `token`.
    pub fn new(
        block: [u8; 16],
        shard: u32,
        token: u64,
        memory: IoMemory,
        sink: Arc<dyn Sink>,
    ) -> Self {
        Self { block, shard, token, rest: Some((memory, sink)) }
    }

    /// Block id of the object.
    #[must_use]
    pub fn block(&self) -> &[u8; 16] {
        &self.block
    }

    /// Shard index of the object.
    #[must_use]
    pub fn shard(&self) -> u32 {
        self.shard
    }

    /// The same operation on another block: for backends that keep several name spaces in one.
    #[must_use]
    pub fn renamed(mut self, block: [u8; 16]) -> Self {
        self.block = block;
        self
    }

    /// The memory to fill or to store.
    #[must_use]
    pub fn memory(&self) -> &IoMemory {
        // The option is emptied only by `finish` and `drop`, which consume the operation.
        match &self.rest {
            Some((memory, _)) => memory,
            None => unreachable!("invariant: an operation holds its memory until it is finished"),
        }
    }

    /// Ends the operation. `Ok(())` states that every byte was moved and verified, and in every
    /// case that nothing touches the memory any more.
    pub fn finish(mut self, result: Result<(), StoreError>) {
        self.end(result);
    }

    /// The same memory once more, to be read by somebody else: while it lives, the operation cannot
    /// be taken out of its `Arc`, and so not be finished.
    pub(crate) fn share_memory(this: &Arc<Self>) -> IoMemory {
        let memory = this.memory();
        // SAFETY: the hold keeps the operation, which keeps the memory valid.
        unsafe { IoMemory::from_raw(memory.as_ptr(), memory.len(), Box::new(Arc::clone(this))) }
    }

    /// Ends operations together: those of the same sink reach it as one batch.
    pub fn finish_all(ended: impl IntoIterator<Item = (Self, Result<(), StoreError>)>) {
        let mut batches: Vec<(Arc<dyn Sink>, Vec<Completed>)> = Vec::new();
        for (mut op, result) in ended {
            let Some((memory, sink)) = op.rest.take() else { continue };
            let completed = Completed { token: op.token, result, memory };
            match batches.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &sink)) {
                Some((_, batch)) => batch.push(completed),
                None => batches.push((sink, vec![completed])),
            }
        }
        for (sink, mut batch) in batches {
            match batch.len() {
                1 => batch.drain(..).for_each(|completed| sink.complete(completed)),
                _ => sink.complete_all(batch),
            }
        }
    }

    /// An operation on the same memory whose end goes to `on_end` instead: with this operation,
    /// unfinished, and the result so far. `on_end` may finish it, start it elsewhere or keep it;
    /// dropping it ends it as `Lost`. This is how a backend wraps another.
    #[must_use]
    pub fn intercept<F>(mut self, on_end: F) -> Self
    where
        F: FnOnce(Self, Result<(), StoreError>) + Send + 'static,
    {
        let Some((memory, sink)) = self.rest.take() else { return self };
        let (block, shard, token) = (self.block, self.shard, self.token);
        let inner = Intercepted { block, shard, token, end: Mutex::new(Some((sink, on_end))) };
        Self { block, shard, token, rest: Some((memory, Arc::new(inner))) }
    }

    fn end(&mut self, result: Result<(), StoreError>) {
        if let Some((memory, sink)) = self.rest.take() {
            sink.complete(Completed { token: self.token, result, memory });
        }
    }
}

/// The sink between an intercepted operation and its owner.
struct Intercepted<F> {
    block: [u8; 16],
    shard: u32,
    token: u64,
    end: Mutex<Option<(Arc<dyn Sink>, F)>>,
}

impl<F> Sink for Intercepted<F>
where
    F: FnOnce(Op, Result<(), StoreError>) + Send,
{
    fn complete(&self, completed: Completed) {
        let end = self.end.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Only one operation was made with this sink, so it is called once.
        let Some((sink, on_end)) = end else { return };
        let rest = Some((completed.memory, sink));
        let op = Op { block: self.block, shard: self.shard, token: self.token, rest };
        on_end(op, completed.result);
    }
}

impl Drop for Op {
    fn drop(&mut self) {
        self.end(Err(StoreError::new(ErrorKind::Lost, "the operation was dropped unfinished")));
    }
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Op")
            .field("block", &self.block)
            .field("shard", &self.shard)
            .field("token", &self.token)
            .finish_non_exhaustive()
    }
}

/// Zero bytes make no object; every backend says so in the same way.
pub(crate) fn refuse_empty(op: &Op) -> Result<(), StoreError> {
    if op.memory().is_empty() {
        return Err(StoreError::new(ErrorKind::Invalid, "an object has at least one byte"));
    }
    Ok(())
}

/// Ends each operation with what `work` says about it, as soon as it is known.
pub(crate) fn finish_each(ops: Vec<Op>, work: impl Fn(&Op) -> Result<(), StoreError>) {
    for op in ops {
        let result = work(&op);
        op.finish(result);
    }
}
