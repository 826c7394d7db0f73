//! Reading the configuration again while VMs run: all of the new one counts, or, when anything about it
//! is wrong, nothing of it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ballast_api::{ConfigReloaded, ErrorCode};
use ballast_units::Pages;

use crate::change::{Next, check_reserved, check_swap, under_rules};
use crate::config::{Config, Overrides};
use crate::host_set::HostSet;
use crate::manager::{Failure, Manager, capacity, check_pool};
use crate::pools::{Pools, Rules};
use crate::records::Record;
use crate::sync::lock;
use crate::vm::{Sizes, Vm, VmParams};

/// Where the configuration came from.
#[derive(Clone, Debug, Default)]
pub struct Source {
    /// None: there is nothing to read again.
    pub file: Option<PathBuf>,
    /// The command line, which still has the last word.
    pub overrides: Overrides,
}

/// A VM, what it has, and what it gets.
type Changed = (Arc<Vm>, VmParams, VmParams);

impl Manager {
    /// Reads the configuration again and applies what is different.
    ///
    /// # Errors
    /// There is no file, it is wrong, it changes what needs a restart, or what is promised could not be
    /// kept. Then everything is as it was.
    pub fn reload(&self) -> Result<ConfigReloaded, Failure> {
        let Some(file) = &self.source.file else {
            return Err(Failure::new(
                ErrorCode::Conflict,
                "there is no configuration to reload: ballastd was started without --config",
            ));
        };
        // Of two reloads the later one reads later.
        let one = lock(&self.reloading);
        let new = Config::load(Some(file), self.source.overrides.clone())
            .map_err(|e| Failure::bad(e.to_string()))?;
        let other = lock(&self.changing);
        let changes = self.replace(new).map_err(|e| {
            let file = file.display();
            Failure::new(e.code, format!("configuration {file}: {}; nothing is changed", e.message))
        })?;
        drop((other, one));
        for what in &changes {
            tracing::info!("configuration reloaded: {what}");
        }
        self.kick.ring("the configuration was reloaded");
        Ok(ConfigReloaded { file: file.display().to_string(), changes })
    }

    /// Puts a configuration in the place of the one in force. Answers what is different. Under the lock of changes.
    ///
    /// # Errors
    /// As of `reload`: then everything is as it was.
    fn replace(&self, mut new: Config) -> Result<Vec<String>, Failure> {
        let old = self.config();
        // Huge pages that were set aside meanwhile count at the next start, or with what is said of the budget.
        if (new.whole_budget, new.budget_of) == (old.whole_budget, old.budget_of) {
            new.budget = old.budget;
        }
        if let Some(key) = fixed(&old, &new) {
            let what = format!("{key} cannot be changed while ballastd runs: restart it");
            return Err(Failure::new(ErrorCode::Conflict, what));
        }
        // By command, which wins over the file.
        let set = *lock(&self.host_set);
        let budget = set.budget_or(new.budget);
        let rules = self.pools.rules_with(&new.pools)?;
        let changes = self.changes_by(&new, &rules)?;
        let mut told = differences(&old, &new, &set, &self.pools);
        for (vm, before, params) in &changes {
            told.push(format!("VM {}: {}", vm.name, crate::vm::differences(before, params)));
        }
        let capacity = capacity(budget, &new.scale.thresholds(budget));
        self.promise_changes(&Next { rules: &rules, vms: &changes, capacity }, || {
            self.host.ledger.set_budget(budget);
            self.pools.set_configured(&new.pools);
            for vm in self.vms() {
                lock(&vm.control).set_config(new.balloon);
                let mut sampling = lock(&vm.sampling);
                sampling.set.set_config(new.sampling);
                sampling.times.set_config(new.sampling);
            }
            self.set_config(new);
            Ok(())
        })?;
        Ok(told)
    }

    /// VMs that get something else under a new configuration, with what they have and what they get.
    ///
    /// # Errors
    /// What one would get cannot be; the message names it.
    fn changes_by(&self, new: &Config, rules: &Rules) -> Result<Vec<Changed>, Failure> {
        let changes = self.vms().into_iter().map(|vm| change_by(new, rules, vm));
        changes.filter_map(Result::transpose).collect()
    }

    /// A VM that has just come, under the configuration of now: while it was started, or waited to be taken over, a reload
    /// passed it over.
    pub(crate) fn catch_up(&self, vm: &Arc<Vm>) {
        let _one = lock(&self.changing);
        let rules = self.pools.rules();
        let caught_up = change_by(&self.config(), &rules, vm.clone()).and_then(|change| {
            let Some(change) = change else { return Ok(None) };
            let told = crate::vm::differences(&change.1, &change.2);
            let next = Next { vms: &[change], ..self.as_now(&rules) };
            self.promise_changes(&next, || Ok(())).map(|()| Some(told))
        });
        match caught_up {
            Ok(None) => {}
            Ok(Some(what)) => {
                tracing::info!(vm = vm.name, "under the configuration of now: {what}");
                self.kick.ring(format!("parameters of {} changed", vm.name));
                vm.stir.soon();
            }
            Err(e) => {
                let why = e.message;
                tracing::warn!(
                    vm = vm.name,
                    "it keeps what it had, for the configuration of now: {why}"
                );
            }
        }
    }

