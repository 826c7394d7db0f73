//! Resource pools: nested groups of VMs with shares, a min, a max and, if they are expandable, the
//! right to promise what their parent has left (vSphere's terms: shares, reservation, limit,
//! expandable reservation).
//!
//! A VM is a leaf; the host is the root. Memory is divided from the top: the children of a pool, VMs
//! and pools side by side, bid for its pages with their shares, as VMs of a host do
//! ([`shares`](crate::shares)). What a pool holds is charged as what its VMs hold is: an active page
//! as one, an idle one as k, so
//!
//! ```text
//! rho of a pool = its shares / (sum over its VMs of active + k * idle pages)
//! ```
//!
//! and the next page goes to the child with the largest rho, inside it to its child with the largest,
//! down to a VM. A host without pools is the same thing with one level. The rules of bounds:
//!
//! - A pool holds at least its min, as far as its VMs can use it, and what its children are
//!   guaranteed; and at most its max, but never less than its children's guarantees: min beats max.
//! - A pool's min and max include the overhead memory of its VMs.
//!
//! | module | what is in it |
//! | --- | --- |
//! | `tree` | who is whose child |
//! | `divide` | targets of VMs in pools |
//! | `allocation` | pages divided, exactly |
//! | `curve` | about where the going price lies, so that little is left to do page by page |
//! | [`booking`] | promises: whose min is taken from whom |

use ballast_units::Pages;
use serde::{Deserialize, Serialize};

use crate::shares::TaxRate;

mod allocation;
pub mod booking;
mod curve;
mod divide;
mod tree;

pub(crate) use allocation::{allocate, allocate_pages};
pub use booking::{Books, Lack, Shortage};
pub(crate) use divide::divide_in;
pub use divide::{PoolShare, divide};
pub use tree::Member;
pub(crate) use tree::Tree;

/// Number of a pool on its host.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct PoolId(pub u32);

/// A pool as the operator defines it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pool {
    /// Its number.
    pub id: PoolId,
    /// "prod/db".
    pub name: String,
    /// None: a child of the host. One that is not there counts as None.
    #[serde(default)]
    pub parent: Option<PoolId>,
    /// Against its siblings, VMs and pools. At least 1; 0 counts as 1.
    pub shares: u32,
    /// Reservation: guaranteed to its VMs together, their overhead included.
    #[serde(default)]
    pub min: Pages,
    /// Limit to what its VMs hold together, their overhead included. None: none.
    #[serde(default)]
    pub max: Option<Pages>,
    /// Whether its VMs may be promised more than its min, from what its parent has left.
    #[serde(default)]
    pub expandable: bool,
    /// Tax rate of the VMs below it that have no rate of their own, nor from a nearer pool.
    #[serde(default)]
    pub tax: Option<TaxRate>,
}

/// vSphere's "normal" level of a resource pool: as many shares as a VM of 16 GiB has.
pub const DEFAULT_SHARES: u32 = 163_840;

/// The tax rate that a VM in `pool` inherits: that of the nearest pool that has one.
pub fn tax(pools: &[Pool], pool: Option<PoolId>) -> Option<TaxRate> {
    ancestors(pools, pool).find_map(|i| pools[i].tax)
}

/// The pool and those above it, from the inside out, as indices. Ends in a circle too.
pub(crate) fn ancestors(pools: &[Pool], pool: Option<PoolId>) -> impl Iterator<Item = usize> {
    let find = |id: Option<PoolId>| id.and_then(|id| pools.iter().position(|p| p.id == id));
    std::iter::successors(find(pool), move |&i| find(pools[i].parent)).take(pools.len())
}

#[cfg(test)]
#[path = "pools_tests.rs"]
mod tests;
