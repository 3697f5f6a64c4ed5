//! Why there is no device to use, and what to do about it.
//!
//! **Invariant:** looking for a device changes nothing and never panics; every reason has a remedy.

use std::fmt;

use crate::{ErrorKind, TransferError};

/// Which driver a device belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GpuFamily {
    /// CUDA: `libcuda.so.1`.
    Cuda,
    /// HIP (ROCm): `libamdhip64.so`.
    Hip,
}

impl GpuFamily {
    /// "cuda" or "rocm", as the engine is called.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Hip => "rocm",
        }
    }

    fn driver(self) -> &'static str {
        match self {
            Self::Cuda => "NVIDIA driver",
            Self::Hip => "ROCm runtime",
        }
    }
}

/// Why a family of devices cannot be used here.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceAbsent {
    /// The driver's library could not be loaded.
    NoLibrary {
        /// Whose library.
        family: GpuFamily,
        /// What the loader said.
        said: String,
    },
    /// The library lacks functions that are needed.
    MissingSymbols {
        /// Whose library.
        family: GpuFamily,
        /// Their names.
        names: Vec<&'static str>,
    },
    /// The driver is older than what the engine needs.
    TooOld {
        /// Whose driver.
        family: GpuFamily,
        /// The version found, as the driver writes it.
        found: i32,
        /// The oldest version that will do.
        needed: i32,
    },
    /// The driver knows no device, or none of this number.
    NoDevice {
        /// Whose driver.
        family: GpuFamily,
        /// How many there are.
        devices: i32,
        /// What the driver answered; 0 if it only counted.
        code: i32,
    },
    /// The driver refuses to work.
    Refused {
        /// Whose driver.
        family: GpuFamily,
        /// The call and its answer.
        said: String,
    },
}

impl DeviceAbsent {
    /// What was found.
    #[must_use]
    pub fn reason(&self) -> String {
        match self {
            Self::NoLibrary { family, said } => format!("no {}: {said}", family.driver()),
            Self::MissingSymbols { family, names } => {
                format!("the {} lacks {}", family.driver(), names.join(", "))
            }
            Self::TooOld { family, found, needed } => {
                format!("the {} has version {found}, {needed} or newer is needed", family.driver())
            }
            Self::NoDevice { family, devices, code: 0 } => {
                format!("the {} shows {devices} devices", family.driver())
            }
            Self::NoDevice { family, devices, code } => {
                format!("the {} shows {devices} devices (answer {code})", family.driver())
            }
            Self::Refused { family, said } => format!("the {} refuses: {said}", family.driver()),
        }
    }

    /// What to do.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            Self::NoLibrary { family, .. } => format!(
                "install the {} and make its library visible (in a container: pass it through; \
                 else LD_LIBRARY_PATH); without it the {} engine is not used",
                family.driver(),
                family.name()
            ),
            Self::MissingSymbols { family, .. } | Self::TooOld { family, .. } => {
                format!("install a newer {}", family.driver())
            }
            Self::NoDevice { family, devices: 0, .. } => format!(
                "make the devices visible to this process ({}, device files in containers)",
                match family {
                    GpuFamily::Cuda => "CUDA_VISIBLE_DEVICES, /dev/nvidia*",
                    GpuFamily::Hip => "HIP_VISIBLE_DEVICES, /dev/kfd and /dev/dri",
                }
            ),
            Self::NoDevice { devices, .. } => {
                format!("choose a device below {devices}")
            }
            Self::Refused { family, .. } => {
                format!("see the kernel log for what the {} reports; restart it", family.driver())
            }
        }
    }
}

impl fmt::Display for DeviceAbsent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.reason(), self.remedy())
    }
}

impl std::error::Error for DeviceAbsent {}

impl From<DeviceAbsent> for TransferError {
    fn from(absent: DeviceAbsent) -> Self {
        Self::new(ErrorKind::Unsupported, absent.to_string())
    }
}
