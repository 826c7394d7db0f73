//! Page content as a database or a document has it: a third of it is like no other page, the rest
//! repeats from record to record, so that lz4 brings it to a little under half. As checkable as
//! [`Mark::fill`]'s.

use crate::page::{Mark, Page, WORDS, step};

/// Words of one record, and how many of them are the record's own.
const RECORD: usize = 8;
const OWN: usize = 3;

/// What all records have in common: names of fields, blanks.
const FIELDS: [u64; RECORD - OWN] = [
    u64::from_le_bytes(*b"customer"),
    u64::from_le_bytes(*b" order: "),
    u64::from_le_bytes(*b" title, "),
    u64::from_le_bytes(*b" amount "),
    u64::from_le_bytes(*b"EUR     "),
];

impl Mark {
    pub fn fill_rows(&self, page: &mut Page) {
        let head = self.head();
        let mut word = self.start();
        for (at, slot) in page.iter_mut().enumerate() {
            *slot = match (at, at % RECORD) {
                (0..3, _) => head[at],
                (_, own) if own < OWN => {
                    word = step(word);
                    word
                }
                (_, field) => FIELDS[field - OWN],
            };
        }
    }

    /// What is wrong with the page; None if it is as written.
    pub fn verify_rows(&self, page: &Page) -> Option<String> {
        let mut want = [0; WORDS];
        self.fill_rows(&mut want);
        if *page == want {
            return None;
        }
        let at = (0..WORDS).find(|i| page[*i] != want[*i]).unwrap_or(0);
        Some(format!(
            "page {} generation {} has {:#018x} in word {at} instead of {:#018x} (it names page {} \
             generation {})",
            self.index, self.generation, page[at], want[at], page[1], page[2]
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARK: Mark = Mark { seed: 7, index: 42, generation: 3 };

    fn filled(mark: Mark) -> Page {
        let mut page = [0; WORDS];
        mark.fill_rows(&mut page);
        page
    }

    #[test]
    fn every_wrong_bit_and_every_other_page_is_found() {
        assert_eq!(MARK.verify_rows(&filled(MARK)), None);
        for word in 0..WORDS {
            let mut page = filled(MARK);
            page[word] ^= 1 << (word % 64);
            assert!(MARK.verify_rows(&page).is_some(), "word {word}");
        }
        for other in
            [Mark { seed: 8, ..MARK }, Mark { index: 9, ..MARK }, Mark { generation: 2, ..MARK }]
        {
            assert!(MARK.verify_rows(&filled(other)).is_some());
        }
        assert!(MARK.verify_rows(&[0; WORDS]).is_some());
    }

    #[test]
    fn records_share_five_words_of_eight() {
        let page = filled(MARK);
        let (a, b) = (&page[64..72], &page[72..80]);
        assert_ne!(a[..OWN], b[..OWN]);
        assert_eq!(a[OWN..], b[OWN..]);
    }
}
