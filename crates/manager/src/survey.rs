//! What a former manager left, looked at before anything is touched: all of it must be understood, for
//! what is not may be a newer manager's VM.

use std::path::{Path, PathBuf};

use ballast_pager::service::VmFiles;

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

/// All VMs that are noted in the run folder. An error names the file that this manager does not
/// understand; nothing has been changed.
pub fn survey(run_dir: &Path) -> anyhow::Result<Vec<Left>> {
    run_dir::check_format(run_dir)?;
    let folders = match std::fs::read_dir(run_dir.join("vms")) {
        Ok(folders) => folders,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e.into()),
    };
    let mut left = Vec::new();
    for entry in folders {
        let folder = entry?.path();
        let Some(record) = Record::load(&folder).map_err(anyhow::Error::msg)? else { continue };
        // Of one that has ended, nothing is read any more.
        let files = if record.is_alive() { VmFiles::verify(&folder) } else { Ok(()) };
        let damage = match files {
            Ok(()) => None,
            Err(e) if e.is_newer() => return Err(e.into()),
            Err(e) => Some(e.to_string()),
        };
        left.push(Left { folder, record, damage });
    }
    Ok(left)
}
