//! What shares, min and max of VMs and pools may be, whoever says so: the configuration, a command, a start (of which
//! `ballast_qemu::check_spec` has found the same before anything was looked up). Rates are `ballast_policy::TaxRate`'s to
//! check, names `ballast_units`'.

use ballast_units::Pages;

/// A key, and what is wrong with its value.
pub type Wrong = (&'static str, String);

/// Shares of a VM or a pool: at least 1.
///
/// # Errors
/// They are none.
pub fn shares(shares: u32) -> Result<u32, Wrong> {
    if shares == 0 { Err(("shares", "0 is not at least 1".into())) } else { Ok(shares) }
}

/// What a VM or a pool may have at most: at least a page.
///
/// # Errors
/// It is none.
pub fn max(max: Pages) -> Result<Pages, Wrong> {
    if max.is_zero() { Err(("max", "below one page".into())) } else { Ok(max) }
}

/// What is guaranteed to a VM is at most what it is limited to.
///
/// # Errors
/// It is more.
pub fn min_and_max(min: Pages, max: Pages) -> Result<(), Wrong> {
    if min > max { Err(("min", format!("{min} is above max, {max}"))) } else { Ok(()) }
}

/// In one line.
pub fn line((key, what): Wrong) -> String {
    format!("{key}: {what}")
}
