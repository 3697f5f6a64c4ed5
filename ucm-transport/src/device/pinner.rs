//! Pins segments of the node cache with a device.
//!
//! **Invariant:** a piece that a plan in flight still uses stays pinned until the plan has ended,
//! also when it was unregistered meanwhile.

use std::{
    collections::BTreeMap,
    fmt,
    ptr::NonNull,
    sync::{Arc, Mutex, PoisonError},
};

use ucm_data::{RegisterFailure, RegisterRegion};

use super::{error::DriverError, opened::Device, pins::Pin};

/// A device's side of [`ucm_data::Registration`]; made by [`Gpu::pinner`](super::Gpu::pinner).
pub struct GpuPinner {
    device: Arc<Device>,
    piece_bytes: u64,
    pins: Mutex<BTreeMap<usize, Arc<Pin>>>,
}

impl GpuPinner {
    pub(super) fn new(device: &Arc<Device>, piece_bytes: u64) -> Self {
        Self { device: Arc::clone(device), piece_bytes, pins: Mutex::default() }
    }
}

impl fmt::Debug for GpuPinner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuPinner")
            .field("device", &self.device)
            .field("piece_bytes", &self.piece_bytes)
            .finish_non_exhaustive()
    }
}

fn failure(error: DriverError) -> RegisterFailure {
    RegisterFailure { code: i64::from(error.code), text: error.to_string() }
}

impl RegisterRegion for GpuPinner {
    fn max_piece_bytes(&self) -> u64 {
        self.piece_bytes
    }

    fn register(&self, base: NonNull<u8>, len: usize) -> Result<(), RegisterFailure> {
        let addr = base.as_ptr().expose_provenance();
        // SAFETY: a mapped piece of a segment, which stays mapped until `unregister`; users of the
        // pin keep it mapped longer through the memory they registered.
        let pin = unsafe { Pin::new(&self.device, addr as u64, len) }.map_err(failure)?;
        self.pins.lock().unwrap_or_else(PoisonError::into_inner).insert(addr, pin);
        Ok(())
    }

    fn unregister(&self, base: NonNull<u8>, _len: usize) -> Result<(), RegisterFailure> {
        let addr = base.as_ptr().addr();
        let pin = self.pins.lock().unwrap_or_else(PoisonError::into_inner).remove(&addr);
        match pin {
            Some(pin) => pin.unpin().map_err(failure),
            None => Err(RegisterFailure { code: -1, text: "was not registered here".into() }),
        }
    }

    fn consume_error(&self) {
        if let Ok(entered) = self.device.enter() {
            entered.consume_error();
        }
    }
}
