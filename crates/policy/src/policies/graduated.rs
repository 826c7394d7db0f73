//! A tax that rises with idleness: none for a VM that uses all it may have, the operator's rate for
//! one that leaves half of it idle, more than that for one that leaves all of it.
//!
//! With k = 1 / (1 - tau), the price of an idle page is k^(2x) for a VM that leaves the fraction x
//! of its max idle. x is of max and not of what the VM holds, so that taking pages away does not
//! change the rate at which they are taken.

use crate::shares::{TaxRate, VmDemand};

/// The part of its max that a VM leaves idle.
fn idleness(vm: &VmDemand) -> f64 {
    let max = vm.max.0.max(1);
    1.0 - vm.active.0.min(max) as f64 / max as f64
}

/// The demand with the VM's own rate of tax.
pub fn read(vm: VmDemand) -> VmDemand {
    let rate = 1.0 - (1.0 - vm.tax.get()).powf(2.0 * idleness(&vm));
    // In a thousandth part: the rate is then the same on every machine, and rarely changes.
    let rate = (rate * 1_000.0).round() / 1_000.0;
    VmDemand { tax: TaxRate::new(rate.clamp(0.0, 0.999)).unwrap_or(vm.tax), ..vm }
}

/// What it made of a demand, in words.
pub fn note(own: &VmDemand, read: &VmDemand) -> String {
    format!(
        "The policy is graduated-tax: {:.0}% of its max is idle, so its rate is {} in place of {}",
        100.0 * idleness(own),
        read.tax,
        own.tax
    )
}
