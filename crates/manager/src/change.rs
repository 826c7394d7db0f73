//! Parameters that change while VMs run: of one VM, of a pool, of the host. Everything is checked before
//! anything is applied, one change at a time.

use std::collections::HashMap;
use std::sync::Arc;

use ballast_api::{ErrorCode, HostChange, PoolChange, VmChange, VmSpec};
use ballast_policy::TaxRate;
use ballast_policy::pools::Books;
use ballast_units::{Bytes, Pages};

use crate::config::rules::{PoolRule, VmRule};
use crate::limits;
use crate::manager::{Failure, Made, Manager, Pledge, capacity, check_pool};
use crate::pools::{PoolSet, Rules};
use crate::records::Record;
use crate::sync::lock;
use crate::vm::{Sizes, Vm, VmParams};

/// What is to be in force in place of what is.
pub(crate) struct Next<'a> {
    /// All pools.
    pub rules: &'a Rules,
    /// VMs whose parameters change, with those before and after.
    pub vms: &'a [(Arc<Vm>, VmParams, VmParams)],
    /// What may be promised on the host.
    pub capacity: Pages,
}

impl Manager {
    /// The same as [`change_vm`](Self::change_vm), where nobody else is to wait for its files to be written.
    pub(crate) async fn change_apart(
        self: &Arc<Self>,
        name: &str,
        change: VmChange,
    ) -> Result<(), Failure> {
        let (manager, name) = (self.clone(), name.to_owned());
        let work = move || manager.change_vm(&name, &change).map(drop);
        let done = tokio::task::spawn_blocking(work).await;
        done.map_err(|e| Failure::internal(e.to_string()))?
    }

    /// New parameters of a VM.
    ///
    /// # Errors
    /// No such VM or pool; a value that cannot be, or not now; more promised than there is; or the next manager could not be
    /// told. Nothing is changed.
    pub fn change_vm(&self, name: &str, change: &VmChange) -> Result<Arc<Vm>, Failure> {
        let vm = self.vm(name)?;
        // One at a time: each builds upon the parameters and the promises that the last one left.
        let one = lock(&self.changing);
        let old = vm.params();
        let params = changed(&vm, &old, change)?;
        check_swap(&vm, &old, &params)?;
        let rules = self.pools.rules();
        check_pool(&rules, params.pool.as_deref())?;
        // More is promised, or out of another pool: as for a start.
        let vms = [(vm.clone(), old, params)];
        self.promise_changes(&Next { vms: &vms, ..self.as_now(&rules) }, || Ok(()))
            .map_err(|e| Failure::new(e.code, format!("{name}: {}", e.message)))?;
        drop(one);
        self.kick.ring(format!("parameters of {name} changed"));
        // Memory is plugged and unplugged by the balloon's loop.
        vm.stir.soon();
        Ok(vm)
    }

