//! The agent of one guest, asked every few seconds for the guest's memory pressure. It may be missing,
//! slow or hostile: every question has a deadline, and nothing waits for this task.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_api::RunState;
use ballast_qemu::{AgentError, GuestAgent};
use tokio::time::MissedTickBehavior;

use crate::inputs::AgentReport;
use crate::sync::lock;
use crate::vm::Vm;

/// The kernel's averages are over ten seconds.
const TURN: Duration = Duration::from_secs(5);
/// Of one question. A guest that is short of memory is slow.
const DEADLINE: Duration = Duration::from_secs(4);

/// Ends with the VM.
pub async fn run(vm: Arc<Vm>, socket: std::path::PathBuf) {
    // QEMU has made it as its umask says; the folder is closed to others already.
    let private = std::fs::Permissions::from_mode(0o600);
    if let Err(e) = std::fs::set_permissions(&socket, private) {
        tracing::warn!(vm = vm.name, "{}: {e}", socket.display());
    }
    let mut agent = None;
    let mut turn = tokio::time::interval(TURN);
    turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = vm.process.exited() => return,
            _ = turn.tick() => {}
        }
        // A guest that stands still answers nothing, and what it said last is its last word.
        if vm.shown_state() == RunState::Running {
            step(&vm, &socket, &mut agent).await;
        }
    }
}

async fn step(vm: &Vm, socket: &Path, agent: &mut Option<GuestAgent>) {
    let result = ask(socket, agent).await;
    if result.as_ref().is_err_and(|e| !e.is_refusal()) {
        *agent = None;
    }
    let mut report = lock(&vm.agent);
    let report = report.get_or_insert_default();
    match result {
        Ok(pressure) => {
            if report.pressure.is_none() {
                tracing::info!(vm = vm.name, "its guest reports memory pressure");
            }
            *report = AgentReport { pressure: Some((Instant::now(), pressure)), trouble: None };
        }
        Err(e) => {
            let trouble = e.to_string();
            if report.trouble.as_ref() != Some(&trouble) {
                tracing::debug!(vm = vm.name, "{trouble}");
            }
            report.trouble = Some(trouble);
        }
    }
}

async fn ask(
    socket: &Path,
    agent: &mut Option<GuestAgent>,
) -> Result<ballast_qemu::MemoryPressure, AgentError> {
    let agent = match agent {
        Some(agent) => agent,
        None => agent.insert(GuestAgent::connect(socket, DEADLINE).await?),
    };
    agent.memory_pressure(DEADLINE).await
}
