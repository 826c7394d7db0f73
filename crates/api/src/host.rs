//! The host: what is shown of it, what can be changed, and how its manager is ended.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{CompressionView, HostSharing, JournalView};

/// Reclamation state of the host (OSDI'02 s.6.3), from plenty to need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum StateName {
    /// Enough is free: nothing is taken.
    High,
    /// Balloons reclaim.
    Soft,
    /// Paging reclaims beside the balloons.
    Hard,
    /// Besides, VMs above their targets wait for memory.
    Low,
}

/// One threshold of free machine memory, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Threshold {
    /// The state that it is the edge of.
    pub state: StateName,
    /// Falling below it, the host leaves `state` for the next lower one.
    pub lower: u64,
    /// Rising to it, the host comes back to `state`.
    pub upper: u64,
}

/// How a swap location fares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum LocationState {
    /// It is written to.
    Good,
    /// Too many writes failed: nothing is written there, but for a try now and then after eight in a row.
    Failed,
    /// The folder is not there, or cannot be looked at.
    Missing,
}

/// A folder of swap files. Sizes in bytes; the errors are counts since the manager was started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SwapLocation {
    /// The folder.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Higher ones are used first.
    pub priority: i32,
    /// How it fares.
    pub state: LocationState,
    /// Files that VMs have there.
    pub reserved: u64,
    /// Of that, slots in use, those included that could not be written.
    pub used: u64,
    /// Room for more files.
    pub free: u64,
    /// Writes that failed.
    pub write_errors: u64,
    /// Reads that failed or brought something else than was written.
    pub read_errors: u64,
}

/// The file system of the run folder. Sizes in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RunDirView {
    /// The folder.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// All of it, whoever uses it.
    pub size: u64,
    /// What of it is free.
    pub free: u64,
    /// What follows from there being little left, if there is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// A NUMA node. Sizes in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeView {
    /// The kernel's number of it.
    pub id: u32,
    /// Its memory.
    pub size: u64,
    /// What of it is free, or page cache.
    pub free: u64,
    /// Its own reclamation state.
    pub state: StateName,
    /// What is missing to the free memory that is aimed for there.
    pub missing: u64,
    /// VMs that can have memory of this node alone, a count.
    pub bound: u32,
}

/// A VMM with the shim that was refused at its start, and runs on without Ballast. Sizes in bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RefusedView {
    /// Its process.
    pub pid: u32,
    /// What its VM was to be called; None if its shim speaks another version of the protocol.
    pub name: Option<String>,
    /// What its shim said of its RAM; None as above.
    pub size: Option<u64>,
    /// Resident memory of the process, its guest's with it: beside the budget.
    pub resident: u64,
    /// Why it was refused.
    pub why: String,
    /// Seconds since then.
    pub for_s: f64,
}

