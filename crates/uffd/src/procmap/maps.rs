//! All mappings, or those of a range; how many there are, and may be.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::ops::Range;

use ballast_units::HostAddr;

use super::Vma;

/// How much is fetched at once: some hundred lines.
const BUFFER: usize = 64 << 10;
/// A page of the kernel's, shown in every process and not counted among its mappings.
const NOT_COUNTED: &[u8] = b"[vsyscall]";

/// A part of an address range that one file, or none, backs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// The first byte.
    pub start: HostAddr,
    /// One past the last byte.
    pub end: HostAddr,
    /// As `st_dev` of the file.
    pub dev: u64,
    /// As `st_ino` of the file; 0 for anonymous memory.
    pub inode: u64,
    /// Byte of the file that `start` shows; 0 for anonymous memory.
    pub offset: u64,
    /// MAP_SHARED.
    pub shared: bool,
}

impl Mapped {
    /// Byte of the file that `address` shows; it must lie inside.
    pub fn offset_of(&self, address: HostAddr) -> u64 {
        self.offset + address.0.saturating_sub(self.start.0)
    }
}

/// What backs an address range of a process, in order, without overlaps. What is missing between two
/// parts is not mapped.
///
/// The process may change its mappings while they are read: each part was there at some moment of the
/// reading, and what did not change is told as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Maps(Vec<Mapped>);

impl Maps {
    /// Reads /proc/PID/maps, which takes time for every mapping up to the end of `range`.
    ///
    /// # Errors
    /// ENOENT, ESRCH: the process is gone. EACCES: not the caller's to look at.
    pub fn read(pid: u32, range: Range<HostAddr>) -> io::Result<Maps> {
        parse(open(pid)?, range)
    }

    /// How many mappings the process has: what vm.max_map_count limits. Reads all of them.
    ///
    /// # Errors
    /// As of [`Maps::read`].
    pub fn count_all(pid: u32) -> io::Result<u64> {
        count(open(pid)?)
    }

    /// In ascending order of address.
    pub fn parts(&self) -> &[Mapped] {
        &self.0
    }

    /// The part in which `address` lies; None where nothing is mapped, or outside the range that was read.
    pub fn at(&self, address: HostAddr) -> Option<&Mapped> {
        let after = self.0.partition_point(|part| part.end <= address);
        self.0.get(after).filter(|part| part.start <= address)
    }
}

/// Calls `visit` for each mapping of a process, in ascending order of address, until it answers false. Lines that are
/// not understood are passed over.
///
/// # Errors
/// As of [`Maps::read`].
pub fn each(pid: u32, visit: impl FnMut(Vma) -> bool) -> io::Result<()> {
    each_in(open(pid)?, visit)
}

/// vm.max_map_count: the mappings that one process may have.
///
/// # Errors
/// What reading it said; `InvalidData` if it is no number.
pub fn max_map_count() -> io::Result<u64> {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count")?;
    text.trim().parse().map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
}

fn open(pid: u32) -> io::Result<impl BufRead> {
    Ok(BufReader::with_capacity(BUFFER, File::open(format!("/proc/{pid}/maps"))?))
}

fn each_in(mut maps: impl BufRead, mut visit: impl FnMut(Vma) -> bool) -> io::Result<()> {
    let mut line = Vec::new();
    while maps.read_until(b'\n', &mut line)? > 0 {
        if let Some(vma) = Vma::parse(&String::from_utf8_lossy(&line))
            && !visit(vma)
        {
            break;
        }
        line.clear();
    }
    Ok(())
}

fn parse(maps: impl BufRead, range: Range<HostAddr>) -> io::Result<Maps> {
    let mut parts = Vec::new();
    // Two mappings that become one while they are read can be told once apart and once as one.
    let mut told = range.start;
    each_in(maps, |vma| {
        if vma.start >= range.end {
            return false;
        }
        let (start, end) = (vma.start.max(told), vma.end.min(range.end));
        if start < end {
            let (major, minor) = vma.device;
            parts.push(Mapped {
                start,
                end,
                dev: rustix::fs::makedev(major, minor),
                inode: vma.inode,
                offset: match vma.inode {
                    0 => 0,
                    _ => vma.offset + (start.0 - vma.start.0),
                },
                shared: vma.shared,
            });
            told = end;
        }
        true
    })?;
    Ok(Maps(parts))
}

