//! A manager takes over a VM that runs: from the pmap alone, every page found busy is finished or
//! rolled back, and everything derived is rebuilt.

use std::time::{Duration, Instant};

use ballast_compress::Place;
use ballast_units::{Pages, Ppn, SlotId};

use super::Memory;
use crate::advance::{Advance, Tally};
use crate::backend::{Backend, MemError};
use crate::sync::{Ordering, lock};
use crate::word::{Busy, State, Word};

/// What recovery found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Pages that were in the middle of a transition.
    pub busy: u64,
    /// Pages in write clusters of the stage; they must be written again.
    pub staged: Vec<(Ppn, u64)>,
    /// Pages in holds; the sample they belonged to is over.
    pub held: Vec<Ppn>,
    /// Resident by the books, not there: discarded while nobody listened.
    pub absent: u64,
}

impl<B: Backend> Memory<B> {
    /// Called once, before any other operation, with nobody else at the pages. Guests that wait are
    /// woken at the end: they fault again, to the new manager. `drain` reads the events that stand
    /// in the way (EAGAIN). What it finds is booked in place of what was booked in advance.
    ///
    /// # Errors
    /// Words name what does not exist or is another page's, or it cannot be told what is in the VMM's memory. Words before
    /// that are settled.
    pub fn recover(
        &self,
        drain: &dyn Fn(),
        advance: Option<&Advance>,
    ) -> Result<Recovered, RecoverError> {
        let mut found = Recovered::default();
        let mut charged = 0;
        let most = cfg!(debug_assertions).then(|| self.tally());
        self.settle_latent(drain)?;
        let moving: Vec<Ppn> =
            self.pmap.known().filter(|&p| Self::is_moving(self.pmap.load(p))).collect();
        let mut moving = moving.iter().zip(self.places_of(&moving)?).peekable();
        let mut home = Presence::default();
        for ppn in self.pmap.known() {
            let mut word = self.pmap.load(ppn);
            if let Some((_, place)) = moving.next_if(|m| *m.0 == ppn) {
                let place = place?;
                let next = retry(drain, || self.settled(ppn, word, place))?;
                // In this order: a reference without a word is one that is lost.
                self.pmap.store(ppn, next);
                self.release_left(word, next);
                word = next;
                found.busy += 1;
            } else if !word.is_idle() {
                word = self.settle(ppn, word, drain)?;
                found.busy += 1;
            }
            if word.sampled() {
                // The period it belonged to is over.
                word = word.set_sampled(false);
            }
            if word.state() == State::Resident && !home.has(&self.backend, ppn, self.pmap.len())? {
                word = Word::new(State::Ballooned);
                found.absent += 1;
            }
            charged += self.claim_named(ppn, word, &mut found)?;
            self.pmap.store(ppn, word);
        }
        self.regions.rebuild(&self.pmap);
        self.tier.trim();
        debug_assert!(most.is_none_or(|most| charged <= most.0), "{charged} of {most:?}");
        match advance {
            Some(advance) => advance.settle(Pages(charged)),
            None => self.host.ledger.adopt(Pages(charged)),
        }
        self.charged.store(charged, Ordering::Relaxed);
        retry(drain, || self.backend.wake(Ppn(0), self.pmap.len().0))?;
        Ok(found)
    }

    /// Claims what an idle word names: a slot of swap, of the stage, of the tier. Answers what is charged for the page.
    fn claim_named(
        &self,
        ppn: Ppn,
        word: Word,
        found: &mut Recovered,
    ) -> Result<u64, RecoverError> {
        let (slot, layout) = (word.slot(), self.stage.layout());
        let mut charged = u64::from(word.state().charged());
        match word.state() {
            State::Swapped if !lock(&self.slots).claim(word.stored().slot) => {
                return Err(RecoverError::Slot { ppn, slot: word.stored().slot });
            }
            State::Staged
                if slot >= layout.write_slots() || found.staged.iter().any(|s| s.1 == slot) =>
            {
                return Err(RecoverError::Stage { ppn, slot });
            }
            State::Held if !self.stage.claim_hold(slot) => {
                return Err(RecoverError::Stage { ppn, slot });
            }
            State::Compressed => {
                let claimed = Place::from_bits(slot).and_then(|place| self.tier.claim(place));
                charged += u64::from(claimed.ok_or(RecoverError::Tier { ppn, slot })?);
            }
            State::Resident => self.note_found(ppn),
            State::Broken => self.commons.add_broken(ppn),
            State::Staged => found.staged.push((ppn, slot)),
            State::Held => found.held.push(ppn),
            _ => {}
        }
        Ok(charged)
    }

