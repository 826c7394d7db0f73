//! Small files that others read: whole, or as they were.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Writes `NAME.new` beside and renames it. For the manager's user alone. Not flushed to a disk: what is kept in
/// this way lies on the runtime tmpfs.
///
/// # Errors
/// The file is as it was.
pub fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
    file.write_all(bytes)?;
    std::fs::rename(beside, path)
}
