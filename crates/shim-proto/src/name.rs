//! Names of VMs on the wire.

use std::fmt;

use ballast_units::{VM_NAME_RULE, good_vm_name};

/// A VM's name, which [`good_vm_name`] is true of.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VmName(String);

/// The text is not a VM's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{VM_NAME_RULE}")]
pub struct BadVmName;

impl VmName {
    /// # Errors
    /// When the name is not a good one.
    pub fn new(name: &str) -> Result<VmName, BadVmName> {
        if good_vm_name(name) { Ok(VmName(name.to_owned())) } else { Err(BadVmName) }
    }

    /// The name itself.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for VmName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule_is_that_of_all_vms() {
        assert_eq!(VmName::new("db.example_2").unwrap().as_str(), "db.example_2");
        for bad in ["", "_x", "-x", "a/b"] {
            assert_eq!(VmName::new(bad), Err(BadVmName), "{bad:?}");
        }
        assert_eq!(crate::MAX_NAME, ballast_units::LONGEST_VM_NAME);
    }
}
