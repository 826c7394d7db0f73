//! Small helpers for experiments: a hog, a dirtier, and reports of /proc/meminfo.

use std::time::Duration;

use crate::args::Args;
use crate::json::Object;
use crate::meminfo::Meminfo;
use crate::memory::Memory;
use crate::pace::Pace;
use crate::report::{self, Progress};

/// Takes memory, and keeps it untouched.
pub fn hog(mut args: Args) -> Result<(), String> {
    let mb = args.at_least("mb", 100u64, 1)?;
    let limit = args.seconds("seconds", 0.0)?;
    args.done()?;
    let mut memory = Memory::new(mb, 13)?;
    let mut progress = Progress::new("hog");
    (0..memory.pages()).for_each(|i| memory.write(i));
    progress.now("progress", |o| o.int("held_mb", mb));
    while !progress.over(limit) {
        std::thread::sleep(Duration::from_secs(1));
    }
    for index in 0..memory.pages() {
        memory.verify(index).map_err(|what| report::corrupt("hog", &what))?;
        progress.checks += 1;
    }
    progress.now("done", |o| o.int("held_mb", mb));
    Ok(())
}

/// Writes its pages over and over, checking each before it writes it.
pub fn dirty(mut args: Args) -> Result<(), String> {
    let mb = args.at_least("mb", 50u64, 1)?;
    let rate = args.number("rate-mb", 50.0f64)?;
    let limit = args.seconds("seconds", 0.0)?;
    args.done()?;
    let mut memory = Memory::new(mb, 17)?;
    let mut progress = Progress::new("dirty");
    let mut pace = Pace::new(rate * 256.0);
    while !progress.over(limit) {
        for index in 0..memory.pages() {
            memory.verify(index).map_err(|what| report::corrupt("dirty", &what))?;
            memory.write(index);
            progress.checks += 1;
            if index % 256 == 255 {
                pace.spent(256);
                progress.tick(|o| o.int("held_mb", mb));
            }
        }
        progress.passes += 1;
    }
    progress.now("done", |o| o.int("held_mb", mb));
    Ok(())
}

/// /proc/meminfo as JSON.
pub fn report(mut args: Args) -> Result<(), String> {
    let every = args.seconds("every", 0.0)?;
    args.done()?;
    loop {
        let info = Meminfo::read()?;
        report::emit(info.add_to(Object::new().text("event", "meminfo")));
        if every.is_zero() {
            return Ok(());
        }
        std::thread::sleep(every);
    }
}
