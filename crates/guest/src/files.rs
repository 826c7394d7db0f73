//! A workload that lives from its page cache: files of known content, read back and checked.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::args::Args;
use crate::pace::Pace;
use crate::page::{Mark, PAGE, Page, Random, WORDS};
use crate::pattern::Pattern;
use crate::report::{self, Progress};

const NAME: &str = "files";

pub fn run(mut args: Args) -> Result<(), String> {
    let dir = args.text("dir", "/tmp");
    let mb = args.at_least("mb", 64u64, 1)?;
    let file_kb = args.at_least("file-kb", 1024u64, 4)?;
    let period = args.seconds("period", 60.0)?;
    let phase = args.number("phase", 0.0)?;
    let rate = args.number("rate-mb", 40.0f64)?;
    let limit = args.seconds("seconds", 0.0)?;
    let seed = args.number("seed", 2u64)?;
    let busy = args.seconds("busy", 60.0)?;
    let mut rest = args.seconds("rest", 0.0)?;
    args.done()?;

    let pages = file_kb / 4;
    let count = (mb * 256).div_ceil(pages);
    let mut progress = Progress::new(NAME);
    let mut set = FileSet::create(Path::new(&dir), count, pages, seed, |done| {
        progress.tick(|o| o.text("phase", "writing").int("files", done));
    })?;
    progress.now("progress", |o| o.text("phase", "written").int("files", count));

    let mut random = Random(seed);
    let mut pace = Pace::new(rate * 256.0);
    let mut meter = Meter::start(Path::new(&dir));
    let begin = Instant::now();
    while !progress.over(limit) {
        // A window of files, a quarter of them up to all, whose size follows the sine.
        let hot = Pattern::Sine.at(progress.elapsed(), count.div_ceil(4), count, period, phase);
        let hot = (hot as u64).clamp(1, count);
        for _ in 0..hot {
            if !rest.is_zero() && begin.elapsed() >= busy {
                progress.now("progress", |o| o.text("phase", "rest"));
                std::thread::sleep(std::mem::take(&mut rest));
                progress.now("progress", |o| o.text("phase", "again"));
            }
            let file = random.below(hot);
            progress.checks += set.read(file)?;
            meter.read += pages;
            if random.below(16) == 0 {
                set.write(file)?;
            }
            pace.spent(pages);
            progress.tick(|o| {
                let o = o.int("hot_files", hot).num("mb_per_s", meter.rate());
                match meter.hit_rate() {
                    Some(rate) => o.num("cache_hit", rate),
                    None => o,
                }
            });
        }
        progress.passes += 1;
    }
    for file in 0..count {
        progress.checks += set.read(file)?;
    }
    progress.now("done", |o| o.num("mb_per_s", meter.rate()));
    Ok(())
}

struct FileSet {
    dir: PathBuf,
    pages: u64,
    seed: u64,
    generations: Vec<u32>,
}

impl FileSet {
    fn create(
        dir: &Path,
        count: u64,
        pages: u64,
        seed: u64,
        mut told: impl FnMut(u64),
    ) -> Result<FileSet, String> {
        let dir = dir.join("ballast-files");
        std::fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        let mut set = FileSet { dir, pages, seed, generations: vec![0; count as usize] };
        for file in 0..count {
            set.write(file)?;
            told(file);
        }
        Ok(set)
    }

    fn path(&self, file: u64) -> PathBuf {
        self.dir.join(format!("file-{file:05}"))
    }

    fn mark(&self, file: u64, page: u64) -> Mark {
        Mark {
            seed: self.seed,
            index: file * self.pages + page,
            generation: self.generations[file as usize],
        }
    }

