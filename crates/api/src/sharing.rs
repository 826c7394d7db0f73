//! What page sharing saves and costs. The terms are ESX's: *shared* is guest memory that is backed
//! by common pages, *common* the machine pages behind it, *saved* the difference.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Page sharing on the whole host (OSDI'02 s.4). Bytes unless named otherwise; totals begin with
/// the manager.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct HostSharing {
    /// Whether pages are looked for. What was shared before stays so either way.
    pub enabled: bool,
    /// Guest memory that is backed by common pages.
    pub shared: u64,
    /// Machine memory of the common pages.
    pub common: u64,
    /// `shared` less `common`.
    pub saved: u64,
    /// Pages found all zero and dropped, a total. They are not shared and not subject to salts.
    pub zero_dropped: u64,
    /// Private copies of pages that were shared and then written, not yet taken home.
    pub broken: u64,
    /// Shared pages that were written since, a count.
    pub breaks: u64,
    /// The same at present, per second.
    pub breaks_per_s: f64,
    /// Pages looked at, a count.
    pub scanned: u64,
    /// Passes over all pages of a VM, a count.
    pub passes: u64,
    /// Pages looked at per second.
    pub scan_rate: f64,
    /// CPU seconds spent on looking and sharing.
    pub cpu_s: f64,
    /// The same at present, in per cent of one core.
    pub cpu_percent: f64,
    /// The manager's memory for share tables.
    pub metadata: u64,
    /// Mappings of all VMM processes, a count: when they were last counted.
    pub mappings: u64,
}

/// Page sharing of one VM. Bytes unless named otherwise; totals begin with its pager.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct VmSharing {
    /// With whom it shares: "own" (inside itself alone), or "salt:" and 8 hexadecimal digits that are
    /// equal for VMs of one salt and tell nothing of it. Empty for a VM that is not paged.
    pub domain: String,
    /// Guest memory that is backed by common pages.
    pub shared: u64,
    /// `shared` less its part of the common pages: a page that n pages of guests share counts 1/n
    /// for each.
    pub saved: u64,
    /// Private copies of pages that were shared and then written, not yet taken home.
    pub broken: u64,
    /// Shared pages that it wrote since, a count.
    pub breaks: u64,
    /// The same at present, per second.
    pub breaks_per_s: f64,
    /// Pages of it that were looked at, a count.
    pub scanned: u64,
    /// Pages looked at per second.
    pub scan_rate: f64,
    /// CPU seconds spent on it.
    pub cpu_s: f64,
    /// The same at present, in per cent of one core.
    pub cpu_percent: f64,
    /// Mappings of its VMM process, a count, when they were last counted: up to a quarter more may be there. The kernel's limit is vm.max_map_count.
    pub mappings: u64,
    /// What holds sharing back: "mappings: 60000 of 65530, only runs are shared".
    pub note: Option<String>,
}
