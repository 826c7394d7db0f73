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
            match vm.management.mode {
                Mode::Paged => return Ok(()),
                _ => bail!("it is not paged: {}", vm.management.reason.as_deref().unwrap_or("?")),
            }
        }
        ensure!(begin.elapsed() < Duration::from_secs(30), "the manager has not taken it in");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
