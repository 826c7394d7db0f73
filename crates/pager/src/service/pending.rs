//! Faults and discards that could not be done at once, in the order that must hold: a fault on a
//! page is never served while an earlier discard of that page is outstanding, for the discard
//! would then drop what the guest has written since.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use ballast_units::Ppn;

use super::overdue::Overdue;
use crate::memory::{Access, Mark, Wait};

/// How long a VMM gets to punch pages that it has announced as given up.
const PUNCH_TIME: Duration = Duration::from_millis(2);

/// A fault that is kept.
#[derive(Clone, Copy, Debug)]
pub struct WaitingFault {
    /// What the guest met; of several faults on the page, what covers all of them.
    pub access: Access,
    /// When it was kept first.
    pub since: Instant,
    /// Why it waits, the last time it was tried.
    pub why: Wait,
    /// Since when it has waited for memory, or for anything but memory, whichever it is.
    pub so_since: Instant,
}

/// Whether that is for memory: of the host, or of what the VM is granted.
fn is_for_memory(why: Wait) -> bool {
    matches!(why, Wait::Memory | Wait::Blocked)
}

/// What waits, of one VM.
#[derive(Debug, Default)]
pub struct Pending {
    faults: BTreeMap<Ppn, WaitingFault>,
    /// Ranges that do not overlap, by their first page.
    discards: BTreeMap<u64, (u64, Mark)>,
    /// Given up, but seen at home; to be looked at again, in order of time.
    unpunched: VecDeque<(Ppn, u64, Instant)>,
}

impl Pending {
    /// Whether there is nothing to be tried again.
    pub fn is_empty(&self) -> bool {
        self.faults.is_empty() && self.discards.is_empty() && self.unpunched.is_empty()
    }
    /// Pages with a fault that waits.
    pub fn faults(&self) -> usize {
        self.faults.len()
    }

    /// Ranges whose discard is kept.
    pub fn discards(&self) -> usize {
        self.discards.len()
    }

    /// Keeps a fault. A second one on the same page joins the first: Missing covers all, since serving it looks at
    /// what is there.
    pub fn keep_fault(&mut self, ppn: Ppn, access: Access, why: Wait) {
        let now = Instant::now();
        let new = WaitingFault { access, since: now, why, so_since: now };
        let fault = self.faults.entry(ppn).or_insert(new);
        if access == Access::Missing || fault.access == Access::Protected {
            fault.access = access;
        }
        if is_for_memory(fault.why) != is_for_memory(why) {
            fault.so_since = now;
        }
        fault.why = why;
    }

    /// Pages with a fault that is kept, of `n` from `first` on.
    pub fn faults_within(&self, first: Ppn, n: u64) -> Vec<Ppn> {
        self.faults.range(first..Ppn(first.0.saturating_add(n))).map(|(&ppn, _)| ppn).collect()
    }

    /// Faults that have waited since `before`, or longer, for anything but memory.
    pub fn overdue(&self, before: Instant) -> impl Iterator<Item = Overdue> {
        let late = move |f: &WaitingFault| !is_for_memory(f.why) && f.so_since <= before;
        self.faults.iter().filter(move |(_, f)| late(f)).map(|(&page, f)| Overdue {
            page,
            since: f.so_since,
            why: Some(f.why),
            pages: 1,
        })
    }

    /// Pages with a fault that the kernel refused to have served, for something that is being given up.
    pub fn refused(&self) -> Vec<Ppn> {
        self.faults.iter().filter(|(_, f)| f.why == Wait::Discard).map(|(&ppn, _)| ppn).collect()
    }

    /// Whether a fault waits because the host is low.
    pub fn is_blocked(&self) -> bool {
        self.faults.values().any(|f| f.why == Wait::Blocked)
    }

    /// Keeps discards that were read after `mark`. Of pages whose discard is kept already, that one stays: its
    /// mark is the older one, and so they are never more than there are pages.
    pub fn keep_discards(&mut self, ranges: Vec<(Ppn, u64)>, mark: Mark) {
        for (first, n) in ranges {
            let (mut at, end) = (first.0, first.0.saturating_add(n));
            while at < end {
                if let Some(covered) = self.kept_until(at) {
                    at = covered;
                    continue;
                }
                let until = self.discards.range(at..end).next().map_or(end, |(&next, _)| next);
                self.discards.insert(at, (until - at, mark));
                at = until;
            }
        }
    }

    /// One past the last page of the kept range that a page is in.
    fn kept_until(&self, page: u64) -> Option<u64> {
        let (first, (n, _)) = self.discards.range(..=page).next_back()?;
        Some(first + n).filter(|&end| end > page)
    }

    /// All ranges whose discard is kept, with their marks: those that cannot be booked yet are to be kept anew.
    pub fn take_discards(&mut self) -> Vec<(Ppn, u64, Mark)> {
        let all = std::mem::take(&mut self.discards);
        all.into_iter().map(|(first, (n, mark))| (Ppn(first), n, mark)).collect()
    }

