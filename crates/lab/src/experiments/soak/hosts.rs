//! What of a soak goes in virtual time: the policy, on simulated hosts whose VMs come and go, and of which all is changed
//! that can be (`ballast_sim::soak`). What mechanisms do is a model there; the real guests of the other part have them.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, Result, bail};
use ballast_policy::State;
use ballast_sim::{Scenario, run, soak};

use super::EVIDENCE;
use crate::figures::Outcome;
use crate::say;

/// Hosts for each minute of the soak: they take a tenth of it, or so.
const A_MINUTE: f64 = 4.0;
/// Of virtual time for each host: a day and a night.
const HOURS: u64 = 24;

/// Counts of all hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sums {
    hosts: u64,
    vms: u64,
    changes: u64,
    decisions: u64,
    refused: u64,
    low_ms: u64,
    overdrawn_ms: u64,
}

impl Sums {
    fn and(self, other: Sums) -> Sums {
        Sums {
            hosts: self.hosts + other.hosts,
            vms: self.vms + other.vms,
            changes: self.changes + other.changes,
            decisions: self.decisions + other.decisions,
            refused: self.refused + other.refused,
            low_ms: self.low_ms + other.low_ms,
            overdrawn_ms: self.overdrawn_ms + other.overdrawn_ms,
        }
    }

    /// Hours of virtual time.
    pub fn hours(&self) -> u64 {
        self.hosts * HOURS
    }

    /// What is reported of them.
    pub fn tell(&self, outcome: &mut Outcome) {
        outcome.figure("virtual_hours", self.hours() as f64);
        outcome.figure("virtual_vms", self.vms as f64);
        outcome.figure("virtual_changes", self.changes as f64);
        outcome.figure("virtual_decisions", self.decisions as f64);
        outcome.figure("virtual_refusals", self.refused as f64);
        outcome.figure("virtual_low_s", self.low_ms as f64 / 1e3);
        outcome.figure("virtual_overdrawn_s", self.overdrawn_ms as f64 / 1e3);
    }
}

/// Plays them, several at a time. Err: a promise was broken; with the seed, and the scenario where logs are kept.
pub fn play(minutes: f64, seed: u64) -> Result<Sums> {
    let hosts = (minutes * A_MINUTE).ceil() as u64;
    say::step(&format!("{hosts} simulated hosts of {HOURS} hours"));
    let (next, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let all = Mutex::new(Ok(Sums::default()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= hosts {
                        break;
                    }
                    let one = one(seed.wrapping_add(n), HOURS);
                    let mut all = all.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    match (&mut *all, one) {
                        (Ok(all), Ok(one)) => *all = all.and(one),
                        (all @ Ok(_), Err(e)) => {
                            over.store(true, Ordering::Relaxed);
                            *all = Err(e);
                        }
                        (Err(_), _) => {}
                    }
                }
            });
        }
    });
    all.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn one(seed: u64, hours: u64) -> Result<Sums> {
    let drawn = soak::draw(seed, hours);
    let file = format!("host-{seed}.toml");
    let scenario = Scenario::parse(Path::new(&file), &drawn.text)?;
    let mut sums = Sums { vms: drawn.vms as u64, changes: drawn.events as u64, ..Sums::default() };
    for result in run(&scenario, 1, &|_| {}) {
        let wrong = soak::wrong(&drawn, &result);
        if !wrong.is_empty() {
            std::fs::create_dir_all(EVIDENCE)?;
            let path = Path::new(EVIDENCE).join(&file);
            std::fs::write(&path, &drawn.text).with_context(|| path.display().to_string())?;
            bail!("simulated host, seed {seed} ({}): {}", path.display(), wrong.join("; "));
        }
        sums = sums.and(Sums {
            hosts: 1,
            decisions: result.measure.decisions,
            refused: result.measure.refused,
            low_ms: result.measure.state_ms[State::Low as usize],
            overdrawn_ms: result.measure.overdrawn_ms,
            ..Sums::default()
        });
    }
    Ok(sums)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_counted() {
        let (a, b) = (one(1, 1).unwrap(), one(2, 1).unwrap());
        assert!(a.hosts == 1 && a.vms > 0 && a.decisions > 1000, "{a:?}");
        let both = a.and(b);
        assert_eq!((both.hosts, both.decisions), (2, a.decisions + b.decisions));
        assert_eq!(both.hours(), 2 * HOURS);
    }
}
