//! The operations of a batch.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread;
use std::time::Duration;

use ballast_shim_proto::{Op, OpKind};
use ballast_uffd::UffdError;
use ballast_units::PAGE_SIZE;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::attach::MODES;
use crate::ram::Ram;
use crate::serve::Vm;

/// How often, and how long apart, an operation is tried that a pending discard of the VMM holds up.
const RETRIES: u32 = 1000;
const RETRY: Duration = Duration::from_millis(1);

/// Does `ops` in order: (how many were done, errno of the next one or 0). None is done if one of them
/// is not what it should be.
pub fn run(vm: &Vm, ops: &[Op], fds: &[OwnedFd]) -> (u32, i32) {
    // A mapping beyond the end of its file would end the VMM by SIGBUS, so lengths count too.
    let lens: Vec<u64> =
        fds.iter().map(|fd| rustix::fs::fstat(fd).map_or(0, |s| s.st_size as u64)).collect();
    if !ops.iter().all(|op| acceptable(op, vm.ram, &lens)) {
        return (0, Errno::INVAL.raw_os_error());
    }
    for (done, op) in ops.iter().enumerate() {
        if let Err(errno) = run_one(vm, op, fds) {
            return (done as u32, errno);
        }
    }
    (ops.len() as u32, 0)
}

/// `lens`: the lengths of the files that came with the batch.
fn acceptable(op: &Op, ram: Ram, lens: &[u64]) -> bool {
    let aligned = |v: u64| v.is_multiple_of(PAGE_SIZE as u64);
    let rest = match op.kind {
        OpKind::MapStore => lens
            .get(usize::from(op.fd_index))
            .and_then(|len| len.checked_sub(op.file_offset))
            .is_some_and(|left| op.len.0 <= left && aligned(op.file_offset)),
        _ => op.fd_index == 0 && op.file_offset == 0,
    };
    rest && aligned(op.addr.0) && aligned(op.len.0) && op.len.0 > 0 && ram.contains(op.addr, op.len)
}

fn run_one(vm: &Vm, op: &Op, fds: &[OwnedFd]) -> Result<(), i32> {
    match op.kind {
        OpKind::MapStore => {
            let store = fds.get(usize::from(op.fd_index)).ok_or(libc::EINVAL)?;
            map(op, MapFlags::PRIVATE, store.as_fd(), op.file_offset)?;
            register(vm, op)?;
            patiently(|| vm.uffd.protect(op.addr, op.len))
        }
        OpKind::MapHome => {
            let offset = vm.ram.file_offset + (op.addr.0 - vm.ram.addr.0);
            map(op, MapFlags::SHARED, vm.file.as_fd(), offset)?;
            // As QEMU had it; neighbours merge into one mapping only if they are alike.
            advise_if_possible(op, libc::MADV_HUGEPAGE);
            register(vm, op)
        }
        OpKind::Collapse => advise(op, libc::MADV_COLLAPSE),
        OpKind::DontNeed => advise(op, libc::MADV_DONTNEED),
    }
}

fn map(op: &Op, flags: MapFlags, file: BorrowedFd<'_>, offset: u64) -> Result<(), i32> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    let addr = op.addr.0 as *mut c_void;
    // SAFETY: `acceptable` checked that the range lies inside the guest's RAM, of which this process
    // holds no references: it is reached by the guest, and by the VMM through the same addresses,
    // which stay mapped. What it reads there is the manager's responsibility.
    unsafe {
        rustix::mm::mmap(addr, op.len.0 as usize, prot, flags | MapFlags::FIXED, file, offset)
    }
    .map_err(Errno::raw_os_error)?;
    advise_if_possible(op, libc::MADV_DONTFORK);
    Ok(())
}

fn register(vm: &Vm, op: &Op) -> Result<(), i32> {
    vm.uffd.register(op.addr, op.len, MODES).map(drop).map_err(|e| e.errno())
}

fn advise(op: &Op, advice: c_int) -> Result<(), i32> {
    // SAFETY: inside the guest's RAM, see `map`; discarding is what the manager asked for.
    match unsafe { libc::madvise(op.addr.0 as *mut c_void, op.len.0 as usize, advice) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)),
    }
}

/// For advice whose failure (a kernel built without it) changes nothing but cost.
fn advise_if_possible(op: &Op, advice: c_int) {
    let _ = advise(op, advice);
}

fn patiently(mut op: impl FnMut() -> Result<(), UffdError>) -> Result<(), i32> {
    for _ in 0..RETRIES {
        match op() {
            Err(UffdError::Again) => thread::sleep(RETRY),
            other => return other.map_err(|e| e.errno()),
        }
    }
    Err(libc::EAGAIN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_units::{Bytes, HostAddr};

    #[test]
    fn operations_outside_the_ram_or_off_the_page_are_not_acceptable() {
        let ram = Ram { addr: HostAddr(0x10000), len: Bytes(0x10000), file_offset: 0 };
        let good = Op {
            kind: OpKind::MapStore,
            addr: HostAddr(0x1f000),
            len: Bytes(0x1000),
            file_offset: 0x3000,
            fd_index: 1,
        };
        let lens = [0, 0x4000];
        assert!(acceptable(&good, ram, &lens));
        assert!(!acceptable(&good, ram, &lens[..1]), "no such descriptor");
        assert!(!acceptable(&good, ram, &[0, 0x3fff]), "the file ends before");
        for bad in [
            Op { addr: HostAddr(0xf000), ..good },
            Op { addr: HostAddr(0x20000), ..good },
            Op { addr: HostAddr(0x1f001), ..good },
            Op { len: Bytes(0x2000), ..good },
            Op { len: Bytes(0), ..good },
            Op { len: Bytes(0x800), ..good },
            Op { len: Bytes(!0xfff), ..good },
            Op { file_offset: 1, ..good },
            Op { file_offset: 0x4000, ..good },
            Op { file_offset: u64::MAX, ..good },
            Op { kind: OpKind::MapHome, ..good },
        ] {
            assert!(!acceptable(&bad, ram, &lens), "{bad:?}");
        }
        let home = Op { kind: OpKind::MapHome, file_offset: 0, fd_index: 0, ..good };
        assert!(acceptable(&home, ram, &[]));
    }
}
