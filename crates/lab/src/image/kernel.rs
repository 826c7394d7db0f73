//! A kernel from the distribution's packages, unpacked and not installed.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::cache::Cache;
use crate::{say, tools};

/// Modules a sample guest loads, in this order; what a kernel has built in has no file.
const MODULES: [&str; 10] = [
    "virtio_ring",
    "virtio",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_balloon",
    "virtio_mem",
    "virtio_blk",
    "button",
    "evdev",
];

/// Of a kernel's folder in the cache; the number changes with the modules.
const FOLDER: &str = "kernel-2-";

/// Families of kernel packages, best first: (begin, end) of the name. Debian's cloud kernels are
/// small; Ubuntu's generic ones keep their modules in a second package.
const FAMILIES: [(&str, &str); 4] = [
    ("linux-image-6.1.", "-cloud-amd64"),
    ("linux-image-6.12.", "-cloud-amd64"),
    ("linux-image-6.8.", "-generic"),
    ("linux-image-unsigned-6.8.", "-generic"),
];

/// What of a kernel's package a guest boots, in the cache.
pub struct Kernel {
    /// Its name.
    pub package: String,
    /// As QEMU boots it.
    pub vmlinuz: PathBuf,
    /// The .ko files there are, in load order.
    pub modules: Vec<PathBuf>,
}

/// `wanted` is a package; without it, the newest in the cache, or else that apt offers.
pub fn get(cache: &Cache, wanted: Option<&str>) -> Result<Kernel> {
    let package = match wanted {
        Some(name) => name.to_owned(),
        None => match cached(cache) {
            Some(name) => name,
            None => newest()?,
        },
    };
    if !package.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-._".contains(&b)) {
        bail!("'{package}' is not the name of a package");
    }
    let dir = cache.folder(&format!("{FOLDER}{package}"), |dir| {
        unpack(&package, dir).with_context(|| format!("kernel package {package}"))
    })?;
    let modules = MODULES.iter().map(|m| dir.join(format!("{m}.ko"))).filter(|p| p.is_file());
    Ok(Kernel { package, vmlinuz: dir.join("vmlinuz"), modules: modules.collect() })
}

/// The newest kernel of the best family that is in the cache.
fn cached(cache: &Cache) -> Option<String> {
    let names: Vec<String> = std::fs::read_dir(&cache.dir)
        .ok()?
        .filter_map(|e| Some(e.ok()?.file_name().to_str()?.strip_prefix(FOLDER)?.to_owned()))
        .collect();
    choose(&names)
}

fn newest() -> Result<String> {
    say::step("Looking for a kernel package");
    let apt = tools::find("apt-cache", "apt")?;
    let names = tools::run(Command::new(apt).args(["pkgnames", "linux-image-"]))?;
    let names: Vec<String> = String::from_utf8_lossy(&names).lines().map(str::to_owned).collect();
    choose(&names).context("apt offers no kernel package that is known here (try: apt-get update)")
}

/// The highest version of the first family that has any.
fn choose(names: &[String]) -> Option<String> {
    FAMILIES.iter().find_map(|(begin, end)| {
        names
            .iter()
            .filter(|n| n.strip_prefix(begin).is_some_and(|rest| rest.ends_with(end)))
            .max_by_key(|n| numbers(n))
            .cloned()
    })
}

fn numbers(name: &str) -> Vec<u64> {
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect()
}

fn unpack(package: &str, dir: &Path) -> Result<()> {
    let work = tempfile::tempdir().context("temporary folder")?;
    let files = fetch(package, work.path())?;
    let vmlinuz = files
        .iter()
        .find(|f| f.file_name().is_some_and(|n| n.to_string_lossy().starts_with("vmlinuz-")))
        .context("no vmlinuz in the package")?;
    std::fs::copy(vmlinuz, dir.join("vmlinuz")).context("vmlinuz")?;
    for module in MODULES {
        if let Some(bytes) = module_in(&files, module)? {
            std::fs::write(dir.join(format!("{module}.ko")), bytes).context(module)?;
        }
    }
    Ok(())
}

