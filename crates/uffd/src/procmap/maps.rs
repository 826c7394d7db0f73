//! All mappings, or those of a range; how many there are, and may be.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::ops::Range;

use ballast_units::HostAddr;

use super::{Vma, query};

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
    /// What lies before `range` is not gone over, from Linux 6.11 on; before, each mapping up to its end takes time.
    ///
    /// # Errors
    /// ENOENT, ESRCH: the process is gone. EACCES: not the caller's to look at.
    pub fn read(pid: u32, range: Range<HostAddr>) -> io::Result<Maps> {
        parse(Source::open(pid)?, range)
    }

    /// How many mappings the process has: what vm.max_map_count limits. Goes over all of them.
    ///
    /// # Errors
    /// As of [`Maps::read`].
    pub fn count_all(pid: u32) -> io::Result<u64> {
        count(Source::open(pid)?)
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
pub fn each(pid: u32, mut visit: impl FnMut(Vma) -> bool) -> io::Result<()> {
    each_from(pid, HostAddr(0), |vma| {
        let next = vma.end;
        visit(vma).then_some(next)
    })
}

/// Calls `visit` for the first mapping that holds `from` or lies above it, and then for the first from where it answers
/// on, until it answers None. What lies between is not gone over, from Linux 6.11 on. It ends where an answer does not
/// lead on.
///
/// # Errors
/// As of [`Maps::read`].
pub fn each_from(
    pid: u32,
    from: HostAddr,
    visit: impl FnMut(Vma) -> Option<HostAddr>,
) -> io::Result<()> {
    let what = What { files: false, named: true };
    Source::open(pid)?.walk(from, what, visit)
}

/// Calls `visit` for each mapping of a process that shows a file (shared memory is one too), without its name: that is
/// most of the time that a mapping takes.
///
/// # Errors
/// As of [`Maps::read`].
pub fn each_file(pid: u32, visit: impl FnMut(Mapped) -> bool) -> io::Result<()> {
    files_of(Source::open(pid)?, visit)
}

/// vm.max_map_count: the mappings that one process may have.
///
/// # Errors
/// What reading it said; `InvalidData` if it is no number.
pub fn max_map_count() -> io::Result<u64> {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count")?;
    text.trim().parse().map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
}

/// Which mappings are wanted, and whether with their names.
#[derive(Clone, Copy)]
struct What {
    files: bool,
    named: bool,
}

/// From where mappings are read.
enum Source<T> {
    /// By address.
    Query(File),
    /// The text.
    Text(T),
}

impl Source<BufReader<File>> {
    fn open(pid: u32) -> io::Result<Self> {
        let file = File::open(format!("/proc/{pid}/maps"))?;
        Ok(match query::next(&file, HostAddr(0), false, false) {
            Ok(_) => Source::Query(file),
            Err(_) => Source::Text(BufReader::with_capacity(BUFFER, file)),
        })
    }
}

impl<T: BufRead> Source<T> {
    /// See [`each_from`].
    fn walk(
        self,
        mut from: HostAddr,
        what: What,
        mut visit: impl FnMut(Vma) -> Option<HostAddr>,
    ) -> io::Result<()> {
        let mut goes_on = |vma: Vma, from: &mut HostAddr| {
            let next = visit(vma).filter(|next| next > from);
            *from = next.unwrap_or(*from);
            next.is_some()
        };
        match self {
            Source::Query(file) => {
                while let Some(vma) = query::next(&file, from, what.files, what.named)? {
                    if !goes_on(vma, &mut from) {
                        break;
                    }
                }
            }
            Source::Text(mut maps) => {
                let mut line = Vec::new();
                while maps.read_until(b'\n', &mut line)? > 0 {
                    if let Some(vma) = Vma::parse(&String::from_utf8_lossy(&line))
                        && vma.end > from
                        && (vma.inode != 0 || !what.files)
                        && !goes_on(vma, &mut from)
                    {
                        break;
                    }
                    line.clear();
                }
            }
        }
        Ok(())
    }
}

impl From<&Vma> for Mapped {
    fn from(vma: &Vma) -> Mapped {
        let (major, minor) = vma.device;
        Mapped {
            start: vma.start,
            end: vma.end,
            dev: rustix::fs::makedev(major, minor),
            inode: vma.inode,
            offset: if vma.inode == 0 { 0 } else { vma.offset },
            shared: vma.shared,
        }
    }
}

fn files_of<T: BufRead>(maps: Source<T>, mut visit: impl FnMut(Mapped) -> bool) -> io::Result<()> {
    maps.walk(HostAddr(0), What { files: true, named: false }, |vma| {
        visit(Mapped::from(&vma)).then_some(vma.end)
    })
}

fn parse<T: BufRead>(maps: Source<T>, range: Range<HostAddr>) -> io::Result<Maps> {
    let mut parts = Vec::new();
    // Two mappings that become one while they are read can be told once apart and once as one.
    let mut told = range.start;
    maps.walk(range.start, What { files: false, named: false }, |vma| {
        if vma.start >= range.end {
            return None;
        }
        let (start, end) = (vma.start.max(told), vma.end.min(range.end));
        if start < end {
            let whole = Mapped::from(&vma);
            let offset = if vma.inode == 0 { 0 } else { whole.offset_of(start) };
            parts.push(Mapped { start, end, offset, ..whole });
            told = end;
        }
        Some(vma.end)
    })?;
    Ok(Maps(parts))
}

fn count<T: BufRead>(maps: Source<T>) -> io::Result<u64> {
    let mut counted = 0;
    match maps {
        Source::Query(_) => maps.walk(HostAddr(0), What { files: false, named: false }, |vma| {
            counted += 1;
            Some(vma.end)
        })?,
        Source::Text(mut maps) => {
            let mut line = Vec::new();
            while maps.read_until(b'\n', &mut line)? > 0 {
                counted += u64::from(!line.trim_ascii_end().ends_with(NOT_COUNTED));
                line.clear();
            }
        }
    }
    Ok(counted)
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
        parse(Source::Text(text.as_bytes()), HostAddr(start)..HostAddr(end)).unwrap().0
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
        let maps =
            parse(Source::Text(TEXT.as_bytes()), HostAddr(0x1000)..HostAddr(0xa000)).unwrap();
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
        assert_eq!(
            count(Source::Text(TEXT.as_bytes())).unwrap(),
            5,
            "a line that is not understood is one too"
        );
        assert_eq!(count(Source::Text(&b""[..])).unwrap(), 0);
        let own = Maps::count_all(std::process::id()).unwrap();
        assert!(own > 5 && own < max_map_count().unwrap(), "{own}");
        assert_eq!(
            Maps::count_all(u32::MAX).unwrap_err().raw_os_error(),
            Some(rustix::io::Errno::NOENT.raw_os_error())
        );
    }

    fn all<T: BufRead>(maps: Source<T>, what: What) -> Vec<Vma> {
        let mut found = Vec::new();
        maps.walk(HostAddr(0), what, |vma| {
            let end = vma.end;
            found.push(vma);
            Some(end)
        })
        .unwrap();
        found
    }

    #[test]
    fn by_address_the_kernel_tells_what_its_text_does() {
        use std::io::{Read, Write};
        struct Child(std::process::Child);
        impl Drop for Child {
            fn drop(&mut self) {
                self.0.kill().unwrap();
                self.0.wait().unwrap();
            }
        }
        let piped = std::process::Stdio::piped;
        let mut cat = std::process::Command::new("cat");
        let mut child = Child(cat.stdin(piped()).stdout(piped()).spawn().unwrap());
        let pid = child.0.id();
        let Source::Query(_) = Source::open(pid).unwrap() else {
            return println!("SKIPPED procmap: PROCMAP_QUERY needs Linux 6.11");
        };
        // What has answered has become what it is, and waits for more: it changes no more.
        child.0.stdin.as_mut().unwrap().write_all(b".").unwrap();
        child.0.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let text =
            || Source::Text(BufReader::new(File::open(format!("/proc/{pid}/maps")).unwrap()));
        let (every, files) =
            (What { files: false, named: true }, What { files: true, named: true });
        let mut told = all(text(), every);
        told.retain(|vma| !vma.path.as_bytes().ends_with(NOT_COUNTED));
        assert_eq!(all(Source::open(pid).unwrap(), every), told);
        assert_eq!(Maps::count_all(pid).unwrap(), told.len() as u64);
        let has_file: Vec<_> = told.iter().filter(|vma| vma.inode != 0).cloned().collect();
        assert!(has_file.len() > 4 && has_file.len() < told.len(), "{told:?}");
        assert_eq!(all(Source::open(pid).unwrap(), files), has_file);
        assert_eq!(all(text(), files), has_file);
        let mut mapped = Vec::new();
        each_file(pid, |part| {
            mapped.push(part);
            mapped.len() < 3
        })
        .unwrap();
        assert_eq!(mapped, has_file[..3].iter().map(Mapped::from).collect::<Vec<_>>());
        for range in [
            told[1].start..told[4].end,
            told[2].start.page(ballast_units::Ppn(1))..HostAddr(1 << 47),
        ] {
            assert_eq!(Maps::read(pid, range.clone()).unwrap(), parse(text(), range).unwrap());
        }
    }

    #[test]
    fn a_walk_goes_on_where_it_is_told_to() {
        let walk = |from: u64, to: &[u64]| {
            let mut to = to.iter();
            let mut seen = Vec::new();
            let what = What { files: false, named: true };
            Source::Text(TEXT.as_bytes())
                .walk(HostAddr(from), what, |vma| {
                    seen.push(vma.start.0);
                    to.next().map(|to| HostAddr(*to))
                })
                .unwrap();
            seen
        };
        assert_eq!(walk(0, &[]), [0x1000]);
        assert_eq!(walk(0, &[0x3000, 0x7fff, 0x8000]), [0x1000, 0x3000, 0x4000, 0x9000]);
        assert_eq!(walk(0x2fff, &[0x9000, 0xa000]), [0x1000, 0x9000, 0xffff_ffff_ff60_0000]);
        assert_eq!(walk(0x3000, &[0x3000, 0x9000]), [0x3000], "an answer that does not lead on");
    }
}
