//! What ages are worth, page by page: a guest whose memory is cut down at once, by the clock and probation alone, and
//! by age (ADR 35). `cargo test -p ballast-pager --lib squeeze -- --nocapture` prints the table.

use ballast_units::{Pages, Ppn, SplitMix64};

use super::Ages;
use crate::clock::{BLOCK, Block};
use crate::simulated::{Hand, Simulated, numbers};

/// The guest: of these pages six programs of so many each are used, the others were touched once, before.
const PAGES: usize = 45_000;
const PROGRAM: usize = 4_096;
/// It touches so many pages twice a second, of which these are neighbours.
const ACTION: usize = 96;
const DOCUMENT: usize = 32;
/// Its memory is cut down to one part in so many, one after the other.
const FACTORS: [f64; 3] = [1.87, 2.72, 3.15];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Much {
    ByClock,
    ByAge,
}

struct Host {
    much: Much,
    paged: Simulated,
    ages: Ages,
    /// How many had left when it left.
    left: Vec<Option<usize>>,
    leaving: usize,
    misses: u32,
    /// Memory is about to be short from the start, and what is used is looked for.
    is_near: bool,
    /// Blocks that are looked at by the way for each touch, how many are due, and the next.
    looks: f64,
    due: f64,
    look: u64,
    /// Blocks that were looked at once and twice, and pages that were used in between.
    seen: Vec<bool>,
    looked_at: Vec<bool>,
    used: Vec<bool>,
    between: Vec<bool>,
}

fn number(block: Block) -> usize {
    (block.first.0 / BLOCK) as usize
}

impl Host {
    fn new(much: Much, looks: f64) -> Host {
        let paged = Simulated::new(PAGES);
        let blocks = paged.clock.blocks() as usize;
        Host {
            much,
            paged,
            ages: Ages::new(Pages(PAGES as u64)),
            left: vec![None; PAGES],
            leaving: 0,
            misses: 0,
            is_near: false,
            looks,
            due: 0.0,
            look: 0,
            seen: vec![false; blocks],
            looked_at: vec![false; blocks],
            used: vec![false; PAGES],
            between: vec![false; blocks],
        }
    }

    /// The guest touches a page; at most `room` may be at home.
    fn touch(&mut self, page: usize, room: usize) {
        self.due += self.looks;
        while self.due >= 1.0 {
            self.due -= 1.0;
            self.look_at_the_next();
        }
        self.paged.accessed[page] = true;
        if self.paged.is_home(page) {
            return;
        }
        if let Some(left) = self.left[page] {
            self.misses += 1;
            let since = self.leaving - left;
            self.paged.missed[page] = since < room / 50;
            if since >= room / 6 {
                self.paged.put_on_probation(page);
            }
        }
        while self.paged.home.len() >= room {
            let page = self.paged.fails_probation().unwrap_or_else(|| self.cold_or_any());
            self.take(page);
        }
        self.paged.come(page);
        self.ages.note(Ppn(page as u64));
    }

    fn take(&mut self, page: usize) {
        if !self.paged.leave(page) {
            return;
        }
        self.left[page] = Some(self.leaving);
        self.leaving += 1;
    }

    /// All that is too much leaves, and the guest touches nothing meanwhile.
    fn cut_down(&mut self, room: usize) {
        let (mut beyond, mut spares) = (0, true);
        while self.much == Much::ByAge && self.paged.home.len() > room {
            let oldest = self.ages.up_to(self.paged.home.len() as u64 / BLOCK / 16, beyond);
            let Some((generation, is_last)) = oldest else { break };
            let before = self.paged.home.len();
            for number in 0..self.paged.clock.blocks() {
                let block = self.paged.clock.block(number);
                let is_old = self.ages.of(block.first).is_some_and(|g| g <= generation);
                if is_old && self.paged.home.len() > room {
                    self.take_block(block, room, spares);
                }
            }
            if self.paged.home.len() == before {
                beyond = beyond.saturating_mul(2).max(1);
                if is_last && !std::mem::take(&mut spares) {
                    break;
                }
                if is_last {
                    beyond = 0;
                }
            }
        }
        while self.paged.home.len() > room {
            let page = self.cold_or_any();
            self.take(page);
        }
    }

