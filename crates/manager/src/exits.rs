//! When a VMM ends, and what keeps it from it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use ballast_pager::service::PagedVm;
use ballast_qemu::{Exit, ProcessHandle, process};
use ballast_uffd::UffdError;
use rustix::process::Signal;

use crate::manager::Manager;
use crate::pace::slot_after;
use crate::sync::lock;
use crate::vm::Vm;

/// How long a QEMU that has said that it shuts down may take until it gets a signal. Until the next it is twice as long, up
/// to `LONGEST_PATIENCE`.
const LAST_MOMENTS: Duration = Duration::from_secs(1);
const LONGEST_PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks whether a VMM is dead and has not ended.
const DEAD: Duration = Duration::from_secs(5);

/// Whether a QEMU that shuts down for this reason, in QMP's words, does so for its guest's reboot.
pub fn is_reboot(reason: &str) -> bool {
    // The last: `system_reset`, by a monitor of somebody else's.
    ["guest-reset", "guest-panic", "host-qmp-system-reset"].contains(&reason)
}

/// Returns when a VM's VMM has ended.
pub async fn exited(manager: &Manager, vm: &Arc<Vm>) -> Exit {
    let pid = vm.process.pid();
    let told = Mutex::default();
    // At the moments at which other loops wake.
    let pause = || {
        let now = manager.started.elapsed();
        slot_after(now, DEAD, vm.id.0).saturating_sub(now)
    };
    tokio::select! {
        exit = by_itself(vm) => exit,
        exit = once_let_go(&vm.process, pause, || process::is_dead(pid), || let_go(vm, &told)) => exit,
    }
}

/// One of `vm run` that says that it shuts down does not stay; but QEMU 7.2 may wait for
/// good in its last moments, with its disks closed (`monitor_cleanup`), for a request that came just before. SIGTERM makes it
/// look again, and costs one that is still at work nothing: it ends already.
async fn by_itself(vm: &Vm) -> Exit {
    tokio::select! {
        exit = vm.process.exited() => return exit,
        () = vm.shuts_down.notified(), if vm.spec.is_some() => {}
    }
    let mut patience = LAST_MOMENTS;
    loop {
        if let Ok(exit) = tokio::time::timeout(patience, vm.process.exited()).await {
            return exit;
        }
        // One that stands still for pages that cannot be read is still at work.
        if !vm.is_frozen() {
            if patience == LAST_MOMENTS {
                tracing::info!(vm = vm.name, "shuts down, and has not ended: SIGTERM");
            }
            terminate(vm);
        }
        patience = (patience * 2).min(LONGEST_PATIENCE);
    }
}

/// A VMM that was killed ends when the kernel's own threads are done with its memory: KVM's for asynchronous faults, and
/// vhost's. SIGKILL does not end those, and they may wait for a page that cannot be read, or for memory that
/// the VM is not to have. All of its own threads are gone then: nobody misses what they get instead.
async fn once_let_go<L: Future<Output = bool>>(
    process: &ProcessHandle,
    pause: impl Fn() -> Duration,
    is_dead: impl Fn() -> bool,
    let_go: impl Fn() -> L,
) -> Exit {
    let mut dead = 0;
    loop {
        if let Ok(exit) = tokio::time::timeout(pause(), process.exited()).await {
            return exit;
        }
        dead = if is_dead() { dead + 1 } else { 0 };
        if dead >= 2 && let_go().await {
            return process.exited().await;
        }
    }
}

/// Answers whether the VMM keeps nothing of its RAM waiting any more. `told`: what was wrong the last time.
async fn let_go(vm: &Vm, told: &Mutex<String>) -> bool {
    // Who waits for locks of its VMM looks at no VM meanwhile.
    let Some(letting_go) = vm.paged().as_ref().map(PagedVm::letting_go) else { return true };
    match tokio::task::spawn_blocking(letting_go).await {
        Ok(Ok(())) => {
            tracing::warn!(
                vm = vm.name,
                "is dead, and the kernel waits for pages of it: they are zeros now"
            );
            true
        }
        // There is no more to be done.
        Ok(Err(UffdError::Gone)) => true,
        Ok(Err(e)) => {
            let why = e.to_string();
            if std::mem::replace(&mut *lock(told), why.clone()) != why {
                tracing::warn!(vm = vm.name, "is dead, and has not ended: {why}");
            }
            false
        }
        Err(e) => {
            tracing::error!(vm = vm.name, "letting it go: {e}");
            true
        }
    }
}

