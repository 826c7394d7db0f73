//! What is recorded of one turn of the policy loop.

use std::collections::HashMap;

use ballast_policy::Decision;
use ballast_units::VmId;
use serde::{Deserialize, Serialize};

use crate::outcome::Outcome;

/// When a turn was, and what it cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// The manager's count of its turns, from 1. A gap is turns that were not recorded.
    pub n: u64,
    /// Milliseconds since 1970, by the host's clock, which can be set.
    pub at_ms: u64,
    /// Milliseconds since the manager was started, by a clock that cannot.
    pub up_ms: u64,
    /// Microseconds that deciding took.
    pub took_us: u64,
}

/// One recorded turn.
#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// Which turn, and when.
    pub moment: Moment,
    /// What was decided, and from what.
    pub decision: Decision,
    /// What was asked by earlier turns and came true, or was dropped, at this one.
    pub outcomes: Vec<Outcome>,
}

/// Names of VMs by the numbers that decisions have for them.
pub type Names = HashMap<VmId, String>;

/// What stands before a decision in its frame. Fields are written with their names, so that later
/// versions can add some.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Head {
    pub moment: Moment,
    /// Of VMs that no earlier frame of the segment named.
    #[serde(default)]
    pub names: Vec<(VmId, String)>,
    #[serde(default)]
    pub outcomes: Vec<Outcome>,
}

/// A value as the journal writes it: MessagePack with the names of fields. Two values are equal bit
/// for bit, floating-point numbers included, exactly when their bytes are.
///
/// # Errors
/// When a value cannot be written so, which none of the journal's types are.
pub fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, rmp_serde::encode::Error> {
    rmp_serde::to_vec_named(value)
}

/// The name of a VM, or its number where none was recorded.
pub fn name_of(names: &Names, id: VmId) -> String {
    names.get(&id).cloned().unwrap_or_else(|| id.to_string())
}
