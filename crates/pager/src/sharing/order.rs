//! In which order a VM's pages are looked at. Neighbours are looked at together, in extents: what
//! is equal often is so in runs, and runs take one mapping where pages take many.

use ballast_units::{Pages, Ppn, SplitMix64};

/// Pages of an extent.
pub const EXTENT: u64 = 64;

/// How a pass goes through a VM's extents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// As OSDI'02 s.4.3: at random, each extent once a pass.
    #[default]
    Random,
    /// From the first to the last.
    Sequential,
}

/// A pass over the extents of a VM, and the next, for ever.
#[derive(Clone, Debug)]
pub struct Walk {
    order: Order,
    extents: u64,
    at: u64,
    /// Random: extent i of the pass is `(offset + i * stride) mod size`, for the smallest power of two
    /// `size` that holds all; odd strides reach each number once.
    stride: u64,
    offset: u64,
    random: SplitMix64,
}

impl Walk {
    /// `seed` is of the orders at random: each pass has another.
    pub fn new(len: Pages, order: Order, seed: u64) -> Walk {
        let extents = len.0.div_ceil(EXTENT);
        let random = SplitMix64::seeded(seed);
        let mut walk = Walk { order, extents, at: 0, stride: 1, offset: 0, random };
        walk.begin();
        walk
    }

    fn begin(&mut self) {
        self.at = 0;
        if self.order == Order::Random {
            self.stride = self.random.draw() | 1;
            self.offset = self.random.draw();
        }
    }

    /// The first page of the next extent; None when a pass is over, and then from the beginning.
    pub fn next_extent(&mut self) -> Option<Ppn> {
        let size = self.extents.next_power_of_two();
        while self.at < size {
            let i = self.at;
            self.at += 1;
            let extent = match self.order {
                Order::Sequential => i,
                Order::Random => self.offset.wrapping_add(i.wrapping_mul(self.stride)) & (size - 1),
            };
            if extent < self.extents {
                return Some(Ppn(extent * EXTENT));
            }
        }
        self.begin();
        None
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_pass_reaches_each_extent_once_in_an_order_of_its_own() {
        for pages in [1, 63, 64, 65, 1000, 6400, 65536] {
            let mut walk = Walk::new(Pages(pages), Order::Random, 42);
            let mut passes = BTreeSet::new();
            for _ in 0..4 {
                let pass: Vec<u64> =
                    std::iter::from_fn(|| walk.next_extent()).map(|p| p.0 / EXTENT).collect();
                let all: BTreeSet<u64> = pass.iter().copied().collect();
                assert_eq!(pass.len() as u64, pages.div_ceil(EXTENT));
                assert_eq!(all, (0..pages.div_ceil(EXTENT)).collect());
                passes.insert(pass);
            }
            assert!(pages < 1000 || passes.len() == 4, "{pages} pages: a pass was repeated");
        }
        let mut walk = Walk::new(Pages(200), Order::Sequential, 1);
        let pass: Vec<u64> = std::iter::from_fn(|| walk.next_extent()).map(|p| p.0).collect();
        assert_eq!(pass, [0, 64, 128, 192]);
    }
}
