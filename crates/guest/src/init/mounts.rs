//! The file systems of a sample guest.

use std::ffi::CString;
use std::path::Path;

use super::DISK;

/// proc, sys, dev and a tmp in memory; returns what went wrong.
pub fn basic() -> Vec<String> {
    let mounts = [
        ("devtmpfs", "/dev", "devtmpfs", ""),
        ("proc", "/proc", "proc", ""),
        ("sysfs", "/sys", "sysfs", ""),
        ("tmpfs", "/tmp", "tmpfs", "size=100%"),
    ];
    let mut notes: Vec<String> = mounts
        .iter()
        .filter_map(|(source, target, kind, options)| mount(source, target, kind, options).err())
        .collect();
    // The kernel opened /dev/console of the initramfs for us; if it had none, take it from devtmpfs.
    if let Err(e) = open_console() {
        notes.push(e);
    }
    notes
}

/// Mounts /dev/vda on [`DISK`] where there is one.
pub fn disk(notes: &mut Vec<String>) -> bool {
    if !Path::new("/dev/vda").exists() {
        return false;
    }
    match mount("/dev/vda", DISK, "ext4", "") {
        Ok(()) => true,
        Err(note) => {
            notes.push(note);
            false
        }
    }
}

pub fn uptime() -> f64 {
    std::fs::read_to_string("/proc/uptime")
        .ok()
        .and_then(|t| t.split_whitespace().next()?.parse().ok())
        .unwrap_or(0.0)
}

pub fn kernel_release() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default()
}

fn mount(source: &str, target: &str, kind: &str, options: &str) -> Result<(), String> {
    let told = |what: &dyn std::fmt::Display| format!("mount {source} on {target}: {what}");
    std::fs::create_dir_all(target).map_err(|e| told(&e))?;
    let text = |s: &str| CString::new(s).map_err(|e| told(&e));
    let (from, to, fs, data) = (text(source)?, text(target)?, text(kind)?, text(options)?);
    // SAFETY: four NUL-ended strings that live through the call.
    let rc = unsafe {
        libc::mount(from.as_ptr(), to.as_ptr(), fs.as_ptr(), libc::MS_NOATIME, data.as_ptr().cast())
    };
    if rc == 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    // Kernels built with DEVTMPFS_MOUNT have done it already.
    match error.raw_os_error() {
        Some(libc::EBUSY) => Ok(()),
        _ => Err(told(&error)),
    }
}

fn open_console() -> Result<(), String> {
    // SAFETY: a NUL-ended path; dup2 onto 0, 1 and 2 replaces descriptors of this process that
    // nothing else holds yet.
    let failed = unsafe {
        let fd = libc::open(c"/dev/console".as_ptr(), libc::O_RDWR | libc::O_NOCTTY);
        let failed = fd < 0 || (0..3).any(|n| libc::dup2(fd, n) < 0);
        if fd > 2 {
            libc::close(fd);
        }
        failed
    };
    if failed {
        return Err(format!("/dev/console: {}", std::io::Error::last_os_error()));
    }
    Ok(())
}
