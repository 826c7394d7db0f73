//! A VM that is paged keeps its RAM to itself: whoever else maps it reads what is away as zeros. So its VMM is asked, before
//! the first page is taken, to give the RAM file to no other process from then on (ADR 36).

use std::sync::Arc;
use std::time::Duration;

use ballast_api::{Management, Mode};
use ballast_pager::mappings::Kept;
use ballast_qemu::Verdict;

use crate::looks::{Known, Past, managed};
use crate::past;
use crate::vm::Vm;

/// For what else is asked of its shim just then.
const PATIENCE: Duration = Duration::from_secs(2);

/// As [`managed`]; and one that is paged, or is to be, keeps its RAM to itself, or is not.
pub async fn managed_and_kept(
    vm: &Vm,
    verdict: Verdict,
    old: &Management,
    past: &mut Past,
    known: Known,
) -> Option<Management> {
    let found = managed(verdict.clone(), old, past, known);
    let is_paged = match &found {
        Some(found) => found.mode == Mode::Paged,
        None => vm.may_be_paged(),
    };
    if !is_paged {
        return found;
    }
    let kept = ask(vm, past).await;
    once_asked(kept, found, vm, old, (past, known))
}

/// One that is paged, or is to be, was `found` so, and its VMM has answered, which is noted first.
fn once_asked(
    kept: Kept,
    found: Option<Management>,
    vm: &Vm,
    old: &Management,
    (past, known): (&mut Past, Known),
) -> Option<Management> {
    past::note_kept(vm, past, kept);
    match kept {
        Kept::Kept | Kept::Unable => found,
        Kept::Sent => managed(Verdict::Pageable, old, past, known),
        Kept::Unanswered => {
            let why = "its shim does not say whether its RAM was given to another process";
            tracing::warn!(vm = vm.name, "{why}; it is looked at again");
            // As whatever else could not be found out.
            managed(Verdict::Unknown(why.to_owned()), old, past, known)
        }
    }
}

/// What its VMM says. It is asked until it keeps it.
async fn ask(vm: &Vm, past: &Past) -> Kept {
    if past.is_kept {
        return Kept::Kept;
    }
    let way = vm.paged().as_ref().map(|paged| {
        let ram = paged.memory().backend();
        (Arc::clone(ram.mappings()), ram.parts().next().map(|(part, _)| (part.base, part.len)))
    });
    let Some((mappings, Some((addr, len)))) = way else { return Kept::Unable };
    // It waits for the VMM.
    let asked = tokio::task::spawn_blocking(move || mappings.keep(addr, len.bytes(), PATIENCE));
    asked.await.unwrap_or(Kept::Unanswered)
}

#[cfg(test)]
mod tests {
    use ballast_units::Pages;

    use super::*;
    use crate::looks::Heard;
    use crate::vm::{Asked, VmParams};

    /// Whoever has its RAM reads what is away as zeros.
    #[tokio::test]
    async fn one_whose_ram_was_sent_or_may_have_been_is_not_paged() {
        let size = Pages(4);
        let params = VmParams::resolve(&[], "a", size.into(), Asked::default()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let vm = Vm::of_tests("a", dir.path().to_owned(), size, params);
        let known = Known {
            paged: true,
            is_built: true,
            has_balloon: true,
            started_here: true,
            qmp: Heard::Told,
        };
        let paged = Management { mode: Mode::Paged, reason: None };
        for old in [&crate::looks::unseen("new"), &paged] {
            for (kept, is_paged) in [
                (Kept::Kept, true),
                (Kept::Unable, true),
                (Kept::Sent, false),
                (Kept::Unanswered, old.mode == Mode::Paged),
            ] {
                let mut past = Past::default();
                let found = once_asked(kept, Some(paged.clone()), &vm, old, (&mut past, known));
                let now = found.unwrap_or_else(|| old.clone());
                assert_eq!(now.mode == Mode::Paged, is_paged, "{kept:?} of {old:?}: {now:?}");
                assert_eq!(past.mapped.is_some(), kept == Kept::Sent);
            }
        }
    }
}
