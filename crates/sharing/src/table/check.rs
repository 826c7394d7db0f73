//! What must hold of a share table. Walks all of it: for tests, debug builds and recovery.

use std::collections::HashSet;

use super::chunks::Slot;
use super::frame::{Place, SharedFrame};
use super::{Counts, ShareTable};

impl ShareTable {
    /// Whether the invariants of [`ShareTable`] hold.
    ///
    /// # Errors
    /// What contradicts what, in words.
    pub fn check(&self) -> Result<(), String> {
        self.hints.check().map_err(|e| format!("hint frames: {e}"))?;
        self.shared.check().map_err(|e| format!("shared frames: {e}"))?;
        self.check_frames()?;
        self.check_overflow()?;
        self.check_chains()
    }

    fn check_frames(&self) -> Result<(), String> {
        let mut counts = Counts::default();
        let mut chained = 0;
        for (i, frame) in self.hints.all_from(0) {
            if frame.is_chained() == frame.is_ineligible() {
                return Err(format!("hint frame {i:#x} has flags {:#x}", frame.flags));
            }
            counts.hints += u64::from(frame.is_chained());
            counts.ineligible += u64::from(frame.is_ineligible());
            chained += u64::from(frame.is_chained());
        }
        for (page, frame) in self.shared_from(0) {
            if !frame.is_chained() && page.get() < self.first_unhashed {
                return Err(format!("{page} is not hashed, the first is {}", self.first_unhashed));
            }
            counts.shared += 1;
            counts.unhashed += u64::from(!frame.is_chained());
            counts.references += self.refs(page);
            chained += u64::from(frame.is_chained());
        }
        if counts != self.counts {
            return Err(format!("{counts:?}, booked {:?}", self.counts));
        }
        if chained != self.chained {
            return Err(format!("{chained} frames chained, {} booked", self.chained));
        }
        if self.buckets.too_few(chained) {
            return Err(format!("{} buckets for {chained} frames", self.buckets.len()));
        }
        Ok(())
    }

    fn check_overflow(&self) -> Result<(), String> {
        self.overflow.check().map_err(|e| format!("overflow table: {e}"))?;
        let elsewhere = |page: &_| page == &SharedFrame::COUNTED_ELSEWHERE;
        for (page, refs) in self.overflow.iter() {
            let small = self.shared.get(page.get()).refs;
            if !elsewhere(&small) || refs < SharedFrame::COUNTED_ELSEWHERE.into() {
                return Err(format!("{page}: {refs} in the overflow table, {small} in its frame"));
            }
        }
        let frames = self.shared_from(0).filter(|(_, frame)| elsewhere(&frame.refs)).count();
        let entries = self.overflow.iter().count();
        if frames != entries {
            return Err(format!("{frames} frames counted elsewhere, {entries} overflow entries"));
        }
        Ok(())
    }

    fn check_chains(&self) -> Result<(), String> {
        let mut seen = HashSet::new();
        for bucket in 0..self.buckets.len() {
            let mut next = self.buckets.get(bucket);
            let mut hints = false;
            while let Some(place) = next.place() {
                if !seen.insert(place) {
                    return Err(format!("bucket {bucket}: {place:?} is reached twice"));
                }
                let (there, chained) = match place {
                    Place::Shared(page) => {
                        let frame = self.shared.get(page.get());
                        (!frame.is_empty(), frame.is_chained())
                    }
                    Place::Hint(page) => {
                        let frame = self.hints.get(page.get());
                        (!frame.is_empty(), frame.is_chained())
                    }
                };
                if !there || !chained {
                    return Err(format!(
                        "bucket {bucket}: {place:?} (there: {there}) is not marked as chained"
                    ));
                }
                if hints && matches!(place, Place::Shared(_)) {
                    return Err(format!("bucket {bucket}: {place:?} comes after a hint"));
                }
                hints |= matches!(place, Place::Hint(_));
                let (hash, after) = self.look(place);
                if self.buckets.of(hash) != bucket {
                    return Err(format!("{place:?} with {hash:x?} is in bucket {bucket}"));
                }
                next = after;
            }
        }
        if seen.len() as u64 != self.chained {
            return Err(format!("{} frames reached, {} chained", seen.len(), self.chained));
        }
        Ok(())
    }
}