    /// What an advance for it would be.
    fn tally(&self) -> Pages {
        let mut tally = Tally::default();
        self.pmap.known().for_each(|ppn| tally.add(self.pmap.load(ppn)));
        tally.pages()
    }

    /// Takes the VM out of the books again, for the next `recover` to book it anew: its machine memory is booked in advance
    /// again, or leaves the ledger where there is no `advance`; it leaves its domain, and no page of it is moved any more.
    /// The references that its words hold stay. No thread of its own may be at it any more.
    pub(crate) fn disown(&self, advance: Option<&Advance>) {
        self.close();
        if let Some(member) = self.membership() {
            member.domain.leave(self);
        }
        let charged = self.charged.swap(0, Ordering::Relaxed);
        let charged = Pages(self.pay_debt(charged));
        match advance {
            // Without a moment in which nobody has them: others would be given them.
            Some(advance) => advance.take_back(charged),
            None => self.host.ledger.release(charged),
        }
    }

    /// The idle word of a page whose transition was cut short.
    fn settle(&self, ppn: Ppn, word: Word, drain: &dyn Fn()) -> Result<Word, RecoverError> {
        let idle = word.set_busy(Busy::Idle);
        Ok(match (word.busy(), word.state()) {
            // Not copied yet, or not known to be: the home page is whole.
            (Busy::Evicting, State::Resident) => {
                retry(drain, || self.backend.unprotect(ppn))?;
                idle
            }
            // The home page was protected all the while: it is the same. It may be a part of a large page,
            // which is freed whole or not at all.
            (Busy::Evicting, State::Held | State::Untouched) if self.backend.present(ppn)? => {
                retry(drain, || self.backend.unprotect(ppn))?;
                Word::new(State::Resident)
            }
            // Copied. The home page, if there still, was protected all the while: it is the same.
            (Busy::Evicting, _) => {
                retry(drain, || self.backend.punch(ppn, 1))?;
                idle
            }
            // The home page may be there, and the guest may have written to it since.
            (Busy::Filling, _) if self.backend.present(ppn)? => {
                retry(drain, || self.backend.unprotect(ppn))?;
                Word::new(State::Resident)
            }
            (Busy::Filling, _) => idle,
            // Its event had been read, so the guest may have used the page again: what is there stays,
            // what is not is booked as given up.
            (Busy::Discarding, _) => idle,
            // The others change the mapping: see `settled`.
            _ => idle,
        })
    }
}

/// Which home pages are there, looked up by whole runs. What recovery itself does to home pages, it does
/// to pages that are not Resident then; what the guest gives up meanwhile is announced, and booked when
/// that is read.
#[derive(Default)]
struct Presence {
    /// The run of present pages that was found last: `[from, until)`, and none between the page that
    /// was asked about then and `from`.
    from: u64,
    until: u64,
}

impl Presence {
    /// Asked in rising order.
    fn has<B: Backend>(&mut self, backend: &B, ppn: Ppn, len: Pages) -> Result<bool, MemError> {
        if ppn.0 >= self.until {
            self.from = backend.next_present(ppn, len.0)?;
            self.until = match self.from < len.0 {
                true => backend.next_absent(Ppn(self.from), len.0)?.max(self.from + 1),
                false => len.0,
            };
        }
        Ok(ppn.0 >= self.from)
    }
}

/// For so long what a guest gives up may stand in the way.
const PATIENCE: Duration = Duration::from_secs(2);

/// EAGAIN lasts as long as an unread REMOVE event. Where page after page is given up there is another one soon after: the
/// moments in between are looked for without rest.
pub(super) fn retry<T>(
    drain: &dyn Fn(),
    op: impl Fn() -> Result<T, MemError>,
) -> Result<T, MemError> {
    let mut since = None;
    loop {
        match op() {
            Err(MemError::Again) => {
                if since.get_or_insert_with(Instant::now).elapsed() > PATIENCE {
                    return Err(MemError::Again);
                }
                drain();
                std::thread::yield_now();
            }
            other => return other,
        }
    }
}

