//! Which mappings of a process are its guest's RAM.
//!
//! Nothing says so; it is told by what guest RAM is: one large piece, readable and writable, of
//! shared memory (memfd, tmpfs, hugetlbfs) or anonymous, whichever the largest is. Pages that
//! are shared already are private mappings of a store between those of the RAM's own file, so one
//! piece may consist of many mappings.

use std::collections::HashMap;

use ballast_uffd::procmap::Vma;
use ballast_units::{Bytes, HostAddr};

/// A part of a guest's RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub start: HostAddr,
    /// One past the last byte.
    pub end: HostAddr,
    /// Where in a file of common pages it is mapped from, copies being made for writes; None if it is
    /// mapped from the guest's own file, or none.
    pub store: Option<Place>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub file: FileId,
    pub offset: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FileId {
    device: (u32, u32),
    inode: u64,
}

impl FileId {
    fn of(vma: &Vma) -> FileId {
        FileId { device: vma.device, inode: vma.inode }
    }
}

impl Part {
    pub fn len(&self) -> Bytes {
        Bytes(self.end.0 - self.start.0)
    }
}

/// Which process a file of guest RAM was counted with: others that map it (a device backend of the
/// VMM) do not count it again.
#[derive(Debug, Default)]
pub struct Claims(HashMap<FileId, u32>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Shared,
    /// A private mapping of a file in memory.
    Store,
    Anonymous,
}

/// What a process has of guest RAM.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Ram(Vec<Part>),
    Nothing,
    /// Nothing but what was counted with this process.
    Counted(u32),
}

/// The guest RAM in the text of /proc/PID/maps: pieces of at least `min`, of the kind of the largest. A VMM whose RAM is
/// shared has heaps of its own beside it, and one whose RAM is its own may map files that it shares with others.
pub(crate) fn find(maps: &str, min: Bytes, pid: u32, claims: &mut Claims) -> Found {
    let mut pieces: Vec<Vec<(Vma, Kind)>> = Vec::new();
    for vma in maps.lines().filter_map(Vma::parse) {
        let Some(kind) = kind_of(&vma) else { continue };
        match pieces.last_mut() {
            Some(piece) if continues(piece, &vma, kind) => piece.push((vma, kind)),
            _ => pieces.push(vec![(vma, kind)]),
        }
    }
    let size = |piece: &[(Vma, Kind)]| piece.iter().map(|(vma, _)| vma.len().0).sum::<u64>();
    let large = pieces.into_iter().filter(|piece| size(piece) >= min.0);
    let kinds: Vec<_> = large.filter_map(|piece| Some((of_piece(&piece)?, piece))).collect();
    let Some(&(ram, _)) = kinds.iter().max_by_key(|(_, piece)| size(piece)) else {
        return Found::Nothing;
    };
    let (mut parts, mut counted) = (Vec::new(), None);
    for (vma, kind) in kinds.iter().filter(|(kind, _)| *kind == ram).flat_map(|(_, piece)| piece) {
        let owner = match kind {
            Kind::Shared => *claims.0.entry(FileId::of(vma)).or_insert(pid),
            Kind::Store | Kind::Anonymous => pid,
        };
        if owner == pid { parts.push(part(vma, *kind)) } else { counted = Some(owner) }
    }
    // What is left beside another's RAM are pages that it shares with it.
    match counted {
        Some(by) if parts.iter().all(|part| part.store.is_some()) => Found::Counted(by),
        _ => Found::Ram(parts),
    }
}

/// None: of files that it has by itself, as libraries are.
fn of_piece(piece: &[(Vma, Kind)]) -> Option<Kind> {
    let has = |kind| piece.iter().any(|(_, k)| *k == kind).then_some(kind);
    has(Kind::Shared).or_else(|| has(Kind::Anonymous))
}

fn part(vma: &Vma, kind: Kind) -> Part {
    let place = Place { file: FileId::of(vma), offset: vma.offset };
    Part { start: vma.start, end: vma.end, store: (kind == Kind::Store).then_some(place) }
}

/// Whether a mapping goes on where the last one of the piece ends. Anonymous memory beside a
/// file's is another thing: a stack, a heap.
fn continues(piece: &[(Vma, Kind)], vma: &Vma, kind: Kind) -> bool {
    let same = |last: Kind| (last == Kind::Anonymous) == (kind == Kind::Anonymous);
    piece.last().is_some_and(|(last, of)| last.end == vma.start && same(*of))
}

/// Of a mapping that may be guest RAM or a part of it.
fn kind_of(vma: &Vma) -> Option<Kind> {
    // What can be executed is code that the VMM made.
    if !vma.readable || !vma.writable || vma.executable {
        return None;
    }
    match (vma.inode, vma.shared) {
        (0, _) => Some(Kind::Anonymous),
        // Files on disks have a device with a major number.
        _ if vma.device.0 != 0 || is_device(&vma.path) => None,
        (_, true) => Some(Kind::Shared),
        (_, false) => Some(Kind::Store),
    }
}

