//! Other readings of what VMs need, in place of the paper's: each turns what is known of the VMs
//! into demands, and everything after that (targets, plans, guarantees) is the same for all.
//!
//! | kind | what it reads | in place of |
//! | --- | --- | --- |
//! | [`PolicyKind::IdleTax`] | shares, sampled active memory, one tax rate (OSDI'02 s.5.2) | |
//! | [`PolicyKind::GraduatedTax`] | the same, with a tax that rises with idleness ([`graduated`]) | the rate |
//! | [`PolicyKind::MissRatio`] | predicted misses at each allocation ([`miss_ratio`]) | shares and active memory |
//! | [`PolicyKind::Pressure`] | how much guests say they wait for memory ([`pressure`]) | shares |
//!
//! min and max hold under all of them, since [`targets`](crate::targets) sees to that. What was
//! found in comparing them: docs/adr/0015-policies-compared.md.

pub mod graduated;
pub mod miss_ratio;
pub mod pressure;

use std::fmt;
use std::str::FromStr;

use ballast_units::{Pages, VmId};
use serde::{Deserialize, Serialize};

use crate::plan::VmState;
use crate::pools::Pool;
use crate::shares::VmDemand;

pub use miss_ratio::VmMisses;
pub use pressure::VmPressure;

/// Which reading decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyKind {
    /// The paper's.
    #[default]
    IdleTax,
    /// A tax that rises with idleness.
    GraduatedTax,
    /// Memory where it spares most misses.
    MissRatio,
    /// More shares to guests that wait for memory.
    Pressure,
}

/// A word that names no policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no policy '{0}' (there are: idle-tax, graduated-tax, miss-ratio, pressure)")]
pub struct UnknownPolicy(pub String);

impl PolicyKind {
    /// All of them, the default first.
    pub const ALL: [PolicyKind; 4] = [
        PolicyKind::IdleTax,
        PolicyKind::GraduatedTax,
        PolicyKind::MissRatio,
        PolicyKind::Pressure,
    ];

    /// As in configurations: "idle-tax".
    pub const fn name(self) -> &'static str {
        match self {
            PolicyKind::IdleTax => "idle-tax",
            PolicyKind::GraduatedTax => "graduated-tax",
            PolicyKind::MissRatio => "miss-ratio",
            PolicyKind::Pressure => "pressure",
        }
    }

    /// Whether [`Policy::misses`] are of use to it.
    pub const fn wants_misses(self) -> bool {
        matches!(self, PolicyKind::MissRatio)
    }

    /// Whether [`Policy::pressure`] is of use to it.
    pub const fn wants_pressure(self) -> bool {
        matches!(self, PolicyKind::Pressure)
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for PolicyKind {
    type Err = UnknownPolicy;
    fn from_str(s: &str) -> Result<PolicyKind, UnknownPolicy> {
        let found = PolicyKind::ALL.into_iter().find(|kind| kind.name() == s);
        found.ok_or_else(|| UnknownPolicy(s.to_owned()))
    }
}

/// The policy in force, and what is known beside shares and samples. What is missing for a VM is
/// made up for by its sampled active memory; VMs that are not there are passed over.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Policy {
    /// Which reading decides.
    pub kind: PolicyKind,
    /// Predicted misses of VMs.
    pub misses: Vec<VmMisses>,
    /// Memory pressure of VMs.
    pub pressure: Vec<VmPressure>,
}

impl Policy {
    /// The VMs' demands, in their order, as this policy reads them; `available` pages are to be
    /// shared out, to VMs and pools.
    pub fn demands(&self, available: Pages, pools: &[Pool], vms: &[VmState]) -> Vec<VmDemand> {
        let own = vms.iter().map(|vm| vm.demand);
        match self.kind {
            PolicyKind::IdleTax => own.collect(),
            PolicyKind::GraduatedTax => own.map(graduated::read).collect(),
            PolicyKind::MissRatio => {
                let own: Vec<VmDemand> = own.collect();
                let read = miss_ratio::read(available, &own, &self.misses);
                miss_ratio::beside_pools(read, pools, vms)
            }
            PolicyKind::Pressure => {
                let known = by_id(&self.pressure, |p| p.id);
                own.map(|d| pressure::read(d, known.get(&d.id).map(|p| p.some))).collect()
            }
        }
    }

    /// What this policy made of a VM's demand, in words; None if that is the paper's reading.
    pub fn note(&self, own: &VmDemand, read: &VmDemand) -> Option<String> {
        match self.kind {
            PolicyKind::IdleTax => None,
            PolicyKind::GraduatedTax => Some(graduated::note(own, read)),
            PolicyKind::MissRatio => {
                Some(miss_ratio::note(read, self.misses.iter().find(|m| m.id == own.id)))
            }
            PolicyKind::Pressure => {
                let known = self.pressure.iter().find(|p| p.id == own.id);
                Some(pressure::note(own, read, known.map(|p| p.some)))
            }
        }
    }
}

fn by_id<T>(list: &[T], id: impl Fn(&T) -> VmId) -> std::collections::BTreeMap<VmId, &T> {
    list.iter().map(|item| (id(item), item)).collect()
}

#[cfg(test)]
mod tests;
