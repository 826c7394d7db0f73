//! Page content that tells where it belongs: every one of its 512 words follows from the seed, the
//! page's index and its generation, so a page that is zero, torn, stale or another's is found out.

pub const PAGE: usize = 4096;
pub const WORDS: usize = PAGE / 8;

pub type Page = [u64; WORDS];

/// What a page must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    pub seed: u64,
    pub index: u64,
    pub generation: u32,
}

/// Words: 0 the seed mixed with the index, 1 the index, 2 the generation, then a pseudo-random
/// sequence that begins at a mix of all three. On each third page every word of it comes eight times,
/// so that the page compresses.
impl Mark {
    pub(crate) fn head(&self) -> [u64; 3] {
        [mix(self.seed ^ self.index), self.index, u64::from(self.generation)]
    }

    pub(crate) fn start(&self) -> u64 {
        mix(self.seed ^ mix(self.index ^ mix(u64::from(self.generation))))
    }

    /// How often each word comes.
    fn run(&self) -> usize {
        if self.index.is_multiple_of(3) { 8 } else { 1 }
    }

    pub fn fill(&self, page: &mut Page) {
        let (head, body) = page.split_at_mut(3);
        head.copy_from_slice(&self.head());
        let mut word = self.start();
        for slots in body.chunks_mut(self.run()) {
            word = step(word);
            slots.fill(word);
        }
    }

    /// The first word that is not as written, told in words; None if the page is whole.
    pub fn verify(&self, page: &Page) -> Option<String> {
        let mut word = self.start();
        let mut wrong = 0u64;
        for slots in page[3..].chunks(self.run()) {
            word = step(word);
            slots.iter().for_each(|slot| wrong |= *slot ^ word);
        }
        if wrong == 0 && page[..3] == self.head() {
            return None;
        }
        Some(self.explain(page))
    }

    fn explain(&self, page: &Page) -> String {
        let kind = if page.iter().all(|w| *w == 0) {
            "is all zero".to_owned()
        } else if page[..2] == self.head()[..2] && page[2] != u64::from(self.generation) {
            format!("holds generation {}", page[2])
        } else if page[0] == mix(self.seed ^ page[1]) && page[1] != self.index {
            format!("holds page {} generation {}", page[1], page[2])
        } else {
            let mut expected = [0; WORDS];
            self.fill(&mut expected);
            let at = (0..WORDS).find(|i| page[*i] != expected[*i]).unwrap_or(0);
            format!("has {:#018x} in word {at} instead of {:#018x}", page[at], expected[at])
        };
        format!("page {} generation {} {kind}", self.index, self.generation)
    }
}

pub const fn step(word: u64) -> u64 {
    word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f)
}

/// The finalizer of MurmurHash3 after an increment, as in SplitMix64.
pub const fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A small pseudo-random sequence: good enough to choose pages by.
pub struct Random(pub u64);

impl Random {
    /// Below `bound`, which must not be zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0) % bound.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARK: Mark = Mark { seed: 7, index: 42, generation: 3 };

    fn filled(mark: Mark) -> Page {
        let mut page = [0; WORDS];
        mark.fill(&mut page);
        page
    }

    #[test]
    fn a_page_as_written_passes() {
        assert_eq!(MARK.verify(&filled(MARK)), None);
    }

    #[test]
    fn every_wrong_bit_is_found() {
        for mark in [MARK, Mark { index: 43, ..MARK }] {
            assert_eq!(mark.verify(&filled(mark)), None);
            for word in 0..WORDS {
                for bit in [0, 31, 63] {
                    let mut page = filled(mark);
                    page[word] ^= 1 << bit;
                    assert!(mark.verify(&page).is_some(), "word {word} bit {bit}");
                }
            }
        }
    }

    #[test]
    fn zero_stale_and_misplaced_pages_are_named() {
        assert!(MARK.verify(&[0; WORDS]).unwrap().contains("all zero"));
        let stale = filled(Mark { generation: 2, ..MARK });
        assert!(MARK.verify(&stale).unwrap().contains("generation 2"));
        let other = filled(Mark { index: 9, ..MARK });
        assert!(MARK.verify(&other).unwrap().contains("page 9"));
        let foreign = filled(Mark { seed: 8, ..MARK });
        assert!(MARK.verify(&foreign).is_some());
    }
}
