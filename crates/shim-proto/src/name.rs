//! Names of VMs on the wire.

use std::fmt;

use crate::MAX_NAME;

/// A VM's name: 1 to 64 of `[A-Za-z0-9._-]`, not starting with a dot or a dash, so that it can be
/// part of a path and of a command line as it is.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VmName(String);

/// The text is not a VM's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a VM's name is 1 to 64 of A-Z a-z 0-9 . _ - and starts with a letter, a digit or _")]
pub struct BadVmName;

impl VmName {
    pub fn new(name: &str) -> Result<VmName, BadVmName> {
        let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        let bytes = name.as_bytes();
        let good_start = bytes.first().is_some_and(|b| !matches!(b, b'.' | b'-'));
        if good_start && bytes.len() <= MAX_NAME && bytes.iter().all(|b| allowed(*b)) {
            Ok(VmName(name.to_owned()))
        } else {
            Err(BadVmName)
        }
    }

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
    fn names_are_safe_in_paths_and_command_lines() {
        for good in ["a", "web-1", "db.example_2", "_x", &"n".repeat(64)] {
            assert!(VmName::new(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "-x", "a/b", "a b", "a\0", "\u{e9}", &"n".repeat(65)] {
            assert_eq!(VmName::new(bad), Err(BadVmName), "{bad:?}");
        }
    }
}
