//! In which order pages are looked at: a clock of two hands (as the pageout daemon of 4.3BSD had it), over a VM's
//! blocks of neighbouring pages in random order. What the front hand passes is watched; the back hand asks, some way
//! behind, whether it was accessed since. So what leaves has been left alone for as long as the back hand takes from
//! there to here, and a guest's own order of pages is no matter (OSDI'02 s.3.4). Each page is judged by itself; but
//! neighbours are watched, asked about and taken by one call of the kernel for all. Nothing is kept for a page.

use ballast_units::{Pages, Ppn, SplitMix64};

/// Pages of a block. More would gain little, and are seldom left alone together.
pub const BLOCK: u64 = 8;
/// How far ahead the front hand is: this part of a turn. Farther tells more of what is in use, and watches more pages
/// that are.
const LEAD: u64 = 4;
/// The lead at the start, in blocks. It grows by a block with each step of the back hand, for what was watched a moment
/// ago tells little, and watching the quarter of a large guest takes seconds.
const FIRST: u64 = 8;

/// Neighbouring pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The first of them.
    pub first: Ppn,
    /// How many: at least one.
    pub n: u64,
}

impl Block {
    /// In rising order.
    pub fn pages(self) -> impl Iterator<Item = Ppn> {
        (self.first.0..self.first.0 + self.n).map(Ppn)
    }
}

/// The two hands, over the pages of one VM.
#[derive(Clone, Debug)]
pub struct Clock {
    pages: u64,
    front: Hand,
    back: Hand,
    /// Steps of the front hand that the back hand has still to take.
    between: u64,
    lead: u64,
}

impl Clock {
    /// Over `size` pages, at least one. The same order for the same seed.
    pub fn new(size: Pages, seed: u64) -> Clock {
        let hand = Hand::new(size.0.div_ceil(BLOCK), seed);
        let lead = FIRST.min(hand.size);
        Clock { pages: size.0, front: hand.clone(), back: hand, between: 0, lead }
    }

    /// The next pages to be watched; None if the front hand is far enough ahead.
    pub fn front(&mut self) -> Option<Block> {
        (self.between < self.lead).then(|| {
            self.between += 1;
            let number = self.front.step();
            self.block(number)
        })
    }

    /// The next pages to be asked about, which the front hand has passed; None if it has passed no more.
    pub fn back(&mut self) -> Option<Block> {
        self.between = self.between.checked_sub(1)?;
        let most = (self.back.size / LEAD).max(FIRST.min(self.back.size));
        self.lead = (self.lead + 1).min(most);
        let number = self.back.step();
        Some(self.block(number))
    }

    /// How many blocks the front hand may go on.
    pub fn room(&self) -> u64 {
        self.lead.saturating_sub(self.between)
    }

    /// Blocks of all pages.
    pub fn blocks(&self) -> u64 {
        self.back.size
    }

    /// The next pages to be watched while none has to leave: up to a whole turn ahead of the back hand, which is taken
    /// along from there on.
    pub fn ahead(&mut self) -> Block {
        if self.between < self.back.size {
            self.between += 1;
        } else {
            self.back.step();
        }
        let number = self.front.step();
        self.block(number)
    }

    /// Nothing is watched: the back hand is where the front hand is.
    pub fn forget(&mut self) {
        self.back = self.front.clone();
        self.between = 0;
    }

    /// The block of a number below that of all.
    pub fn block(&self, number: u64) -> Block {
        let first = number * BLOCK;
        Block { first: Ppn(first), n: BLOCK.min(self.pages - first) }
    }
}

/// Goes through all blocks, each once a turn, and each turn in another order.
#[derive(Clone, Debug)]
struct Hand {
    size: u64,
    numbers: SplitMix64,
    at: u64,
    order: Order,
}

impl Hand {
    fn new(size: u64, seed: u64) -> Hand {
        let mut numbers = SplitMix64::seeded(seed);
        let order = Order::draw(size, &mut numbers);
        Hand { size, numbers, at: 0, order }
    }

    fn step(&mut self) -> u64 {
        if self.at == self.size {
            self.at = 0;
            self.order = Order::draw(self.size, &mut self.numbers);
        }
        self.at += 1;
        self.order.of(self.at - 1)
    }
}

