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
    /// A budget above the memory of the host, which may have less than when it was set, is that memory: guests wait for this
    /// manager. The file says as before, for a host that has it again.
    ///
    /// # Errors
    /// What a former manager left cannot be used.
    pub fn load(run_dir: &Path) -> anyhow::Result<HostSet> {
        let path = run_dir.join(HOST);
        let named = |e: String| anyhow::anyhow!("{}: {e}", path.display());
        let mut set: HostSet = match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|e| named(e.to_string()))?,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(HostSet::default()),
            Err(e) => return Err(named(e.to_string())),
        };
        if let Some(budget) = &mut set.budget {
            let host = host_memory().map_or(*budget, Bytes::pages);
            if *budget > host {
                let path = path.display();
                tracing::error!(
                    "{path}: budget: {budget} is above the host's memory: {host} counts"
                );
                *budget = host;
            }
            check_budget(*budget).map_err(|e| named(format!("budget: {e}")))?;
        }
        Ok(set)
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
    fn a_budget_that_the_host_has_no_more_is_what_it_has() {
        let dir = tempfile::tempdir().unwrap();
        let host = host_memory().unwrap().pages();
        let tax = Some(TaxRate::new(0.5).unwrap());
        for more in [0, 1, 1 << 40] {
            let set = HostSet { budget: Some(host + Pages(more)), tax };
            set.save(dir.path()).unwrap();
            let text = std::fs::read(dir.path().join(HOST)).unwrap();
            let loaded = HostSet::load(dir.path()).unwrap();
            assert_eq!(loaded, HostSet { budget: Some(host), tax });
            check_budget(host).unwrap();
            assert_eq!(std::fs::read(dir.path().join(HOST)).unwrap(), text);
        }
    }
}
