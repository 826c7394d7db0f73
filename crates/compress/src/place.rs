//! Where a compressed page lies: a slot of a frame.

use ballast_units::PAGE_SIZE;

/// Quarters in a frame: slots are counted in them.
pub const QUARTERS: u32 = 4;
const QUARTER: usize = PAGE_SIZE / QUARTERS as usize;

/// How large a slot is. What it holds has a header, and whose page it is, in the same bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Size {
    /// 1,024 bytes.
    Quarter,
    /// 2,048 bytes.
    Half,
}

impl Size {
    /// The smaller that holds so many bytes, all that is kept with the page included; None above a half.
    pub fn holding(bytes: usize) -> Option<Size> {
        [Size::Quarter, Size::Half].into_iter().find(|size| bytes <= size.bytes())
    }
    /// 1 or 2.
    pub const fn quarters(self) -> u32 {
        match self {
            Size::Quarter => 1,
            Size::Half => 2,
        }
    }
    /// Bytes that a slot of this size holds.
    pub const fn bytes(self) -> usize {
        self.quarters() as usize * QUARTER
    }
}

/// A slot: its first quarter, counted through all frames, and its size.
///
/// ```text
/// 32                    1    0
/// +---------------------+----+
/// | quarter             |half|
/// +---------------------+----+
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    pub(crate) quarter: u32,
    pub(crate) size: Size,
}

impl Place {
    /// None for bits that name no slot: a half begins at an even quarter.
    pub fn from_bits(bits: u64) -> Option<Place> {
        let quarter = u32::try_from(bits >> 1).ok()?;
        let size = if bits & 1 == 1 { Size::Half } else { Size::Quarter };
        (size == Size::Quarter || quarter.is_multiple_of(2)).then_some(Place { quarter, size })
    }
    /// For the pmap word: 33 bits, as drawn above.
    pub fn bits(self) -> u64 {
        u64::from(self.quarter) << 1 | u64::from(self.size == Size::Half)
    }
    /// Number of its frame, from 0.
    pub fn frame(self) -> u32 {
        self.quarter / QUARTERS
    }
    /// How large it is.
    pub fn size(self) -> Size {
        self.size
    }
    /// Byte offset of the slot in the tier's memory, where frames lie one after the other.
    pub fn offset(self) -> usize {
        self.quarter as usize * QUARTER
    }
    /// Its quarters among those of its frame, a bit each.
    pub(crate) fn mask(self) -> u8 {
        let ones = (1u8 << self.size.quarters()) - 1;
        ones << (self.quarter % QUARTERS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_come_back_and_crooked_halves_are_refused() {
        for quarter in [0, 1, 2, 3, 4, 1 << 31, u32::MAX] {
            for size in [Size::Quarter, Size::Half] {
                let place = Place { quarter, size };
                let whole = size == Size::Quarter || quarter % 2 == 0;
                assert_eq!(Place::from_bits(place.bits()), whole.then_some(place));
            }
        }
        assert_eq!(Place::from_bits(1 << 40), None);
    }

    #[test]
    fn sizes_hold_what_they_say() {
        assert_eq!(Size::holding(1024), Some(Size::Quarter));
        assert_eq!(Size::holding(1025), Some(Size::Half));
        assert_eq!(Size::holding(2048), Some(Size::Half));
        assert_eq!(Size::holding(2049), None);
    }
}