/// A random permutation of the numbers below `size`: a Feistel network over the next power of four, walked until
/// it comes out below `size` (Black and Rogaway, CT-RSA'02, s.4).
#[derive(Clone, Debug)]
struct Order {
    size: u64,
    half: u32,
    keys: [u64; 4],
}

impl Order {
    fn draw(size: u64, numbers: &mut SplitMix64) -> Order {
        let bits = 64 - size.saturating_sub(1).leading_zeros();
        Order { size, half: bits.div_ceil(2), keys: std::array::from_fn(|_| numbers.draw()) }
    }

    /// `n` is below `size`.
    fn of(&self, n: u64) -> u64 {
        let mut n = n;
        loop {
            n = self.mix(n);
            if n < self.size {
                return n;
            }
        }
    }

    fn mix(&self, n: u64) -> u64 {
        let mask = (1u64 << self.half) - 1;
        let (mut left, mut right) = (n >> self.half, n & mask);
        for key in self.keys {
            let turned = (right ^ key).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (left, right) = (right, left ^ (turned >> 32 & mask));
        }
        left << self.half | right
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn each_turn_passes_everything_once_and_in_another_order() {
        for size in [1, 2, 3, 64, 65, 1000, 4097] {
            let mut hand = Hand::new(size, 7);
            let turn = |hand: &mut Hand| (0..size).map(|_| hand.step()).collect::<Vec<_>>();
            let (first, second) = (turn(&mut hand), turn(&mut hand));
            for turn in [&first, &second] {
                let mut all = turn.clone();
                all.sort_unstable();
                assert_eq!(all, (0..size).collect::<Vec<_>>(), "{size}");
            }
            assert!(size < 64 || first != second, "{size}");
        }
    }

    #[test]
    fn an_order_has_no_steps_in_common() {
        let mut hand = Hand::new(10_000, 3);
        let turn: Vec<u64> = (0..10_000).map(|_| hand.step()).collect();
        let mut steps: Vec<u64> =
            turn.windows(2).map(|w| (w[1] + 10_000 - w[0]) % 10_000).collect();
        steps.sort_unstable();
        steps.dedup();
        // Of 9,999 random ones 1 - 1/e are different.
        assert!((6_000..6_600).contains(&steps.len()), "{}", steps.len());
    }

    #[test]
    fn the_back_hand_follows_the_front_hand_at_a_distance_that_grows() {
        let mut clock = Clock::new(Pages(BLOCK * 10_000), 5);
        let mut passed = std::collections::VecDeque::new();
        let mut most = 0;
        assert_eq!(clock.back(), None);
        for _ in 0..30_000 {
            while let Some(block) = clock.front() {
                passed.push_back(block);
            }
            assert_eq!(clock.room(), 0);
            assert!(passed.len() as u64 >= most.min(2_500));
            most = passed.len() as u64;
            assert_eq!(clock.back(), passed.pop_front());
        }
        assert_eq!(most, 10_000 / LEAD);
    }

    #[test]
    fn a_whole_turn_is_watched_ahead_and_asked_about_in_the_same_order() {
        let mut clock = Clock::new(Pages(BLOCK * 500), 5);
        let mut watched = std::collections::VecDeque::new();
        for round in [500, 1, 730] {
            watched.extend((0..round).map(|_| clock.ahead()));
            assert_eq!((clock.blocks(), clock.room(), clock.front()), (500, 0, None));
            // Never more than a turn: what was watched first is not asked about any more.
            watched.drain(..watched.len().saturating_sub(500));
            for _ in 0..250 {
                assert_eq!(clock.back(), watched.pop_front(), "{round}");
            }
            watched.extend((0..250).map(|_| clock.ahead()));
        }
        // Nearer to the back hand than its lead, it goes on as ever.
        for _ in 0..450 {
            assert_eq!(clock.back(), watched.pop_front());
        }
        assert!(clock.room() > 0 && clock.front().is_some());
        clock.forget();
        assert_eq!(clock.back(), None);
    }

    #[test]
    fn the_blocks_hold_every_page_and_none_beyond_the_last() {
        for size in [1, 7, 8, 9, 20] {
            let mut clock = Clock::new(Pages(size), 5);
            let mut pages: Vec<u64> = std::iter::from_fn(|| clock.front())
                .flat_map(|block| block.pages().map(|ppn| ppn.0).collect::<Vec<_>>())
                .collect();
            pages.sort_unstable();
            assert_eq!(pages, (0..size).collect::<Vec<_>>());
        }
    }
}