    /// Where that spares what was used between two looks, only the rest.
    fn take_block(&mut self, block: Block, room: usize, spares: bool) {
        if numbers(block).all(|page| !self.paged.is_home(page)) {
            self.ages.note_nothing(block.first);
        }
        let n = number(block);
        if !(self.seen[n] || self.between[n]) || !self.looked_at[n] {
            return;
        }
        let (used, idle): (Vec<usize>, Vec<usize>) =
            self.here(block).into_iter().partition(|&page| self.paged.accessed[page]);
        let (spared, mut some): (Vec<usize>, Vec<usize>) =
            idle.into_iter().partition(|&page| spares && self.used[page]);
        self.seen[n] &= !spared.is_empty();
        some.truncate(self.paged.home.len() - room);
        some.into_iter().for_each(|page| self.take(page));
        if !used.is_empty() {
            self.ages.note(block.first);
        }
    }

    fn here(&self, block: Block) -> Vec<usize> {
        let here = |page: &usize| self.paged.is_home(*page) && !self.paged.is_on_probation(*page);
        numbers(block).filter(here).collect()
    }

    /// Once in 20 s for each block, while something leaves.
    fn look_at_the_next(&mut self) {
        if self.much == Much::ByClock || self.leaving == 0 && !self.is_near {
            return;
        }
        let block = self.paged.clock.block(self.look);
        self.look = (self.look + 1) % self.paged.clock.blocks();
        if !self.between[number(block)] {
            self.look_at(block);
        }
    }

    fn look_at(&mut self, block: Block) {
        let n = number(block);
        let seen = std::mem::replace(&mut self.seen[n], true);
        self.looked_at[n] |= seen;
        let here = self.here(block);
        if seen && here.iter().any(|&page| self.paged.accessed[page]) {
            self.ages.note(block.first);
        }
        for page in here {
            let used = std::mem::take(&mut self.paged.accessed[page]);
            self.used[page] = if seen { used } else { self.used[page] };
        }
    }

    /// Ahead of need: all blocks in a round.
    fn look_ahead(&mut self, part: u64) {
        for _ in 0..self.paged.clock.blocks() / part {
            let block = self.paged.clock.ahead();
            self.look_at(block);
            self.between[number(block)] = true;
        }
    }

    /// What the clock says, and if it says nothing, at random.
    fn cold_or_any(&mut self) -> usize {
        let Host { paged, ages, between, seen, looked_at, .. } = self;
        let cold = paged.cold(|hand| match hand {
            Hand::Front(block) => between[number(block)] = true,
            Hand::Back(block, used) => {
                between[number(block)] = false;
                looked_at[number(block)] |= seen[number(block)];
                if used {
                    ages.note(block.first);
                }
            }
        });
        cold.unwrap_or_else(|| paged.any())
    }
}

/// Zipf's law over so many.
struct Law(Vec<f64>);

impl Law {
    fn of(n: usize, s: f64) -> Law {
        let mut sum = 0.0;
        let weight = |rank: usize| {
            sum += (rank as f64).powf(-s);
            sum
        };
        Law((1..=n).map(weight).collect())
    }
    fn draw(&self, numbers: &mut SplitMix64) -> usize {
        let u = numbers.unit() * self.0[self.0.len() - 1];
        self.0.partition_point(|&sum| sum < u).min(self.0.len() - 1)
    }
}

/// Where pages are: runs of so many neighbours, in no order.
fn scattered(n: usize, run: usize, seed: u64) -> Vec<usize> {
    let mut numbers = SplitMix64::seeded(seed);
    let mut runs: Vec<usize> = (0..n.div_ceil(run)).collect();
    for i in (1..runs.len()).rev() {
        runs.swap(i, numbers.below(i as u64 + 1) as usize);
    }
    runs.iter().flat_map(|first| first * run..(first * run + run).min(n)).collect()
}

/// Misses a second in the half minute that begins a quarter of one after each cut, and ten minutes after the last. What is
/// not used was touched before what is, or after it.
fn misses(much: Much, run: usize, before: bool, is_near: bool) -> [f64; 4] {
    let (place, within) = (scattered(PAGES, run, 9), scattered(PROGRAM, 1, 77));
    let (favourite, law) = (Law::of(6, 1.0), Law::of(PROGRAM, 0.8));
    let mut numbers = SplitMix64::seeded(4);
    let (mut host, mut program) = (Host::new(much, 1.5), 0);
    let all = PAGES + 1;
    let (used, unused) = (0..6 * PROGRAM, 6 * PROGRAM..PAGES);
    let (first, then) = if before { (unused, used) } else { (used, unused) };
    first.chain(then).for_each(|page| host.touch(place[page], all));
    let mut work = |host: &mut Host, room: usize, seconds: u32| {
        for _ in 0..2 * seconds {
            if numbers.below(8) == 0 {
                program = favourite.draw(&mut numbers);
            }
            let document = within[law.draw(&mut numbers)];
            for n in 0..ACTION {
                let page = if n < DOCUMENT {
                    (document + n) % PROGRAM
                } else {
                    within[law.draw(&mut numbers)]
                };
                host.touch(place[program * PROGRAM + page], room);
            }
        }
    };
    let mut counted = |host: &mut Host, room: usize, before: u32, seconds: u32| {
        work(host, room, before);
        host.misses = 0;
        work(host, room, seconds);
        f64::from(host.misses) / f64::from(seconds)
    };
    host.is_near = is_near;
    counted(&mut host, all, 50, 5);
    let cut = FACTORS.map(|factor| {
        let room = (PAGES as f64 / factor) as usize;
        host.cut_down(room);
        counted(&mut host, room, 15, 30)
    });
    let room = (PAGES as f64 / FACTORS[2]) as usize;
    [cut[0], cut[1], cut[2], counted(&mut host, room, 600, 300)]
}