    /// Whether the discard of a page is kept.
    pub fn discard_outstanding(&self, ppn: Ppn) -> bool {
        self.kept_until(ppn.0).is_some()
    }

    /// Ranges that were given up and are at home: due when the VMM has had time to punch them.
    pub fn look_again(&mut self, ranges: Vec<(Ppn, u64)>) {
        let due = Instant::now() + PUNCH_TIME;
        self.unpunched.extend(ranges.into_iter().map(|(first, n)| (first, n, due)));
    }

    /// Ranges to look at now.
    pub fn take_due(&mut self) -> Vec<(Ppn, u64)> {
        let now = Instant::now();
        let due = self.unpunched.iter().take_while(|&&(_, _, at)| at <= now).count();
        self.unpunched.drain(..due).map(|(first, n, _)| (first, n)).collect()
    }

    /// Whether something will be ready for another try very soon.
    pub fn is_brief(&self) -> bool {
        !self.discards.is_empty()
            || self.faults.values().any(|f| matches!(f.why, Wait::Busy | Wait::Discard))
    }

    /// Whether a fault waits for memory.
    pub fn is_starved(&self) -> bool {
        self.faults.values().any(|f| is_for_memory(f.why))
    }

    /// Why the one waits that has waited longest for memory, if any does.
    pub fn starved(&self) -> Option<Wait> {
        let starved = self.faults.values().filter(|f| is_for_memory(f.why));
        starved.min_by_key(|f| f.since).map(|f| f.why)
    }

    /// Pages with a fault that waits for memory, those first that have waited longest.
    pub fn starving(&self) -> Vec<Ppn> {
        self.by_age(|f| is_for_memory(f.why))
    }

