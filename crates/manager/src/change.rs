//! Parameters that change while VMs run: of one VM, of a pool, of the host. Everything is checked before
//! anything is applied, one change at a time.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ballast_api::{ErrorCode, HostChange, PoolChange, VmChange};
use ballast_policy::TaxRate;
use ballast_policy::pools::Books;
use ballast_units::{Bytes, Pages};

use crate::config;
use crate::config::rules::{PoolRule, VmRule};
use crate::manager::{Failure, Made, Manager, Pledge, check_pool};
use crate::pools::Rules;
use crate::records::Record;
use crate::vm::{Vm, VmParams, lock};

impl Manager {
    /// New parameters of a VM.
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
        self.promise_changes(&rules, &[(vm.clone(), old, params)], |_| Ok(()), || Ok(()))
            .map_err(|e| Failure::new(e.code, format!("{name}: {}", e.message)))?;
        drop(one);
        self.kick.ring(format!("parameters of {name} changed"));
        Ok(vm)
    }

    /// Sets new parameters of VMs, given with those before, if what is promised then, with these pools, can
    /// be kept, and if they can be written down. The pools are for `commit` to set: nothing is promised out of
    /// one meanwhile.
    pub(crate) fn promise_changes(
        &self,
        rules: &Rules,
        changes: &[(Arc<Vm>, VmParams, VmParams)],
        check: impl FnOnce(&HashMap<String, Pledge>) -> Result<(), Failure>,
        commit: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let starting = lock(&self.starting);
        check(&starting)?;
        let old_pools = self.pools.pools(&self.pools.rules());
        let pools = self.pools.pools(rules);
        let before = self.promises(&starting);
        let mut after: Vec<Made> = before.clone();
        for (vm, _, params) in changes {
            let new = self.promised_to(vm, params);
            if let Some(made) = after.iter_mut().find(|(name, ..)| *name == vm.name) {
                *made = new;
            }
        }
        self.books(&pools, &after)
            .no_worse_than(&self.books(&old_pools, &before))
            .map_err(|lack| Failure::new(ErrorCode::NoRoom, lack.to_string()))?;
        write_down(changes).map_err(Failure::internal)?;
        commit()?;
        for (vm, _, params) in changes {
            vm.set_params(params.clone());
        }
        Ok(())
    }

    /// Defines a pool, or changes one.
    pub fn change_pool(&self, name: &str, change: &PoolChange) -> Result<(), Failure> {
        let one = lock(&self.changing);
        let mut rules = self.pools.rules();
        let mut rule = rules.get(name).cloned().unwrap_or_else(|| PoolRule::new(name));
        rule.shares = change.shares.unwrap_or(rule.shares);
        rule.min = change.min.map_or(rule.min, |min| Bytes(min).pages_ceil());
        rule.expandable = change.expandable.unwrap_or(rule.expandable);
        rule.max = match (change.max, change.no_max) {
            (Some(_), true) => return Err(Failure::bad("max: give either max or no_max")),
            (Some(max), false) => Some(Bytes(max).pages()),
            (None, true) => None,
            (None, false) => rule.max,
        };
        rule.tax = match (change.tax, change.no_tax) {
            (Some(_), true) => return Err(Failure::bad("tax: give either tax or no_tax")),
            (Some(tax), false) => {
                Some(TaxRate::new(tax).map_err(|e| Failure::bad(format!("tax: {e}")))?)
            }
            (None, true) => None,
            (None, false) => rule.tax,
        };
        rule.check().map_err(|(key, what)| Failure::bad(format!("{key}: {what}")))?;
        check_pool(&rules, rule.parent())?;
        rules.insert(name.to_owned(), rule.clone());
        self.promise_changes(&rules, &[], |_| Ok(()), || self.command_pool(name, Some(rule)))
            .map_err(|e| Failure::new(e.code, format!("pool {name}: {}", e.message)))?;
        drop(one);
        self.kick.ring(format!("parameters of pool {name} changed"));
        Ok(())
    }

    /// Takes away what commands said of a pool: what the configuration says of it is in force again, or it
    /// is no more.
    pub fn remove_pool(&self, name: &str) -> Result<(), Failure> {
        let one = lock(&self.changing);
        let mut rules = self.pools.rules();
        check_pool(&rules, Some(name))?;
        match self.config().pools.iter().find(|rule| rule.name == name) {
            Some(configured) if rules.get(name) == Some(configured) => {
                let why = format!("pool {name} is defined in the configuration file");
                return Err(Failure::new(ErrorCode::Conflict, why));
            }
            Some(configured) => {
                rules.insert(name.to_owned(), configured.clone());
            }
            None => {
                rules.remove(name);
            }
        }
        let unused = |starting: &HashMap<String, Pledge>| self.check_unused(&rules, starting);
        self.promise_changes(&rules, &[], unused, || self.command_pool(name, None))
            .map_err(|e| Failure::new(e.code, format!("pool {name}: {}", e.message)))?;
        drop(one);
        self.kick.ring(format!("pool {name} changed"));
        Ok(())
    }

    fn command_pool(&self, name: &str, rule: Option<PoolRule>) -> Result<(), Failure> {
        let written = self.pools.command(name, rule);
        written.map_err(|e| Failure::internal(format!("writing it down: {e}")))
    }

    /// Whether all pools are there that VMs and pools are in.
    pub(crate) fn check_unused(
        &self,
        rules: &Rules,
        starting: &HashMap<String, Pledge>,
    ) -> Result<(), Failure> {
        let conflict = |pool: &str, what: String| {
            Failure::new(ErrorCode::Conflict, format!("pool {pool} cannot go: {what} is in it"))
        };
        for rule in rules.values() {
            if let Some(parent) = rule.parent().filter(|parent| !rules.contains_key(*parent)) {
                return Err(conflict(parent, format!("pool {}", rule.name)));
            }
        }
        let starts = starting.iter().map(|(name, pledge)| (name.clone(), pledge.pool.clone()));
        let running = self.vms().into_iter().map(|vm| (vm.name.clone(), vm.params().pool));
        for (name, pool) in running.chain(starts) {
            if let Some(pool) = pool.filter(|pool| !rules.contains_key(pool)) {
                return Err(conflict(&pool, format!("VM {name}")));
            }
        }
        Ok(())
    }

    /// New parameters of the host.
    pub fn change_host(&self, change: &HostChange) -> Result<(), Failure> {
        let one = lock(&self.changing);
        let tax = change.tax.map(TaxRate::new).transpose();
        let tax = tax.map_err(|e| Failure::bad(format!("tax: {e}")))?;
        if let Some(budget) = change.budget {
            let budget = Bytes(budget).pages();
            config::check_budget(budget).map_err(|e| Failure::bad(format!("budget: {e}")))?;
            // None is made meanwhile.
            let starting = lock(&self.starting);
            let pools = self.pools.pools(&self.pools.rules());
            let made = self.promises(&starting);
            let now = self.books(&pools, &made);
            let capacity = self.capacity(budget, &self.config().scale.thresholds(budget));
            let then = Books { capacity, ..self.books(&pools, &made) };
            then.no_worse_than(&now).map_err(|lack| {
                let why = format!("budget: {budget} is too little for what is promised: {lack}");
                Failure::new(ErrorCode::NoRoom, why)
            })?;
            self.keep_host_set(Some(budget), tax)?;
            self.host.ledger.set_budget(budget);
            self.budget_set.store(true, Ordering::Relaxed);
        } else {
            self.keep_host_set(None, tax)?;
        }
        if let Some(tax) = tax {
            self.set_tax(tax);
        }
        drop(one);
        self.kick.ring("parameters of the host changed");
        Ok(())
    }
}

