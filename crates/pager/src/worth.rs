//! How large a compressed tier is worth its memory.
//!
//! A frame of the tier holds a few pages that swap would hold otherwise, and takes the place of one page at home.
//! Which of the two is better shows at the two ends of the tier. Those of its pages that came last are those that
//! would still be at home if it were smaller; those that are next to leave it are those that would be in swap:
//!
//! ```text
//! one frame less saves   returns of a young page x what a return from the tier costs
//! and costs              (pages in a frame - 1) x returns of an old page x what one from swap costs more
//! ```
//!
//! Both are counted over the same time and weighed with what returns were seen to take, so neither load nor the
//! speed of a disk has to be presumed. Only what was wanted back counts: a guest whose cold pages stay where they
//! are keeps the tier it has.

use std::time::Duration;

use ballast_compress::{Occupancy, Returns};

/// What a fault costs beside the time it takes to find the page's contents, nanoseconds: its guest's waiting, the threads
/// that serve it, and the eviction of another page (ADR 11). Beside `tools.refault`, which counts no waiting.
pub(crate) const FAULT_NS: u64 = 50_000;
/// What a page in swap is presumed to cost before one came back: a disk that turns.
const SWAP_NS: f64 = 5e6;
/// So many returns from the two ends say something.
const ENOUGH: u64 = 64;
/// It takes so many times as many to grow: what it grows by, pages at home have to leave for, and come back.
const SURE: u64 = 4;
/// What fewer of them said in this time is forgotten.
const FORGET: Duration = Duration::from_secs(60);
/// The tier changes when one side costs this much more than the other.
const DEARER: f64 = 1.25;
/// So much more is much more.
const MUCH_DEARER: f64 = 2.5;
/// It changes by this part of itself; where that is much dearer, it shrinks by the second.
const STEPS: [u64; 2] = [8, 4];
/// So many frames of a full tier may be free.
const SPARE: u64 = 4;
/// The least that it may become is this part of the most, so that there is something to judge it by.
const LEAST: u64 = 16;

/// Running totals of one VM, and its tier at the same moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Who was wanted back from the tier.
    pub returns: Returns,
    /// What is in it.
    pub occupancy: Occupancy,
    /// Pages that came back from the tier, and nanoseconds that this took.
    pub decompressed: u64,
    #[allow(missing_docs, reason = "told with the field before")]
    pub decompress_ns: u64,
    /// The same of swap.
    pub swap_ins: u64,
    #[allow(missing_docs, reason = "told with the field before")]
    pub swap_in_ns: u64,
}

/// A tier that is to be smaller gives up its oldest pages, also where it is not full; only a full one grows.
///
/// Follows one VM's tier and says how many frames it may have.
#[derive(Clone, Debug)]
pub struct Worth {
    least: u64,
    most: u64,
    limit: u64,
    last: Option<(Duration, Seen)>,
    swap_ns: Option<f64>,
}

impl Worth {
    /// Of a tier of at most `most` frames, which it may have at first.
    pub fn new(most: u64) -> Worth {
        Worth { least: most.div_ceil(LEAST), most, limit: most, last: None, swap_ns: None }
    }

