//! What `host set` said, kept in a file of the run folder for the next manager: it wins over the
//! configuration and the command line until the folder goes, with the last VM.

use std::path::Path;

use ballast_api::HostChange;
use ballast_policy::TaxRate;
use ballast_qemu::process::host_memory;
use ballast_units::{Bytes, Pages};
use serde::{Deserialize, Serialize};

use crate::change::either;
use crate::config::check_budget;
use crate::layout::HOST;
use crate::manager::{Failure, Manager};
use crate::sync::lock;
use crate::whole_file;

/// None: as configured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostSet {
    /// Within what `check_budget` allows.
    #[serde(default)]
    pub budget: Option<Pages>,
    #[serde(default)]
    pub tax: Option<TaxRate>,
}

impl HostSet {
    /// # Errors
    /// What a former manager left cannot be used.
    pub fn load(run_dir: &Path) -> anyhow::Result<HostSet> {
        let path = run_dir.join(HOST);
        let named = |e: String| anyhow::anyhow!("{}: {e}", path.display());
        let set: HostSet = match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|e| named(e.to_string()))?,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(HostSet::default()),
            Err(e) => return Err(named(e.to_string())),
        };
        if let Some(budget) = set.budget {
            check_budget(budget.min(memory())).map_err(|e| named(format!("budget: {e}")))?;
        }
        Ok(set)
    }

    /// The budget that counts: the one that was set, but for one that is above the memory of the host, which may have less by
    /// now: then the configured one does, which leaves the host what it needs. Guests wait for this manager.
    pub fn budget_or(&self, configured: Pages) -> Pages {
        self.budget.filter(|budget| *budget <= memory()).unwrap_or(configured)
    }

    /// With what is asked for now.
    ///
    /// # Errors
    /// It cannot be.
    pub fn changed(self, change: &HostChange) -> Result<HostSet, Failure> {
        let mut set = self;
        if let Some(budget) = either("budget", change.budget, change.no_budget)? {
            set.budget = budget.map(|budget| Bytes(budget).pages());
            if let Some(budget) = set.budget {
                check_budget(budget).map_err(|e| Failure::bad(format!("budget: {e}")))?;
            }
        }
        if let Some(tax) = either("tax", change.tax, change.no_tax)? {
            let rate = tax.map(TaxRate::new).transpose();
            set.tax = rate.map_err(|e| Failure::bad(format!("tax: {e}")))?;
        }
        Ok(set)
    }

    fn save(&self, run_dir: &Path) -> std::io::Result<()> {
        whole_file::write(&run_dir.join(HOST), &serde_json::to_vec(self)?)
    }
}

/// Of the host.
fn memory() -> Pages {
    host_memory().map_or(Pages(u64::MAX), Bytes::pages)
}

impl Manager {
    /// Notes what counts from now on. Under the lock of changes.
    ///
    /// # Errors
    /// The next manager could not be told: it does not count.
    pub(crate) fn keep_host_set(&self, set: HostSet) -> Result<(), Failure> {
        set.save(&self.config().run_dir)
            .map_err(|e| Failure::internal(format!("host: writing it down: {e}")))?;
        *lock(&self.host_set) = set;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_set_is_found_again_and_nonsense_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(HostSet::load(dir.path()).unwrap(), HostSet::default());
        let set =
            HostSet { budget: Some(Pages::from_mib(512)), tax: Some(TaxRate::new(0.5).unwrap()) };
        set.save(dir.path()).unwrap();
        assert_eq!(HostSet::load(dir.path()).unwrap(), set);
        for (text, part) in
            [("{", "host.json"), ("{\"budget\":1}", "budget"), ("{\"tax\":2.0}", "tax")]
        {
            std::fs::write(dir.path().join(HOST), text).unwrap();
            let error = HostSet::load(dir.path()).unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn a_budget_that_the_host_has_no_more_is_the_configured_one_until_it_has() {
        let dir = tempfile::tempdir().unwrap();
        let host = host_memory().unwrap().pages();
        let tax = Some(TaxRate::new(0.5).unwrap());
        let configured = Pages(77);
        for (more, counts) in [(0, host), (1, configured), (1 << 40, configured)] {
            let set = HostSet { budget: Some(host + Pages(more)), tax };
            set.save(dir.path()).unwrap();
            let loaded = HostSet::load(dir.path()).unwrap();
            assert_eq!((loaded, loaded.budget_or(configured)), (set, counts));
            // Another setting leaves it as it was.
            let change = HostChange { no_tax: true, ..HostChange::default() };
            assert_eq!(loaded.changed(&change).unwrap().budget, set.budget);
        }
        assert_eq!(HostSet::default().budget_or(configured), configured);
    }
}
