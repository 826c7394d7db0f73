//! A bitmap in which words that have a zero are found fast: full ones are passed over 64 at a time. Of the store's
//! pages, and of the pager's slots of swap.

/// Neighbouring zeros: the first, and how many.
pub type Gap = (u64, u64);

/// Bits in words of 64, as many words as were needed so far.
///
/// Invariant (`check`): bit `w` of the summary is set exactly when word `w` is all ones.
#[derive(Clone, Debug, Default)]
pub struct Bitmap {
    words: Vec<u64>,
    /// The summary.
    full: Vec<u64>,
}

impl Bitmap {
    /// So many words, all zero.
    pub fn new(words: usize) -> Bitmap {
        Bitmap { words: vec![0; words], full: vec![0; words.div_ceil(64)] }
    }

    /// All of it, 64 bits a word, the least significant first.
    pub fn words(&self) -> &[u64] {
        &self.words
    }

    /// Whether a bit is one. None beyond the last word is.
    pub fn is_set(&self, bit: u64) -> bool {
        self.words.get((bit / 64) as usize).is_some_and(|word| word >> (bit % 64) & 1 == 1)
    }

    /// Makes a bit one, and the map as long as that takes.
    pub fn set(&mut self, bit: u64) {
        let w = (bit / 64) as usize;
        if w >= self.words.len() {
            self.words.resize(w + 1, 0);
            self.full.resize((w + 1).div_ceil(64), 0);
        }
        self.words[w] |= 1 << (bit % 64);
        if self.words[w] == u64::MAX {
            self.full[w / 64] |= 1 << (w % 64);
        }
    }

    /// Makes a bit zero. The map stays as long as it is: see `trim`.
    pub fn clear(&mut self, bit: u64) {
        let w = (bit / 64) as usize;
        if let Some(word) = self.words.get_mut(w) {
            *word &= !(1 << (bit % 64));
            self.full[w / 64] &= !(1 << (w % 64));
        }
    }

    /// Drops words of zeros at the end.
    pub fn trim(&mut self) {
        while self.words.last() == Some(&0) {
            self.words.pop();
        }
        self.full.truncate(self.words.len().div_ceil(64));
    }

    /// The first word from `word` on that is not all ones.
    pub fn not_full_from(&self, word: usize) -> Option<usize> {
        let mut group = word / 64;
        let mut candidates = !self.full.get(group)? & (u64::MAX << (word % 64));
        loop {
            if candidates != 0 {
                let found = group * 64 + candidates.trailing_zeros() as usize;
                return (found < self.words.len()).then_some(found);
            }
            group += 1;
            candidates = !*self.full.get(group)?;
        }
    }

    /// The first run of `most` zeros below `end`, from word `cursor` on and then from the first, else the longest that was
    /// seen; none only where there is no zero. At most `words` words are looked at, full ones aside, once any zero was seen.
    pub fn gap(&self, cursor: usize, end: u64, most: u64, words: usize) -> Option<Gap> {
        let mut budget = words;
        let words = self.words.len().min(end.div_ceil(64) as usize);
        let cursor = if cursor < words { cursor } else { 0 };
        let mut search = |from, to| self.gap_within((from, to), end, most, &mut budget);
        let first = search(cursor, words);
        if first.is_some_and(|(_, n)| n == most) {
            return first;
        }
        // On past the cursor as far as a run may reach that begins before it.
        let to = (cursor as u64 + most / 64 + 1).min(words as u64) as usize;
        longer(first, search(0, to))
    }

