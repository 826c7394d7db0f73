//! The system calls of an operation, in its two halves: the change of the address space, which must
//! not be repeated, and the watch over it, which may be.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use ballast_shim_proto::{Op, OpKind};
use ballast_uffd::UffdError;
use ballast_units::{Bytes, HostAddr};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::attach::MODES;
use crate::sent;
use crate::serve::{Part, Vm};

/// How long write protection is tried that a pending discard of the VMM holds up: such a one takes some ten microseconds, and
/// a guest may wait for what is protected. First at once, over and over, and then with pauses.
const LONGEST: Duration = Duration::from_secs(1);
const AT_ONCE: Duration = Duration::from_micros(200);
const PAUSE: Duration = Duration::from_micros(50);

/// What the manager cannot do itself. On an error the address space is as before, but see shim-protocol.md for
/// `vm.overcommit_memory`: where the kernel could leave a hole, the manager asks for no `MapStore`.
///
/// # Errors
/// An errno: the descriptor or the part of the RAM is not there, its contents could not be saved, or the kernel refused.
pub fn change(vm: &Vm, op: &Op, fds: &[OwnedFd]) -> Result<(), i32> {
    match op.kind {
        OpKind::MapStore => {
            let store = fds.get(usize::from(op.fd_index)).ok_or(libc::EINVAL)?;
            // The manager counts the copies; the kernel need not reserve for them as well.
            //
            // Not MADV_DONTFORK, a tenth of the cost of all: `held` says it for the whole RAM if a
            // fork ever comes.
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            map(op, flags, store.as_fd(), op.file_offset)
        }
        OpKind::MapHome => {
            let part = vm.part(op.addr, op.len).ok_or(libc::EINVAL)?;
            let offset = part.ram.file_offset + (op.addr.0 - part.ram.addr.0);
            save(part, op, offset)?;
            map_home(part, op, offset)
        }
        OpKind::MapAgain => {
            let part = vm.part(op.addr, op.len).ok_or(libc::EINVAL)?;
            map_home(part, op, part.ram.file_offset + (op.addr.0 - part.ram.addr.0))
        }
        OpKind::Keep => sent::keep(),
    }
}

/// The rest of operations of one kind, side by side.
///
/// # Errors
/// An errno: the range is not registered, or not protected.
pub fn watch(vm: &Vm, ops: &[Op]) -> Result<(), i32> {
    let Some(first) = ops.first() else { return Ok(()) };
    // SAFETY: guest RAM, see `map`.
    let registered = || unsafe { vm.uffd.register(first.addr, whole(ops), MODES) };
    let register = || registered().map(drop).map_err(|e| e.errno());
    match first.kind {
        OpKind::MapStore => {
            register()?;
            protect(ops, |addr, len| patiently(|| vm.uffd.protect(addr, len)))
        }
        OpKind::MapHome | OpKind::MapAgain => {
            register()?;
            ops.iter().for_each(|op| place(vm, op));
            Ok(())
        }
        OpKind::Keep => Ok(()),
    }
}

/// Binds it as its neighbours are bound. Last: the kernel makes one mapping of them then, and keeps what is said of a file, which
/// it does by ranges, for the whole of it. Without it, it is a mapping of its own: that costs, and changes nothing.
fn place(vm: &Vm, op: &Op) {
    if let Some(placement) = vm.part(op.addr, op.len).and_then(|part| part.alike().placement()) {
        let _ = placement.apply(op.addr, op.len);
    }
}

/// Of operations side by side.
fn whole(ops: &[Op]) -> Bytes {
    ops.iter().fold(Bytes::ZERO, |len, op| len + op.len)
}

/// By one call, or one for each mapping: before Linux 6.3 a call is about one alone, and finds none that has the whole range.
fn protect(ops: &[Op], protect: impl Fn(HostAddr, Bytes) -> Result<(), i32>) -> Result<(), i32> {
    let Some(first) = ops.first() else { return Ok(()) };
    match protect(first.addr, whole(ops)) {
        Err(libc::ENOENT) if ops.len() > 1 => {
            ops.iter().try_for_each(|op| protect(op.addr, op.len))
        }
        result => result,
    }
}

/// Maps the RAM file where it belongs.
fn map_home(part: &Part, op: &Op, offset: u64) -> Result<(), i32> {
    let alike = part.alike();
    map(op, MapFlags::SHARED | alike.flags(), part.file.as_fd(), offset)?;
    for advice in alike.advice() {
        // Without it, it is a mapping of its own: that costs, and changes nothing.
        let _ = advise(op, *advice);
    }
    Ok(())
}

