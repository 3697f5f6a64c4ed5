//! Host memory pinned (page-locked) with a device's driver, in bounded pieces.
//!
//! **Invariant:** a piece is unpinned once, by the last one who uses it, while its memory is still
//! mapped; a copy is never given to the driver across the border of two pieces.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use super::{
    error::{Call, Class},
    opened::Device,
};
use crate::{ErrorKind, Memory, TransferError};

/// What drivers pin is made of.
const PAGE: usize = 4096;

/// One pinned piece; dropping it unpins.
#[derive(Debug)]
pub(super) struct Pin {
    device: Arc<Device>,
    addr: u64,
    len: usize,
    live: bool,
}

impl Pin {
    /// Pins `len` bytes at `addr`, and puts them into the device's table.
    ///
    /// # Safety
    /// The memory is mapped, and stays so until the pin is gone.
    pub(super) unsafe fn new(device: &Arc<Device>, addr: u64, len: usize) -> Call<Arc<Self>> {
        let entered = device.enter()?;
        // SAFETY: mapped memory, as the caller promises.
        unsafe { entered.pin(addr, len) }?;
        drop(entered);
        let pin = Arc::new(Self { device: Arc::clone(device), addr, len, live: true });
        device.pins.lock().insert(addr, Arc::downgrade(&pin));
        Ok(pin)
    }

    /// First byte after it.
    pub(super) fn end(&self) -> u64 {
        self.addr + self.len as u64
    }

    /// Ends it now if this is the last use; else the last use ends it.
    pub(super) fn unpin(self: Arc<Self>) -> Call<()> {
        match Arc::try_unwrap(self) {
            Ok(mut last) => last.end_now(),
            Err(_used) => Ok(()),
        }
    }

    fn end_now(&mut self) -> Call<()> {
        if !std::mem::take(&mut self.live) {
            return Ok(());
        }
        let entered = self.device.enter_to_give_back()?;
        // SAFETY: pinned by `new`, and `live` makes this the only time.
        let unpinned = unsafe { entered.unpin(self.addr) };
        drop(entered);
        let mut table = self.device.pins.lock();
        if table.get(&self.addr).is_some_and(|pin| pin.strong_count() == 0) {
            table.remove(&self.addr);
        }
        unpinned
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        // In a forked child the parent's registration is not ours to end.
        if self.device.is_of_this_process()
            && let Err(error) = self.end_now()
        {
            tracing::error!("{} bytes could not be unpinned: {error}", self.len);
        }
    }
}

/// Pieces pinned with one device, by address.
#[derive(Debug, Default)]
pub(super) struct PinTable {
    pins: Mutex<BTreeMap<u64, Weak<Pin>>>,
}

impl PinTable {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Weak<Pin>>> {
        self.pins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pieces that cover this range without a gap; `None` if they do not.
    fn covering(&self, addr: u64, len: usize) -> Option<Vec<Arc<Pin>>> {
        let end = addr.checked_add(len as u64)?;
        let table = self.lock();
        let (first, _) = table.range(..=addr).next_back()?;
        let mut found = Vec::new();
        let mut covered = addr;
        for (start, pin) in table.range(first..) {
            let pin = pin.upgrade()?;
            if *start > covered || pin.end() <= covered {
                return None;
            }
            covered = pin.end();
            found.push(pin);
            if covered >= end {
                return Some(found);
            }
        }
        None
    }
}

/// How a region of host memory is pinned.
#[derive(Debug, Default)]
pub(super) struct HostPins {
    /// In order of address, without a gap. Dropped before the memory.
    pins: Vec<Arc<Pin>>,
    /// Whether the device may take it for pinned.
    pub(super) pinned: bool,
    _memory: Option<Memory>,
}

impl HostPins {
    /// Memory that is pinned by others, or not at all.
    pub(super) fn none(pinned: bool) -> Self {
        Self { pins: Vec::new(), pinned, _memory: None }
    }

    /// Memory that its owner calls pinned, with the pieces that this device knows of.
    pub(super) fn known(device: &Device, memory: &Memory) -> Self {
        let addr = memory.as_ptr().as_ptr().expose_provenance() as u64;
        let pins = device.pins.covering(addr, memory.len()).unwrap_or_default();
        Self { pins, pinned: true, _memory: Some(memory.clone()) }
    }

    /// Uses the pieces that cover the memory, or pins it in pieces of at most `piece_bytes` (whole
    /// pages).
    ///
    /// # Errors
    /// `Registration`, naming the piece; nothing stays pinned then.
    pub(super) fn of(
        device: &Arc<Device>,
        memory: &Memory,
        piece_bytes: usize,
    ) -> Result<Self, TransferError> {
        let (addr, len) = (memory.as_ptr().as_ptr().expose_provenance() as u64, memory.len());
        if let Some(pins) = device.pins.covering(addr, len) {
            return Ok(Self { pins, pinned: true, _memory: Some(memory.clone()) });
        }
        let mut this = Self { pins: Vec::new(), pinned: true, _memory: Some(memory.clone()) };
        // Pieces meet at page borders: no two may share a page.
        let before = memory.as_ptr().as_ptr().addr() % PAGE;
        let pieces = (before + len).div_ceil(piece_bytes);
        let mut offset = 0;
        while offset < len {
            let longest = if offset == 0 { piece_bytes - before } else { piece_bytes };
            let piece = longest.min(len - offset);
            // SAFETY: a part of the memory, which `this` keeps mapped longer than its pins.
            match unsafe { Pin::new(device, addr + offset as u64, piece) } {
                Ok(pin) => this.pins.push(pin),
                Err(error) => {
                    let at = this.pins.len();
                    // Rolls back, newest first, before the failure is told.
                    while let Some(pin) = this.pins.pop() {
                        drop(pin);
                    }
                    let hint = match error.class {
                        Class::AlreadyPinned => {
                            "; a part of it is pinned by somebody else: register it as pinned memory"
                        }
                        _ => "; lower the amount of pinned memory, or allow unpinned memory",
                    };
                    let text = format!(
                        "piece {at} of {pieces} ({piece} bytes at offset {offset} of {len}) \
                         was not pinned: {error}{hint}"
                    );
                    let kind = error.into_transfer(ErrorKind::Registration).kind();
                    return Err(TransferError::new(kind, text));
                }
            }
            offset += piece;
        }
        Ok(this)
    }

    /// How many of `len` bytes at `addr` lie in one piece.
    pub(super) fn together(&self, addr: u64, len: u64) -> u64 {
        if self.pins.len() < 2 {
            return len;
        }
        let at = self.pins.partition_point(|pin| pin.end() <= addr);
        self.pins.get(at).map_or(len, |pin| len.min(pin.end() - addr))
    }
}
