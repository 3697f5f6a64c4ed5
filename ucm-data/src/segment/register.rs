//! Registration of segments with a device (CUDA, HIP, RDMA), in bounded pieces.
//!
//! **Invariant:** a piece never cuts a slot in two; every registered piece is unregistered exactly
//! once; a device's error is consumed here and never inherited by a later call.

use std::ptr::NonNull;
use std::sync::Arc;

use crate::segment::map::Mapped;
use crate::{DataError, ErrorKind};

/// What a device says when it refuses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegisterFailure {
    /// The device's own error number.
    pub code: i64,
    /// The device's own words.
    pub text: String,
}

/// The device side of registration, implemented by engines.
///
/// Called from one thread at a time.
pub trait RegisterRegion: Send + Sync {
    /// Most bytes that one call may register.
    fn max_piece_bytes(&self) -> u64;

    /// Registers (pins) `len` bytes at `base`.
    ///
    /// # Errors
    /// What the device says.
    fn register(&self, base: NonNull<u8>, len: usize) -> Result<(), RegisterFailure>;

    /// Ends the registration of exactly this piece.
    ///
    /// # Errors
    /// What the device says; the piece counts as gone either way.
    fn unregister(&self, base: NonNull<u8>, len: usize) -> Result<(), RegisterFailure>;

    /// Takes any pending error off the calling thread, so that no later call reports it.
    fn consume_error(&self);
}

/// What to do when a piece is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegisterPolicy {
    /// Unregister the pieces before it and fail.
    AllOrNothing,
    /// Go on without it and report it: slots in it are not registered.
    Partial,
}

/// One piece of a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Index of the segment.
    pub segment: u32,
    /// First byte in the segment.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// What was registered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegistrationSummary {
    /// Bytes registered.
    pub registered_bytes: u64,
    /// Bytes refused: copies of their slots use the slow path.
    pub refused_bytes: u64,
    /// Refused pieces with the device's reason.
    pub refused: Vec<(Piece, RegisterFailure)>,
}

/// Registered memory. Dropping it unregisters every piece (not in a forked child).
///
/// Thread-safe.
pub struct Registration {
    mapped: Arc<Mapped>,
    device: Arc<dyn RegisterRegion>,
    pieces: Vec<Piece>,
    summary: RegistrationSummary,
}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registration")
            .field("pieces", &self.pieces.len())
            .field("summary", &self.summary)
            .finish_non_exhaustive()
    }
}

impl Registration {
    /// Registers all segments of `mapped` with `device`.
    ///
    /// # Errors
    /// `Registration`, naming the piece and the device's reason, if a slot is larger than a piece may
    /// be, or (with [`RegisterPolicy::AllOrNothing`]) if a piece is refused. Nothing stays registered
    /// then.
    pub fn new(
        mapped: Arc<Mapped>,
        device: Arc<dyn RegisterRegion>,
        policy: RegisterPolicy,
    ) -> Result<Self, DataError> {
        mapped.birthplace().check()?;
        let plan = plan_pieces(&mapped, device.max_piece_bytes())?;
        let count = plan.len();
        // Owns what is registered so far: an early return rolls back by dropping it.
        let mut registration =
            Self { mapped, device, pieces: Vec::new(), summary: RegistrationSummary::default() };
        for (index, piece) in plan.into_iter().enumerate() {
            let Some((base, len)) = registration.address(&piece) else {
                return Err(DataError::invalid(format!("{piece:?} is outside of its segment")));
            };
            match registration.device.register(base, len) {
                Ok(()) => {
                    registration.summary.registered_bytes += piece.bytes;
                    registration.pieces.push(piece);
                }
                Err(failure) => {
                    registration.device.consume_error();
                    let message = format!(
                        "piece {index} of {count} (segment {}, offset {}, {} bytes) was refused: {} \
                         (device error {})",
                        piece.segment, piece.offset, piece.bytes, failure.text, failure.code
                    );
                    if policy == RegisterPolicy::AllOrNothing {
                        return Err(DataError::new(ErrorKind::Registration, message));
                    }
                    tracing::warn!("{message}; its slots use the slow path");
                    registration.summary.refused_bytes += piece.bytes;
                    registration.summary.refused.push((piece, failure));
                }
            }
        }
        Ok(registration)
    }

    /// What was registered and what was not.
    #[must_use]
    pub fn summary(&self) -> &RegistrationSummary {
        &self.summary
    }

    /// Registered pieces in order of address within each segment.
    #[must_use]
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Index of the registered piece that holds a slot; `None` if it is in a refused piece or does
    /// not exist.
    #[must_use]
    pub fn piece_of(&self, slot: u32) -> Option<usize> {
        let at = self.mapped.slot(slot)?;
        let key = (at.segment, at.offset);
        let after = self.pieces.partition_point(|p| (p.segment, p.offset) <= key);
        let index = after.checked_sub(1)?;
        let piece = self.pieces.get(index)?;
        (piece.segment == at.segment && at.offset < piece.offset + piece.bytes).then_some(index)
    }

    fn address(&self, piece: &Piece) -> Option<(NonNull<u8>, usize)> {
        let len = usize::try_from(piece.bytes).ok()?;
        let window = self.mapped.windows().get(piece.segment as usize)?;
        Some((window.at(piece.offset, len)?, len))
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if !self.mapped.birthplace().is_here() {
            return;
        }
        for piece in self.pieces.iter().rev() {
            let Some((base, len)) = self.address(piece) else { continue };
            if let Err(failure) = self.device.unregister(base, len) {
                self.device.consume_error();
                tracing::error!(?piece, ?failure, "unregistering failed");
            }
        }
    }
}

/// Cuts all segments into pieces of at most `max` bytes at slot rows that are also page boundaries.
fn plan_pieces(mapped: &Mapped, max: u64) -> Result<Vec<Piece>, DataError> {
    let geometry = mapped.geometry();
    let stride = geometry.stride_bytes();
    let mut pieces = Vec::new();
    for (segment, info) in (0u32..).zip(geometry.segments()) {
        // Whole huge pages where that fits, else whole small ones.
        let unit = [info.tier.page_bytes(), 4096]
            .into_iter()
            .filter_map(|page| least_common_multiple(stride, page))
            .find(|unit| *unit <= max)
            .or_else(|| (info.bytes <= max).then_some(info.bytes));
        let Some(unit) = unit else {
            return Err(DataError::new(
                ErrorKind::Registration,
                format!(
                    "the device registers at most {max} bytes at once, a row of slots has {}; use \
                     smaller slots or a slot_align of 4096",
                    least_common_multiple(stride, 4096).unwrap_or(stride)
                ),
            ));
        };
        let step = max - max % unit;
        let mut offset = 0;
        while offset < info.bytes {
            let bytes = step.min(info.bytes - offset);
            pieces.push(Piece { segment, offset, bytes });
            offset += bytes;
        }
    }
    Ok(pieces)
}

fn least_common_multiple(a: u64, b: u64) -> Option<u64> {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a.checked_div(x)?.checked_mul(b)
}