    /// Gives a VM that a former manager left what the configuration says of it now, as a reload would. What a
    /// reload would be refused for leaves it what it had, but in no pool that is not there.
    pub(crate) fn renew(&self, folder: &Path, record: &mut Record) {
        let pools = self.pools.rules();
        let (name, mut old) = (&record.name, record.params.clone());
        let mut asked = old.asked();
        if let Some(Some(pool)) = &asked.pool
            && !pools.contains_key(pool)
        {
            tracing::error!(vm = name, "pool {pool}, which it was put in, is not there any more");
            asked.pool = None;
            old.asked = Some(asked);
        }
        let reserved = record.swap.as_ref().map(|files| files.iter().map(|file| file.size).sum());
        let sizes = Sizes { boot: record.boot(), most: record.size };
        let new = under_rules(&self.config().vms, name, sizes, &old).and_then(|new| {
            let reserved = reserved.unwrap_or(Pages(u64::MAX));
            check_reserved(name, record.size, reserved, &old, &new).map(|()| new)
        });
        let new = new.unwrap_or_else(|e| {
            tracing::error!(vm = name, "it keeps what it had, for the configuration of now: {e}");
            let pool = old.pool.clone().filter(|pool| pools.contains_key(pool));
            VmParams { pool, ..old }
        });
        if new == record.params {
            return;
        }
        let what = crate::vm::differences(&record.params, &new);
        tracing::info!(vm = name, "under the configuration of now: {what}");
        if let Err(e) = Record::update_params(folder, &new) {
            tracing::warn!(vm = name, "{e}: it says what is not in force");
        }
        record.params = new;
    }
}

/// What a VM has and what it gets, if that is something else.
///
/// # Errors
/// What it would get cannot be; the message names it.
fn change_by(new: &Config, rules: &Rules, vm: Arc<Vm>) -> Result<Option<Changed>, Failure> {
    let before = vm.params();
    let named = |e: Failure| Failure::new(e.code, format!("VM {}: {}", vm.name, e.message));
    let params =
        under_rules(&new.vms, &vm.name, vm.sizes(), &before).map_err(|e| named(Failure::bad(e)))?;
    check_pool(rules, params.pool.as_deref())
        .and_then(|()| check_swap(&vm, &before, &params))
        .map_err(named)?;
    Ok((params != before).then_some((vm, before, params)))
}

/// A key whose value cannot change while the manager runs, and did.
fn fixed(old: &Config, new: &Config) -> Option<&'static str> {
    let keys = [
        ("run_dir", old.run_dir != new.run_dir),
        ("swap_dir", old.swap_dir != new.swap_dir),
        ("swap.location", old.swap != new.swap),
        ("socket", old.socket != new.socket),
        ("shim", old.shim != new.shim),
        ("shim_group", old.shim_group != new.shim_group),
        ("sharing", old.sharing != new.sharing),
        ("journal", old.journal != new.journal),
        ("admission.vmm_memory", old.books_vmms != new.books_vmms),
    ];
    keys.into_iter().find(|(_, changed)| *changed).map(|(key, _)| key)
}

/// What is different, of what counts from now on, and of what would if commands did not say otherwise.
fn differences(old: &Config, new: &Config, set: &HostSet, pools: &Pools) -> Vec<String> {
    let mut told = Vec::new();
    let mut tell = |different: bool, what: String| {
        if different {
            told.push(what);
        }
    };
    let by_command = |what: String, set: Option<String>| match set {
        Some(set) => format!("{what} in the file is overridden by command: {set}"),
        None => what,
    };
    let budget = format!("budget {} -> {}", old.budget, new.budget);
    // One that the host does not have does not count.
    let counts = set.budget.filter(|budget| set.budget_or(new.budget) == *budget);
    tell(old.budget != new.budget, by_command(budget, counts.map(|b| b.to_string())));
    let tax = format!("tax {} -> {}", old.tax.get(), new.tax.get());
    tell(old.tax != new.tax, by_command(tax, set.tax.map(|tax| tax.get().to_string())));
    tell(old.policy != new.policy, format!("policy {} -> {}", old.policy, new.policy));
    tell(old.scale != new.scale, format!("thresholds {:?} -> {:?}", old.scale, new.scale));
    tell(old.balloon != new.balloon, "balloon".into());
    tell(old.tools != new.tools, format!("tools (order {})", new.tools.order));
    tell(old.sampling != new.sampling, "sampling".into());
    tell(old.start_wait != new.start_wait, "admission".into());
    tell(old.adopt_max != new.adopt_max, "adopt.max".into());
    tell(
        old.fault_around != new.fault_around,
        "pager.fault_around, for VMs started or taken over from now on".into(),
    );
    tell(old.wakeful != new.wakeful, format!("pager.wakeful {} -> {}", old.wakeful, new.wakeful));
    tell(
        old.large_pages_from != new.large_pages_from,
        "pager.large_pages_from, for VMs started or taken over from now on".into(),
    );
    tell(
        old.compression != new.compression,
        "compression, for VMs started or taken over from now on".into(),
    );
    told.extend(pools.differences(&old.pools, &new.pools));
    // Also those that no VM falls under yet: of VMs that do, what they get is told as well.
    if old.vms != new.vms {
        told.push("rules for VMs".into());
    }
    told
}

