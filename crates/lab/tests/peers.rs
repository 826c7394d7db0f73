//! What the kernel offers as a peer is there while it is used, and gone afterwards. As root.
#![allow(clippy::unwrap_used, reason = "a panic here is the test failing")]

use std::path::Path;
use std::process::Command;

use ballast_lab::peers::cgroup::Cgroup;
use ballast_lab::peers::swap::{Request, Space, Swap};
use ballast_units::Bytes;

const SIZE: Bytes = Bytes::from_mib(4);

/// Only root may; then it must.
fn root_or_skip(test: &str) -> bool {
    // SAFETY: no arguments, no memory.
    let root = unsafe { libc::geteuid() } == 0;
    let must = std::env::var_os("BALLAST_REQUIRE_PRIVILEGED").is_some_and(|v| v == "1");
    assert!(root || !must, "{test} must run here, but this is not root");
    if !root {
        eprintln!("SKIPPED {test}: this is not root");
    }
    root
}

fn swaps() -> String {
    std::fs::read_to_string("/proc/swaps").unwrap()
}

#[test]
fn swap_on_a_file_ends_with_its_holder() {
    if !root_or_skip("swap_on_a_file") {
        return;
    }
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("test.swap");
    let space = Space::File { path: path.clone(), size: SIZE };
    let swap = Swap::start(&Request::new(space.clone(), 0)).unwrap();
    assert!(swaps().contains(path.to_str().unwrap()), "{}", swaps());
    swap.used().unwrap();
    assert_eq!(swap.zram().unwrap(), None);
    // The file is there already: refused in one line, and nothing of the other is undone.
    let error = Swap::start(&Request::new(space, 0)).unwrap_err().to_string();
    assert!(error.contains("test.swap") && !error.contains('\n'), "{error}");
    assert!(path.exists());
    swap.end().unwrap();
    assert!(!path.exists() && !swaps().contains("test.swap"), "{}", swaps());
}

#[test]
fn swap_on_zram_ends_with_its_holder() {
    if !root_or_skip("swap_on_zram") {
        return;
    }
    ballast_lab::tools::load_module("zram");
    if !Path::new("/sys/class/zram-control/hot_add").exists() {
        eprintln!("SKIPPED swap_on_zram: this kernel has no zram");
        return;
    }
    let swap = Swap::start(&Request::new(Space::Zram { size: SIZE }, 0)).unwrap();
    assert!(swap.zram().unwrap().is_some());
    let device = format!("{} ", swap.device().display());
    assert!(swaps().contains(&device), "{}", swaps());
    drop(swap);
    assert!(!swaps().contains(&device), "{}", swaps());
}

#[test]
fn a_cgroup_limits_who_enters_it_and_is_gone_afterwards() {
    if !root_or_skip("a_cgroup_limits") {
        return;
    }
    let cgroup = Cgroup::create().unwrap();
    cgroup.limit(Bytes::from_mib(512)).unwrap();
    let entrance = cgroup.entrance().unwrap();
    // A shell that moves itself, and tells its cgroups.
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&entrance));
    let entrance = std::fs::read_link(path).unwrap();
    let script = format!("echo 0 > {} && cat /proc/self/cgroup", entrance.display());
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    let folder = entrance.parent().unwrap().to_owned();
    let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains(&name), "{text}");
    cgroup.usage().unwrap();
    drop(cgroup);
    assert!(!folder.exists());
}
