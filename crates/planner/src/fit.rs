//! How many VMs like these fit into the host's memory.
//!
//! The VMs of a slot are taken in a random order until memory is full. Where all of them fit, more
//! are added: each is one of those VMs again, with probability p at the same moment as the others,
//! else at a moment of its own. So a VM that is added is as much in step with the others as they are
//! with one another: with a mean correlation r between N VMs, a copy in step has the mean correlation
//! (1 + (N - 1) r) / N with them, its original included, and
//!
//! ```text
//! p = r N / (1 + (N - 1) r)
//! ```
//!
//! makes that r. VMs that peak together (r = 1) stay together, p = 1; independent ones (r = 0) stay
//! independent, p = 0. Of a single VM nothing is known: p = 1.
//!
//! Nor are there more than admission control lets in: each is promised its min and its overhead.

use fastrand::Rng;
use serde::Serialize;

use crate::Question;
use crate::curve::influence;
use crate::history::{History, Slot};
use crate::series::{Tally, block_len, correlation_time, draw, quantile, vouched};

/// VMs that fit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Fit {
    /// There now: in the last slot.
    pub now: u64,
    /// That fit at the risk asked for, with the band of the confidence asked for.
    pub vms: u64,
    /// The largest number that the record vouches for: with the confidence asked for, no more than the risk asked for is
    /// run with so many. None where the record is too short to tell.
    pub low: Option<u64>,
    /// The most that it allows.
    pub high: u64,
    /// The factor with so many, sum of sizes / budget.
    pub factor: f64,
    /// The mean correlation between the needs of two VMs, 0 to 1. None where there were not two whose needs moved.
    pub correlation: Option<f64>,
    /// With which probability a VM that is added peaks with the others.
    pub in_step: f64,
    /// So many fit at least; more were not tried.
    pub at_least: bool,
}

/// More are not tried: no host has as many, and some 20,000 draws of them are done within seconds.
const MOST: usize = 10_000;
/// Draws per slot at least, and in all about.
const DRAWS: usize = 5;
const ALL_DRAWS: usize = 20_000;
const BAND_DRAWS: usize = 400;

/// How many VMs like those of `history` its host's memory holds.
pub fn fit(question: &Question, history: &History) -> Fit {
    let mut rng = Rng::with_seed(question.seed);
    let slots = &history.slots;
    let mean_vms = slots.iter().map(|s| s.most as f64).sum::<f64>() / slots.len() as f64;
    let correlation = mean_correlation(history);
    let in_step = match correlation {
        None => 1.0,
        Some(r) => (r * mean_vms / (1.0 + (mean_vms - 1.0) * r)).clamp(0.0, 1.0),
    };
    // Where each VM was, for moments of its own.
    let mut seen: Vec<Vec<u64>> = vec![Vec::new(); history.vms.len()];
    for slot in slots {
        slot.needs.iter().for_each(|(vm, need)| seen[*vm].push(*need));
    }
    let each = (ALL_DRAWS / slots.len()).max(DRAWS);
    // Whatever the budget was then, it is today's memory that they are to fit into.
    let budget = slots.last().map_or(0, |slot| slot.budget);
    let held: Vec<Vec<usize>> = slots
        .iter()
        .map(|slot| {
            (0..each).map(|_| hold(&mut rng, slot, budget, history, &seen, in_step)).collect()
        })
        .collect();

    // So many fit, and so often: a number is its own rank.
    let most = held.iter().flatten().max().copied().unwrap_or(0);
    let mut tally = Tally::new(most + 1);
    let mut at_risk = |slots: &mut dyn Iterator<Item = usize>| {
        tally.clear();
        slots.flat_map(|i| &held[i]).for_each(|n| tally.add(*n));
        tally.quantiles(&[question.risk])[0] as u64
    };
    let vms = at_risk(&mut (0..slots.len()));
    let means: Vec<f64> =
        held.iter().map(|h| h.iter().sum::<usize>() as f64 / h.len() as f64).collect();
    // What VMs that are added need at moments of their own has no memory, and what was recorded has as much as before.
    let time = correlation_time(&means).max(influence(history));
    let block = block_len(time);
    let mut again: Vec<f64> = (0..BAND_DRAWS)
        .map(|_| at_risk(&mut draw(&mut rng, slots.len(), block).into_iter()) as f64)
        .collect();
    again.sort_by(f64::total_cmp);
    let low = quantile(&again, 1.0 - question.confidence);
    let high = quantile(&again, question.confidence) as u64;
    let mut all: Vec<f64> = held.iter().flatten().map(|&n| n as f64).collect();
    all.sort_by(f64::total_cmp);
    // A slot is one look, however often it was drawn from.
    let looks = slots.len() as f64 / time;
    let low = vouched(&all, looks, question.risk, question.confidence).map(|v| v.min(low) as u64);
    let facts = history.facts();
    Fit {
        now: slots.last().map_or(0, |slot| slot.most as u64),
        vms,
        low: low.map(|low| low.min(vms)),
        high: high.max(vms),
        factor: vms as f64 * facts.size_mean as f64 / facts.budget.max(1) as f64,
        correlation,
        in_step,
        at_least: vms as usize >= MOST,
    }
}

