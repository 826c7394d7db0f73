//! Writes a pattern into all its memory, then reads a fixed block of it round-robin: the memory
//! stress program of the VMware Technical Journal, Winter 2013, "Memory Overcommitment in the ESX
//! Server", s.4.1.

use crate::args::Args;
use crate::memory::Memory;
use crate::pace::Pace;
use crate::report::{self, Progress};

const NAME: &str = "reader";
const CHUNK: usize = 256;

pub fn run(mut args: Args) -> Result<(), String> {
    let mb = args.at_least("mb", 100u64, 1)?;
    let block = args.at_least("block-mb", mb, 1)?.min(mb);
    let fill_rate = args.number("fill-rate-mb", 0.0f64)?;
    let rate = args.number("rate-mb", 0.0f64)?;
    let limit = args.seconds("seconds", 0.0)?;
    let seed = args.number("seed", 5u64)?;
    args.done()?;

    let mut memory = Memory::new(mb, seed)?;
    let mut progress = Progress::new(NAME);
    let mut pace = Pace::new(fill_rate * 256.0);
    for from in (0..memory.pages()).step_by(CHUNK) {
        let upto = (from + CHUNK).min(memory.pages());
        (from..upto).for_each(|i| memory.write(i));
        pace.spent((upto - from) as u64);
        progress.tick(|o| o.text("phase", "fill").int("written_mb", (upto >> 8) as u64));
    }
    progress.now("progress", |o| o.text("phase", "filled").int("written_mb", mb));
    pace.set_rate(rate * 256.0);
    let pages = (block << 8) as usize;
    while !progress.over(limit) {
        for from in (0..pages).step_by(CHUNK) {
            let upto = (from + CHUNK).min(pages);
            for index in from..upto {
                memory.verify(index).map_err(|what| report::corrupt(NAME, &what))?;
            }
            progress.checks += (upto - from) as u64;
            pace.spent((upto - from) as u64);
            progress.tick(|o| o.text("phase", "read").int("block_mb", block));
        }
        progress.passes += 1;
    }
    progress.now("done", |o| o.int("block_mb", block));
    Ok(())
}
