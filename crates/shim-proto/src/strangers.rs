//! Descriptors that others sent, and that are neither memory nor a userfaultfd.
//!
//! Closing a descriptor may ask the file system that it is of (FUSE_FLUSH), and wait for it beyond any signal; a
//! socket with SO_LINGER waits for its peer. Whoever sends one chooses that file system. So nothing but what can have
//! none behind it is closed here; all else stays open, unlooked at and unused, for as long as this process lives.
//!
//! An end in order is not held up by them: the lock of the run folder is let go of before the process ends. One by
//! SIGKILL may be, until that file system answers or is aborted: the kernel gives up locks only when all
//! descriptors have been closed.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd as _, IntoRawFd as _, OwnedFd};
use std::sync::{Mutex, PoisonError};

/// So many of one user stay open. Of who has sent as many, no descriptor is taken in any more: the kernel throws them
/// away as they come, and none of his VMMs is let in until this process has ended. One message has up to 253, which
/// one more may be bringing.
pub(crate) const MOST_OF_ONE_USER: usize = 256;

/// The same of all users together but our own: who may use many numbers (a range of subordinate ones) is not to take all the
/// descriptors that this process may have.
const MOST_OF_ALL: usize = 4096;

/// How many stay open, by the user who sent them.
static KEPT: Mutex<BTreeMap<u32, usize>> = Mutex::new(BTreeMap::new());

/// How many descriptors stay open in this process because closing them might never end.
#[cfg(test)]
pub(crate) fn kept_open() -> usize {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner).values().sum()
}

/// Whether descriptors of this user are taken in.
pub(crate) fn is_welcome(uid: u32) -> bool {
    let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    has_room(&kept, uid, rustix::process::geteuid().as_raw())
}

fn has_room(kept: &BTreeMap<u32, usize>, uid: u32, own: u32) -> bool {
    let of_others = || kept.iter().filter(|(user, _)| **user != own).map(|(_, n)| n).sum::<usize>();
    kept.get(&uid).is_none_or(|kept| *kept < MOST_OF_ONE_USER)
        && (uid == own || of_others() < MOST_OF_ALL)
}

/// Those that may be closed; of the others, which are left open, the first.
pub(crate) fn sort_out(fds: Vec<OwnedFd>, uid: u32) -> Result<Vec<OwnedFd>, String> {
    let (ours, strange): (Vec<OwnedFd>, Vec<OwnedFd>) =
        fds.into_iter().partition(|fd| is_memory(fd) || is_userfaultfd(fd));
    let Some(first) = strange.first() else { return Ok(ours) };
    let what = name(first).unwrap_or_else(|| "nothing that has a name".to_owned());
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    *kept.entry(uid).or_default() += strange.len();
    for fd in strange {
        let _ = fd.into_raw_fd();
    }
    Err(what)
}

/// A file of a tmpfs or of hugetlbfs, or a memfd: no other has seals, and the kernel answers by itself.
fn is_memory(fd: &OwnedFd) -> bool {
    rustix::fs::fcntl_get_seals(fd).is_ok()
}

/// What has a path is shown with it, and a path begins with a slash: no file is taken for one. As `ballast_uffd::is_link`.
fn is_userfaultfd(fd: &OwnedFd) -> bool {
    link(fd).is_some_and(|link| link == b"anon_inode:[userfaultfd]")
}

/// For people; its sender may have chosen it.
fn name(fd: &OwnedFd) -> Option<String> {
    let link = link(fd)?;
    Some(link.escape_ascii().to_string().chars().take(100).collect())
}

/// The kernel's own word: no file system is asked.
fn link(fd: &OwnedFd) -> Option<Vec<u8>> {
    let link = rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new());
    link.ok().map(std::ffi::CString::into_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_many_user_numbers_does_not_take_all_descriptors() {
        let mut kept = BTreeMap::from([(0, MOST_OF_ALL)]);
        assert!(!has_room(&kept, 0, 0) && has_room(&kept, 1000, 0));
        for uid in 1.. {
            if !has_room(&kept, uid, 0) {
                break;
            }
            kept.insert(uid, MOST_OF_ONE_USER);
        }
        assert_eq!(kept.len(), 1 + MOST_OF_ALL / MOST_OF_ONE_USER);
        // The VMs that are started here come in all the same.
        kept.insert(0, 1);
        assert!(has_room(&kept, 0, 0) && !has_room(&kept, 99, 0));
    }
}
