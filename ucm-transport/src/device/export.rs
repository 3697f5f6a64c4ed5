//! Device memory for other processes and for other devices.
//!
//! **Invariant:** a handle names an allocation as a whole; where the memory begins in it and how
//! long it is travel with the handle, and are checked where it is opened.

use std::{os::fd::OwnedFd, sync::Arc};

use super::{handles::DeviceBytes, opened::Device};
use crate::{ErrorKind, Memory, TransferError};

/// Memory of a device as another process can open it. Plain bytes: send them by any means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedMemory {
    handle: [u8; 64],
    offset: u64,
    len: u64,
    allocation: u64,
}

/// Length of [`SharedMemory::to_bytes`].
const SHARED_BYTES: usize = 88;

impl SharedMemory {
    pub(super) fn of(device: &Arc<Device>, memory: &Memory) -> Result<Self, TransferError> {
        let addr = memory.as_ptr().as_ptr().expose_provenance() as u64;
        let (base, allocation) = allocation_of(device, addr, memory.len())?;
        let exported = device.enter().and_then(|entered| {
            // SAFETY: the base of an allocation that the memory keeps alive.
            unsafe { entered.ipc_export(base) }
        });
        let handle = exported.map_err(|error| error.into_transfer(ErrorKind::Registration))?;
        Ok(Self {
            handle,
            offset: addr - base,
            len: memory.len() as u64,
            allocation: allocation as u64,
        })
    }

    pub(super) fn open(
        &self,
        device: &Arc<Device>,
    ) -> Result<(DeviceBytes, u64, usize), TransferError> {
        match self.offset.checked_add(self.len) {
            Some(end) if end <= self.allocation && self.len > 0 => {}
            _ => return Err(TransferError::out_of_bounds(self.offset, self.len, self.allocation)),
        }
        let len = usize::try_from(self.len).map_err(|_| {
            TransferError::invalid(format!("{} bytes do not fit this process", self.len))
        })?;
        let bytes = DeviceBytes::import(device, self.handle)
            .map_err(|error| error.into_transfer(ErrorKind::Registration))?;
        // The allocation must be what its owner said: the range is checked against it.
        let known = device.enter().and_then(|entered| entered.allocation_of(bytes.addr()));
        let (base, found) = known.map_err(|error| error.into_transfer(ErrorKind::Registration))?;
        let inside = base == bytes.addr() && self.offset + self.len <= found as u64;
        if !inside {
            return Err(TransferError::out_of_bounds(self.offset, self.len, found as u64));
        }
        Ok((bytes, self.offset, len))
    }

    /// As bytes: the driver's handle, then offset, length and allocation's length, little-endian.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; SHARED_BYTES] {
        let numbers = [self.offset, self.len, self.allocation].map(u64::to_le_bytes);
        let mut bytes = [0; SHARED_BYTES];
        let all = self.handle.iter().chain(numbers.iter().flatten());
        bytes.iter_mut().zip(all).for_each(|(to, from)| *to = *from);
        bytes
    }

    /// From bytes of another process; they are checked when the memory is opened.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; SHARED_BYTES]) -> Self {
        let mut handle = [0; 64];
        handle.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
        let number = |at: usize| {
            let mut number = [0; 8];
            number.iter_mut().zip(bytes.iter().skip(at)).for_each(|(to, from)| *to = *from);
            u64::from_le_bytes(number)
        };
        Self { handle, offset: number(64), len: number(72), allocation: number(80) }
    }
}

/// A dmabuf with the place of the memory in it.
#[derive(Debug)]
#[non_exhaustive]
pub struct DmaBuf {
    /// The descriptor; it keeps the allocation alive for whoever imports it.
    pub fd: OwnedFd,
    /// Where the memory begins in it.
    pub offset: u64,
    /// Length of the memory.
    pub len: u64,
}

impl DmaBuf {
    pub(super) fn of(device: &Arc<Device>, memory: &Memory) -> Result<Self, TransferError> {
        let page = rustix::param::page_size() as u64;
        let addr = memory.as_ptr().as_ptr().expose_provenance() as u64;
        let (base, allocation) = allocation_of(device, addr, memory.len())?;
        // The driver exports whole pages. Allocations begin on one, and fill their last one.
        let first = addr - addr % page;
        let end = (addr + memory.len() as u64).next_multiple_of(page);
        let last = (base + allocation as u64).next_multiple_of(page);
        if base % page != 0 || first < base || end > last {
            let message = format!(
                "an allocation of {allocation} bytes that begins at {base:#x} has no whole pages"
            );
            return Err(TransferError::unsupported(message));
        }
        let len = usize::try_from(end - first).unwrap_or(0);
        let exported = device.enter().and_then(|entered| {
            // SAFETY: whole pages of an allocation that the memory keeps alive.
            unsafe { entered.dmabuf(first, len) }
        });
        let fd = exported.map_err(|error| error.into_transfer(ErrorKind::Registration))?;
        Ok(Self { fd, offset: addr - first, len: memory.len() as u64 })
    }
}

/// The allocation around this memory.
fn allocation_of(device: &Device, addr: u64, len: usize) -> Result<(u64, usize), TransferError> {
    let found = device.enter().and_then(|entered| entered.allocation_of(addr));
    let (base, allocation) = found.map_err(|error| error.into_transfer(ErrorKind::Registration))?;
    let offset = addr.checked_sub(base);
    match offset.and_then(|offset| offset.checked_add(len as u64)) {
        Some(end) if end <= allocation as u64 => Ok((base, allocation)),
        _ => Err(TransferError::out_of_bounds(offset.unwrap_or(0), len as u64, allocation as u64)),
    }
}
