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

/// What is to be said of a budget, of which nothing is in use yet, on a host of which so much is available.
pub fn of_what_is_available(budget: Pages, available: Option<Bytes>) -> Option<String> {
    let available = available.filter(|available| budget.bytes() > *available)?;
    Some(format!(
        "the budget is {budget}, and only {available} of the host's memory are available: what runs beside Ballast's guests is not \
         in it; say what that leaves (budget, --budget)"
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

/// As it is configured.
pub(super) struct Budget {
    /// By the host's whole memory.
    pub whole: Pages,
    /// The one in force.
    pub counts: Pages,
    pub of: BudgetOf,
}

/// Where a budget is from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BudgetOf {
    /// It is a figure of the file or of the command line.
    Figure,
    /// What that reserve leaves; None: the default one.
    Reserve(Option<Bytes>),
}

/// What is set aside for huge pages changes while guests run, so that it makes no budget, and no min, a mistake. A configured reserve that is larger than they are has them in it.
pub(super) fn check(file: &File, over: Option<Bytes>, host: HostMemory) -> Result<Budget, Wrong> {
    let whole = budget(file, over, host.all)?;
    let reserve = size("reserve", &file.reserve)?;
    let of = match over.is_some() || file.budget.is_some() {
        true => BudgetOf::Figure,
        false => BudgetOf::Reserve(reserve),
    };
    if of == BudgetOf::Figure || reserve.is_some_and(|reserve| reserve > host.huge) {
        return Ok(Budget { whole, counts: whole, of });
    }
    let left = host.left().saturating_sub(reserve.unwrap_or(default_reserve(host.left())));
    Ok(Budget { whole, counts: left.pages().clamp(MIN_BUDGET, whole), of })
}

fn default_reserve(host: Bytes) -> Bytes {
    Bytes((host.0 / 5).max(1 << 30))
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
            host.saturating_sub(reserve.unwrap_or(default_reserve(host)))
        }
    };
    let budget = budget.pages();
    let of_reserve = |e| format!("of the host's {host} it leaves a budget that cannot be: {e}");
    budget_within(budget, host)
        .map_err(|e| (key, if key == "reserve" { of_reserve(e) } else { e }))
        .map(|()| budget)
}