fn count(mut maps: impl BufRead) -> io::Result<u64> {
    let mut lines = 0;
    let mut line = Vec::new();
    while maps.read_until(b'\n', &mut line)? > 0 {
        lines += u64::from(!line.trim_ascii_end().ends_with(NOT_COUNTED));
        line.clear();
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
1000-3000 rw-s 00005000 00:1f 77 /dev/shm/ram
3000-4000 rw-p 00009000 00:20 78 /dev/shm/store
what is this
4000-8000 rw-s 00008000 00:1f 77 /dev/shm/ram
9000-a000 rw-p 00000000 00:00 0
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
";

    fn read(text: &str, start: u64, end: u64) -> Vec<Mapped> {
        parse(text.as_bytes(), HostAddr(start)..HostAddr(end)).unwrap().0
    }

    fn part(start: u64, end: u64, minor: u32, inode: u64, offset: u64, shared: bool) -> Mapped {
        let dev = rustix::fs::makedev(0, minor);
        Mapped { start: HostAddr(start), end: HostAddr(end), dev, inode, offset, shared }
    }

    #[test]
    fn a_range_is_told_in_parts_cut_to_it() {
        let home = part(0x2000, 0x3000, 0x1f, 77, 0x6000, true);
        let store = part(0x3000, 0x4000, 0x20, 78, 0x9000, false);
        let rest = part(0x4000, 0x5000, 0x1f, 77, 0x8000, true);
        assert_eq!(read(TEXT, 0x2000, 0x5000), [home, store, rest]);
        assert_eq!(read(TEXT, 0x8000, 0x9000), []);
        assert_eq!(read(TEXT, 0x8000, 0x9800), [part(0x9000, 0x9800, 0, 0, 0, false)]);
        assert_eq!(read(TEXT, 0x3000, 0x3000), []);
        assert_eq!(rest.offset_of(HostAddr(0x4800)), 0x8800);
    }

    #[test]
    fn a_part_is_found_by_an_address_in_it() {
        let maps = parse(TEXT.as_bytes(), HostAddr(0x1000)..HostAddr(0xa000)).unwrap();
        assert_eq!(maps.parts().len(), 4);
        let at = |address| maps.at(HostAddr(address)).map(|part| (part.start.0, part.inode));
        assert_eq!(at(0xfff), None);
        assert_eq!(at(0x1000), Some((0x1000, 77)));
        assert_eq!(at(0x3fff), Some((0x3000, 78)));
        assert_eq!(at(0x4000), Some((0x4000, 77)));
        assert_eq!(at(0x8000), None);
        assert_eq!(at(0x9fff), Some((0x9000, 0)));
        assert_eq!(at(0xa000), None);
    }

    #[test]
    fn a_mapping_that_grew_while_it_was_read_is_not_told_twice() {
        let text = "\
1000-2000 rw-s 00001000 00:1f 77
1000-5000 rw-s 00001000 00:1f 77
3000-4000 rw-s 00003000 00:1f 77
";
        let parts = [
            part(0x1000, 0x2000, 0x1f, 77, 0x1000, true),
            part(0x2000, 0x5000, 0x1f, 77, 0x2000, true),
        ];
        assert_eq!(read(text, 0, 0x9000), parts);
    }

    #[test]
    fn mappings_are_counted_as_the_kernel_counts_them() {
        assert_eq!(count(TEXT.as_bytes()).unwrap(), 5, "a line that is not understood is one too");
        assert_eq!(count(&b""[..]).unwrap(), 0);
        let own = Maps::count_all(std::process::id()).unwrap();
        assert!(own > 5 && own < max_map_count().unwrap(), "{own}");
        assert_eq!(
            Maps::count_all(u32::MAX).unwrap_err().raw_os_error(),
            Some(rustix::io::Errno::NOENT.raw_os_error())
        );
    }
}
