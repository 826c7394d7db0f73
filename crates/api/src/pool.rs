//! Resource pools, and what a new reading of the configuration brought.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A resource pool: a group of VMs, and of pools, that divides what it gets among them. Sizes in bytes;
/// those of a pool include the overhead memory of its VMs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PoolView {
    /// "prod/db": db, inside prod.
    pub name: String,
    /// Against VMs and pools beside it; at least 1.
    pub shares: u32,
    /// Reservation.
    pub min: u64,
    /// Limit; None: none.
    pub max: Option<u64>,
    /// Whether its VMs may be promised more than its min, from what its parent has left.
    pub expandable: bool,
    /// Its own tax rate; None: its parent's.
    pub tax: Option<f64>,
    /// Whether it is defined in the configuration file; else by a command.
    pub configured: bool,
    /// VMs directly in it.
    pub vms: Vec<String>,
    /// Pools directly in it.
    pub pools: Vec<String>,
    /// Promised to its VMs and pools.
    pub reserved: u64,
    /// What of its own it may still promise; None: whatever its parent has.
    pub unreserved: Option<u64>,
    /// What its VMs are entitled to, or have and cannot give, without overhead, bytes.
    pub target: u64,
    /// What its VMs use, without overhead, bytes.
    pub consumed: u64,
}

/// Defines a pool, or changes it; absent fields stay, or are the defaults: 163840 shares, no min, no max,
/// expandable, its parent's tax.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolChange {
    /// At least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shares: Option<u32>,
    /// Reservation, bytes, rounded up to whole pages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min: Option<u64>,
    /// Limit, bytes, rounded down to whole pages, at least one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<u64>,
    /// Take the limit away. Not with `max`.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub no_max: bool,
    /// Whether its VMs may be promised more than its min.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expandable: Option<bool>,
    /// 0 <= tax < 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tax: Option<f64>,
    /// Take its own tax rate away. Not with `tax`.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub no_tax: bool,
}

/// What a new reading of the configuration brought.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConfigReloaded {
    /// The file that was read.
    pub file: String,
    /// What is different from before, in words: "tax 0.75 -> 0.5", "VM db-1: min 0 B -> 1 GiB".
    pub changes: Vec<String>,
}
