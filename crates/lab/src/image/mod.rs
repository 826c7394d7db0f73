//! What sample guests boot: a packaged kernel, and an initramfs around `ballast-guest`.
//!
//! All of it is kept in a cache folder (`$BALLAST_CACHE`, else `~/.cache/ballast`) and rebuilt when
//! an input changes.

mod agent;
mod cache;
mod cpio;
mod disk;
mod guest_binary;
mod initramfs;
mod kernel;
mod services;

use std::path::PathBuf;

use anyhow::Result;

pub use disk::{dbench_disk, empty_disk};

/// Paths of what a sample guest needs.
#[derive(Clone, Debug)]
pub struct Image {
    /// The kernel's package, which names its version.
    pub package: String,
    /// As QEMU boots it.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initrd: PathBuf,
}

/// Finds, fetches and builds what is missing. `package` names a kernel package instead of the one
/// in the cache or the newest that apt offers.
pub fn prepare(package: Option<&str>) -> Result<Image> {
    let cache = cache::Cache::open()?;
    let kernel = kernel::get(&cache, package)?;
    let initrd = initramfs::get(&cache, &kernel)?;
    Ok(Image { package: kernel.package, kernel: kernel.vmlinuz, initrd })
}

/// The disk with services and qemu-guest-agent, for guests that boot `image`: built once, and shared by all
/// guests, who write to overlays of their own.
pub fn services_disk(image: &Image) -> Result<PathBuf> {
    services::get(&cache::Cache::open()?, &image.package)
}

/// The disk with qemu-guest-agent, for a guest that boots `image` and runs the workload `agent`.
pub fn agent_disk(image: &Image) -> Result<PathBuf> {
    agent::get(&cache::Cache::open()?, &image.package)
}
