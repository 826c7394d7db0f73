//! What follows from a look at a VMM for how its VM is managed.

use ballast_api::{Management, Mode};
use ballast_qemu::Verdict;

/// What is known of a VM beside the verdict.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// The pager has its pages.
    pub paged: bool,
    /// Its machine is built: what the look did not find is not there.
    pub is_built: bool,
    pub has_balloon: bool,
    /// `vm run` started it.
    pub started_here: bool,
}

/// What holds of two looks, of which the second one was without QMP, if there was one. It is heard only where the first
/// came to nothing: what QMP told of a device need not be seen in /proc.
pub fn of_both(first: Verdict, second: Option<Verdict>) -> Verdict {
    match (first, second) {
        (Verdict::Unknown(_), Some(second)) => second,
        (first, _) => first,
    }
}

/// None: as before.
pub fn managed(verdict: Verdict, old: &Management, vm: Known) -> Option<Management> {
    let (mode, reason) = match verdict {
        Verdict::Pageable if vm.paged && !vm.is_built => return None,
        Verdict::Pageable if vm.paged => (Mode::Paged, None),
        Verdict::Pageable if vm.has_balloon => {
            // Of a VM that was started here, the reason for which its shim was refused.
            let refused = old.reason.clone().filter(|_| vm.started_here);
            let unshimmed =
                || "started without the shim (LD_PRELOAD=libballast_shim.so)".to_owned();
            (Mode::BalloonOnly, Some(refused.unwrap_or_else(unshimmed)))
        }
        Verdict::Pageable => {
            let why = "started without the shim, and it has no balloon device";
            (Mode::Unmanaged, Some(why.to_owned()))
        }
        Verdict::BalloonOnly(reason) => (Mode::BalloonOnly, Some(reason)),
        // Nothing was found that forbids it: should all VMs stop being paged for one process of the host that
        // cannot be looked at, nothing could be reclaimed from anybody.
        Verdict::Unknown(_) if old.mode == Mode::Paged => return None,
        Verdict::Unmanaged(reason) | Verdict::Unknown(reason) => (Mode::Unmanaged, Some(reason)),
    };
    Some(Management { mode, reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGED: Known =
        Known { paged: true, is_built: true, has_balloon: true, started_here: true };

    fn was(mode: Mode) -> Management {
        let reason = (mode != Mode::Paged).then(|| "before".to_owned());
        Management { mode, reason }
    }

    fn mode(verdict: Verdict, old: Mode, vm: Known) -> Option<Mode> {
        managed(verdict, &was(old), vm).map(|now| now.mode)
    }

    #[test]
    fn what_could_not_be_found_out_leaves_a_paged_vm_paged_and_no_other() {
        let unknown = || Verdict::Unknown("late".into());
        assert_eq!(managed(unknown(), &was(Mode::Paged), PAGED), None);
        for old in [Mode::Unmanaged, Mode::BalloonOnly] {
            let now = managed(unknown(), &was(old), PAGED).unwrap();
            assert_eq!((now.mode, now.reason.as_deref()), (Mode::Unmanaged, Some("late")));
        }
        // What was found does not.
        let found = Verdict::Unmanaged("pinned".into());
        assert_eq!(mode(found, Mode::Paged, PAGED), Some(Mode::Unmanaged));
        let found = Verdict::BalloonOnly("passed".into());
        assert_eq!(mode(found, Mode::Paged, PAGED), Some(Mode::BalloonOnly));
    }

    #[test]
    fn a_look_without_qmp_overrules_none_with_it() {
        let unknown = || Verdict::Unknown("late".into());
        let unmanaged = || Verdict::Unmanaged("scsi-block".into());
        let balloon_only = || Verdict::BalloonOnly("scsi-block".into());
        let seconds = || [None, Some(Verdict::Pageable), Some(unmanaged()), Some(unknown())];
        for found in [unmanaged, balloon_only, || Verdict::Pageable] {
            for second in seconds() {
                assert_eq!(of_both(found(), second), found());
            }
        }
        for second in seconds() {
            assert_eq!(of_both(unknown(), second.clone()), second.unwrap_or_else(unknown));
        }
    }

    #[test]
    fn what_is_fit_is_paged_once_it_is_built_and_else_as_far_as_it_can_be() {
        let fit = |old, vm| managed(Verdict::Pageable, &was(old), vm);
        assert_eq!(fit(Mode::Unmanaged, Known { is_built: false, ..PAGED }), None);
        assert_eq!(fit(Mode::Unmanaged, PAGED), Some(was(Mode::Paged)));
        let unshimmed = Known { paged: false, ..PAGED };
        assert_eq!(fit(Mode::BalloonOnly, unshimmed), Some(was(Mode::BalloonOnly)), "its shim's");
        let stranger = fit(Mode::BalloonOnly, Known { started_here: false, ..unshimmed }).unwrap();
        assert!(stranger.reason.unwrap().contains("without the shim"));
        let bare = fit(Mode::BalloonOnly, Known { has_balloon: false, ..unshimmed }).unwrap();
        assert_eq!(bare.mode, Mode::Unmanaged);
    }
}
