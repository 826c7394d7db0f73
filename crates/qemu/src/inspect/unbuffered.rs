//! Files whose reads may land in guest memory by themselves, though they are open without O_DIRECT: their file systems read
//! past the page cache when they see fit. The mount tells, without asking a server that may hang.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::Path;

use super::scan::{NAMED, if_there};
use crate::{bounded, proc_text};

/// There since OpenZFS 2.3, which has `direct=always`; "0" where that is off.
const ZFS_DIRECT: &str = "/sys/module/zfs/parameters/zfs_dio_enabled";

/// Those files of the process, `NAMED` at most, with their file systems: "/images/a.qcow2 (fuse.sshfs)".
///
/// # Errors
/// The process is gone, or not ours to see; or something that is needed for the look was not to be had.
pub(super) fn files(pid: u32) -> io::Result<Vec<String>> {
    files_among(pid, || Mounts::of(pid))
}

/// `all` the mounts are asked for once there is a file.
fn files_among(pid: u32, all: impl Fn() -> io::Result<Mounts>) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    let mut mounts = None;
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
        let fd = entry.file_name();
        let Some(info) = if_there(bounded::fd_info(pid, &fd.to_string_lossy()))? else { continue };
        let Some(mount) = is_read(&info).then(|| proc_text::mount_id(&info)).flatten() else {
            continue;
        };
        let mounts = match &mut mounts {
            Some(mounts) => mounts,
            none => none.insert(all()?),
        };
        if let Some(kind) = mounts.0.get(&mount)
            && let Some(target) = if_there(fs::read_link(entry.path()))?
        {
            found.push(format!("{} ({kind})", target.display()));
            if found.len() == NAMED {
                break;
            }
        }
    }
    Ok(found)
}

/// Whether something can be read through the descriptor: what is only written, its log for one, lands nowhere.
fn is_read(info: &str) -> bool {
    let mode = |flags| flags & libc::O_ACCMODE as u32;
    proc_text::open_flags(info).is_some_and(|flags| mode(flags) != libc::O_WRONLY as u32)
}

/// By their numbers, those mounts that may read so, and their types.
struct Mounts(HashMap<u64, String>);

impl Mounts {
    /// Those that the process sees, and those that its files may have been opened in by others: in the host's namespace, or
    /// in this process's.
    fn of(pid: u32) -> io::Result<Mounts> {
        let direct_zfs = match fs::read_to_string(Path::new(ZFS_DIRECT)) {
            Ok(setting) => setting.trim() != "0",
            Err(e) if e.kind() == io::ErrorKind::NotFound => false,
            Err(e) => return Err(e),
        };
        let mut all = HashMap::new();
        for process in ["self".to_owned(), "1".to_owned(), pid.to_string()] {
            let read = bounded::mounts(&process, |line| all.extend(of_line(line, direct_zfs)));
            match read {
                // Its own cannot be seen from everywhere, a container for one.
                Err(e) if process == "1" && e.kind() != io::ErrorKind::InvalidData => {
                    if_there(Err::<(), _>(e))?;
                }
                read => read?,
            }
        }
        Ok(Mounts(all))
    }
}

/// The number and the type of the mount that a line of mountinfo is about, if it is one of those.
fn of_line(line: &str, direct_zfs: bool) -> Option<(u64, String)> {
    let (mount, rest) = line.split_once(' ')?;
    let (_, rest) = rest.split_once(" - ")?;
    let kind = rest.split(' ').next()?;
    let may = may_pass_the_cache(kind) || (kind == "zfs" && direct_zfs);
    may.then(|| Some((mount.parse().ok()?, kind.to_owned()))).flatten()
}

/// FUSE and virtiofs where their servers say so, file by file; 9p and SMB by mount options and by what their servers grant.
fn may_pass_the_cache(kind: &str) -> bool {
    // With the program's name behind it, as libfuse mounts: "fuse.sshfs", "fuseblk.ntfs-3g".
    let of_fuse = kind.split('.').next();
    matches!(of_fuse, Some("fuse" | "fuseblk"))
        || matches!(kind, "virtiofs" | "9p" | "cifs" | "smb3")
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 21 0:35 / /images/far rw,nosuid shared:7 master:2 - fuse.sshfs host:/ rw,user_id=0
41 21 0:36 / /a\\040-\\040b rw - 9p share rw,trans=virtio
42 21 0:37 / /tank rw shared:9 - zfs tank/images rw,xattr
43 21 0:38 / /dev/shm rw - tmpfs fuse.not rw
44 21 0:39 / /smb rw - cifs //host/share rw
45 21 8:1 / /win rw - fuseblk /dev/sda1 rw
46 21 8:1 / /fusectl rw - fusectl fusectl rw

x 21 8:1 / /bad rw - fuse bad rw
47 21 8:1 / /worse rw
48 21 8:2 / /ntfs rw - fuseblk.ntfs-3g /dev/sda2 rw
49 21 0:40 / /fusion rw - fusion none rw
";

    #[test]
    fn file_systems_that_pass_the_page_cache_are_told_by_their_mounts() {
        let found = |zfs| {
            let mut found: Vec<_> = MOUNTS.lines().filter_map(|line| of_line(line, zfs)).collect();
            found.sort_unstable();
            found
        };
        let owned = |(id, kind): (u64, &str)| (id, kind.to_owned());
        let all = [
            (40, "fuse.sshfs"),
            (41, "9p"),
            (44, "cifs"),
            (45, "fuseblk"),
            (48, "fuseblk.ntfs-3g"),
        ];
        assert_eq!(found(false), all.map(owned));
        assert!(found(true).contains(&(42, "zfs".to_owned())));
    }

    #[test]
    fn a_file_is_found_by_the_mount_that_it_was_opened_in() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        let written = fs::File::create(&path).unwrap();
        let own = std::process::id();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&written).to_string();
        let mount = proc_text::mount_id(&bounded::fd_info(own, &fd).unwrap()).unwrap();
        let of_mount =
            |mount: u64| move || Ok(Mounts(HashMap::from([(mount, "fuse.far".to_owned())])));
        let is_found = |mount: u64| {
            let found = files_among(own, of_mount(mount)).unwrap();
            found.contains(&format!("{} (fuse.far)", path.display()))
        };
        assert!(!is_found(mount), "it is only written");
        let read = fs::File::open(&path).unwrap();
        assert!(is_found(mount));
        assert!(!is_found(u64::MAX));
        drop((read, written));
        assert!(!is_found(mount));
        assert!(Mounts::of(own).is_ok());
    }

    #[test]
    fn what_is_only_written_is_no_disk() {
        for (flags, read) in [("0100000", true), ("02100002", true), ("02102001", false)] {
            assert_eq!(
                is_read(&format!("pos:\t0\nflags:\t{flags}\nmnt_id:\t40\n")),
                read,
                "{flags}"
            );
        }
        assert!(!is_read("pos:\t0\n"));
    }

    #[test]
    fn files_of_other_file_systems_are_none() {
        let none = || Ok(Mounts(HashMap::new()));
        assert_eq!(files_among(std::process::id(), none).unwrap(), Vec::<String>::new());
        assert!(files(u32::MAX).is_err());
    }
}
