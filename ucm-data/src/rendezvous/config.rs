//! What a member says about itself and about the cache it wants to enter.
//!
//! **Invariant:** nothing in here changes after `enter`; two members with different [`LayoutTag`]s
//! never share memory.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::DataError;
use crate::fork::SharedFd;

/// Most members of one cache.
pub const MAX_SEATS: u16 = 128;
/// Longest text of a layout tag in bytes.
pub(crate) const MAX_TEXT_BYTES: usize = 512;
/// Largest `meta` of an offer.
pub(crate) const MAX_META_BYTES: usize = 16 << 20;
/// Most descriptors of an offer.
pub(crate) const MAX_FDS: usize = 16 * 1024;

/// 16 random bytes that name one life of something: a boot of the cache, a stay of a member.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub [u8; 16]);

impl Token {
    /// Names nothing.
    pub(crate) const NOBODY: Self = Self([0; 16]);

    /// A fresh random token.
    ///
    /// # Errors
    /// `Os` if the kernel gives no random bytes.
    pub fn random() -> Result<Self, DataError> {
        let mut bytes = [0; 16];
        let mut filled = 0;
        while filled < bytes.len() {
            let (_, rest) = bytes.split_at_mut(filled);
            match rustix::rand::getrandom(rest, rustix::rand::GetRandomFlags::empty()) {
                Ok(n) => filled += n,
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(DataError::os("getrandom", e)),
            }
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Everything that must be equal for two processes to share memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutTag {
    /// Version of the caller's protocol over the shared memory.
    pub protocol: u32,
    /// Version of the shared layouts.
    pub layout_version: u32,
    /// Hash over all layouts and geometry that must agree.
    pub fingerprint: [u8; 32],
    /// The same for people: shown in errors. At most 512 bytes.
    pub text: String,
}

impl LayoutTag {
    /// The tag of a process that takes the geometry as it finds it (for inspection). It must not
    /// create.
    #[must_use]
    pub fn any_geometry(protocol: u32, layout_version: u32) -> Self {
        Self { protocol, layout_version, fingerprint: [0; 32], text: "any geometry".into() }
    }

    /// True if processes with these tags may share memory. The text does not count; a tag of
    /// [`any_geometry`](Self::any_geometry) agrees with every geometry.
    #[must_use]
    pub fn agrees_with(&self, other: &Self) -> bool {
        let fits = self.fits_any_geometry() || other.fits_any_geometry();
        self.protocol == other.protocol
            && self.layout_version == other.layout_version
            && (self.fingerprint == other.fingerprint || fits)
    }

    /// True for a tag of [`any_geometry`](Self::any_geometry).
    #[must_use]
    pub fn fits_any_geometry(&self) -> bool {
        self.fingerprint == [0; 32]
    }
}

impl fmt::Display for LayoutTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "protocol {}, layout version {}, fingerprint ",
            self.protocol, self.layout_version
        )?;
        self.fingerprint.iter().take(8).try_for_each(|byte| write!(f, "{byte:02x}"))?;
        write!(f, "… ({})", self.text)
    }
}

/// Where members listen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sockets {
    /// Abstract names: nothing is written anywhere. Members must share a network namespace.
    #[default]
    Abstract,
    /// Socket files in the instance directory: works across network namespaces (containers that
    /// mount the directory). Files left by killed members are removed by the next one to arrive.
    Files,
}

/// What to do when nobody is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenAbsent {
    /// Create the cache.
    #[default]
    Create,
    /// Wait for somebody to create it, until the deadline.
    Wait,
}

/// How to find the other members.
#[derive(Clone, Debug)]
pub struct RendezvousConfig {
    /// Instance directory, one per cache. Created with mode 0700 if missing.
    pub dir: PathBuf,
    /// Longest time `enter` may take.
    pub deadline: Duration,
    /// Where members listen.
    pub sockets: Sockets,
    /// What to do when nobody is there.
    pub when_absent: WhenAbsent,
    /// Seats that may be taken, at most [`MAX_SEATS`].
    pub max_seats: u16,
    /// What must agree.
    pub layout: LayoutTag,
}

impl RendezvousConfig {
    /// Abstract sockets, creating if absent, 10 s deadline, all seats.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>, layout: LayoutTag) -> Self {
        Self {
            dir: dir.into(),
            deadline: Duration::from_secs(10),
            sockets: Sockets::default(),
            when_absent: WhenAbsent::default(),
            max_seats: MAX_SEATS,
            layout,
        }
    }

    pub(crate) fn validate(&self) -> Result<(), DataError> {
        if self.max_seats == 0 || self.max_seats > MAX_SEATS {
            return Err(DataError::invalid(format!(
                "max_seats is {}; it must be 1 to {MAX_SEATS}",
                self.max_seats
            )));
        }
        if self.layout.text.len() > MAX_TEXT_BYTES {
            return Err(DataError::invalid(format!(
                "the layout text has {} bytes; at most {MAX_TEXT_BYTES} are allowed",
                self.layout.text.len()
            )));
        }
        Ok(())
    }
}

/// What a joiner receives: opaque bytes and descriptors, the same from every member.
#[derive(Clone, Debug, Default)]
pub struct Offer {
    /// Opaque to this crate; at most 16 MiB.
    pub meta: Vec<u8>,
    /// Descriptors in the creator's order.
    pub fds: Vec<SharedFd>,
}

impl Offer {
    pub(crate) fn validate(&self) -> Result<(), DataError> {
        if self.meta.len() > MAX_META_BYTES || self.fds.len() > MAX_FDS {
            return Err(DataError::invalid(format!(
                "an offer of {} bytes and {} descriptors; at most {MAX_META_BYTES} and {MAX_FDS}",
                self.meta.len(),
                self.fds.len()
            )));
        }
        Ok(())
    }
}
