//! The initramfs of sample guests: `ballast-guest` as /init, busybox, the kernel's modules.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::cache::Cache;
use super::cpio::Archive;
use super::guest_binary;
use super::kernel::Kernel;
use crate::{say, tools};

/// Changes when the layout does.
const VERSION: u32 = 1;

/// Of this kernel, this build of `ballast-guest` and this host's busybox.
pub fn get(cache: &Cache, kernel: &Kernel) -> Result<PathBuf> {
    let guest = guest_binary::get()?;
    let busybox = tools::find("busybox", "busybox-static")?;
    let read = |p: &Path| std::fs::read(p).with_context(|| p.display().to_string());
    let guest = read(&guest)?;
    let shell = read(&busybox)?;
    if !guest_binary::is_static(&shell) {
        bail!("{} is not static (apt-get install busybox-static)", busybox.display());
    }
    let mut modules = Vec::new();
    for path in &kernel.modules {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        modules.push((name, read(path)?));
    }
    let mut hasher = DefaultHasher::new();
    (VERSION, &guest, &shell, &modules).hash(&mut hasher);
    cache.file(&format!("initramfs-{:016x}.cpio.gz", hasher.finish()), |path| {
        say::step("Building the initramfs");
        write(path, &guest, &shell, &modules).with_context(|| path.display().to_string())
    })
}

fn write(path: &Path, guest: &[u8], busybox: &[u8], modules: &[(String, Vec<u8>)]) -> Result<()> {
    let mut a = Archive::new(Vec::new());
    for dir in ["bin", "dev", "disk", "lib", "lib/modules", "proc", "sys", "tmp"] {
        a.dir(dir)?;
    }
    // The kernel opens it for process 1 before anything is mounted.
    a.char_device("dev/console", 0o600, (5, 1))?;
    a.file("init", 0o755, guest)?;
    a.file("bin/busybox", 0o755, busybox)?;
    let order: String = modules.iter().map(|(name, _)| format!("{name}\n")).collect();
    a.file("lib/modules/order", 0o644, order.as_bytes())?;
    for (name, bytes) in modules {
        a.file(&format!("lib/modules/{name}"), 0o644, bytes)?;
    }
    let archive = a.finish()?;
    let mut gzip = Command::new(tools::find("gzip", "gzip")?)
        .arg("-9n")
        .stdin(Stdio::piped())
        .stdout(std::fs::File::create(path)?)
        .spawn()
        .context("gzip")?;
    let written = gzip.stdin.take().map_or(Ok(()), |mut pipe| pipe.write_all(&archive));
    let status = gzip.wait().context("gzip")?;
    written.context("gzip")?;
    if !status.success() {
        bail!("gzip ended with {status}");
    }
    Ok(())
}
