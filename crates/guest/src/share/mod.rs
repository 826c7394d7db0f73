//! Threads that write, copy, free and check pages of few different contents as fast as they can, and
//! leave some alone until they have been shared, to write one byte of them: whatever page sharing can
//! get wrong, this is made to see.

mod arena;
mod content;
mod duet;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::args::Args;
use crate::json::Object;
use crate::page::Random;
use crate::report::{self, Progress};
use arena::{Arena, CHUNK};
use content::{Contents, Poke};
use duet::{Duet, Voice};

const NAME: &str = "share-torture";
/// One chunk in so many rests at a time.
const RESTING: usize = 3;
/// Longest run of pages that one operation is about.
const RUN: u64 = 32;
/// Pages that all threads write.
const COMMON: usize = 512;

/// What was done so far, by all threads. Pages, but for `remaps`, which are chunks.
#[derive(Default)]
struct Counts {
    checks: AtomicU64,
    passes: AtomicU64,
    writes: AtomicU64,
    copies: AtomicU64,
    frees: AtomicU64,
    remaps: AtomicU64,
    pokes: AtomicU64,
    /// Pages found whole after they were left alone.
    rested: AtomicU64,
}

impl Counts {
    fn add_to(&self, object: Object) -> Object {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        object
            .int("writes", get(&self.writes))
            .int("copies", get(&self.copies))
            .int("frees", get(&self.frees))
            .int("remaps", get(&self.remaps))
            .int("pokes", get(&self.pokes))
            .int("rested", get(&self.rested))
    }
}

pub fn run(mut args: Args) -> Result<(), String> {
    let mb = args.at_least("mb", 48u64, 1)?;
    let threads = args.at_least("threads", 2u64, 1)?.min(mb);
    let contents = args.at_least("contents", 16u8, 2)?;
    let rest = args.seconds("rest", 5.0)?;
    let limit = args.seconds("seconds", 60.0)?;
    let seed = args.number("seed", 11u64)?;
    // Guests of different seeds still have the same contents.
    let content_seed = args.number("content-seed", 7u64)?;
    args.done()?;

    let set = Contents { seed: content_seed, count: contents };
    let stop = AtomicBool::new(false);
    let counts = Counts::default();
    let mut progress = Progress::new(NAME);
    progress.now("progress", |o| o.int("seed", seed).int("threads", threads).int("held_mb", mb));
    let arenas = (0..threads)
        .map(|_| Arena::new((mb / threads) as usize, set))
        .collect::<Result<Vec<_>, _>>()?;
    let duet = Duet::new(COMMON, threads as usize)?;
    std::thread::scope(|scope| {
        let mut workers = Vec::new();
        for (t, arena) in (0..threads).zip(arenas) {
            let worker = Worker {
                arena,
                voice: Voice::new(&duet, t as usize),
                random: Random(seed << 32 | t),
                set,
                rest,
                stop: &stop,
                counts: &counts,
            };
            workers.push(scope.spawn(|| {
                let result = worker.run();
                if result.is_err() {
                    stop.store(true, Ordering::Relaxed);
                }
                result
            }));
        }
        while !stop.load(Ordering::Relaxed) && !progress.over(limit) {
            std::thread::sleep(Duration::from_millis(200));
            progress.checks = counts.checks.load(Ordering::Relaxed);
            progress.passes = counts.passes.load(Ordering::Relaxed);
            progress.tick(|o| counts.add_to(o));
        }
        stop.store(true, Ordering::Relaxed);
        for worker in workers {
            worker.join().map_err(|_| "a thread panicked".to_owned())??;
        }
        Ok::<(), String>(())
    })
    .map_err(|what| format!("{what} (seed {seed})"))?;
    progress.checks = counts.checks.load(Ordering::Relaxed);
    progress.passes = counts.passes.load(Ordering::Relaxed);
    progress.now("done", |o| counts.add_to(o).int("seed", seed));
    Ok(())
}

struct Worker<'a> {
    arena: Arena,
    voice: Voice<'a>,
    random: Random,
    set: Contents,
    rest: Duration,
    stop: &'a AtomicBool,
    counts: &'a Counts,
}

