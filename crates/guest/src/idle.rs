//! A guest that works for a while and then goes idle, holding memory that it hardly uses.

use std::time::{Duration, Instant};

use crate::args::Args;
use crate::memory::Memory;
use crate::page::Random;
use crate::report::{self, Progress};

const NAME: &str = "idle";

pub fn run(mut args: Args) -> Result<(), String> {
    let mb = args.at_least("mb", 80u64, 1)?;
    let busy = args.seconds("busy", 15.0)?;
    let every = args.seconds("every", 20.0)?;
    let limit = args.seconds("seconds", 0.0)?;
    let seed = args.number("seed", 3u64)?;
    args.done()?;

    let mut memory = Memory::new(mb, seed)?;
    let mut progress = Progress::new(NAME);
    (0..memory.pages()).for_each(|i| memory.write(i));
    while progress.elapsed() < busy {
        check_all(&memory, &mut progress)?;
        progress.tick(|o| o.text("phase", "busy").int("held_mb", mb));
        std::thread::sleep(Duration::from_millis(500));
    }
    check_all(&memory, &mut progress)?;
    progress.now("progress", |o| o.text("phase", "idle").int("held_mb", mb));

    let mut random = Random(seed);
    let mut last = Instant::now();
    while !progress.over(limit) {
        std::thread::sleep(Duration::from_secs(3));
        for _ in 0..8 {
            let index = random.below(memory.pages() as u64) as usize;
            check(&memory, index)?;
            progress.checks += 1;
        }
        if last.elapsed() >= every {
            check_all(&memory, &mut progress)?;
            last = Instant::now();
        }
        progress.tick(|o| o.text("phase", "idle").int("held_mb", mb));
    }
    check_all(&memory, &mut progress)?;
    progress.now("done", |o| o.int("held_mb", mb));
    Ok(())
}

fn check_all(memory: &Memory, progress: &mut Progress) -> Result<(), String> {
    for index in 0..memory.pages() {
        check(memory, index)?;
    }
    progress.checks += memory.pages() as u64;
    progress.passes += 1;
    Ok(())
}

fn check(memory: &Memory, index: usize) -> Result<(), String> {
    memory.verify(index).map_err(|what| report::corrupt(NAME, &what))
}
