//! Whose a swap location is. Managers of several run folders would take one another's swap files for those of VMs
//! that are gone: each location has one manager at a time, and says of which run folder's VMs there may be files.
//!
//! The lock is on the folder itself, and goes with the process; what stays is the folder's attribute [`OWNERS`], a
//! run folder a line. Where a file system knows no locks or no attributes, there is no protection. Whoever can open a folder can
//! lock it: one that has nothing but swap files in it is closed to others.

use std::ffi::OsStr;
use std::fs::{File, Permissions};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::fs::{FlockOperation, XattrFlags, fgetxattr, flock, fsetxattr};
use rustix::io::Errno;

use crate::former_boots;
use crate::trust::trusted;

const OWNERS: &str = "user.ballast.run_dirs";
/// What a file system gives an attribute at most.
const LONGEST: usize = 65_536;
/// How long one that is just ending is waited for.
const ENDING: Duration = Duration::from_millis(500);

/// A location that is this manager's until it is dropped.
#[derive(Debug)]
pub struct Claim {
    /// Open, and locked.
    folder: File,
    /// Whether VMs of other run folders may have files there.
    pub has_others: bool,
}

impl Claim {
    /// Takes a location for the manager of `run_dir`, without what former boots of the host have left there. May take as long as its file system does.
    ///
    /// # Errors
    /// One line: it is not there, others may write to it, or another manager has it.
    pub fn new(location: &Path, run_dir: &Path) -> anyhow::Result<Claim> {
        let folder = trusted(location, true)?;
        let begun = Instant::now();
        let is_locked = loop {
            match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break true,
                Err(Errno::WOULDBLOCK) if begun.elapsed() < ENDING => {
                    std::thread::sleep(ENDING / 50);
                }
                Err(Errno::WOULDBLOCK) => {
                    let owners = owners(&folder).unwrap_or_default();
                    let who = owners.first().map_or_else(String::new, |of| format!(", of {of},"));
                    bail!(
                        "another ballastd{who} has its swap files here, or somebody else keeps the folder locked, \
                        whom lslocks tells (who may read it can: chmod 700): each needs a folder of its own"
                    );
                }
                Err(e) => {
                    tracing::warn!("{}: it cannot be locked: {e}", location.display());
                    break false;
                }
            }
        };
        close(location, &folder);
        // Else it may be another host's, too.
        if is_locked {
            former_boots::sweep(location, run_dir);
        }
        let own = run_dir.as_os_str();
        let mut owners = owners(&folder)
            .with_context(|| format!("{}: whose swap files are there", location.display()))?;
        owners.retain(|of| OsStr::new(of) != own);
        if !owners.is_empty() && !has_swap_files(location)? {
            owners.clear();
        }
        let has_others = !owners.is_empty();
        if has_others {
            tracing::warn!(
                "{}: swap files there may be those of VMs of {}: none is replaced",
                location.display(),
                owners.join(", ")
            );
        }
        owners.insert(0, own.to_string_lossy().into_owned());
        let text = owners.join("\n");
        match fsetxattr(&folder, OWNERS, text.as_bytes(), XattrFlags::empty()) {
            Ok(()) => {}
            Err(e @ Errno::NOTSUP) => {
                tracing::debug!("{}: whose it is cannot be noted: {e}", location.display());
            }
            Err(e) => {
                tracing::warn!("{}: whose it is cannot be noted: {e}", location.display());
            }
        }
        Ok(Claim { folder, has_others })
    }

    /// Whether what is there now is what was taken.
    pub fn is_of(&self, location: &Path) -> bool {
        let id = |meta: std::fs::Metadata| (meta.dev(), meta.ino());
        let taken = self.folder.metadata().ok().map(id);
        taken.is_some() && taken == std::fs::metadata(location).ok().map(id)
    }
}

/// Keeps others from locking it.
fn close(location: &Path, folder: &File) {
    let closed = || {
        let meta = folder.metadata()?;
        let mode = meta.mode() & 0o7777;
        // A folder of root's may be ours by its group.
        let is_own = meta.uid() == rustix::process::geteuid().as_raw();
        let others_read = mode & if is_own { 0o044 } else { 0o004 };
        if others_read == 0 {
            return Ok(true);
        }
        for entry in std::fs::read_dir(location)? {
            let name = entry?.file_name();
            if !is_swap_file(&name) && name != "lost+found" {
                return Ok(false);
            }
        }
        folder.set_permissions(Permissions::from_mode(mode & !others_read))?;
        tracing::info!("{}: nobody but its owner can read it now", location.display());
        Ok(true)
    };
    let told = match closed() {
        Ok(true) => return,
        Ok(false) => "there is more than swap files in it".to_owned(),
        Err(e) => std::io::Error::to_string(&e),
    };
    tracing::warn!(
        "{}: others can read it, and keep every ballastd from it by a lock ({told}): take that from them (chmod)",
        location.display()
    );
}