/// One more module of a kernel, fetched again; None if the kernel has no such file.
pub fn module(package: &str, name: &str) -> Result<Option<Vec<u8>>> {
    let work = tempfile::tempdir().context("temporary folder")?;
    module_in(&fetch(package, work.path())?, name)
}

/// The files of a kernel's packages, unpacked in `work`.
fn fetch(package: &str, work: &Path) -> Result<Vec<PathBuf>> {
    let root = work.join("root");
    let mut packages = vec![package.to_owned()];
    if let Some((_, version)) = package.split_once("linux-image-")
        && version.ends_with("-generic")
    {
        packages.push(format!("linux-modules-{}", version.trim_start_matches("unsigned-")));
    }
    for name in &packages {
        say::step(&format!("Fetching {name}"));
        let apt = tools::find("apt-get", "apt")?;
        tools::run(Command::new(apt).args(["-q", "download", name]).current_dir(work))?;
    }
    for entry in std::fs::read_dir(work)?.flatten() {
        if entry.path().extension().is_some_and(|e| e == "deb") {
            say::detail(&format!("unpacking {}", entry.file_name().display()));
            let dpkg = tools::find("dpkg", "dpkg")?;
            tools::run(Command::new(dpkg).arg("-x").arg(entry.path()).arg(&root))?;
        }
    }
    let mut files = Vec::new();
    walk(&root, &mut files)?;
    Ok(files)
}

fn module_in(files: &[PathBuf], module: &str) -> Result<Option<Vec<u8>>> {
    let file = files.iter().find(|f| {
        let name = f.file_name().unwrap_or_default().to_string_lossy().replace('-', "_");
        name.strip_prefix(module).is_some_and(|rest| rest == ".ko" || rest.starts_with(".ko."))
    });
    file.map(|file| plain_module(file)).transpose()
}

/// The module's ELF bytes, whatever the package compressed it with.
fn plain_module(file: &Path) -> Result<Vec<u8>> {
    let unpacker = match file.extension().and_then(|e| e.to_str()) {
        Some("xz") => ("xz", "xz-utils"),
        Some("zst") => ("zstd", "zstd"),
        Some("gz") => ("gzip", "gzip"),
        _ => return std::fs::read(file).with_context(|| file.display().to_string()),
    };
    tools::run(Command::new(tools::find(unpacker.0, unpacker.1)?).arg("-dc").arg(file))
}

fn walk(dir: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            walk(&entry.path(), files)?;
        } else {
            files.push(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|n| (*n).to_owned()).collect()
    }

    #[test]
    fn the_newest_of_the_best_family_is_chosen() {
        let list = names(&[
            "linux-image-6.12.117+deb12-cloud-amd64",
            "linux-image-6.1.0-9-cloud-amd64",
            "linux-image-6.1.0-56-cloud-amd64",
            "linux-image-6.1.0-56-cloud-amd64-dbg",
            "linux-image-6.1.0-56-cloud-amd64-unsigned",
            "linux-image-6.1.0-57-amd64",
        ]);
        assert_eq!(choose(&list).as_deref(), Some("linux-image-6.1.0-56-cloud-amd64"));
        assert_eq!(choose(&list[..1]).as_deref(), Some(list[0].as_str()));
        let ubuntu = names(&["linux-image-6.8.0-9-generic", "linux-image-6.8.0-45-generic"]);
        assert_eq!(choose(&ubuntu).as_deref(), Some("linux-image-6.8.0-45-generic"));
        assert_eq!(choose(&names(&["linux-image-amd64"])), None);
    }

    #[test]
    fn a_name_that_is_a_path_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let cache = crate::image::cache::tests_cache(dir.path());
        assert!(get(&cache, Some("../../etc")).is_err());
    }
}
