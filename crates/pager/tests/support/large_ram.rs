//! RAM that the kernel may back by large pages.

#![allow(dead_code, reason = "each test file uses its own part of this module")]

use std::os::fd::OwnedFd;

use ballast_units::Pages;
use rustix::fs::{Mode, OFlags, openat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen,
};

/// As `create`. None, loudly, without the right to it.
pub fn create_or_skip(size: Pages) -> Option<OwnedFd> {
    let ram = create(size);
    if ram.is_none() {
        let required = std::env::var("BALLAST_REQUIRE_PRIVILEGED").as_deref() == Ok("1");
        assert!(!required, "no tmpfs with large pages");
        eprintln!("SKIPPED: no tmpfs with large pages");
    }
    ram
}

/// A file of that size on a tmpfs of its own, which is mounted nowhere. None without the right to it.
pub fn create(size: Pages) -> Option<OwnedFd> {
    let fs = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).ok()?;
    fsconfig_set_string(&fs, "huge", "advise").ok()?;
    fsconfig_create(&fs).ok()?;
    let mount = fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty()).ok()?;
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = openat(&mount, "ram", flags, Mode::RUSR | Mode::WUSR).ok()?;
    rustix::fs::ftruncate(&file, size.bytes().0).ok()?;
    Some(file)
}
