//! What is kept compressed, and what that costs.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Pages kept compressed, of one VM or of all. Bytes; totals are in bytes of pages and begin with the VM's pager, or
/// with the manager: VMs that ended are in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CompressionView {
    /// Guest memory that is compressed.
    pub compressed: u64,
    /// Guest memory whose pages repeat one number each, which take no machine memory.
    pub filled: u64,
    /// Machine memory that the compressed pages take; part of what is consumed.
    pub cache: u64,
    /// Of that, in slots that hold a page: the rest is waste.
    pub cache_used: u64,
    /// The most that the cache may ever take.
    pub cache_limit: u64,
    /// What it may take now: as much as it is worth, where it is sized by that. 0 of a manager that does not tell.
    #[serde(default)]
    pub cache_limit_now: u64,
    /// Pages that were compressed, or kept as one number.
    pub stored: u64,
    /// Compressed and filled pages that were brought back.
    pub restored: u64,
    /// Compressed pages that went on to swap to make room for others.
    pub written_back: u64,
    /// Pages that did not become small enough.
    pub incompressible: u64,
}

impl std::ops::AddAssign for CompressionView {
    fn add_assign(&mut self, other: CompressionView) {
        self.compressed += other.compressed;
        self.filled += other.filled;
        self.cache += other.cache;
        self.cache_used += other.cache_used;
        self.cache_limit += other.cache_limit;
        self.cache_limit_now += other.cache_limit_now;
        self.stored += other.stored;
        self.restored += other.restored;
        self.written_back += other.written_back;
        self.incompressible += other.incompressible;
    }
}
