//! The texts of /proc, read tolerantly: a line that is not understood is as if it were not there.

use ballast_units::Bytes;

/// One line of /proc/PID/maps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vma {
    pub start: u64,
    /// One past the last byte.
    pub end: u64,
    pub writable: bool,
    /// MAP_SHARED.
    pub shared: bool,
    /// Major and minor number of the file's device.
    pub device: (u32, u32),
    /// 0 for anonymous memory.
    pub inode: u64,
    pub path: String,
}

impl Vma {
    pub fn len(&self) -> Bytes {
        Bytes(self.end - self.start)
    }
    pub fn is_empty(&self) -> bool {
        self.end == self.start
    }
    pub fn holds(&self, address: u64) -> bool {
        (self.start..self.end).contains(&address)
    }
}

/// A line of maps, or the first of a block of smaps; None for any other.
pub fn vma(line: &str) -> Option<Vma> {
    let mut rest = line.trim_end_matches('\n');
    let mut word = || {
        rest = rest.trim_start_matches(' ');
        let (word, tail) = rest.split_at(rest.find(' ').unwrap_or(rest.len()));
        rest = tail;
        word
    };
    let (start, end) = word().split_once('-')?;
    let permissions = word().as_bytes();
    let _offset = word();
    let (major, minor) = word().split_once(':')?;
    let inode = word().parse().ok()?;
    let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    Some(Vma {
        start,
        end: (end >= start).then_some(end)?,
        writable: permissions.get(1) == Some(&b'w'),
        shared: match permissions.get(3)? {
            b's' => true,
            b'p' => false,
            _ => return None,
        },
        device: (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?),
        inode,
        path: rest.trim_start_matches(' ').to_owned(),
    })
}

/// A number of kilobytes after `key:`, as in status and smaps.
pub fn kilobytes(line: &str, key: &str) -> Option<Bytes> {
    let value = line.strip_prefix(key)?.strip_prefix(':')?.trim().strip_suffix("kB")?;
    value.trim_end().parse::<u64>().ok()?.checked_mul(1024).map(Bytes)
}

/// The value of `key` in /proc/PID/status; None if it has none.
pub fn status_field(status: &str, key: &str) -> Option<Bytes> {
    status.lines().find_map(|line| kilobytes(line, key))
}

/// What /proc/PID/stat, or that of one task, tells here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    pub comm: String,
    /// 'R', 'S', 'D', 'Z', ...
    pub state: char,
    /// User and system time in ticks of 10 ms.
    pub ticks: u64,
}

/// The name stands in parentheses and may hold any character, parentheses and newlines included.
pub fn stat(text: &str) -> Option<Stat> {
    let (head, tail) = text.rsplit_once(')')?;
    let (_, comm) = head.split_once('(')?;
    let mut fields = tail.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    // utime and stime are fields 14 and 15 of the line, the state the third.
    let user: u64 = fields.nth(10)?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(Stat { comm: comm.to_owned(), state, ticks: user.checked_add(system)? })
}

/// Nanoseconds on a CPU: the first number of schedstat.
pub fn schedstat(text: &str) -> Option<u64> {
    text.split_ascii_whitespace().next()?.parse().ok()
}

/// The open flags in the text of /proc/PID/fdinfo/N, which are octal.
pub fn open_flags(text: &str) -> Option<u32> {
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"))?;
    u32::from_str_radix(flags.trim(), 8).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_lines_are_read_with_any_path() {
        let line = "7f5c04000000-7f5c08000000 rw-s 00000000 00:01 2071   /memfd:memory backend (deleted)\n";
        let vma = vma(line).unwrap();
        assert_eq!((vma.start, vma.end), (0x7f5c_0400_0000, 0x7f5c_0800_0000));
        assert!(vma.shared && vma.writable);
        assert_eq!((vma.device, vma.inode), ((0, 1), 2071));
        assert_eq!(vma.path, "/memfd:memory backend (deleted)");
        assert_eq!(vma.len(), Bytes::from_mib(64));
        assert!(vma.holds(0x7f5c_0400_0000) && !vma.holds(0x7f5c_0800_0000));
        let anonymous = super::vma("1000-2000 r--p 00000000 00:00 0").unwrap();
        assert!(!anonymous.shared && !anonymous.writable && anonymous.path.is_empty());
    }

    #[test]
    fn what_is_no_maps_line_is_none() {
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
            "1000-2000 rw-p 0 0000 0",
            "1000-2000 rw-p 0 00:00 -1",
            "10000000000000000-20000000000000000 rw-p 0 00:00 0",
            "1000-2000 rw-p 0 00:00",
        ] {
            assert_eq!(vma(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn fields_in_kilobytes() {
        let status = "Name:\tVmLck:\nVmLck:\t      64 kB\nRssAnon:\t 1 kB\nVmPin: x kB\nVmBig: 99999999999999999 kB\n";
        assert_eq!(status_field(status, "VmLck"), Some(Bytes(65536)));
        assert_eq!(status_field(status, "RssAnon"), Some(Bytes(1024)));
        for key in ["VmPin", "VmBig", "Vm", "Absent", ""] {
            assert_eq!(status_field(status, key), None, "{key}");
        }
        assert_eq!(status_field("", "VmLck"), None);
    }

    #[test]
    fn stat_survives_every_name() {
        let tail = " S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20";
        for name in ["qemu", "CPU 0/KVM", ") R 1", "((", "a\nb", ""] {
            let stat = stat(&format!("17 ({name}){tail}")).unwrap();
            assert_eq!((stat.comm.as_str(), stat.state, stat.ticks), (name, 'S', 300));
        }
        for bad in [
            "",
            "17",
            "17 (a",
            "17 a) S",
            "17 (a)",
            "17 (a) S 1 2",
            "17 (a) S 1 2 3 4 5 6 7 8 9 10 x 1",
        ] {
            assert_eq!(stat(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn schedstat_is_its_first_number() {
        assert_eq!(schedstat("318377 67938 2\n"), Some(318_377));
        assert_eq!(schedstat(""), None);
        assert_eq!(schedstat("x 1 2"), None);
    }

    #[test]
    fn open_flags_are_octal() {
        assert_eq!(open_flags("pos:\t0\nflags:\t0140002\nmnt_id:\t25\n"), Some(0o140002));
        assert_eq!(open_flags("pos:\t0\nflags:\t9\n"), None);
        assert_eq!(open_flags(""), None);
    }
}
