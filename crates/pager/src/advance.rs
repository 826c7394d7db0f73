//! What a VM holds that nobody has taken over yet is in the books all the same: else what it has is handed
//! out to others meanwhile.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use ballast_compress::Place;
use ballast_units::Pages;

use crate::host::Host;
use crate::pmap::{Pmap, PmapError};
use crate::sync::{AtomicU64, Ordering};
use crate::word::{State, Word};

/// Pages that are booked for a VM until its takeover books what it finds. Given back when dropped.
pub struct Advance {
    host: Arc<Host>,
    pages: AtomicU64,
}

impl Advance {
    /// Books `pages`, whatever the budget.
    pub fn book(host: Arc<Host>, pages: Pages) -> Advance {
        host.ledger.adopt(pages);
        Advance { host, pages: AtomicU64::new(pages.0) }
    }

    /// What is booked. Zero once a takeover has booked what it found, until that is undone.
    pub fn pages(&self) -> Pages {
        Pages(self.pages.load(Ordering::Acquire))
    }

    /// Books `pages` in place of what was booked: without a moment in which neither is.
    pub fn renew(&self, pages: Pages) {
        let before = self.pages.swap(pages.0, Ordering::AcqRel);
        self.host.ledger.exchange(Pages(before), pages);
    }

    /// A takeover found that the VM holds `charged`, and they are its own from here on.
    pub(crate) fn settle(&self, charged: Pages) {
        let before = self.pages.swap(0, Ordering::AcqRel);
        self.host.ledger.exchange(Pages(before), charged);
    }

    /// A takeover is undone, and the `charged` pages that were the VM's own by then are booked here again: the ledger has
    /// them all the while.
    pub(crate) fn take_back(&self, charged: Pages) {
        self.pages.fetch_add(charged.0, Ordering::AcqRel);
    }
}

impl Drop for Advance {
    fn drop(&mut self) {
        self.renew(Pages::ZERO);
    }
}

/// Counts what recovery will book, from a VM's pmap file; pages in the middle of a transition count as
/// there. It changes nothing. A file that was not begun holds none.
///
/// # Errors
/// The file cannot be read, is another version's, or has words that mean nothing.
pub fn held(pmap: &Path) -> Result<Pages, PmapError> {
    let mut tally = Tally::default();
    Pmap::peek(pmap, |_, word| tally.add(word))?;
    Ok(tally.pages())
}

/// Whether the pager has ever had anything of a VM, from its pmap file. It changes nothing. Where that is not there, or was
/// not begun, nothing.
///
/// # Errors
/// As of [`held`], otherwise.
pub fn has_any(pmap: &Path) -> Result<bool, PmapError> {
    let mut any = false;
    match Pmap::peek(pmap, |_, word| any |= word.state() != State::Untouched || !word.is_idle()) {
        Err(PmapError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            Ok(false)
        }
        result => result.map(|()| any),
    }
}

/// What words hold, at most.
#[derive(Default)]
pub(crate) struct Tally {
    own: u64,
    frames: HashSet<u32>,
}

impl Tally {
    pub(crate) fn add(&mut self, word: Word) {
        self.own += u64::from(word.state().charged() || !word.is_idle());
        if word.state() == State::Compressed {
            self.frames.extend(Place::from_bits(word.slot()).map(Place::frame));
        }
    }

    pub(crate) fn pages(&self) -> Pages {
        Pages(self.own + self.frames.len() as u64)
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use ballast_units::Ppn;

    use crate::ledger::Ledger;

    #[test]
    fn what_is_booked_ahead_is_booked_once() {
        let host = Arc::new(Host::new(Ledger::new(Pages(100), || {})));
        let advance = Advance::book(host.clone(), Pages(40));
        assert_eq!(host.ledger.used(), Pages(40));
        // Some of it was given up while nobody listened.
        advance.settle(Pages(30));
        assert_eq!((host.ledger.used(), advance.pages()), (Pages(30), Pages::ZERO));
        // The takeover is undone, and another is to come.
        advance.take_back(Pages(30));
        assert_eq!((host.ledger.used(), advance.pages()), (Pages(30), Pages(30)));
        advance.renew(Pages(35));
        assert_eq!((host.ledger.used(), host.ledger.peak()), (Pages(35), Pages(40)));
        drop(advance);
        assert_eq!(host.ledger.used(), Pages::ZERO);
    }

    #[test]
    fn a_pager_has_had_something_once_a_word_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pmap");
        assert!(!has_any(&path).unwrap(), "its start had not come so far");
        std::fs::write(&path, "").unwrap();
        assert!(!has_any(&path).unwrap(), "nor here");
        std::fs::remove_file(&path).unwrap();
        let pmap = Pmap::create(&path, Pages(1000)).unwrap();
        assert!(!has_any(&path).unwrap());
        let (page, away) = (Ppn(999), Word::new(State::Ballooned));
        pmap.exchange(page, Word::UNTOUCHED, away).unwrap();
        assert!(has_any(&path).unwrap());
        drop(pmap);
        std::fs::write(&path, [1; 8192]).unwrap();
        assert!(has_any(&path).is_err(), "what it had nobody can tell");
    }
}
