//! A batch: which operations are acceptable, which are done together, and how far it came.

use std::os::fd::OwnedFd;

use ballast_shim_proto::{Op, OpKind};
use ballast_units::PAGE_SIZE;
use rustix::io::Errno;

use crate::ram::Ram;
use crate::remap;
use crate::serve::Vm;

/// Mappings that are registered and protected by one call at most. More of them would gain little,
/// and leave the first unprotected for longer.
const TOGETHER: usize = 16;

/// Does `ops` in order, up to the first failure: (how many changed the address space or were Keep, errno or 0). None
/// is done if one of them is not what it should be.
pub fn run(vm: &Vm, ops: &[Op], fds: &[OwnedFd]) -> (u32, i32) {
    // A mapping beyond the end of its file would end the VMM by SIGBUS, so lengths count too.
    let lens: Vec<u64> =
        fds.iter().map(|fd| rustix::fs::fstat(fd).map_or(0, |s| s.st_size as u64)).collect();
    if !ops.iter().all(|op| acceptable(op, vm.rams(), &lens)) {
        return (0, Errno::INVAL.raw_os_error());
    }
    let mut done = 0;
    while let Some(group) = together(ops.get(done..).unwrap_or_default()) {
        let mut changed = 0;
        let mut failed = Ok(());
        for op in group {
            failed = remap::change(vm, op, fds);
            if failed.is_err() {
                break;
            }
            changed += 1;
        }
        done += changed;
        let watched = remap::watch(vm, group.get(..changed).unwrap_or_default());
        if let Err(errno) = failed.and(watched) {
            return (done as u32, errno);
        }
    }
    (done as u32, 0)
}

/// The first of `ops` that are mappings of the store side by side, else the first alone. None if there
/// is none.
fn together(ops: &[Op]) -> Option<&[Op]> {
    let first = ops.first()?;
    let (mut count, mut len) = (1, first.len);
    for op in ops.iter().take(TOGETHER).skip(1) {
        let store = first.kind == OpKind::MapStore && op.kind == OpKind::MapStore;
        if !store || op.addr.0.checked_sub(first.addr.0) != Some(len.0) {
            break;
        }
        count += 1;
        len += op.len;
    }
    ops.get(..count)
}

/// `lens`: the lengths of the files that came with the batch.
fn acceptable(op: &Op, mut rams: impl Iterator<Item = Ram>, lens: &[u64]) -> bool {
    let aligned = |v: u64| v.is_multiple_of(PAGE_SIZE as u64);
    let rest = match op.kind {
        OpKind::MapStore => lens
            .get(usize::from(op.fd_index))
            .and_then(|len| len.checked_sub(op.file_offset))
            .is_some_and(|left| op.len.0 <= left && aligned(op.file_offset)),
        _ => op.fd_index == 0 && op.file_offset == 0,
    };
    rest && aligned(op.addr.0)
        && aligned(op.len.0)
        && op.len.0 > 0
        && rams.any(|ram| ram.contains(op.addr, op.len))
}
#[cfg(test)]
mod tests {
    use super::*;
    use ballast_units::{Bytes, HostAddr};

    #[test]
    fn operations_outside_the_ram_or_off_the_page_are_not_acceptable() {
        let part = |addr| Ram { addr: HostAddr(addr), len: Bytes(0x10000), file_offset: 0 };
        // Two parts that lie side by side are two all the same.
        let ram = || [part(0x10000), part(0x40000), part(0x50000)].into_iter();
        let good = Op {
            kind: OpKind::MapStore,
            addr: HostAddr(0x1f000),
            len: Bytes(0x1000),
            file_offset: 0x3000,
            fd_index: 1,
        };
        let lens = [0, 0x4000];
        assert!(acceptable(&good, ram(), &lens));
        assert!(!acceptable(&good, ram(), &lens[..1]), "no such descriptor");
        assert!(!acceptable(&good, ram(), &[0, 0x3fff]), "the file ends before");
        for bad in [
            Op { addr: HostAddr(0xf000), ..good },
            Op { addr: HostAddr(0x20000), ..good },
            Op { addr: HostAddr(0x1f001), ..good },
            Op { addr: HostAddr(0x4f000), len: Bytes(0x2000), file_offset: 0, ..good },
            Op { len: Bytes(0x2000), ..good },
            Op { len: Bytes(0), ..good },
            Op { len: Bytes(0x800), ..good },
            Op { len: Bytes(!0xfff), ..good },
            Op { file_offset: 1, ..good },
            Op { file_offset: 0x4000, ..good },
            Op { file_offset: u64::MAX, ..good },
            Op { kind: OpKind::MapHome, ..good },
        ] {
            assert!(!acceptable(&bad, ram(), &lens), "{bad:?}");
        }
        assert!(acceptable(&Op { addr: HostAddr(0x5f000), ..good }, ram(), &lens));
        let home = Op { kind: OpKind::MapHome, file_offset: 0, fd_index: 0, ..good };
        assert!(acceptable(&home, ram(), &[]));
    }

    #[test]
    fn only_store_pages_side_by_side_are_mapped_together() {
        let op = |kind, page: u64, pages: u64| Op {
            kind,
            addr: HostAddr(0x10000 + page * 0x1000),
            len: Bytes(pages * 0x1000),
            file_offset: 0,
            fd_index: 0,
        };
        let count = |ops: &[Op]| together(ops).map(<[Op]>::len);
        use OpKind::{MapAgain, MapHome, MapStore};
        assert_eq!(count(&[]), None);
        assert_eq!(count(&[op(MapStore, 3, 2)]), Some(1));
        let side_by_side = [op(MapStore, 3, 2), op(MapStore, 5, 1), op(MapStore, 6, 3)];
        assert_eq!(count(&side_by_side), Some(3));
        assert_eq!(count(&[op(MapStore, 3, 2), op(MapStore, 6, 1)]), Some(1), "a gap");
        assert_eq!(count(&[op(MapStore, 3, 2), op(MapStore, 4, 1)]), Some(1), "the same page");
        assert_eq!(count(&[op(MapStore, 3, 2), op(MapStore, 2, 1)]), Some(1), "backwards");
        assert_eq!(count(&[op(MapStore, 3, 1), op(MapHome, 4, 1)]), Some(1));
        assert_eq!(count(&[op(MapHome, 3, 1), op(MapHome, 4, 1)]), Some(1));
        assert_eq!(count(&[op(MapAgain, 3, 1), op(MapStore, 4, 1)]), Some(1));
        let many: Vec<Op> = (0..100).map(|page| op(MapStore, page, 1)).collect();
        assert_eq!(count(&many), Some(TOGETHER));
    }
}
