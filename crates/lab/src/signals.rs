//! SIGINT, SIGTERM and SIGHUP, as something to wait for.

use anyhow::{Context, Result, bail};
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

    /// What `work`, which waits for no future, comes to, unless one of them comes first: then it is left to itself, and
    /// ends with the process.
    ///
    /// # Errors
    /// Of the work; one of the signals.
    pub async fn or<T: Send + 'static>(
        &mut self,
        name: &str,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (tell, told) = tokio::sync::oneshot::channel();
        let thread = std::thread::Builder::new().name(name.to_owned());
        thread.spawn(move || drop(tell.send(work()))).context("a thread")?;
        tokio::select! {
            done = told => done.with_context(|| format!("{name}: it has panicked"))?,
            signal = self.any() => bail!("{name}: ended by {signal}"),
        }
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