    /// How many frames it may have, from `now` on: monotonic time since any fixed moment.
    pub fn step(&mut self, now: Duration, seen: &Seen) -> u64 {
        let Some((since, last)) = self.last else {
            self.last = Some((now, *seen));
            return self.limit;
        };
        let grown = |now: u64, then: u64| now.saturating_sub(then) as f64;
        let young = grown(seen.returns.from_young, last.returns.from_young);
        let old = grown(seen.returns.from_old, last.returns.from_old);
        let forgotten = now.saturating_sub(since) >= FORGET;
        if young + old < ENOUGH as f64 || forgotten {
            if forgotten {
                self.last = Some((now, *seen));
            }
            return self.limit;
        }
        let each = |nanos: f64, n: f64| if n > 0.0 { Some(nanos / n) } else { None };
        let tier = each(
            grown(seen.decompress_ns, last.decompress_ns),
            grown(seen.decompressed, last.decompressed),
        );
        let swap =
            each(grown(seen.swap_in_ns, last.swap_in_ns), grown(seen.swap_ins, last.swap_ins));
        self.swap_ns = swap.or(self.swap_ns);
        let tier = FAULT_NS as f64 + tier.unwrap_or(0.0);
        let swap = FAULT_NS as f64 + self.swap_ns.unwrap_or(SWAP_NS);
        let packed = each(seen.occupancy.pages as f64, seen.occupancy.frames as f64).unwrap_or(2.0);
        let of = |returns: f64, slots: u64| returns / slots.max(1) as f64;
        let smaller = of(young, seen.returns.young) * tier;
        let larger = of(old, seen.returns.old) * (packed - 1.0) * (swap - tier).max(0.0);
        let frames = seen.occupancy.frames;
        // Room is made before it is needed.
        let full = frames + frames / 16 + SPARE >= self.limit;
        let grows = larger > DEARER * smaller && full;
        if grows && young + old < (SURE * ENOUGH) as f64 {
            return self.limit;
        }
        self.last = Some((now, *seen));
        if smaller > DEARER * larger {
            let part = STEPS[usize::from(smaller > MUCH_DEARER * larger)];
            let now = self.limit.min(frames);
            self.limit = (now - now / part).max(self.least);
        } else if grows {
            self.limit = (self.limit + self.limit.div_ceil(STEPS[0])).min(self.most);
        }
        self.limit
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use ballast_compress::{Frames, Place, Size};
    use ballast_units::SplitMix64;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A full tier of `frames` at two pages a frame, of which so many have come back in all, and half as long from
    /// there as from swap.
    fn seen(frames: u64, from_young: u64, from_old: u64) -> Seen {
        let pages = 2 * frames;
        let (young, old) = (pages / 8, pages / 8);
        let n = from_young + from_old;
        Seen {
            returns: Returns { from_young, from_old, young, old },
            occupancy: Occupancy { frames, quarters: 4 * frames, pages },
            decompressed: n,
            decompress_ns: n * 50_000,
            swap_ins: n,
            swap_in_ns: n * 150_000,
        }
    }

    /// After `n` looks a second apart between each of which as many come back.
    fn after(worth: &mut Worth, n: u32, young: u64, old: u64, of: impl Fn(u64) -> u64) -> u64 {
        for i in 0..=n {
            let (young, old) = (young * u64::from(i), old * u64::from(i));
            let frames = of(worth.limit);
            worth.step(SECOND * i, &seen(frames, young, old));
        }
        worth.limit
    }

    #[test]
    fn it_shrinks_while_the_young_come_back_and_grows_while_the_old_do() {
        let full = |limit| limit;
        let mut worth = Worth::new(1_600);
        // One frame less saves 100 us a return of a young page, and costs 100 us one of an old page.
        assert_eq!(after(&mut worth, 1, 260, 100, full), 1_200, "a quarter");
        let mut worth = Worth::new(1_600);
        assert_eq!(after(&mut worth, 1, 130, 100, full), 1_400, "an eighth");
        assert_eq!(after(&mut Worth::new(1_600), 20, 124, 100, full), 1_600);
        assert_eq!(after(&mut worth, 60, 1_000, 10, full), 100, "a sixteenth of the most is left");
        worth.last = None;
        assert_eq!(after(&mut worth, 1, 110, 145, full), 100, "to grow takes more of them");
        assert_eq!(worth.step(SECOND * 2, &seen(100, 120, 160)), 113);
        worth.last = None;
        assert_eq!(after(&mut worth, 60, 10, 1_000, full), 1_600);
    }

    #[test]
    fn one_that_is_not_full_shrinks_from_what_it_holds_and_does_not_grow() {
        let mut worth = Worth::new(1_600);
        worth.limit = 800;
        assert_eq!(after(&mut worth, 3, 10, 1_000, |_| 400), 800);
        worth.last = None;
        assert_eq!(after(&mut worth, 1, 1_000, 10, |_| 400), 300);
    }

    #[test]
    fn a_small_one_grows_though_room_is_made_in_it_before_it_is_needed() {
        let mut worth = Worth::new(160);
        worth.limit = 20;
        assert_eq!(after(&mut worth, 1, 10, 1_000, |limit| limit - SPARE), 23);
        assert_eq!(worth.step(SECOND * 2, &seen(23 - SPARE - 2, 20, 2_000)), 23, "not full");
    }

    #[test]
    fn few_returns_say_nothing_until_they_are_many_and_are_forgotten() {
        let mut worth = Worth::new(1_600);
        let step =
            |worth: &mut Worth, s: u32, young| worth.step(SECOND * s, &seen(1_600, young, 0));
        assert_eq!([(0, 0), (1, 63)].map(|(s, n)| step(&mut worth, s, n)), [1_600; 2]);
        assert_eq!(step(&mut worth, 2, 64), 1_200);
        assert_eq!([(60, 127), (62, 127)].map(|(s, n)| step(&mut worth, s, n)), [1_200; 2]);
        assert_eq!(step(&mut worth, 63, 190), 1_200, "after a minute it is counted anew");
    }

    #[test]
    fn before_anything_came_back_from_swap_that_is_taken_for_slow() {
        let from_tier = |young, old| Seen { swap_ins: 0, swap_in_ns: 0, ..seen(1_600, young, old) };
        let mut worth = Worth::new(1_600);
        worth.step(SECOND, &from_tier(0, 0));
        assert_eq!(worth.step(2 * SECOND, &from_tier(1_000, 100)), 1_600);
        assert_eq!(worth.step(3 * SECOND, &from_tier(2_000, 100)), 1_200, "no old one came");
    }

    proptest! {
        #[test]
        fn whatever_is_seen_it_stays_within_its_bounds(
            most in 0u64..5_000,
            steps in prop::collection::vec((0u64..100, [any::<u16>(); 9]), 1..50),
        ) {
            let mut worth = Worth::new(most);
            for (s, n) in steps {
                let [a, b, c, d, e, f, g, h, i] = n.map(u64::from);
                let seen = Seen {
                    returns: Returns { from_young: a, from_old: b, young: c, old: d },
                    occupancy: Occupancy { frames: e, quarters: 4 * e, pages: f },
                    decompressed: g,
                    decompress_ns: h << 12,
                    swap_ins: i,
                    swap_in_ns: a << 20,
                };
                let limit = worth.step(Duration::from_secs(s), &seen);
                prop_assert!((most.div_ceil(16)..=most).contains(&limit));
            }
        }
    }

    const PAGES: usize = 10_000;

    /// Nanoseconds an access costs on average, in the second half of the run, where memory is `room` pages, the
    /// least recently used leaves, and a return from swap takes `swap_ns`. With `fixed` frames for the tier, or as
    /// many as it is worth.
    fn cost(room: u64, swap_ns: u64, fixed: Option<u64>) -> f64 {
        const TIER_NS: u64 = 10_000;
        let (mut numbers, mut sum) = (SplitMix64::seeded(5), 0.0);
        let weights: Vec<f64> = (1..=PAGES)
            .map(|rank| {
                sum += (rank as f64).powf(-0.9);
                sum
            })
            .collect();
        let most = PAGES as u64 / 10;
        let mut worth = Worth::new(most);
        let mut frames = Frames::new(fixed.unwrap_or(most));
        let mut slots: Vec<Option<Place>> = vec![None; PAGES];
        let mut owners = std::collections::HashMap::new();
        // When each was used last, and those at home by that.
        let mut used = vec![None; PAGES];
        let mut home = std::collections::BTreeMap::new();
        let (mut seen, mut total) = (Seen::default(), 0);
        let runs = 60 * PAGES;
        for now in 0..runs {
            let u = numbers.unit() * sum;
            let page = weights.partition_point(|&w| w < u).min(PAGES - 1);
            let last = used[page].replace(now);
            let mut cost = 0;
            if last.is_some_and(|last| home.remove(&last).is_some()) {
            } else if let Some(place) = slots[page].take() {
                frames.wanted_back(place);
                frames.release(place);
                owners.remove(&place);
                seen.decompressed += 1;
                seen.decompress_ns += TIER_NS;
                cost = FAULT_NS + TIER_NS;
            } else if last.is_some() {
                seen.swap_ins += 1;
                seen.swap_in_ns += swap_ns;
                cost = FAULT_NS + swap_ns;
            }
            home.insert(now, page);
            while home.len() as u64 + frames.occupancy().frames > room {
                while !frames.has_room() {
                    let oldest = frames.oldest().next();
                    let Some(oldest) = oldest else { break };
                    frames.release(oldest);
                    if let Some(page) = owners.remove(&oldest) {
                        slots[page] = None;
                    }
                }
                let Some((_, leaves)) = home.pop_first() else { break };
                if let Some(taken) = frames.take(Size::Half, || true) {
                    slots[leaves] = Some(taken.place);
                    owners.insert(taken.place, leaves);
                }
            }
            if now > runs / 2 {
                total += cost;
            }
            if fixed.is_none() && now % 2_000 == 0 {
                (seen.returns, seen.occupancy) = (frames.returns(), frames.occupancy());
                frames.set_limit(worth.step(SECOND * (now / 2_000) as u32, &seen));
            }
        }
        total as f64 / (runs / 2) as f64
    }

    #[test]
    fn it_comes_close_to_the_better_of_a_large_tier_and_a_small_one() {
        // Swap as fast as a fault, as an SSD, as a disk that turns.
        let cases = [(6_000, 20_000), (6_000, 200_000), (6_000, 8_000_000), (3_500, 100_000)];
        std::thread::scope(|scope| {
            for (room, swap_ns) in cases {
                scope.spawn(move || {
                    let [large, small] = [1_000, 62].map(|fixed| cost(room, swap_ns, Some(fixed)));
                    let own = cost(room, swap_ns, None);
                    eprintln!(
                        "{room} {swap_ns}: {large:.0} ns, {small:.0}, as it is worth {own:.0}"
                    );
                    assert!(own < 1.05 * large.min(small), "{room} {swap_ns}");
                });
            }
        });
    }
}
