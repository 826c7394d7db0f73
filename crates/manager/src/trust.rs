//! Whether nobody but root and the manager's user can put anything into a folder. What is found in there is believed:
//! a record names a process, a swap file has a guest's pages.

use std::fs::{File, Metadata, OpenOptions};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use anyhow::{Context as _, bail};

const GROUP_WRITES: u32 = 0o020;
const OTHERS_WRITE: u32 = 0o002;
const STICKY: u32 = 0o1000;

/// A folder, open, that belongs to root or to the manager's user, that only its owner writes to, and that nobody else
/// can put another in the place of. With `by_group` its group may write to a folder of root's, which is how a manager
/// that is not root may be let in.
///
/// # Errors
/// One line: what is wrong with which folder.
pub fn trusted(path: &Path, by_group: bool) -> anyhow::Result<File> {
    let me = rustix::process::geteuid().as_raw();
    let real = path.canonicalize().with_context(|| format!("folder {}", path.display()))?;
    check_way(path, me)?;
    check_way(&real, me)?;
    let flags = libc::O_NOFOLLOW | libc::O_DIRECTORY;
    let folder = OpenOptions::new().read(true).custom_flags(flags).open(&real);
    let folder = folder.with_context(|| format!("folder {}", path.display()))?;
    let meta = folder.metadata().with_context(|| format!("folder {}", path.display()))?;
    check_owner(path, &meta, me)?;
    let group = if by_group && me != 0 && meta.uid() == 0 { 0 } else { GROUP_WRITES };
    if meta.mode() & (group | OTHERS_WRITE) != 0 {
        bail!(
            "folder {}: others than its owner may write to it (mode {:o}): what is in it cannot be trusted",
            path.display(),
            meta.mode() & 0o7777
        );
    }
    Ok(folder)
}

/// Whoever may rename what is on the way to a folder can put another in its place. A link is the word of its owner, and
/// root's group that of root.
fn check_way(path: &Path, me: u32) -> anyhow::Result<()> {
    for part in path.ancestors() {
        let meta = part.symlink_metadata().with_context(|| part.display().to_string())?;
        check_owner(part, &meta, me)?;
        if part == path || !meta.is_dir() || meta.mode() & STICKY != 0 {
            continue;
        }
        if meta.mode() & OTHERS_WRITE != 0 {
            bail!("folder {}: {} is everybody's to change", path.display(), part.display());
        }
        if meta.mode() & GROUP_WRITES != 0 && meta.gid() != 0 {
            bail!(
                "folder {}: {} is group {}'s to change (chmod g-w, or +t)",
                path.display(),
                part.display(),
                meta.gid()
            );
        }
    }
    Ok(())
}

fn check_owner(path: &Path, meta: &Metadata, me: u32) -> anyhow::Result<()> {
    if meta.uid() != 0 && meta.uid() != me {
        bail!(
            "{}: it belongs to user {}, who could change what is read there; it must belong to root or to user {me}",
            path.display(),
            meta.uid()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[track_caller]
    fn refused(path: &Path, part: &str) {
        let error = format!("{:#}", trusted(path, true).unwrap_err());
        assert!(error.contains(part) && !error.contains('\n'), "{part}: {error}");
    }

    #[test]
    fn a_folder_that_others_write_to_is_refused_also_on_the_way() {
        let dir = tempfile::tempdir().unwrap();
        let [way, folder] = ["way", "way/folder"].map(|name| dir.path().join(name));
        std::fs::create_dir_all(&folder).unwrap();
        set_mode(&way, 0o755);
        for (mode, is_good) in
            [(0o700, true), (0o755, true), (0o770, false), (0o702, false), (0o1777, false)]
        {
            set_mode(&folder, mode);
            assert_eq!(trusted(&folder, false).is_ok(), is_good, "{mode:o}");
        }
        refused(&folder, "mode 1777");
        if rustix::process::geteuid().is_root() {
            // A group may write to a folder of root's for a manager that is not root, and for no other.
            set_mode(&folder, 0o770);
            refused(&folder, "mode 770");
        }
        set_mode(&folder, 0o700);
        set_mode(&way, 0o777);
        refused(&folder, "everybody's");
        // Nobody but its owner takes a folder out of one like /tmp.
        set_mode(&way, 0o1777);
        trusted(&folder, false).unwrap();
        set_mode(&way, 0o775);
        if rustix::process::geteuid().is_root() {
            // Root's group is root.
            trusted(&folder, false).unwrap();
            std::os::unix::fs::chown(&way, None, Some(65534)).unwrap();
            refused(&folder, "way is group 65534's to change");
            set_mode(&way, 0o2775);
            refused(&folder, "way is group 65534's to change");
        } else {
            refused(&folder, "'s to change");
        }
        set_mode(&way, 0o1775);
        trusted(&folder, false).unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        refused(&file, "Not a directory");
        refused(&dir.path().join("none"), "No such file");
    }

    #[test]
    fn a_folder_of_another_user_is_refused_and_so_is_his_link() {
        if !rustix::process::geteuid().is_root() {
            assert!(std::env::var_os("BALLAST_REQUIRE_PRIVILEGED").is_none_or(|v| v != "1"));
            eprintln!("SKIPPED: only root gives files away");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let [theirs, inside, good, link] =
            ["theirs", "theirs/inside", "good", "link"].map(|name| dir.path().join(name));
        std::fs::create_dir_all(&inside).unwrap();
        std::fs::create_dir(&good).unwrap();
        set_mode(&good, 0o700);
        symlink(&good, &link).unwrap();
        trusted(&link, false).unwrap();
        std::os::unix::fs::lchown(&link, Some(65534), None).unwrap();
        refused(&link, "link: it belongs to user 65534");
        std::os::unix::fs::chown(&theirs, Some(65534), None).unwrap();
        refused(&theirs, "belongs to user 65534");
        refused(&inside, "theirs: it belongs to user 65534");
    }
}
