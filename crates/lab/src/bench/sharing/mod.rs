//! Page sharing against the kernel's own (KSM): the same contents, once in private memory that KSM is
//! asked to merge, once in the RAM file of a paged process.
//!
//! | file | what it is |
//! | --- | --- |
//! | `contents` | what the memory holds |
//! | `holder`, `hold` | the process that holds it, and its other end |
//! | `ksm` | the kernel's settings and counters |
//! | `peer`, `ours` | one round of each |
//! | `watch`, `cpu` | a scanner at work, and what threads take of processors |
//! | `round` | what a round showed |

pub(super) mod contents;
pub(crate) mod cpu;
mod hold;
mod holder;
pub(crate) mod ksm;
mod ours;
mod peer;
mod round;
mod watch;

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};

use crate::figures::Outcome;
use crate::say;
pub(super) use hold::{Holder, Shape};
pub use holder::{HolderArgs, run as hold};
pub use ksm::keep as keep_ksm;
use ksm::{Ksm, MODES};
use ours::OurRound;
use round::{FIGURES, Plan, Round};

const SEED: u64 = 41;
/// Neighbours that are copied together: in sample guests, pages that are shared lie in runs of about
/// ten (mappings of the store against pages).
const RUN: usize = 8;

/// The targets: parts of the peer's CPU.
const MERGE_TARGET: f64 = 1.0 / 5.0;
const QUIET_TARGET: f64 = 1.0 / 20.0;
/// With the kernel's default of 65,530 mappings, a third of this and more can be shared page by page.
const SCATTERED_MIB: usize = 256;

/// Fails where there is no KSM to compare with.
pub(super) async fn run(quick: bool) -> Result<Outcome> {
    let plan = if quick {
        Plan { mib: 128, writes: 2000, passes: 2.0 }
    } else {
        Plan { mib: 512, writes: 10_000, passes: 2.0 }
    };
    // The same contents for all scanners.
    let shape = Shape { mib: plan.mib, seed: SEED, run: RUN };
    let possible = shape.contents().saving();
    let (mut ours, mut peers) = (Ours::default(), BTreeMap::new());
    let ksm = Ksm::take()?;
    ours.round(shape, &plan).await?;
    for mode in MODES {
        let told = || format!("KSM, {}", mode.name);
        let Some(round) = peer::round(&ksm, mode, shape, &plan).await.with_context(told)? else {
            say::detail(&format!("{}: this kernel does not have it", told()));
            continue;
        };
        ksm.forget()?;
        say::detail(&format!("{}: {}", told(), round.line(possible)));
        peers.insert(mode.name, round);
        ours.round(shape, &plan).await?;
    }
    ksm.end()?;
    evaluate(&peers, ours, possible)
}

/// Rounds of Ballast, before, between and after those of the kernel: a shared host is half as fast within minutes.
#[derive(Default)]
struct Ours {
    in_runs: Vec<OurRound>,
    /// The kernel's scanner cares little how copies lie; ours does: each page is a mapping of its own.
    scattered: Vec<OurRound>,
}

impl Ours {
    async fn round(&mut self, shape: Shape, plan: &Plan) -> Result<()> {
        let ours = ours::round(shape, plan).await.context("Ballast")?;
        say::detail(&format!("Ballast: {}", ours.round.line(shape.contents().saving())));
        self.in_runs.push(ours);
        // So few of them that vm.max_map_count allows for all.
        let few = plan.mib.min(SCATTERED_MIB);
        let (plan, shape) = (Plan { mib: few, ..*plan }, Shape { run: 1, mib: few, ..shape });
        let ours = ours::round(shape, &plan).await.context("Ballast, all scattered")?;
        let line = ours.round.line(shape.contents().saving());
        say::detail(&format!("Ballast, all scattered: {line}"));
        self.scattered.push(ours);
        Ok(())
    }
}

/// The round of the median CPU time to merge, of two the dearer one; and the least and the most that one took.
fn median(mut rounds: Vec<OurRound>) -> Result<(OurRound, [f64; 2])> {
    rounds.sort_by(|a, b| a.round.merge.cpu_s.total_cmp(&b.round.merge.cpu_s));
    let cpu_s = |round: Option<&OurRound>| round.map_or(f64::NAN, |r| r.round.merge.cpu_s);
    let ends = [cpu_s(rounds.first()), cpu_s(rounds.last())];
    ensure!(!rounds.is_empty(), "no round of Ballast");
    Ok((rounds.swap_remove(rounds.len() / 2), ends))
}

fn evaluate(peers: &BTreeMap<&str, Round>, ours: Ours, possible: usize) -> Result<Outcome> {
    let mut outcome = Outcome::new("sharing");
    let ((ours, [least, most]), (scattered, _)) = (median(ours.in_runs)?, median(ours.scattered)?);
    outcome.figure("ballast_merge_cpu_least_s", least);
    outcome.figure("ballast_merge_cpu_most_s", most);
    let scattered = &scattered.round;
    outcome.figure("possible_mib", possible as f64 / 256.0);
    let mine = &ours.round;
    let scanners = peers.iter().map(|(name, round)| (format!("ksm_{name}"), round));
    let own = [("ballast", mine), ("ballast_scattered", scattered)];
    let own = own.map(|(name, round)| (name.to_owned(), round));
    for (scanner, round) in scanners.chain(own) {
        for (name, of) in FIGURES {
            outcome.figure(&format!("{scanner}_{name}"), of(round));
        }
    }
    outcome.figure("ballast_shim_cpu_s", ours.shim_cpu_s);
    outcome.figure("ballast_manager_cpu_s", ours.manager_cpu_s);
    outcome.figure("ballast_measured_mib", ours.measured / (1u64 << 20) as f64);

    ensure!(!peers.is_empty(), "no peer to compare with");
    // Against the peer's best setting, figure by figure.
    let best = |what: fn(&Round) -> f64| peers.values().map(what).fold(f64::INFINITY, f64::min);
    let merge: fn(&Round) -> f64 = |r| r.merge.cpu_s / r.merge.saved;
    let quiet: fn(&Round) -> f64 = |r| r.quiet.cpu_s / r.quiet.passes;
    let saved: fn(&Round) -> f64 = |r| r.saved;
    let most = peers.values().map(saved).fold(0.0, f64::max);
    outcome.at_most("merge_cpu_of_ksm", merge(mine) / best(merge), MERGE_TARGET);
    outcome.at_most("merge_cpu_of_ksm_scattered", merge(scattered) / best(merge), MERGE_TARGET);
    if let Some(default) = peers.get("default") {
        outcome.at_most("merge_cpu_of_ksm_default", merge(mine) / merge(default), MERGE_TARGET);
    }
    outcome.at_most("quiet_cpu_of_ksm", quiet(mine) / best(quiet), QUIET_TARGET);
    outcome.at_least("saved_of_ksm", saved(mine) / most, 1.0);
    Ok(outcome)
}
