//! Exact accounting of machine memory: every page is reserved here before it is allocated and
//! released here after it is freed, so what the books say is never below what is in use.

use std::fmt;

use ballast_units::Pages;

use crate::sync::{AtomicU64, Ordering};

/// The budget of a host and what is handed out of it.
pub struct Ledger {
    budget: AtomicU64,
    used: AtomicU64,
    peak: AtomicU64,
    /// The most since somebody last asked.
    crest: AtomicU64,
    /// The alarm rings when free memory leaves `[alarm_low, alarm_high)`.
    alarm_low: AtomicU64,
    alarm_high: AtomicU64,
    alarm: Box<dyn Fn() + Send + Sync>,
}

impl Ledger {
    /// `alarm` is called from whatever thread crosses a threshold: it must only wake somebody.
    pub fn new(budget: Pages, alarm: impl Fn() + Send + Sync + 'static) -> Ledger {
        Ledger {
            budget: AtomicU64::new(budget.0),
            used: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            crest: AtomicU64::new(0),
            alarm_low: AtomicU64::new(0),
            alarm_high: AtomicU64::new(u64::MAX),
            alarm: Box::new(alarm),
        }
    }

    /// Takes `n` pages out of free memory, or nothing when fewer are free.
    #[must_use]
    pub fn try_reserve(&self, n: Pages) -> bool {
        self.reserve_leaving(n, Pages::ZERO)
    }

