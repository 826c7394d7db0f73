//! The holder process, from the side that starts it.

use std::collections::BTreeMap;
use std::ffi::OsString;

use anyhow::{Context, Result};

use super::super::child::Child;
use super::contents::Contents;

/// What memory to hold.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Rounded down to whole groups.
    pub mib: usize,
    /// Of the contents.
    pub seed: u64,
    /// Neighbours that are copied together.
    pub run: usize,
}

impl Shape {
    /// Pages that are held.
    pub fn pages(self) -> usize {
        self.contents().pages()
    }
    /// What is in them.
    pub fn contents(self) -> Contents {
        Contents::new(self.mib << 8, self.seed, self.run)
    }
}

/// Durations of single writes, microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Times {
    pub p50: f64,
    pub p99: f64,
}

/// The process. Killed when it is dropped.
pub struct Holder {
    child: Child,
    /// The VMM's, where it is paged.
    pub pid: u32,
}

impl Holder {
    /// Starts it with its memory mapped. `environment` is what the shim is told, if it is to be there.
    pub fn start(
        shape: Shape,
        file: bool,
        environment: &BTreeMap<&str, OsString>,
    ) -> Result<Holder> {
        let mut words = vec!["--mib".to_owned(), shape.mib.to_string()];
        words.extend(["--seed".to_owned(), shape.seed.to_string()]);
        words.extend(["--run".to_owned(), shape.run.to_string()]);
        words.extend(file.then(|| "--file".to_owned()));
        let child = Child::start("holder", &words, environment)?;
        let pid = child.pid;
        Ok(Holder { child, pid })
    }

    async fn ask(&mut self, line: &str) -> Result<String> {
        self.child.ask(line).await
    }

    /// All its memory is written.
    pub async fn fill(&mut self) -> Result<()> {
        self.ask("fill").await.map(drop)
    }

    /// The kernel's scanner may look at its memory from now on.
    pub async fn mergeable(&mut self) -> Result<()> {
        self.ask("mergeable").await.map(drop)
    }

    /// Whole memory as written, or an error that names a page that is not.
    pub async fn check(&mut self) -> Result<()> {
        self.ask("check").await.map(drop)
    }

    /// First writes to `count` pages of a kind ("twin", "zero", "unique").
    pub async fn write(&mut self, kind: &str, count: usize, seed: u64) -> Result<Times> {
        let answer = self.ask(&format!("write {kind} {count} {seed}")).await?;
        parse(&answer).with_context(|| format!("holder: '{answer}'"))
    }

    /// Err: it did not end well.
    pub async fn end(self) -> Result<()> {
        self.child.end().await
    }
}

fn parse(answer: &str) -> Option<Times> {
    let mut words = answer.strip_prefix("times ")?.split(' ').map(str::parse::<u64>);
    let count = words.next()?.ok()?;
    let mut us = || Some(words.next()?.ok()? as f64 / 1e3);
    (count > 0).then_some(Times { p50: us()?, p99: us()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        let t = parse("times 10 1500 2000 3000").unwrap();
        assert_eq!((t.p50, t.p99), (1.5, 2.0));
        for answer in ["times 10 1500", "times 0 0 0 0", "filled 3"] {
            assert!(parse(answer).is_none(), "{answer}");
        }
    }
}
