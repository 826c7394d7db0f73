//! How much memory guests may use: what is configured, or what the host has less its reserve.

use ballast_qemu::process::{host_memory, huge_pages};
use ballast_units::{Bytes, Pages};

use super::{Config, File, size};
use crate::limits::Wrong;

/// The smallest budget that makes sense: below it the thresholds are a few pages.
pub(super) const MIN_BUDGET: Pages = Pages::from_mib(32);

/// The host's.
#[derive(Clone, Copy)]
pub(super) struct HostMemory {
    pub all: Bytes,
    /// Set aside for huge pages.
    pub huge: Bytes,
}

impl HostMemory {
    pub fn now() -> HostMemory {
        HostMemory { all: host_memory().unwrap_or_default(), huge: huge_pages() }
    }

    /// For everything else.
    fn left(self) -> Bytes {
        self.all.saturating_sub(self.huge)
    }
}

/// What is to be said of the `budget` that counts, where huge pages have lowered it, or leave no room for it.
pub fn of_huge_pages(config: &Config, budget: Pages) -> Option<String> {
    let host = HostMemory::now();
    let (huge, left) = (host.huge, host.left());
    let so = if config.budget < config.whole_budget && budget == config.budget {
        format!("the budget is {budget} rather than {}", config.whole_budget)
    } else if huge.0 > 0 && budget > left.pages() {
        format!("that is less than the budget, {budget}")
    } else {
        return None;
    };
    Some(format!(
        "{huge} of the host's memory are set aside for huge pages, which leaves {left}: {so}"
    ))
}

/// A budget that this host can have.
///
/// # Errors
/// Too little for any host, or more than this one has.
pub fn check_budget(budget: Pages) -> Result<(), String> {
    budget_within(budget, host_memory().unwrap_or(Bytes(0)))
}

fn budget_within(budget: Pages, host: Bytes) -> Result<(), String> {
    if budget < MIN_BUDGET {
        return Err(format!("{budget} is below {MIN_BUDGET}"));
    }
    if host.0 > 0 && budget > host.pages() {
        return Err(format!("{budget} is more than the host's memory, {host}"));
    }
    Ok(())
}

/// The budget that is configured, by the host's whole memory, and the one that counts: what is set aside for huge pages changes while
/// guests run, so that it makes no budget, and no min, a mistake. A reserve that is configured may have them in it.
pub(super) fn check(
    file: &File,
    over: Option<Bytes>,
    host: HostMemory,
) -> Result<(Pages, Pages), Wrong> {
    let whole = budget(file, over, host.all)?;
    let left = whole.min(host.left().pages()).max(MIN_BUDGET);
    let counts = match (over.is_some() || file.budget.is_some(), &file.reserve) {
        (true, _) => whole,
        (false, Some(_)) => left,
        (false, None) => budget(file, None, host.left()).unwrap_or(left),
    };
    Ok((whole, counts))
}

/// Machine memory for guests: `over`, what is configured, or the host's less its reserve.
fn budget(file: &File, over: Option<Bytes>, host: Bytes) -> Result<Pages, Wrong> {
    let reserve = size("reserve", &file.reserve)?;
    let mut key = "budget";
    let budget = match over.or(size("budget", &file.budget)?) {
        Some(_) if reserve.is_some() && over.is_none() => {
            return Err(("reserve", "give either budget or reserve, not both".into()));
        }
        Some(budget) => budget,
        // VMMs, page tables, the kernel and everything that is not a guest live in the reserve.
        None => {
            if reserve.is_some() {
                key = "reserve";
            }
            let reserve = reserve.unwrap_or(Bytes((host.0 / 5).max(1 << 30)));
            host.saturating_sub(reserve)
        }
    };
    let budget = budget.pages();
    let of_reserve = |e| format!("of the host's {host} it leaves a budget that cannot be: {e}");
    budget_within(budget, host)
        .map_err(|e| (key, if key == "reserve" { of_reserve(e) } else { e }))
        .map(|()| budget)
}
