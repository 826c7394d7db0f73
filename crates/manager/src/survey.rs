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
    /// What is not understood: its files stay as they are.
    pub unread: Vec<Unread>,
}

/// A folder whose record cannot be read, or is another's, or whose process cannot be told.
pub struct Unread {
    /// Of the VM that it may be: nobody is to have that name while `folder` is there.
    pub name: String,
    /// What must be mended, or removed.
    pub folder: PathBuf,
    /// What is wrong with it.
    pub why: String,
    /// Whether it may be of a VMM that runs and is in none of the others. What that holds nobody knows: every page that it
    /// may share stays.
    pub may_run: bool,
}

/// All VMs that are noted in the run folder.
///
/// # Errors
/// What a newer manager wrote, which the error names; or the folder cannot be read. Nothing has been changed.
pub fn survey(run_dir: &Path) -> anyhow::Result<Survey> {
    run_dir::check_format(run_dir)?;
    let (mut survey, mut moved) = (Survey::default(), Vec::new());
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
            Ok(Some(record)) => {
                moved.push((name, folder, record));
                continue;
            }
            Ok(None) => continue,
            Err(why) => {
                survey.unread.push(Unread { name, folder, why, may_run: true });
                continue;
            }
        };
        // Of one that has ended, nothing is read any more.
        let files = match record.is_alive() {
            Ok(true) => VmFiles::verify(&folder),
            Ok(false) => Ok(()),
            Err(why) => {
                survey.unread.push(Unread { name, folder, why, may_run: true });
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
    for (name, folder, record) in moved {
        survey.put_moved(name, folder, record);
    }
    Ok(survey)
}

impl Survey {
    /// A folder `name` that has the record of another name: a copy, or that VM's own, which was moved. Call when all others
    /// are known.
    fn put_moved(&mut self, name: String, folder: PathBuf, record: Record) {
        let path = Record::path(&folder);
        let why = RecordError::Another { path, name: record.name.clone() }.to_string();
        let process = |record: &Record| (record.pid, record.pid_started);
        let is_copy = self.left.iter().any(|left| process(&left.record) == process(&record));
        let may_run = !is_copy && record.is_alive() != Ok(false);
        let is_anybodys = |name: &str| {
            let mut left = self.left.iter().map(|left| &left.record.name);
            left.any(|n| n == name) || self.unread.iter().any(|unread| unread.name == name)
        };
        // Whoever had its name would remove its pages.
        if may_run && !is_anybodys(&record.name) {
            let (folder, why) = (folder.clone(), why.clone());
            self.unread.push(Unread { name: record.name, folder, why, may_run });
        }
        self.unread.push(Unread { name, folder, why, may_run });
    }
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
        // One that has ended, and a copy of it; one of which nobody knows which process it is.
        note("a", "a", Some(1));
        note("a.old", "a", Some(1));
        note("b", "b", Some(0));
        // One that runs, and a copy of it; one whose folder was moved; one that has taken the name of such a one since.
        note("e", "e", None);
        note("e.old", "e", None);
        note("f.old", "f", Some(0));
        note("g", "g", Some(1));
        note("g.old", "g", Some(0));
        std::fs::create_dir_all(folder("c")).unwrap();
        std::fs::write(folder("c").join("vm.json"), "{").unwrap();
        std::fs::create_dir_all(folder("nothing")).unwrap();
        let found = survey(dir.path()).unwrap();
        let mut left: Vec<_> = found.left.iter().map(|left| left.record.name.as_str()).collect();
        left.sort_unstable();
        assert_eq!(left, ["a", "e", "g"]);
        let mut unread = found.unread;
        unread.sort_by(|a, b| a.name.cmp(&b.name));
        let names: Vec<_> = unread.iter().map(|it| (it.name.as_str(), it.may_run)).collect();
        // Those of which a VMM may run that is none of the others; whoever took the name of one would remove its pages.
        assert_eq!(
            names,
            [
                ("a.old", false),
                ("b", true),
                ("c", true),
                ("e.old", false),
                ("f", true),
                ("f.old", true),
                ("g.old", true)
            ]
        );
        assert!(unread[0].why.contains("the record of a VM named 'a'"), "{}", unread[0].why);
        // What must go for the name to be free.
        assert_eq!([&unread[4].folder, &unread[5].folder], [&folder("f.old"); 2]);
    }
}
