//! How much a VMM may say over QMP. An honest one tells some tens of lines a second; one that talks without end would keep
//! a processor busy.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{MAX_LINE, WINDOW};

/// Lines in a second. A balloon that moved for an hour in which nobody listened has told 3,600.
pub(super) const MOST_LINES: usize = 4096;
/// Bytes in a second: the longest answers to all that it is asked at a time.
const MOST_BYTES: usize = WINDOW * MAX_LINE;
const SECOND: Duration = Duration::from_secs(1);

/// What has come in the second that began at `since`.
pub(super) struct Flood {
    since: Instant,
    lines: usize,
    bytes: usize,
}

impl Flood {
    pub fn new(now: Instant) -> Flood {
        Flood { since: now, lines: 0, bytes: 0 }
    }

    /// Takes note of what came.
    ///
    /// # Errors
    /// In words: it is too much.
    pub fn note(&mut self, came: &[u8], now: Instant) -> Result<(), Arc<str>> {
        if now.saturating_duration_since(self.since) >= SECOND {
            *self = Flood::new(now);
        }
        self.lines += came.iter().filter(|&&b| b == b'\n').count();
        self.bytes += came.len();
        if self.lines > MOST_LINES {
            return Err(format!("QEMU sent more than {MOST_LINES} lines in a second").into());
        }
        if self.bytes > MOST_BYTES {
            return Err(format!("QEMU sent more than {MOST_BYTES} bytes in a second").into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_counted_anew_in_each_second() {
        let begin = Instant::now();
        let mut flood = Flood::new(begin);
        let half = b"{}\n".repeat(MOST_LINES / 2);
        for second in 0..3 {
            let now = begin + SECOND * second;
            flood.note(&half, now).unwrap();
            flood.note(&half, now + SECOND / 2).unwrap();
        }
        let why = flood.note(b"\n", begin + SECOND * 5 / 2).unwrap_err();
        assert_eq!(&*why, "QEMU sent more than 4096 lines in a second");
    }

    #[test]
    fn long_lines_are_bounded_by_their_bytes() {
        let now = Instant::now();
        let mut flood = Flood::new(now);
        let longest = vec![b'x'; MAX_LINE];
        for _ in 0..WINDOW {
            flood.note(&longest, now).unwrap();
        }
        let why = flood.note(b"x", now).unwrap_err();
        assert_eq!(&*why, "QEMU sent more than 8388608 bytes in a second");
        flood.note(b"x", now + SECOND).unwrap();
    }
}
