//! What follows from a look at a VMM for how its VM is managed.

use std::time::Duration;

use ballast_api::{Management, Mode};
use ballast_qemu::Verdict;

/// So long after its machine is built, or it was taken over, a VM is presumed to be fit that was not looked at yet: one of which
/// that is never found out is not what all others wait for.
pub const PRESUMED: Duration = Duration::from_secs(10);

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
    pub qmp: Heard,
}

impl Known {
    /// Whether not even its balloon is of use. A look without QMP sees no balloon.
    pub fn is_beyond_reach(&self, found: &Verdict) -> bool {
        self.qmp == Heard::Told && matches!(found, Verdict::Unmanaged(_))
    }
}

/// What a look had of QMP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// There is none, or it is out of reach.
    Nobody,
    /// It did not tell all that it was asked.
    InVain,
    Told,
}

/// What was found before, and need not be seen any more.
#[derive(Clone, Debug, Default)]
pub struct Past {
    /// What QMP has told last against paging. It need not be seen without.
    pub objection: Option<Management>,
    /// That another process mapped its RAM: one that was started again (of a vhost-user device) would find what is away by
    /// then as zeros, before the next look finds it.
    pub mapped: Option<String>,
    /// In so many looks another process did.
    pub seen_mapped: u32,
    /// Its VMM gives its RAM to no other process from now on.
    pub is_kept: bool,
    /// Why it has no pager, of a VM that never had one.
    pub refused: Option<String>,
}

/// Of a VM whose RAM is in the pager's hands: nothing is taken from it until a look has found nothing against that.
pub fn unseen(why: &str) -> Management {
    Management { mode: Mode::BalloonOnly, reason: Some(format!("not inspected yet: {why}")) }
}

/// Whether a look that came to nothing since QMP did not answer is taken again without it. A QEMU that waits in a page fault
/// does not, and it waits the longer if nothing is taken from it. What forbids paging is seen in /proc as well.
pub fn is_taken_again(old: Mode, is_inspected: bool) -> bool {
    old == Mode::Paged || !is_inspected
}

/// What holds of two looks, of which the second one was without QMP, if there was one. It is heard only where the first
/// came to nothing: what QMP told of a device need not be seen in /proc.
pub fn of_both(first: Verdict, second: Option<Verdict>) -> Verdict {
    match (first, second) {
        (Verdict::Unknown(_), Some(second)) => second,
        (first, _) => first,
    }
}

/// None: nothing speaks against paging, or that is not known.
pub fn objection_of(verdict: Verdict) -> Option<Management> {
    let (mode, reason) = match verdict {
        Verdict::BalloonOnly(reason) => (Mode::BalloonOnly, reason),
        Verdict::Unmanaged(reason) | Verdict::BalloonUnseen(reason) => (Mode::Unmanaged, reason),
        Verdict::Pageable | Verdict::Unknown(_) => return None,
    };
    Some(Management { mode, reason: Some(reason) })
}

