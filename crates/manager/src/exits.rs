//! When a VMM ends, and what keeps it from it.

use std::sync::Arc;
use std::time::Duration;

use ballast_qemu::{Exit, process};
use rustix::process::Signal;

use crate::vm::Vm;

/// How long a QEMU that has said that it shuts down may take until it gets a signal. Until the next it is twice as long, up
/// to `LONGEST_PATIENCE`.
const LAST_MOMENTS: Duration = Duration::from_secs(1);
const LONGEST_PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks whether a VMM is dead and has not ended.
const DEAD: Duration = Duration::from_secs(5);

/// Returns when a VM's VMM has ended.
pub async fn exited(vm: &Arc<Vm>) -> Exit {
    tokio::select! {
        exit = by_itself(vm) => exit,
        exit = once_let_go(vm) => exit,
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
/// before Linux 6.4 vhost's. SIGKILL does not end those, and they may wait for a page that cannot be read, or for memory that
/// the VM is not to have. All of its threads are gone then: nobody misses what they get instead.
async fn once_let_go(vm: &Arc<Vm>) -> Exit {
    let mut dead = 0;
    while dead < 2 {
        if let Ok(exit) = tokio::time::timeout(DEAD, vm.process.exited()).await {
            return exit;
        }
        dead = if process::is_dead(vm.process.pid()) { dead + 1 } else { 0 };
    }
    let owner = vm.clone();
    let let_go = tokio::task::spawn_blocking(move || {
        owner.paged().as_ref().map(|paged| paged.memory().backend().let_go())
    });
    match let_go.await {
        Ok(Some(Ok(()))) => {
            tracing::warn!(
                vm = vm.name,
                "is dead, and the kernel waits for pages of it: they are zeros now"
            );
        }
        Ok(Some(Err(e))) => tracing::warn!(vm = vm.name, "is dead, and has not ended: {e}"),
        Ok(None) => {}
        Err(e) => tracing::error!(vm = vm.name, "letting it go: {e}"),
    }
    vm.process.exited().await
}

/// Asks a VMM to end.
pub fn terminate(vm: &Vm) {
    if let Err(e) = vm.process.signal(Signal::TERM) {
        tracing::warn!(vm = vm.name, "SIGTERM: {e}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_api::VmSpec;
    use ballast_qemu::ProcessHandle;
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
        let (_child, vm) = hanging(Some(VmSpec::default()));
        vm.shuts_down.notify_one();
        assert_eq!(exited(&vm).await, Exit::Code(7));
        // Another's may stay: what says so is not its end.
        let (mut child, vm) = hanging(None);
        vm.shuts_down.notify_one();
        let waited = tokio::time::timeout(LAST_MOMENTS * 3, exited(&vm)).await;
        child.kill().unwrap();
        assert!(waited.is_err());
        assert_eq!(exited(&vm).await, Exit::Signal(9));
    }

    #[tokio::test]
    async fn one_that_is_killed_has_ended_though_it_was_looked_at_first() {
        let (mut child, vm) = hanging(None);
        let watched = vm.clone();
        let watch = tokio::spawn(async move { once_let_go(&watched).await });
        tokio::time::sleep(DEAD + Duration::from_millis(100)).await;
        assert!(!watch.is_finished());
        child.kill().unwrap();
        assert_eq!(watch.await.unwrap(), Exit::Signal(9));
    }
}
