//! One line of maps, read tolerantly: one that is not understood is as if it were not there.

use ballast_units::{Bytes, HostAddr};

/// One mapping, as a line of /proc/PID/maps (or the first of a block of smaps) shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vma {
    /// The first byte.
    pub start: HostAddr,
    /// One past the last byte.
    pub end: HostAddr,
    /// PROT_READ.
    pub readable: bool,
    /// PROT_WRITE.
    pub writable: bool,
    /// PROT_EXEC.
    pub executable: bool,
    /// MAP_SHARED.
    pub shared: bool,
    /// Byte of the file that it starts with.
    pub offset: u64,
    /// Major and minor number of the file's device.
    pub device: (u32, u32),
    /// As `st_ino` of the file; 0 for anonymous memory.
    pub inode: u64,
    /// As it stands in the line: with " (deleted)" behind a file that is, `[heap]` and the like, or
    /// nothing.
    pub path: String,
}

impl Vma {
    /// None for any line that shows no mapping.
    pub fn parse(line: &str) -> Option<Vma> {
        let mut rest = line.trim_end_matches('\n');
        let mut word = || {
            rest = rest.trim_start_matches(' ');
            let (word, tail) = rest.split_at(rest.find(' ').unwrap_or(rest.len()));
            rest = tail;
            word
        };
        let (start, end) = word().split_once('-')?;
        let permissions = word().as_bytes();
        let offset = u64::from_str_radix(word(), 16).ok()?;
        let (major, minor) = word().split_once(':')?;
        let inode = word().parse().ok()?;
        let (start, end) =
            (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        Some(Vma {
            start: HostAddr(start),
            end: HostAddr((end >= start).then_some(end)?),
            readable: permissions.first() == Some(&b'r'),
            writable: permissions.get(1) == Some(&b'w'),
            executable: permissions.get(2) == Some(&b'x'),
            shared: match permissions.get(3)? {
                b's' => true,
                b'p' => false,
                _ => return None,
            },
            offset,
            device: (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?),
            inode,
            path: rest.trim_start_matches(' ').to_owned(),
        })
    }

    /// From the first byte to the last.
    pub fn len(&self) -> Bytes {
        Bytes(self.end.0 - self.start.0)
    }
    /// Of no byte: no mapping of the kernel's is.
    pub fn is_empty(&self) -> bool {
        self.end == self.start
    }
    /// Whether `address` lies in it.
    pub fn holds(&self, address: HostAddr) -> bool {
        (self.start..self.end).contains(&address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_with_any_path() {
        let line = "7f5c04000000-7f5c08000000 rw-s 00003000 00:01 2071   /memfd:memory backend (deleted)\n";
        let vma = Vma::parse(line).unwrap();
        assert_eq!((vma.start.0, vma.end.0), (0x7f5c_0400_0000, 0x7f5c_0800_0000));
        assert!(vma.shared && vma.readable && vma.writable && !vma.executable);
        assert_eq!((vma.offset, vma.device, vma.inode), (0x3000, (0, 1), 2071));
        assert_eq!(vma.path, "/memfd:memory backend (deleted)");
        assert_eq!(vma.len(), Bytes::from_mib(64));
        assert!(vma.holds(vma.start) && !vma.holds(vma.end));
        let anonymous = Vma::parse("1000-2000 r--p 00000000 00:00 0").unwrap();
        assert!(!anonymous.shared && !anonymous.writable && anonymous.path.is_empty());
        let code = Vma::parse("1000-2000 --xp 00000000 00:00 0").unwrap();
        assert!(code.executable && !code.readable);
    }

    #[test]
    fn what_is_no_such_line_is_none() {
        for bad in [
            "",
            " ",
            "Size:  4 kB",
            "VmFlags: rd wr sh",
            "1000 rw-p 0 00:00 0",
            "2000-1000 rw-p 0 00:00 0",
            "x-y rw-p 0 00:00 0",
            "1000-2000 rw 0 00:00 0",
            "1000-2000 rw-x 0 00:00 0",
            "1000-2000 rw-p g 00:00 0",
            "1000-2000 rw-p 0 0000 0",
            "1000-2000 rw-p 0 00:00 -1",
            "10000000000000000-20000000000000000 rw-p 0 00:00 0",
            "1000-2000 rw-p 0 00:00",
        ] {
            assert_eq!(Vma::parse(bad), None, "{bad:?}");
        }
    }
}
