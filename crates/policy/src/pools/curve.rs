//! About how many pages a group holds at which price: the rule of division without its whole pages.
//!
//! With pages that could be divided, a child of S shares holds at the price mu what is charged as
//! mu * S; for a VM that is 1 per active and k per idle page, between its floor and its ceiling. So
//! what a group holds, and what it is charged, are straight lines between few corners. From them
//! follows the going price of any number of pages, close enough that what is left to do is about one
//! page for each child.

use super::tree::Group;
use crate::shares::Claim;

/// The place at a price: pages held, and what they are charged as.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Corner {
    pub price: f64,
    pub pages: f64,
    pub charge: f64,
}

/// A place between two corners.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    at: Corner,
    /// What a page more is charged there.
    step: f64,
}

impl Place {
    /// Pages held there; not whole ones.
    pub fn pages(&self) -> f64 {
        self.at.pages
    }

    /// The price at which as many *whole* pages are held, of children with these shares on average: each
    /// one that is between its bounds holds half a page less than a line says.
    pub fn price_of_whole(&self, mean_shares: f64) -> f64 {
        self.at.price + 0.5 * self.step / mean_shares
    }
}

/// Corners in ascending order, straight lines between them.
#[derive(Clone, Debug, Default)]
pub(super) struct Curve {
    corners: Vec<Corner>,
}

/// A corner of a child as its parent sees it: how much steeper pages and charge grow from there on.
#[derive(Clone, Copy, Debug)]
struct Bend {
    price: f64,
    pages: f64,
    charge: f64,
}

/// Adds up children's curves.
#[derive(Debug, Default)]
pub(super) struct Sum {
    bends: Vec<Bend>,
    pages: f64,
    charge: f64,
}

impl Sum {
    /// Of about so many children.
    pub fn of(children: usize) -> Sum {
        Sum { bends: Vec::with_capacity(3 * children), ..Sum::default() }
    }

    /// A group of `shares` with corners of ascending charge: (pages, charge).
    pub fn add(&mut self, shares: f64, corners: impl IntoIterator<Item = (f64, f64)>) {
        let mut corners = corners.into_iter();
        let Some(mut last) = corners.next() else { return };
        self.pages += last.0;
        self.charge += last.1;
        let mut slope = (0.0, 0.0);
        for next in corners {
            let (from, to) = (last.1 / shares, next.1 / shares);
            if to <= from {
                continue;
            }
            let steeper = ((next.0 - last.0) / (to - from), shares);
            self.bend(from, steeper.0 - slope.0, steeper.1 - slope.1);
            slope = steeper;
            last = next;
        }
        if slope.1 > 0.0 {
            self.bend(last.1 / shares, -slope.0, -slope.1);
        }
    }

    /// A VM: its corners in the same way, and its slopes are known.
    pub fn add_claim(&mut self, claim: &Claim) {
        let [floor, middle, ceil] = claim.corners();
        let (shares, part) = (claim.shares(), 1.0 / claim.shares());
        let least = claim.charge(floor);
        self.pages += floor as f64;
        self.charge += least;
        let (mut slope, mut end) = ((0.0, 0.0), 0.0);
        if middle > floor {
            self.bend(least * part, shares, shares);
            (slope, end) = ((shares, shares), claim.charge(middle) * part);
        }
        if ceil > middle {
            let idle = shares / claim.k();
            let from = claim.charge(middle) * part;
            self.bend(from, idle - slope.0, shares - slope.1);
            (slope, end) = ((idle, shares), claim.charge(ceil) * part);
        }
        if ceil > floor {
            self.bend(end, -slope.0, -slope.1);
        }
    }

    fn bend(&mut self, price: f64, pages: f64, charge: f64) {
        self.bends.push(Bend { price, pages, charge });
    }

