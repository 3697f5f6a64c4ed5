//! A control region as a value: create it, attach to it, join it.
//!
//! **Invariant:** a region is complete before anybody else can see it.

use std::fmt;
#[cfg(not(ucm_loom))]
use std::os::fd::OwnedFd;

use crate::{CtrlError, Geometry, Member, MemberSpec, member, reap, region::Region, sync::Arc};

/// Tells whether a member's process is proven dead. Asked by a member that has waited unusually
/// long for a lock; must not guess.
pub trait Liveness: Send + Sync + fmt::Debug {
    /// True only with proof (a readable pidfd, a lock released by the kernel).
    fn is_dead(&self, member: MemberId) -> bool;
}

/// Index of a member record, the *seat*: `0..MAX_MEMBERS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemberId(pub u8);

/// A mapped control region. Cheap to clone; thread-safe.
#[derive(Clone, Debug)]
pub struct Control {
    pub(crate) region: Arc<Region>,
}

impl Control {
    /// Makes a region in a sealed memfd, to be shared by passing [`fd`](Self::fd).
    ///
    /// # Errors
    /// `Geometry` with the offending number, `Os` when memory cannot be had.
    #[cfg(not(ucm_loom))]
    pub fn create(geometry: &Geometry, boot_token: [u8; 16]) -> Result<Self, CtrlError> {
        Ok(Self { region: Arc::new(Region::create_shared(geometry, halves(boot_token))?) })
    }

    /// Makes a region that only this process sees: for tests and single-process use.
    ///
    /// # Errors
    /// `Geometry` with the offending number.
    pub fn private(geometry: &Geometry) -> Result<Self, CtrlError> {
        Ok(Self { region: Arc::new(Region::create_private(geometry, [0x5eed, 0xfeed])?) })
    }

    /// Maps a region made by another process, and closes the descriptor.
    ///
    /// # Errors
    /// `Version` for another layout version, `Corrupt` for anything that is not a finished region,
    /// `Os` when it cannot be mapped.
    #[cfg(not(ucm_loom))]
    pub fn attach(fd: OwnedFd) -> Result<Self, CtrlError> {
        Ok(Self { region: Arc::new(Region::attach(fd)?) })
    }

    /// The region's descriptor, for whoever passes it on and sees to it that forked children do not keep
    /// it; `None` for a private region, an attached one, and when it was taken before.
    #[cfg(not(ucm_loom))]
    #[must_use]
    pub fn take_fd(&self) -> Option<OwnedFd> {
        self.region.take_fd()
    }

    /// A duplicate of the region's descriptor; `None` where [`take_fd`](Self::take_fd) says so.
    ///
    /// # Errors
    /// `Os` at the limit of open files.
    #[cfg(not(ucm_loom))]
    pub fn fd(&self) -> Result<Option<OwnedFd>, CtrlError> {
        self.region.fd()
    }

    /// Sizes of the region.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        self.region.geometry()
    }

    /// Bytes of shared memory the region takes.
    #[must_use]
    pub fn total_bytes(&self) -> usize {
        self.region.total_bytes()
    }

    /// The random number that names this life of the cache.
    #[must_use]
    pub fn boot_token(&self) -> [u8; 16] {
        let [a, b] = self.region.boot_token();
        (u128::from(a) | (u128::from(b) << 64)).to_le_bytes()
    }

    /// Names the stay that holds a seat at the moment; `None` when nobody does.
    #[must_use]
    pub fn incarnation(&self, id: MemberId) -> Option<[u8; 16]> {
        member::incarnation(&self.region, id)
    }

    /// True when the stay that `incarnation` names has given its seat's record back, or was cleared up
    /// after.
    #[must_use]
    pub fn is_stay_over(&self, id: MemberId, incarnation: [u8; 16]) -> bool {
        member::is_stay_over(&self.region, id, incarnation)
    }

    /// True when a seat owns or pins a slot, holds a lock, or clears up after another: then it may not be given to anybody else
    /// without proof that its holder's process is over. Walks all slots and buckets.
    #[must_use]
    pub fn holds_anything(&self, id: MemberId) -> bool {
        reap::holds_anything(&self.region, id.0)
    }

    /// Takes the lowest free member record.
    ///
    /// # Errors
    /// `MembersFull`, or `Fenced` in a forked child.
    pub fn join(&self, spec: MemberSpec) -> Result<Member, CtrlError> {
        member::join(self, None, spec)
    }

    /// Takes a particular member record.
    ///
    /// # Errors
    /// `MembersFull` when it is in use.
    pub fn join_at(&self, id: MemberId, spec: MemberSpec) -> Result<Member, CtrlError> {
        member::join(self, Some(id), spec)
    }

    /// Lowest free member record that is not in `except`.
    #[must_use]
    pub fn free_member(&self, except: &[u16]) -> Option<MemberId> {
        member::free_record(&self.region, except)
    }
}

#[cfg(not(ucm_loom))]
fn halves(token: [u8; 16]) -> [u64; 2] {
    let (a, b) = crate::BlockId(token).halves();
    [a, b]
}
