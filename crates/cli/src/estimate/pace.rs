//! How fast is read, and what is told meanwhile.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use ballast_units::{Bytes, Pages};

use crate::figures::{percent, size};

/// Where somebody watches, and elsewhere.
const WATCHED: Duration = Duration::from_millis(200);
const LOGGED: Duration = Duration::from_secs(10);

/// Keeps reading within a rate, and tells on standard error how far it is.
#[derive(Debug)]
pub struct Pace {
    /// Bytes per second.
    limit: Option<f64>,
    /// Guest memory to look at, and looked at so far, absent pages included.
    total: Bytes,
    seen: Bytes,
    read: Bytes,
    start: Instant,
    told: Instant,
    silent: bool,
    watched: bool,
    shown: bool,
}

impl Pace {
    /// `limit` in MiB per second; `silent` tells nothing.
    pub fn new(limit: Option<u64>, total: Bytes, silent: bool) -> Pace {
        let now = Instant::now();
        Pace {
            limit: limit.map(|mib| Bytes::from_mib(mib).0 as f64),
            total,
            seen: Bytes(0),
            read: Bytes(0),
            start: now,
            told: now,
            silent,
            watched: std::io::stderr().is_terminal(),
            shown: false,
        }
    }

    /// Of `seen` pages that were looked at, `read` were there. Sleeps while that was too fast.
    pub fn step(&mut self, seen: Pages, read: Pages) {
        self.seen += seen.bytes();
        self.read += read.bytes();
        self.tell();
        let ahead = due(self.read, self.limit).saturating_sub(self.start.elapsed());
        if !ahead.is_zero() {
            std::thread::sleep(ahead);
        }
    }

    fn tell(&mut self) {
        let every = if self.watched { WATCHED } else { LOGGED };
        if self.silent || self.told.elapsed() < every {
            return;
        }
        self.told = Instant::now();
        let line = format!(
            "{} of {} looked at ({}), {} read",
            size(self.seen.0),
            size(self.total.0),
            percent(self.seen.0, self.total.0),
            size(self.read.0)
        );
        if self.watched {
            // Back to the begin of the line, and what stood behind it cleared.
            eprint!("\r{line}\u{1b}[K");
            self.shown = true;
        } else {
            eprintln!("ballast: {line}");
        }
    }
}

impl Drop for Pace {
    fn drop(&mut self) {
        if self.shown {
            eprint!("\r\u{1b}[K");
        }
    }
}

/// How long reading so much takes at least.
fn due(read: Bytes, limit: Option<f64>) -> Duration {
    limit.map_or(Duration::ZERO, |limit| Duration::from_secs_f64(read.0 as f64 / limit.max(1.0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_of_what_was_read() {
        let limit = Some(Bytes::from_mib(8).0 as f64);
        assert_eq!(due(Bytes::from_mib(16), limit), Duration::from_secs(2));
        assert_eq!(due(Bytes::from_mib(16), None), Duration::ZERO);
        assert_eq!(due(Bytes(0), limit), Duration::ZERO);
    }
}
