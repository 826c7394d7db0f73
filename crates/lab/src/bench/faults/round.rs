//! One process, filled, reclaimed, and read back.

use std::collections::BTreeMap;
use std::ffi::OsString;

use anyhow::{Context, Result, bail, ensure};

use super::super::child::Child;
use super::contents::Kind;
use super::floor::Waits;
use super::hogs::Hogs;

/// In which order pages are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Random,
    /// By address.
    Sequential,
}

impl Order {
    const ALL: [Order; 2] = [Order::Random, Order::Sequential];

    fn name(self) -> &'static str {
        match self {
            Order::Random => "random",
            Order::Sequential => "sequential",
        }
    }

    /// Err: there is no such order.
    pub fn named(name: &str) -> Result<Order> {
        match Order::ALL.into_iter().find(|order| order.name() == name) {
            Some(order) => Ok(order),
            None => bail!("no order '{name}'"),
        }
    }
}

/// How much is done.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Memory of the process.
    pub mib: usize,
    /// Pages that are read, of those that are out.
    pub reads: usize,
    /// Of contents and order.
    pub seed: u64,
    /// In which they are read.
    pub order: Order,
    /// What goes on while it reads.
    pub beside: Beside,
}

/// What goes on beside the reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beside {
    Nothing,
    /// Others want all processors.
    Busy,
    /// The process gives up page after page of what it has besides, as a VMM does for a balloon that is filled.
    Giving,
}

impl Plan {
    /// MiB of the process that are given up, and hold nothing.
    pub fn spare_mib(&self) -> usize {
        if self.beside == Beside::Giving { 4 } else { 0 }
    }
}

/// Durations of single accesses, microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Times {
    /// Accesses.
    pub count: f64,
    pub p50: f64,
    pub p99: f64,
    pub mean: f64,
    /// Pages a second that were given up meanwhile.
    pub given: f64,
}

/// The process, from the side that starts it.
pub struct Faulter {
    child: Child,
}

impl Faulter {
    /// `file`: its memory is a shared file, for the shim that `environment` preloads.
    pub fn start(
        plan: &Plan,
        kind: Kind,
        file: bool,
        environment: &BTreeMap<&str, OsString>,
    ) -> Result<Faulter> {
        let mut words = vec!["--mib".to_owned(), plan.mib.to_string()];
        words.extend(["--seed".to_owned(), plan.seed.to_string()]);
        words.extend(["--kind".to_owned(), kind.name().to_owned()]);
        words.extend(["--spare-mib".to_owned(), plan.spare_mib().to_string()]);
        words.extend(file.then(|| "--file".to_owned()));
        Ok(Faulter { child: Child::start("faulter", &words, environment)? })
    }

    /// For its cgroup.
    pub fn pid(&self) -> u32 {
        self.child.pid
    }

    /// All its memory is written.
    pub async fn fill(&mut self) -> Result<()> {
        self.child.ask("fill").await.map(drop)
    }

    /// Asks the kernel to reclaim all its memory; some pages may stay.
    pub async fn page_out(&mut self) -> Result<()> {
        self.child.ask("pageout").await.map(drop)
    }

    /// Takes all its memory away, for a thread of its own to bring back.
    pub async fn keep_aside(&mut self, waits: Waits) -> Result<()> {
        self.child.ask(waits.command()).await.map(drop)
    }

    /// Reads, then compares all memory with what was written.
    pub async fn read(mut self, plan: &Plan) -> Result<Times> {
        let answer = self.child.ask("out").await?;
        let out: usize =
            answer.strip_prefix("out ").and_then(|n| n.parse().ok()).context(answer.clone())?;
        // What stayed in memory says nothing; a few pages always do.
        ensure!(out >= plan.reads, "only {out} of {} pages are out", plan.mib << 8);
        let hogs = (plan.beside == Beside::Busy).then(Hogs::start);
        if plan.beside == Beside::Giving {
            self.child.ask("give").await?;
        }
        let answer = self
            .child
            .ask(&format!("read {} {} {}", plan.reads, plan.seed, plan.order.name()))
            .await?;
        drop(hogs);
        let times = parse(&answer).with_context(|| format!("faulter: '{answer}'"))?;
        ensure!(plan.beside != Beside::Giving || times.given > 0.0, "nothing was given up");
        self.child.ask("check").await?;
        self.child.end().await?;
        Ok(times)
    }
}

fn parse(answer: &str) -> Option<Times> {
    let mut words = answer.strip_prefix("times ")?.split(' ').map(str::parse::<u64>);
    let count = words.next()?.ok()?;
    let mut us = || Some(words.next()?.ok()? as f64 / 1e3);
    let (p50, p99, _max, mean) = (us()?, us()?, us()?, us()?);
    let given = words.next()?.ok()? as f64;
    (count > 0).then_some(Times { count: count as f64, p50, p99, mean, given })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        let times = Times { count: 10.0, p50: 1.5, p99: 2.0, mean: 1.6, given: 7.0 };
        assert_eq!(parse("times 10 1500 2000 3000 1600 7"), Some(times));
        for answer in ["times 10 1500 2000 3000 1600", "times 0 0 0 0 0 0", "filled 3"] {
            assert!(parse(answer).is_none(), "{answer}");
        }
    }
}
