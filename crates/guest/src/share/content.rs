//! A small set of page contents, so that nearly every page has twins, here and in other guests.
//!
//! What a page must hold is computed, never kept: a copy kept in memory could be shared with the page
//! it is compared with, and be wrong together with it.

use crate::page::{PAGE, Page, WORDS, mix, step};

/// The contents of one seed, numbered from 0, which is all zero. An odd content differs from the even
/// one before it in the last word alone, so that a comparison that ends early takes them for equal.
#[derive(Clone, Copy, Debug)]
pub struct Contents {
    pub seed: u64,
    pub count: u8,
}

/// One byte that is not the content's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Poke {
    /// Below 4096.
    pub at: u16,
    /// Not zero: what the byte is changed by.
    pub xor: u8,
}

/// What a page must hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    pub content: u8,
    pub poke: Option<Poke>,
}

impl Contents {
    /// Writes the content, without a poke.
    pub fn fill(&self, content: u8, page: &mut Page) {
        if content < 2 {
            page.fill(0);
        } else {
            let mut word = mix(self.seed ^ u64::from(content & !1));
            for slot in page.iter_mut() {
                word = step(word);
                *slot = word;
            }
        }
        page[WORDS - 1] ^= u64::from(content & 1);
    }

    fn expect(&self, expected: Expected) -> Page {
        let mut page = [0; WORDS];
        self.fill(expected.content, &mut page);
        if let Some(poke) = expected.poke {
            poke.apply(&mut page);
        }
        page
    }

    /// Compares every byte; the error tells what the page holds instead.
    pub fn verify(&self, expected: Expected, page: &Page) -> Result<(), String> {
        let want = self.expect(expected);
        if *page == want {
            return Ok(());
        }
        Err(self.explain(expected, &want, page))
    }

    fn explain(&self, expected: Expected, want: &Page, page: &Page) -> String {
        let asked = match expected.poke {
            None => format!("content {}", expected.content),
            Some(p) => format!("content {} with byte {} changed", expected.content, p.at),
        };
        let clean = |content| Expected { content, poke: None };
        if let Some(other) = (0..self.count).find(|c| self.expect(clean(*c)) == *page) {
            return format!("{asked} expected, content {other} found");
        }
        let wrong = (0..WORDS).filter(|i| page[*i] != want[*i]);
        let at = wrong.clone().next().unwrap_or(0);
        format!(
            "{asked} expected, but {} words differ, the first is {at}: {:#018x} instead of {:#018x}",
            wrong.count(),
            page[at],
            want[at]
        )
    }
}

impl Poke {
    /// Changes the byte; a second time changes it back.
    pub fn apply(self, page: &mut Page) {
        let at = usize::from(self.at) % PAGE;
        page[at / 8] ^= u64::from(self.xor) << (at % 8 * 8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SET: Contents = Contents { seed: 3, count: 8 };

    fn page(expected: Expected) -> Page {
        SET.expect(expected)
    }

    #[test]
    fn contents_are_distinct_and_neighbours_differ_in_one_word() {
        let pages: Vec<Page> =
            (0..SET.count).map(|content| page(Expected { content, poke: None })).collect();
        for (i, a) in pages.iter().enumerate() {
            for (j, b) in pages.iter().enumerate() {
                assert_eq!(a == b, i == j, "{i} and {j}");
            }
        }
        assert!(pages[0].iter().all(|w| *w == 0));
        for pair in pages.chunks(2) {
            assert_eq!(pair[0][..WORDS - 1], pair[1][..WORDS - 1]);
        }
    }

    #[test]
    fn every_byte_is_checked_and_other_contents_are_named() {
        let expected = Expected { content: 5, poke: Some(Poke { at: 4095, xor: 0x80 }) };
        let whole = page(expected);
        SET.verify(expected, &whole).unwrap();
        for at in 0..PAGE {
            let mut wrong = whole;
            Poke { at: at as u16, xor: 1 }.apply(&mut wrong);
            assert!(SET.verify(expected, &wrong).is_err(), "byte {at}");
        }
        let other = page(Expected { content: 4, poke: None });
        assert!(SET.verify(expected, &other).unwrap_err().contains("content 4 found"));
        let stale = page(Expected { content: 5, poke: None });
        assert!(SET.verify(expected, &stale).unwrap_err().contains("content 5 found"));
    }

    #[test]
    fn poking_twice_restores_the_page() {
        let before = page(Expected { content: 2, poke: None });
        let mut after = before;
        let poke = Poke { at: 17, xor: 0x5a };
        poke.apply(&mut after);
        assert_ne!(before, after);
        poke.apply(&mut after);
        assert_eq!(before, after);
    }
}
