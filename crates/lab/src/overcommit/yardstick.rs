//! How fast the machine itself was while something was measured on it: on a shared host processors are
//! taken away (stolen), and those that remain are slowed by who shares their caches. What one side could do
//! at another moment than the next is to be held against this.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::time::{ClockId, clock_gettime};

/// A look takes about so many steps, once in so long: less than 1% of one processor.
const STEPS: usize = 20_000;
const EVERY: Duration = Duration::from_millis(500);
/// Words that the steps go through: 4 MiB, more than what a processor has for itself.
const WORDS: usize = 1 << 20;
/// Of arithmetic in each step, one after the other.
const ROUNDS: u32 = 8;

/// What was seen.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Speed {
    /// Steps per microsecond of CPU time: a load from 4 MiB, in no order, and some arithmetic, each
    /// waiting for the last.
    pub steps_per_us: f64,
    /// Of all processors' time, per cent that the host gave to others.
    pub stolen_percent: f64,
}

/// Looks at the machine from its start until [`end`](Yardstick::end).
pub struct Yardstick {
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<f64>>,
    stolen: f64,
    begin: Instant,
}

impl Yardstick {
    /// # Errors
    /// What the kernel tells of its processors cannot be read.
    pub fn start() -> Result<Yardstick> {
        let ended = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&ended);
        let thread = std::thread::spawn(move || {
            let chain = chain();
            let (mut at, mut sum, mut steps, mut seconds) = (0, 1_u64, 0, 0.0);
            // One look at least, however soon it ends.
            loop {
                let before = own_cpu_s();
                for _ in 0..STEPS {
                    at = chain[at] as usize;
                    sum ^= at as u64;
                    for _ in 0..ROUNDS {
                        sum = (sum ^ (sum >> 29)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                    }
                    // The next load waits for the arithmetic too.
                    at = (at as u64 ^ (sum & std::hint::black_box(0))) as usize;
                }
                seconds += own_cpu_s() - before;
                steps += STEPS;
                if flag.load(Ordering::Relaxed) {
                    break;
                }
                std::thread::park_timeout(EVERY);
            }
            // What was found matters to nobody, but has to be found.
            std::hint::black_box((at, sum));
            steps as f64 / seconds / 1e6
        });
        Ok(Yardstick { ended, thread: Some(thread), stolen: stolen_s()?, begin: Instant::now() })
    }

    /// # Errors
    /// As [`start`](Yardstick::start).
    pub fn end(mut self) -> Result<Speed> {
        let (stolen, seconds) = (stolen_s()? - self.stolen, self.begin.elapsed().as_secs_f64());
        let steps_per_us = self.stop().unwrap_or(f64::NAN);
        let processors = std::thread::available_parallelism().map_or(1, usize::from) as f64;
        Ok(Speed { steps_per_us, stolen_percent: 100.0 * stolen / seconds / processors })
    }
}

impl Yardstick {
    fn stop(&mut self) -> Option<f64> {
        self.ended.store(true, Ordering::Relaxed);
        let thread = self.thread.take()?;
        thread.thread().unpark();
        thread.join().ok()
    }
}

impl Drop for Yardstick {
    fn drop(&mut self) {
        self.stop();
    }
}

fn own_cpu_s() -> f64 {
    let t = clock_gettime(ClockId::ThreadCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
}

/// One cycle through all words, in an order that no processor foresees (Sattolo's).
fn chain() -> Vec<u32> {
    let mut next: Vec<u32> = (0..WORDS as u32).collect();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for i in (1..WORDS).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        next.swap(i, (state >> 33) as usize % i);
    }
    next
}

/// Time that the host had for others, of all processors together.
fn stolen_s() -> Result<f64> {
    let text = std::fs::read_to_string("/proc/stat").context("reading /proc/stat")?;
    stolen_in(&text).context("/proc/stat: no stolen time in its first line")
}

fn stolen_in(stat: &str) -> Option<f64> {
    let ticks: f64 =
        stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace().nth(7)?.parse().ok()?;
    Some(ticks / rustix::param::clock_ticks_per_second() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stolen_time_is_the_eighth_number() {
        let ticks = rustix::param::clock_ticks_per_second() as f64;
        assert_eq!(stolen_in("cpu  1 2 3 4 5 6 7 800 9 10\ncpu0 1"), Some(800.0 / ticks));
        assert_eq!(stolen_in("cpu  1 2 3"), None);
        assert_eq!(stolen_in(""), None);
    }

    #[test]
    fn the_chain_is_one_cycle() {
        let chain = chain();
        let (mut at, mut n) = (0, 0);
        while n == 0 || at != 0 {
            at = chain[at] as usize;
            n += 1;
        }
        assert_eq!(n, WORDS);
    }

    #[test]
    fn a_machine_has_some_speed() {
        let speed = Yardstick::start().unwrap().end().unwrap();
        assert!(speed.steps_per_us > 0.0 && speed.stolen_percent >= 0.0, "{speed:?}");
    }
}
