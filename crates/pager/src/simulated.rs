//! A guest's pages as its reclaim thread sees them, for tests of what leaves: what is spared, the clock, probation.
//! Numbers alone, without memory or threads.

use std::collections::VecDeque;

use ballast_units::{Pages, Ppn};

use crate::clock::{Block, Clock};
use crate::replacement::{Random, Replacement};

pub(crate) struct Simulated {
    pub random: Random,
    pub clock: Clock,
    /// Pages in memory, and where in that each is.
    pub home: Vec<usize>,
    at: Vec<Option<usize>>,
    /// Since they were watched.
    pub accessed: Vec<bool>,
    /// Came back soon, and are spared.
    pub missed: Vec<bool>,
    cold: Vec<usize>,
    /// Pages on probation: those that are not watched yet, and the others.
    fresh: VecDeque<usize>,
    watched: VecDeque<usize>,
    on_probation: Vec<bool>,
}

/// What a hand of the clock came to.
pub(crate) enum Hand {
    Front(Block),
    /// And whether any of its pages was used in between.
    Back(Block, bool),
}

pub(crate) fn numbers(block: Block) -> impl Iterator<Item = usize> {
    block.pages().map(Ppn::index)
}

impl Simulated {
    pub fn new(pages: usize) -> Simulated {
        Simulated {
            random: Random::seeded(11),
            clock: Clock::new(Pages(pages as u64), 11),
            home: Vec::new(),
            at: vec![None; pages],
            accessed: vec![false; pages],
            missed: vec![false; pages],
            cold: Vec::new(),
            fresh: VecDeque::new(),
            watched: VecDeque::new(),
            on_probation: vec![false; pages],
        }
    }

    pub fn is_home(&self, page: usize) -> bool {
        self.at[page].is_some()
    }

    pub fn is_on_probation(&self, page: usize) -> bool {
        self.on_probation[page]
    }

    pub fn come(&mut self, page: usize) {
        self.at[page] = Some(self.home.len());
        self.home.push(page);
    }

    /// Whether it was there.
    pub fn leave(&mut self, page: usize) -> bool {
        let Some(place) = self.at[page].take() else { return false };
        self.home.swap_remove(place);
        if let Some(&moved) = self.home.get(place) {
            self.at[moved] = Some(place);
        }
        true
    }

    pub fn put_on_probation(&mut self, page: usize) {
        self.on_probation[page] = true;
        self.fresh.push_back(page);
    }

    /// See `service::trial`.
    pub fn fails_probation(&mut self) -> Option<usize> {
        let most = self.home.len() / 16;
        while self.fresh.len() > most / 2 {
            let page = self.fresh.pop_front()?;
            self.accessed[page] = false;
            self.watched.push_back(page);
        }
        while self.fresh.len() + self.watched.len() > most {
            let page = self.watched.pop_front()?;
            self.on_probation[page] = false;
            if self.is_home(page) && !self.accessed[page] {
                return Some(page);
            }
        }
        None
    }

    fn is_spared(&mut self, page: usize) -> bool {
        let spared = self.missed[page];
        self.missed[page] = spared && !self.random.last_pass();
        spared
    }

    /// See `service::cold`. `passed` is told what the hands come to.
    pub fn cold(&mut self, mut passed: impl FnMut(Hand)) -> Option<usize> {
        let mut asked = 0;
        while asked < 128 {
            if let Some(page) = self.cold.pop() {
                return Some(page);
            }
            while let Some(block) = self.clock.front() {
                for page in numbers(block) {
                    if !self.on_probation[page] && !self.is_spared(page) {
                        self.accessed[page] = false;
                    }
                }
                passed(Hand::Front(block));
            }
            let block = self.clock.back()?;
            let here = |page: &usize| self.is_home(*page) && !self.on_probation[*page];
            let mut here: Vec<usize> = numbers(block).filter(here).collect();
            let all = here.len();
            here.retain(|&page| !self.accessed[page]);
            asked += all;
            passed(Hand::Back(block, here.len() < all));
            self.cold = here;
        }
        None
    }

    /// At random, but for what is spared.
    pub fn any(&mut self) -> usize {
        loop {
            let number = self.random.propose(Pages(self.home.len() as u64)).index();
            let page = self.home[number];
            if !self.is_spared(page) {
                return page;
            }
        }
    }
}
