//! A file for a guest's RAM that has large pages or none, whatever the host says of memfds: on a tmpfs of its
//! own, which is mounted nowhere. It goes when the last one closes the file.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use ballast_units::Bytes;
use rustix::fs::{Mode, OFlags};

/// Of the kernel's `enum fsconfig_command`.
const SET_STRING: libc::c_uint = 1;
const CREATE: libc::c_uint = 6;

/// Who gets large pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Huge {
    /// Mappings that ask for them (`MADV_HUGEPAGE`).
    Advise,
    /// No mapping.
    Never,
}

/// An empty file of this size, of which nothing is allocated.
///
/// # Errors
/// Of the kernel: EPERM without CAP_SYS_ADMIN, EINVAL without transparent huge pages of shared memory.
pub fn ram_file(size: Bytes, huge: Huge) -> io::Result<OwnedFd> {
    // SAFETY: the name is a C string.
    let context = descriptor(unsafe { libc::syscall(libc::SYS_fsopen, c"tmpfs".as_ptr(), 1) })?;
    let limit = std::ffi::CString::new(size.0.to_string())?;
    // Only for who asks: with "within_size" a write of one page allocates a large one, and
    // pages that are elsewhere would be there, zeroed, without a fault. No VMM can make the file larger.
    let huge = match huge {
        Huge::Advise => c"advise",
        Huge::Never => c"never",
    };
    for (key, value) in [(c"huge", huge), (c"mode", c"0700"), (c"size", limit.as_c_str())] {
        configure(&context, SET_STRING, key.as_ptr(), value)?;
    }
    configure(&context, CREATE, std::ptr::null(), c"")?;
    // SAFETY: numbers only.
    let mount = descriptor(unsafe {
        libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), 1, libc::MOUNT_ATTR_NODEV)
    })?;
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&mount, c".", flags, Mode::RUSR | Mode::WUSR)?;
    rustix::fs::ftruncate(&file, size.0)?;
    Ok(file)
}

fn configure(
    context: &OwnedFd,
    command: libc::c_uint,
    key: *const libc::c_char,
    value: &CStr,
) -> io::Result<()> {
    let value = if key.is_null() { std::ptr::null() } else { value.as_ptr() };
    // SAFETY: key and value are C strings or null, and the descriptor is open.
    let done =
        unsafe { libc::syscall(libc::SYS_fsconfig, context.as_raw_fd(), command, key, value, 0) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn descriptor(result: libc::c_long) -> io::Result<OwnedFd> {
    let Some(fd) = i32::try_from(result).ok().filter(|&fd| fd >= 0) else {
        return Err(io::Error::last_os_error());
    };
    // SAFETY: the kernel has just opened it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;

    #[test]
    fn it_has_no_large_pages_unasked_and_cannot_be_made_larger_than_it_is() {
        let size = Bytes::from_mib(8);
        let file = match ram_file(size, Huge::Advise) {
            Ok(file) => File::from(file),
            Err(e) => {
                let required = std::env::var("BALLAST_REQUIRE_PRIVILEGED");
                assert!(required.as_deref() != Ok("1"), "no tmpfs of our own: {e}");
                eprintln!("SKIPPED: no tmpfs of our own: {e}");
                return;
            }
        };
        let meta = file.metadata().unwrap();
        assert_eq!((meta.len(), meta.blocks()), (size.0, 0));
        let again = File::options()
            .read(true)
            .write(true)
            .open(format!("/proc/self/fd/{}", file.as_raw_fd()))
            .unwrap();
        drop(file);
        again.write_at(&[1], 4 << 20).unwrap();
        assert_eq!(again.metadata().unwrap().blocks() * 512, 4096, "a large page, unasked");
        rustix::fs::fallocate(&again, rustix::fs::FallocateFlags::empty(), 0, size.0).unwrap();
        assert_eq!(again.metadata().unwrap().blocks() * 512, size.0);
        let error = again.write_at(&[1], size.0).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    }
}
