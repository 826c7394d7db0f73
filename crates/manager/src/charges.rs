//! What a VM is charged: its pages, and what comes beside them.

use std::sync::atomic::Ordering;

use ballast_units::Pages;

use crate::sync::lock;
use crate::vm::{ENDED, Vm};

impl Vm {
    /// Machine memory that the VM's pages take; a page that n share counts 1/n.
    pub fn consumed(&self) -> Pages {
        match &*self.paged() {
            Some(paged) => paged.memory().charged() + paged.shared_part(),
            None => self.booked().saturating_sub(self.own()),
        }
    }
    /// Machine memory charged beside the pages. Of a VM that is not paged, the whole process is
    /// booked: what of it exceeds what its balloon leaves its guest is the VMM's own, which no balloon gives back.
    pub fn overhead(&self) -> Pages {
        match &*self.paged() {
            Some(_) => self.overhead + self.booked_vmm(),
            None => self.overhead + self.own(),
        }
    }
    /// What is booked for the VMM of a paged VM; nothing once it has ended.
    pub fn booked_vmm(&self) -> Pages {
        match self.vmm.load(Ordering::Relaxed) {
            ENDED => Pages::ZERO,
            booked => Pages(booked),
        }
    }
    /// Of one that is not paged: its process has so much now.
    pub(crate) fn was_measured(&self, rss: Pages) {
        self.uses.store(rss.0, Ordering::Relaxed);
        // While a balloon grows its VMM gives pages back before its guest says so: at most that is too little.
        self.own.store(rss.saturating_sub(self.left_by_balloon()).0, Ordering::Relaxed);
    }
    /// Of one that is not paged: what of its process cannot be its guest's.
    pub(crate) fn own(&self) -> Pages {
        let booked = self.booked();
        let measured = Pages(self.own.load(Ordering::Relaxed));
        measured.max(booked.saturating_sub(self.configured())).min(booked)
    }
    fn booked(&self) -> Pages {
        Pages(self.external.load(Ordering::Relaxed))
    }
    /// What its balloon leaves its guest of its size, as far as that has told.
    fn left_by_balloon(&self) -> Pages {
        let held = lock(&self.balloon).held.map(|(size, _)| size);
        self.configured().saturating_sub(held.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::VmParams;

    /// What its balloon gave back is nobody's, though its VMM takes as much for itself.
    #[tokio::test]
    async fn of_a_process_without_a_pager_what_exceeds_what_its_balloon_leaves_is_its_vmms() {
        let dir = tempfile::tempdir().unwrap();
        let manager = crate::manager::tests::manager(dir.path());
        let size = Pages(100);
        let params = VmParams::resolve(&[], "a", size.into(), Default::default()).unwrap();
        let vm = Vm::of_tests("a", dir.path().join("a"), size, params.clone());
        let split = |booked| {
            vm.external.store(booked, Ordering::Relaxed);
            (vm.consumed(), vm.overhead())
        };
        // Before anything was measured: by its size.
        assert_eq!(split(90), (Pages(90), Pages::ZERO));
        assert_eq!(split(120), (Pages(100), Pages(20)));
        lock(&vm.balloon).held = Some((Pages(40), Pages::ZERO));
        vm.was_measured(Pages(85));
        assert_eq!(split(85), (Pages(60), Pages(25)));
        // Both together are what is promised to it, once.
        assert_eq!(manager.promised_to(&vm, &params).2, Pages(85));
        // By what it was as both were looked at: what is booked for a moment longer is its guest's.
        lock(&vm.balloon).held = Some((Pages(50), Pages::ZERO));
        assert_eq!(split(85), (Pages(60), Pages(25)));
        vm.was_measured(Pages(75));
        assert_eq!(split(75), (Pages(50), Pages(25)));
        // One that has ended has nothing.
        assert_eq!(split(0), (Pages::ZERO, Pages::ZERO));
    }
}
