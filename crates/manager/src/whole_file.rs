//! Small files that others read: whole, or as they were.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// Writes `NAME.new` beside and renames it. For the manager's user alone. Where the folder is on a disk, what was
/// written is there before the name is: a host that loses power has the one or the other. Whatever has that name is replaced, and not written through.
///
/// # Errors
/// The file is as it was.
pub fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let beside = beside(path);
    match std::fs::remove_file(&beside) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    // Links are not followed with it, either.
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(beside, path)
}

/// Removes a file, and what a write that was cut short left beside it.
pub fn remove(path: &Path) {
    for file in [path, &beside(path)] {
        let _ = std::fs::remove_file(file);
    }
}

fn beside(path: &Path) -> PathBuf {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    beside.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_under_the_other_name_is_replaced_not_written_through() {
        let dir = tempfile::tempdir().unwrap();
        let [file, beside, precious] =
            ["file", "file.new", "precious"].map(|name| dir.path().join(name));
        std::fs::write(&precious, "data").unwrap();
        std::os::unix::fs::symlink(&precious, &beside).unwrap();
        write(&file, b"first").unwrap();
        std::fs::hard_link(&precious, &beside).unwrap();
        write(&file, b"text").unwrap();
        assert_eq!(std::fs::read(&precious).unwrap(), b"data");
        assert_eq!(std::fs::read(&file).unwrap(), b"text");
        assert!(!file.is_symlink() && !beside.exists());
        std::fs::write(&beside, "cut sho").unwrap();
        remove(&file);
        assert!(!file.exists() && !beside.exists());
    }
}
