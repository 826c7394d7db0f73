//! What the manager asks of the kernel for itself.

use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Asks for it; what is refused is said and done without.
///
/// - Its memory stays in memory: who brings pages back for guests must not wait for the host to bring back
///   its own. Only what it has touched, so that books of large guests take what they hold.
/// - Few arenas of the allocator: with one for every few threads, what ended VMs leave in each was kept (after
///   eight starts and stops 10 MiB were the process's own; 6 with two arenas).
/// - As many descriptors as it may have: a VM takes some ten, and many systems begin with 1,024.
pub fn prepare() {
    if let Err(e) =
        mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT)
    {
        tracing::warn!(
            "its memory is not locked (CAP_IPC_LOCK or a higher RLIMIT_MEMLOCK would do it): \
             under pressure from outside its budget it may wait for the host's swap: {e}"
        );
    }
    // glibc's alone, as the constant is.
    #[cfg(target_env = "gnu")]
    // SAFETY: a call that takes two integers and changes settings of the allocator; it may be made at any time.
    if unsafe { libc::mallopt(libc::M_ARENA_MAX, 2) } == 0 {
        tracing::debug!("the allocator keeps as many arenas as it likes");
    }
    let most = getrlimit(Resource::Nofile).maximum;
    if let Err(e) = setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most }) {
        tracing::warn!("its limit of descriptors stays as it is: {e}");
    }
}
