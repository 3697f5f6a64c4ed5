//! An opened device of one driver: made current for a call, shared by everything that uses it.
//!
//! **Invariant:** a process opens each device once, so that all engines and registrations know of the
//! same pins; what was current on the calling thread before is current again after every call.

use std::{
    fmt,
    marker::PhantomData,
    ops::Deref,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use super::{
    absent::{DeviceAbsent, GpuFamily},
    driver::Driver,
    error::{Call, DriverError},
    gpu::GpuInfo,
    pins::PinTable,
};
use crate::Location;

/// See the module description.
pub(super) struct Device {
    driver: Box<dyn Driver>,
    pub(super) info: GpuInfo,
    pub(super) pins: PinTable,
    /// The process that opened it; drivers do not survive a fork.
    process: u32,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("info", &self.info).finish_non_exhaustive()
    }
}

static OPEN: Mutex<Vec<Weak<Device>>> = Mutex::new(Vec::new());

impl Device {
    /// The device of this number, opened now or before.
    pub(super) fn open(family: GpuFamily, ordinal: u16) -> Result<Arc<Self>, DeviceAbsent> {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|known| known.strong_count() > 0);
        let wanted =
            |device: &Arc<Self>| device.info.family == family && device.info.ordinal == ordinal;
        if let Some(known) =
            open.iter().filter_map(Weak::upgrade).find(|d| wanted(d) && d.is_of_this_process())
        {
            return Ok(known);
        }
        let (driver, info) = driver_of(family, ordinal)?;
        let device =
            Arc::new(Self { driver, info, pins: PinTable::default(), process: std::process::id() });
        open.push(Arc::downgrade(&device));
        Ok(device)
    }

    /// Where its memory is.
    pub(super) fn location(&self) -> Location {
        match self.info.family {
            GpuFamily::Cuda => Location::Cuda(self.info.ordinal),
            GpuFamily::Hip => Location::Hip(self.info.ordinal),
        }
    }

    pub(super) fn is_of_this_process(&self) -> bool {
        self.process == std::process::id()
    }

    /// Makes it current on this thread until the guard goes.
    pub(super) fn enter(&self) -> Call<Entered<'_>> {
        if !self.is_of_this_process() {
            return Err(DriverError::forked());
        }
        let before = self.driver.enter()?;
        Ok(Entered { driver: &*self.driver, before, _of_this_thread: PhantomData })
    }

    /// As [`enter`](Self::enter), for giving something back: nobody would do it later, so a failure
    /// that passes is waited out.
    pub(super) fn enter_to_give_back(&self) -> Call<Entered<'_>> {
        let mut entered = self.enter();
        for _ in 0..3 {
            if entered.is_ok() || !self.is_of_this_process() {
                break;
            }
            entered = self.enter();
        }
        entered
    }

    /// What the driver can do with it.
    pub(super) fn abilities(&self) -> super::driver::Abilities {
        self.driver.abilities()
    }
}

fn driver_of(family: GpuFamily, ordinal: u16) -> Result<(Box<dyn Driver>, GpuInfo), DeviceAbsent> {
    match family {
        #[cfg(feature = "cuda")]
        GpuFamily::Cuda => super::cuda::CudaDriver::open(ordinal)
            .map(|(driver, info)| (Box::new(driver) as Box<dyn Driver>, info)),
        #[cfg(feature = "rocm")]
        GpuFamily::Hip => super::hip::HipDriver::open(ordinal)
            .map(|(driver, info)| (Box::new(driver) as Box<dyn Driver>, info)),
        #[cfg(not(all(feature = "cuda", feature = "rocm")))]
        other => {
            let said = format!("built without the feature `{}`, device {ordinal}", other.name());
            Err(DeviceAbsent::NoLibrary { family: other, said })
        }
    }
}

/// The device is current on this thread.
pub(super) struct Entered<'a> {
    driver: &'a dyn Driver,
    before: usize,
    /// What is current belongs to a thread.
    _of_this_thread: PhantomData<*const ()>,
}

impl<'a> Deref for Entered<'a> {
    type Target = dyn Driver + 'a;

    fn deref(&self) -> &Self::Target {
        self.driver
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.driver.leave(self.before);
    }
}
