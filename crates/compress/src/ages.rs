//! Which slots are the youngest of all, and which the oldest: how soon pages of either are wanted back says
//! whether more of them had better stay at home, or more of them here.

use crate::oldest::Oldest;

/// The youngest and the oldest are this part of all.
const PART: u64 = 8;
/// No quarter.
const NONE: u32 = u32::MAX;

/// Where a slot stands among all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Age {
    /// Among the eighth that came last.
    Young,
    /// Between the two.
    #[default]
    Middle,
    /// Among the eighth that is next to leave. It was young once, however few there are.
    Old,
}

/// Slots in the order they came, by their first quarter.
#[derive(Clone, Debug)]
pub struct Ages {
    order: Oldest,
    /// By quarter.
    age: Vec<Age>,
    /// The first of the young, and the last of the old.
    young_from: u32,
    old_to: u32,
    len: u64,
    young: u64,
    old: u64,
}

impl Default for Ages {
    fn default() -> Ages {
        Ages {
            order: Oldest::default(),
            age: Vec::new(),
            young_from: NONE,
            old_to: NONE,
            len: 0,
            young: 0,
            old: 0,
        }
    }
}

impl Ages {
    /// The one that came before all others; None if there is none.
    pub fn first(&self) -> Option<u32> {
        self.order.first()
    }
    /// The one that came next after `quarter`, which is there.
    pub fn after(&self, quarter: u32) -> Option<u32> {
        self.order.after(quarter)
    }
    /// Of one that is there.
    pub fn of(&self, quarter: u32) -> Age {
        self.age.get(quarter as usize).copied().unwrap_or_default()
    }
    /// How many are young, and how many old.
    pub fn young_and_old(&self) -> (u64, u64) {
        (self.young, self.old)
    }

    /// Puts `quarter` last. It must not be there.
    pub fn push(&mut self, quarter: u32) {
        self.order.push(quarter);
        if self.age.len() <= quarter as usize {
            self.age.resize(quarter as usize + 1, Age::Middle);
        }
        self.age[quarter as usize] = Age::Young;
        if self.young_from == NONE {
            self.young_from = quarter;
        }
        self.len += 1;
        self.young += 1;
        while self.young > self.part() {
            self.age[self.young_from as usize] = Age::Middle;
            self.young_from = self.order.after(self.young_from).unwrap_or(NONE);
            self.young -= 1;
        }
        self.fill_old();
    }

    /// Takes `quarter` out. It must be there.
    pub fn remove(&mut self, quarter: u32) {
        match self.of(quarter) {
            Age::Young => self.young -= 1,
            Age::Middle => {}
            Age::Old => self.old -= 1,
        }
        if self.young_from == quarter {
            self.young_from = self.order.after(quarter).unwrap_or(NONE);
        }
        if self.old_to == quarter {
            self.old_to = self.order.before(quarter).unwrap_or(NONE);
        }
        self.order.remove(quarter);
        self.len -= 1;
        self.fill_old();
    }

    fn part(&self) -> u64 {
        (self.len / PART).max(1)
    }

    /// The next of the middle ones become old, as far as that many may be.
    fn fill_old(&mut self) {
        while self.old < self.part() {
            let next = match self.old_to {
                NONE => self.order.first(),
                last => self.order.after(last),
            };
            let Some(next) = next.filter(|&q| self.of(q) == Age::Middle) else { return };
            self.age[next as usize] = Age::Old;
            self.old_to = next;
            self.old += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_first_to_come_are_old_and_the_last_are_young(
            ops in prop::collection::vec((0u32..200, 0u8..3), 1..600),
        ) {
            let (mut ages, mut there) = (Ages::default(), Vec::<u32>::new());
            for (quarter, what) in ops {
                let at = there.iter().position(|&q| q == quarter);
                match (what, at) {
                    (0 | 1, None) => {
                        ages.push(quarter);
                        there.push(quarter);
                    }
                    (2, Some(at)) => {
                        ages.remove(quarter);
                        there.remove(at);
                    }
                    _ => {}
                }
                let of = |age| there.iter().filter(|&&q| ages.of(q) == age).count() as u64;
                let (young, old) = ages.young_and_old();
                prop_assert_eq!((young, old), (of(Age::Young), of(Age::Old)));
                let rank = |q: &u32| match ages.of(*q) {
                    Age::Old => 0,
                    Age::Middle => 1,
                    Age::Young => 2,
                };
                prop_assert!(there.is_sorted_by_key(rank));
                if there.len() > 2 {
                    prop_assert!(old >= 1, "one is next to leave");
                }
            }
        }
    }

    #[test]
    fn an_eighth_is_young_and_an_eighth_old() {
        let mut ages = Ages::default();
        for quarter in 0..800 {
            ages.push(quarter);
        }
        assert_eq!(ages.young_and_old(), (100, 100));
        assert_eq!(
            [99, 100, 699, 700].map(|q| ages.of(q)),
            [Age::Old, Age::Middle, Age::Middle, Age::Young]
        );
        for quarter in 0..80 {
            ages.remove(quarter);
        }
        assert_eq!(ages.young_and_old(), (100, 90), "others have become old");
    }
}