/// Asks a VMM to end: QEMU writes out what it has of disks then; its guest is not asked.
pub fn terminate(vm: &Vm) {
    if let Err(e) = vm.process.signal(Signal::TERM) {
        tracing::warn!(vm = vm.name, "SIGTERM: {e}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    use ballast_api::VmSpec;
    use ballast_units::Pages;

    use crate::vm::{Asked, VmParams};

    /// A stand-in for QEMU that waits for good in its last moments.
    fn hanging(spec: Option<VmSpec>) -> (std::process::Child, Arc<Vm>) {
        let script = "trap 'exit 7' TERM; echo; while :; do sleep 0.1; done";
        let mut child = std::process::Command::new("sh")
            .args(["-c", script])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        // Its trap is set.
        let mut line = [0];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut line).unwrap();
        let size = Pages(4);
        let params = VmParams::resolve(&[], "a", size.into(), Asked::default()).unwrap();
        let mut vm = Vm::of_tests("a", std::env::temp_dir(), size, params);
        let of = Arc::get_mut(&mut vm).unwrap();
        (of.process, of.spec) = (ProcessHandle::open(child.id()).unwrap(), spec);
        (child, vm)
    }

    #[tokio::test]
    async fn one_that_shuts_down_and_does_not_end_gets_a_signal_and_no_other_does() {
        let dir = tempfile::tempdir().unwrap();
        let manager = crate::manager::tests::manager(dir.path());
        let (_child, vm) = hanging(Some(VmSpec::default()));
        vm.shuts_down.notify_one();
        assert_eq!(exited(&manager, &vm).await, Exit::Code(7));
        // Another's may stay: what says so is not its end.
        let (mut child, vm) = hanging(None);
        vm.shuts_down.notify_one();
        let waited = tokio::time::timeout(LAST_MOMENTS * 3, exited(&manager, &vm)).await;
        child.kill().unwrap();
        assert!(waited.is_err());
        assert_eq!(exited(&manager, &vm).await, Exit::Signal(9));
    }

    /// What `is_dead` says, look by look, and what letting go does, try by try: how often that was tried, look by look.
    async fn let_go_of(dead: &[bool], done: &[bool]) -> Vec<usize> {
        let (child, vm) = hanging(None);
        let child = RefCell::new(child);
        let (looks, tries) = (Cell::new(0), Cell::new(0));
        let seen = RefCell::new(Vec::new());
        let is_dead = || {
            if looks.get() < dead.len() {
                seen.borrow_mut().push(tries.get());
            }
            looks.set(looks.get() + 1);
            // Its end comes after all that is to be seen.
            if looks.get() >= dead.len() {
                child.borrow_mut().kill().unwrap();
            }
            dead.get(looks.get() - 1).copied().unwrap_or_default()
        };
        let let_go = || {
            tries.set(tries.get() + 1);
            let is_done = done[tries.get() - 1];
            if is_done {
                child.borrow_mut().kill().unwrap();
            }
            std::future::ready(is_done)
        };
        let exit = once_let_go(&vm.process, || Duration::from_millis(10), is_dead, let_go).await;
        assert_eq!(exit, Exit::Signal(9));
        seen.into_inner()
    }

    #[tokio::test]
    async fn one_that_is_dead_at_two_looks_and_has_not_ended_is_let_go_until_that_is_done() {
        assert_eq!(let_go_of(&[false, true, false], &[]).await, [0, 0, 0]);
        // Dead at the third and fourth; the first try fails.
        let dead = [true, false, true, true, true, true];
        assert_eq!(let_go_of(&dead, &[false, true]).await, [0, 0, 0, 0, 1]);
    }

    #[test]
    fn a_reset_by_a_monitor_is_a_reboot_and_its_quit_is_none() {
        assert!(["guest-reset", "guest-panic", "host-qmp-system-reset"].into_iter().all(is_reboot));
        let ends = ["guest-shutdown", "host-qmp-quit", "host-signal", "host-error", ""];
        assert!(!ends.into_iter().any(is_reboot));
    }
}
