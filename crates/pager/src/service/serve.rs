//! The order in which the fault service does things, apart from the descriptors it reads from and
//! the disk: over any guest memory, so that every interleaving can be tried on a double.
//!
//! - All events of one reading are taken together, discards first: a fault may be delivered before
//!   the discard that caused it.
//! - A fault on a page whose discard could not be booked yet waits for that.
//! - A fault that may need memory does not overtake one that waits for memory: `retry` tries them in the order in which they
//!   came.
//! - Contents that arrive from the swap file for a page given up meanwhile are not put in place.

use std::time::{Duration, Instant};

use ballast_units::Ppn;

use super::overdue::Overdue;
use super::pending::Pending;
use crate::backend::{Backend, MemError, PageBuf};
use crate::memory::{Access, Counters, Fault, Mark, Memory, Unbooked, Wait};
use crate::swap::Stored;
use crate::word::State;

/// Who waits this long for zeros to be mapped gets a page of its own instead.
const ZEROS_LATE: Duration = Duration::from_millis(20);

/// One event, in terms of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The guest waits at a page.
    Fault(Ppn, Access),
    /// Given up by the guest: `n` pages from there on.
    Discard(Ppn, u64),
}

/// What the owner of a `Serve` has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Task {
    /// Read the page, make sure that it is the page, then call `arrived`.
    Read(Ppn, Stored),
    /// A page that was away has come home because it was wanted: so may its neighbours (`around`).
    Came(Ppn),
    /// What is kept of the page is damaged: its fault stays unanswered until `fault` is called for it
    /// again.
    Damaged(Ppn, String),
    /// Tell people.
    Trouble(String),
}

/// What came of one fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Met {
    /// The page, and what the guest met there.
    pub ppn: Ppn,
    #[allow(missing_docs, reason = "told with the field before")]
    pub access: Access,
    /// Whether it was away before.
    pub away: bool,
    /// What came of it.
    pub outcome: Fault,
}

impl Met {
    /// Serves a fault for which nothing is outstanding. By any thread.
    pub fn serve<B: Backend>(memory: &Memory<B>, ppn: Ppn, access: Access) -> Met {
        let away = Memory::<B>::is_away(memory.pmap().load(ppn).state());
        Met { ppn, access, away, outcome: memory.fault(ppn, access) }
    }
}

/// Whether bytes that were read are in place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Landed {
    /// Their buffer is free.
    Done,
    /// Keep them; call `arrived` again soon.
    NotYet(Wait),
}

/// The state of one VM's fault service.
#[derive(Debug, Default)]
pub struct Serve {
    pending: Pending,
    /// Pages on their way from the swap file.
    coming: Vec<Coming>,
    /// Spent on pages that were announced as given up and stayed.
    vain: Duration,
}

#[derive(Debug)]
struct Coming {
    ppn: Ppn,
    since: Instant,
    /// It was read, and cannot be put in place for this.
    why: Option<Wait>,
}

/// Whether serving a fault may take a page: one that is watched, or was looked at, is there.
fn may_need_memory<B: Backend>(memory: &Memory<B>, ppn: Ppn, access: Access) -> bool {
    let is_common = || matches!(memory.pmap().load(ppn).state(), State::Shared | State::Zero);
    access != Access::Protected || is_common()
}

/// All that was given up, each page once: a VMM may give up the same from many threads.
fn united(notices: &[Notice]) -> Vec<(Ppn, u64)> {
    let discards = notices.iter().filter_map(|notice| match *notice {
        Notice::Discard(first, n) => Some((first, n)),
        Notice::Fault(..) => None,
    });
    let mut ranges: Vec<(Ppn, u64)> = discards.collect();
    ranges.sort_unstable();
    ranges.dedup_by(|next, last| {
        let joins = next.0.0 <= last.0.0.saturating_add(last.1);
        if joins {
            let end = next.0.0.saturating_add(next.1).max(last.0.0.saturating_add(last.1));
            last.1 = end - last.0.0;
        }
        joins
    });
    ranges
}