fn map(op: &Op, flags: MapFlags, file: BorrowedFd<'_>, offset: u64) -> Result<(), i32> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    let addr = op.addr.0 as *mut c_void;
    // SAFETY: the batch was checked: the range lies inside the guest's RAM, of which this process
    // holds no references: it is reached by the guest, and by the VMM through the same addresses,
    // which stay mapped. What it reads there is the manager's responsibility.
    unsafe {
        rustix::mm::mmap(addr, op.len.0 as usize, prot, flags | MapFlags::FIXED, file, offset)
    }
    .map(drop)
    .map_err(Errno::raw_os_error)
}

/// Writes what the range shows into the RAM file, from `offset` on. The manager protects the range
/// before, so nothing is written to it that would be left behind.
fn save(part: &Part, op: &Op, mut offset: u64) -> Result<(), i32> {
    let (mut at, end) = (op.addr.0, op.addr.0 + op.len.0);
    while at < end {
        let (from, left) = (at as *const c_void, (end - at) as usize);
        // SAFETY: inside the guest's RAM, see `map`. Only the kernel reads it.
        let wrote =
            unsafe { libc::pwrite(part.file.as_raw_fd(), from, left, offset as libc::off_t) };
        match wrote {
            1.. => {
                at += wrote as u64;
                offset += wrote as u64;
            }
            0 => return Err(libc::EIO),
            _ => match last_errno() {
                libc::EINTR => {}
                errno => return Err(errno),
            },
        }
    }
    Ok(())
}

fn advise(op: &Op, advice: c_int) -> Result<(), i32> {
    // SAFETY: inside the guest's RAM, see `map`; no advice of `Alike` changes what the pages hold.
    match unsafe { libc::madvise(op.addr.0 as *mut c_void, op.len.0 as usize, advice) } {
        0 => Ok(()),
        _ => Err(last_errno()),
    }
}

fn last_errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

fn patiently(mut op: impl FnMut() -> Result<(), UffdError>) -> Result<(), i32> {
    let begun = Instant::now();
    loop {
        match op() {
            Err(UffdError::Again) => {}
            other => return other.map_err(|e| e.errno()),
        }
        match begun.elapsed() {
            taken if taken >= LONGEST => return Err(libc::EAGAIN),
            taken if taken < AT_ONCE => thread::yield_now(),
            _ => thread::sleep(PAUSE),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Mappings as the kernel protected them before Linux 6.3: a call for one, or a part of it.
    fn one_at_a_time(ops: &[Op], addr: HostAddr, len: Bytes) -> Result<(), i32> {
        let has = |op: &Op| op.addr <= addr && addr.0 + len.0 <= op.addr.0 + op.len.0;
        if ops.iter().any(has) { Ok(()) } else { Err(libc::ENOENT) }
    }

    #[test]
    fn mappings_side_by_side_are_protected_one_by_one_where_the_kernel_asks_for_that() {
        let op = |page: u64, pages: u64| Op {
            kind: OpKind::MapStore,
            addr: HostAddr(0x10000 + page * 0x1000),
            len: Bytes(pages * 0x1000),
            file_offset: 0,
            fd_index: 0,
        };
        let ops = [op(0, 2), op(2, 1), op(3, 4)];
        let calls = RefCell::new(Vec::new());
        let noted = |addr: HostAddr, len: Bytes| calls.borrow_mut().push((addr, len));
        let older = |addr, len| {
            noted(addr, len);
            one_at_a_time(&ops, addr, len)
        };
        assert_eq!(protect(&ops, older), Ok(()));
        let all = (ops[0].addr, Bytes(0x7000));
        let each = ops.iter().map(|op| (op.addr, op.len));
        assert_eq!(calls.take(), [all].into_iter().chain(each).collect::<Vec<_>>());
        // Elsewhere it is one call; what fails otherwise, or of a single one, is not tried again.
        for result in [Ok(()), Err(libc::EAGAIN)] {
            assert_eq!(
                protect(&ops, |addr, len| {
                    noted(addr, len);
                    result
                }),
                result
            );
            assert_eq!(calls.take(), [all]);
        }
        let gone = |addr, len| {
            noted(addr, len);
            Err(libc::ENOENT)
        };
        assert_eq!((protect(&ops[..1], gone), calls.take().len()), (Err(libc::ENOENT), 1));
        assert_eq!((protect(&ops, gone), calls.take().len()), (Err(libc::ENOENT), 2));
        assert_eq!(protect(&[], gone), Ok(()));
    }
}
