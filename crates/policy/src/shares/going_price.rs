//! The going price: at which about so many pages are held.
//!
//! With pages that could be divided, a claim of S shares would hold, at the price p, as many as are charged
//! as p * S: the lesser of two straight lines, between its floor and its ceiling. Newton's method on the
//! sum of such lines ends after few steps; a bracket keeps it from running away, and halving the bracket
//! (by the bits of its ends, whatever their scale) makes it end in any case.

use super::Claim;

/// What a claim would hold: `min(price * busy, price * idle + more)`, within its bounds.
#[derive(Clone, Copy, Debug)]
struct Line {
    busy: f64,
    idle: f64,
    more: f64,
    floor: f64,
    ceil: f64,
}

impl Line {
    fn of(claim: &Claim) -> Line {
        let part = 1.0 / claim.k;
        Line {
            busy: claim.shares,
            idle: claim.shares * part,
            more: claim.active as f64 * (1.0 - part),
            floor: claim.floor as f64,
            ceil: claim.ceil as f64,
        }
    }

    /// Pages at a price, and how fast they grow with it. Whole pages are held: half a page less than
    /// the line says, on average.
    fn at(&self, price: f64) -> (f64, f64) {
        let (busy, idle) = (price * self.busy, price * self.idle + self.more);
        let (pages, slope) = if busy < idle { (busy, self.busy) } else { (idle, self.idle) };
        let between = pages > self.floor && pages < self.ceil;
        let pages = pages.min(self.ceil);
        let whole = (pages - (self.ceil - pages).min(0.5)).max(self.floor);
        (whole, if between { slope } else { 0.0 })
    }
}

/// So many steps of Newton's method are tried before every other one halves the bracket.
const EAGER: u32 = 12;

/// A price at which about `amount` pages are held: more than all floors, fewer than all ceilings.
pub(super) fn going_price(amount: u128, claims: &[Claim]) -> f64 {
    let lines: Vec<Line> = claims.iter().map(Line::of).collect();
    let amount = amount as f64;
    let near = 1.0 + claims.len() as f64 / 256.0;
    let highest = claims.iter().map(|c| c.price(c.ceil)).fold(0.0, f64::max);
    let (mut low, mut high) = (0.0f64, highest);
    // If all were between their bounds and used what they have.
    let mut price = (amount / lines.iter().map(|line| line.busy).sum::<f64>()).clamp(low, high);
    for step in 0.. {
        let (mut pages, mut slope) = (0.0, 0.0);
        for line in &lines {
            let at = line.at(price);
            pages += at.0;
            slope += at.1;
        }
        let missing = amount - pages;
        if missing.abs() < near {
            return price;
        }
        if missing > 0.0 {
            low = price;
        } else {
            high = price;
        }
        if high.to_bits() - low.to_bits() <= 1 {
            return low;
        }
        let next = price + missing / slope;
        let halve = step > EAGER && step % 2 == 0;
        price = if next > low && next < high && !halve {
            next
        } else {
            f64::from_bits(low.to_bits().midpoint(high.to_bits()))
        };
    }
    low
}
