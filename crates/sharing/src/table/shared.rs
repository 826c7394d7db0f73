//! Shared frames: store pages, and how many guest pages each stands for.

use super::chunks::Slot;
use super::frame::{Place, SharedFrame};
use super::{ShareTable, TableError};
use crate::hash::PageHash;
use crate::ids::StorePage;

impl ShareTable {
    /// A store page that can be found by its hash from now on, with one reference.
    ///
    /// # Errors
    /// [`TableError::Shared`]: it has a frame.
    pub fn share(&mut self, page: StorePage, hash: PageHash) -> Result<(), TableError> {
        if self.refs(page) > 0 {
            return Err(TableError::Shared(page));
        }
        self.add(page, hash);
        self.chain(Place::Shared(page), hash);
        Ok(())
    }

    /// A new frame with one reference, in no chain.
    fn add(&mut self, page: StorePage, hash: PageHash) {
        self.shared.put(page.get(), SharedFrame { hash, refs: 1, ..SharedFrame::EMPTY });
        self.counts.shared += 1;
        self.counts.references += 1;
    }

    /// One more reference. Answers how many there are.
    ///
    /// # Errors
    /// [`TableError::NotShared`]: it has no frame.
    pub fn retain(&mut self, page: StorePage) -> Result<u64, TableError> {
        match self.refs(page) {
            0 => Err(TableError::NotShared(page)),
            refs => {
                self.set_refs(page, refs + 1);
                Ok(refs + 1)
            }
        }
    }

    /// One reference less. Answers how many are left; with the last one the frame is gone, and the
    /// store page is the caller's to free.
    ///
    /// # Errors
    /// [`TableError::NotShared`]: it has no frame.
    pub fn release(&mut self, page: StorePage) -> Result<u64, TableError> {
        let left = match self.refs(page) {
            0 => return Err(TableError::NotShared(page)),
            refs => refs - 1,
        };
        if left == 0 {
            if self.shared.get(page.get()).is_chained() {
                self.unchain(Place::Shared(page));
            } else {
                self.counts.unhashed -= 1;
            }
            self.shared.put(page.get(), SharedFrame::EMPTY);
            self.counts.shared -= 1;
            self.counts.references -= 1;
        } else {
            self.set_refs(page, left);
        }
        Ok(left)
    }

    /// Guest pages that a store page stands for; 0 if it has no frame.
    pub fn refs(&self, page: StorePage) -> u64 {
        match self.shared.get(page.get()).refs {
            SharedFrame::COUNTED_ELSEWHERE => self.overflow.get(page),
            refs => refs.into(),
        }
    }

    /// The hash that a store page is found by; None without a frame, and while the hash is not known.
    #[cfg(test)]
    pub(super) fn hash_of(&self, page: StorePage) -> Option<PageHash> {
        let frame = self.shared.get(page.get());
        frame.is_chained().then_some(frame.hash)
    }

    /// Store pages that have a frame, with their references, in ascending order.
    pub fn shared_pages(&self) -> impl Iterator<Item = (StorePage, u64)> + '_ {
        self.shared_from(0).map(|(page, _)| (page, self.refs(page)))
    }

    /// Recovery: one more reference to a page whose hash may not be known yet. Answers how many
    /// there are. The page must be one of the store's: the table takes memory up to its number.
    pub fn adopt(&mut self, page: StorePage) -> u64 {
        let refs = self.refs(page);
        if refs == 0 {
            self.add(page, PageHash(0));
            self.counts.unhashed += 1;
            self.first_unhashed = self.first_unhashed.min(page.get());
        } else {
            self.set_refs(page, refs + 1);
        }
        refs + 1
    }

    /// Recovery: pages that were adopted and cannot be found until [`set_hash`](Self::set_hash), in
    /// ascending order. To take a few, hash them and ask again walks the table once in all.
    pub fn unhashed(&self) -> impl Iterator<Item = StorePage> + '_ {
        let all = self.shared_from(self.first_unhashed).filter(|(_, frame)| !frame.is_chained());
        all.map(|(page, _)| page).take(self.counts.unhashed as usize)
    }

    /// Moves the start of `unhashed` past pages that are hashed.
    fn pass_hashed(&mut self) {
        let first = self.unhashed().next();
        self.first_unhashed = first.map_or(u32::MAX, StorePage::get);
    }

    /// Recovery: from now on the page can be found.
    ///
    /// # Errors
    /// [`TableError::NotShared`]: it has no frame. [`TableError::Hashed`]: its hash is known.
    pub fn set_hash(&mut self, page: StorePage, hash: PageHash) -> Result<(), TableError> {
        let frame = match self.shared.get_mut(page.get()) {
            Some(frame) if !frame.is_empty() => frame,
            _ => return Err(TableError::NotShared(page)),
        };
        if frame.is_chained() {
            return Err(TableError::Hashed(page));
        }
        frame.hash = hash;
        self.chain(Place::Shared(page), hash);
        self.counts.unhashed -= 1;
        self.pass_hashed();
        Ok(())
    }

    pub(super) fn shared_from(
        &self,
        from: u32,
    ) -> impl Iterator<Item = (StorePage, SharedFrame)> + '_ {
        self.shared
            .all_from(from)
            .filter_map(|(i, frame)| StorePage::new(i.into()).map(|page| (page, frame)))
    }

    /// For a frame that is there; `refs` is not zero.
    fn set_refs(&mut self, page: StorePage, refs: u64) {
        let Some(frame) = self.shared.get_mut(page.get()) else { return };
        let former = frame.refs;
        let small = u16::try_from(refs).unwrap_or(SharedFrame::COUNTED_ELSEWHERE);
        frame.refs = small;
        let before = if former == SharedFrame::COUNTED_ELSEWHERE {
            self.overflow.get(page)
        } else {
            former.into()
        };
        if small == SharedFrame::COUNTED_ELSEWHERE {
            self.overflow.set(page, refs);
        } else if former == SharedFrame::COUNTED_ELSEWHERE {
            self.overflow.remove(page);
        }
        self.counts.references = self.counts.references - before + refs;
    }
}