/// Why a VM cannot be taken over. Its guest stays paused at its next fault, whole.
#[allow(missing_docs, reason = "the messages say it")]
#[derive(Debug, thiserror::Error)]
pub enum RecoverError {
    #[error(transparent)]
    Memory(#[from] MemError),
    #[error("pmap: {ppn} names swap slot {}, which does not exist or is another page's", .slot.0)]
    Slot { ppn: Ppn, slot: SlotId },
    #[error(
        "pmap: {ppn} names slot {slot} of the compressed tier, which does not exist or is another page's"
    )]
    Tier { ppn: Ppn, slot: u64 },
    #[error(
        "pmap: {ppn} names stage slot {slot}, which is not one of its kind or is another page's"
    )]
    Stage { ppn: Ppn, slot: u64 },
    /// A mistake of this program's, found by a debug build before it did harm.
    #[error("what was recovered breaks an invariant: {0}")]
    Unsound(String),
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use std::cell::RefCell;
    use std::sync::Arc;

    use super::*;
    use crate::backend::PageBuf;
    use crate::host::Host;
    use crate::ledger::Ledger;
    use crate::pmap::Pmap;
    use crate::stage::{Stage, StageLayout};
    use crate::sync::Mutex;

    /// RAM of which these pages are there; what is asked of it is noted.
    #[derive(Default)]
    struct Present {
        runs: Vec<std::ops::Range<u64>>,
        asked: Mutex<Vec<u64>>,
    }

    impl Backend for Present {
        fn protect(&self, _: Ppn) -> Result<(), MemError> {
            Ok(())
        }
        fn unprotect(&self, _: Ppn) -> Result<(), MemError> {
            Ok(())
        }
        fn read_home(&self, _: Ppn, _: &mut PageBuf) -> Result<(), MemError> {
            Ok(())
        }
        fn punch(&self, _: Ppn, _: u64) -> Result<(), MemError> {
            Ok(())
        }
        fn zero(&self, _: Ppn, n: u64) -> Result<u64, MemError> {
            Ok(n)
        }
        fn fill(&self, _: Ppn, _: &PageBuf) -> Result<(), MemError> {
            Ok(())
        }
        fn wake(&self, _: Ppn, _: u64) -> Result<(), MemError> {
            Ok(())
        }
        fn next_present(&self, ppn: Ppn, end: u64) -> Result<u64, MemError> {
            lock(&self.asked).push(ppn.0);
            let is_there = |p: &u64| self.runs.iter().any(|run| run.contains(p));
            Ok((ppn.0..end).find(is_there).unwrap_or(end))
        }
        fn next_absent(&self, ppn: Ppn, _: u64) -> Result<u64, MemError> {
            let run = self.runs.iter().find(|run| run.contains(&ppn.0));
            Ok(run.map_or(ppn.0, |run| run.end))
        }
    }

    #[test]
    fn pages_are_looked_up_by_whole_runs() {
        let ram = Present { runs: vec![3..6, 6..7, 9..10], ..Present::default() };
        let mut home = Presence::default();
        for p in 0..16 {
            let there = ram.runs.iter().any(|run| run.contains(&p));
            assert_eq!(home.has(&ram, Ppn(p), Pages(16)), Ok(there), "{p}");
        }
        // One look for each run, and one for what is behind the last.
        assert_eq!(*lock(&ram.asked), [0, 6, 7, 10]);
    }

    #[test]
    #[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
    fn blocks_that_have_something_at_home_are_known_afterwards_and_no_others() {
        let host = Arc::new(Host::new(Ledger::new(Pages(64), || {})));
        let stage = Stage::on_heap(StageLayout { cluster: 1, clusters: 1, holds: 1 }).unwrap();
        let pmap = Pmap::on_heap(Pages(32));
        pmap.store(Ppn(9), Word::new(State::Resident));
        pmap.store(Ppn(17), Word::new(State::Ballooned));
        // By the books alone.
        pmap.store(Ppn(25), Word::new(State::Resident));
        let ram = Present { runs: std::iter::once(9..10).collect(), ..Present::default() };
        let memory = Memory::new(pmap, ram, stage, Pages(4), host, Pages(1));
        let found = memory.recover(&|| {}, None).unwrap();
        assert_eq!((found.absent, memory.charged()), (1, Pages(1)));
        let generations = [0, 8, 16, 24].map(|p| memory.generation(Ppn(p)));
        assert_eq!(generations, [None, Some(1), None, None]);
    }

    #[test]
    fn what_waits_for_a_discard_is_tried_again_once_events_were_read() {
        let left = RefCell::new(3);
        let drain = || *left.borrow_mut() -= 1;
        let op = || if *left.borrow() > 0 { Err(MemError::Again) } else { Ok(7) };
        assert_eq!((retry(&drain, op), *left.borrow()), (Ok(7), 0));
        let gone = || -> Result<(), MemError> { Err(MemError::Gone) };
        assert_eq!((retry(&drain, gone), *left.borrow()), (Err(MemError::Gone), 0));
    }

    /// A VM of 16 pages in a domain of its own. The folder is the domain's.
    #[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
    fn joined(host: &Arc<Host>) -> (Arc<Memory<Present>>, tempfile::TempDir) {
        let stage = Stage::on_heap(StageLayout { cluster: 1, clusters: 1, holds: 1 }).unwrap();
        let pmap = Pmap::on_heap(Pages(16));
        let ram = Present::default();
        let memory = Memory::new(pmap, ram, stage, Pages(4), host.clone(), Pages(1));
        let memory = Arc::new(memory);
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let store = dir.path().join("store");
        let domain = crate::sharing::Domain::create(&store, "test", b"x", host.clone()).unwrap();
        Arc::new(domain).join(&memory).unwrap();
        (memory, dir)
    }

    #[test]
    fn what_is_taken_out_of_the_books_is_charged_to_nobody_and_moves_no_more() {
        let host = Arc::new(Host::new(Ledger::new(Pages(20), || {})));
        let (memory, _dir) = joined(&host);
        let domain = memory.membership().unwrap().domain;
        // Another's, five of its own, and two that are paid from what is set aside.
        assert!(host.ledger.try_reserve(Pages(3)));
        memory.charge(5).unwrap();
        memory.charge_moving(2);
        assert_eq!((memory.charged(), memory.owed(), domain.members()), (Pages(7), Pages(2), 1));
        memory.disown(None);
        assert_eq!((memory.charged(), memory.owed(), domain.members()), (Pages(0), Pages(0), 0));
        assert_eq!(host.ledger.used(), Pages(3));
        assert!(memory.membership().is_none() && memory.commons.turn().is_none());
    }

    #[test]
    fn a_place_of_the_stage_that_two_pages_name_is_refused() {
        for state in [State::Staged, State::Held] {
            let host = Arc::new(Host::new(Ledger::new(Pages(20), || {})));
            let (memory, _dir) = joined(&host);
            let slot = u64::from(state == State::Held);
            for p in [3, 5] {
                memory.pmap().store(Ppn(p), Word::with_slot(state, slot));
            }
            let refused = memory.recover(&|| {}, None);
            let at =
                matches!(refused, Err(RecoverError::Stage { ppn: Ppn(5), slot: s }) if s == slot);
            assert!(at, "{refused:?}");
            // Nor is there one of the other kind.
            let (memory, _dir) = joined(&host);
            memory.pmap().store(Ppn(3), Word::with_slot(state, 1 - slot));
            assert!(memory.recover(&|| {}, None).is_err());
        }
    }

    #[test]
    fn what_was_booked_in_advance_is_so_again_when_the_takeover_is_undone() {
        let host = Arc::new(Host::new(Ledger::new(Pages(20), || {})));
        let (memory, _dir) = joined(&host);
        let advance = Advance::book(host.clone(), Pages(4));
        // Cut short before it booked anything.
        memory.disown(Some(&advance));
        assert_eq!((host.ledger.used(), advance.pages()), (Pages(4), Pages(4)));
        let (memory, _dir) = joined(&host);
        (0..3).for_each(|p| memory.pmap().store(Ppn(p), Word::new(State::Broken)));
        memory.recover(&|| {}, Some(&advance)).unwrap();
        assert_eq!((host.ledger.used(), advance.pages()), (Pages(3), Pages(0)));
        // One was touched since, and two are paid from what is set aside.
        memory.charge(1).unwrap();
        memory.charge_moving(2);
        memory.disown(Some(&advance));
        assert_eq!((host.ledger.used(), advance.pages()), (Pages(4), Pages(4)));
        assert_eq!((memory.charged(), memory.owed()), (Pages(0), Pages(0)));
    }
}
