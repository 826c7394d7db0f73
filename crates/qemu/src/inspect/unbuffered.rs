//! Files whose reads may land in guest memory by themselves, though they are open without O_DIRECT: their file systems read
//! past the page cache when they see fit. The mount tells, without asking a server that may hang.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

use super::scan::if_there;
use crate::bounded;

/// There since OpenZFS 2.3, which has `direct=always`; "0" where that is off.
const ZFS_DIRECT: &str = "/sys/module/zfs/parameters/zfs_dio_enabled";

/// By their numbers, those mounts that may read so, and their types.
pub(super) struct Mounts(HashMap<u64, String>);

impl Mounts {
    /// Those that the process sees, and those that its files may have been opened in by others: in the host's namespace, or
    /// in this process's.
    pub fn of(pid: u32) -> io::Result<Mounts> {
        let direct_zfs = match fs::read_to_string(Path::new(ZFS_DIRECT)) {
            Ok(setting) => setting.trim() != "0",
            Err(e) if e.kind() == io::ErrorKind::NotFound => false,
            Err(e) => return Err(e),
        };
        let (mut all, mut seen) = (HashMap::new(), Vec::new());
        for process in ["self".to_owned(), "1".to_owned(), pid.to_string()] {
            // Most of a host's processes see the same.
            let view = View::of(&process)?;
            if view.is_some() && seen.contains(&view) {
                continue;
            }
            let read = bounded::mounts(&process, |line| all.extend(of_line(line, direct_zfs)));
            match read {
                // Its own cannot be seen from everywhere, a container for one.
                Err(e) if process == "1" && e.kind() != io::ErrorKind::InvalidData => {
                    if_there(Err::<(), _>(e))?;
                }
                read => {
                    read?;
                    seen.push(view);
                }
            }
        }
        Ok(Mounts(all))
    }

    /// The type of the mount of that number, if it is one of those.
    pub fn kind(&self, mount: u64) -> Option<&str> {
        self.0.get(&mount).map(String::as_str)
    }

    #[cfg(test)]
    pub fn one(mount: u64, kind: &str) -> Mounts {
        Mounts(HashMap::from([(mount, kind.to_owned())]))
    }
}

/// What a process sees of the host's mounts: its namespace, and where its root is there.
#[derive(PartialEq, Eq)]
struct View {
    namespace: PathBuf,
    /// Its mount, and its inode.
    root: (u64, u64),
}

impl View {
    /// None: that is not ours to see, or the kernel (before 5.8) does not tell.
    fn of(process: &str) -> io::Result<Option<View>> {
        let Some(namespace) = if_there(fs::read_link(format!("/proc/{process}/ns/mnt")))? else {
            return Ok(None);
        };
        let (root, wanted) =
            (format!("/proc/{process}/root"), StatxFlags::MNT_ID | StatxFlags::INO);
        // Without DONT_SYNC, a root on a dead network server would stop the look.
        let told =
            if_there(statx(CWD, root, AtFlags::STATX_DONT_SYNC, wanted).map_err(io::Error::from))?;
        let told = told.filter(|root| root.stx_mask & wanted.bits() == wanted.bits());
        Ok(told.map(|root| View { namespace, root: (root.stx_mnt_id, root.stx_ino) }))
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
    fn what_a_process_sees_is_read_once_for_all_who_see_the_same() {
        let own = std::process::id();
        let (this, same) = (View::of("self").unwrap(), View::of(&own.to_string()).unwrap());
        assert!(this.is_some() && this == same);
        assert!(View::of(&u32::MAX.to_string()).unwrap().is_none());
        assert!(Mounts::of(own).is_ok() && Mounts::of(u32::MAX).is_err());
        assert_eq!(Mounts::one(7, "9p").kind(7), Some("9p"));
    }
}
