//! A device: its memory, its registrations, and how its memory is reached by others.
//!
//! **Invariant:** memory given out keeps the device open, and is given back to the driver when the
//! last clone of it is gone, never while a plan uses it.

use std::{fmt, ptr::NonNull, sync::Arc};

use super::{
    absent::{DeviceAbsent, GpuFamily},
    blocking,
    driver::Abilities,
    export::{DmaBuf, SharedMemory},
    handles::DeviceBytes,
    opened::Device,
    pinner::GpuPinner,
};
use crate::{ErrorKind, Location, Memory, TransferError};

/// What a driver says about one of its devices.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuInfo {
    /// Whose driver.
    pub family: GpuFamily,
    /// The driver's number of the device.
    pub ordinal: u16,
    /// The driver's name of the device.
    pub name: String,
    /// Its memory.
    pub memory_bytes: u64,
    /// Version of the driver, as the driver writes it.
    pub driver_version: i32,
}

/// What is used of a driver, for reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuAbilities {
    /// Many copies go to the driver by one call.
    pub batch_copies: bool,
    /// A kernel can move small fragments.
    pub fragment_kernel: bool,
    /// Memory can be opened by other processes.
    pub shared_memory: bool,
    /// Memory can be handed to other devices (RDMA) as a dmabuf.
    pub dmabuf: bool,
}

impl From<Abilities> for GpuAbilities {
    fn from(abilities: Abilities) -> Self {
        Self {
            batch_copies: abilities.batch,
            fragment_kernel: abilities.gather && abilities.host_addresses,
            shared_memory: abilities.ipc,
            dmabuf: abilities.dmabuf,
        }
    }
}

/// An opened device. Clones are the same device.
#[derive(Clone)]
pub struct Gpu {
    pub(super) device: Arc<Device>,
}

impl Gpu {
    /// Opens a device by family and number.
    ///
    /// # Errors
    /// [`DeviceAbsent`] says what is missing and what to do about it.
    pub fn open(family: GpuFamily, ordinal: u16) -> Result<Self, DeviceAbsent> {
        Ok(Self { device: Device::open(family, ordinal)? })
    }

    /// How many devices of this family there are.
    ///
    /// # Errors
    /// As [`open`](Self::open); no device at all is an error, too.
    pub fn count(family: GpuFamily) -> Result<u16, DeviceAbsent> {
        let (_version, devices) = match family {
            #[cfg(feature = "cuda")]
            GpuFamily::Cuda => super::cuda::probe()?,
            #[cfg(feature = "rocm")]
            GpuFamily::Hip => super::hip::probe()?,
            #[cfg(not(all(feature = "cuda", feature = "rocm")))]
            other => {
                let said = format!("built without the feature `{}`", other.name());
                return Err(DeviceAbsent::NoLibrary { family: other, said });
            }
        };
        Ok(u16::try_from(devices).unwrap_or(u16::MAX))
    }

    /// What the driver says about it.
    #[must_use]
    pub fn info(&self) -> &GpuInfo {
        &self.device.info
    }

    /// What is used of its driver.
    #[must_use]
    pub fn abilities(&self) -> GpuAbilities {
        self.device.abilities().into()
    }

    /// Where its memory is.
    #[must_use]
    pub fn location(&self) -> Location {
        self.device.location()
    }

    /// Allocates device memory.
    ///
    /// # Errors
    /// `Invalid` for zero bytes; `Registration` when the driver has none; `Poisoned` when the device
    /// is lost.
    pub fn alloc(&self, len: usize) -> Result<Memory, TransferError> {
        if len == 0 {
            return Err(TransferError::invalid("an allocation of zero bytes"));
        }
        let bytes = DeviceBytes::alloc(&self.device, len).map_err(|error| {
            let kind = error.clone().into_transfer(ErrorKind::Registration).kind();
            TransferError::new(kind, format!("{len} bytes of device memory: {error}"))
        })?;
        self.memory(bytes, 0, len)
    }

