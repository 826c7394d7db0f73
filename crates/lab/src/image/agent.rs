//! A disk with Debian's own qemu-guest-agent, the libraries that it needs, and the module of the kernel
//! that has its port. Not part of the initramfs: every other guest would carry it in its memory.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use ballast_units::Bytes;

use super::cache::Cache;
use super::{disk, kernel, services};

/// Changes when what is on the disk does.
const VERSION: u32 = 1;
/// Of the agent's packages, what it runs without.
const UNUSED: [&str; 4] = ["usr/share", "etc", "usr/lib/x86_64-linux-gnu/gconv", "usr/lib/systemd"];
/// Room for what guests write.
const FREE: Bytes = Bytes::from_mib(192);

/// `package` is the kernel's.
pub fn get(cache: &Cache, package: &str) -> Result<PathBuf> {
    cache.file(&format!("agent-{VERSION}-{package}.img"), |path| {
        build(path, package).context("the guest agent's disk")
    })
}

fn build(path: &Path, package: &str) -> Result<()> {
    // Beside the image: it may be too large for /tmp.
    let folder = path.parent().context("no folder")?;
    let work = tempfile::Builder::new().prefix("partial-agent-").tempdir_in(folder)?;
    let root = work.path().join("root");
    services::unpack(&["qemu-guest-agent"], work.path(), &root)?;
    for unused in UNUSED {
        match fs::remove_dir_all(root.join(unused)) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e.into()),
            _ => {}
        }
    }
    add_module(&root, package)?;
    disk::from_folder(path, &root, FREE)
}

/// What the workload `agent` looks for: the module of its port. None in a kernel that has it built in.
pub(super) fn add_module(root: &Path, package: &str) -> Result<()> {
    if let Some(module) = kernel::module(package, "virtio_console")? {
        fs::write(root.join("virtio_console.ko"), module)?;
    }
    Ok(())
}