    /// The bends' numbers by price, as far as prices can be told apart when their last bits (`mask`) hold
    /// those numbers: words are sorted faster than bends, and what is closer than that is as good as equal.
    fn in_order(&self) -> (Vec<u64>, u64) {
        let mask = u64::MAX.checked_shr((self.bends.len() as u64).leading_zeros()).unwrap_or(0);
        // Prices are not negative, so their bits are in their order.
        let word = |(i, bend): (usize, &Bend)| (bend.price.to_bits() & !mask) | i as u64;
        let mut words: Vec<u64> = self.bends.iter().enumerate().map(word).collect();
        // Stable, because that sort merges what is in order already: the corners of each inner group.
        words.sort();
        (words, mask)
    }

    /// The curve of the whole, between `floor` and `ceil` pages.
    pub fn curve(self, floor: f64, ceil: f64) -> Curve {
        let (words, mask) = self.in_order();
        let bends = words.iter().map(|word| &self.bends[(word & mask) as usize]);
        let first = bends.clone().next().map_or(0.0, |bend| bend.price);
        let mut at = Corner { price: first, pages: self.pages, charge: self.charge };
        let mut corners = Vec::with_capacity(self.bends.len() + 1);
        corners.push(at);
        let (mut pages, mut charge) = (Exact::default(), Exact::default());
        for bend in bends {
            let by = bend.price - at.price;
            if by > 0.0 {
                at = Corner {
                    price: bend.price,
                    pages: at.pages + by * pages.value().max(0.0),
                    charge: at.charge + by * charge.value().max(0.0),
                };
                corners.push(at);
            }
            pages.add(bend.pages);
            charge.add(bend.charge);
        }
        let mut whole = Curve { corners };
        let (low, high) = (whole.at_pages(floor).at, whole.at_pages(ceil).at);
        whole.corners.retain(|c| c.pages > low.pages && c.pages < high.pages);
        whole.corners.insert(0, low);
        whole.corners.push(high);
        whole
    }
}

impl Curve {
    /// Pages and charge of each corner.
    pub fn corners(&self) -> impl Iterator<Item = (f64, f64)> {
        self.corners.iter().map(|c| (c.pages, c.charge))
    }

    /// Where so many pages are held.
    pub fn at_pages(&self, pages: f64) -> Place {
        self.at(pages, |c| c.pages)
    }

    /// Where what is held is charged as so much.
    pub fn at_charge(&self, charge: f64) -> Place {
        self.at(charge, |c| c.charge)
    }

    fn at(&self, value: f64, of: impl Fn(&Corner) -> f64) -> Place {
        const NOWHERE: Corner = Corner { price: 0.0, pages: 0.0, charge: 0.0 };
        let next = self.corners.partition_point(|c| of(c) < value);
        let Some(&b) = self.corners.get(next) else {
            let at = self.corners.last().copied().unwrap_or(NOWHERE);
            return Place { at, step: 0.0 };
        };
        let Some(&a) = next.checked_sub(1).and_then(|i| self.corners.get(i)) else {
            return Place { at: b, step: 0.0 };
        };
        let part = (value - of(&a)) / (of(&b) - of(&a));
        let between = |from: f64, to: f64| from + part * (to - from);
        let at = Corner {
            price: between(a.price, b.price),
            pages: between(a.pages, b.pages),
            charge: between(a.charge, b.charge),
        };
        let pages = b.pages - a.pages;
        Place { at, step: if pages > 0.0 { (b.charge - a.charge) / pages } else { 0.0 } }
    }
}

/// A sum whose rounding errors are kept and added at the end (Neumaier, ZAMM 1974): of slopes that
/// cancel one another, what is left counts.
#[derive(Clone, Copy, Debug, Default)]
struct Exact {
    sum: f64,
    lost: f64,
}

impl Exact {
    fn add(&mut self, value: f64) {
        let sum = self.sum + value;
        self.lost += if self.sum.abs() >= value.abs() {
            (self.sum - sum) + value
        } else {
            (value - sum) + self.sum
        };
        self.sum = sum;
    }

    fn value(self) -> f64 {
        self.sum + self.lost
    }
}

impl Group {
    /// What a price of this group's own, among its siblings, lets it be charged.
    pub(super) fn spend(&self, price: f64) -> f64 {
        price * self.shares
    }
}
