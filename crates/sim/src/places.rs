//! Where the pages of one class are.

/// Counts of pages by place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// In machine memory.
    pub resident: u64,
    /// In the compressed tier.
    pub compressed: u64,
    /// In swap.
    pub swapped: u64,
}

impl Places {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.resident + self.compressed + self.swapped
    }

    /// Compressed or swapped: the next access faults.
    pub fn gone(&self) -> u64 {
        self.compressed + self.swapped
    }

    /// Takes `n` pages out, or all, from each place in proportion to what is there.
    pub fn take(&mut self, n: u64) -> Places {
        let total = self.total();
        let n = n.min(total);
        let part = |of: u64| portion(of, n, total);
        let mut taken = Places {
            resident: part(self.resident),
            compressed: part(self.compressed),
            swapped: part(self.swapped),
        };
        // Rounded down three times: what is missing comes from where something is left.
        let mut rest = n - taken.total();
        for (have, taken) in [
            (self.resident, &mut taken.resident),
            (self.compressed, &mut taken.compressed),
            (self.swapped, &mut taken.swapped),
        ] {
            let more = rest.min(have - *taken);
            *taken += more;
            rest -= more;
        }
        self.resident -= taken.resident;
        self.compressed -= taken.compressed;
        self.swapped -= taken.swapped;
        taken
    }

    /// Adds pages, each to its place.
    pub fn put(&mut self, more: Places) {
        self.resident += more.resident;
        self.compressed += more.compressed;
        self.swapped += more.swapped;
    }
}

/// `whole * part / of`, rounded down; 0 of nothing.
pub fn portion(whole: u64, part: u64, of: u64) -> u64 {
    // Mostly the product fits into a word, whose division is many times as fast.
    match (of, whole.checked_mul(part)) {
        (0, _) => 0,
        (_, Some(product)) => product / of,
        (_, None) => (u128::from(whole) * u128::from(part) / u128::from(of)) as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None, ..ProptestConfig::default()
        })]
        #[test]
        fn what_is_taken_was_there(r in 0u64..1000, c in 0u64..1000, s in 0u64..1000, n in 0u64..4000) {
            let mut left = Places { resident: r, compressed: c, swapped: s };
            let taken = left.take(n);
            prop_assert_eq!(taken.total(), n.min(r + c + s));
            left.put(taken);
            prop_assert_eq!(left, Places { resident: r, compressed: c, swapped: s });
        }
    }
}
