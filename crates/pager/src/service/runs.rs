//! Faults that follow one another through a VM's memory, and how many neighbours each is worth. Pure: told
//! where faults were and which page was left out behind each, it says how many to bring home.
//!
//! Behind the pages that are brought home, the next one that is away is left there. A fault on it shows
//! that the guest went through them, so no other look at them is needed, and it is the moment at which
//! the next are due. One that is not met before some other faults shows that they were in vain. So the
//! page that is left out is a sample of the others.

use ballast_units::Ppn;

use crate::swap::Window;

/// Runs that are kept in mind: so many faults that belong to none may lie between two of a run.
const RUNS: usize = 16;
/// Neighbours of the first fault that continues another.
const SECOND: u32 = 4;

/// In which direction a run goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// To higher pages.
    Up,
    /// To lower ones.
    Down,
}

/// What a fault is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Worth {
    /// Where its neighbours are.
    pub way: Way,
    /// Neighbours to bring home, at most [`Runs::MOST`].
    pub pages: u32,
    /// Whether it continues a run.
    pub known: bool,
}

#[derive(Clone, Copy, Debug)]
struct Run {
    worth: Worth,
    /// Pages that were brought home behind its last fault.
    brought: u32,
    /// The pages that would continue it.
    up: Option<Ppn>,
    down: Option<Ppn>,
}

/// The runs of one VM.
#[derive(Debug)]
pub struct Runs {
    /// The oldest first.
    runs: Vec<Run>,
    /// Behind faults that continue none, and behind those that do.
    first: Window,
    onward: Window,
}

impl Default for Runs {
    fn default() -> Runs {
        // That a fault continues another is reason enough to begin with.
        Runs { runs: Vec::with_capacity(RUNS), first: Window::default(), onward: Window::open() }
    }
}

impl Runs {
    /// Neighbours that one fault is worth at most.
    pub const MOST: usize = Window::MOST;

    /// A page that was away is wanted.
    pub fn met(&mut self, ppn: Ppn) -> Worth {
        let continued = |r: &Run| r.up == Some(ppn) || r.down == Some(ppn);
        let Some(i) = self.runs.iter().position(continued) else {
            return Worth { way: Way::Up, pages: self.first.wanted(), known: false };
        };
        let run = self.runs.remove(i);
        self.judge(&run, true);
        let way = if run.up == Some(ppn) { Way::Up } else { Way::Down };
        let most = self.onward.wanted();
        let pages = (run.brought * 2).clamp(SECOND, Runs::MOST as u32).min(most);
        Worth { way, pages, known: true }
    }

    /// So many pages were brought home behind the fault that was worth this, and these, above and below
    /// them, are the next that are away; None: there is none near.
    pub fn left(&mut self, worth: Worth, brought: u32, up: Option<Ppn>, down: Option<Ppn>) {
        if up.is_none() && down.is_none() {
            return;
        }
        if self.runs.len() == RUNS {
            let over = self.runs.remove(0);
            self.judge(&over, false);
        }
        self.runs.push(Run { worth, brought, up, down });
    }

    fn judge(&mut self, run: &Run, went_on: bool) {
        if run.brought == 0 {
            return;
        }
        let window = if run.worth.known { &mut self.onward } else { &mut self.first };
        if went_on { window.used() } else { window.wasted() }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::replacement::{Random, Replacement};
    use ballast_units::Pages;

    /// A guest all of whose pages are away, and which brings home whatever it is told to.
    #[derive(Default)]
    struct Guest {
        runs: Runs,
        home: std::collections::BTreeSet<u64>,
        faults: u32,
        brought: u32,
    }

    impl Guest {
        fn touch(&mut self, page: u64) {
            if !self.home.insert(page) {
                return;
            }
            self.faults += 1;
            let worth = self.runs.met(Ppn(page));
            let step = |p: u64| if worth.way == Way::Up { p + 1 } else { p - 1 };
            let mut at = step(page);
            let mut n = 0;
            while n < worth.pages {
                n += u32::from(self.home.insert(at));
                at = step(at);
            }
            self.brought += n;
            let (up, down) = match worth {
                Worth { known: false, .. } => (Some(Ppn(at)), Some(Ppn(page - 1))),
                Worth { way: Way::Up, .. } => (Some(Ppn(at)), None),
                Worth { way: Way::Down, .. } => (None, Some(Ppn(at))),
            };
            self.runs.left(worth, n, up, down);
        }
    }

    #[test]
    fn a_walk_faults_once_in_so_many_pages_whichever_way_it_goes() {
        for up in [true, false] {
            let mut guest = Guest::default();
            let walk = |i: u64| if up { 1_000_000 + i } else { 1_000_000 - i };
            (0..1700).for_each(|i| guest.touch(walk(i)));
            assert!(guest.faults < 120, "{}", guest.faults);
        }
    }

    #[test]
    fn several_walks_at_a_time_are_told_apart() {
        let mut guest = Guest::default();
        for i in 0..500 {
            (1..9).for_each(|walk| guest.touch(walk * 1_000_000 + i));
        }
        assert!(guest.faults < 500, "{}", guest.faults);
    }

    #[test]
    fn faults_all_over_the_place_bring_next_to_nothing() {
        let mut guest = Guest::default();
        let mut random = Random::seeded(5);
        for _ in 0..20_000 {
            guest.touch(random.propose(Pages(1 << 40)).0 + 1);
        }
        assert!(guest.brought < 20_000 / 20, "{}", guest.brought);
    }

    #[test]
    fn pairs_and_no_more_than_pairs_are_learned_not_to_pay() {
        let mut guest = Guest::default();
        let mut random = Random::seeded(5);
        for _ in 0..20_000 {
            let page = random.propose(Pages(1 << 40)).0 + 1;
            guest.touch(page);
            guest.touch(page + 1);
        }
        // One of two pages of each pair, if that; nothing behind them.
        assert!(guest.brought < 22_000, "{}", guest.brought);
    }

    #[test]
    fn short_runs_come_to_be_met_at_once() {
        let mut guest = Guest::default();
        let mut random = Random::seeded(5);
        for _ in 0..1000 {
            let page = random.propose(Pages(1 << 40)).0 + 1;
            (page..page + 32).for_each(|p| guest.touch(p));
        }
        let (faults, brought) = (guest.faults, guest.brought);
        assert!(faults < 32_000 / 8, "{faults} faults");
        assert!(brought < 32_000 * 3 / 2, "{brought} brought");
    }
}
