//! What a pmap word says of a swapped page: its slot, and a checksum of its contents, so that bytes that
//! are not the page's are never taken for them.

use ballast_units::SlotId;
use twox_hash::XxHash3_64;

use crate::backend::PageBuf;

/// Slots are numbered with this many bits: a VM's swap space has at most 2^30 pages, 4 TiB.
pub const SLOT_BITS: u32 = 30;
/// Of a checksum.
pub const SUM_BITS: u32 = 26;

const _: () = assert!(SLOT_BITS + SUM_BITS == 56, "together the payload of a pmap word");

/// XXH3-64 of a page, its upper 26 bits. Zero stands for none: of a page that a manager swapped out
/// whose words had no sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sum(u32);

impl Sum {
    /// Fits any page.
    pub const NONE: Sum = Sum(0);

    /// Never `NONE`.
    pub fn of(page: &PageBuf) -> Sum {
        let upper = (XxHash3_64::oneshot(page) >> (64 - SUM_BITS)) as u32;
        Sum(upper.max(1))
    }
    /// Whether these bytes may be the page. One page in 2^26 that is not passes.
    pub fn fits(self, page: &PageBuf) -> bool {
        self == Sum::NONE || self == Sum::of(page)
    }
    /// Whether there is no checksum.
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }
}

/// Where a swapped page is, and what it must be like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stored {
    /// In the VM's swap space, below 2^30.
    pub slot: SlotId,
    /// Of what was written there.
    pub sum: Sum,
}

impl Stored {
    /// # Panics
    /// If the slot is beyond `SLOT_BITS`: a swap space of such a size is refused.
    pub fn new(slot: SlotId, page: &PageBuf) -> Stored {
        assert!(slot.0 < 1 << SLOT_BITS, "{slot:?}");
        Stored { slot, sum: Sum::of(page) }
    }
    pub(crate) const fn payload(self) -> u64 {
        self.slot.0 & ((1 << SLOT_BITS) - 1) | (self.sum.0 as u64) << SLOT_BITS
    }
    pub(crate) const fn from_payload(payload: u64) -> Stored {
        Stored {
            slot: SlotId(payload & ((1 << SLOT_BITS) - 1)),
            sum: Sum((payload >> SLOT_BITS) as u32),
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn a_sum_fits_its_page_alone_and_none_fits_all() {
        let mut page = [7u8; 4096];
        let sum = Sum::of(&page);
        assert!(!sum.is_none() && sum.fits(&page));
        page[4095] ^= 1;
        assert!(!sum.fits(&page) && Sum::NONE.fits(&page));
    }

    #[test]
    fn slot_and_sum_come_back_from_a_payload() {
        for slot in [0, 1, (1 << SLOT_BITS) - 1] {
            let stored = Stored::new(SlotId(slot), &[slot as u8; 4096]);
            assert_eq!(Stored::from_payload(stored.payload()), stored);
            assert!(stored.payload() < 1 << 56);
        }
        // What older managers wrote: the slot alone.
        assert_eq!(Stored::from_payload(77), Stored { slot: SlotId(77), sum: Sum::NONE });
    }
}
