//! How far to go ahead of what is wanted: as far as it pays. Pure: told what became of each guess, it says
//! how far to go at the next fault. For reads from the swap space, a guess is a page that is read; for
//! pages that come home (`service::runs`), all those behind one fault.

/// The most pages ahead of one fault.
const MOST: u32 = 16;
/// Outcomes that are looked at together.
const VERDICT: u32 = 16;
/// While there are none, one fault in so many is followed by a probe of so many pages.
const PROBE_EVERY: u32 = 64;
const PROBE: u32 = 2;

/// The window of one VM.
///
/// It doubles when three quarters of the guesses looked at last were right, and halves, to nothing at last,
/// when less than half were. From nothing it comes back by a probe that was used as well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    size: u32,
    used: u32,
    wasted: u32,
    /// Reads since the last probe.
    since_probe: u32,
}

impl Default for Window {
    fn default() -> Window {
        Window { size: PROBE, used: 0, wasted: 0, since_probe: 0 }
    }
}

impl Window {
    /// As wide as it gets, in pages.
    pub const MOST: usize = MOST as usize;

    /// One that begins as wide as can be.
    pub fn open() -> Window {
        Window { size: MOST, ..Window::default() }
    }

    /// A page is wanted: how many of its neighbours to fetch.
    pub fn wanted(&mut self) -> u32 {
        if self.size > 0 {
            return self.size;
        }
        self.since_probe += 1;
        if self.since_probe < PROBE_EVERY {
            return 0;
        }
        self.since_probe = 0;
        PROBE
    }

    /// What was fetched ahead was wanted.
    pub fn used(&mut self) {
        self.used += 1;
        self.judge();
    }
    /// What was fetched ahead was in vain.
    pub fn wasted(&mut self) {
        self.wasted += 1;
        self.judge();
    }

    fn judge(&mut self) {
        let seen = self.used + self.wasted;
        if seen < if self.size == 0 { PROBE } else { VERDICT } {
            return;
        }
        if self.used * 4 >= seen * 3 {
            self.size = (self.size * 2).clamp(PROBE, MOST);
        } else if self.used * 2 < seen {
            self.size /= 2;
        }
        (self.used, self.wasted) = (0, 0);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    /// Faults of which each page that is read ahead is used `of` times in `in_all`: pages read ahead.
    fn faults(window: &mut Window, n: u32, of: u32, in_all: u32) -> u32 {
        let mut ahead = 0;
        for _ in 0..n {
            for _ in 0..window.wanted() {
                ahead += 1;
                if ahead % in_all < of { window.used() } else { window.wasted() }
            }
        }
        ahead
    }

    /// A window of four after so many of sixteen were used.
    fn after(used: u32) -> u32 {
        let mut window = Window { size: 4, ..Window::default() };
        (0..used).for_each(|_| window.used());
        (used..VERDICT - 1).for_each(|_| window.wasted());
        assert_eq!(window.size, 4, "not before the last of them");
        window.wasted();
        window.size
    }

    #[test]
    fn three_quarters_double_it_and_less_than_half_halve_it() {
        assert_eq!([0, 7, 8, 11, 12, 15].map(after), [2, 2, 4, 4, 8, 8]);
        let mut window = Window::open();
        assert_eq!(window.wanted(), MOST);
        (0..VERDICT).for_each(|_| window.used());
        assert_eq!(window.wanted(), MOST);
        // From nothing, both pages of a probe.
        let mut window = Window { size: 0, ..Window::default() };
        window.used();
        assert_eq!(window.size, 0);
        window.used();
        assert_eq!(window.size, PROBE);
    }

    #[test]
    fn it_grows_to_its_most_while_all_is_used() {
        let mut window = Window::default();
        faults(&mut window, 100, 1, 1);
        assert_eq!(window.wanted(), MOST);
        // Most is enough to stay.
        faults(&mut window, 1000, 5, 8);
        assert_eq!(window.wanted(), MOST);
    }

    #[test]
    fn what_is_wasted_ends_but_for_a_rare_probe() {
        let mut window = Window::default();
        faults(&mut window, 100, 0, 1);
        assert_eq!(window.size, 0);
        let n = 100 * PROBE_EVERY;
        assert_eq!(faults(&mut window, n, 0, 1), n / PROBE_EVERY * PROBE);
    }

    #[test]
    fn it_comes_back_when_a_probe_pays() {
        let mut window = Window::default();
        faults(&mut window, 1000, 1, 3);
        assert_eq!(window.size, 0);
        faults(&mut window, 4 * PROBE_EVERY, 1, 1);
        assert_eq!(window.wanted(), MOST);
    }

    #[test]
    fn reading_ahead_costs_little_where_it_is_in_vain_at_any_rate_below_a_half() {
        for in_all in 3..20 {
            let mut window = Window::default();
            faults(&mut window, 1000, 1, in_all);
            let ahead = faults(&mut window, 10_000, 1, in_all);
            assert!(ahead < 2500, "{ahead} pages, 1 in {in_all} used");
        }
    }
}
