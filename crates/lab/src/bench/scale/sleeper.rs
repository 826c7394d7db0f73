//! A process that stands in for a large VMM that does little: a shared file as its RAM. It does what standard input says, a line at a time, and answers each line
//! with one; when its input ends, it ends.
//!
//! | command | does | answers |
//! | --- | --- | --- |
//! | `touch COUNT SEED` | writes to so many pages, chosen at random | `touched COUNT` |
//! | `fill SEED` | writes to all pages, each unlike any other | `filled PAGES` |
//! | `check` | compares all those pages with what it wrote | `whole PAGES` |

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};

use super::super::child;
use super::super::memory::Memory;

#[allow(missing_docs, reason = "clap would print it in place of what the command says of itself")]
#[derive(Clone, Debug, clap::Args)]
pub struct SleeperArgs {
    #[arg(long)]
    mib: usize,
}

/// Nothing but commands until the input ends.
pub fn run(args: &SleeperArgs) -> Result<()> {
    let memory = Memory::map(args.mib << 8, true)?;
    let mut sleeper = Sleeper { memory, written: BTreeMap::new() };
    child::serve(|words| sleeper.obey(words))
}

struct Sleeper {
    memory: Memory,
    /// What was written last, by page.
    written: BTreeMap<usize, u64>,
}

impl Sleeper {
    fn obey(&mut self, words: &[&str]) -> Result<String> {
        match *words {
            ["touch", count, seed] => {
                let count: usize = count.parse()?;
                let mut random: u64 = seed.parse::<u64>()? | 1;
                for _ in 0..count {
                    // A linear congruential step (Knuth's MMIX constants); its high bits are good enough to choose by.
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let page = (random >> 33) as usize % self.memory.pages();
                    self.memory.page(page)[7] = random;
                    self.written.insert(page, random);
                }
                Ok(format!("touched {count}"))
            }
            ["fill", seed] => {
                let seed: u64 = seed.parse()?;
                for page in 0..self.memory.pages() {
                    let value = (seed << 32 | page as u64) + 1;
                    self.memory.page(page)[7] = value;
                    self.written.insert(page, value);
                }
                Ok(format!("filled {}", self.memory.pages()))
            }
            ["check"] => {
                for (&page, &value) in &self.written {
                    let found = self.memory.page(page)[7];
                    ensure!(found == value, "page {page} is not as written");
                }
                Ok(format!("whole {}", self.written.len()))
            }
            _ => bail!("unknown command"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_touched_is_checked() {
        let memory = Memory::map(4096, true).unwrap();
        let mut sleeper = Sleeper { memory, written: BTreeMap::new() };
        assert_eq!(sleeper.obey(&["touch", "40", "3"]).unwrap(), "touched 40");
        let pages = sleeper.written.len();
        assert!((10..=40).contains(&pages), "{pages}");
        assert_eq!(sleeper.obey(&["check"]).unwrap(), format!("whole {pages}"));
        assert_eq!(sleeper.obey(&["fill", "9"]).unwrap(), "filled 4096");
        assert_eq!(sleeper.obey(&["check"]).unwrap(), "whole 4096");
        let some = *sleeper.written.keys().next().unwrap();
        sleeper.memory.page(some)[7] ^= 1;
        assert!(sleeper.obey(&["check"]).is_err() && sleeper.obey(&["touch"]).is_err());
    }
}