    /// Writes the file in a new generation, in place.
    fn write(&mut self, file: u64) -> Result<(), String> {
        self.generations[file as usize] += 1;
        let path = self.path(file);
        let told = |e: std::io::Error| format!("{}: {e}", path.display());
        let mut out = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(told)?;
        out.seek(SeekFrom::Start(0)).map_err(told)?;
        let mut page: Page = [0; WORDS];
        let mut bytes = Vec::with_capacity(PAGE * 16);
        for index in 0..self.pages {
            self.mark(file, index).fill(&mut page);
            bytes.extend(page.iter().flat_map(|w| w.to_le_bytes()));
            if bytes.len() == PAGE * 16 || index + 1 == self.pages {
                out.write_all(&bytes).map_err(told)?;
                bytes.clear();
            }
        }
        Ok(())
    }

    /// Reads and checks the whole file; returns the pages checked.
    fn read(&self, file: u64) -> Result<u64, String> {
        let path = self.path(file);
        let told = |e: std::io::Error| format!("{}: {e}", path.display());
        let mut input = File::open(&path).map_err(told)?;
        let mut buffer = vec![0; PAGE * 16];
        let mut page: Page = [0; WORDS];
        let mut index = 0;
        while index < self.pages {
            let want = PAGE * (self.pages - index).min(16) as usize;
            input.read_exact(&mut buffer[..want]).map_err(told)?;
            for bytes in buffer[..want].chunks_exact(PAGE) {
                for (word, b) in page.iter_mut().zip(bytes.chunks_exact(8)) {
                    *word = b.try_into().map_or(0, u64::from_le_bytes);
                }
                if let Some(what) = self.mark(file, index).verify(&page) {
                    let what = format!("{}: {what}", path.display());
                    return Err(report::corrupt(NAME, &what));
                }
                index += 1;
            }
        }
        Ok(self.pages)
    }
}

/// How fast, and how much of it came from the page cache.
struct Meter {
    started: Instant,
    /// Pages that the workload has read.
    read: u64,
    disk_at_start: Option<u64>,
}

impl Meter {
    fn start(dir: &Path) -> Meter {
        // A directory in memory has no disk behind it, so nothing to compare with.
        let on_disk = dir.starts_with(crate::init::DISK);
        let disk_at_start = if on_disk { disk_pages_read() } else { None };
        Meter { started: Instant::now(), read: 0, disk_at_start }
    }

    fn rate(&self) -> f64 {
        self.read as f64 / 256.0 / self.started.elapsed().as_secs_f64().max(0.001)
    }

    fn hit_rate(&self) -> Option<f64> {
        let from_disk = disk_pages_read()?.saturating_sub(self.disk_at_start?);
        Some((1.0 - from_disk as f64 / self.read.max(1) as f64).max(0.0))
    }
}

/// Pages that were read from vda since boot.
fn disk_pages_read() -> Option<u64> {
    parse_diskstats(&std::fs::read_to_string("/proc/diskstats").ok()?)
}

fn parse_diskstats(text: &str) -> Option<u64> {
    let line = text.lines().find(|l| l.split_whitespace().nth(2) == Some("vda"))?;
    let sectors: u64 = line.split_whitespace().nth(5)?.parse().ok()?;
    Some(sectors / 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("ballast-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }

    #[test]
    fn files_verify_and_damage_is_found() {
        let dir = scratch("files");
        let mut set = FileSet::create(&dir, 3, 20, 9, |_| {}).unwrap();
        set.write(1).unwrap();
        assert_eq!((0..3).map(|f| set.read(f).unwrap()).sum::<u64>(), 60);
        let path = set.path(1);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[17 * PAGE + 99] ^= 4;
        std::fs::write(&path, &bytes).unwrap();
        assert!(set.read(1).unwrap_err().contains("file-00001"));
        std::fs::write(&path, &bytes[..100]).unwrap();
        assert!(set.read(1).is_err());
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn diskstats_are_counted_in_pages() {
        let text = " 254 0 vda 10 2 800 5 6 7 8 9 0 1 2\n 254 1 vda1 1 1 8 1 1 1 1 1 0 1 1\n";
        assert_eq!(parse_diskstats(text), Some(100));
        assert_eq!(parse_diskstats(" 7 0 loop0 1 1 8\n"), None);
    }
}