    /// With other pools, nothing else changes.
    pub(crate) fn as_now<'a>(&self, rules: &'a Rules) -> Next<'a> {
        let budget = self.host.ledger.budget();
        Next { rules, vms: &[], capacity: capacity(budget, &self.highest_thresholds()) }
    }

    /// Sets new parameters of VMs if all that is promised then can be kept, and if they can be written down. The
    /// rest is for `commit` to set: nothing is promised meanwhile.
    ///
    /// # Errors
    /// More is promised than there is, a pool that goes is in use, the next manager could not be told, or that of `commit`.
    /// Nothing is changed.
    pub(crate) fn promise_changes(
        &self,
        next: &Next<'_>,
        commit: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let starting = lock(&self.starting);
        let old_rules = self.pools.rules();
        self.check_unused(&old_rules, next, &starting)?;
        let old_pools = self.pools.pools(&old_rules);
        let pools = self.pools.pools(next.rules);
        let before = self.promises(&starting);
        let mut after: Vec<Made> = before.clone();
        for (vm, _, params) in next.vms {
            let new = self.promised_to(vm, params);
            if let Some(made) = after.iter_mut().find(|(name, ..)| *name == vm.name) {
                *made = new;
            }
        }
        Books { capacity: next.capacity, ..self.books(&pools, &after) }
            .no_worse_than(&self.books(&old_pools, &before))
            .map_err(|lack| Failure::new(ErrorCode::NoRoom, lack.to_string()))?;
        write_down(next.vms).map_err(Failure::internal)?;
        commit()?;
        for (vm, _, params) in next.vms {
            vm.set_params(params.clone());
        }
        Ok(())
    }

    /// Whether nothing is in the pools that go, once all has changed.
    fn check_unused(
        &self,
        old: &Rules,
        next: &Next<'_>,
        starting: &HashMap<String, Pledge>,
    ) -> Result<(), Failure> {
        let conflict = |pool: &str, what: String| {
            Failure::new(ErrorCode::Conflict, format!("pool {pool} cannot go: {what} is in it"))
        };
        for rule in next.rules.values() {
            // One that went while no manager ran is none to keep: nothing else would ever change.
            let goes =
                |parent: &&str| old.contains_key(*parent) && !next.rules.contains_key(*parent);
            if let Some(parent) = rule.parent().filter(goes) {
                return Err(conflict(parent, format!("pool {}", rule.name)));
            }
        }
        let pool_of = |vm: &Arc<Vm>| {
            let changed = next.vms.iter().find(|(other, ..)| other.id == vm.id);
            changed.map_or_else(|| vm.params().pool, |(_, _, params)| params.pool.clone())
        };
        let running = self.vms().into_iter().map(|vm| (vm.name.clone(), pool_of(&vm)));
        let starts = starting.iter().map(|(name, pledge)| (name.clone(), pledge.pool.clone()));
        for (name, pool) in running.chain(starts) {
            let goes = |pool: &String| old.contains_key(pool) && !next.rules.contains_key(pool);
            if let Some(pool) = pool.filter(goes) {
                return Err(conflict(&pool, format!("VM {name}")));
            }
        }
        Ok(())
    }

    /// Defines a pool, or changes one.
    ///
    /// # Errors
    /// A value that cannot be, no such parent, more promised than there is, or the next manager could not be told. Nothing is
    /// changed.
    pub fn change_pool(&self, name: &str, change: &PoolChange) -> Result<(), Failure> {
        let one = lock(&self.changing);
        let mut rules = self.pools.rules();
        let set = self.pools.commanded(name).unwrap_or_default().changed(change)?;
        let base = self.pools.configured(name).unwrap_or_else(|| PoolRule::new(name));
        let rule = set.over(base);
        rule.check().map_err(|(key, what)| Failure::bad(format!("{key}: {what}")))?;
        check_pool(&rules, rule.parent())?;
        rules.insert(name.to_owned(), rule);
        self.promise_changes(&self.as_now(&rules), || self.command_pool(name, Some(set)))
            .map_err(|e| Failure::new(e.code, format!("pool {name}: {}", e.message)))?;
        drop(one);
        self.kick.ring(format!("parameters of pool {name} changed"));
        Ok(())
    }

    /// Takes away what commands said of a pool: what the configuration says of it is in force again, or it
    /// is no more.
    ///
    /// # Errors
    /// No such pool, one of which commands said nothing, or one that goes and is in use; or the next manager could not be told.
    pub fn remove_pool(&self, name: &str) -> Result<(), Failure> {
        let one = lock(&self.changing);
        let mut rules = self.pools.rules();
        check_pool(&rules, Some(name))?;
        match self.pools.configured(name) {
            Some(_) if self.pools.commanded(name).is_none() => {
                let why = format!("pool {name} is defined in the configuration file");
                return Err(Failure::new(ErrorCode::Conflict, why));
            }
            Some(configured) => rules.insert(name.to_owned(), configured),
            None => rules.remove(name),
        };
        self.promise_changes(&self.as_now(&rules), || self.command_pool(name, None))
            .map_err(|e| Failure::new(e.code, format!("pool {name}: {}", e.message)))?;
        drop(one);
        self.kick.ring(format!("pool {name} changed"));
        Ok(())
    }

    fn command_pool(&self, name: &str, set: Option<PoolSet>) -> Result<(), Failure> {
        let written = self.pools.command(name, set);
        written.map_err(|e| Failure::internal(format!("writing it down: {e}")))
    }

    /// New parameters of the host.
    ///
    /// # Errors
    /// A value that cannot be, more promised than there is, or the next manager could not be told. Nothing is changed.
    pub fn change_host(&self, change: &HostChange) -> Result<(), Failure> {
        let one = lock(&self.changing);
        let set = lock(&self.host_set).changed(change)?;
        let config = self.config();
        let budget = set.budget_or(config.budget);
        let capacity = capacity(budget, &config.scale.thresholds(budget));
        let rules = self.pools.rules();
        self.promise_changes(&Next { rules: &rules, vms: &[], capacity }, || {
            self.keep_host_set(set)?;
            self.host.ledger.set_budget(budget);
            Ok(())
        })
        .map_err(|e| match e.code {
            ErrorCode::NoRoom => {
                let why = format!("budget: {budget} is too little for what is promised: {e}");
                Failure::new(e.code, why)
            }
            _ => e,
        })?;
        drop(one);
        self.kick.ring("parameters of the host changed");
        Ok(())
    }
}

