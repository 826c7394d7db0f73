//! A process that the shim hands to the manager, as a VMM.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use ballast_api::{Mode, RunState};

use crate::manager::Manager;

/// Until the manager pages the process that calls itself `name`.
pub async fn wait(manager: &Manager, name: &str) -> Result<()> {
    let begin = Instant::now();
    loop {
        let vms = manager.client().vms().await?;
        if let Some(vm) = vms.iter().find(|vm| vm.name == name && vm.state == RunState::Running) {
            let reason = vm.management.reason.as_deref().unwrap_or("?");
            match vm.management.mode {
                Mode::Paged => return Ok(()),
                // It has no QMP to say that it is complete: it is looked at when that may be taken for granted.
                _ if reason.starts_with("not inspected yet") => {}
                _ => bail!("it is not paged: {reason}"),
            }
        }
        ensure!(begin.elapsed() < Duration::from_secs(30), "the manager has not taken it in");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
