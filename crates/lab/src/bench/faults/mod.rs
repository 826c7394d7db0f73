//! What a fault on a reclaimed page costs: ours, against the kernel's swap-in of the same contents from
//! zram (lz4), through zswap, and from a file, in the same run: in random order, and by address.
//!
//! | file | what it is |
//! | --- | --- |
//! | `contents` | what the memory holds |
//! | `hogs` | who else wants the processors |
//! | `faulter` | the process that holds it, and reads it |
//! | `round` | its other end |
//! | `peer`, `ours`, `floor` | one round of each |
//!
//! `floor` is what a fault costs at least that user space answers: how far the kernel's swap is out of reach.
//!
//! Nobody reclaims while pages are read: what is timed is the fault alone. Both sides read with one
//! thread. In the case "busy", others want every processor meanwhile: then it counts how soon those
//! run whom a fault has to wait for. In the case "giving", another thread of the process gives up page after page
//! of what it has besides, as a VMM does while a balloon is filled: the kernel refuses us for as long as we have not
//! heard of one. In the case "sequential", pages that are brought back before they
//! are wanted cost their readers next to nothing, so there the mean of all reads is what counts.

mod contents;
mod faulter;
mod floor;
mod hogs;
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
use contents::Kind;
pub use faulter::{FaulterArgs, run as fault};
use floor::Waits;
use ours::OurRound;
use peer::{ONE_BY_ONE, PeerRound, TIERS, Tier};
use round::{Beside, Order, Plan, Times};

/// Removed when it is dropped.
struct Folder(std::path::PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        // What cannot be removed is in use; its keeper removes it.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
struct Case {
    name: &'static str,
    kind: Kind,
    beside: Beside,
    order: Order,
}

impl Case {
    const fn new(name: &'static str, kind: Kind) -> Case {
        Case { name, kind, beside: Beside::Nothing, order: Order::Random }
    }

    fn peers(self) -> &'static [Tier] {
        if self.order == Order::Random { &TIERS[..ONE_BY_ONE] } else { &TIERS }
    }
}

const SEQUENTIAL: &str = "sequential";
const CASES: [Case; 7] = [
    Case::new("half", Kind::Half),
    Case::new("quarter", Kind::Quarter),
    Case::new("random", Kind::Random),
    Case::new("filled", Kind::Filled),
    Case { beside: Beside::Busy, ..Case::new("busy", Kind::Half) },
    Case { beside: Beside::Giving, ..Case::new("giving", Kind::Half) },
    Case { order: Order::Sequential, ..Case::new(SEQUENTIAL, Kind::Half) },
];

