//! What the kernel must be able to do for a VM to be paged.

use crate::{Features, Uffd};

/// What a userfaultfd of guest RAM must be able to tell and to do. (WP_UNPOPULATED, Linux 6.4, matters for anonymous memory
/// only.)
pub const NEEDED: Features = Features::PAGEFAULT_FLAG_WP
    .union(Features::EVENT_REMOVE)
    .union(Features::MISSING_SHMEM)
    .union(Features::EXACT_ADDRESS)
    .union(Features::WP_HUGETLBFS_SHMEM);

/// Why no VM can be paged on this host, in one line. None: the kernel can all that is needed, and this process may.
pub fn missing() -> Option<String> {
    let kernel = || rustix::system::uname().release().to_string_lossy().into_owned();
    let uffd = match Uffd::open() {
        Ok(uffd) => uffd,
        Err(e) => return Some(format!("userfaultfd: {e} (Linux {})", kernel())),
    };
    match uffd.handshake(NEEDED) {
        Ok(has) if has.contains(NEEDED) => None,
        Ok(has) => Some(format!("Linux {} lacks {:?} of userfaultfd", kernel(), NEEDED - has)),
        Err(e) => Some(format!("{e} (Linux {}; 6.1 is needed at least)", kernel())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_host_lacks_is_told_in_one_line() {
        let missing = missing();
        assert_eq!(missing.is_none(), Uffd::open().is_ok(), "{missing:?}");
        assert!(missing.is_none_or(|why| !why.contains('\n') && why.contains("Linux ")));
    }
}
