//! Targets: min-funding revocation with the idle memory tax (OSDI'02 s.5.1, 5.2).
//!
//! A VM with S shares that is allocated P pages, of which the fraction f is active, has the
//! adjusted shares-per-page ratio
//!
//! ```text
//! rho = S / (P * (f + k * (1 - f))),  k = 1 / (1 - tau)
//! ```
//!
//! Pages go to the VM with the largest rho and are revoked from the one with the smallest. With A
//! active pages, f = min(1, A/P), so the price paid is `min(P, A) + k * max(0, P - A)`: it grows
//! with every page, by 1 for an active and by k for an idle one. So every page a VM could hold has
//! a fixed price per share, and the outcome of granting and revoking page by page, whatever its
//! order, is that the cheapest pages are held. [`targets`] computes exactly that outcome.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;

use ballast_units::{Pages, VmId};
use serde::{Deserialize, Serialize};

use crate::state::Thresholds;

mod going_price;
use going_price::going_price;

/// The shares of a VM of `size` that nobody says: vSphere's "normal" level, 10 for each MiB, at least 1.
pub fn default_shares(size: Pages) -> u32 {
    u32::try_from((size.0 >> 8).saturating_mul(10)).unwrap_or(u32::MAX).max(1)
}

/// The idle memory tax: the largest part of its idle pages that a VM may lose. `0 <= tau < 1`.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct TaxRate(f64);

/// A number that is not a tax rate.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("tax rate {0} is out of range: it must be at least 0 and below 1")]
pub struct TaxRateError(pub f64);

impl TaxRate {
    /// No tax: pure proportional shares.
    pub const NONE: TaxRate = TaxRate(0.0);

    /// # Errors
    /// When `tau` is not a number, below 0, or not below 1.
    pub fn new(tau: f64) -> Result<TaxRate, TaxRateError> {
        if (0.0..1.0).contains(&tau) { Ok(TaxRate(tau)) } else { Err(TaxRateError(tau)) }
    }

    /// The rate, 0 <= rate < 1.
    pub const fn get(self) -> f64 {
        self.0
    }

    /// What an idle page costs when an active one costs 1: 1 / (1 - tau), to the nearest 2^-20.
    /// So rounded, prices of VMs up to 16 TiB keep their order exactly.
    pub fn k(self) -> f64 {
        const STEPS: f64 = (1 << 20) as f64;
        (STEPS / (1.0 - self.0)).round() / STEPS
    }
}

impl Default for TaxRate {
    /// 75% (OSDI'02 s.5.2).
    fn default() -> TaxRate {
        TaxRate(0.75)
    }
}

impl TryFrom<f64> for TaxRate {
    type Error = TaxRateError;
    fn try_from(tau: f64) -> Result<TaxRate, TaxRateError> {
        TaxRate::new(tau)
    }
}

impl From<TaxRate> for f64 {
    fn from(tax: TaxRate) -> f64 {
        tax.0
    }
}

impl fmt::Display for TaxRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = self.0 * 100.0;
        if percent == percent.round() {
            write!(f, "{percent:.0}%")
        } else {
            write!(f, "{percent:.2}%")
        }
    }
}

/// What decides a VM's target.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmDemand {
    /// Of which VM.
    pub id: VmId,
    /// At least 1; 0 counts as 1.
    pub shares: u32,
    /// Guaranteed. A min above `max` counts as `max`.
    pub min: Pages,
    /// Configured size, or a limit below it.
    pub max: Pages,
    /// On its idle memory.
    pub tax: TaxRate,
    /// Estimate of the active memory; more than the VM holds counts as all it holds.
    pub active: Pages,
}

impl VmDemand {
    /// The adjusted shares-per-page ratio of an allocation of `pages`. Holding nothing counts as
    /// holding one page, so the ratio is always finite.
    pub fn rho(&self, pages: Pages) -> f64 {
        1.0 / Claim::new(self, Pages(0), self.max).price(pages.0.max(1))
    }

    fn floor(&self) -> Pages {
        self.min.min(self.max)
    }
}

/// What set a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Bound {
    /// Shares and activity alone would give less than the guarantee.
    Min,
    /// There is memory enough for all of it.
    Max,
    /// Shares, and activity through the tax.
    Shares,
}

/// The outcome for one VM.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entitlement {
    /// Of which VM.
    pub id: VmId,
    /// What it is entitled to.
    pub target: Pages,
    /// The ratio at the target. Equal, to within a page, over all VMs bound by shares.
    pub rho: f64,
    /// What decided.
    pub bound: Bound,
}

