//! The process whose pages are reclaimed: private memory for the kernel's tiers, a shared file as
//! QEMU's RAM for ours. It does what standard input says, a line at a time, and answers each line
//! with one; when its input ends, it ends.
//!
//! | command | does | answers |
//! | --- | --- | --- |
//! | `fill` | writes all its memory | `filled PAGES` |
//! | `pageout` | asks the kernel to reclaim all of it | `ok` |
//! | `floor WAITS` | takes all of it away, for a thread of its own to bring back (`floor`) | `ok` |
//! | `give` | gives up page after page of what it does not fill, until it has read | `ok` |
//! | `out` | counts the pages that are not in memory | `out PAGES` |
//! | `read COUNT SEED ORDER` | reads so many of those, each timed | `times N P50 P99 MAX MEAN GIVEN`, ns; GIVEN: pages a second |
//! | `check` | compares all its memory with what it wrote | `whole PAGES` |

use std::time::Instant;

use anyhow::{Result, bail, ensure};

use super::super::child;
use super::super::memory::{Giving, Memory, WORDS};
use super::super::sharing::contents::shuffle;
use super::contents::Kind;
use super::floor::{self, Waits};
use super::round::Order;

#[allow(missing_docs, reason = "clap would print it in place of what the command says of itself")]
#[derive(Clone, Debug, clap::Args)]
pub struct FaulterArgs {
    #[arg(long)]
    mib: usize,
    #[arg(long)]
    seed: u64,
    #[arg(long)]
    kind: Kind,
    /// Memory besides, which it does not fill
    #[arg(long, default_value_t = 0)]
    spare_mib: usize,
    /// A shared memfd instead of private memory
    #[arg(long)]
    file: bool,
}

/// Nothing but commands until the input ends.
pub fn run(args: &FaulterArgs) -> Result<()> {
    let memory = Memory::map((args.mib + args.spare_mib) << 8, args.file)?;
    let (pages, kind, seed) = (args.mib << 8, args.kind, args.seed);
    let mut faulter = Faulter { memory, pages, kind, seed, giving: None };
    child::serve(|words| faulter.obey(words))
}

struct Faulter {
    memory: Memory,
    /// Those that it fills: the first.
    pages: usize,
    kind: Kind,
    seed: u64,
    giving: Option<Giving>,
}

impl Faulter {
    fn obey(&mut self, words: &[&str]) -> Result<String> {
        match *words {
            ["fill"] => {
                for page in 0..self.pages {
                    self.kind.fill(page, self.seed, self.memory.page(page));
                }
                Ok(format!("filled {}", self.pages))
            }
            ["pageout"] => self.memory.advise(libc::MADV_PAGEOUT).map(|()| "ok".to_owned()),
            ["floor", waits] => {
                let waits = match waits {
                    "asleep" => Waits::Asleep,
                    _ => Waits::Spinning,
                };
                floor::begin(&mut self.memory, waits).map(|()| "ok".to_owned())
            }
            ["give"] => {
                self.giving = Some(self.memory.give_up_from(self.pages)?);
                Ok("ok".to_owned())
            }
            ["out"] => Ok(format!("out {}", self.out()?.len())),
            ["read", count, seed, order] => {
                let mut pages = self.out()?;
                if Order::named(order)? == Order::Random {
                    shuffle(&mut pages, seed.parse()?);
                }
                pages.truncate(count.parse()?);
                let given = |f: &Faulter| f.giving.as_ref().map_or(0, Giving::given);
                let (before, begin) = (given(self), Instant::now());
                let mut times = self.read(&pages)?;
                let given = (given(self) - before) as f64 / begin.elapsed().as_secs_f64();
                self.giving = None;
                times.sort_unstable();
                let at = |part: f64| {
                    let last = times.len().saturating_sub(1);
                    times.get((last as f64 * part).round() as usize).copied().unwrap_or(0)
                };
                let mean = times.iter().sum::<u64>() / times.len().max(1) as u64;
                let [p50, p99, max] = [0.5, 0.99, 1.0].map(at);
                Ok(format!("times {} {p50} {p99} {max} {mean} {given:.0}", times.len()))
            }
            ["check"] => {
                let mut want = [0; WORDS];
                for page in 0..self.pages {
                    self.kind.fill(page, self.seed, &mut want);
                    ensure!(*self.memory.page(page) == want, "page {page} is not as written");
                }
                Ok(format!("whole {}", self.pages))
            }
            _ => bail!("unknown command"),
        }
    }

