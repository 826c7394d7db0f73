//! VMs of `vm run` that cannot be paged: nothing is taken from them but by their balloons, so that they are promised all that they
//! may take.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use ballast_api::{ErrorCode, VmSpec};
use ballast_policy::Promise;
use ballast_qemu::Vmm;
use ballast_units::{Bytes, Pages};

use crate::lifecycle::ROOM;
use crate::manager::{Failure, Manager, Pledge};
use crate::starts::Room;
use crate::sync::lock;
use crate::vm::Vm;

impl Manager {
    /// Promises and reserves the memory of a VM that cannot be paged, for that `reason`: all of it, and of one that was so before it
    /// rebooted, whose balloon held some, what others can be left without; it may take more as they give it. Answers how much is
    /// reserved. Where that cannot be, the VM is ended.
    pub(crate) async fn book_unpaged(
        self: &Arc<Self>,
        spec: &VmSpec,
        vmm: &Vmm,
        overhead: Pages,
        reason: &str,
    ) -> Result<Pages, Failure> {
        let e = match self.room_unpaged(spec).await {
            Ok(booked) => return Ok(booked),
            Err(e) => e,
        };
        let _ = vmm.process.kill();
        vmm.process.exited().await;
        self.host.ledger.release(overhead);
        self.remove_files(&spec.name).await;
        let why = format!("{}: it cannot be paged ({reason}), and unpaged: {e}", spec.name);
        Err(Failure::new(e.code, why))
    }

    /// Promises and reserves memory as above, and ends nothing.
    ///
    /// # Errors
    /// NoRoom; or it was to have memory to plug.
    pub(crate) async fn room_unpaged(&self, spec: &VmSpec) -> Result<Pages, Failure> {
        // Nothing but the balloon would keep it within less than its whole size, and nothing from what is
        // not plugged.
        if spec.hotplug > 0 {
            return Err(Failure::internal("it was to have memory to plug"));
        }
        let need = self.promise_unpaged(&spec.name, Bytes(spec.max).pages())?;
        let room = Room { name: &spec.name, need, unpaged: true };
        self.make_room(room, ROOM).await.map(|()| need)
    }

    /// One that has a pager and was found not to be fit to be paged, by a disk for one, is promised all that it may take before its
    /// start is done with. Where that cannot be, it is ended.
    pub(crate) async fn admit_unfit(self: &Arc<Self>, vm: &Arc<Vm>) -> Result<(), Failure> {
        let is_inspected = vm.inspected.load(Ordering::Relaxed);
        if vm.paged().is_none() || !is_inspected || vm.may_be_paged() {
            return Ok(());
        }
        let has_hotplug = vm.spec.as_ref().is_some_and(|spec| spec.hotplug > 0);
        let admitted = if has_hotplug {
            Err(Failure::internal("it was to have memory to plug"))
        } else {
            self.promise_there(vm)
        };
        let Err(e) = admitted else { return Ok(()) };
        let _ = vm.process.kill();
        self.ended_at_once(vm, vm.process.exited().await).await;
        self.gone(vm).await;
        let reason = vm.management().reason.unwrap_or_default();
        let why = format!("{}: it cannot be paged ({reason}), and unpaged: {e}", vm.name);
        Err(Failure::new(e.code, why))
    }

    /// What is promised to a VM that is there can be, beside what the others are.
    ///
    /// # Errors
    /// NoRoom.
    fn promise_there(&self, vm: &Vm) -> Result<(), Failure> {
        let mut others = lock(&self.starting).clone();
        others.remove(&vm.name);
        let mut made = self.promises(&others);
        made.retain(|(name, ..)| *name != vm.name);
        let (_, pool, memory) = self.promised_to(vm, &vm.params());
        let pools = self.pools.pools(&self.pools.rules());
        let admitted = self.books(&pools, &made).admit(pool, memory);
        admitted.map_err(|lack| Failure::new(ErrorCode::NoRoom, lack.to_string()))
    }

    /// A VM that is being started cannot be paged: it is promised `all` of its memory.
    ///
    /// # Errors
    /// NoRoom: so much cannot be promised.
    pub(crate) fn promise_all(&self, name: &str, all: Pages) -> Result<(), Failure> {
        let mut starting = lock(&self.starting);
        let mut others = starting.clone();
        let Some(pledge) = others.remove(name) else { return Ok(()) };
        let promise = Promise { min: all.max(pledge.promise.min), ..pledge.promise };
        let pools = self.pools.pools(&self.pools.rules());
        let made = self.promises(&others);
        let pool = self.pools.id(pledge.pool.as_deref());
        let admitted = self.books(&pools, &made).admit(pool, promise.memory());
        admitted.map_err(|lack| Failure::new(ErrorCode::NoRoom, lack.to_string()))?;
        starting.insert(name.to_owned(), Pledge { promise, ..pledge });
        Ok(())
    }

    /// A VM that is being started cannot be paged: it is promised `all` of its memory, unless it was before it rebooted. Answers what
    /// it is to find: then as much as others can be left without.
    ///
    /// # Errors
    /// NoRoom: so much cannot be promised.
    pub(crate) fn promise_unpaged(&self, name: &str, all: Pages) -> Result<Pages, Failure> {
        let was_unpaged = lock(&self.rebooting).get(name).is_some_and(|reboot| reboot.was_unpaged);
        if !was_unpaged {
            return self.promise_all(name, all).map(|()| all);
        }
        let pledged = lock(&self.starting).get(name).map(|pledge| pledge.promise.min);
        // Without any it would count as one that has ended.
        Ok(pledged.unwrap_or(all).min(all).max(Pages(1)))
    }
}