/// Memory of a device or of the kernel. Shared anonymous memory shows as /dev/zero.
fn is_device(path: &str) -> bool {
    let memory = ["/dev/shm/", "/dev/hugepages", "/dev/zero"];
    let is_memory = || memory.iter().any(|start| path.starts_with(start));
    path.starts_with("anon_inode:") || path.starts_with("/dev/") && !is_memory()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIN: Bytes = Bytes::from_mib(1);

    fn parts(maps: &str) -> Vec<(u64, u64, Option<u64>)> {
        match find(maps, MIN, 1, &mut Claims::default()) {
            Found::Ram(parts) => {
                parts.iter().map(|p| (p.start.0, p.end.0, p.store.map(|s| s.offset))).collect()
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn shared_ram_is_found_between_a_vmms_own_mappings() {
        let maps = "\
555500000000-555500800000 rw-p 00000000 fe:01 77 /usr/bin/qemu-system-x86_64
555500800000-555502800000 rw-p 00000000 00:00 0 [heap]
7f0000000000-7f0002000000 rwxp 00000000 00:00 0
7f0010000000-7f0010800000 rw-p 00000000 00:00 0
7f0010800000-7f0018800000 rw-s 00000000 00:01 2071 /memfd:mem (deleted)
7f0018800000-7f0018801000 ---p 00000000 00:00 0
7f0020000000-7f0024000000 rw-s 00000000 00:06 12 /dev/dri/renderD128
7f0030000000-7f0030100000 r--s 00000000 00:01 9 /memfd:other (deleted)
";
        assert_eq!(parts(maps), [(0x7f00_1080_0000, 0x7f00_1880_0000, None)]);
    }

    #[test]
    fn pages_that_are_shared_already_do_not_cut_it_in_pieces() {
        let mut maps = String::new();
        for i in 0..512u64 {
            let (start, end) = (0x7f00_0000_0000 + i * 4096, 0x7f00_0000_0000 + (i + 1) * 4096);
            let (kind, inode) = if i % 2 == 0 { ("rw-s", 5) } else { ("rw-p", 6) };
            maps += &format!("{start:x}-{end:x} {kind} {:08x} 00:19 {inode} /x\n", i * 4096);
        }
        let parts = parts(&maps);
        assert_eq!(parts.len(), 512);
        let offset = |i| (i % 2 == 1).then_some(i as u64 * 4096);
        assert!(parts.iter().enumerate().all(|(i, part)| part.2 == offset(i)));
    }

    #[test]
    fn without_shared_ram_it_is_anonymous_and_never_code() {
        let maps = "\
1000000-1100000 rw-p 00000000 00:00 0
1100000-1800000 rw-p 00000000 00:00 0
2000000-9000000 rwxp 00000000 00:00 0
a000000-a001000 rw-s 00000000 00:01 3 /dev/shm/small
b000000-bfff000 rw-p 00000000 00:2f 8 /usr/lib/library.so
";
        let expected = [(0x100_0000, 0x110_0000, None), (0x110_0000, 0x180_0000, None)];
        assert_eq!(parts(maps), expected);
    }

    /// A file that several VMs share, for their guests to look at, is neither the RAM of the one nor of the other.
    #[test]
    fn a_small_file_beside_anonymous_ram_is_not_the_ram() {
        let maps = "\
7f0000000000-7f0040000000 rw-p 00000000 00:00 0
7f0050000000-7f0052000000 rw-s 00000000 00:19 12 /dev/shm/looking-glass
";
        let mut claims = Claims::default();
        for pid in 1..3 {
            let Found::Ram(parts) = find(maps, Bytes::from_mib(16), pid, &mut claims) else {
                panic!("process {pid} has RAM")
            };
            assert_eq!(parts.iter().map(|part| part.len().0).collect::<Vec<_>>(), [1 << 30]);
        }
    }

    #[test]
    fn ram_is_counted_with_one_process_and_small_pieces_with_none() {
        let maps = "7f0010000000-7f0018000000 rw-s 00000000 00:01 2071 /memfd:mem (deleted)\n";
        let mut claims = Claims::default();
        assert!(matches!(find(maps, MIN, 1, &mut claims), Found::Ram(_)));
        assert_eq!(find(maps, MIN, 2, &mut claims), Found::Counted(1));
        assert!(matches!(find(maps, MIN, 1, &mut claims), Found::Ram(_)));
        let small = "7f0010000000-7f0010001000 rw-s 00000000 00:01 5 /memfd:mem (deleted)\n";
        assert_eq!(find(small, MIN, 3, &mut claims), Found::Nothing);
        assert_eq!(find("", MIN, 3, &mut claims), Found::Nothing);
        assert_eq!(find("nonsense\n\n", MIN, 3, &mut claims), Found::Nothing);
    }
}
