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
    use crate::simulated::Simulated;

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

    #[test]
    fn chances_are_what_they_are_said_to_be() {
        let mut random = Random::seeded(7);
        let mut hits =
            |hit: &dyn Fn(&mut Random) -> bool| (0..60_000).filter(|_| hit(&mut random)).count();
        // Binomial(60000, 1/6), and 1/4: sigma 91.3, and 106; six sigma.
        assert!((9_452..=10_548).contains(&hits(&Random::last_pass)));
        assert!((14_364..=15_636).contains(&hits(&|random| random.chance(0.25))));
        assert_eq!([0.0, 1.0].map(|p| hits(&move |random| random.chance(p))), [0, 60_000]);
    }

    /// What chooses the victims.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Way {
        Random,
        /// What was missed is spared.
        Sparing,
        /// That, and what is in use stays: see `clock`, `service::cold`.
        Seeing,
        /// That, and what comes back is on probation: see `service::trial`.
        Trying,
    }

    const PAGES: usize = 10_000;

    /// The page that leaves.
    fn victim(way: Way, paged: &mut Simulated) -> usize {
        let cold = match way {
            Way::Random | Way::Sparing => None,
            Way::Seeing => paged.cold(|_| ()),
            Way::Trying => paged.fails_probation().or_else(|| paged.cold(|_| ())),
        };
        cold.unwrap_or_else(|| paged.any())
    }

    /// How many accesses in a thousand are to the tier, and to swap: some pages are in memory, the last that left are in
    /// the tier, and the others in swap.
    fn misses(way: Way, room: usize, tier: usize, mut access: impl FnMut() -> usize) -> [f64; 2] {
        let mut paged = Simulated::new(PAGES);
        let (mut left, mut leaving) = (vec![None; PAGES], 0u64);
        let (mut misses, runs) = ([0u32; 2], 60 * PAGES);
        for run in 0..2 * runs {
            let page = access();
            paged.accessed[page] = true;
            if paged.is_home(page) {
                continue;
            }
            if let Some(left) = left[page] {
                let soon = leaving - left < tier as u64;
                paged.missed[page] = way != Way::Random && soon;
                misses[usize::from(!soon)] += u32::from(run >= runs);
                if way == Way::Trying && leaving - left >= room as u64 / 6 {
                    paged.put_on_probation(page);
                }
            }
            if paged.home.len() == room {
                let victim = victim(way, &mut paged);
                paged.leave(victim);
                left[victim] = Some(leaving);
                leaving += 1;
            }
            paged.come(page);
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

    /// Seven accesses of ten are to 3,000 pages, each as often as the other; the others by Zipf's law, and 1,500
    /// pages are touched once: what a guest works on, what it has, and what it had at boot.
    fn mixed() -> impl FnMut() -> usize {
        let (mut by_law, mut random, mut first) = (accesses(0.9, None), Random::seeded(3), 0);
        move || {
            first += 1;
            if first <= PAGES {
                return first - 1;
            }
            if random.chance(0.7) {
                random.propose(Pages(3_000)).index()
            } else {
                by_law() * 17 / 20
            }
        }
    }

    /// Over what is in memory: a part of all pages.
    const OVER: [f64; 3] = [1.2, 1.66, 2.85];

    fn compare(name: &str, most: [f64; 3], access: impl Fn() -> Box<dyn FnMut() -> usize>) {
        for over in OVER {
            let room = (PAGES as f64 / over) as usize;
            // A large tier, and the small one that is left where most of what comes back is from there.
            let (large, small) = (room / 5, room / 50);
            let of = |(way, tier)| misses(way, room, tier, access());
            let all = [
                (Way::Random, large),
                (Way::Sparing, large),
                (Way::Seeing, large),
                (Way::Seeing, small),
                (Way::Trying, small),
            ];
            let all = all.map(of);
            let [random, sparing, seeing, small, trying] = all.map(|m| m[0] + m[1]);
            let (spared, seen, tried) = (sparing / random, seeing / sparing, trying / small);
            eprintln!("{name}, {over}: {all:.1?}, {spared:.2}, {seen:.2}, {tried:.2}");
            assert!(spared <= most[0], "{name}, {over}: sparing {spared}");
            assert!(seen <= most[1], "{name}, {over}: seeing {seen}");
            assert!(tried <= most[2], "{name}, {over}: probation {tried}");
        }
    }

    #[test]
    fn what_is_known_of_pages_saves_misses_and_costs_none_where_there_is_nothing_to_know() {
        let cases: [(f64, Option<u64>, [f64; 3]); 5] = [
            (0.9, None, [0.92, 0.99, 1.0]),
            (0.9, Some(5), [0.92, 1.0, 1.2]),
            (1.1, None, [0.88, 0.98, 1.0]),
            (0.6, None, [0.95, 1.0, 1.0]),
            (0.0, None, [1.01, 1.01, 1.01]),
        ];
        // Each takes seconds.
        std::thread::scope(|scope| {
            for (s, scan, most) in cases {
                let name = format!("Zipf {s}, {scan:?}");
                scope.spawn(move || compare(&name, most, || Box::new(accesses(s, scan))));
            }
            scope.spawn(|| compare("mixed", [0.85, 0.96, 1.1], || Box::new(mixed())));
        });
    }
}
