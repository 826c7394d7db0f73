//! Names of VMs and pools. Those of VMs are parts of paths, of command lines and of URLs as they are.

/// The most characters of a VM's name.
pub const LONGEST_VM_NAME: usize = 64;

/// The rule in words, for errors.
pub const VM_NAME_RULE: &str =
    "a VM's name is 1 to 64 of A-Z a-z 0-9 . _ - and begins with a letter or digit";

/// Whether VMs may have this name: 1 to 64 of `[A-Za-z0-9._-]`, beginning with a letter or digit.
pub fn good_vm_name(name: &str) -> bool {
    let bytes = name.as_bytes();
    bytes.len() <= LONGEST_VM_NAME
        && bytes.first().is_some_and(u8::is_ascii_alphanumeric)
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(b))
}

/// The most bytes of a pool's name.
pub const LONGEST_POOL_NAME: usize = 255;

/// Whether pools may have this name: what VMs may, or several such joined by slashes, from the outside in.
pub fn good_pool_name(name: &str) -> bool {
    name.len() <= LONGEST_POOL_NAME && name.split('/').all(good_vm_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_safe_in_paths_and_command_lines() {
        for good in ["a", "web-1", "db.example_2", "0", "A_", &"n".repeat(LONGEST_VM_NAME)] {
            assert!(good_vm_name(good), "{good}");
        }
        let long = "n".repeat(LONGEST_VM_NAME + 1);
        for bad in ["", ".", "..", "-x", "_x", ".x", "a/b", "a b", "a\0", "a\n", "\u{e9}", &long] {
            assert!(!good_vm_name(bad), "{bad:?}");
        }
    }

    #[test]
    fn names_of_pools_are_names_joined_by_slashes() {
        let long = ["n"; 128].join("/");
        for good in ["prod", "prod/db", "a/b/c.d", &long] {
            assert!(good_pool_name(good), "{good}");
        }
        for bad in ["", "/", "prod/", "/db", "prod//db", "prod/-", "a b", &format!("{long}n")] {
            assert!(!good_pool_name(bad), "{bad:?}");
        }
    }
}