#[cfg(test)]
mod tests {
    use ballast_qemu::AccelChoice;
    use ballast_units::Bytes;

    use super::*;
    use crate::swap::SwapFile;
    use crate::vm::Asked;

    /// Under a file that gives 7 shares, and `small` no more than 8 MiB.
    fn manager(dir: &Path) -> Arc<Manager> {
        let file = dir.join("ballast.toml");
        let text = "[defaults]\nshares = 7\n[[vm]]\nname = \"small\"\nmax = \"8M\"\n[pool.a]\n";
        std::fs::write(&file, text).unwrap();
        let [run_dir, swap_dir] = ["run", "swap"].map(|name| Some(dir.join(name)));
        for folder in [&run_dir, &swap_dir].into_iter().flatten() {
            std::fs::create_dir(folder).unwrap();
        }
        let (budget, shim) = (Some(Bytes::from_mib(256)), std::env::current_exe().ok());
        let overrides = Overrides { run_dir, swap_dir, budget, shim, ..Overrides::default() };
        let config = Config::load(Some(&file), overrides).unwrap();
        Manager::new(config, Source::default()).unwrap()
    }

    #[tokio::test]
    async fn a_vm_that_comes_after_a_reload_has_what_the_reload_gave() {
        let dir = tempfile::tempdir().unwrap();
        let manager = manager(dir.path());
        let size = Pages::from_mib(64);
        // Started under a file that said 9 shares, and taken in only now.
        let came = |name: &str, min: Option<Pages>| {
            let folder = dir.path().join(name);
            std::fs::create_dir(&folder).unwrap();
            let asked = Asked { min, ..Asked::default() };
            let old = VmParams::resolve(&[], "", size.into(), asked).unwrap();
            let old = VmParams { shares: 9, ..old };
            let accel = AccelChoice::Kvm;
            let record = Record::new(name, None, old.clone(), size, Pages(0), 1, &accel);
            record.save(&folder).unwrap();
            let vm = Vm::of_tests(name, folder.clone(), size, old);
            manager.insert(vm.clone());
            manager.catch_up(&vm);
            assert_eq!(Record::load(&folder).unwrap().unwrap().params, vm.params());
            (vm.params().shares, vm.params().max)
        };
        assert_eq!(came("web", None), (7, size));
        assert_eq!(came("small", None), (7, Pages::from_mib(8)));
        manager.remove(&manager.vm("small").unwrap());
        // More was asked to be guaranteed than the file lets it have: it stays what it was.
        std::fs::remove_dir_all(dir.path().join("small")).unwrap();
        assert_eq!(came("small", Some(Pages::from_mib(16))), (9, size));
    }

    #[tokio::test]
    async fn what_a_reload_would_be_refused_for_leaves_a_vm_what_it_had() {
        let dir = tempfile::tempdir().unwrap();
        let manager = manager(dir.path());
        let size = Pages::from_mib(64);
        let min = Pages::from_mib(16);
        // What it is given by `asked`, under a file that said 9 shares and a min of 16 MiB.
        let renewed = |name: &str, pool: &str, asked: Asked, swap: u64| {
            let pool = Some(pool.to_owned());
            let (tax, salt, asked) = (None, None, Some(asked));
            let old = VmParams { shares: 9, min, max: size, tax, salt, pool, asked };
            let accel = AccelChoice::Kvm;
            let mut record = Record::new(name, None, old, size, Pages(0), 1, &accel);
            let swap = SwapFile { path: dir.path().join("s"), size: Pages::from_mib(swap) };
            record.swap = Some(vec![swap]);
            record.save(dir.path()).unwrap();
            manager.renew(dir.path(), &mut record);
            assert_eq!(Record::load(dir.path()).unwrap().unwrap().params, record.params);
            let VmParams { shares, min, pool, .. } = record.params;
            (shares, min, pool)
        };
        let nothing = Asked::default();
        assert_eq!(renewed("any", "gone", nothing.clone(), 64), (7, Pages::ZERO, None));
        let into = |pool: &str| Asked { pool: Some(Some(pool.into())), ..nothing.clone() };
        assert_eq!(renewed("any", "a", into("a"), 64), (7, Pages::ZERO, Some("a".into())));
        assert_eq!(renewed("any", "gone", into("gone"), 64), (7, Pages::ZERO, None));
        // Its swap files are too small for a lower min; the min that was asked for is above the max of now.
        assert_eq!(renewed("any", "a", nothing.clone(), 48), (9, min, Some("a".into())));
        assert_eq!(renewed("any", "gone", nothing.clone(), 48), (9, min, None));
        let much = Asked { min: Some(min), ..nothing };
        assert_eq!(renewed("small", "gone", much, 64), (9, min, None));
    }
}
