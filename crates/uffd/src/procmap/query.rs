//! Mappings asked for by address (PROCMAP_QUERY, Linux 6.11): what lies before is not gone over, and no name is looked up
//! that nobody wants, which is the greater part of what a line of maps costs.

use std::ffi::c_ulong;
use std::fs::File;
use std::os::fd::AsRawFd;

use ballast_units::HostAddr;
use rustix::io::Errno;

use super::Vma;

/// `struct procmap_query` of `linux/fs.h`.
#[repr(C)]
#[derive(Default)]
struct Arg {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

/// `_IOWR('f', 17, struct procmap_query)`.
const QUERY: c_ulong = 3 << 30 | (size_of::<Arg>() as c_ulong) << 16 | (b'f' as c_ulong) << 8 | 17;

const READABLE: u64 = 1;
const WRITABLE: u64 = 2;
const EXECUTABLE: u64 = 4;
const SHARED: u64 = 8;
const COVERING_OR_NEXT: u64 = 0x10;
const FILE_BACKED: u64 = 0x20;

/// The longest name that the kernel tells.
const PATH_MAX: usize = 4096;

const _: () = {
    assert!(size_of::<Arg>() == 104);
    // As a C compiler computes it from the kernel's header.
    assert!(QUERY == 0xC068_6611);
};

/// The first mapping that holds an address or lies above it; `files`: of those that show a file.
///
/// # Errors
/// ENOTTY: a kernel that does not know the question.
pub(super) fn next(
    maps: &File,
    from: HostAddr,
    files: bool,
    named: bool,
) -> Result<Option<Vma>, Errno> {
    let mut name = if named { vec![0; PATH_MAX] } else { Vec::new() };
    let arg = match ask(maps, from, files, &mut name) {
        // Nobody knows a file by a name that is longer.
        Err(Errno::NAMETOOLONG) => ask(maps, from, files, &mut [])?,
        answer => answer?,
    };
    let Some(arg) = arg else { return Ok(None) };
    let has = |flag| arg.vma_flags & flag != 0;
    // With the NUL; 0 where there is no name.
    let len = (arg.vma_name_size as usize).saturating_sub(1);
    Ok(Some(Vma {
        start: HostAddr(arg.vma_start),
        end: HostAddr(arg.vma_end),
        readable: has(READABLE),
        writable: has(WRITABLE),
        executable: has(EXECUTABLE),
        shared: has(SHARED),
        offset: arg.vma_offset,
        device: (arg.dev_major, arg.dev_minor),
        inode: arg.inode,
        path: String::from_utf8_lossy(name.get(..len).unwrap_or_default()).into_owned(),
    }))
}

/// None: nothing is mapped there, or the process has no memory any more.
fn ask(maps: &File, from: HostAddr, files: bool, name: &mut [u8]) -> Result<Option<Arg>, Errno> {
    let mut arg = Arg {
        size: size_of::<Arg>() as u64,
        query_flags: COVERING_OR_NEXT | if files { FILE_BACKED } else { 0 },
        query_addr: from.0,
        vma_name_size: name.len() as u32,
        vma_name_addr: if name.is_empty() { 0 } else { name.as_mut_ptr() as u64 },
        ..Arg::default()
    };
    // SAFETY: the structure that the request's number was computed from; the kernel writes into it, and into `name`
    // no more than the length that it is told.
    let result = unsafe { libc::ioctl(maps.as_raw_fd(), QUERY, std::ptr::from_mut(&mut arg)) };
    if result == 0 {
        return Ok(Some(arg));
    }
    match Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO) {
        Errno::NOENT | Errno::SRCH => Ok(None),
        errno => Err(errno),
    }
}