    fn out(&self) -> Result<Vec<u32>> {
        let resident = self.memory.resident()?.into_iter().take(self.pages);
        Ok((0..).zip(resident).filter(|(_, there)| !there).map(|(page, _)| page).collect())
    }

    /// How long the first access to each page takes, ns.
    fn read(&mut self, pages: &[u32]) -> Result<Vec<u64>> {
        let mut times = Vec::with_capacity(pages.len());
        for page in pages {
            let page = *page as usize;
            let want = self.kind.first_word(page, self.seed);
            let word: *const u64 = &raw const self.memory.page(page)[0];
            let begin = Instant::now();
            // SAFETY: `word` was just derived from an exclusive borrow of the page.
            let found = unsafe { word.read_volatile() };
            times.push(begin.elapsed().as_nanos() as u64);
            ensure!(found == want, "page {page} begins with {found:#018x} instead of {want:#018x}");
        }
        Ok(times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(faulter: &mut Faulter, line: &str) -> Result<String> {
        faulter.obey(&line.split(' ').collect::<Vec<_>>())
    }

    #[test]
    fn what_is_written_is_checked_and_what_is_out_is_read() {
        for file in [false, true] {
            let memory = Memory::map(256 + 16, file).unwrap();
            let mut f = Faulter { memory, pages: 256, kind: Kind::Half, seed: 3, giving: None };
            assert_eq!(ask(&mut f, "out").unwrap(), "out 256");
            assert_eq!(ask(&mut f, "fill").unwrap(), "filled 256");
            assert_eq!(ask(&mut f, "out").unwrap(), "out 0");
            assert_eq!(ask(&mut f, "check").unwrap(), "whole 256");
            for order in ["random", "sequential"] {
                let asked = format!("read 10 1 {order}");
                assert_eq!(ask(&mut f, &asked).unwrap(), "times 0 0 0 0 0 0");
            }
            assert_eq!(ask(&mut f, "give").unwrap(), "ok");
            while f.giving.as_ref().unwrap().given() < 100 {
                std::thread::yield_now();
            }
            ask(&mut f, "read 10 1 random").unwrap();
            assert!(f.giving.is_none());
            assert_eq!(f.read(&[3, 200]).unwrap().len(), 2);
            f.memory.page(77)[0] ^= 1;
            assert!(f.read(&[77]).unwrap_err().to_string().contains("page 77"));
            assert!(ask(&mut f, "check").is_err() && ask(&mut f, "x").is_err());
        }
    }

    #[test]
    fn what_is_kept_aside_comes_back_as_it_was() {
        if let Err(e) = ballast_uffd::Uffd::open() {
            eprintln!("SKIPPED: no userfaultfd: {e}");
            return;
        }
        for waits in Waits::ALL {
            let memory = Memory::map(64, true).unwrap();
            let mut f = Faulter { memory, pages: 64, kind: Kind::Half, seed: 5, giving: None };
            ask(&mut f, "fill").unwrap();
            assert_eq!(ask(&mut f, waits.command()).unwrap(), "ok");
            assert_eq!(ask(&mut f, "out").unwrap(), "out 64");
            assert_eq!(f.read(&[3, 60]).unwrap().len(), 2);
            assert_eq!(ask(&mut f, "out").unwrap(), "out 62");
            assert_eq!(ask(&mut f, "check").unwrap(), "whole 64");
        }
    }
}