impl Serve {
    /// What could not be done yet.
    pub fn pending(&self) -> &Pending {
        &self.pending
    }
    /// Whether nothing waits, neither to be tried again nor for what is being read.
    pub fn is_quiet(&self) -> bool {
        self.pending.is_empty() && self.coming.is_empty()
    }

    /// Of the faults that have waited since `before`, or longer, for anything but memory: the oldest.
    pub fn overdue(&self, before: Instant) -> Option<Overdue> {
        let coming = self.coming.iter().filter(|c| c.since <= before);
        let coming = coming.map(|c| Overdue { page: c.ppn, since: c.since, why: c.why, pages: 1 });
        Overdue::oldest(self.pending.overdue(before).chain(coming))
    }

    /// Takes what a takeover could not book, of an event that was read after `mark`.
    pub fn resume(&mut self, left: Unbooked, mark: Mark) {
        self.pending.keep_discards(left.busy, mark);
        self.pending.look_again(left.present);
    }

    /// Takes events that were read after `mark`. Faults for which `give` answers true are somebody else's to serve:
    /// it is asked about those that nothing is outstanding for. What comes of them is for `met`. Those that may need memory
    /// while another one waits for that are kept, for `retry`. Answers how many of the others were served at once.
    pub fn take<B: Backend>(
        &mut self,
        memory: &Memory<B>,
        notices: &[Notice],
        mark: Mark,
        tasks: &mut Vec<Task>,
        mut give: impl FnMut(Ppn, Access) -> bool,
    ) -> usize {
        for (first, n) in united(notices) {
            self.discard(memory, first, n, mark, tasks);
        }
        let mut served = 0;
        // While one waits for memory, all others that may need some are tried behind it.
        let starved = self.pending.starved();
        for notice in notices {
            let Notice::Fault(ppn, access) = *notice else { continue };
            let is_new = self.is_for_anybody(ppn);
            match starved {
                Some(why) if is_new && may_need_memory(memory, ppn, access) => {
                    self.keep(memory, ppn, access, why);
                }
                _ if is_new && give(ppn, access) => {}
                _ => served += usize::from(self.fault(memory, ppn, access, tasks)),
            }
        }
        served
    }

    /// Whether nothing is outstanding for a page that decides when a fault on it may be served.
    fn is_for_anybody(&self, ppn: Ppn) -> bool {
        !self.is_coming(ppn)
            && !self.pending.discard_outstanding(ppn)
            && self.pending.fault(ppn).is_none()
    }

    fn is_coming(&self, ppn: Ppn) -> bool {
        self.coming.iter().any(|c| c.ppn == ppn)
    }

    /// Tries again what had to wait, discards first.
    pub fn retry<B: Backend>(&mut self, memory: &Memory<B>, tasks: &mut Vec<Task>) {
        for (first, n, mark) in self.pending.take_discards() {
            self.discard(memory, first, n, mark, tasks);
        }
        for (first, n) in self.pending.take_due() {
            let begun = Instant::now();
            let (left, result) = memory.reconcile(first, n);
            let stayed: u64 = left.present.iter().map(|&(_, n)| n).sum();
            if stayed > n / 2 {
                // The first look took as long.
                self.vain += 2 * begun.elapsed();
            }
            self.pending.look_again(left.busy);
            if let Err(e) = result
                && e != MemError::Gone
            {
                tasks.push(Task::Trouble(format!("looking for {n} pages at {first}: {e}")));
            }
        }
        // Where pages are to be had one by one, whoever came first has the first.
        for ppn in self.pending.oldest_first() {
            if let Some(fault) = self.pending.fault(ppn) {
                let late = fault.why == Wait::Zeros && fault.since.elapsed() > ZEROS_LATE;
                let access = if late { Access::Missing } else { fault.access };
                self.fault(memory, ppn, access, tasks);
            }
        }
    }

