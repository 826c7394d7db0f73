//! RAM that the kernel may back by large pages.

use std::os::fd::OwnedFd;

use ballast_units::Pages;
use rustix::fs::{Mode, OFlags, openat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen,
};

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
