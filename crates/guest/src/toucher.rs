//! Memory whose active part rises and falls (OSDI'02 s.5.4's toucher, with integrity checks).

use std::time::{Duration, Instant};

use crate::args::Args;
use crate::memory::Memory;
use crate::pace::Pace;
use crate::page::Random;
use crate::pattern::Pattern;
use crate::report::{self, Progress};

const NAME: &str = "toucher";
/// Pages between two looks at the clock.
const CHUNK: usize = 256;
/// One page in so many is rewritten when it is touched.
const REWRITE: u64 = 4;

pub fn run(mut args: Args) -> Result<(), String> {
    let pattern = Pattern::parse(&args.text("pattern", "sine"))?;
    let min = args.at_least("min-mb", 40u64, 1)?;
    let max = args.at_least("max-mb", 120u64, min)?;
    let max = pattern.largest_step().unwrap_or(max);
    let period = args.seconds("period", 60.0)?;
    let phase = args.number("phase", 0.0)?;
    let cycle = args.seconds("cycle", 1.5)?;
    let scrub = args.number("scrub", 50.0f64)?;
    let limit = args.seconds("seconds", 0.0)?;
    let seed = args.number("seed", 1u64)?;
    args.done()?;

    let mut memory = Memory::new(max, seed)?;
    let mut progress = Progress::new(NAME);
    let mut random = Random(seed);
    let mut pace = Pace::new(0.0);
    let mut scrubber = Scrubber { next: 0, due: 0.0, rate: scrub, last: Instant::now() };
    let mut filled = 0;
    let started = Instant::now();
    while !progress.over(limit) {
        let mb = pattern.at(started.elapsed(), min, max, period, phase);
        let active = ((mb * 256.0) as usize).clamp(1, memory.pages());
        pace.set_rate(active as f64 / cycle.as_secs_f64().max(0.001));
        let begin = Instant::now();
        for from in (0..active).step_by(CHUNK) {
            let upto = (from + CHUNK).min(active);
            for index in from..upto {
                check(&memory, index)?;
                progress.checks += 1;
                if index >= filled || random.below(REWRITE) == 0 {
                    memory.write(index);
                    filled = filled.max(index + 1);
                }
            }
            pace.spent((upto - from) as u64);
        }
        progress.passes += 1;
        progress.checks += scrubber.run(&memory, active, filled)?;
        let round = begin.elapsed();
        progress.tick(|o| {
            o.num("active_mb", mb)
                .int("held_mb", (filled >> 8) as u64)
                .num("round_s", round.as_secs_f64())
        });
        if cycle.is_zero() && round < Duration::from_millis(1) {
            std::thread::yield_now();
        }
    }
    for index in 0..filled {
        check(&memory, index)?;
        progress.checks += 1;
    }
    progress.now("done", |o| o);
    Ok(())
}

fn check(memory: &Memory, index: usize) -> Result<(), String> {
    memory.verify(index).map_err(|what| report::corrupt(NAME, &what))
}

/// Checks the inactive pages too, slowly, so that what sleeps in swap is seen again.
struct Scrubber {
    next: usize,
    due: f64,
    rate: f64,
    last: Instant,
}

impl Scrubber {
    fn run(&mut self, memory: &Memory, active: usize, filled: usize) -> Result<u64, String> {
        self.due = (self.due + self.rate * self.last.elapsed().as_secs_f64()).min(self.rate * 2.0);
        self.last = Instant::now();
        let mut checked = 0;
        while self.due >= 1.0 && active < filled {
            if !(active..filled).contains(&self.next) {
                self.next = active;
            }
            check(memory, self.next)?;
            self.next += 1;
            self.due -= 1.0;
            checked += 1;
        }
        Ok(checked)
    }
}