    /// What was spent since this was asked last on pages that were announced as given up, and stayed when their VMM had
    /// had time to punch them.
    pub fn take_vain(&mut self) -> Duration {
        std::mem::take(&mut self.vain)
    }

    /// Keeps no fault any more, and lets all who wait say so again.
    ///
    /// # Errors
    /// The kernel wakes nobody: all are kept.
    pub fn meet_anew<B: Backend>(&mut self, memory: &Memory<B>) -> Result<(), MemError> {
        memory.backend().wake(Ppn(0), memory.pmap().len().0)?;
        self.pending.drop_faults();
        Ok(())
    }

    /// Tries again what the kernel refused while something was being given up.
    pub fn retry_refused<B: Backend>(&mut self, memory: &Memory<B>, tasks: &mut Vec<Task>) {
        for ppn in self.pending.refused() {
            if let Some(fault) = self.pending.fault(ppn) {
                self.fault(memory, ppn, fault.access, tasks);
            }
        }
    }

    /// The read that a task asked for is done, and what came fits the checksum; `None` as bytes when that
    /// could not be had, then the page stays swapped and its fault unanswered until `fault` is called for it again.
    pub fn arrived<B: Backend>(
        &mut self,
        memory: &Memory<B>,
        ppn: Ppn,
        bytes: Option<&PageBuf>,
        tasks: &mut Vec<Task>,
    ) -> Landed {
        let given_up = self.pending.discard_outstanding(ppn);
        let outcome = memory.swapped_in(ppn, bytes.filter(|_| !given_up));
        let landed = match outcome {
            Fault::Wait(why) => return self.not_yet(ppn, why),
            Fault::Failed(MemError::Gone) | Fault::Served | Fault::Read(_) => Landed::Done,
            Fault::Failed(e) => {
                // The VMM changed its memory: its affair, but it must not keep us busy.
                tasks.push(Task::Trouble(format!("fault on {ppn}: {e}")));
                return self.not_yet(ppn, Wait::Kernel);
            }
        };
        if let Some(at) = self.coming.iter().position(|c| c.ppn == ppn) {
            let Coming { since, .. } = self.coming.swap_remove(at);
            if bytes.is_some() && !given_up {
                let took = since.elapsed().as_nanos() as u64;
                Counters::add(&memory.counters.swap_in_ns, took);
            }
        }
        if given_up {
            self.pending.keep_fault(ppn, Access::Missing, Wait::Busy);
        } else if bytes.is_some() {
            tasks.push(Task::Came(ppn));
        }
        landed
    }

    fn not_yet(&mut self, ppn: Ppn, why: Wait) -> Landed {
        if let Some(coming) = self.coming.iter_mut().find(|c| c.ppn == ppn) {
            coming.why = Some(why);
        }
        Landed::NotYet(why)
    }

    /// A fault that was read, or one that is to be tried again: it is served, kept, or becomes a task. Answers
    /// whether it is served now, and does not wait for memory, for a read or for anything else.
    pub fn fault<B: Backend>(
        &mut self,
        memory: &Memory<B>,
        ppn: Ppn,
        access: Access,
        tasks: &mut Vec<Task>,
    ) -> bool {
        if self.is_coming(ppn) {
            // Putting the page in place wakes everyone who waits for it.
            return false;
        }
        if self.pending.discard_outstanding(ppn) {
            self.keep(memory, ppn, access, Wait::Busy);
            return false;
        }
        let met = Met::serve(memory, ppn, access);
        let served = met.outcome == Fault::Served;
        if served {
            self.served(memory, ppn);
        }
        self.met(memory, met, tasks);
        served
    }

