//! What the manager must remember of a VM to take it over after its own death: one JSON file in the
//! VM's run folder, beside its pmap.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Mutex;

use ballast_api::VmSpec;
use ballast_api::record::{RECORD_VERSION, process_started, read_record};
use ballast_qemu::AccelChoice;
use ballast_units::Pages;
use serde::{Deserialize, Serialize};

use crate::swap::SwapFile;
use crate::vm::{VmParams, lock};

const VERSION: u32 = RECORD_VERSION;
const NAME: &str = "vm.json";

/// Held for each change of a record that is there, its removal included.
static CHANGES: Mutex<()> = Mutex::new(());

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub version: u32,
    pub name: String,
    pub spec: Option<VmSpec>,
    pub params: VmParams,
    pub size: Pages,
    pub overhead: Pages,
    pub pid: u32,
    /// Start time of the process, in clock ticks since boot: process numbers are used again.
    pub pid_started: u64,
    pub accel: String,
    /// With whom it shares pages now. None: as its salt says.
    #[serde(default)]
    pub domain: Option<String>,
    /// Its swap files, in the order of their slots. None: not made yet, or by a manager that made one, of
    /// the VM's name.
    #[serde(default)]
    pub swap: Option<Vec<SwapFile>>,
    /// Whether its process may have been stopped because it waits for pages that cannot be read.
    #[serde(default)]
    pub frozen: bool,
}

impl Record {
    pub fn new(
        name: &str,
        spec: Option<&VmSpec>,
        params: VmParams,
        size: Pages,
        overhead: Pages,
        pid: u32,
        accel: &AccelChoice,
    ) -> Record {
        Record {
            version: VERSION,
            name: name.to_owned(),
            spec: spec.cloned(),
            params,
            size,
            overhead,
            pid,
            pid_started: process_started(pid).unwrap_or(0),
            accel: accel.to_string(),
            domain: None,
            swap: None,
            frozen: false,
        }
    }

    #[must_use]
    pub fn in_domain(self, domain: &str) -> Record {
        Record { domain: Some(domain.to_owned()), ..self }
    }

    /// Written beside and renamed, so that there is always a whole one.
    pub fn save(&self, folder: &Path) {
        let write = || -> std::io::Result<()> {
            let fresh = folder.join("vm.json.new");
            let mut file = std::fs::OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&fresh)?;
            file.write_all(&serde_json::to_vec(self)?)?;
            std::fs::rename(fresh, folder.join(NAME))
        };
        if let Err(e) = write() {
            tracing::error!(
                vm = self.name,
                "{}: {e}: it could not be taken over after a restart",
                folder.display()
            );
        }
    }

    /// None if there is none; an error if there is one that cannot be used.
    pub fn load(folder: &Path) -> Result<Option<Record>, String> {
        let path = folder.join(NAME);
        let Some(text) = read_record(&path).map_err(|e| e.to_string())? else { return Ok(None) };
        serde_json::from_slice(&text).map(Some).map_err(|e| format!("{}: {e}", path.display()))
    }

    /// Whether the process that the record names still runs.
    pub fn is_alive(&self) -> bool {
        process_started(self.pid) == Some(self.pid_started)
    }

    /// Changes a record that is there. One at a time: each builds upon what the last one wrote.
    pub fn update(folder: &Path, change: impl FnOnce(&mut Record)) {
        let _one = lock(&CHANGES);
        if let Ok(Some(mut record)) = Record::load(folder) {
            record.version = VERSION;
            change(&mut record);
            record.save(folder);
        }
    }

    pub fn update_params(folder: &Path, params: VmParams) {
        Record::update(folder, |record| record.params = params);
    }

    pub fn update_domain(folder: &Path, domain: &str) {
        Record::update(folder, |record| record.domain = Some(domain.to_owned()));
    }

    pub fn remove(folder: &Path) {
        let _one = lock(&CHANGES);
        let _ = std::fs::remove_file(folder.join(NAME));
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use ballast_api::Salt;

    use super::*;

    fn record() -> Record {
        let salt = Some(Salt::try_from("blue").unwrap());
        let params = VmParams {
            shares: 7,
            min: Pages(1),
            max: Pages(4),
            tax: Some(0.5),
            salt,
            pool: None,
            asked: None,
        };
        let accel = AccelChoice::Kvm;
        Record::new("a", None, params, Pages(4), Pages(1), std::process::id(), &accel)
    }

    #[test]
    fn a_record_survives_and_tells_whether_its_process_does() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Record::load(dir.path()), Ok(None));
        let ours = record();
        ours.save(dir.path());
        assert_eq!(Record::load(dir.path()), Ok(Some(ours.clone())));
        let mode = std::fs::metadata(dir.path().join(NAME)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "it holds the salt");
        assert!(ours.is_alive());
        assert!(!Record { pid_started: ours.pid_started + 1, ..ours }.is_alive());
        let params = VmParams { shares: 9, ..record().params };
        Record::update_params(dir.path(), params.clone());
        assert_eq!(Record::load(dir.path()).unwrap().unwrap().params, params);
        Record::remove(dir.path());
        assert_eq!(Record::load(dir.path()), Ok(None));
    }

    #[test]
    fn a_record_from_before_salts_has_none() {
        let dir = tempfile::tempdir().unwrap();
        let mut old = serde_json::to_value(record()).unwrap();
        old["params"].as_object_mut().unwrap().remove("salt").unwrap();
        std::fs::write(dir.path().join(NAME), old.to_string()).unwrap();
        assert_eq!(Record::load(dir.path()).unwrap().unwrap().params.salt, None);
    }

    #[test]
    fn a_record_of_version_1_is_understood_and_becomes_one_of_this() {
        let dir = tempfile::tempdir().unwrap();
        let mut old = serde_json::to_value(record()).unwrap();
        old["version"] = 1.into();
        for key in ["swap", "frozen"] {
            old.as_object_mut().unwrap().remove(key).unwrap();
        }
        std::fs::write(dir.path().join(NAME), old.to_string()).unwrap();
        let read = Record::load(dir.path()).unwrap().unwrap();
        assert_eq!((read.version, &read.swap, read.frozen), (1, &None, false));
        Record::update(dir.path(), |record| record.frozen = true);
        let read = Record::load(dir.path()).unwrap().unwrap();
        assert_eq!((read.version, read.frozen), (VERSION, true));
    }

    #[test]
    fn newer_and_damaged_records_are_refused_untouched() {
        let dir = tempfile::tempdir().unwrap();
        Record { version: VERSION + 1, ..record() }.save(dir.path());
        let error = Record::load(dir.path()).unwrap_err();
        assert!(error.contains("newer manager"), "{error}");
        std::fs::write(dir.path().join(NAME), b"{\"version\": 1").unwrap();
        assert!(Record::load(dir.path()).is_err());
        assert!(dir.path().join(NAME).exists());
    }
}
