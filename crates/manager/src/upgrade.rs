//! Taking over from a manager that runs: it is asked to leave its VMs as they are, and to end.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use ballast_api::client::Client;
use ballast_api::layout::API_SOCKET;

use crate::config::Config;
use crate::run_dir::try_lock;
use crate::survey::survey;

/// How much longer its answer is waited for than it may take to decide.
const ANSWER: Duration = Duration::from_secs(5);
/// How long the lock of one that is just ending is waited for.
const ENDING: Duration = Duration::from_millis(500);
const STEP: Duration = Duration::from_millis(10);

/// The run folder, for this process alone. With `take_over`, a manager that has it is asked to leave, and
/// given so much time.
///
/// # Errors
/// Another manager has it, and is not to leave or did not in time; or the lock cannot be taken.
pub async fn lock(config: &Config, take_over: Option<Duration>) -> anyhow::Result<File> {
    let run_dir = &config.run_dir;
    let at_once = take_over.map_or(ENDING, |_| Duration::ZERO);
    if let Some(lock) = wait_for_lock(run_dir, at_once).await? {
        return Ok(lock);
    }
    let Some(within) = take_over else {
        bail!("another ballastd runs on {} (--take-over takes over from it)", run_dir.display());
    };
    // What is there must be understood before anybody leaves.
    survey(run_dir).context("the running ballastd goes on")?;
    // One that could not have the socket that it should.
    let own = run_dir.join(API_SOCKET);
    let is_there = std::os::unix::net::UnixStream::connect(&own).is_ok();
    let socket = if is_there { &own } else { &config.socket };
    let client = Client::new(socket).with_timeout(within + ANSWER);
    let until = since_boot_ms() + within.as_millis() as u64;
    let before = match client.leave(until).await {
        Ok(before) => before,
        Err(e) => {
            // It may have been on its way out, or a `vm stop` without a manager that looked whether there is one.
            if let Some(lock) = wait_for_lock(run_dir, ENDING).await? {
                return Ok(lock);
            }
            let who = format!("the ballastd that runs on {}", run_dir.display());
            return Err(e).with_context(|| format!("{who} was not taken over from"));
        }
    };
    tracing::info!("ballastd {} leaves {} VMs to this one", before.pid, before.vms);
    match wait_for_lock(run_dir, within).await? {
        Some(lock) => Ok(lock),
        None => bail!(
            "ballastd (pid {}) is leaving {} and has not left within {} s; nothing was touched; its VMs wait \
             for a manager when it has: start again with --take-over",
            before.pid,
            run_dir.display(),
            within.as_secs_f64()
        ),
    }
}

/// Milliseconds since the host's boot: the same for all processes of a host.
pub fn since_boot_ms() -> u64 {
    ballast_qemu::process::since_boot().as_millis() as u64
}

async fn wait_for_lock(run_dir: &Path, at_most: Duration) -> anyhow::Result<Option<File>> {
    let deadline = tokio::time::Instant::now() + at_most;
    loop {
        // A folder that its last manager removed is made again.
        let lock = match try_lock(run_dir) {
            Err(_) if !run_dir.exists() => {
                std::fs::create_dir_all(run_dir)
                    .with_context(|| format!("folder {}", run_dir.display()))?;
                try_lock(run_dir)?
            }
            other => other?,
        };
        if lock.is_some() || tokio::time::Instant::now() >= deadline {
            return Ok(lock);
        }
        tokio::time::sleep(STEP).await;
    }
}
