//! Lines for the host: `@ballast {json}`, one write each, so that several processes on one console
//! do not mix inside a line.

use std::io::Write;
use std::time::{Duration, Instant};

use crate::json::Object;

/// What every such line begins with.
pub const MARK: &str = "@ballast ";

pub fn emit(object: Object) {
    let line = format!("{MARK}{}\n", object.end());
    let mut out = std::io::stdout().lock();
    // A console that is gone leaves nothing to tell, and nobody to tell it to.
    let _ = out.write_all(line.as_bytes());
    let _ = out.flush();
}

/// The workload ends because something is wrong.
pub fn failed(work: &str, message: &str) {
    emit(Object::new().text("event", "failed").text("work", work).text("message", message));
}

/// An integrity failure: what was read is not what was written.
pub fn corrupt(work: &str, what: &str) -> String {
    emit(
        Object::new()
            .text("event", "progress")
            .text("work", work)
            .text("integrity", "FAILED")
            .text("what", what),
    );
    format!("integrity check failed: {what}")
}

/// Progress of one workload: counts what was checked, and reports every few seconds.
pub struct Progress {
    work: &'static str,
    started: Instant,
    last: Instant,
    every: Duration,
    /// Pages (or page-sized parts of files) whose whole content was found as written.
    pub checks: u64,
    /// Complete rounds of the workload.
    pub passes: u64,
}

impl Progress {
    pub fn new(work: &'static str) -> Progress {
        let now = Instant::now();
        Progress {
            work,
            started: now,
            last: now,
            every: Duration::from_secs(3),
            checks: 0,
            passes: 0,
        }
    }

    /// Reports this often instead of every three seconds.
    #[must_use]
    pub fn every(self, every: Duration) -> Progress {
        Progress { every, ..self }
    }

    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Over, where `limit` is zero for "never".
    pub fn over(&self, limit: Duration) -> bool {
        !limit.is_zero() && self.elapsed() >= limit
    }

    /// Reports if it is time to; `extra` adds the workload's own fields.
    pub fn tick(&mut self, extra: impl FnOnce(Object) -> Object) {
        if self.last.elapsed() >= self.every {
            self.now("progress", extra);
        }
    }

    pub fn now(&mut self, event: &str, extra: impl FnOnce(Object) -> Object) {
        self.last = Instant::now();
        let object = Object::new()
            .text("event", event)
            .text("work", self.work)
            .num("t", self.elapsed().as_secs_f64())
            .int("checks", self.checks)
            .int("passes", self.passes)
            .text("integrity", "ok");
        emit(extra(object));
    }
}
