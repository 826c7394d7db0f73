//! The live view: `ballast top` in the foreground of the terminal.

use std::time::Duration;

use anyhow::{Context, Result};

use super::End;
use crate::manager::Manager;
use crate::tools;

/// Runs until it quits, the time is over, or the manager ends.
pub async fn top(manager: &mut Manager, limit: Option<Duration>) -> Result<End> {
    let _terminal = Terminal::save();
    let program = tools::sibling("ballast")?;
    let mut child = tokio::process::Command::new(&program)
        .args(["top", "--socket"])
        .arg(manager.socket())
        .kill_on_drop(true)
        .spawn()
        .with_context(|| format!("starting {}", program.display()))?;
    let over = async {
        match limit {
            Some(limit) => tokio::time::sleep(limit).await,
            None => std::future::pending().await,
        }
    };
    let end = tokio::select! {
        status = child.wait() => {
            let status = status.context("ballast top")?;
            if !manager.alive() {
                End::ManagerGone
            } else if status.success() {
                End::Quit
            } else {
                anyhow::bail!("ballast top ended with {status}");
            }
        }
        () = over => End::Time,
    };
    if let Some(pid) = child.id() {
        // SAFETY: kill touches no memory; the child was not collected yet, so the number is its own.
        unsafe { libc::kill(pid as i32, libc::SIGTERM) };
        // It restores the terminal itself if it can; kill_on_drop takes what does not end.
        let _ = tokio::time::timeout(Duration::from_secs(2), child.wait()).await;
    }
    Ok(end)
}

/// The terminal's settings, put back when dropped, in case the view was ended by force.
struct Terminal(Option<libc::termios>);

impl Terminal {
    fn save() -> Terminal {
        // SAFETY: termios is plain data for which zero is valid; tcgetattr fills it or fails.
        let mut settings: libc::termios = unsafe { std::mem::zeroed() };
        // SAFETY: a valid place for the result.
        let rc = unsafe { libc::tcgetattr(0, &mut settings) };
        Terminal((rc == 0).then_some(settings))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if let Some(settings) = &self.0 {
            // SAFETY: settings that tcgetattr gave for the same descriptor.
            unsafe { libc::tcsetattr(0, libc::TCSANOW, settings) };
        }
        // Leave the alternate screen, show the cursor: without effect where neither was changed.
        print!("\x1b[?1049l\x1b[?25h");
        let _ = std::io::Write::flush(&mut std::io::stdout());
    }
}
