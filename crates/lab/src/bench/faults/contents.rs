//! What the reclaimed memory holds: pages that compress as the kind says and are unlike one another,
//! so that no one shares them.

use clap::ValueEnum;

use super::super::memory::WORDS;
use super::super::sharing::contents::{mix, step};

/// How far pages compress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// lz4 brings it to a little under half of a page.
    Half,
    /// To a little under a quarter.
    Quarter,
    /// Not compressible.
    Random,
    /// One number of 48 bits, as a pointer is, all over the page; each page has its own.
    Filled,
}

/// Words of a record, the rest of which repeats.
const RECORD: usize = 8;

impl Kind {
    /// As in options and figures.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Half => "half",
            Kind::Quarter => "quarter",
            Kind::Random => "random",
            Kind::Filled => "filled",
        }
    }

    /// Of a page, what Ballast's compressed tier takes for it.
    pub fn takes(self) -> f64 {
        match self {
            Kind::Half => 0.5,
            Kind::Quarter => 0.25,
            // In a swap file, or nowhere.
            Kind::Random | Kind::Filled => 0.0,
        }
    }

    /// Of the words of a record, those that are random.
    fn own(self) -> usize {
        match self {
            Kind::Half => 3,
            Kind::Quarter => 1,
            Kind::Random => RECORD,
            Kind::Filled => 0,
        }
    }

    /// Writes the whole page; the same for the same number and seed.
    pub fn fill(self, page: usize, seed: u64, to: &mut [u64; WORDS]) {
        let mut word = mix(seed ^ mix(page as u64 + 1));
        if self == Kind::Filled {
            return to.fill(step(word) >> 16);
        }
        for (at, slot) in to.iter_mut().enumerate() {
            *slot = match at % RECORD {
                own if own < self.own() => {
                    word = step(word);
                    mix(word)
                }
                field => 0x2064_6c65_6966_2030 + field as u64,
            };
        }
    }

    /// What begins the page.
    pub fn first_word(self, page: usize, seed: u64) -> u64 {
        let word = step(mix(seed ^ mix(page as u64 + 1)));
        if self == Kind::Filled { word >> 16 } else { mix(word) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn pages_differ_and_begin_as_told() {
        for kind in [Kind::Half, Kind::Quarter, Kind::Random, Kind::Filled] {
            let mut seen = BTreeSet::new();
            for page in 0..100 {
                let mut words = [0; WORDS];
                kind.fill(page, 7, &mut words);
                assert_eq!(words[0], kind.first_word(page, 7));
                assert!(words[0] != 0 && seen.insert(words.to_vec()), "{kind:?} {page}");
                let different: BTreeSet<u64> = words.iter().copied().collect();
                let want = match kind {
                    Kind::Half => 64 * 3 + 5,
                    Kind::Quarter => 64 + 7,
                    Kind::Random => WORDS,
                    Kind::Filled => 1,
                };
                assert_eq!(different.len(), want, "{kind:?}");
            }
        }
    }
}