    /// What came of a fault, here or where it was given to. One that others served says nothing of a fault on the
    /// page that is kept: the page may have gone again before that came.
    pub fn met<B: Backend>(&mut self, memory: &Memory<B>, met: Met, tasks: &mut Vec<Task>) {
        let Met { ppn, access, away, outcome } = met;
        match outcome {
            Fault::Served if away => tasks.push(Task::Came(ppn)),
            Fault::Served => {}
            // Putting the page in place wakes everyone who waits for it.
            Fault::Wait(_) if self.is_coming(ppn) => {}
            Fault::Wait(why) => self.keep(memory, ppn, access, why),
            Fault::Read(stored) => {
                // Busy since then: who waits for it is woken when it is there.
                self.served(memory, ppn);
                self.coming.push(Coming { ppn, since: Instant::now(), why: None });
                tasks.push(Task::Read(ppn, stored));
            }
            // The VMM is exiting; its process handle tells the manager.
            Fault::Failed(MemError::Gone) => drop(self.pending.drop_fault(ppn)),
            Fault::Failed(e @ MemError::Damaged { .. }) => {
                self.served(memory, ppn);
                tasks.push(Task::Damaged(ppn, e.to_string()));
            }
            Fault::Failed(e) => {
                tasks.push(Task::Trouble(format!("fault on {ppn}: {e}")));
                self.keep(memory, ppn, access, Wait::Kernel);
            }
        }
    }

    fn keep<B: Backend>(&mut self, memory: &Memory<B>, ppn: Ppn, access: Access, why: Wait) {
        let before = self.pending.fault(ppn).map(|f| f.why);
        self.pending.keep_fault(ppn, access, why);
        if before != Some(why) {
            match why {
                Wait::Memory => Counters::add(&memory.counters.waits, 1),
                Wait::Blocked => Counters::add(&memory.counters.blocks, 1),
                Wait::Busy | Wait::Discard | Wait::Kernel | Wait::Zeros => {}
            }
        }
    }

    fn served<B: Backend>(&mut self, memory: &Memory<B>, ppn: Ppn) {
        if let Some(fault) = self.pending.drop_fault(ppn) {
            let waited = fault.since.elapsed().as_nanos() as u64;
            Counters::add(&memory.counters.wait_ns, waited);
        }
    }

    fn discard<B: Backend>(
        &mut self,
        memory: &Memory<B>,
        first: Ppn,
        n: u64,
        mark: Mark,
        tasks: &mut Vec<Task>,
    ) {
        let (left, result) = memory.discard(first, n, mark);
        self.let_go(memory, first, n, &left);
        self.resume(left, mark);
        if let Err(e) = result
            && e != MemError::Gone
        {
            tasks.push(Task::Trouble(format!("discarding {n} pages at {first}: {e}")));
        }
    }

    /// Faults on pages that were given up since. Whoever still waits for one says so again, behind the discard; nobody
    /// gets a page for what is in the balloon.
    fn let_go<B: Backend>(&mut self, memory: &Memory<B>, first: Ppn, n: u64, left: &Unbooked) {
        let kept = left.busy.iter().chain(&left.present);
        let is_kept = |ppn: Ppn| kept.clone().any(|&(p, n)| p <= ppn && ppn.0 - p.0 < n);
        for ppn in self.pending.faults_within(first, n) {
            if !is_kept(ppn) && memory.backend().wake(ppn, 1).is_ok() {
                self.served(memory, ppn);
            }
        }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_up_many_times_is_taken_once() {
        let discard = |first, n| Notice::Discard(Ppn(first), n);
        let of = |notices: &[Notice]| -> Vec<(u64, u64)> {
            united(notices).into_iter().map(|(first, n)| (first.0, n)).collect()
        };
        assert_eq!(of(&[Notice::Fault(Ppn(1), Access::Missing)]), []);
        assert_eq!(of(&[discard(0, 64); 64]), [(0, 64)]);
        // Within another, beside it, over its end, apart from it, and to the end of all.
        let many = [discard(40, 8), discard(2, 3), discard(0, 8), discard(8, 2), discard(9, 4)];
        assert_eq!(of(&many), [(0, 13), (40, 8)]);
        assert_eq!(of(&[discard(5, u64::MAX), discard(7, 1)]), [(5, u64::MAX - 5)]);
    }
}
