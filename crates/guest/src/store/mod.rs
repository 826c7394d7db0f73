//! A keyed store as a database's stand-in: a table in a file, which lives in the page cache as far as
//! that goes, and sessions in memory. A transaction reads some rows, writes one of them back, and
//! works in one session; all are chosen by Zipf's law, and all are checked.

mod table;

use std::path::Path;
use std::time::{Duration, Instant};

use crate::args::Args;
use crate::latency::Latency;
use crate::memory::Memory;
use crate::pace::Pace;
use crate::page::Random;
use crate::report::{self, Progress};
use crate::zipf::Zipf;
use table::Table;

const NAME: &str = "store";
/// Pages of a session that a transaction touches; the first is written.
const SESSION: usize = 4;

pub fn run(mut args: Args) -> Result<(), String> {
    let dir = args.text("dir", crate::init::DISK);
    let mb = args.at_least("mb", 64usize, 1)?;
    let sessions_mb = args.at_least("sessions-mb", 16u64, 1)?;
    let rate = args.number("rate", 0.0f64)?;
    let reads = args.at_least("reads", 4u32, 1)?;
    let s = args.number("zipf", 0.9f64)?;
    let every = args.seconds("every", 2.0)?;
    let limit = args.seconds("seconds", 0.0)?;
    let seed = args.number("seed", 1u64)?;
    args.done()?;

    let mut progress = Progress::new(NAME);
    let mut table = Table::create(Path::new(&dir), mb << 8, seed, |rows| {
        progress.tick(|o| o.text("phase", "fill").int("rows", rows as u64));
    })?;
    let mut sessions = Memory::of_rows(sessions_mb, seed)?;
    (0..sessions.pages()).for_each(|page| sessions.write(page));
    progress.now("progress", |o| o.text("phase", "filled").int("rows", (mb << 8) as u64));

    let rows = Zipf::new((mb << 8) as u32, s, seed);
    let places = Zipf::new((sessions.pages() / SESSION) as u32, s, seed ^ 1);
    let corrupt = |what: String| report::corrupt(NAME, &what);
    let mut random = Random(seed);
    let mut pace = Pace::new(rate);
    let mut latency = Latency::default();
    let mut window = Window::new(every);
    // Writing the data takes as long as it takes.
    let serving = Instant::now();
    while limit.is_zero() || serving.elapsed() < limit {
        let begin = Instant::now();
        let mut last = 0;
        for _ in 0..reads {
            last = rows.next(&mut random) as usize;
            table.read(last)?.map_err(corrupt)?;
        }
        table.update(last)?;
        let session = places.next(&mut random) as usize * SESSION;
        for page in session..session + SESSION {
            sessions.verify(page).map_err(corrupt)?;
        }
        sessions.write(session);
        latency.add(begin.elapsed());
        progress.checks += u64::from(reads) + SESSION as u64;
        progress.passes += 1;
        window.report(&mut progress, &mut latency);
        pace.spent(1);
    }
    window.tell(&mut progress, &mut latency);
    progress.now("done", |o| o);
    Ok(())
}

/// Tells, now and then, what was done since it told the last time.
pub struct Window {
    every: Duration,
    since: Instant,
    passes: u64,
}

impl Window {
    pub fn new(every: Duration) -> Window {
        Window { every, since: Instant::now(), passes: 0 }
    }

    pub fn report(&mut self, progress: &mut Progress, latency: &mut Latency) {
        if self.since.elapsed() >= self.every {
            self.tell(progress, latency);
        }
    }

    pub fn tell(&mut self, progress: &mut Progress, latency: &mut Latency) {
        let elapsed = self.since.elapsed();
        let ops = progress.passes - self.passes;
        progress.now("progress", |o| {
            o.text("phase", "serve")
                .num("window_s", elapsed.as_secs_f64())
                .int("ops", ops)
                .text("latency", &latency.take())
        });
        self.since = Instant::now();
        self.passes = progress.passes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transactions_are_done_and_checked() {
        let dir = std::env::temp_dir().join(format!("ballast-store-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let words = ["--dir", dir.to_str().unwrap(), "--mb", "1", "--sessions-mb", "1"];
        let words = words.into_iter().chain(["--every", "0.05", "--seconds", "0.2"]);
        run(Args::parse(words.map(str::to_owned).collect()).unwrap()).unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
