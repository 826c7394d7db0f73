//! What a former manager left, looked at before anything is touched: all of it must be understood, for
//! what is not may be a newer manager's VM.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use ballast_api::record::{RecordError, read_record};
use ballast_pager::service::VmFiles;

use crate::layout::VMS;
use crate::records::Record;
use crate::run_dir;

/// A VM that a former manager left.
pub struct Left {
    /// In the run folder; its name is the VM's.
    pub folder: PathBuf,
    /// Its process may have ended since it was written.
    pub record: Record,
    /// What is wrong with its files: it waits, as it is, and the others do not wait for it.
    pub damage: Option<String>,
}

/// What is in the run folder.
#[derive(Default)]
pub struct Survey {
    /// Those that are understood.
    pub left: Vec<Left>,
    /// Names of VMs whose records cannot be read, or are another's, or whose processes not be told, and why. Whether they run nobody knows, nor what they hold: their
    /// files stay as they are, and so does every page that they may share.
    pub unread: Vec<(String, String)>,
}

/// All VMs that are noted in the run folder.
///
/// # Errors
/// What a newer manager wrote, which the error names; or the folder cannot be read. Nothing has been changed.
pub fn survey(run_dir: &Path) -> anyhow::Result<Survey> {
    run_dir::check_format(run_dir)?;
    let mut survey = Survey::default();
    let vms = run_dir.join(VMS);
    let folders = match std::fs::read_dir(&vms) {
        Ok(folders) => folders,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(survey),
        Err(e) => return Err(e).with_context(|| vms.display().to_string()),
    };
    for entry in folders {
        let entry = entry?;
        let folder = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        let record = match read_record(&Record::path(&folder)) {
            Err(e @ RecordError::Newer { .. }) => return Err(e.into()),
            Err(e) => Err(e.to_string()),
            Ok(_) => Record::load(&folder),
        };
        let record = match record {
            Ok(Some(record)) if record.name == name => record,
            // What is done by its name would be done to that one.
            Ok(Some(Record { name: other, .. })) => {
                let path = Record::path(&folder);
                survey.unread.push((name, RecordError::Another { path, name: other }.to_string()));
                continue;
            }
            Ok(None) => continue,
            Err(why) => {
                survey.unread.push((name, why));
                continue;
            }
        };
        // Of one that has ended, nothing is read any more.
        let files = match record.is_alive() {
            Ok(true) => VmFiles::verify(&folder),
            Ok(false) => Ok(()),
            Err(why) => {
                survey.unread.push((record.name, why));
                continue;
            }
        };
        let damage = match files {
            Ok(()) => None,
            Err(e) if e.is_newer() => return Err(e.into()),
            Err(e) => Some(e.to_string()),
        };
        survey.left.push(Left { folder, record, damage });
    }
    Ok(survey)
}

#[cfg(test)]
mod tests {
    use ballast_qemu::AccelChoice;
    use ballast_units::Pages;

    use super::*;
    use crate::vm::{Asked, VmParams};

    /// Whoever mends a record keeps a copy of its folder beside it.
    #[test]
    fn a_folder_that_has_the_record_of_another_is_nobodys_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        let folder = |name: &str| dir.path().join(VMS).join(name);
        let size = Pages(4);
        let params = VmParams::resolve(&[], "a", size.into(), Asked::default()).unwrap();
        let note = |at: &str, name: &str, started: Option<u64>| {
            let (pid, accel) = (std::process::id(), AccelChoice::Kvm);
            let mut record = Record::new(name, None, params.clone(), size, Pages(1), pid, &accel);
            record.pid_started = started.unwrap_or(record.pid_started);
            std::fs::create_dir_all(folder(at)).unwrap();
            record.save(&folder(at)).unwrap();
        };
        run_dir::set_format(dir.path()).unwrap();
        // One that has ended, a copy of it, and one of which nobody knows which process it is.
        note("a", "a", Some(1));
        note("a.old", "a", Some(1));
        note("b", "b", Some(0));
        std::fs::create_dir_all(folder("c")).unwrap();
        std::fs::write(folder("c").join("vm.json"), "{").unwrap();
        std::fs::create_dir_all(folder("nothing")).unwrap();
        let found = survey(dir.path()).unwrap();
        let left: Vec<_> = found.left.iter().map(|left| left.record.name.as_str()).collect();
        assert_eq!(left, ["a"]);
        let mut unread = found.unread;
        unread.sort();
        let names: Vec<_> = unread.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["a.old", "b", "c"]);
        assert!(unread[0].1.contains("the record of a VM named 'a'"), "{}", unread[0].1);
    }
}
