//! How fast is read, and how far it is.

use std::time::{Duration, Instant};

use ballast_units::{Bytes, Pages};

/// How far the reading is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Guest memory to look at, absent pages included.
    pub total: Bytes,
    /// Of that, what was looked at so far.
    pub seen: Bytes,
    /// Of that, what was there and was read.
    pub read: Bytes,
}

/// Keeps reading within a rate.
#[derive(Debug)]
pub struct Pace {
    /// Bytes per second.
    limit: Option<f64>,
    progress: Progress,
    start: Instant,
}

impl Pace {
    /// `limit` in MiB per second; `total` is the guest memory to look at.
    pub fn new(limit: Option<u64>, total: Bytes) -> Pace {
        Pace {
            limit: limit.map(|mib| Bytes::from_mib(mib).0 as f64),
            progress: Progress { total, seen: Bytes(0), read: Bytes(0) },
            start: Instant::now(),
        }
    }

    /// Of `seen` pages that were looked at, `read` were there. Sleeps while that was too fast.
    pub(crate) fn step(&mut self, seen: Pages, read: Pages) -> Progress {
        self.progress.seen += seen.bytes();
        self.progress.read += read.bytes();
        let ahead = due(self.progress.read, self.limit).saturating_sub(self.start.elapsed());
        if !ahead.is_zero() {
            std::thread::sleep(ahead);
        }
        self.progress
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
