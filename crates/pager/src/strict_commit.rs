//! Whether a mapping that is put over guest memory may leave a hole there.
//!
//! Where `vm.overcommit_memory` is 2, the kernel charges a private mapping that can be written to, whatever
//! `MAP_NORESERVE` says, and refuses it at the commit limit. Before Linux 6.12 it does so after it has unmapped what was
//! there (mm/mmap.c, `mmap_region`): the guest's memory would be gone, and its VMM with it.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::sync::{Mutex, lock};

/// How long an answer is believed: an administrator may change the mode.
const BELIEVED: Duration = Duration::from_secs(1);
/// The first kernel that charges before it unmaps.
const CHARGES_FIRST: (u32, u32) = (6, 12);

/// What is known of this host.
#[derive(Default)]
pub(crate) struct StrictCommit(Mutex<Option<(Instant, bool)>>);

impl StrictCommit {
    /// Whether a private mapping may be refused with what was there before gone.
    pub(crate) fn may_leave_a_hole(&self) -> bool {
        let mut known = lock(&self.0);
        match *known {
            Some((since, may)) if since.elapsed() < BELIEVED => may,
            _ => {
                let may = may_leave_a_hole(Path::new("/proc/sys"));
                *known = Some((Instant::now(), may));
                may
            }
        }
    }
}

/// Where either is not told it is not taken to be so: both are there wherever there is a /proc.
fn may_leave_a_hole(sys: &Path) -> bool {
    let read = |name| std::fs::read_to_string(sys.join(name)).unwrap_or_default();
    let unmaps_first = || version(&read("kernel/osrelease")).is_some_and(|v| v < CHARGES_FIRST);
    read("vm/overcommit_memory").trim() == "2" && unmaps_first()
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
            may_leave_a_hole(root.path())
        };
        for old in ["5.15.0-100-generic\n", "6.1.0-44-amd64\n", "6.11.9\n"] {
            assert_eq!(["0\n", "1\n", "2\n"].map(|mode| may(old, mode)), [false, false, true]);
        }
        for new in ["6.12.0\n", "6.12-rc1\n", "6.18.5-cloud\n", "7.0\n", "10.1.2\n", "odd\n"] {
            assert!(!may(new, "2\n"), "{new}");
        }
        assert!(!may_leave_a_hole(&root.path().join("none")));
    }
}
