//! The process whose memory is scanned: private memory for the kernel's scanner, a shared file as
//! QEMU's RAM for ours. It does what standard input says, a line at a time, and answers each line
//! with one; when its input ends, it ends.
//!
//! | command | does | answers |
//! | --- | --- | --- |
//! | `fill` | writes all its memory | `filled PAGES` |
//! | `mergeable` | asks the kernel's scanner in | `ok` |
//! | `write KIND COUNT SEED` | first writes to that many pages, each timed | `times N P50 P99 MAX`, ns |
//! | `check` | compares all its memory with what it wrote | `whole PAGES` |

use std::time::Instant;

use anyhow::{Result, bail, ensure};

use super::super::child;
use super::super::memory::Memory;
use super::contents::{Contents, Kind, WORDS};

#[allow(missing_docs, reason = "clap would print it in place of what the command says of itself")]
#[derive(Clone, Debug, clap::Args)]
pub struct HolderArgs {
    #[arg(long)]
    mib: usize,
    #[arg(long)]
    seed: u64,
    /// Neighbours that are copied together
    #[arg(long, default_value_t = 1)]
    run: usize,
    /// A shared memfd instead of private memory
    #[arg(long)]
    file: bool,
}

/// Nothing but commands until the input ends.
pub fn run(args: &HolderArgs) -> Result<()> {
    let contents = Contents::new(args.mib << 8, args.seed, args.run);
    let memory = Memory::map(contents.pages(), args.file)?;
    let changed = vec![false; contents.pages()];
    let mut holder = Holder { contents, memory, changed };
    child::serve(|words| holder.obey(words))
}

struct Holder {
    contents: Contents,
    memory: Memory,
    /// Pages whose first word was changed after they were filled.
    changed: Vec<bool>,
}

impl Holder {
    fn obey(&mut self, words: &[&str]) -> Result<String> {
        match *words {
            ["fill"] => {
                for page in 0..self.contents.pages() {
                    self.contents.fill(page, false, self.memory.page(page));
                }
                Ok(format!("filled {}", self.contents.pages()))
            }
            ["mergeable"] => self.memory.advise(libc::MADV_MERGEABLE).map(|()| "ok".to_owned()),
            ["write", kind, count, seed] => {
                let kind = match kind {
                    "zero" => Kind::Zero,
                    "twin" => Kind::Twin,
                    "unique" => Kind::Unique,
                    _ => bail!("no kind '{kind}'"),
                };
                let pages = self.contents.choose(kind, count.parse()?, seed.parse()?);
                let mut times = self.write(&pages);
                times.sort_unstable();
                let at = |part: f64| {
                    let last = times.len().saturating_sub(1);
                    times.get((last as f64 * part).round() as usize).copied().unwrap_or(0)
                };
                Ok(format!("times {} {} {} {}", times.len(), at(0.5), at(0.99), at(1.0)))
            }
            ["check"] => {
                let mut want = [0; WORDS];
                for page in 0..self.contents.pages() {
                    self.contents.fill(page, self.changed[page], &mut want);
                    ensure!(*self.memory.page(page) == want, "page {page} is not as written");
                }
                Ok(format!("whole {}", self.contents.pages()))
            }
            _ => bail!("unknown command"),
        }
    }

    /// Changes one bit of each page and tells how long each write took, ns.
    fn write(&mut self, pages: &[usize]) -> Vec<u64> {
        let mut times = Vec::with_capacity(pages.len());
        for page in pages {
            let changed = !self.changed[*page];
            // What the page holds, with one bit flipped; not read from it, so that the write is the
            // first access.
            let value = self.contents.first_word(*page) ^ u64::from(changed);
            let word: *mut u64 = &mut self.memory.page(*page)[0];
            let begin = Instant::now();
            // SAFETY: `word` was just derived from an exclusive borrow of the page.
            unsafe { word.write_volatile(value) };
            times.push(begin.elapsed().as_nanos() as u64);
            self.changed[*page] = changed;
        }
        times
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(file: bool) -> Holder {
        let contents = Contents::new(4096, 3, 1);
        let memory = Memory::map(contents.pages(), file).unwrap();
        Holder { changed: vec![false; contents.pages()], contents, memory }
    }

    fn ask(holder: &mut Holder, line: &str) -> Result<String> {
        holder.obey(&line.split(' ').collect::<Vec<_>>())
    }

    #[test]
    fn what_is_written_is_checked() {
        for file in [false, true] {
            let mut h = holder(file);
            assert_eq!(ask(&mut h, "fill").unwrap(), "filled 4096");
            let times = ask(&mut h, "write twin 100 1").unwrap();
            assert!(times.starts_with("times 100 "), "{times}");
            // The same pages again: the bit is flipped back.
            ask(&mut h, "write twin 50 1").unwrap();
            ask(&mut h, "write zero 10 1").unwrap();
            assert_eq!(ask(&mut h, "check").unwrap(), "whole 4096");
            assert_eq!(h.changed.iter().filter(|c| **c).count(), 60);
            h.memory.page(77)[400] ^= 1;
            assert!(ask(&mut h, "check").unwrap_err().to_string().contains("page 77"));
            assert!(ask(&mut h, "write mixed 1 1").is_err() && ask(&mut h, "x").is_err());
        }
    }
}
