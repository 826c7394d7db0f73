//! A disk with real services from the distribution's packages, and the libraries they need. The
//! packages are unpacked, not installed: what is configured is configured by the workload that starts
//! the service (`ballast-guest service`).

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use ballast_units::Bytes;

use super::cache::Cache;
use super::{agent, disk};
use crate::{say, tools};

/// Changes when what is on the disk does.
const VERSION: u32 = 2;
/// A database, web servers and caches: each guest runs one of them. The database wants a shell. Beside it
/// a guest may run the agent.
const PACKAGES: [&str; 7] = [
    "postgresql",
    "nginx-light",
    "lighttpd",
    "redis-server",
    "memcached",
    "dash",
    "qemu-guest-agent",
];
/// Dependencies for installing, for other languages, or for compiling queries: large, and not used.
const WITHOUT: [&str; 8] =
    ["perl", "libperl", "libllvm", "libz3", "locales", "libc-l10n", "systemd", "dpkg"];
/// Room for what the services write.
const FREE: Bytes = Bytes::from_mib(768);
/// The services' user in the guest. PostgreSQL and memcached refuse to be root's.
const USERS: &str = "root:x:0:0:root:/:/bin/sh\nservice:x:1000:1000:service:/:/bin/sh\n";
const GROUPS: &str = "root:x:0:\nservice:x:1000:\n";

/// `package` is the kernel's.
pub fn get(cache: &Cache, package: &str) -> Result<PathBuf> {
    cache.file(&format!("services-{VERSION}-{package}.img"), |path| {
        build(path, package).context("the services' disk")
    })
}

fn build(path: &Path, package: &str) -> Result<()> {
    // Beside the image: it may be too large for /tmp.
    let folder = path.parent().context("no folder")?;
    let work = tempfile::Builder::new().prefix("partial-services-").tempdir_in(folder)?;
    let root = work.path().join("root");
    unpack(&PACKAGES, work.path(), &root)?;
    fs::write(root.join("etc/passwd"), USERS)?;
    fs::write(root.join("etc/group"), GROUPS)?;
    agent::add_module(&root, package)?;
    disk::from_folder(path, &root, FREE)
}

/// Packages and what they need, unpacked into the folder `root`, which is made; `work` is for the way.
pub(super) fn unpack(wanted: &[&str], work: &Path, root: &Path) -> Result<()> {
    let packages = work.join("packages");
    fs::create_dir(&packages)?;
    let names = closure(wanted, work)?;
    say::step(&format!("Fetching {} packages of services", names.len()));
    let apt = tools::find("apt-get", "apt")?;
    tools::run(Command::new(apt).args(["-q", "download"]).args(&names).current_dir(&packages))?;
    skeleton(root)?;
    let dpkg = tools::find("dpkg-deb", "dpkg")?;
    for entry in fs::read_dir(&packages)? {
        let package = entry?.path();
        tools::run(Command::new(&dpkg).arg("-x").arg(&package).arg(root))?;
        fs::remove_file(&package)?;
    }
    Ok(())
}

/// All packages that ours need, from nothing: what this host has installed does not count.
fn closure(wanted: &[&str], work: &Path) -> Result<Vec<String>> {
    let status = work.join("status");
    fs::write(&status, "")?;
    let apt = tools::find("apt-get", "apt")?;
    let plan = tools::run(
        Command::new(apt)
            .arg("-o")
            .arg(format!("Dir::State::status={}", status.display()))
            .args(["-s", "--no-install-recommends", "install"])
            .args(wanted),
    )?;
    let names = parse(&String::from_utf8_lossy(&plan));
    ensure!(!names.is_empty(), "apt plans to install nothing (try: apt-get update)");
    Ok(names)
}

/// "Inst libc6 (2.36-9 Debian:12/stable [amd64])" and so on.
fn parse(plan: &str) -> Vec<String> {
    plan.lines()
        .filter_map(|l| l.strip_prefix("Inst ")?.split_whitespace().next())
        .filter(|name| !WITHOUT.iter().any(|w| name.starts_with(w)))
        .map(str::to_owned)
        .collect()
}

/// What no package brings: the merged /usr, and places to write.
fn skeleton(root: &Path) -> Result<()> {
    for dir in ["bin", "sbin", "lib", "lib64"] {
        fs::create_dir_all(root.join("usr").join(dir))?;
        symlink(format!("usr/{dir}"), root.join(dir))?;
    }
    for dir in ["dev", "etc", "proc", "run", "srv", "tmp"] {
        fs::create_dir(root.join(dir))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plan_names_packages_but_not_what_is_left_out() {
        let plan = "Reading...\nInst libc6 (2.36-9 Debian:12.1 [amd64]) []\n\
                    Inst perl-base (5.36 Debian)\nInst libllvm14 (1)\nConf libc6 (2.36)\n\
                    Inst redis-server (5:7.0)\n";
        assert_eq!(parse(plan), ["libc6", "redis-server"]);
    }

    #[test]
    fn libraries_land_in_the_merged_usr() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        skeleton(&root).unwrap();
        fs::write(root.join("lib/x"), "").unwrap();
        assert!(root.join("usr/lib/x").is_file());
    }
}