#[derive(Default)]
struct Results {
    ours: BTreeMap<(&'static str, ours::Tier), Vec<OurRound>>,
    peers: BTreeMap<(&'static str, Tier), Vec<PeerRound>>,
    floors: BTreeMap<(&'static str, Waits), Vec<Times>>,
}

/// Tiers that the kernel lacks are left out.
pub(super) async fn run(quick: bool) -> Result<Outcome> {
    let (mib, reads, repeats) = if quick { (32, 5000, 1) } else { (128, 20_000, 3) };
    let folder = Folder(leftovers::private_folder(&disk_folder())?);
    let mut results = Results::default();
    for repeat in 0..repeats {
        for case in CASES {
            let Case { beside, order, .. } = case;
            let plan = Plan { mib, reads, seed: 31 + repeat, beside, order };
            // Nobody always comes first.
            if repeat % 2 == 0 {
                ours(case, &plan, &mut results).await?;
            }
            for &tier in case.peers() {
                let round = peer::round(tier, case.kind, &folder.0, &plan).await;
                let told = || format!("{} pages, {}", case.name, tier.name());
                if let Some(round) = round.with_context(told)? {
                    say::detail(&format!("{}: {}", told(), line(&round.times)));
                    results.peers.entry((case.name, tier)).or_default().push(round);
                }
            }
            let has_floor = order == Order::Random && beside != Beside::Giving;
            if case.kind == Kind::Half && has_floor {
                for waits in Waits::ALL {
                    let times = floor::round(waits, case.kind, &plan).await?;
                    say::detail(&format!(
                        "{} pages, {}: {}",
                        case.name,
                        waits.name(),
                        line(&times)
                    ));
                    results.floors.entry((case.name, waits)).or_default().push(times);
                }
            }
            if repeat % 2 == 1 {
                ours(case, &plan, &mut results).await?;
            }
        }
    }
    let mut outcome = evaluate(&results);
    outcome.figure("zswap_is_lz4", f64::from(u8::from(peer::zswap_compressor() == "lz4")));
    Ok(outcome)
}

async fn ours(case: Case, plan: &Plan, results: &mut Results) -> Result<()> {
    for tier in [ours::Tier::Compressed, ours::Tier::Swap] {
        let told = || format!("{} pages, {}", case.name, tier.name());
        let round = ours::round(tier, case.kind, plan).await.with_context(told)?;
        say::detail(&format!(
            "{}: {}; {:.0}% compressed, {:.0}% swapped",
            told(),
            line(&round.times),
            100.0 * round.compressed,
            100.0 * round.swapped
        ));
        results.ours.entry((case.name, tier)).or_default().push(round);
    }
    Ok(())
}

fn line(times: &Times) -> String {
    let Times { count, p50, p99, mean, given } = times;
    let beside =
        if *given > 0.0 { format!(", {given:.0} pages/s given up") } else { String::new() };
    format!("p50 {p50:.1} us, p99 {p99:.1} us, mean {mean:.1} us ({count} reads{beside})")
}

fn middle<T>(rounds: &[T], of: impl Fn(&T) -> f64) -> f64 {
    median(&rounds.iter().map(of).collect::<Vec<_>>())
}

/// A figure's name, and how to get it.
type Part = (&'static str, fn(&Times) -> f64);
const PARTS: [Part; 3] = [("p50", |t| t.p50), ("p99", |t| t.p99), ("mean", |t| t.mean)];

fn evaluate(results: &Results) -> Outcome {
    let mut outcome = Outcome::new("faults");
    for ((kind, waits), floor) in &results.floors {
        times(&mut outcome, kind, waits.name(), floor);
    }
    for ((kind, tier), rounds) in &results.ours {
        let ours = tier.name();
        let mine: Vec<Times> = rounds.iter().map(|r| r.times).collect();
        let compressed = middle(rounds, |r| r.compressed);
        outcome.figure(&format!("{kind}_{ours}_compressed"), compressed);
        outcome.figure(&format!("{kind}_{ours}_swapped"), middle(rounds, |r| r.swapped));
        times(&mut outcome, kind, ours, &mine);
        if let Some(floor) = results.floors.get(&(*kind, Waits::Asleep)) {
            for (part, of) in PARTS {
                let ratio = middle(&mine, of) / middle(floor, of);
                outcome.figure(&format!("{kind}_{part}_{ours}_of_floor"), ratio);
            }
        }
        for peer in TIERS {
            against(&mut outcome, results, (kind, *tier), peer);
        }
    }
    outcome
}

/// One of our tiers against one of the peers.
fn against(
    outcome: &mut Outcome,
    results: &Results,
    (kind, tier): (&'static str, ours::Tier),
    peer: Tier,
) {
    let Some(rounds) = results.ours.get(&(kind, tier)) else { return };
    // Memory is held against memory, files against files. (What does not compress we have in
    // a file, and zram in memory, of which it takes as much as it saves.)
    let alike = (middle(rounds, |r| r.compressed) > 0.5) == peer.is_memory();
    // One slow read of a thousand is not what random reads are about, nor are the cheap ones
    // what a walk is.
    let counts = |part: &str| (part == "mean") == (kind == SEQUENTIAL);
    let name = |part: &str| format!("{kind}_{part}_{}_of_{}", tier.name(), peer.name());
    let Some(peers) = results.peers.get(&(kind, peer)) else {
        // What the kernel does not have is no peer that was beaten.
        let is_missing = !results.peers.contains_key(&(kind, peer.twin()));
        if is_missing && alike && TIERS[..ONE_BY_ONE].contains(&peer) {
            for (part, _) in PARTS.iter().filter(|(part, _)| counts(part)) {
                outcome.at_most(&name(part), f64::NAN, 1.0);
            }
        }
        return;
    };
    let mine: Vec<Times> = rounds.iter().map(|r| r.times).collect();
    let theirs: Vec<Times> = peers.iter().map(|r| r.times).collect();
    times(outcome, kind, peer.name(), &theirs);
    let taken = middle(peers, |r| r.taken);
    if taken.is_finite() {
        outcome.figure(&format!("{kind}_{}_memory_taken", peer.name()), taken);
    }
    for (part, of) in PARTS {
        let ratio = middle(&mine, of) / middle(&theirs, of);
        if alike && counts(part) && is_best(results, kind, peer) {
            outcome.at_most(&name(part), ratio, 1.0);
        } else {
            outcome.figure(&name(part), ratio);
        }
    }
}

/// Whether a peer is no slower than with its other setting. A walk is measured with both.
fn is_best(results: &Results, kind: &'static str, peer: Tier) -> bool {
    let mean = |tier| {
        let rounds = results.peers.get(&(kind, tier));
        rounds.map_or(f64::INFINITY, |rounds| middle(rounds, |r| r.times.mean))
    };
    mean(peer) <= mean(peer.twin())
}

fn times(outcome: &mut Outcome, kind: &str, name: &str, times: &[Times]) {
    for (part, of) in PARTS {
        outcome.figure(&format!("{kind}_{name}_{part}_us"), middle(times, of));
    }
    let given = middle(times, |t| t.given);
    if given > 0.0 {
        outcome.figure(&format!("{kind}_{name}_given_per_s"), given);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results(tier: ours::Tier, ours: f64, theirs: f64) -> Results {
        let times = |p50: f64| Times { count: 100.0, p50, p99: p50 * 3.0, mean: p50, given: 0.0 };
        let mut results = Results::default();
        let compressed = if tier == ours::Tier::Compressed { 1.0 } else { 0.0 };
        let round = OurRound { times: times(ours), compressed, swapped: 1.0 - compressed };
        results.ours.insert(("half", tier), vec![round]);
        for tier in [Tier::Zram, Tier::Zswap, Tier::Disk] {
            let round = PeerRound { times: times(theirs), taken: 0.5 };
            results.peers.insert(("half", tier), vec![round]);
        }
        results
    }

    #[test]
    fn memory_is_held_against_memory_and_files_against_files() {
        assert!(evaluate(&results(ours::Tier::Compressed, 4.0, 8.0)).ok);
        let slow = evaluate(&results(ours::Tier::Compressed, 9.0, 8.0));
        assert!(!slow.ok && !slow.targets["half_p99_ballast_of_zram"].met);
        assert_eq!(slow.figures["half_p50_ballast_of_disk"], 1.125);
        let file = evaluate(&results(ours::Tier::Swap, 9.0, 8.0));
        assert!(!file.targets["half_p50_ballast_swap_of_disk"].met);
        assert_eq!(file.figures["half_p50_ballast_swap_of_zram"], 1.125);
    }

    #[test]
    fn a_peer_that_the_kernel_does_not_have_was_not_beaten() {
        let mut without = results(ours::Tier::Compressed, 4.0, 8.0);
        without.peers.remove(&("half", Tier::Zram));
        let outcome = evaluate(&without);
        assert!(!outcome.ok && outcome.targets["half_p50_ballast_of_zswap"].met);
        assert!(!outcome.targets["half_p50_ballast_of_zram"].met);
        assert!(!outcome.targets["half_p99_ballast_of_zram"].met);
        // Files are held against files, whatever else there is.
        let mut without = results(ours::Tier::Swap, 4.0, 8.0);
        without.peers.retain(|(_, tier), _| *tier == Tier::Disk);
        assert!(evaluate(&without).ok);
    }

    #[test]
    fn a_walk_is_held_against_the_better_setting_of_a_peer() {
        let mut both = Results::default();
        let times = |mean: f64| Times { count: 9.0, p50: 1.0, p99: 1.0, mean, given: 0.0 };
        let round = OurRound { times: times(3.0), compressed: 0.0, swapped: 1.0 };
        both.ours.insert((SEQUENTIAL, ours::Tier::Swap), vec![round]);
        for (tier, mean) in [(Tier::Disk, 9.0), (Tier::DiskDefault, 2.0)] {
            let round = PeerRound { times: times(mean), taken: 0.5 };
            both.peers.insert((SEQUENTIAL, tier), vec![round]);
        }
        let outcome = evaluate(&both);
        assert_eq!(outcome.targets.len(), 1);
        assert!(!outcome.targets["sequential_mean_ballast_swap_of_disk_default"].met);
        assert!(outcome.figures["sequential_mean_ballast_swap_of_disk"] < 1.0);
    }
}
