//! What a former manager left, looked at before anything is touched: all of it must be understood, for
//! what is not may be a newer manager's VM.

use std::path::{Path, PathBuf};

use ballast_pager::service::VmFiles;

use crate::records::Record;
use crate::run_dir;

/// A VM that a former manager left, with its folder.
pub type Left = (PathBuf, Record);

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
        if record.is_alive() {
            VmFiles::verify(&folder)?;
        }
        left.push((folder, record));
    }
    Ok(left)
}