/// None: as before.
pub fn managed(verdict: Verdict, old: &Management, past: &Past, vm: Known) -> Option<Management> {
    let (mode, reason) = match verdict {
        // Neither its RAM nor its balloon is found so.
        _ if !vm.paged && vm.qmp == Heard::Nobody => return None,
        Verdict::Pageable if vm.paged && past.mapped.is_some() => {
            (if vm.has_balloon { Mode::BalloonOnly } else { Mode::Unmanaged }, past.mapped.clone())
        }
        Verdict::Pageable if vm.paged && vm.qmp != Heard::Told && past.objection.is_some() => {
            return past.objection.clone();
        }
        Verdict::Pageable if vm.paged && !vm.is_built => return None,
        Verdict::Pageable if vm.paged => (Mode::Paged, None),
        Verdict::Pageable if vm.has_balloon => {
            // Of a VM that was started here, the reason for which its shim was refused.
            let refused = past.refused.clone().filter(|_| vm.started_here);
            let unshimmed =
                || "started without the shim (LD_PRELOAD=libballast_shim.so)".to_owned();
            (Mode::BalloonOnly, Some(refused.unwrap_or_else(unshimmed)))
        }
        Verdict::Pageable => {
            let why = "started without the shim, and it has no balloon device";
            (Mode::Unmanaged, Some(why.to_owned()))
        }
        Verdict::BalloonOnly(reason) => (Mode::BalloonOnly, Some(reason)),
        // It has the one that it had, whoever is silent for how long.
        Verdict::BalloonUnseen(reason) if vm.has_balloon => (Mode::BalloonOnly, Some(reason)),
        Verdict::BalloonUnseen(reason) => {
            (Mode::Unmanaged, Some(format!("{reason}; and no QMP tells of a balloon device")))
        }
        // Nothing was found that forbids it: should all VMs stop being paged for one process of the host that
        // cannot be looked at, nothing could be reclaimed from anybody.
        // Nor should one be left alone that gives what its balloon can take, and is held to its limits: it would get all
        // that it asks for.
        Verdict::Unknown(_) if old.mode != Mode::Unmanaged => return None,
        Verdict::Unmanaged(reason) | Verdict::Unknown(reason) => (Mode::Unmanaged, Some(reason)),
    };
    Some(Management { mode, reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGED: Known = Known {
        paged: true,
        is_built: true,
        has_balloon: true,
        started_here: true,
        qmp: Heard::Told,
    };

    fn was(mode: Mode) -> Management {
        let reason = (mode != Mode::Paged).then(|| "before".to_owned());
        Management { mode, reason }
    }

    fn refused() -> Past {
        Past { refused: Some("its shim's".to_owned()), ..Past::default() }
    }

    fn mode(verdict: Verdict, old: Mode, vm: Known) -> Option<Mode> {
        managed(verdict, &was(old), &refused(), vm).map(|now| now.mode)
    }

    #[test]
    fn what_could_not_be_found_out_leaves_a_vm_as_it_was() {
        let unknown = || Verdict::Unknown("late".into());
        for vm in [PAGED, Known { paged: false, ..PAGED }, Known { qmp: Heard::InVain, ..PAGED }] {
            assert_eq!(mode(unknown(), Mode::Paged, vm), None);
            assert_eq!(mode(unknown(), Mode::BalloonOnly, vm), None);
            let now = managed(unknown(), &was(Mode::Unmanaged), &refused(), vm).unwrap();
            assert_eq!((now.mode, now.reason.as_deref()), (Mode::Unmanaged, Some("late")));
        }
        // What was found does not.
        let found = Verdict::Unmanaged("pinned".into());
        assert!(PAGED.is_beyond_reach(&found) && !PAGED.is_beyond_reach(&unknown()));
        for qmp in [Heard::InVain, Heard::Nobody] {
            assert!(!Known { qmp, ..PAGED }.is_beyond_reach(&found), "{qmp:?}");
        }
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
    fn who_was_never_found_fit_is_looked_at_without_qmp_too() {
        for old in [Mode::Paged, Mode::BalloonOnly, Mode::Unmanaged] {
            assert!(is_taken_again(old, false), "{old}");
            assert_eq!(is_taken_again(old, true), old == Mode::Paged, "{old}");
        }
    }

    #[test]
    fn what_is_fit_is_paged_once_it_is_built_and_else_as_far_as_it_can_be() {
        let fit = |old, vm| managed(Verdict::Pageable, &was(old), &refused(), vm);
        assert_eq!(fit(Mode::Unmanaged, Known { is_built: false, ..PAGED }), None);
        assert_eq!(fit(Mode::Unmanaged, PAGED), Some(was(Mode::Paged)));
        let unshimmed = Known { paged: false, ..PAGED };
        // Whatever was said of it meanwhile.
        let shims = fit(Mode::Unmanaged, unshimmed).unwrap();
        assert_eq!((shims.mode, shims.reason.as_deref()), (Mode::BalloonOnly, Some("its shim's")));
        let stranger = fit(Mode::BalloonOnly, Known { started_here: false, ..unshimmed }).unwrap();
        assert!(stranger.reason.unwrap().contains("without the shim"));
        let bare = fit(Mode::BalloonOnly, Known { has_balloon: false, ..unshimmed }).unwrap();
        assert_eq!(bare.mode, Mode::Unmanaged);
    }

    #[test]
    fn what_qmp_has_found_is_lifted_by_qmp_alone() {
        let objection = Management { mode: Mode::BalloonOnly, reason: Some("scsi-block".into()) };
        let past = Past { objection: Some(objection.clone()), ..Past::default() };
        let pageable =
            |old, qmp| managed(Verdict::Pageable, &was(old), &past, Known { qmp, ..PAGED });
        for qmp in [Heard::Nobody, Heard::InVain] {
            // Also after a takeover, of which nobody has looked at it yet, and before it is built.
            for old in [Mode::BalloonOnly, Mode::Paged] {
                assert_eq!(pageable(old, qmp), Some(objection.clone()), "{qmp:?}");
            }
            // It may be worse.
            let pinned = Verdict::Unmanaged("pinned".into());
            let now = managed(pinned, &objection, &past, Known { qmp, ..PAGED });
            assert_eq!(now.map(|now| now.mode), Some(Mode::Unmanaged));
        }
        assert_eq!(pageable(Mode::BalloonOnly, Heard::Told), Some(was(Mode::Paged)));
    }

    #[test]
    fn what_another_process_mapped_is_not_paged_when_that_one_is_gone() {
        let past = Past { mapped: Some("a backend".into()), ..Past::default() };
        for qmp in [Heard::Nobody, Heard::InVain, Heard::Told] {
            for old in [Mode::BalloonOnly, Mode::Paged] {
                for (has_balloon, mode) in [(true, Mode::BalloonOnly), (false, Mode::Unmanaged)] {
                    let known = Known { qmp, has_balloon, ..PAGED };
                    let now = managed(Verdict::Pageable, &was(old), &past, known);
                    let mapped = Management { mode, reason: Some("a backend".into()) };
                    assert_eq!(now, Some(mapped), "{qmp:?}");
                }
            }
        }
    }

    #[test]
    fn a_balloon_that_was_there_is_when_nobody_tells_of_it() {
        let found = || Verdict::BalloonUnseen("a disk".into());
        let silent = Known { qmp: Heard::Nobody, ..PAGED };
        for (has_balloon, is) in [(true, Mode::BalloonOnly), (false, Mode::Unmanaged)] {
            for old in [Mode::BalloonOnly, Mode::Paged] {
                assert_eq!(mode(found(), old, Known { has_balloon, ..silent }), Some(is));
            }
        }
    }

    #[test]
    fn of_what_is_not_paged_nothing_is_found_without_qmp() {
        let unpaged = Known { paged: false, qmp: Heard::Nobody, ..PAGED };
        let lost = || Verdict::Unmanaged("its RAM was not found".into());
        assert_eq!(mode(lost(), Mode::BalloonOnly, unpaged), None);
        assert_eq!(mode(Verdict::Pageable, Mode::BalloonOnly, unpaged), None);
        let told = Known { qmp: Heard::Told, ..unpaged };
        assert_eq!(mode(lost(), Mode::BalloonOnly, told), Some(Mode::Unmanaged));
    }
}
