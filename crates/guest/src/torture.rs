//! Threads that write, check, free and refill pages as fast as they can: whatever a pager can get
//! wrong about a page, this is made to see.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::args::Args;
use crate::meminfo;
use crate::memory::Memory;
use crate::page::Random;
use crate::report::{self, Progress};

const NAME: &str = "verify-torture";

pub fn run(mut args: Args) -> Result<(), String> {
    let mb = args.at_least("mb", 64u64, 1)?;
    let threads = args.at_least("threads", 3u64, 1)?.min(mb);
    let limit = args.seconds("seconds", 60.0)?;
    let seed = args.number("seed", 11u64)?;
    let total = args.number("until-total-mb", 0u64)?;
    args.done()?;
    let has_grown = || Ok::<bool, String>(total > 0 && meminfo::total_mb()? >= total);

    let stop = AtomicBool::new(false);
    let checks = AtomicU64::new(0);
    let passes = AtomicU64::new(0);
    let mut progress = Progress::new(NAME);
    let memories = (0..threads)
        .map(|t| Memory::new(mb / threads, seed << 16 | t))
        .collect::<Result<Vec<_>, _>>()?;
    std::thread::scope(|scope| {
        let mut workers = Vec::new();
        for (t, memory) in (0..threads).zip(memories) {
            let (stop, checks, passes) = (&stop, &checks, &passes);
            workers.push(scope.spawn(move || {
                let result = torture(memory, Random(seed << 32 | t), stop, checks, passes);
                if result.is_err() {
                    stop.store(true, Ordering::Relaxed);
                }
                result
            }));
        }
        while !stop.load(Ordering::Relaxed) && !progress.over(limit) && !has_grown()? {
            std::thread::sleep(Duration::from_millis(200));
            progress.checks = checks.load(Ordering::Relaxed);
            progress.passes = passes.load(Ordering::Relaxed);
            let per_second = progress.passes as f64 / progress.elapsed().as_secs_f64();
            progress.tick(|o| o.num("passes_per_s", per_second).int("held_mb", mb));
        }
        stop.store(true, Ordering::Relaxed);
        for worker in workers {
            worker.join().map_err(|_| "a thread panicked".to_owned())??;
        }
        Ok::<(), String>(())
    })?;
    progress.checks = checks.load(Ordering::Relaxed);
    progress.passes = passes.load(Ordering::Relaxed);
    let per_second = progress.passes as f64 / progress.elapsed().as_secs_f64().max(0.001);
    progress.now("done", |o| o.num("passes_per_s", per_second));
    Ok(())
}

/// A pass is as many operations as the memory has pages. Ends with a check of all of it.
fn torture(
    mut memory: Memory,
    mut random: Random,
    stop: &AtomicBool,
    checks: &AtomicU64,
    passes: &AtomicU64,
) -> Result<(), String> {
    let pages = memory.pages();
    let check = |memory: &Memory, index: usize| {
        checks.fetch_add(1, Ordering::Relaxed);
        memory.verify(index).map_err(|what| report::corrupt(NAME, &what))
    };
    let mut operations = 0;
    while !stop.load(Ordering::Relaxed) {
        let from = random.below(pages as u64) as usize;
        let run = (1 + random.below(32) as usize).min(pages - from);
        match random.below(16) {
            // Checked before it is freed, and found zero after.
            0 => {
                (from..from + run).try_for_each(|i| check(&memory, i))?;
                memory.free(from, run)?;
                check(&memory, from)?;
            }
            1..=7 => {
                for index in from..from + run {
                    check(&memory, index)?;
                    memory.write(index);
                }
            }
            _ => (from..from + run).try_for_each(|i| check(&memory, i))?,
        }
        operations += run;
        if operations >= pages {
            operations -= pages;
            passes.fetch_add(1, Ordering::Relaxed);
        }
    }
    (0..pages).try_for_each(|i| check(&memory, i))
}