    /// None where none waits.
    pub fn fault(&self, ppn: Ppn) -> Option<WaitingFault> {
        self.faults.get(&ppn).copied()
    }
    /// Pages with a fault that waits, in rising order.
    pub fn waiting(&self) -> Vec<Ppn> {
        self.faults.keys().copied().collect()
    }
    /// The same, those first that have waited longest.
    pub fn oldest_first(&self) -> Vec<Ppn> {
        self.by_age(|_| true)
    }
    fn by_age(&self, of: impl Fn(&WaitingFault) -> bool) -> Vec<Ppn> {
        let mut waiting: Vec<(Instant, Ppn)> =
            self.faults.iter().filter(|(_, f)| of(f)).map(|(&ppn, f)| (f.since, ppn)).collect();
        waiting.sort_unstable();
        waiting.into_iter().map(|(_, ppn)| ppn).collect()
    }
    /// None waits any more. Who still does is to be told to say so again.
    pub fn drop_faults(&mut self) {
        self.faults.clear();
    }
    /// It waits no more.
    pub fn drop_fault(&mut self, ppn: Ppn) -> Option<WaitingFault> {
        self.faults.remove(&ppn)
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::memory::Departures;

    #[test]
    fn a_fault_behind_a_discard_is_seen_to_be() {
        let mut pending = Pending::default();
        assert!(pending.is_empty());
        let mark = Departures::new().mark();
        pending.keep_discards(vec![(Ppn(10), 5)], mark);
        assert!(!pending.discard_outstanding(Ppn(9)));
        assert!(pending.discard_outstanding(Ppn(10)));
        assert!(pending.discard_outstanding(Ppn(14)));
        assert!(!pending.discard_outstanding(Ppn(15)));
        assert_eq!(pending.take_discards(), [(Ppn(10), 5, mark)]);
        assert!(!pending.discard_outstanding(Ppn(10)));
    }

    #[test]
    fn what_is_given_up_again_and_again_is_kept_once_with_the_oldest_mark() {
        let mut pending = Pending::default();
        let departures = Departures::new();
        let old = departures.mark();
        departures.note(Ppn(0));
        let new = departures.mark();
        assert_ne!(old, new);
        pending.keep_discards(vec![(Ppn(10), 5), (Ppn(20), 5)], old);
        for _ in 0..1000 {
            pending.keep_discards(vec![(Ppn(10), 5), (Ppn(12), 2), (Ppn(8), 20)], new);
        }
        let all = [(8, 2, new), (10, 5, old), (15, 5, new), (20, 5, old), (25, 3, new)];
        let outstanding = |p: u64| (8..28).contains(&p);
        assert!((0..40).all(|p| pending.discard_outstanding(Ppn(p)) == outstanding(p)));
        assert_eq!(pending.take_discards(), all.map(|(p, n, mark)| (Ppn(p), n, mark)));
    }

    #[test]
    fn why_faults_wait_and_where_is_told_of_each() {
        let mut pending = Pending::default();
        let told =
            |p: &Pending| (p.faults(), p.is_blocked(), p.is_brief(), p.is_starved(), p.refused());
        assert_eq!(told(&pending), (0, false, false, false, vec![]));
        pending.keep_fault(Ppn(7), Access::Protected, Wait::Kernel);
        assert_eq!(told(&pending), (1, false, false, false, vec![]));
        pending.keep_fault(Ppn(3), Access::Missing, Wait::Blocked);
        assert_eq!(told(&pending), (2, true, false, true, vec![]));
        pending.keep_fault(Ppn(5), Access::Missing, Wait::Discard);
        assert_eq!(told(&pending), (3, true, true, true, vec![Ppn(5)]));
        assert!(pending.drop_fault(Ppn(5)).is_some() && pending.drop_fault(Ppn(5)).is_none());
        pending.keep_fault(Ppn(3), Access::Missing, Wait::Busy);
        assert_eq!(told(&pending), (2, false, true, false, vec![]));
        assert_eq!(pending.waiting(), [Ppn(3), Ppn(7)]);
        assert_eq!(pending.faults_within(Ppn(3), 4), [Ppn(3)]);
        assert_eq!(pending.faults_within(Ppn(4), 4), [Ppn(7)]);
        assert_eq!(pending.faults_within(Ppn(0), u64::MAX), [Ppn(3), Ppn(7)]);
        assert!(!pending.is_empty());
        // One that waits for a discard is brief whatever faults do.
        let mut pending = Pending::default();
        pending.keep_discards(vec![(Ppn(1), 1), (Ppn(3), 2)], Departures::new().mark());
        assert_eq!((pending.discards(), pending.is_brief(), pending.is_empty()), (2, true, false));
    }

    #[test]
    fn of_two_faults_on_a_page_it_is_what_covers_both_and_since_when_it_waits_so() {
        let mut pending = Pending::default();
        let mut keep = |access, why| {
            pending.keep_fault(Ppn(1), access, why);
            pending.fault(Ppn(1)).unwrap()
        };
        let first = keep(Access::Protected, Wait::Memory);
        let pause = || std::thread::sleep(Duration::from_millis(1));
        pause();
        let second = keep(Access::Missing, Wait::Blocked);
        assert_eq!((second.access, second.since), (Access::Missing, first.since));
        assert_eq!(second.so_since, first.so_since, "for memory still");
        let third = keep(Access::Protected, Wait::Busy);
        assert_eq!((third.access, third.since), (Access::Missing, first.since));
        assert!(third.so_since > first.so_since, "for something else now");
        pause();
        assert_eq!(keep(Access::Protected, Wait::Kernel).so_since, third.so_since);
        let mut last = |accesses: [Access; 2]| {
            for access in accesses {
                pending.keep_fault(Ppn(2), access, Wait::Memory);
            }
            pending.drop_fault(Ppn(2)).unwrap().access
        };
        assert_eq!(last([Access::Protected, Access::Reading]), Access::Reading);
        assert_eq!(last([Access::Reading, Access::Protected]), Access::Reading);
        assert_eq!(last([Access::Reading, Access::Missing]), Access::Missing);
        // Whoever waits for anything but memory is told once it has for long enough.
        let overdue = |pending: &Pending, before| pending.overdue(before).count();
        let moment = Duration::from_nanos(1);
        assert_eq!(overdue(&pending, third.so_since), 1);
        assert_eq!(overdue(&pending, third.so_since.checked_sub(moment).unwrap()), 0);
        pending.keep_fault(Ppn(1), Access::Missing, Wait::Memory);
        assert_eq!(overdue(&pending, Instant::now()), 0);
    }

    #[test]
    fn what_was_at_home_is_looked_at_again_when_it_may_have_been_punched() {
        let mut pending = Pending::default();
        pending.look_again(vec![(Ppn(4), 2), (Ppn(9), 1)]);
        assert!(!pending.is_empty() && !pending.is_brief());
        pending.look_again(vec![(Ppn(20), 3)]);
        let later = Instant::now() + Duration::from_secs(3600);
        pending.unpunched[2].2 = later;
        std::thread::sleep(PUNCH_TIME);
        assert_eq!(pending.take_due(), [(Ppn(4), 2), (Ppn(9), 1)]);
        assert_eq!(pending.take_due(), []);
        // It is given time.
        let begun = Instant::now();
        pending.look_again(vec![(Ppn(30), 1)]);
        assert!(pending.unpunched.len() == 2 && pending.unpunched[1].2 >= begun + PUNCH_TIME);
    }

    #[test]
    fn two_faults_on_a_page_are_one_and_missing_wins() {
        let mut pending = Pending::default();
        pending.keep_fault(Ppn(1), Access::Missing, Wait::Busy);
        pending.keep_fault(Ppn(1), Access::Protected, Wait::Memory);
        let fault = pending.fault(Ppn(1)).unwrap();
        assert_eq!((fault.access, fault.why), (Access::Missing, Wait::Memory));
        assert_eq!(pending.waiting(), [Ppn(1)]);
        let mut starved = |why| {
            pending.keep_fault(Ppn(1), Access::Missing, why);
            pending.is_starved()
        };
        assert_eq!(
            [Wait::Memory, Wait::Blocked, Wait::Busy, Wait::Kernel].map(&mut starved),
            [true, true, false, false]
        );
        assert!(pending.drop_fault(Ppn(1)).is_some());
        assert!(pending.is_empty());
    }
}
