//! Files whose reads may land in guest memory by themselves, though they are open without O_DIRECT: their file systems read
//! past the page cache when they see fit. The mount tells, without asking a server that may hang.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::Path;

use super::scan::if_there;
use crate::proc_text;

/// There since OpenZFS 2.3, which has `direct=always`; "0" where that is off.
const ZFS_DIRECT: &str = "/sys/module/zfs/parameters/zfs_dio_enabled";

/// Those files of the process, with their file systems: "/images/a.qcow2 (fuse.sshfs)".
///
/// # Errors
/// The process is gone, or not ours to see; or something that is needed for the look was not to be had.
pub(super) fn files(pid: u32) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    let mut mounts = None;
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
        let fd = entry.file_name();
        let info = format!("/proc/{pid}/fdinfo/{}", fd.to_string_lossy());
        let Some(info) = if_there(fs::read_to_string(info))? else { continue };
        let Some(mount) = is_read(&info).then(|| proc_text::mount_id(&info)).flatten() else {
            continue;
        };
        let mounts = match &mut mounts {
            Some(mounts) => mounts,
            none => none.insert(Mounts::of(pid)?),
        };
        if let Some(kind) = mounts.0.get(&mount)
            && let Some(target) = if_there(fs::read_link(entry.path()))?
        {
            found.push(format!("{} ({kind})", target.display()));
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
            let text = fs::read(format!("/proc/{process}/mountinfo"));
            let text = if process == "1" { if_there(text)?.unwrap_or_default() } else { text? };
            // Names are bytes: those of a mount that anybody made must not keep us from the others.
            all.extend(Mounts::parse(&String::from_utf8_lossy(&text), direct_zfs).0);
        }
        Ok(Mounts(all))
    }

    fn parse(text: &str, direct_zfs: bool) -> Mounts {
        let of_line = |line: &str| {
            let (mount, rest) = line.split_once(' ')?;
            let (_, rest) = rest.split_once(" - ")?;
            let kind = rest.split(' ').next()?;
            let may = may_pass_the_cache(kind) || (kind == "zfs" && direct_zfs);
            may.then(|| Some((mount.parse().ok()?, kind.to_owned()))).flatten()
        };
        Mounts(text.lines().filter_map(of_line).collect())
    }
}

/// FUSE and virtiofs where their servers say so, file by file; 9p and SMB by mount options and by what their servers grant.
fn may_pass_the_cache(kind: &str) -> bool {
    let is_fuse = kind == "fuse" || kind == "fuseblk" || kind.starts_with("fuse.");
    is_fuse || matches!(kind, "virtiofs" | "9p" | "cifs" | "smb3")
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
";

    #[test]
    fn file_systems_that_pass_the_page_cache_are_told_by_their_mounts() {
        let found = |zfs| {
            let mut found: Vec<_> = Mounts::parse(MOUNTS, zfs).0.into_iter().collect();
            found.sort_unstable();
            found
        };
        let owned = |(id, kind): (u64, &str)| (id, kind.to_owned());
        let all = [(40, "fuse.sshfs"), (41, "9p"), (44, "cifs"), (45, "fuseblk")];
        assert_eq!(found(false), all.map(owned));
        assert!(found(true).contains(&(42, "zfs".to_owned())));
    }

    #[test]
    fn a_mount_with_any_name_is_read_with_the_others() {
        let text = b"40 21 0:35 / /home/\xff\xfe rw - fuse.sshfs host:\xe4 rw\n41 21 0:36 / /b rw - 9p b rw\n";
        let mounts = Mounts::parse(&String::from_utf8_lossy(text), false);
        assert_eq!(mounts.0.len(), 2);
        assert!(Mounts::of(std::process::id()).is_ok());
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
        assert_eq!(files(std::process::id()).unwrap(), Vec::<String>::new());
        assert!(files(u32::MAX).is_err());
    }
}
