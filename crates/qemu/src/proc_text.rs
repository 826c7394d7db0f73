//! The texts of /proc, read tolerantly: a line that is not understood is as if it were not there.
//! (maps: `ballast_uffd::procmap`.)

use std::str::FromStr;

use ballast_api::record::stat_fields;
use ballast_units::Bytes;

/// A number of kilobytes after `key:`, as in status and smaps.
pub fn kilobytes(line: &str, key: &str) -> Option<Bytes> {
    let value = line.strip_prefix(key)?.strip_prefix(':')?.trim().strip_suffix("kB")?;
    value.trim_end().parse::<u64>().ok()?.checked_mul(1024).map(Bytes)
}

/// The value of `key` in /proc/PID/status or /proc/meminfo; None if it has none.
pub fn status_field(status: &str, key: &str) -> Option<Bytes> {
    status.lines().find_map(|line| kilobytes(line, key))
}

/// The first number of `key` in /proc/PID/status; None if it has none.
pub fn status_number<T: FromStr>(status: &str, key: &str) -> Option<T> {
    let mut lines = status.lines();
    let value = lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    value.split_ascii_whitespace().next()?.parse().ok()
}

/// What /proc/PID/stat, or that of one task, tells here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Name of the process or thread.
    pub comm: String,
    /// 'R', 'S', 'D', 'Z', ...
    pub state: char,
    /// User and system time in ticks of 10 ms.
    pub ticks: u64,
    /// Faults that waited for a page to be read from swap or a file, a count.
    pub major_faults: u64,
    /// When it began, in ticks since the host's start.
    pub started: u64,
    /// Of its address space; 0 for who may not see that.
    pub size: Bytes,
}

/// The text of such a file.
pub fn stat(text: &str) -> Option<Stat> {
    let (comm, mut fields) = stat_fields(text)?;
    let state = fields.next()?.chars().next()?;
    // majflt is field 12 of the line, utime and stime are 14 and 15, the state is the third.
    let major_faults = fields.nth(8)?.parse().ok()?;
    let user: u64 = fields.nth(1)?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    // starttime is field 22, vsize the next.
    let started = fields.nth(6)?.parse().ok()?;
    let size = Bytes(fields.next()?.parse().ok()?);
    let ticks = user.checked_add(system)?;
    Some(Stat { comm: comm.to_owned(), state, ticks, major_faults, started, size })
}

/// The kernel's flags of a thread (PF_...), in the text of its stat.
pub fn task_flags(text: &str) -> Option<u32> {
    // The ninth field; the first after the name is the third.
    stat_fields(text)?.1.nth(6)?.parse().ok()
}

/// All resident memory and its anonymous part, from /proc/PID/statm, which costs the kernel much less to
/// tell than status does. None of a process that has no memory any more.
pub fn statm(text: &str) -> Option<(Bytes, Bytes)> {
    let mut words = text.split_ascii_whitespace().skip(1);
    let mut pages =
        || words.next()?.parse::<u64>().ok()?.checked_mul(ballast_units::PAGE_SIZE as u64);
    let (all, of_files) = (pages()?, pages()?);
    (all > 0).then(|| (Bytes(all), Bytes(all.saturating_sub(of_files))))
}

/// The open flags in the text of /proc/PID/fdinfo/N, which are octal.
pub fn open_flags(text: &str) -> Option<u32> {
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"))?;
    u32::from_str_radix(flags.trim(), 8).ok()
}

/// The mount that the file of the text of /proc/PID/fdinfo/N was opened in: its first number in mountinfo.
pub fn mount_id(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_tell_their_mounts() {
        assert_eq!(mount_id("pos:\t0\nflags:\t02\nmnt_id:\t28\nino:\t1\n"), Some(28));
        for bad in ["", "mnt_id:\t", "mnt_id:\tx", "pos:\t28"] {
            assert_eq!(mount_id(bad), None, "{bad:?}");
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
    fn the_first_number_of_a_line_is_told() {
        let status =
            "Name:\tUid:\nUid:\t1000\t0\t0\t0\nFDSize:\t64\nThreads:\tx\nBig:\t4294967296\n";
        assert_eq!(status_number(status, "Uid"), Some(1000_u32));
        assert_eq!(status_number(status, "FDSize"), Some(64_u64));
        for key in ["Threads", "Big", "FD", "Absent", "Name", ""] {
            assert_eq!(status_number::<u32>(status, key), None, "{key}");
        }
    }

    #[test]
    fn statm_tells_anonymous_memory_apart() {
        assert_eq!(statm("900 100 30 5 0 80 0\n"), Some((Bytes(409_600), Bytes(286_720))));
        for bad in ["0 0 0 0 0 0 0", "", "900", "900 100", "900 x 30", "1 99999999999999999999 1"] {
            assert_eq!(statm(bad), None, "{bad}");
        }
    }

    #[test]
    fn stat_survives_every_name() {
        let tail = " S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20 0 3 0 777 8192 5";
        for name in ["qemu", "CPU 0/KVM", ") R 1", "((", "a\nb", ""] {
            let stat = stat(&format!("17 ({name}){tail}")).unwrap();
            assert_eq!((stat.comm.as_str(), stat.state, stat.ticks), (name, 'S', 300));
            assert_eq!((stat.major_faults, stat.started, stat.size), (9, 777, Bytes(8192)));
        }
        for bad in [
            "",
            "17",
            "17 (a",
            "17 a) S",
            "17 (a)",
            "17 (a) S 1 2",
            "17 (a) S 1 2 3 4 5 6 7 8 9 10 x 1",
            "17 (a) S 1 2 3 4 5 6 7 8 x 10 1 1",
            "17 (a) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20 0 3 0 777",
        ] {
            assert_eq!(stat(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn open_flags_are_octal() {
        assert_eq!(open_flags("pos:\t0\nflags:\t0140002\nmnt_id:\t25\n"), Some(0o140002));
        assert_eq!(open_flags("pos:\t0\nflags:\t9\n"), None);
        assert_eq!(open_flags(""), None);
    }
}
