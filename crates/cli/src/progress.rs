//! How far a reading of guests' memory is, on standard error.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use ballast_estimate::Progress;

use crate::aside;
use crate::figures::{percent, size};

/// Where somebody watches, and elsewhere.
const WATCHED: Duration = Duration::from_millis(200);
const LOGGED: Duration = Duration::from_secs(10);

/// Tells it now and then; on a terminal in one line, which is gone in the end.
#[derive(Debug)]
pub struct Teller {
    told: Instant,
    watched: bool,
    shown: bool,
}

impl Teller {
    pub fn new() -> Teller {
        Teller { told: Instant::now(), watched: std::io::stderr().is_terminal(), shown: false }
    }

    pub fn tell(&mut self, progress: Progress) {
        let every = if self.watched { WATCHED } else { LOGGED };
        if self.told.elapsed() < every {
            return;
        }
        self.told = Instant::now();
        let Progress { total, seen, read } = progress;
        let line = format!(
            "{} of {} looked at ({}), {} read",
            size(seen.0),
            size(total.0),
            percent(seen.0, total.0),
            size(read.0)
        );
        if self.watched {
            // Back to the begin of the line, and what stood behind it cleared.
            aside::part(format_args!("\r{line}\u{1b}[K"));
            self.shown = true;
        } else {
            aside::line(format_args!("ballast: {line}"));
        }
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        if self.shown {
            aside::part("\r\u{1b}[K");
        }
    }
}
