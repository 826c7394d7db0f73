//! The order in which slots were taken: a list through them, so that any can leave it.

/// No slot.
const NONE: u32 = u32::MAX;

/// Quarters in the order they were added; each at most once.
#[derive(Clone, Debug)]
pub struct Oldest {
    /// By quarter: the one before and the one after it.
    links: Vec<[u32; 2]>,
    first: u32,
    last: u32,
}

impl Default for Oldest {
    fn default() -> Oldest {
        Oldest { links: Vec::new(), first: NONE, last: NONE }
    }
}

impl Oldest {
    /// The one that came before all others; None if there is none.
    pub fn first(&self) -> Option<u32> {
        (self.first != NONE).then_some(self.first)
    }

    /// The one that came next after `quarter`, which is in the list; None if it is the last.
    pub fn after(&self, quarter: u32) -> Option<u32> {
        let next = self.links.get(quarter as usize)?[1];
        (next != NONE).then_some(next)
    }

    /// The one that came before `quarter`, which is in the list; None if it is the first.
    pub fn before(&self, quarter: u32) -> Option<u32> {
        let before = self.links.get(quarter as usize)?[0];
        (before != NONE).then_some(before)
    }

    /// Puts `quarter` last. It must not be in the list.
    pub fn push(&mut self, quarter: u32) {
        if self.links.len() <= quarter as usize {
            self.links.resize(quarter as usize + 1, [NONE; 2]);
        }
        self.links[quarter as usize] = [self.last, NONE];
        match self.last {
            NONE => self.first = quarter,
            last => self.links[last as usize][1] = quarter,
        }
        self.last = quarter;
    }

    /// Takes `quarter` out. It must be in the list.
    pub fn remove(&mut self, quarter: u32) {
        let [before, after] = self.links[quarter as usize];
        match before {
            NONE => self.first = after,
            before => self.links[before as usize][1] = after,
        }
        match after {
            NONE => self.last = before,
            after => self.links[after as usize][0] = before,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    proptest! {
        #[test]
        fn behaves_as_a_queue_from_which_any_can_leave(
            ops in prop::collection::vec((0u32..40, any::<bool>()), 1..300),
        ) {
            let (mut list, mut queue) = (Oldest::default(), VecDeque::new());
            for (quarter, add) in ops {
                let at = queue.iter().position(|&q| q == quarter);
                match (add, at) {
                    (true, None) => {
                        list.push(quarter);
                        queue.push_back(quarter);
                    }
                    (false, Some(at)) => {
                        list.remove(quarter);
                        queue.remove(at);
                    }
                    _ => {}
                }
                let (mut next, mut last) = (list.first(), None);
                for &quarter in &queue {
                    prop_assert_eq!(next, Some(quarter));
                    prop_assert_eq!(list.before(quarter), last);
                    last = next;
                    next = list.after(quarter);
                }
                prop_assert_eq!(next, None);
            }
        }
    }
}
