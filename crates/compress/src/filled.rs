//! Pages that repeat one 64-bit number (zswap calls them same-filled): the number goes into the pmap
//! word, and nothing else is kept.
//!
//! ```text
//! 55                                          1 0
//! +--------------------------------------------+-+
//! | a small number, with its sign              |0|   pointers of canonical form among them
//! +--------------------------------------------+-+
//! | zero, then a 32-bit number that fills both |1|   halves of the 64
//! +--------------------------------------------+-+
//! ```

use ballast_units::PAGE_SIZE;

/// The number that a page repeats, in 56 bits. Numbers that neither form holds are rare, and such pages
/// compress well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filling(u64);

impl Filling {
    const BITS: u32 = 56;

    /// None for a page of more than one number, or of one that has no place here.
    pub fn of(page: &[u8; PAGE_SIZE]) -> Option<Filling> {
        let first = u64::from_le_bytes(*page.first_chunk()?);
        if page[8..] != page[..PAGE_SIZE - 8] {
            return None;
        }
        let low = (first << (64 - Self::BITS + 1)) as i64 >> (64 - Self::BITS + 1);
        if low as u64 == first {
            return Some(Filling((first << 1) & ((1 << Self::BITS) - 1)));
        }
        let half = u64::from(first as u32);
        (first >> 32 == half).then_some(Filling(half << 1 | 1))
    }

    /// For the pmap word: 56 bits, of the form drawn above.
    pub const fn bits(self) -> u64 {
        self.0
    }
    /// Of what [`bits`](Self::bits) answered; anything above the 56 bits is left out.
    pub const fn from_bits(bits: u64) -> Filling {
        Filling(bits & ((1 << Self::BITS) - 1))
    }

    /// Writes the number over the whole page.
    pub fn fill(self, page: &mut [u8; PAGE_SIZE]) {
        let number = if self.0 & 1 == 1 {
            let half = self.0 >> 1 & u32::MAX as u64;
            half << 32 | half
        } else {
            ((self.0 << (64 - Self::BITS)) as i64 >> (64 - Self::BITS + 1)) as u64
        };
        for chunk in page.chunks_exact_mut(8) {
            chunk.copy_from_slice(&number.to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn repeated(number: u64) -> [u8; PAGE_SIZE] {
        std::array::from_fn(|i| number.to_le_bytes()[i % 8])
    }

    proptest! {
        #[test]
        fn what_is_taken_comes_back(number: u64, shift in 0u32..64, half: u32, kind in 0..3) {
            let number = match kind {
                0 => number >> shift,
                1 => !(number >> shift),
                _ => u64::from(half) << 32 | u64::from(half),
            };
            let page = repeated(number);
            if let Some(filling) = Filling::of(&page) {
                let mut back = [1; PAGE_SIZE];
                Filling::from_bits(filling.bits()).fill(&mut back);
                prop_assert!(back == page);
            } else {
                prop_assert!(kind != 2 && (shift < 10 || number >> 55 != 0));
            }
        }
    }

    #[test]
    fn pointers_patterns_and_signs_are_taken() {
        for number in [
            1,
            u64::MAX,
            0xffff_8880_1234_5678,
            0x0000_7fff_ffff_f000,
            0xdead_beef_dead_beef,
            0xaaaa_aaaa_aaaa_aaaa,
            (1 << 54) - 1,
            !((1 << 54) - 1),
        ] {
            let mut back = [0; PAGE_SIZE];
            Filling::of(&repeated(number)).expect("one number").fill(&mut back);
            assert!(back == repeated(number), "{number:#x}");
        }
        assert_eq!(Filling::of(&repeated(1 << 54)), None);
    }

    #[test]
    fn one_byte_makes_it_another_page() {
        for at in [0, 1, 8, 100, PAGE_SIZE - 1] {
            let mut page = repeated(5);
            page[at] ^= 1;
            assert_eq!(Filling::of(&page), None, "byte {at}");
        }
    }
}
