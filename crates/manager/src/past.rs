//! What looks at a VMM have found, for looks that come to less, and for the next manager.

use ballast_api::Management;
use ballast_pager::mappings::Kept;

use crate::looks::Past;
use crate::records::Record;
use crate::vm::Vm;

/// A process that maps the RAM in so many looks is no child of the VMM between its fork and its program.
const SEEN: u32 = 2;

/// What QMP has told, if that speaks against paging.
pub fn note_objection(vm: &Vm, past: &mut Past, objection: Option<Management>) {
    if past.objection == objection {
        return;
    }
    past.objection.clone_from(&objection);
    update(vm, |record| record.objection = objection);
}

/// That another process maps its RAM, if one does: it holds for as long as the VMM runs.
pub fn note_mapped(vm: &Vm, past: &mut Past, mapped: Option<String>) {
    let Some(reason) = mapped.filter(|_| past.mapped.is_none()) else { return };
    past.seen_mapped += 1;
    if past.seen_mapped < SEEN {
        return;
    }
    let mapped = format!("{reason}: it may come again, so this VMM is not paged any more");
    past.mapped = Some(mapped.clone());
    update(vm, |record| record.mapped = Some(mapped));
}

/// What its VMM answered that is to give its RAM to nobody more: if it has given it to somebody, it is not paged any more.
pub fn note_kept(vm: &Vm, past: &mut Past, kept: Kept) {
    past.is_kept |= kept == Kept::Kept;
    if kept == Kept::Sent && past.mapped.is_none() {
        let sent = "its VMM has sent its RAM to another process, so this VMM is not paged";
        past.mapped = Some(sent.to_owned());
        update(vm, |record| record.mapped = Some(sent.to_owned()));
    }
}

fn update(vm: &Vm, change: impl FnOnce(&mut Record)) {
    if let Err(e) = Record::update(&vm.folder, change) {
        tracing::warn!(vm = vm.name, "the next manager is not told whether it may be paged: {e}");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ballast_api::Mode;
    use ballast_qemu::AccelChoice;
    use ballast_units::Pages;

    use super::*;
    use crate::vm::{Asked, VmParams};

    fn recorded(dir: &std::path::Path) -> Arc<Vm> {
        let size = Pages(4);
        let params = VmParams::resolve(&[], "a", size.into(), Asked::default()).unwrap();
        let (accel, pid) = (AccelChoice::Kvm, std::process::id());
        let record = Record::new("a", None, params.clone(), size, Pages(1), pid, &accel);
        record.save(dir).unwrap();
        Vm::of_tests("a", dir.to_owned(), size, params)
    }

    #[tokio::test]
    async fn what_qmp_has_found_is_told_the_next_manager() {
        let dir = tempfile::tempdir().unwrap();
        let vm = recorded(dir.path());
        let told = || Record::load(dir.path()).unwrap().unwrap().objection;
        let mut past = vm.looks.lock().await;
        let reason = Some("scsi-block".to_owned());
        let objection = Some(Management { mode: Mode::BalloonOnly, reason });
        note_objection(&vm, &mut past, objection.clone());
        assert_eq!((told(), past.objection.clone()), (objection.clone(), objection));
        note_objection(&vm, &mut past, None);
        assert_eq!((told(), past.objection.clone()), (None, None));
    }

    #[tokio::test]
    async fn who_mapped_the_ram_in_two_looks_is_told_the_next_manager_and_not_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let vm = recorded(dir.path());
        let told = || Record::load(dir.path()).unwrap().unwrap().mapped;
        let mut past = vm.looks.lock().await;
        let mapped = || Some("process 7 (backend) maps its RAM too".to_owned());
        note_mapped(&vm, &mut past, mapped());
        note_mapped(&vm, &mut past, None);
        assert_eq!(
            (told(), past.mapped.clone()),
            (None, None),
            "it may have been a child of the VMM"
        );
        note_mapped(&vm, &mut past, mapped());
        let noted = told().unwrap();
        assert_eq!(past.mapped.as_ref(), Some(&noted));
        assert!(noted.contains("process 7 (backend)"));
        note_mapped(&vm, &mut past, None);
        assert!(told().is_some() && past.mapped.is_some());
    }

    #[tokio::test]
    async fn who_sent_the_ram_is_told_the_next_manager_and_who_keeps_it_is_asked_once() {
        let dir = tempfile::tempdir().unwrap();
        let vm = recorded(dir.path());
        let told = || Record::load(dir.path()).unwrap().unwrap().mapped;
        let mut past = vm.looks.lock().await;
        for kept in [Kept::Unable, Kept::Unanswered] {
            note_kept(&vm, &mut past, kept);
            assert!(!past.is_kept, "it is asked again");
        }
        note_kept(&vm, &mut past, Kept::Kept);
        assert_eq!((past.is_kept, told()), (true, None));
        past.is_kept = false;
        note_kept(&vm, &mut past, Kept::Sent);
        assert!(!past.is_kept && told().is_some_and(|why| why.contains("another process")));
        assert_eq!(told(), past.mapped);
    }
}
