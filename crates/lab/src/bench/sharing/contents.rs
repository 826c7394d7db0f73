//! What the memory of the comparison holds: the same for every scanner, defined by a seed.
//!
//! | part | contents | of it can be saved |
//! | --- | --- | --- |
//! | 1/16 | zero | all |
//! | 2/16 | in pairs | 1/2 |
//! | 2/16 | in groups of 16 | 15/16 |
//! | 11/16 | unlike any other | nothing |
//!
//! Copies lie in runs of so many neighbours, and the runs are scattered at random: with a run of 1,
//! no two neighbours belong together. The words of a page are pseudo-random, so two different pages
//! differ in their first word, which is kind to a scanner that compares pages to order them.

pub use super::super::memory::WORDS;

/// A multiple of this many pages has whole groups only.
pub const GRAIN: usize = 4096;
const GROUP: usize = 16;
/// The longest run; a power of two.
pub const LONGEST_RUN: usize = 16;

/// What of a page can be saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Zero,
    /// In a pair or in a group.
    Twin,
    Unique,
}

/// Of one memory.
pub struct Contents {
    seed: u64,
    run: usize,
    /// The place of each page in the table above.
    place: Vec<u32>,
}

impl Contents {
    /// `pages` is rounded down to whole groups; `run` is a power of two, at most [`LONGEST_RUN`].
    pub fn new(pages: usize, seed: u64, run: usize) -> Contents {
        let run = run.clamp(1, LONGEST_RUN).next_power_of_two();
        let pages = pages.min(u32::MAX as usize) / GRAIN * GRAIN;
        let mut runs: Vec<u32> = (0..(pages / run) as u32).collect();
        shuffle(&mut runs, seed);
        let run32 = run as u32;
        let place = runs.into_iter().flat_map(|r| r * run32..(r + 1) * run32).collect();
        Contents { seed, run, place }
    }

    /// Whole groups only.
    pub fn pages(&self) -> usize {
        self.place.len()
    }

    fn part(&self, sixteenths: usize) -> usize {
        self.pages() / 16 * sixteenths
    }

    /// Of a page below `pages`.
    pub fn kind(&self, page: usize) -> Kind {
        match self.place[page] as usize {
            p if p < self.part(1) => Kind::Zero,
            p if p < self.part(5) => Kind::Twin,
            _ => Kind::Unique,
        }
    }

    /// Equal for pages of equal content; 0 is the zero page's.
    fn id(&self, page: usize) -> u64 {
        let p = self.place[page] as usize;
        let id = match p {
            p if p < self.part(1) => return 0,
            p if p < self.part(3) => self.part(1) + self.original(p - self.part(1), 2),
            p if p < self.part(5) => self.part(3) + self.original(p - self.part(3), GROUP),
            p => p,
        };
        id as u64
    }

    /// Of so many runs one after the other, all are copies of the first.
    fn original(&self, at: usize, copies: usize) -> usize {
        at / self.run / copies * self.run + at % self.run
    }

    /// Pages that perfect sharing saves; the zero pages are all counted, as if they were dropped.
    pub fn saving(&self) -> usize {
        self.part(1) + self.part(2) / 2 + self.part(2) / GROUP * (GROUP - 1)
    }

    /// What begins the page, unchanged.
    pub fn first_word(&self, page: usize) -> u64 {
        match self.id(page) {
            0 => 0,
            id => step(mix(self.seed ^ mix(id))),
        }
    }

    /// Writes the content; `changed` pages have one bit of their first word flipped.
    pub fn fill(&self, page: usize, changed: bool, to: &mut [u64; WORDS]) {
        match self.id(page) {
            0 => to.fill(0),
            id => {
                let mut word = mix(self.seed ^ mix(id));
                // Every other one compresses: each of its words is there four times.
                let times = if id % 2 == 0 { 1 } else { 4 };
                for (i, slot) in to.iter_mut().enumerate() {
                    if i % times == 0 {
                        word = step(word);
                    }
                    *slot = word;
                }
            }
        }
        to[0] ^= u64::from(changed);
    }

    /// Up to `count` pages of a kind, at random.
    pub fn choose(&self, kind: Kind, count: usize, seed: u64) -> Vec<usize> {
        let mut pages: Vec<u32> =
            (0..self.pages()).filter(|p| self.kind(*p) == kind).map(|p| p as u32).collect();
        shuffle(&mut pages, seed);
        pages.truncate(count);
        pages.into_iter().map(|p| p as usize).collect()
    }
}

/// The same order for the same seed.
pub fn shuffle(values: &mut [u32], seed: u64) {
    let mut state = mix(seed);
    for at in (1..values.len()).rev() {
        state = step(state);
        values.swap(at, (mix(state) % (at as u64 + 1)) as usize);
    }
}

/// The next of a sequence of words (a linear congruential step).
pub const fn step(word: u64) -> u64 {
    word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f)
}

/// Spreads what words differ by over all their bits.
pub const fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ (x >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn the_saving_is_what_counting_equal_pages_gives() {
        for run in [1, 2, 8, 16] {
            saving_is_what_counting_gives(&Contents::new(4096 + 100, 5, run));
        }
    }

    fn saving_is_what_counting_gives(contents: &Contents) {
        assert_eq!(contents.pages(), 4096);
        let mut seen: BTreeMap<Vec<u64>, usize> = BTreeMap::new();
        let mut page = [0; WORDS];
        for n in 0..contents.pages() {
            contents.fill(n, false, &mut page);
            assert_eq!(page[0], contents.first_word(n));
            *seen.entry(page.to_vec()).or_default() += 1;
        }
        let zeros = seen.remove(&vec![0; WORDS]).unwrap();
        let twins: usize = seen.values().map(|copies| copies - 1).sum();
        assert_eq!(zeros + twins, contents.saving());
        assert_eq!(contents.saving(), 4096 * 248 / 1024);
        assert_eq!(contents.choose(Kind::Zero, usize::MAX, 1).len(), zeros);
    }

    #[test]
    fn choices_are_of_their_kind_and_differ_by_seed() {
        let contents = Contents::new(4096, 5, 1);
        let some = contents.choose(Kind::Twin, 50, 1);
        assert_eq!(some.len(), 50);
        assert!(some.iter().all(|p| contents.kind(*p) == Kind::Twin));
        assert_ne!(some, contents.choose(Kind::Twin, 50, 2));
        assert_eq!(contents.choose(Kind::Twin, usize::MAX, 1).len(), 1024);
    }
}