/// How many VMs as in a slot `budget` holds, in one random order.
fn hold(
    rng: &mut Rng,
    slot: &Slot,
    budget: u64,
    history: &History,
    seen: &[Vec<u64>],
    in_step: f64,
) -> usize {
    let here = slot.needs.len();
    let each = slot.overhead as f64 / slot.most.max(1) as f64;
    // What rounding makes of a host that is exactly full is no shortage.
    let room = budget as f64 * slot.usable() * (1.0 + 1e-12);
    let mut order: Vec<usize> = (0..here).collect();
    rng.shuffle(&mut order);
    let (mut used, mut promised) = (0.0, 0.0);
    for n in 0..MOST {
        let (vm, need) = match order.get(n) {
            Some(&i) => slot.needs[i],
            None => {
                let (vm, need) = slot.needs[rng.usize(..here)];
                let own = &seen[vm];
                (vm, if rng.f64() < in_step { need } else { own[rng.usize(..own.len())] })
            }
        };
        used += need as f64 + each;
        promised += history.mins.get(vm).copied().unwrap_or(0) as f64 + each;
        let is_full = used > room || promised > room;
        if is_full || (need == 0 && each == 0.0 && n >= here * 1000) {
            return n;
        }
    }
    MOST
}

/// The mean correlation between the needs of two VMs, over the slots in which both are there, each
/// pair by how much they move; at least 0. None where fewer than two VMs can be compared, or none
/// moves.
fn mean_correlation(history: &History) -> Option<f64> {
    let vms = history.vms.len();
    let (mut sum, mut count) = (vec![0.0; vms], vec![0.0f64; vms]);
    for slot in &history.slots {
        for (vm, need) in &slot.needs {
            sum[*vm] += *need as f64;
            count[*vm] += 1.0;
        }
    }
    let mean: Vec<f64> = sum.iter().zip(&count).map(|(s, n)| s / n.max(1.0)).collect();
    let mut square = vec![0.0f64; vms];
    // Over all pairs at once: (sum of deviations)^2 less the sum of their squares.
    let mut together = 0.0;
    for slot in &history.slots {
        let (mut total, mut squares) = (0.0, 0.0);
        for (vm, need) in &slot.needs {
            let deviation = *need as f64 - mean[*vm];
            total += deviation;
            squares += deviation * deviation;
            square[*vm] += deviation * deviation;
        }
        together += total * total - squares;
    }
    let deviation: Vec<f64> =
        square.iter().zip(&count).map(|(s, n)| (s / n.max(1.0)).sqrt()).collect();
    let mut possible = 0.0;
    for slot in &history.slots {
        let (mut total, mut squares) = (0.0, 0.0);
        for (vm, _) in &slot.needs {
            total += deviation[*vm];
            squares += deviation[*vm] * deviation[*vm];
        }
        possible += total * total - squares;
    }
    (possible > 0.0).then(|| (together / possible).clamp(0.0, 1.0))
}