/// The host as the manager sees it. Sizes in bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostView {
    /// Of the manager: "0.1.0".
    pub version: String,
    /// Process of the manager.
    pub pid: u32,
    /// Seconds since the manager was started.
    pub uptime_s: f64,
    /// Machine memory: what guests, tiers and declared overhead may use together.
    pub budget: u64,
    /// Budget not handed out.
    pub free: u64,
    /// Guest pages backed by machine pages.
    pub consumed: u64,
    /// What the manager takes beside the pages of every VM (35 bytes a page and 2.2 MiB, 2 MiB more where it is to have large
    /// pages), what was declared, VMMs' own memory where it is booked, what is reserved for starts, and the 2 MiB of zeros that guests read where they have nothing.
    pub overhead: u64,
    /// The most that was ever handed out at one instant.
    pub peak_used: u64,
    /// Machine memory in use now: by the kernel's count the blocks of RAM files, compressed tiers and stores of common
    /// pages; as booked the copies of pages that were shared, overhead, the zeros that are mapped, and all of VMs that
    /// are not paged or wait to be taken over.
    pub measured_used: u64,
    /// The highest `measured_used` seen (sampled up to ten times a second).
    pub measured_peak: u64,
    /// Reclamation state.
    pub state: StateName,
    /// Where the states begin and end, from high to low.
    pub thresholds: Vec<Threshold>,
    /// Sum of configured sizes / budget.
    pub overcommit: f64,
    /// The highest `overcommit` so far.
    pub overcommit_peak: f64,
    /// Default tax rate, 0 <= tax < 1.
    pub tax: f64,
    /// VMs that are known, a count.
    pub vms: u32,
    /// Among them, those that a former manager left and that are not taken over yet. What is booked for them is in
    /// `consumed` and `overhead`.
    #[serde(default)]
    pub waiting: u32,
    /// VMMs that were refused at their start and run without Ballast, in no other figure: the last 64. Known since
    /// this ballastd was started.
    #[serde(default)]
    pub refused: Vec<RefusedView>,
    /// Swap space reserved for VMs, bytes.
    pub swap_reserved: u64,
    /// Swap space that holds pages now, bytes.
    pub swap_used: u64,
    /// Where swap files are, those of the highest priority first.
    #[serde(default)]
    pub swap_locations: Vec<SwapLocation>,
    /// Room for what is kept of VMs in the run folder; None where its file system does not tell.
    #[serde(default)]
    pub run_dir: Option<RunDirView>,
    /// NUMA nodes, where there are several.
    #[serde(default)]
    pub nodes: Vec<NodeView>,
    /// What the VM that was started or taken over last runs on: "kvm", or "tcg" with the reason: "tcg (no /dev/kvm)".
    /// Before the first: "not probed yet".
    pub accel: String,
    /// CPU seconds that the manager has used.
    pub manager_cpu_s: f64,
    /// Seconds for which idle processors were kept from sleeping since the manager was started, while page after page was
    /// waited for, or given up (`pager.wakeful`). None of it is anybody's CPU time.
    #[serde(default)]
    pub awake_s: f64,
    /// Memory of the manager process itself (RSS).
    pub manager_rss: u64,
    /// Whether the host may not swap the manager out.
    #[serde(default)]
    pub manager_locked: bool,
    /// Page sharing.
    #[serde(default)]
    pub sharing: HostSharing,
    /// Sums over the VMs that run.
    #[serde(default)]
    pub compression: CompressionView,
    /// The journal of decisions.
    #[serde(default)]
    pub journal: JournalView,
    /// Running totals.
    pub counters: HostCounters,
}

/// Running totals over all VMs, those that ended included. Bytes unless named otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostCounters {
    /// Given up by guests, to the balloon or by free-page reporting, as far as it was in their memory: not what was
    /// compressed or swapped by then.
    pub ballooned: u64,
    /// Written to swap files.
    pub swapped_out: u64,
    /// Read back from swap files.
    pub swapped_in: u64,
    /// Pages found all zero, and dropped: when evicted, in search of equal pages, or when large pages were broken.
    pub zero_dropped: u64,
    /// Faults served, a count.
    pub faults: u64,
    /// Allocations that had to wait for memory, a count.
    pub waits: u64,
    /// Allocations that waited because the host was low and the VM above its target, a count.
    pub blocks: u64,
}

/// Changes of host-wide parameters; absent fields stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HostChange {
    /// Default tax rate, 0 <= tax < 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tax: Option<f64>,
    /// Take back the rate that was set: what is configured counts again. Not with `tax`.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub no_tax: bool,
    /// New budget in bytes, from 32 MiB to the host's memory. Refused below what is promised to running VMs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<u64>,
    /// Take back the budget that was set: what is configured counts again. Not with `budget`.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub no_budget: bool,
}

/// How to end the manager.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ShutdownRequest {
    /// Stop the VMs too. Without it the manager refuses while paged VMs run, for they would pause
    /// at their next fault until a manager comes back.
    #[serde(default)]
    pub stop_vms: bool,
    /// Leave the VMs to the manager that asks, which takes them over at once. Not with `stop_vms`.
    #[serde(default, skip_serializing_if = "crate::is_false")]
    pub leave_vms: bool,
    /// With `leave_vms`: milliseconds since the host's boot (CLOCK_BOOTTIME) from which on nobody waits
    /// for this any more, and it must not be done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before_ms: Option<u64>,
}