/// For the next manager: all of them, or none. Under the lock of changes, so that what is written is in the
/// order of what was decided.
pub(crate) fn write_down(changes: &[(Arc<Vm>, VmParams, VmParams)]) -> Result<(), String> {
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

/// What a VM's parameters become.
fn changed(vm: &Vm, old: &VmParams, change: &VmChange) -> Result<VmParams, Failure> {
    let (name, mut asked) = (&vm.name, old.asked());
    if let Some(shares) = change.shares {
        if shares == 0 {
            return Err(Failure::bad("shares: 0 is not at least 1"));
        }
        asked.shares = Some(shares);
    }
    if let Some(tax) = change.tax {
        TaxRate::new(tax).map_err(|e| Failure::bad(format!("tax: {e}")))?;
        asked.tax = Some(tax);
    }
    let salt = match (&change.salt, change.no_salt) {
        (Some(_), true) => return Err(Failure::bad("salt: give either salt or no_salt")),
        (Some(salt), false) => Some(salt.clone()),
        (None, true) => None,
        (None, false) => old.salt.clone(),
    };
    match (&change.pool, change.no_pool) {
        (Some(_), true) => return Err(Failure::bad("pool: give either pool or no_pool")),
        (Some(pool), false) => asked.pool = Some(Some(pool.clone())),
        (None, true) => asked.pool = Some(None),
        (None, false) => {}
    }
    if let Some(max) = change.max {
        let max = Bytes(max).pages();
        if max > vm.size {
            return Err(Failure::bad(format!(
                "max: {max} is above the configured size of {name}, {}",
                vm.size
            )));
        }
        if max.is_zero() {
            return Err(Failure::bad("max: below one page"));
        }
        asked.max = Some(max);
    }
    if let Some(min) = change.min {
        if min > vm.size.bytes().0 {
            return Err(Failure::bad(format!(
                "min: {} is above the configured size of {name}, {}",
                Bytes(min),
                vm.size
            )));
        }
        asked.min = Some(Bytes(min).pages_ceil());
    }
    // What nobody asked for stays as it is, whatever the configuration says by now.
    let min = asked.min.unwrap_or(old.min);
    let max = asked.max.unwrap_or(old.max);
    if min > max {
        return Err(Failure::bad(format!("min: {min} is above max, {max}")));
    }
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

/// What a VM gets under other rules.
pub(crate) fn under_rules(rules: &[VmRule], vm: &Vm) -> Result<VmParams, String> {
    let old = vm.params();
    let new = VmParams::resolve(rules, &vm.name, vm.size, old.asked())?;
    Ok(VmParams { salt: old.salt, asked: old.asked, ..new })
}

/// The swap space that was reserved at the start must do.
pub(crate) fn check_swap(vm: &Vm, old: &VmParams, new: &VmParams) -> Result<(), Failure> {
    let need = vm.size.saturating_sub(new.min);
    let reserved = vm.paged().as_ref().map_or(Pages(u64::MAX), |paged| paged.swap_len());
    if new.min < old.min && reserved < need {
        return Err(Failure::new(
            ErrorCode::Conflict,
            format!(
                "min: {} needs {need} of swap, {} was started with {reserved} reserved",
                new.min, vm.name
            ),
        ));
    }
    Ok(())
}
