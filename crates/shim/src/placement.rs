//! On which NUMA nodes the VMM wants its RAM: mbind, which a mapping that is made anew does not inherit.

use std::ffi::{c_int, c_long, c_ulong, c_void};
use std::io;

use ballast_units::{Bytes, HostAddr};

/// More than any kernel has, and the bit that it does not look at.
const MOST_NODES: usize = 1024 + 1;
const WORDS: usize = MOST_NODES.div_ceil(c_ulong::BITS as usize);
const DEFAULT: c_int = 0;
/// For get_mempolicy: what is said of an address, not of the thread.
const OF_ADDRESS: c_long = 2;

/// What was said of a mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    mode: c_int,
    nodes: [c_ulong; WORDS],
}

impl Placement {
    /// None: nothing was, or the kernel knows of no nodes.
    pub fn at(addr: HostAddr) -> Option<Placement> {
        let mut placement = Placement { mode: DEFAULT, nodes: [0; WORDS] };
        // SAFETY: the kernel writes to the two, which are as large as it is told.
        let told = unsafe {
            libc::syscall(
                libc::SYS_get_mempolicy,
                &raw mut placement.mode,
                placement.nodes.as_mut_ptr(),
                MOST_NODES as c_long,
                addr.0 as *mut c_void,
                OF_ADDRESS,
            )
        };
        (told == 0 && placement.mode != DEFAULT).then_some(placement)
    }

    /// Says the same of `len` from `addr` on. Moves nothing.
    ///
    /// # Errors
    /// Of mbind.
    pub fn apply(&self, addr: HostAddr, len: Bytes) -> io::Result<()> {
        // SAFETY: it says where pages that are yet to come are to lie, and changes none.
        let said = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                addr.0 as *mut c_void,
                len.0 as c_long,
                c_long::from(self.mode),
                self.nodes.as_ptr(),
                MOST_NODES as c_long,
                0 as c_long,
            )
        };
        if said == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}