#[test]
fn much_leaves_by_age_with_fewer_misses_where_neighbours_are_used_together_and_about_as_many_where_not()
 {
    // Neighbours used together; what is not used touched before the rest; what is used looked for before the first cut.
    let cases = [
        (8, true, true, [0.8, 0.9, 0.9, 1.1]),
        (64, true, true, [0.8, 0.9, 0.9, 1.1]),
        (8, false, true, [0.8, 0.9, 0.9, 1.1]),
        (8, true, false, [1.1; 4]),
        (8, false, false, [1.1; 4]),
        (1, true, true, [1.1; 4]),
    ];
    let mut bad = Vec::new();
    for (run, before, is_near, most) in cases {
        let of = |much| misses(much, run, before, is_near);
        let [clock, age] = [Much::ByClock, Much::ByAge].map(of);
        let name = format!("runs of {run}, others before: {before}, looked at before: {is_near}");
        eprintln!("{name}: by the clock {clock:.1?}, by age {age:.1?}");
        for ((clock, age), most) in clock.into_iter().zip(age).zip(most) {
            if clock <= 0.0 || age > clock * most {
                bad.push(format!("{name}: {age:.1} of {clock:.1}, {most} wanted"));
            }
        }
    }
    assert!(bad.is_empty(), "{bad:?}");
}

/// Misses a second of a keyed store of pages in no order that touches 3,000 a second by Zipf's law, 2, 15 and 35 s after
/// its memory was cut down to 1/1.4, and then to 1/2.4; all was looked at ahead of the first cut, twice, the second time from
/// 26 to 10 s before.
fn misses_of_a_store(much: Much, s: f64) -> [f64; 6] {
    let (place, law) = (scattered(PAGES, 1, 9), Law::of(PAGES, s));
    let mut numbers = SplitMix64::seeded(4);
    let (mut host, all) = (Host::new(much, 0.09), PAGES + 1);
    place.iter().for_each(|&page| host.touch(page, all));
    let mut work = |host: &mut Host, room: usize, seconds: u32| {
        host.misses = 0;
        (0..3_000 * seconds).for_each(|_| host.touch(place[law.draw(&mut numbers)], room));
        f64::from(host.misses) / f64::from(seconds)
    };
    for second in 0..72 {
        if (0..16).contains(&second) || (46..62).contains(&second) {
            host.look_ahead(16);
        }
        work(&mut host, all, 1);
    }
    let mut after = |room: usize| {
        host.cut_down(room);
        [2, 13, 20].map(|seconds| work(&mut host, room, seconds))
    };
    let [first, second] = [1.4, 2.4].map(|factor| after((PAGES as f64 / factor) as usize));
    [first[0], first[1], first[2], second[0], second[1], second[2]]
}

#[test]
fn where_blocks_are_used_in_part_what_was_left_alone_for_two_looks_goes_first() {
    let mut bad = Vec::new();
    for s in [0.6, 0.8, 0.99, 1.1] {
        let [clock, age] = [Much::ByClock, Much::ByAge].map(|much| misses_of_a_store(much, s));
        eprintln!("store, Zipf {s}: by the clock {clock:.0?}, by age {age:.0?}");
        // Where few pages have most of the touches.
        let skewed = [0.85, 0.9, 0.95, 1.2, 1.1, 1.05];
        let most = if s > 0.9 { skewed } else { [1.02; 6] };
        for ((clock, age), most) in clock.into_iter().zip(age).zip(most) {
            if clock <= 0.0 || age > clock * most {
                bad.push(format!("Zipf {s}: {age:.0} of {clock:.0}, {most} wanted"));
            }
        }
    }
    assert!(bad.is_empty(), "{bad:?}");
}
