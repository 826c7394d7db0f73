//! What the manager asks of the kernel for itself.

use rustix::mm::{MlockAllFlags, mlockall};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities};

/// From how many bytes on a buffer is the kernel's.
#[cfg(target_env = "gnu")]
const LARGE_BUFFER: std::ffi::c_int = 128 << 10;

/// Asks for it; what is refused is said and done without.
///
/// - Its memory stays in memory: who brings pages back for guests must not wait for the host to bring back
///   its own. Only what it has touched, so that books of large guests take what they hold.
/// - Few arenas of the allocator: with one for every few threads, what ended VMs leave in each was kept (after
///   eight starts and stops 10 MiB were the process's own; 6 with two arenas).
/// - Large buffers from the kernel, and back to it: by default glibc takes ever larger ones from its heaps once one was
///   freed, and what is freed there stays, more so where memory is locked (after 360 VMs, six at a time, 19.9 MiB were
///   the process's own; 3.4 with this).
/// - As many descriptors as it may have: a VM takes some ten, and many systems begin with 1,024.
pub fn prepare() {
    if let Err(why) = lock_memory() {
        tracing::warn!(
            "its memory is not locked (CAP_IPC_LOCK or no RLIMIT_MEMLOCK would do it): \
             under pressure from outside its budget it may wait for the host's swap: {why}"
        );
    }
    // glibc's alone, as the constants are.
    #[cfg(target_env = "gnu")]
    for (what, value) in [(libc::M_ARENA_MAX, 2), (libc::M_MMAP_THRESHOLD, LARGE_BUFFER)] {
        // SAFETY: a call that takes two integers and changes settings of the allocator; it may be made at any time.
        if unsafe { libc::mallopt(what, value) } == 0 {
            tracing::debug!("setting {what} of the allocator stays as it is");
        }
    }
    let most = getrlimit(Resource::Nofile).maximum;
    if let Err(e) = setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most }) {
        tracing::warn!("its limit of descriptors stays as it is: {e}");
    }
}

/// Where there is a limit the kernel counts against it the whole length of what is mapped from then on, touched or not: books
/// as long as a guest could not be mapped any more.
fn lock_memory() -> Result<(), String> {
    let sets = capabilities(None).map_err(|e| e.to_string())?;
    let limit = getrlimit(Resource::Memlock).current;
    if let Some(bytes) = limit.filter(|_| !sets.effective.contains(CapabilitySet::IPC_LOCK)) {
        return Err(format!("RLIMIT_MEMLOCK is {bytes}, and would count the size of each VM"));
    }
    let all = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
    mlockall(all).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn under_a_limit_memory_is_not_locked() {
        let limit = getrlimit(Resource::Memlock);
        let most = limit.maximum.map_or(1 << 30, |most| most.min(1 << 30));
        let told = std::thread::spawn(move || {
            // This thread's alone.
            let mut sets = capabilities(None).unwrap();
            sets.effective.remove(CapabilitySet::IPC_LOCK);
            rustix::thread::set_capabilities(None, sets).unwrap();
            setrlimit(Resource::Memlock, Rlimit { current: Some(most), ..limit }).unwrap();
            let told = lock_memory();
            setrlimit(Resource::Memlock, limit).unwrap();
            told
        });
        let why = told.join().unwrap().unwrap_err();
        assert!(why.contains(&format!("RLIMIT_MEMLOCK is {most}")), "{why}");
    }
}