    fn gap_within(
        &self,
        (from, to): (usize, usize),
        end: u64,
        most: u64,
        budget: &mut usize,
    ) -> Option<Gap> {
        let mut best: Option<Gap> = None;
        // A run that reaches into this word: where it began.
        let mut open: Option<u64> = None;
        let mut w = from;
        while w < to {
            let Some(next) = self.not_full_from(w).filter(|next| *next < to) else { break };
            if best.is_some_and(|(_, n)| n == most) || (*budget == 0 && best.is_some()) {
                break;
            }
            *budget = budget.saturating_sub(1);
            if next != w {
                open = None;
            }
            w = next;
            let (word, base) = (self.words[w], w as u64 * 64);
            let end = (base + 64).min(end);
            let mut at = base;
            while at < end {
                let rest = word >> (at - base);
                let free = u64::from(rest.trailing_zeros()).min(end - at);
                if free > 0 {
                    let start = *open.get_or_insert(at);
                    let n = (at + free - start).min(most);
                    if best.is_none_or(|(_, longest)| n > longest) {
                        best = Some((start, n));
                    }
                    at += free;
                }
                if at < end {
                    open = None;
                    at += u64::from((word >> (at - base)).trailing_ones());
                }
            }
            w += 1;
        }
        best
    }

    /// Whether the invariant holds; walks all of it.
    ///
    /// # Errors
    /// What contradicts what, in words.
    pub fn check(&self) -> Result<(), String> {
        if self.full.len() != self.words.len().div_ceil(64) {
            return Err(format!("{} words, {} of the summary", self.words.len(), self.full.len()));
        }
        for w in 0..self.full.len() * 64 {
            let full = self.full[w / 64] >> (w % 64) & 1 == 1;
            let word = self.words.get(w).copied().unwrap_or(0);
            if full != (word == u64::MAX) {
                return Err(format!("summary of word {w} is {full}, word {word:#x}"));
            }
        }
        Ok(())
    }
}

/// The first, if they are equal.
pub(crate) fn longer(a: Option<Gap>, b: Option<Gap>) -> Option<Gap> {
    if b.map_or(0, |(_, n)| n) > a.map_or(0, |(_, n)| n) { b } else { a }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[derive(Clone, Debug)]
    enum Op {
        Set(u64, u64),
        Clear(u64, u64),
        Trim,
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let run = || (0u64..9000, prop_oneof![3 => 1u64..4, 2 => 1u64..400, 1 => 4000u64..6000]);
        let op = prop_oneof![
            4 => run().prop_map(|(first, n)| Op::Set(first, n)),
            4 => run().prop_map(|(first, n)| Op::Clear(first, n)),
            1 => Just(Op::Trim),
        ];
        prop::collection::vec(op, 1..20)
    }

    proptest! {
        /// Against the obvious set of bits.
        #[test]
        fn behaves_as_a_set(words in 0usize..150, ops in ops(), from in 0usize..150) {
            let mut bits = Bitmap::new(words);
            let mut ones = BTreeSet::new();
            for op in ops {
                match op {
                    Op::Set(first, n) => for bit in first..first + n {
                        bits.set(bit);
                        ones.insert(bit);
                    },
                    Op::Clear(first, n) => for bit in first..first + n {
                        bits.clear(bit);
                        ones.remove(&bit);
                    },
                    Op::Trim => {
                        bits.trim();
                        prop_assert_ne!(bits.words().last(), Some(&0));
                    }
                }
                bits.check().map_err(TestCaseError::fail)?;
                let free = (from..bits.words().len()).find(|w| bits.words()[*w] != u64::MAX);
                prop_assert_eq!(bits.not_full_from(from), free);
            }
            let end = bits.words().len() as u64 * 64;
            prop_assert!((0..end + 64).filter(|bit| bits.is_set(*bit)).eq(ones));
        }
    }

    #[test]
    fn the_check_finds_what_contradicts_the_invariant() {
        let damages: [fn(&mut Bitmap); 4] = [
            |bits| bits.full.push(0),
            |bits| bits.full[0] &= !1,
            |bits| bits.full[0] |= 2,
            |bits| bits.full[0] |= 1 << 63,
        ];
        for (i, damage) in damages.iter().enumerate() {
            let mut bits = Bitmap::default();
            (0..66).for_each(|bit| bits.set(bit));
            bits.check().unwrap();
            damage(&mut bits);
            assert!(bits.check().is_err(), "damage {i}");
        }
    }
}
