//! What the manager must remember of a VM to take it over after its own death: one JSON file in the
//! VM's run folder, beside its pmap.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use ballast_api::record::{RECORD_VERSION, is_process, process_started, read_record};
use ballast_api::{Management, VmSpec};
use ballast_qemu::AccelChoice;
use ballast_units::Pages;
use serde::{Deserialize, Serialize};

use crate::layout::RECORD;
use crate::swap::SwapFile;
use crate::sync::lock;
use crate::vm::VmParams;
use crate::whole_file;

/// Of VMs whose shim speaks a version that a manager of before refuses: their guests would wait.
const SHIM: u32 = RECORD_VERSION;
/// Of VMs whose RAM has several parts: a manager of before would take them for one.
const PARTS: u32 = 4;
/// Of VMs that are not paged: a manager of before would wait for their shims.
const UNPAGED: u32 = 3;
/// Of all others, which any manager understands.
const PAGED: u32 = 2;

/// Held for each change of a record that is there, its removal included.
static CHANGES: Mutex<()> = Mutex::new(());

/// Holds the VM's salt: for nobody but the manager's user.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// `PAGED`, `UNPAGED`, `PARTS` or `SHIM`; older ones are understood.
    pub version: u32,
    /// Of the VM, and of its folder.
    pub name: String,
    /// As it was started with. None: somebody else started it.
    pub spec: Option<VmSpec>,
    /// Those in force.
    pub params: VmParams,
    /// Guest RAM, with what can be plugged.
    pub size: Pages,
    /// What of it the guest began with, if more can be plugged: the first part. None: all, in one part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<Pages>,
    /// Reserved beside the pages, as it was at its start.
    pub overhead: Pages,
    /// Of its VMM.
    pub pid: u32,
    /// Start time of the process, in clock ticks since boot: process numbers are used again.
    pub pid_started: u64,
    /// In words, for people.
    pub accel: String,
    /// With whom it shares pages now. None: as its salt says.
    #[serde(default)]
    pub domain: Option<String>,
    /// Its swap files, in the order of their slots. None: not made yet, or by a manager that made one, of
    /// the VM's name.
    #[serde(default)]
    pub swap: Option<Vec<SwapFile>>,
    /// When its RAM was mapped, milliseconds since boot. None: not yet, or a manager had it that did not note it.
    #[serde(default)]
    pub mapped_ms: Option<u64>,
    /// Whether its process may have been stopped because it waits for pages that cannot be read.
    #[serde(default)]
    pub frozen: bool,
    /// The version of the protocol that its shim speaks. 0: not known, 3 at most.
    #[serde(default)]
    pub shim: u32,
    /// Why it is not paged, of a VM that never was: no shim comes for it.
    #[serde(default)]
    pub unpaged: Option<String>,
    /// What QMP has told last against paging it. A manager of before does not know of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub objection: Option<Management>,
    /// That another process mapped its RAM: as above, for as long as it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mapped: Option<String>,
    /// What the manager that left it had measured; see `measured`. Whatever is there, the VM can be taken over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<serde_json::Value>,
    /// Where its QMP is, of a VM that somebody else started. None: not known, or where VMs that the manager
    /// starts have it.
    #[serde(default)]
    pub qmp: Option<PathBuf>,
}

