//! With whom a VM shares pages: it joins a domain, moves to another, and leaves with its VMM.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ballast_units::Pages;

use super::super::priority::Urgency;
use super::super::share::ShareService;
use super::{PagedVm, StartError};
use crate::guest_ram::GuestRam;
use crate::mappings::Mappings;
use crate::sharing::Domain;
use crate::sharing::control::Control;
use crate::sync::lock;

/// A change of domain that is under way.
pub(in crate::service) struct DomainChange {
    /// Where it is to go.
    pub to: Arc<Domain<GuestRam>>,
    /// To be called when nothing of the VM can be on its way into either domain.
    pub switch: Switch,
}

type Switch = Box<dyn FnOnce(&Mappings) -> bool + Send>;

impl PagedVm {
    /// Joins a domain, and looks for pages to share in it as `control` allows, once `set_may_share`
    /// allows it too. The way to the shim must be connected, and the domain's store set.
    ///
    /// # Errors
    /// The domain has no room for the VM, or a thread cannot be started.
    pub fn share_in(
        &mut self,
        domain: &Arc<Domain<GuestRam>>,
        control: Arc<Control>,
        seed: u64,
    ) -> Result<(), StartError> {
        let joined = match self.memory().membership() {
            None => domain.join(&self.shared.memory),
            Some(_) => Ok(()),
        };
        // Also where it shares nothing: it maps zeros, and settles what others have begun.
        self.shared.share_by(control.clone());
        let service = ShareService::new(self.shared.clone(), control, seed);
        self.spawn("share", Urgency::Nobody, move || service.run())?;
        Ok(joined?)
    }

    /// Its shim has come again ([`Mappings::reconnect`]): what was under way when it was lost is looked up and finished, or
    /// taken back, by the share thread, as after a manager's death.
    pub fn reconnected(&self) {
        self.shared.signal_share();
    }

    /// See `Memory::shared_part`.
    pub fn shared_part(&self) -> Pages {
        self.memory().shared_part()
    }

    /// Moves it to another domain, by its share thread: its pages leave the store of the one it is in as fast
    /// as memory allows, and none enters it any more; then `switch` is called, once. If that answers false it stays until it
    /// is asked again, and shares no more before it is told to `stay`. Replaces what was asked before, if that was another
    /// domain. Answers whether it has been asked before.
    pub fn move_to(
        &self,
        domain: &Arc<Domain<GuestRam>>,
        switch: impl FnOnce(&Mappings) -> bool + Send + 'static,
    ) -> bool {
        let mut change = lock(&self.shared.domain_change);
        if change.as_ref().is_some_and(|change| Arc::ptr_eq(&change.to, domain)) {
            return true;
        }
        *change = Some(DomainChange { to: domain.clone(), switch: Box::new(switch) });
        self.memory().set_leaving(true);
        drop(change);
        self.shared.signal_share();
        false
    }
    /// None of its pages enters the store any more, though it is not known yet where it is to go.
    pub fn begin_to_leave(&self) {
        self.memory().set_leaving(true);
    }
    /// It is to stay in the domain that it is in. Answers whether it has moved there since the last call.
    pub fn stay(&self) -> bool {
        let mut change = lock(&self.shared.domain_change);
        *change = None;
        self.memory().set_leaving(false);
        drop(change);
        self.shared.moved.swap(false, Ordering::Relaxed)
    }

    /// See `Memory::let_pages_move`; false until somebody says otherwise. Without it nothing is looked for to
    /// be shared, whatever `set_may_share` says.
    pub fn let_pages_move(&self, may: bool) {
        if self.memory().may_move() != may {
            self.memory().let_pages_move(may);
            self.shared.signal_share();
        }
    }
    /// Whether pages are looked for that others have too.
    pub fn set_may_share(&self, may: bool) {
        if self.shared.set_may_share(may) != may {
            self.shared.signal_share();
        }
    }
    /// Why pages are not looked for at the moment, if they are not.
    pub fn share_note(&self) -> Option<String> {
        self.shared.share_note()
    }
    /// Mappings of the VMM, when they were last counted.
    pub fn mappings(&self) -> u64 {
        self.shared.mappings.load(Ordering::Relaxed)
    }

    /// Its mappings are gone with the VMM: so are its references.
    pub(super) fn leave_domain(&self) {
        let memory = self.memory();
        let Some(member) = memory.membership() else { return };
        for ppn in memory.pmap().known() {
            if let Some(page) = memory.pmap().load(ppn).store_page() {
                member.domain.release(page);
            }
        }
        member.domain.leave(memory);
    }
}