/// For the next manager: all of them, or none. Under the lock of changes, so that what is written is in the
/// order of what was decided.
fn write_down(changes: &[(Arc<Vm>, VmParams, VmParams)]) -> Result<(), String> {
    for (i, (vm, _, params)) in changes.iter().enumerate() {
        let Err(e) = Record::update_params(&vm.folder, params) else { continue };
        for (vm, before, _) in &changes[..i] {
            if let Err(e) = Record::update_params(&vm.folder, before) {
                tracing::error!(vm = vm.name, "{e}: it says what is not in force");
            }
        }
        return Err(e);
    }
    Ok(())
}

/// What is asked of a parameter that can be set, or taken back by `no_KEY`: None: that it stays as it is; Some(None):
/// that it is taken back.
///
/// # Errors
/// Both are asked for; the message names the key.
pub(crate) fn either<T>(
    key: &str,
    value: Option<T>,
    no: bool,
) -> Result<Option<Option<T>>, Failure> {
    match (value, no) {
        (Some(_), true) => Err(Failure::bad(format!("{key}: give either {key} or no_{key}"))),
        (Some(value), false) => Ok(Some(Some(value))),
        (None, true) => Ok(Some(None)),
        (None, false) => Ok(None),
    }
}

/// What a VM's parameters become.
fn changed(vm: &Vm, old: &VmParams, change: &VmChange) -> Result<VmParams, Failure> {
    let (name, mut asked) = (&vm.name, old.asked());
    if let Some(shares) = change.shares {
        let shares = limits::shares(shares);
        asked.shares = Some(shares.map_err(|wrong| Failure::bad(limits::line(wrong)))?);
    }
    if let Some(tax) = change.tax {
        TaxRate::new(tax).map_err(|e| Failure::bad(format!("tax: {e}")))?;
        asked.tax = Some(tax);
    }
    let salt = either("salt", change.salt.clone(), change.no_salt)?;
    let salt = salt.unwrap_or_else(|| old.salt.clone());
    if let Some(pool) = either("pool", change.pool.clone(), change.no_pool)? {
        asked.pool = Some(pool);
    }
    if let Some(max) = change.max {
        let max = Bytes(max).pages();
        check_size(vm, max)?;
        let max = limits::max(max).map_err(|wrong| Failure::bad(limits::line(wrong)))?;
        asked.max = Some(max);
    }
    if let Some(min) = change.min {
        let most = vm.sizes().most;
        if min > most.bytes().0 {
            return Err(Failure::bad(format!(
                "min: {} is above the configured size of {name}, {most}",
                Bytes(min)
            )));
        }
        asked.min = Some(Bytes(min).pages_ceil());
    }
    // What nobody asked for stays as it is, whatever the configuration says by now.
    let min = asked.min.unwrap_or(old.min);
    let max = asked.max.unwrap_or(old.max);
    limits::min_and_max(min, max).map_err(|wrong| Failure::bad(limits::line(wrong)))?;
    Ok(VmParams {
        shares: asked.shares.unwrap_or(old.shares),
        min,
        max,
        tax: asked.tax.or(old.tax),
        salt,
        pool: asked.pool.clone().unwrap_or_else(|| old.pool.clone()),
        asked: Some(asked),
    })
}

/// Whether a VM can be given that much: what it began with is a limit where nothing can be plugged.
fn check_size(vm: &Vm, max: Pages) -> Result<(), Failure> {
    let (name, Sizes { boot, most }) = (&vm.name, vm.sizes());
    if max <= boot {
        return Ok(());
    }
    if boot == most {
        return Err(Failure::bad(format!(
            "max: {max} is above the configured size of {name}, {boot}, which was started without memory to plug"
        )));
    }
    if max > most {
        let room = most.saturating_sub(boot);
        return Err(Failure::bad(format!(
            "max: {max} is above the configured size of {name}, {boot}, with the {room} that can be plugged"
        )));
    }
    if !vm.may_be_paged() {
        let why = format!(
            "max: nothing is plugged into {name}, which is not paged (by now): it could take it all"
        );
        return Err(Failure::new(ErrorCode::Conflict, why));
    }
    if !max.saturating_sub(boot).bytes().0.is_multiple_of(VmSpec::SIZE_STEP.0) {
        let step = VmSpec::SIZE_STEP;
        return Err(Failure::bad(format!("max: {max} is not {boot} and a multiple of {step}")));
    }
    Ok(())
}

