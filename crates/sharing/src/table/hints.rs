//! Hint frames: guest pages that were scanned and matched nothing.

use ballast_units::Pages;

use super::ShareTable;
use super::chunks::Slot;
use super::frame::{HintFrame, Place};
use crate::hash::PageHash;
use crate::ids::PageId;

impl ShareTable {
    /// Remembers the hash of a page, in place of what was known of it. A page that is ineligible
    /// with this very hash stays so.
    ///
    /// Callers look for a match first: hints of one hash share a chain, which is walked when one of
    /// them goes.
    pub fn hint(&mut self, page: PageId, hash: PageHash) {
        let former = self.hints.get(page.get());
        if !former.is_empty() && former.hash == hash {
            return;
        }
        self.drop_hint(page);
        self.hints.put(page.get(), HintFrame::new(hash));
        self.counts.hints += 1;
        self.chain(Place::Hint(page), hash);
    }

    /// The hash that a guest page can be found by; None if it has no hint, or is ineligible.
    pub fn hinted(&self, page: PageId) -> Option<PageHash> {
        let frame = self.hints.get(page.get());
        frame.is_chained().then_some(frame.hash)
    }

    /// Forgets what is known of a page: its hint, or that it is ineligible. Answers whether there
    /// was anything.
    pub fn drop_hint(&mut self, page: PageId) -> bool {
        let frame = self.hints.get(page.get());
        if frame.is_empty() {
            return false;
        }
        if frame.is_chained() {
            self.unchain(Place::Hint(page));
            self.counts.hints -= 1;
        } else {
            self.counts.ineligible -= 1;
        }
        self.hints.put(page.get(), HintFrame::EMPTY);
        true
    }

    /// After a false match: the page cannot be found, and `is_ineligible` says so while its hash
    /// is `hash`.
    pub fn mark_ineligible(&mut self, page: PageId, hash: PageHash) {
        self.drop_hint(page);
        self.hints.put(page.get(), HintFrame::ineligible(hash));
        self.counts.ineligible += 1;
    }

    /// Whether a false match was seen of this page with this hash. With another hash it has other
    /// contents, and may share again.
    pub fn is_ineligible(&self, page: PageId, hash: PageHash) -> bool {
        let frame = self.hints.get(page.get());
        frame.is_ineligible() && frame.hash == hash
    }

    /// `drop_hint` for `pages` pages from `first` on, those of a VM that leaves. Takes time in
    /// proportion to what is known of them, some 60 ns each: who holds a lock that others want
    /// forgets a large VM piece by piece.
    pub fn forget_pages(&mut self, first: PageId, pages: Pages) {
        let end = u64::from(first.get()).saturating_add(pages.0).min(PageId::LIMIT.into()) as u32;
        let mut from = first.get();
        while let Some((i, frame)) = self.hints.next_in(from, end) {
            if frame.is_ineligible() {
                self.counts.ineligible -= 1;
            } else {
                // Others of the range that are in the same chain leave it in the same walk.
                if frame.is_chained() {
                    self.unchain_hints(frame.hash, first, end);
                }
                self.counts.hints -= 1;
            }
            self.hints.put(i, HintFrame::EMPTY);
            from = i + 1;
        }
        self.shrink(u64::MAX);
    }
}