fn is_swap_file(name: &OsStr) -> bool {
    name.as_bytes().ends_with(b".swap")
}

impl Drop for Claim {
    /// Closing it is not enough: a QEMU whose program hangs before it is there has the folder open, too.
    fn drop(&mut self) {
        let _ = flock(&self.folder, FlockOperation::Unlock);
    }
}

/// The run folders that the folder names; none where nothing is noted, or can be.
fn owners(folder: &File) -> Result<Vec<String>, Errno> {
    let mut text = vec![0; LONGEST];
    let len = match fgetxattr(folder, OWNERS, &mut text[..]) {
        Ok(len) => len,
        Err(Errno::NODATA | Errno::NOTSUP) => 0,
        Err(e) => return Err(e),
    };
    let text = String::from_utf8_lossy(&text[..len]);
    Ok(text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect())
}

fn has_swap_files(location: &Path) -> anyhow::Result<bool> {
    let named = || format!("folder {}", location.display());
    for entry in std::fs::read_dir(location).with_context(named)? {
        if is_swap_file(&entry.with_context(named)?.file_name()) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_location_has_one_manager_and_keeps_what_others_left() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let [ours, theirs] = ["/run/ours", "/run/theirs"].map(Path::new);
        let first = Claim::new(dir.path(), theirs).unwrap();
        assert!(!first.has_others && first.is_of(dir.path()));
        let error = Claim::new(dir.path(), ours).unwrap_err().to_string();
        assert!(error.contains("another ballastd") && !error.contains('\n'), "{error}");
        if owners(&first.folder).unwrap().is_empty() {
            eprintln!("SKIPPED: whose it was: no attributes in /var/tmp");
            return;
        }
        assert!(error.contains("another ballastd, of /run/theirs,"), "{error}");
        drop(first);
        // It left nothing.
        assert!(!Claim::new(dir.path(), ours).unwrap().has_others);
        // It ended with VMs.
        drop(Claim::new(dir.path(), theirs).unwrap());
        std::fs::write(dir.path().join("v.swap"), "").unwrap();
        assert!(Claim::new(dir.path(), ours).unwrap().has_others);
        assert!(Claim::new(dir.path(), ours).unwrap().has_others, "and again");
        // Of our own it is known.
        std::fs::remove_file(dir.path().join("v.swap")).unwrap();
        assert!(!Claim::new(dir.path(), ours).unwrap().has_others);
        std::fs::write(dir.path().join("v.swap"), "").unwrap();
        assert!(!Claim::new(dir.path(), ours).unwrap().has_others);
        assert!(Claim::new(&dir.path().join("none"), ours).is_err());
    }

    #[test]
    fn a_location_is_given_up_though_a_child_has_it_open() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let claim = Claim::new(dir.path(), Path::new("/run/ours")).unwrap();
        let of_child = claim.folder.try_clone().unwrap();
        assert!(Claim::new(dir.path(), Path::new("/run/theirs")).is_err());
        drop(claim);
        drop(Claim::new(dir.path(), Path::new("/run/theirs")).unwrap());
        drop(of_child);
    }

    /// Any user could keep ballastd from it: a lock takes no more than a descriptor.
    #[test]
    fn a_folder_with_nothing_but_swap_files_is_closed_to_those_who_could_lock_it() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let mode = || std::fs::metadata(dir.path()).unwrap().mode() & 0o7777;
        let claimed_with = |mode: u32| {
            std::fs::set_permissions(dir.path(), Permissions::from_mode(mode)).unwrap();
            drop(Claim::new(dir.path(), Path::new("/run/ours")).unwrap());
        };
        std::fs::create_dir(dir.path().join("lost+found")).unwrap();
        std::fs::write(dir.path().join("v.swap"), "").unwrap();
        claimed_with(0o755);
        assert_eq!(mode(), 0o711);
        claimed_with(0o700);
        assert_eq!(mode(), 0o700);
        // What else is there may be for others to see.
        std::fs::write(dir.path().join("notes"), "").unwrap();
        claimed_with(0o755);
        assert_eq!(mode(), 0o755);
    }
}