impl Worker<'_> {
    /// A pass is as many pages as the memory has. Ends with a check of all of it.
    fn run(mut self) -> Result<(), String> {
        let pages = self.arena.chunks() * CHUNK;
        let mut resting = 0;
        let mut since = Instant::now();
        let mut handled = 0;
        while !self.stop.load(Ordering::Relaxed) {
            if since.elapsed() >= self.rest {
                self.wake_up(resting)?;
                resting = (resting + 1) % RESTING;
                since = Instant::now();
            }
            handled += self.operate(resting)?;
            if handled >= pages {
                handled -= pages;
                self.counts.passes.fetch_add(1, Ordering::Relaxed);
            }
        }
        (0..pages).try_for_each(|page| self.check(page))?;
        (0..COMMON).try_for_each(|page| self.common(|voice| voice.verify(page)))
    }

    fn rests(&self, chunk: usize, group: usize) -> bool {
        // What has fewer chunks than groups never rests whole.
        self.arena.chunks() >= RESTING && chunk % RESTING == group
    }

    /// One operation on pages that do not rest; says on how many.
    fn operate(&mut self, resting: usize) -> Result<usize, String> {
        let chunk = loop {
            let chunk = self.random.below(self.arena.chunks() as u64) as usize;
            if !self.rests(chunk, resting) {
                break chunk;
            }
        };
        let at = self.random.below(CHUNK as u64) as usize;
        let run = (1 + self.random.below(RUN) as usize).min(CHUNK - at);
        let from = chunk * CHUNK + at;
        match self.random.below(64) {
            0 => {
                (chunk * CHUNK..(chunk + 1) * CHUNK).try_for_each(|page| self.check(page))?;
                self.arena.remap(chunk)?;
                self.check(from)?;
                add(&self.counts.remaps, 1);
            }
            1..=5 => {
                (from..from + run).try_for_each(|page| self.check(page))?;
                self.arena.free(from, run)?;
                self.check(from)?;
                add(&self.counts.frees, run);
            }
            6..=13 => {
                // Onto pages of any chunk that does not rest, this one included.
                let to = self.random.below((self.arena.chunks() * CHUNK) as u64) as usize;
                let room = CHUNK - to % CHUNK;
                if !self.rests(to / CHUNK, resting) {
                    for n in 0..run.min(room) {
                        self.arena.copy(from + n, to + n);
                    }
                    (to..to + run.min(room)).try_for_each(|page| self.check(page))?;
                    add(&self.counts.copies, run.min(room));
                }
            }
            14..=37 => {
                for page in from..from + run {
                    self.check(page)?;
                    let content = self.random.below(u64::from(self.set.count)) as u8;
                    self.arena.write(page, content);
                }
                add(&self.counts.writes, run);
            }
            38..=47 => (from..from + run).try_for_each(|page| self.poke(page))?,
            48 => {
                let page = self.random.below(COMMON as u64) as usize;
                self.common(|voice| voice.verify(page))?;
                self.voice.write(page);
                self.common(|voice| voice.verify(page))?;
            }
            _ => (from..from + run).try_for_each(|page| self.check(page))?,
        }
        Ok(run)
    }

    /// What has rested is checked and poked: half of it is written before it is read.
    fn wake_up(&mut self, group: usize) -> Result<(), String> {
        for chunk in 0..self.arena.chunks() {
            if !self.rests(chunk, group) {
                continue;
            }
            for page in chunk * CHUNK..(chunk + 1) * CHUNK {
                match self.random.below(4) {
                    0 | 1 => self.poke(page)?,
                    2 => {
                        self.check(page)?;
                        self.poke(page)?;
                    }
                    _ => self.check(page)?,
                }
            }
            add(&self.counts.rested, CHUNK);
        }
        Ok(())
    }

    /// Writes one byte, then checks all 4,096.
    fn poke(&mut self, page: usize) -> Result<(), String> {
        let at = self.random.below(crate::page::PAGE as u64) as u16;
        let xor = 1 + self.random.below(255) as u8;
        self.arena.poke(page, Poke { at, xor });
        add(&self.counts.pokes, 1);
        self.check(page)
    }

    fn check(&self, page: usize) -> Result<(), String> {
        add(&self.counts.checks, 1);
        self.arena.verify(page).map_err(|what| report::corrupt(NAME, &what))
    }

    fn common(&self, verify: impl FnOnce(&Voice) -> Result<(), String>) -> Result<(), String> {
        add(&self.counts.checks, 1);
        verify(&self.voice).map_err(|what| report::corrupt(NAME, &what))
    }
}

fn add(count: &AtomicU64, pages: usize) {
    count.fetch_add(pages as u64, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_keeps_its_pages_passes() {
        let seed = u64::from(std::process::id());
        eprintln!("seed {seed}");
        for threads in ["1", "3"] {
            let words = ["--mb", "4", "--seconds", "1", "--rest", "0.2", "--threads", threads];
            let mut words: Vec<String> = words.iter().map(|w| (*w).to_owned()).collect();
            words.extend(["--seed".to_owned(), seed.to_string()]);
            run(Args::parse(words).unwrap()).unwrap();
        }
    }
}