/// The pages that [`targets`] are to share out: the budget less overhead memory, less the free
/// memory that reclamation aims for.
pub fn available(budget: Pages, overhead: Pages, thresholds: &Thresholds) -> Pages {
    budget.saturating_sub(overhead).saturating_sub(thresholds.goal())
}

/// Shares out `available` pages by min-funding revocation. The answer is in the order of `vms`.
///
/// `min <= target <= max` always holds, and the targets sum up to exactly the smaller of
/// `available` and the sum of all max, unless the guarantees alone exceed `available`: then
/// everyone gets min, and the sum is too large (admission control prevents that, but a budget
/// lowered below its promises leads here). Equal prices are settled in order of VM id.
pub fn targets(available: Pages, vms: &[VmDemand]) -> Vec<Entitlement> {
    let claims = Claim::of_vms(vms);
    let (held, dearest) = allocate(available, &claims);
    claims.iter().zip(held).map(|(claim, target)| claim.entitlement(target, dearest)).collect()
}

/// What decided an allocation of `pages` between `floor` and `ceil`, whose last page has `price`, where
/// the dearest page that anyone was granted has the price `dearest` (None: all have all they can use).
pub(crate) fn bound(pages: u64, floor: u64, ceil: u64, price: f64, dearest: Option<f64>) -> Bound {
    if pages > 0 && pages == floor && dearest.is_some_and(|dearest| price > dearest) {
        Bound::Min
    } else if pages == ceil {
        Bound::Max
    } else {
        Bound::Shares
    }
}

/// One bidder for pages: it holds `floor` in any case and takes at most `ceil`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    id: VmId,
    shares: f64,
    active: u64,
    k: f64,
    floor: u64,
    ceil: u64,
}

impl Claim {
    pub(crate) fn new(vm: &VmDemand, floor: Pages, ceil: Pages) -> Claim {
        Claim::taxed(vm, vm.tax.k(), floor, ceil)
    }

    fn taxed(vm: &VmDemand, k: f64, floor: Pages, ceil: Pages) -> Claim {
        Claim {
            id: vm.id,
            shares: f64::from(vm.shares.max(1)),
            active: vm.active.0,
            k,
            floor: floor.0.min(ceil.0),
            ceil: ceil.0,
        }
    }

    /// Of many: demands with the floor and the ceiling of each. Most have one tax rate, whose k is
    /// found once.
    pub(crate) fn all<'a>(
        demands: impl Iterator<Item = (&'a VmDemand, Pages, Pages)>,
    ) -> Vec<Claim> {
        let mut known = (TaxRate::NONE, TaxRate::NONE.k());
        demands
            .map(|(vm, floor, ceil)| {
                if vm.tax != known.0 {
                    known = (vm.tax, vm.tax.k());
                }
                Claim::taxed(vm, known.1, floor, ceil)
            })
            .collect()
    }

    /// Between their min and their max.
    pub(crate) fn of_vms(vms: &[VmDemand]) -> Vec<Claim> {
        Claim::all(vms.iter().map(|vm| (vm, vm.floor(), vm.max)))
    }

    #[cfg(test)]
    pub(crate) fn of_vm(vm: &VmDemand) -> Claim {
        Claim::new(vm, vm.floor(), vm.max)
    }

    /// What an allocation of `target` pages means, where the dearest page that anyone was granted has
    /// the price `dearest`.
    pub(crate) fn entitlement(&self, target: u64, dearest: Option<f64>) -> Entitlement {
        let price = self.price(target);
        Entitlement {
            id: self.id,
            target: Pages(target),
            rho: 1.0 / if target == 0 { self.price(1) } else { price },
            bound: bound(target, self.floor, self.ceil, price, dearest),
        }
    }

    pub(crate) fn id(&self) -> VmId {
        self.id
    }
    pub(crate) fn shares(&self) -> f64 {
        self.shares
    }
    pub(crate) fn floor(&self) -> u64 {
        self.floor
    }
    pub(crate) fn ceil(&self) -> u64 {
        self.ceil
    }

    /// What holding `pages` pages is charged as: active ones, and idle ones at k each. Exact up to
    /// 32 TiB, and so are sums.
    pub(crate) fn charge(&self, pages: u64) -> f64 {
        let idle = pages.saturating_sub(self.active);
        pages.min(self.active) as f64 + self.k * idle as f64
    }