    /// Describes device memory that somebody else (a framework) owns.
    ///
    /// # Safety
    /// `addr..addr+len` is memory of this device until `keep` and all its clones are dropped.
    ///
    /// # Errors
    /// `Invalid` for address zero.
    pub unsafe fn memory_of_others(
        &self,
        addr: u64,
        len: usize,
        keep: Arc<dyn std::any::Any + Send + Sync>,
    ) -> Result<Memory, TransferError> {
        let base = pointer(addr)?;
        // SAFETY: the caller's promise is the same.
        Ok(unsafe { Memory::from_raw(base, len, self.location(), keep) })
    }

    fn memory(&self, bytes: DeviceBytes, offset: u64, len: usize) -> Result<Memory, TransferError> {
        let base = pointer(bytes.addr() + offset)?;
        // SAFETY: the range lies in the allocation, which the keep-alive owns; device memory is not
        // reached by references.
        Ok(unsafe { Memory::from_raw(base, len, self.location(), Arc::new(bytes)) })
    }

    /// Copies bytes of device memory to `into` and waits: for tools and tests.
    ///
    /// # Errors
    /// `OutOfBounds`, `Unsupported` for memory of another device, `Failed` when the copy does.
    pub fn read(
        &self,
        memory: &Memory,
        offset: usize,
        into: &mut [u8],
    ) -> Result<(), TransferError> {
        blocking::read(&self.device, memory, offset, into)
    }

    /// Copies `from` to device memory and waits: for tools and tests.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn write(&self, memory: &Memory, offset: usize, from: &[u8]) -> Result<(), TransferError> {
        blocking::write(&self.device, memory, offset, from)
    }

    /// Pins segments of the node cache with this device, in pieces of at most `piece_bytes`; for
    /// [`ucm_data::Registration`]. Engines of this device know what it has pinned.
    #[must_use]
    pub fn pinner(&self, piece_bytes: u64) -> Arc<GpuPinner> {
        Arc::new(GpuPinner::new(&self.device, piece_bytes))
    }

    /// A handle by which another process can open this memory.
    ///
    /// # Errors
    /// `Unsupported` for memory that the driver does not share (host memory, memory of another
    /// device, pooled allocations, some platforms).
    pub fn share(&self, memory: &Memory) -> Result<SharedMemory, TransferError> {
        self.is_own(memory)?;
        SharedMemory::of(&self.device, memory)
    }

    /// Opens memory that another process shares. The handle says where in its allocation the memory
    /// begins, and how long it is.
    ///
    /// # Errors
    /// `Unsupported` when the driver cannot; `Registration` when it refuses: the handle's process is
    /// gone, or is this one.
    pub fn open_shared(&self, handle: &SharedMemory) -> Result<Memory, TransferError> {
        let (bytes, offset, len) = handle.open(&self.device)?;
        self.memory(bytes, offset, len)
    }

    /// A dmabuf of this memory, by which another device (an RDMA card) can reach it.
    ///
    /// # Errors
    /// `Unsupported` when driver or kernel cannot.
    pub fn dmabuf(&self, memory: &Memory) -> Result<DmaBuf, TransferError> {
        self.is_own(memory)?;
        DmaBuf::of(&self.device, memory)
    }

    /// Lets this device reach the memory of another of the same family.
    ///
    /// # Errors
    /// `Unsupported` when there is no way between the two.
    pub fn reach_peer(&self, peer: &Self) -> Result<(), TransferError> {
        if self.info().family != peer.info().family {
            let message = format!("no way between {:?} and {:?}", self.location(), peer.location());
            return Err(TransferError::unsupported(message));
        }
        let enabled =
            self.device.enter().and_then(|entered| entered.reach_peer(peer.info().ordinal));
        enabled.map_err(|error| error.into_transfer(ErrorKind::Unsupported))
    }

    fn is_own(&self, memory: &Memory) -> Result<(), TransferError> {
        if memory.location() == self.location() {
            return Ok(());
        }
        Err(TransferError::unsupported(format!(
            "{:?} is not memory of {:?}",
            memory.location(),
            self.location()
        )))
    }
}

fn pointer(addr: u64) -> Result<NonNull<u8>, TransferError> {
    usize::try_from(addr)
        .ok()
        .and_then(|addr| NonNull::new(std::ptr::with_exposed_provenance_mut(addr)))
        .ok_or_else(|| TransferError::invalid(format!("{addr} is no address")))
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Gpu").field(self.info()).finish()
    }
}
