//! Page tiers, best first.
//!
//! **Invariant:** the numeric value of a tier is part of the encoded geometry and never changes.

use std::fmt;

/// Kind of memory behind a segment, best first (`Huge1G < Small`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PageTier {
    /// 1 GiB hugetlb pages.
    Huge1G = 0,
    /// 2 MiB hugetlb pages.
    Huge2M = 1,
    /// Ordinary shared memory backed by transparent huge pages, verified after allocation.
    Transparent = 2,
    /// 4 KiB pages.
    Small = 3,
}

impl PageTier {
    /// All tiers, best first.
    pub const LADDER: [Self; 4] = [Self::Huge1G, Self::Huge2M, Self::Transparent, Self::Small];

    /// Bytes of one page of this tier.
    #[must_use]
    pub fn page_bytes(self) -> u64 {
        match self {
            Self::Huge1G => 1 << 30,
            Self::Huge2M | Self::Transparent => 2 << 20,
            Self::Small => 4096,
        }
    }

    /// True for memory that comes from the kernel's reserved huge-page pool.
    #[must_use]
    pub fn is_hugetlb(self) -> bool {
        matches!(self, Self::Huge1G | Self::Huge2M)
    }

    /// The tiers to try, starting with this one.
    #[must_use]
    pub fn and_below(self) -> &'static [Self] {
        const ALL: &[PageTier] = &PageTier::LADDER;
        match self {
            Self::Huge1G => ALL,
            Self::Huge2M => ALL.split_at(1).1,
            Self::Transparent => ALL.split_at(2).1,
            Self::Small => ALL.split_at(3).1,
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::LADDER.into_iter().find(|tier| tier.code() == code)
    }

    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Huge1G => 0,
            Self::Huge2M => 1,
            Self::Transparent => 2,
            Self::Small => 3,
        }
    }
}

impl fmt::Display for PageTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Huge1G => "1 GiB huge pages",
            Self::Huge2M => "2 MiB huge pages",
            Self::Transparent => "transparent huge pages",
            Self::Small => "4 KiB pages",
        })
    }
}