    /// 1/rho of holding `pages` pages, which is what the last of them costs to keep.
    pub(crate) fn price(&self, pages: u64) -> f64 {
        self.charge(pages) / self.shares
    }

    /// What bounds its pages: floor, active pages between floor and ceiling, ceiling.
    pub(crate) fn corners(&self) -> [u64; 3] {
        [self.floor, self.active.clamp(self.floor, self.ceil), self.ceil]
    }
    pub(crate) fn k(&self) -> f64 {
        self.k
    }

    /// About how many pages have a price of at most `price`; may be off by one.
    fn about(&self, price: f64) -> u64 {
        let spend = price * self.shares;
        let active = self.active as f64;
        // k is at least 1, so the lesser one is the one that counts.
        let pages = spend.min(active + (spend - active) / self.k);
        (pages as u64).clamp(self.floor, self.ceil)
    }

    /// Exactly how many have.
    pub(crate) fn held(&self, price: f64) -> u64 {
        let pages = self.about(price);
        if self.takes(pages, price) || self.sheds(pages, price) {
            self.search(pages, price)
        } else {
            pages
        }
    }

    fn takes(&self, pages: u64, price: f64) -> bool {
        pages < self.ceil && self.price(pages + 1) <= price
    }

    fn sheds(&self, pages: u64, price: f64) -> bool {
        pages > self.floor && self.price(pages) > price
    }

    /// Rarely needed, and kept out of the way: unrolled in place it would cost all the others.
    #[cold]
    #[inline(never)]
    fn search(&self, mut pages: u64, price: f64) -> u64 {
        while self.takes(pages, price) {
            pages += 1;
        }
        while self.sheds(pages, price) {
            pages -= 1;
        }
        pages
    }
}

/// Min-funding revocation: shares `amount` pages out among `claims`; returns what each holds and
/// the price of the dearest page that was granted beyond the floors (None if all have their ceiling).
///
/// The going price is found so closely ([`going_price`]) that few pages are left over or missing;
/// those are granted or revoked literally, one by one. The pages held are the cheapest ones in the order
/// of (price, id), so how near the price came does not matter.
pub(crate) fn allocate(amount: Pages, claims: &[Claim]) -> (Vec<u64>, Option<f64>) {
    let sum = |pages: &mut dyn Iterator<Item = u64>| pages.map(u128::from).sum::<u128>();
    let floors = sum(&mut claims.iter().map(|c| c.floor));
    let amount = u128::from(amount.0).max(floors);
    if sum(&mut claims.iter().map(|c| c.ceil)) <= amount {
        return (claims.iter().map(|c| c.ceil).collect(), None);
    }
    if floors == amount {
        return (claims.iter().map(|c| c.floor).collect(), Some(0.0));
    }
    let price = going_price(amount, claims);
    let mut held: Vec<u64> = claims.iter().map(|c| c.held(price)).collect();
    let total = held.iter().copied().map(u128::from).sum::<u128>();
    if total > amount {
        let bid = |i: usize, pages: u64| {
            (pages > claims[i].floor).then(|| (Price(claims[i].price(pages)), claims[i].id, i))
        };
        let mut bids: BinaryHeap<_> =
            held.iter().enumerate().filter_map(|(i, &pages)| bid(i, pages)).collect();
        for _ in 0..total - amount {
            if let Some((_, _, i)) = bids.pop() {
                held[i] -= 1;
                bids.extend(bid(i, held[i]));
            }
        }
    } else {
        let bid = |i: usize, pages: u64| {
            (pages < claims[i].ceil)
                .then(|| Reverse((Price(claims[i].price(pages + 1)), claims[i].id, i)))
        };
        let mut bids: BinaryHeap<_> =
            held.iter().enumerate().filter_map(|(i, &pages)| bid(i, pages)).collect();
        for _ in 0..amount - total {
            if let Some(Reverse((_, _, i))) = bids.pop() {
                held[i] += 1;
                bids.extend(bid(i, held[i]));
            }
        }
    }
    let granted = claims.iter().zip(&held).filter(|(c, pages)| **pages > c.floor);
    let dearest = granted.map(|(c, &pages)| c.price(pages)).fold(0.0, f64::max);
    (held, Some(dearest))
}

/// Prices are positive and finite, so their total order is the usual one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Price(pub f64);

impl Eq for Price {}

impl Ord for Price {
    fn cmp(&self, other: &Price) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Price {
    fn partial_cmp(&self, other: &Price) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
#[path = "shares_tests.rs"]
mod tests;