impl Record {
    /// Of a VM that a shim comes for; its process runs.
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
            version: PAGED,
            name: name.to_owned(),
            spec: spec.cloned(),
            params,
            size,
            boot: None,
            overhead,
            pid,
            // 0: not known, and never taken for its end.
            pid_started: process_started(pid).ok().flatten().unwrap_or(0),
            accel: accel.to_string(),
            domain: None,
            swap: None,
            mapped_ms: None,
            frozen: false,
            shim: 0,
            unpaged: None,
            objection: None,
            mapped: None,
            measured: None,
            qmp: None,
        }
    }

    /// Of a VM that is not paged, with the reason.
    #[must_use]
    pub fn unpaged(mut self, why: &str) -> Record {
        self.unpaged = Some(why.to_owned());
        self.version = self.version_for();
        self
    }

    /// With RAM that it began with, if that is not all that it may have.
    #[must_use]
    pub fn begun_with(mut self, boot: Pages) -> Record {
        self.boot = (boot != self.size).then_some(boot);
        self.version = self.version_for();
        self
    }

    /// With a shim that speaks this version.
    #[must_use]
    pub fn with_shim(mut self, version: u32) -> Record {
        self.shim = version;
        self.version = self.version_for();
        self
    }

    /// What it began with.
    pub fn boot(&self) -> Pages {
        self.boot.unwrap_or(self.size)
    }

    fn version_for(&self) -> u32 {
        match (self.boot, &self.unpaged) {
            (_, None) if self.shim > 3 => SHIM,
            (Some(_), _) => PARTS,
            // No shim comes for it.
            (None, Some(_)) => UNPAGED,
            (None, None) => PAGED,
        }
    }

    /// With the name of the domain that it is in.
    #[must_use]
    pub fn in_domain(self, domain: &str) -> Record {
        Record { domain: Some(domain.to_owned()), ..self }
    }

    /// See [`whole_file`].
    ///
    /// # Errors
    /// One line. Then the VM could not be taken over as it is now: nothing may be built upon it.
    pub fn save(&self, folder: &Path) -> Result<(), String> {
        let path = folder.join(RECORD);
        let text = serde_json::to_vec(self).map_err(std::io::Error::from);
        text.and_then(|text| whole_file::write(&path, &text))
            .map_err(|e| format!("its record, {}: {e}", path.display()))
    }

    /// Where the record of the VM with this folder is.
    pub fn path(folder: &Path) -> PathBuf {
        folder.join(RECORD)
    }

    /// None if there is none.
    ///
    /// # Errors
    /// There is one that cannot be used.
    pub fn load(folder: &Path) -> Result<Option<Record>, String> {
        let path = folder.join(RECORD);
        let Some(text) = read_record(&path).map_err(|e| e.to_string())? else { return Ok(None) };
        serde_json::from_slice(&text).map(Some).map_err(|e| format!("{}: {e}", path.display()))
    }

    /// Whether the process that the record names still runs.
    ///
    /// # Errors
    /// One line. That cannot be told: nothing of the VM may be removed.
    pub fn is_alive(&self) -> Result<bool, String> {
        is_process(self.pid, self.pid_started)
            .map_err(|e| format!("whether its process {} runs cannot be told: {e}", self.pid))
    }

    /// Changes a record that is there, and answers whether one is: that of a VM that has ended is gone. One
    /// at a time: each builds upon what the last one wrote.
    ///
    /// # Errors
    /// One line; it is as it was.
    pub fn update(folder: &Path, change: impl FnOnce(&mut Record)) -> Result<bool, String> {
        let _one = lock(&CHANGES);
        let Some(mut record) = Record::load(folder)? else { return Ok(false) };
        change(&mut record);
        record.version = record.version_for();
        record.save(folder).map(|()| true)
    }

    /// The same, of a VM of which nobody may go on without.
    ///
    /// # Errors
    /// It is as it was, or there is none.
    pub fn must_update(folder: &Path, change: impl FnOnce(&mut Record)) -> Result<(), String> {
        match Record::update(folder, change)? {
            true => Ok(()),
            false => Err(format!("its record, {}: it is gone", folder.join(RECORD).display())),
        }
    }

    /// See `update`.
    ///
    /// # Errors
    /// It cannot be written, and is as it was.
    pub fn update_params(folder: &Path, params: &VmParams) -> Result<(), String> {
        Record::update(folder, |record| record.params = params.clone()).map(drop)
    }

    /// The VM has ended: nobody takes it over. Changes that come later find none.
    pub fn remove(folder: &Path) {
        let _one = lock(&CHANGES);
        whole_file::remove(&folder.join(RECORD));
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
        ours.save(dir.path()).unwrap();
        assert_eq!(Record::load(dir.path()), Ok(Some(ours.clone())));
        let mode = std::fs::metadata(dir.path().join(RECORD)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "it holds the salt");
        assert_eq!(ours.is_alive(), Ok(true));
        let other = Record { pid_started: ours.pid_started + 1, ..ours };
        assert_eq!(other.is_alive(), Ok(false));
        assert!(
            Record { pid_started: 0, ..other }.is_alive().unwrap_err().contains("cannot be told")
        );
        let params = VmParams { shares: 9, ..record().params };
        Record::update_params(dir.path(), &params).unwrap();
        assert_eq!(Record::load(dir.path()).unwrap().unwrap().params, params);
        Record::remove(dir.path());
        assert_eq!(Record::load(dir.path()), Ok(None));
    }

    #[test]
    fn a_record_from_before_salts_has_none() {
        let dir = tempfile::tempdir().unwrap();
        let mut old = serde_json::to_value(record()).unwrap();
        old["params"].as_object_mut().unwrap().remove("salt").unwrap();
        std::fs::write(dir.path().join(RECORD), old.to_string()).unwrap();
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
        std::fs::write(dir.path().join(RECORD), old.to_string()).unwrap();
        let read = Record::load(dir.path()).unwrap().unwrap();
        assert_eq!((read.version, &read.swap, read.frozen), (1, &None, false));
        assert_eq!(Record::update(dir.path(), |record| record.frozen = true), Ok(true));
        let read = Record::load(dir.path()).unwrap().unwrap();
        assert_eq!((read.version, read.frozen), (PAGED, true));
        // A manager of before would wait for its shim.
        Record::update(dir.path(), |record| record.unpaged = Some("no shim".into())).unwrap();
        assert_eq!(Record::load(dir.path()).unwrap().unwrap().version, UNPAGED);
    }

    #[test]
    fn a_record_of_several_parts_is_for_managers_that_know_them() {
        let dir = tempfile::tempdir().unwrap();
        let two = record().begun_with(Pages(1));
        two.save(dir.path()).unwrap();
        let read = Record::load(dir.path()).unwrap().unwrap();
        assert_eq!((read.version, read.boot()), (PARTS, Pages(1)));
        assert_eq!(Record::update(dir.path(), |record| record.frozen = true), Ok(true));
        Record::update(dir.path(), |record| record.unpaged = Some("no shim".into())).unwrap();
        assert_eq!(Record::load(dir.path()).unwrap().unwrap().version, PARTS);
        // One part is what it always was, and nothing is said of it.
        let one = record().begun_with(Pages(4));
        assert_eq!((one.version, one.boot()), (PAGED, Pages(4)));
        // Whose shim older managers refuse, they are not to take over; without a shim they may.
        assert_eq!(record().with_shim(3).version, PAGED);
        assert_eq!(record().begun_with(Pages(1)).with_shim(5).version, SHIM);
        assert_eq!(record().with_shim(4).unpaged("why").version, UNPAGED);
        assert!(!serde_json::to_string(&one).unwrap().contains("boot"));
    }

    #[test]
    fn newer_and_damaged_records_are_refused_untouched() {
        let dir = tempfile::tempdir().unwrap();
        Record { version: RECORD_VERSION + 1, ..record() }.save(dir.path()).unwrap();
        let error = Record::load(dir.path()).unwrap_err();
        assert!(error.contains("newer manager"), "{error}");
        std::fs::write(dir.path().join(RECORD), b"{\"version\": 1").unwrap();
        assert!(Record::load(dir.path()).is_err());
        assert!(Record::update(dir.path(), |_| {}).is_err());
        assert!(dir.path().join(RECORD).exists());
    }

    #[test]
    fn of_changes_that_come_at_once_none_is_lost() {
        let dir = tempfile::tempdir().unwrap();
        record().save(dir.path()).unwrap();
        let changes = || {
            for _ in 0..50 {
                let changed = Record::update(dir.path(), |record| record.params.shares += 1);
                assert_eq!(changed, Ok(true));
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(changes);
            }
        });
        let read = Record::load(dir.path()).unwrap().unwrap();
        assert_eq!(read.params.shares, record().params.shares + 200);
    }

    #[test]
    fn what_cannot_be_written_is_told_and_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Record::update(dir.path(), |_| {}), Ok(false));
        let error = Record::must_update(dir.path(), |_| {}).unwrap_err();
        assert!(error.contains("vm.json") && error.contains("gone"), "{error}");
        let ours = record();
        ours.save(dir.path()).unwrap();
        // In the way of what is written beside it.
        std::fs::create_dir(dir.path().join("vm.json.new")).unwrap();
        let error = Record { frozen: true, ..ours.clone() }.save(dir.path()).unwrap_err();
        assert!(error.contains("vm.json") && !error.contains('\n'), "{error}");
        assert!(Record::update(dir.path(), |record| record.frozen = true).is_err());
        assert_eq!(Record::load(dir.path()), Ok(Some(ours)));
    }
}
