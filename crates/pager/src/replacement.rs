//! Which page goes. Pluggable; random by default, because a hypervisor's knowledge of a guest's
//! pages is poor and random choice cannot be in resonance with the guest's own replacement
//! (OSDI'02 s.3.4).
//!
//! What it takes wrongly comes back, and what comes back soon is spared for a while: a page that its
//! guest waited for when it had only just left is passed over [`PASSES`] times on average. That is
//! known for nothing, and is right of the guest's accesses, whatever the guest thinks of them (ADR 23).

use ballast_units::{Pages, Ppn, SplitMix64};

/// Proposes pages to evict. Proposals need not be resident: the caller asks again.
pub trait Replacement: Send {
    /// A page below `size`, which is not zero.
    fn propose(&mut self, size: Pages) -> Ppn;
    /// A page that was proposed is one to be spared. Whether that was for the last time.
    fn last_pass(&mut self) -> bool;
    /// True with this probability: always from 1 on.
    fn chance(&mut self, p: f64) -> bool;
}

/// How many times, on average, a page that was missed is passed over. More win little, and are slower
/// to forget.
pub const PASSES: u64 = 6;

/// Uniformly random pages.
#[derive(Clone, Debug)]
pub struct Random {
    numbers: SplitMix64,
}

impl Random {
    /// The same pages for the same seed.
    pub fn seeded(seed: u64) -> Random {
        Random { numbers: SplitMix64::seeded(seed) }
    }
}

impl Replacement for Random {
    fn propose(&mut self, size: Pages) -> Ppn {
        // Multiply-shift: a bias below size / 2^64.
        Ppn(((u128::from(self.numbers.draw()) * u128::from(size.0)) >> 64) as u64)
    }

    fn last_pass(&mut self) -> bool {
        self.numbers.draw().is_multiple_of(PASSES)
    }

    fn chance(&mut self, p: f64) -> bool {
        self.numbers.unit() < p
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn proposals_are_uniform_and_in_range() {
        let mut random = Random::seeded(7);
        let mut seen = [0u32; 100];
        for _ in 0..100_000 {
            seen[random.propose(Pages(100)).index()] += 1;
        }
        // Binomial(100000, 1/100): sigma 31.5; six sigma.
        assert!(seen.iter().all(|&n| (811..=1189).contains(&n)), "{seen:?}");
    }

    /// A guest's pages, of which some are in memory, the last that left are in the tier, and the others
    /// in swap. Answers how many accesses in a thousand were to the tier, and to swap.
    fn misses(
        sparing: bool,
        room: usize,
        tier: usize,
        mut access: impl FnMut() -> usize,
    ) -> [f64; 2] {
        const PAGES: usize = 10_000;
        let (mut random, mut home) = (Random::seeded(11), Vec::<usize>::new());
        let mut at = vec![None; PAGES];
        let (mut left, mut leaving) = (vec![None; PAGES], 0u64);
        let mut missed = vec![false; PAGES];
        let (mut misses, runs) = ([0u32; 2], 60 * PAGES);
        for run in 0..2 * runs {
            let page = access();
            if at[page].is_some() {
                continue;
            }
            if let Some(left) = left[page] {
                let soon = leaving - left < tier as u64;
                missed[page] = sparing && soon;
                misses[usize::from(!soon)] += u32::from(run >= runs);
            }
            if home.len() == room {
                let place = loop {
                    let place = random.propose(Pages(room as u64)).index();
                    let spared = &mut missed[home[place]];
                    if !*spared {
                        break place;
                    }
                    *spared = !random.last_pass();
                };
                let goes: usize = home.swap_remove(place);
                (at[goes], left[goes]) = (None, Some(leaving));
                leaving += 1;
                if let Some(&moved) = home.get(place) {
                    at[moved] = Some(place);
                }
            }
            at[page] = Some(home.len());
            home.push(page);
        }
        misses.map(|n| f64::from(n) / runs as f64 * 1e3)
    }

    /// Zipf's law over pages in no order, one access in `scan` going through all of them.
    fn accesses(s: f64, scan: Option<u64>) -> impl FnMut() -> usize {
        let mut sum = 0.0;
        let weights = (1..=10_000).map(|rank| {
            sum += f64::from(rank).powf(-s);
            sum
        });
        let weights: Vec<f64> = weights.collect();
        let (mut random, mut next) = (Random::seeded(5), 0);
        move || {
            if scan.is_some_and(|n| random.numbers.draw().is_multiple_of(n)) {
                next = (next + 1) % 10_000;
                return next;
            }
            let u = random.numbers.unit() * sum;
            // 7919 is prime to 10,000.
            weights.partition_point(|&w| w < u).min(9_999) * 7_919 % 10_000
        }
    }

    #[test]
    fn sparing_what_was_missed_saves_misses_and_costs_none_where_there_is_nothing_to_know() {
        let cases = [
            (0.9, None, 0.92),
            (0.9, Some(5), 0.92),
            (1.1, None, 0.88),
            (0.6, None, 0.95),
            (0.0, None, 1.01),
        ];
        let compare = |(s, scan, most): (f64, Option<u64>, f64)| {
            for over in [1.2, 1.66, 2.85] {
                let room = (10_000.0 / over) as usize;
                let of = |sparing| misses(sparing, room, room / 5, accesses(s, scan));
                let (plain, spared) = (of(false), of(true));
                let [plain_all, spared_all] = [plain, spared].map(|m| m[0] + m[1]);
                eprintln!(
                    "Zipf {s}, {scan:?}, {over}: {plain:.1?} {spared:.1?}, {:.3}",
                    spared_all / plain_all
                );
                assert!(spared_all <= most * plain_all, "Zipf {s}, {scan:?}, {over}");
            }
        };
        // Each takes seconds.
        std::thread::scope(|scope| {
            for case in cases {
                scope.spawn(move || compare(case));
            }
        });
    }
}