    /// Takes `n` pages if at least `floor` pages stay free afterwards.
    #[must_use]
    pub fn reserve_leaving(&self, n: Pages, floor: Pages) -> bool {
        let budget = self.budget.load(Ordering::Relaxed);
        let taken = self.used.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |used| {
            let after = used.checked_add(n.0)?;
            (after.checked_add(floor.0)? <= budget).then_some(after)
        });
        let Ok(before) = taken else { return false };
        let after = before + n.0;
        self.note_used(after);
        if budget - after < self.alarm_low.load(Ordering::Relaxed) {
            (self.alarm)();
        }
        true
    }

    /// Books pages that are in use already, whatever the budget: a manager that takes over running
    /// VMs must start from the truth.
    pub fn adopt(&self, n: Pages) {
        let after = self.used.fetch_add(n.0, Ordering::AcqRel) + n.0;
        self.note_used(after);
        let budget = self.budget.load(Ordering::Relaxed);
        let low = self.alarm_low.load(Ordering::Relaxed);
        // Beyond the budget there is no lower threshold, and every page counts.
        if !n.is_zero() && (after > budget || budget - after < low) {
            (self.alarm)();
        }
    }

    fn note_used(&self, used: u64) {
        // A page is reserved at each fault: what is the most already is not written again.
        for most in [&self.peak, &self.crest] {
            if used > most.load(Ordering::Relaxed) {
                most.fetch_max(used, Ordering::Relaxed);
            }
        }
    }

    /// Books `now` in place of `before`, which were adopted or reserved: in one step, whatever the budget.
    pub(crate) fn exchange(&self, before: Pages, now: Pages) {
        match now.0.checked_sub(before.0) {
            Some(more) => self.adopt(Pages(more)),
            None => self.release(before.saturating_sub(now)),
        }
    }

    /// Gives back pages that were reserved or adopted. More than those is a mistake, which debug builds
    /// find.
    pub fn release(&self, n: Pages) {
        let before = self.used.fetch_sub(n.0, Ordering::AcqRel);
        debug_assert!(before >= n.0, "released {n:?} of {before} used pages");
        let free = self.budget.load(Ordering::Relaxed).saturating_sub(before - n.0);
        if free >= self.alarm_high.load(Ordering::Relaxed) {
            (self.alarm)();
        }
    }

    /// What may be handed out altogether.
    pub fn budget(&self) -> Pages {
        Pages(self.budget.load(Ordering::Relaxed))
    }
    /// What is handed out. More than the budget where that was lowered, or where `adopt` took more.
    pub fn used(&self) -> Pages {
        Pages(self.used.load(Ordering::Relaxed))
    }
    /// Zero when a lowered budget is below what is in use.
    pub fn free(&self) -> Pages {
        self.budget().saturating_sub(self.used())
    }
    /// The most that was ever in use at one instant.
    pub fn peak(&self) -> Pages {
        Pages(self.peak.load(Ordering::Relaxed))
    }
    /// The least that was free at any instant since the last call, of the budget as it is now.
    pub fn take_trough(&self) -> Pages {
        let used = self.used.load(Ordering::Relaxed);
        let crest = self.crest.swap(used, Ordering::Relaxed).max(used);
        Pages(self.budget().0.saturating_sub(crest))
    }
    /// Takes back nothing: below what is in use, nothing more is handed out. Rings the alarm.
    pub fn set_budget(&self, budget: Pages) {
        self.budget.store(budget.0, Ordering::Relaxed);
        (self.alarm)();
    }
    /// Rings when free memory falls below `low` or rises to `high`.
    pub fn set_alarm(&self, low: Pages, high: Pages) {
        self.alarm_low.store(low.0, Ordering::Relaxed);
        self.alarm_high.store(high.0, Ordering::Relaxed);
    }
    pub(crate) fn ring(&self) {
        (self.alarm)();
    }
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ledger")
            .field("budget", &self.budget())
            .field("used", &self.used())
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn never_hands_out_more_than_the_budget_however_many_ask() {
        let ledger = Arc::new(Ledger::new(Pages(1000), || {}));
        let takers: Vec<_> = (0..4)
            .map(|_| {
                let ledger = ledger.clone();
                std::thread::spawn(move || {
                    let mut got = 0;
                    for i in 0..5000u64 {
                        if ledger.try_reserve(Pages(1 + i % 7)) {
                            got += 1 + i % 7;
                            if i % 3 == 0 {
                                ledger.release(Pages(1 + i % 7));
                                got -= 1 + i % 7;
                            }
                        }
                    }
                    got
                })
            })
            .collect();
        let held: u64 = takers.into_iter().map(|t| t.join().unwrap()).sum();
        assert_eq!(ledger.used(), Pages(held));
        assert!(ledger.peak() <= Pages(1000), "{:?}", ledger.peak());
        assert!(ledger.peak() > Pages(900));
    }

    #[test]
    fn a_floor_stays_free_and_huge_requests_do_not_wrap() {
        let ledger = Ledger::new(Pages(100), || {});
        assert!(ledger.reserve_leaving(Pages(60), Pages(40)));
        assert!(!ledger.reserve_leaving(Pages(1), Pages(40)));
        assert!(ledger.try_reserve(Pages(1)));
        assert!(!ledger.try_reserve(Pages(u64::MAX)));
        assert_eq!(ledger.free(), Pages(39));
    }

    #[test]
    fn alarm_rings_on_crossings_only() {
        let rings = Arc::new(AtomicUsize::new(0));
        let count = rings.clone();
        let ledger = Ledger::new(Pages(100), move || {
            count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        });
        ledger.set_alarm(Pages(20), Pages(60));
        assert!(ledger.try_reserve(Pages(80)));
        assert_eq!(rings.load(std::sync::atomic::Ordering::Relaxed), 0);
        assert!(ledger.try_reserve(Pages(1)));
        assert_eq!(rings.load(std::sync::atomic::Ordering::Relaxed), 1);
        ledger.release(Pages(30));
        assert_eq!(rings.load(std::sync::atomic::Ordering::Relaxed), 1);
        ledger.release(Pages(11));
        assert_eq!(rings.load(std::sync::atomic::Ordering::Relaxed), 2);
    }

    #[test]
    fn what_is_adopted_is_booked_whatever_the_budget_is_and_rings_where_little_is_left() {
        let rings = Arc::new(AtomicUsize::new(0));
        let count = rings.clone();
        let ledger = Ledger::new(Pages(100), move || {
            count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        });
        let rung = || rings.swap(0, std::sync::atomic::Ordering::Relaxed);
        ledger.set_alarm(Pages(20), Pages(60));
        ledger.adopt(Pages(130));
        assert_eq!(
            (ledger.used(), ledger.free(), ledger.peak()),
            (Pages(130), Pages(0), Pages(130))
        );
        assert_eq!(rung(), 1);
        ledger.release(Pages(90));
        assert_eq!(rung(), 1);
        ledger.adopt(Pages(5));
        assert_eq!((ledger.used(), ledger.peak(), rung()), (Pages(45), Pages(130), 0));
        ledger.adopt(Pages(35));
        assert_eq!((ledger.free(), rung()), (Pages(20), 0));
        ledger.adopt(Pages(1));
        assert_eq!((ledger.free(), rung()), (Pages(19), 1));
        ledger.adopt(Pages(0));
        ledger.set_alarm(Pages(0), Pages(60));
        ledger.adopt(Pages(19));
        assert_eq!((ledger.free(), rung()), (Pages(0), 0));
        ledger.adopt(Pages(1));
        assert_eq!((ledger.free(), rung()), (Pages(0), 1));
        ledger.release(Pages(20));
        ledger.release(Pages(36));
        ledger.set_budget(Pages(200));
        assert_eq!((ledger.budget(), ledger.free(), rung()), (Pages(200), Pages(155), 1));
        ledger.ring();
        assert_eq!(rung(), 1);
        let printed = format!("{ledger:?}");
        assert!(printed.contains("200") && printed.contains("45"), "{printed}");
    }

    #[test]
    fn the_least_that_was_free_is_told_once() {
        let ledger = Ledger::new(Pages(100), || {});
        assert_eq!(ledger.take_trough(), Pages(100));
        assert!(ledger.try_reserve(Pages(90)));
        ledger.release(Pages(60));
        assert_eq!([ledger.take_trough(), ledger.take_trough()], [Pages(10), Pages(70)]);
        ledger.adopt(Pages(80));
        assert_eq!(ledger.take_trough(), Pages(0));
        ledger.release(Pages(110));
        // What is used at the moment of the call belongs to both sides.
        assert_eq!([ledger.take_trough(), ledger.take_trough()], [Pages(0), Pages(100)]);
    }

    #[test]
    fn a_budget_lowered_below_use_leaves_nothing_free() {
        let ledger = Ledger::new(Pages(100), || {});
        assert!(ledger.try_reserve(Pages(80)));
        ledger.set_budget(Pages(50));
        assert_eq!(ledger.free(), Pages::ZERO);
        assert!(!ledger.try_reserve(Pages(1)));
        ledger.release(Pages(31));
        assert!(ledger.try_reserve(Pages(1)));
    }
}
