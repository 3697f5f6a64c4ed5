//! Why there is no RDMA device to use, and what to do about it; and what a verb answered.
//!
//! **Invariant:** looking for a device changes nothing and never panics; every reason has a remedy.

use std::{fmt, io};

use rustix::io::Errno;

use crate::{ErrorKind, TransferError};

/// Why RDMA cannot be used here.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RdmaAbsent {
    /// The verbs library could not be loaded.
    NoLibrary {
        /// What the loader said.
        said: String,
    },
    /// The library lacks functions that are needed.
    MissingSymbols {
        /// Their names.
        names: Vec<&'static str>,
    },
    /// There is no device, or none of this name.
    NoDevice {
        /// The name asked for.
        wanted: Option<String>,
        /// The devices that there are.
        devices: Vec<String>,
    },
    /// No port, or no address of it, can be used.
    NoPort {
        /// What was found, port by port.
        said: String,
    },
    /// The device refuses to work.
    Refused {
        /// The call and its answer.
        said: String,
    },
}

impl RdmaAbsent {
    /// What was found.
    #[must_use]
    pub fn reason(&self) -> String {
        match self {
            Self::NoLibrary { said } => format!("no verbs library: {said}"),
            Self::MissingSymbols { names } => {
                format!("the verbs library lacks {}", names.join(", "))
            }
            Self::NoDevice { wanted: None, devices } => {
                format!("{} RDMA devices", devices.len())
            }
            Self::NoDevice { wanted: Some(name), devices } => {
                format!("no RDMA device {name}; there are [{}]", devices.join(", "))
            }
            Self::NoPort { said } => format!("no usable port: {said}"),
            Self::Refused { said } => format!("the device refuses: {said}"),
        }
    }

    /// What to do.
    #[must_use]
    pub fn remedy(&self) -> String {
        match self {
            Self::NoLibrary { .. } => "install libibverbs (Debian: libibverbs1 and \
                                       ibverbs-providers); without it peers are reached by tcp"
                .into(),
            Self::MissingSymbols { .. } => "install a newer libibverbs".into(),
            Self::NoDevice { wanted: None, .. } => {
                "load the adapter's kernel driver and ib_uverbs, and pass /dev/infiniband through \
                 to containers; without a device peers are reached by tcp"
                    .into()
            }
            Self::NoDevice { .. } => "choose one of these, or name none".into(),
            Self::NoPort { .. } => "bring the link up (ibv_devinfo shows ports; RoCE needs an \
                                    address on the network interface), or choose another port"
                .into(),
            Self::Refused { .. } => {
                "allow access to /dev/infiniband, and raise the limit of locked memory \
                 (ulimit -l unlimited)"
                    .into()
            }
        }
    }
}

impl fmt::Display for RdmaAbsent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.reason(), self.remedy())
    }
}

impl std::error::Error for RdmaAbsent {}

impl From<RdmaAbsent> for TransferError {
    fn from(absent: RdmaAbsent) -> Self {
        Self::new(ErrorKind::Unsupported, absent.to_string())
    }
}

/// A verb that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct VerbError {
    pub(super) call: &'static str,
    pub(super) errno: Errno,
}

impl VerbError {
    /// From a number that the call returned.
    pub(super) fn of(call: &'static str, number: i32) -> Self {
        Self { call, errno: Errno::from_raw_os_error(number.saturating_abs().clamp(1, 4095)) }
    }

    /// From what the call left in `errno`.
    pub(super) fn last(call: &'static str) -> Self {
        let number = io::Error::last_os_error().raw_os_error().unwrap_or(0);
        Self::of(call, if number == 0 { Errno::IO.raw_os_error() } else { number })
    }

    /// The device or the kernel cannot do it at all.
    pub(super) fn is_unsupported(&self) -> bool {
        matches!(self.errno, Errno::OPNOTSUPP | Errno::NOSYS | Errno::PROTONOSUPPORT)
    }

    pub(super) fn into_transfer(self, kind: ErrorKind) -> TransferError {
        let kind = if self.is_unsupported() { ErrorKind::Unsupported } else { kind };
        TransferError::new(kind, self.to_string())
    }
}

impl fmt::Display for VerbError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.call, self.errno)
    }
}

impl From<VerbError> for RdmaAbsent {
    fn from(error: VerbError) -> Self {
        Self::Refused { said: error.to_string() }
    }
}
