//! SIGINT, SIGTERM and SIGHUP, as something to wait for.

use anyhow::{Context, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// From `listen` on, they end nothing by themselves.
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl Signals {
    /// Inside a tokio runtime. Err: the kernel refuses a handler.
    pub fn listen() -> Result<Signals> {
        let on = |kind| signal(kind).context("signal handler");
        Ok(Signals {
            interrupt: on(SignalKind::interrupt())?,
            terminate: on(SignalKind::terminate())?,
            hangup: on(SignalKind::hangup())?,
        })
    }

    /// Waits for one of them, and says which.
    pub async fn any(&mut self) -> &'static str {
        tokio::select! {
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.hangup.recv() => "SIGHUP",
        }
    }
}