/// What a VM gets under other rules.
///
/// # Errors
/// One line: what they give it cannot be.
pub(crate) fn under_rules(
    rules: &[VmRule],
    name: &str,
    sizes: Sizes,
    old: &VmParams,
) -> Result<VmParams, String> {
    let new = VmParams::resolve(rules, name, sizes, old.asked())?;
    Ok(VmParams { salt: old.salt.clone(), asked: old.asked.clone(), ..new })
}

/// The swap space that was reserved at the start must do.
///
/// # Errors
/// It does not.
pub(crate) fn check_swap(vm: &Vm, old: &VmParams, new: &VmParams) -> Result<(), Failure> {
    let reserved = vm.paged().as_ref().map_or(Pages(u64::MAX), |paged| paged.swap_len());
    check_reserved(&vm.name, vm.size, reserved, old, new)
        .map_err(|e| Failure::new(ErrorCode::Conflict, e))
}

/// As `check_swap`, of a VM of which `reserved` is known.
///
/// # Errors
/// One line: a lower min needs more.
pub(crate) fn check_reserved(
    name: &str,
    size: Pages,
    reserved: Pages,
    old: &VmParams,
    new: &VmParams,
) -> Result<(), String> {
    let need = size.saturating_sub(new.min);
    if new.min < old.min && reserved < need {
        return Err(format!(
            "min: {} needs {need} of swap, {name} was started with {reserved} reserved",
            new.min
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use ballast_api::{Management, Mode};
    use ballast_qemu::AccelChoice;

    use super::*;

    #[tokio::test]
    async fn what_cannot_be_written_down_of_one_vm_is_changed_of_none() {
        let dir = tempfile::tempdir().unwrap();
        let manager = crate::manager::tests::manager(dir.path());
        let size = Pages::from_mib(64);
        let old = VmParams::resolve(&[], "", size.into(), Default::default()).unwrap();
        let new = VmParams { shares: old.shares + 1, ..old.clone() };
        let vms = ["a", "b"].map(|name| {
            let (folder, accel) = (dir.path().join(name), AccelChoice::Kvm);
            std::fs::create_dir(&folder).unwrap();
            let record = Record::new(name, None, old.clone(), size, Pages::ZERO, 1, &accel);
            record.save(&folder).unwrap();
            let vm = Vm::of_tests(name, folder, size, old.clone());
            manager.insert(vm.clone());
            (vm, old.clone(), new.clone())
        });
        let have = |params: &VmParams| {
            for (vm, ..) in &vms {
                assert_eq!(Record::load(&vm.folder).unwrap().unwrap().params, *params);
                assert_eq!(vm.params(), *params);
            }
        };
        let rules = manager.pools.rules();
        let next = Next { vms: &vms, ..manager.as_now(&rules) };
        let in_the_way = dir.path().join("b").join("vm.json.new");
        std::fs::create_dir(&in_the_way).unwrap();
        let failed = manager.promise_changes(&next, || Ok(())).unwrap_err();
        assert!(failed.message.contains("b/vm.json"), "{failed}");
        have(&old);
        std::fs::remove_dir(&in_the_way).unwrap();
        manager.promise_changes(&next, || Ok(())).unwrap();
        have(&new);
    }

    /// Whoever is not paged could take all that is plugged.
    #[tokio::test]
    async fn beyond_its_first_size_a_limit_is_for_a_vm_that_is_paged() {
        let [boot, most] = [128, 384].map(Pages::from_mib);
        let params = VmParams::resolve(&[], "a", Sizes { boot, most }, Default::default());
        let mut vm = Vm::of_tests("a", std::env::temp_dir(), most, params.unwrap());
        Arc::get_mut(&mut vm).unwrap().boot = boot;
        let refused = |mib| check_size(&vm, Pages::from_mib(mib)).err();
        let is_found = |mode| vm.was_looked_at(Management { mode, reason: None }, true);
        let not_paged = || {
            assert_eq!([refused(64), refused(128)].map(|e| e.is_none()), [true; 2]);
            let why = refused(256).unwrap();
            assert_eq!(why.code, ErrorCode::Conflict, "{why}");
            assert!(why.to_string().contains("nothing is plugged into a,"), "{why}");
        };
        not_paged();
        is_found(Mode::Paged);
        assert!([128, 256, 384].into_iter().all(|mib| refused(mib).is_none()));
        for (mib, part) in [(129, "and a multiple of"), (386, "that can be plugged")] {
            let why = refused(mib).unwrap();
            assert_eq!(why.code, ErrorCode::BadRequest, "{why}");
            assert!(why.to_string().contains(part), "{why}");
        }
        is_found(Mode::BalloonOnly);
        not_paged();
    }
}
