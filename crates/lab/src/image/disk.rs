//! ext4 disk images for sample guests, sparse, made without mounting anything.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use ballast_units::Bytes;

use crate::tools;

/// An empty ext4 file system of `size` in the file `path`.
pub fn empty_disk(path: &Path, size: Bytes) -> Result<()> {
    make(path, size, None)
}

/// As [`empty_disk`], with dbench, its load and its libraries in the folder `dbench`. `unflushed.txt`
/// there is the load without its flushes, which dbench did not carry out before version 4.
pub fn dbench_disk(path: &Path, size: Bytes) -> Result<()> {
    let program = tools::find("dbench", "dbench")?;
    let load = Path::new("/usr/share/dbench/client.txt");
    let work = tempfile::tempdir().context("temporary folder")?;
    let folder = work.path().join("dbench");
    std::fs::create_dir(&folder).context("temporary folder")?;
    let copy = |from: &Path, name: &str| {
        let told = || format!("{} (apt-get install dbench)", from.display());
        std::fs::copy(from, folder.join(name)).with_context(told).map(drop)
    };
    copy(&program, "dbench")?;
    copy(load, "client.txt")?;
    let text = std::fs::read_to_string(load).with_context(|| load.display().to_string())?;
    std::fs::write(folder.join("unflushed.txt"), unflushed(&text)).context("temporary folder")?;
    let list = tools::run(Command::new(tools::find("ldd", "libc-bin")?).arg(&program))?;
    for library in libraries(&String::from_utf8_lossy(&list)) {
        let name = library.file_name().unwrap_or_default().to_string_lossy().into_owned();
        copy(&library, if name.starts_with("ld-") { "ld.so" } else { &name })?;
    }
    make(path, size, Some(work.path()))
}

/// As [`empty_disk`], with what is in `folder`, and `free` beside it.
pub fn from_folder(path: &Path, folder: &Path, free: Bytes) -> Result<()> {
    let used = tools::run(Command::new(tools::find("du", "coreutils")?).arg("-sk").arg(folder))?;
    let used = String::from_utf8_lossy(&used);
    let kib: u64 = used.split_whitespace().next().and_then(|w| w.parse().ok()).context("du")?;
    // A tenth for the file system's own tables.
    make(path, Bytes((kib << 10) * 11 / 10 + free.0), Some(folder))
}

/// Without the lines that flush a file.
fn unflushed(load: &str) -> String {
    load.lines().filter(|l| !l.starts_with("Flush ")).flat_map(|l| [l, "\n"]).collect()
}

/// The paths that ldd prints: "libc.so.6 => /lib/libc.so.6 (0x...)", "/lib64/ld.so (0x...)".
fn libraries(ldd: &str) -> Vec<PathBuf> {
    ldd.lines()
        .filter_map(|l| l.split_whitespace().find(|w| w.starts_with('/')))
        .map(PathBuf::from)
        .collect()
}

fn make(path: &Path, size: Bytes, content: Option<&Path>) -> Result<()> {
    let mut command = Command::new(tools::find("mke2fs", "e2fsprogs")?);
    command.args(["-q", "-F", "-t", "ext4", "-m", "0", "-E", "lazy_itable_init=0"]);
    if let Some(folder) = content {
        command.arg("-d").arg(folder);
    }
    command.arg(path).arg(format!("{}k", size.0 / 1024));
    tools::run(&mut command).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ldd_lines_become_paths() {
        let text = "\tlinux-vdso.so.1 (0x7f)\n\tlibc.so.6 => /lib/x/libc.so.6 (0x7f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x7f)\n";
        let want = ["/lib/x/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(libraries(text), want);
    }

    #[test]
    fn only_flushes_are_left_out() {
        let load =
            "WriteX 9938 0 5 5 NT_STATUS_OK\nFlush 9938 NT_STATUS_OK\nClose 9938 NT_STATUS_OK\n";
        assert_eq!(unflushed(load), "WriteX 9938 0 5 5 NT_STATUS_OK\nClose 9938 NT_STATUS_OK\n");
    }

    #[test]
    fn a_disk_is_ext4_and_sparse() {
        if tools::find("mke2fs", "e2fsprogs").is_err() {
            eprintln!("SKIPPED a_disk_is_ext4_and_sparse: mke2fs is not installed");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("d.img");
        empty_disk(&path, Bytes::from_mib(64)).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert_eq!(bytes.len(), 64 << 20);
        // The superblock's magic number.
        assert_eq!(bytes[1024 + 0x38..1024 + 0x3a], [0x53, 0xef]);
        assert!(empty_disk(&dir.path().join("no/d.img"), Bytes::from_mib(64)).is_err());
    }
}
