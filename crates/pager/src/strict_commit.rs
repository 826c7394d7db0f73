//! Whether a mapping that is put over guest memory may leave a hole there.
//!
//! Where `vm.overcommit_memory` is 2, the kernel charges a private mapping that can be written to, whatever
//! `MAP_NORESERVE` says, and refuses it at the commit limit. Before Linux 6.12 it does so after it has unmapped what was
//! there (mm/mmap.c, `mmap_region`): the guest's memory would be gone, and its VMM with it.

use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How long an answer is believed: an administrator may change the mode.
const BELIEVED: Duration = Duration::from_secs(1);
/// The first kernel that charges before it unmaps.
const CHARGES_FIRST: (u32, u32) = (6, 12);

/// Whether a private mapping may be refused with what was there before gone. Of all VMs of this host alike: each asks over and over.
pub(crate) fn may_leave_a_hole() -> bool {
    // It stays the kernel that it is.
    static UNMAPS_FIRST: OnceLock<bool> = OnceLock::new();
    static STRICT: Mutex<Option<(Instant, bool)>> = Mutex::new(None);
    let sys = Path::new("/proc/sys");
    if !*UNMAPS_FIRST.get_or_init(|| unmaps_first(sys)) {
        return false;
    }
    let mut known = STRICT.lock().unwrap_or_else(PoisonError::into_inner);
    match *known {
        Some((since, strict)) if since.elapsed() < BELIEVED => strict,
        _ => {
            let strict = is_strict(sys);
            *known = Some((Instant::now(), strict));
            strict
        }
    }
}

/// Where it is not told, which it is wherever there is a /proc, it is not taken to be so.
fn unmaps_first(sys: &Path) -> bool {
    version(&read(sys, "kernel/osrelease")).is_some_and(|v| v < CHARGES_FIRST)
}

/// The same.
fn is_strict(sys: &Path) -> bool {
    read(sys, "vm/overcommit_memory").trim() == "2"
}

fn read(sys: &Path, name: &str) -> String {
    std::fs::read_to_string(sys.join(name)).unwrap_or_default()
}

/// Of "6.1.0-44-amd64": 6 and 1.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_unmaps_before_it_charges_may_leave_a_hole_where_it_charges() {
        let root = tempfile::tempdir().unwrap();
        for name in ["kernel", "vm"] {
            std::fs::create_dir(root.path().join(name)).unwrap();
        }
        let may = |release: &str, mode: &str| {
            std::fs::write(root.path().join("kernel/osrelease"), release).unwrap();
            std::fs::write(root.path().join("vm/overcommit_memory"), mode).unwrap();
            unmaps_first(root.path()) && is_strict(root.path())
        };
        for old in ["5.15.0-100-generic\n", "6.1.0-44-amd64\n", "6.11.9\n"] {
            assert_eq!(["0\n", "1\n", "2\n"].map(|mode| may(old, mode)), [false, false, true]);
        }
        for new in ["6.12.0\n", "6.12-rc1\n", "6.18.5-cloud\n", "7.0\n", "10.1.2\n", "odd\n"] {
            assert!(!may(new, "2\n"), "{new}");
        }
        let none = root.path().join("none");
        assert!(!unmaps_first(&none) && !is_strict(&none));
    }
}
