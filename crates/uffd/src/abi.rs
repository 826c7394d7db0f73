//! `linux/userfaultfd.h`: ioctl numbers and structures, for 64-bit Linux. Names are those of the header
//! without `UFFD`, `UFFDIO` and the like before them; what is not said here, it says.

use std::ffi::c_ulong;

const TYPE: c_ulong = 0xAA;

const fn io(nr: c_ulong) -> c_ulong {
    TYPE << 8 | nr
}
const fn ior<T>(nr: c_ulong) -> c_ulong {
    2 << 30 | (size_of::<T>() as c_ulong) << 16 | io(nr)
}
const fn iowr<T>(nr: c_ulong) -> c_ulong {
    1 << 30 | ior::<T>(nr)
}

/// On /dev/userfaultfd: a new userfaultfd; the argument is open(2) flags.
pub const NEW: c_ulong = io(0x00);
pub const API: c_ulong = iowr::<ApiArg>(0x3F);
pub const REGISTER: c_ulong = iowr::<RegisterArg>(0x00);
pub const UNREGISTER: c_ulong = ior::<Range>(0x01);
pub const WAKE: c_ulong = ior::<Range>(0x02);
pub const COPY: c_ulong = iowr::<CopyArg>(0x03);
pub const ZEROPAGE: c_ulong = iowr::<ZeropageArg>(0x04);
pub const WRITEPROTECT: c_ulong = iowr::<WriteprotectArg>(0x06);

/// `UFFD_API`.
pub const API_VERSION: u64 = 0xAA;

pub const COPY_MODE_DONTWAKE: u64 = 1;
pub const COPY_MODE_WP: u64 = 2;
pub const ZEROPAGE_MODE_DONTWAKE: u64 = 1;
pub const WRITEPROTECT_MODE_WP: u64 = 1;
pub const WRITEPROTECT_MODE_DONTWAKE: u64 = 2;

#[repr(C)]
pub struct ApiArg {
    pub api: u64,
    pub features: u64,
    pub ioctls: u64,
}

#[repr(C)]
pub struct Range {
    pub start: u64,
    pub len: u64,
}

#[repr(C)]
pub struct RegisterArg {
    pub range: Range,
    pub mode: u64,
    pub ioctls: u64,
}

#[repr(C)]
pub struct CopyArg {
    pub dst: u64,
    pub src: u64,
    pub len: u64,
    pub mode: u64,
    /// Out: bytes done, or a negated errno.
    pub copy: i64,
}

#[repr(C)]
pub struct ZeropageArg {
    pub range: Range,
    pub mode: u64,
    /// Out: bytes done, or a negated errno.
    pub zeropage: i64,
}

#[repr(C)]
pub struct WriteprotectArg {
    pub range: Range,
    pub mode: u64,
}

// struct uffd_msg, 32 bytes:
//
//    0      1          4          8             16            24         32
//    +------+----------+----------+-------------+-------------+----------+
//    | event| reserved            | arg 0       | arg 1       | arg 2    |
//    +------+----------+----------+-------------+-------------+----------+
//    pagefault                      flags         address       thread id
//    fork                           fd (u32)
//    remap                          from          to            length
//    remove, unmap                  start         end
pub const MSG_SIZE: usize = 32;
pub const EVENT_PAGEFAULT: u8 = 0x12;
pub const EVENT_FORK: u8 = 0x13;
pub const EVENT_REMAP: u8 = 0x14;
pub const EVENT_REMOVE: u8 = 0x15;
pub const EVENT_UNMAP: u8 = 0x16;
pub const PAGEFAULT_FLAG_WRITE: u64 = 1;
pub const PAGEFAULT_FLAG_WP: u64 = 2;
pub const PAGEFAULT_FLAG_MINOR: u64 = 4;

const _: () = {
    assert!(size_of::<ApiArg>() == 24);
    assert!(size_of::<Range>() == 16);
    assert!(size_of::<RegisterArg>() == 32);
    assert!(size_of::<CopyArg>() == 40);
    assert!(size_of::<ZeropageArg>() == 32);
    assert!(size_of::<WriteprotectArg>() == 24);
    // As a C compiler computes them from the kernel's header.
    assert!(NEW == 0xAA00);
    assert!(API == 0xC018_AA3F);
    assert!(REGISTER == 0xC020_AA00);
    assert!(UNREGISTER == 0x8010_AA01);
    assert!(WAKE == 0x8010_AA02);
    assert!(COPY == 0xC028_AA03);
    assert!(ZEROPAGE == 0xC020_AA04);
    assert!(WRITEPROTECT == 0xC018_AA06);
};
