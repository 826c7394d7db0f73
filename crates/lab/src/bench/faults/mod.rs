//! What a fault on a reclaimed page costs: ours, against the kernel's swap-in of the same contents from
//! zram (lz4), through zswap, and from a file, in the same run, in random order.
//!
//! | file | what it is |
//! | --- | --- |
//! | `contents` | what the memory holds |
//! | `faulter` | the process that holds it, and reads it |
//! | `round` | its other end |
//! | `peer`, `ours` | one round of each |
//!
//! Nobody reclaims while pages are read: what is timed is the fault alone. Both sides read with one
//! thread.

mod contents;
mod faulter;
mod ours;
mod peer;
mod round;

use std::collections::BTreeMap;

use anyhow::{Context, Result};

use crate::figures::Outcome;
use crate::leftovers;
use crate::manager::disk_folder;
use crate::say;
use crate::stats::median;
use contents::{KINDS, Kind};
pub use faulter::{FaulterArgs, run as fault};
use ours::OurRound;
use peer::{PeerRound, TIERS, Tier};
use round::{Plan, Times};

/// Removed when it is dropped.
struct Folder(std::path::PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        // What cannot be removed is in use; its keeper removes it.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[derive(Default)]
struct Results {
    ours: BTreeMap<&'static str, Vec<OurRound>>,
    peers: BTreeMap<(&'static str, Tier), Vec<PeerRound>>,
}

/// `tiers` is laid over the manager's default configuration (TOML).
pub async fn run(quick: bool, tiers: &str) -> Result<Outcome> {
    let (mib, reads, repeats) = if quick { (32, 6000, 1) } else { (128, 24_000, 3) };
    let folder = Folder(leftovers::private_folder(&disk_folder())?);
    let mut results = Results::default();
    for repeat in 0..repeats {
        for kind in KINDS {
            let plan = Plan { mib, reads, seed: 31 + repeat };
            // Nobody always comes first.
            if repeat % 2 == 0 {
                ours(kind, &plan, tiers, &mut results).await?;
            }
            for tier in TIERS {
                let round = peer::round(tier, kind, &folder.0, &plan).await;
                let told = || format!("{} pages, {}", kind.name(), tier.name());
                if let Some(round) = round.with_context(told)? {
                    say::detail(&format!("{}: {}", told(), line(&round.times)));
                    results.peers.entry((kind.name(), tier)).or_default().push(round);
                }
            }
            if repeat % 2 == 1 {
                ours(kind, &plan, tiers, &mut results).await?;
            }
        }
    }
    Ok(evaluate(&results))
}

async fn ours(kind: Kind, plan: &Plan, tiers: &str, results: &mut Results) -> Result<()> {
    let told = || format!("{} pages, Ballast", kind.name());
    let round = ours::round(kind, plan, tiers).await.with_context(told)?;
    say::detail(&format!(
        "{}: {}; {:.0}% compressed, {:.0}% swapped",
        told(),
        line(&round.times),
        100.0 * round.compressed,
        100.0 * round.swapped
    ));
    results.ours.entry(kind.name()).or_default().push(round);
    Ok(())
}

fn line(times: &Times) -> String {
    format!("p50 {:.1} us, p99 {:.1} us ({} faults)", times.p50, times.p99, times.count)
}

fn middle<T>(rounds: &[T], of: impl Fn(&T) -> f64) -> f64 {
    median(&rounds.iter().map(of).collect::<Vec<_>>())
}

fn evaluate(results: &Results) -> Outcome {
    let mut outcome = Outcome::new("faults");
    for (kind, rounds) in &results.ours {
        let (p50, p99) = (middle(rounds, |r| r.times.p50), middle(rounds, |r| r.times.p99));
        outcome.figure(&format!("{kind}_ballast_p50_us"), p50);
        outcome.figure(&format!("{kind}_ballast_p99_us"), p99);
        outcome.figure(&format!("{kind}_ballast_compressed"), middle(rounds, |r| r.compressed));
        outcome.figure(&format!("{kind}_ballast_swapped"), middle(rounds, |r| r.swapped));
        let in_memory = middle(rounds, |r| r.swapped) < 0.5;
        for tier in TIERS {
            let Some(peers) = results.peers.get(&(*kind, tier)) else { continue };
            let name = tier.name();
            let (their_p50, their_p99) =
                (middle(peers, |r| r.times.p50), middle(peers, |r| r.times.p99));
            outcome.figure(&format!("{kind}_{name}_p50_us"), their_p50);
            outcome.figure(&format!("{kind}_{name}_p99_us"), their_p99);
            let taken = middle(peers, |r| r.taken);
            if taken.is_finite() {
                outcome.figure(&format!("{kind}_{name}_memory_taken"), taken);
            }
            let ratios = [("p50", p50 / their_p50), ("p99", p99 / their_p99)];
            for (part, ratio) in ratios {
                // A file is no match for what was kept in memory; and what we have in a file is
                // compared with both.
                if tier == Tier::Disk && in_memory {
                    outcome.figure(&format!("{kind}_{part}_of_{name}"), ratio);
                } else {
                    outcome.at_most(&format!("{kind}_{part}_of_{name}"), ratio, 1.0);
                }
            }
        }
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results(ours: f64, swapped: f64, theirs: f64) -> Results {
        let times = |p50: f64| Times { count: 100.0, p50, p99: p50 * 3.0 };
        let mut results = Results::default();
        let round = OurRound { times: times(ours), compressed: 1.0 - swapped, swapped };
        results.ours.insert("half", vec![round]);
        for tier in [Tier::Zram, Tier::Disk] {
            let round = PeerRound { times: times(theirs), taken: 0.5 };
            results.peers.insert(("half", tier), vec![round]);
        }
        results
    }

    #[test]
    fn slower_than_the_kernel_is_a_target_missed() {
        assert!(evaluate(&results(4.0, 0.0, 8.0)).ok);
        let slow = evaluate(&results(9.0, 0.0, 8.0));
        assert!(!slow.ok && !slow.targets["half_p99_of_zram"].met);
        assert_eq!(slow.figures["half_p50_of_disk"], 1.125);
        // What lies in a file is held against the kernel's file, too.
        assert!(evaluate(&results(9.0, 1.0, 8.0)).targets.contains_key("half_p50_of_disk"));
    }
}
