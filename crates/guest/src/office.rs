//! An interactive user: works in one of several programs, now and then turns to another, and waits
//! for each action to be done before thinking about the next. Every page that an action touches is
//! checked.

use std::time::{Duration, Instant};

use crate::args::Args;
use crate::latency::Latency;
use crate::memory::Memory;
use crate::page::Random;
use crate::report::{self, Progress};
use crate::store::Window;
use crate::zipf::Zipf;

const NAME: &str = "office";
/// One action in so many turns to another program.
const SWITCH: u64 = 8;
/// Neighbouring pages that an action works on, beside single ones all over the program.
const DOCUMENT: usize = 32;
/// One page in so many of what is touched is written.
const WRITE: u64 = 8;

pub fn run(mut args: Args) -> Result<(), String> {
    let programs = args.at_least("programs", 6usize, 1)?;
    let mb = args.at_least("program-mb", 12u64, 1)?;
    let touch = args.at_least("touch", 96usize, DOCUMENT)?;
    let think = args.seconds("think", 0.4)?;
    let every = args.seconds("every", 2.0)?;
    let limit = args.seconds("seconds", 0.0)?;
    let seed = args.number("seed", 1u64)?;
    args.done()?;

    let mut memory = Memory::of_rows(mb * programs as u64, seed)?;
    let pages = (mb << 8) as usize;
    let mut progress = Progress::new(NAME);
    for page in 0..memory.pages() {
        memory.write(page);
        progress.tick(|o| o.text("phase", "fill"));
    }
    progress.now("progress", |o| o.text("phase", "filled"));

    let favourite = Zipf::new(programs as u32, 1.0, seed);
    let place = Zipf::new(pages as u32, 0.8, seed ^ 1);
    let mut random = Random(seed);
    let mut latency = Latency::default();
    let mut window = Window::new(every);
    let mut program = 0;
    // Writing the data takes as long as it takes.
    let serving = Instant::now();
    while limit.is_zero() || serving.elapsed() < limit {
        // Half to one and a half of it: users are not metronomes.
        let part = 0.5 + random.below(1000) as f64 / 1000.0;
        std::thread::sleep(think.mul_f64(part).max(Duration::from_millis(1)));
        if random.below(SWITCH) == 0 {
            program = favourite.next(&mut random) as usize;
        }
        let begin = Instant::now();
        let document = place.next(&mut random) as usize;
        for n in 0..touch {
            let page = match n {
                n if n < DOCUMENT => (document + n) % pages,
                _ => place.next(&mut random) as usize,
            };
            let page = program * pages + page;
            memory.verify(page).map_err(|what| report::corrupt(NAME, &what))?;
            if random.below(WRITE) == 0 {
                memory.write(page);
            }
        }
        latency.add(begin.elapsed());
        progress.checks += touch as u64;
        progress.passes += 1;
        window.report(&mut progress, &mut latency);
    }
    window.tell(&mut progress, &mut latency);
    progress.now("done", |o| o);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn actions_are_done_and_checked() {
        let words = ["--programs", "2", "--program-mb", "1", "--think", "0.001"];
        let words = words.into_iter().chain(["--every", "0.05", "--seconds", "0.2"]);
        run(Args::parse(words.map(str::to_owned).collect()).unwrap()).unwrap();
    }
}
