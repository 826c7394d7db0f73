//! The curve of factor and risk: the same VMs, at the same times, on less memory.
//!
//! Each slot has a factor up to which memory would have sufficed ([`Slot::factor`]). The risk of a
//! factor is the part of the slots that have a smaller one. Nothing is drawn for that: VMs of one
//! host, whose peaks may come together or not, are taken as they were. Only the bands are drawn.

use fastrand::Rng;
use serde::Serialize;

use crate::Question;
use crate::history::{History, Slot};
use crate::series::{Tally, block_len, correlation_time, draw, quantile, upper_limit, vouched};

/// One point of the curve.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Point {
    /// The part of the time in which memory is short.
    pub risk: f64,
    /// Sum of configured sizes / machine memory at which it is.
    pub factor: f64,
    /// The largest factor that the record vouches for at this risk: with the confidence asked for,
    /// the risk is no larger there. None where the record is too short to tell.
    pub low: Option<f64>,
    /// Upper end of the band.
    pub high: f64,
}

/// The factor by risk.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Curve {
    /// From the smallest risk to the largest; the one asked for is among them.
    pub points: Vec<Point>,
    /// The point asked for.
    pub asked: Point,
    /// What the slots are worth as independent looks.
    pub looks: f64,
    /// For so many seconds what happened goes on having influence.
    pub correlation_s: f64,
    /// The smallest risk that a record of this length can vouch for.
    pub least_risk: f64,
}

const RISKS: [f64; 9] = [0.0001, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2];
const DRAWS: usize = 400;

struct Host {
    factors: Vec<f64>,
    /// Of the factors, among those of all hosts.
    ranks: Vec<usize>,
    time: f64,
    slot_s: f64,
}

/// The curve of one host, or of several as one record in which each slot of each host counts the
/// same.
pub fn curve(question: &Question, histories: &[History]) -> Curve {
    let mut hosts: Vec<Host> = histories.iter().map(host).collect();
    let looks: f64 = hosts.iter().map(|h| h.factors.len() as f64 / h.time).sum();
    let mut sorted: Vec<f64> = hosts.iter().flat_map(|h| h.factors.iter().copied()).collect();
    sorted.sort_by(f64::total_cmp);
    for host in &mut hosts {
        let rank = |factor: &f64| sorted.partition_point(|f| f.total_cmp(factor).is_lt());
        host.ranks = host.factors.iter().map(rank).collect();
    }
    let mut risks = RISKS.to_vec();
    risks.retain(|risk| (risk / question.risk - 1.0).abs() > 1e-9);
    risks.push(question.risk);
    risks.sort_by(f64::total_cmp);
    let drawn = drawn(question.seed, &hosts, sorted.len(), &risks);
    let point = |(i, risk): (usize, &f64)| {
        let mut again: Vec<f64> = drawn.iter().map(|ranks| sorted[ranks[i]]).collect();
        again.sort_by(f64::total_cmp);
        let factor = quantile(&sorted, *risk);
        let low = quantile(&again, 1.0 - question.confidence);
        let high = quantile(&again, question.confidence);
        let low = vouched(&sorted, looks, *risk, question.confidence).map(|v| v.min(low));
        Point { risk: *risk, factor, low, high: high.max(factor) }
    };
    let points: Vec<Point> = risks.iter().enumerate().map(point).collect();
    let asked = points.iter().find(|p| p.risk == question.risk).copied();
    let seconds: f64 = hosts.iter().map(|h| h.time * h.slot_s).sum();
    Curve {
        asked: asked.unwrap_or(points[0]),
        points,
        looks,
        correlation_s: seconds / hosts.len().max(1) as f64,
        least_risk: upper_limit(0.0, looks, question.confidence),
    }
}

/// For so many slots what was needed of what is configured goes on having influence: that is what has a memory, not its
/// inverse.
pub(crate) fn influence(history: &History) -> f64 {
    let part: Vec<f64> = history.slots.iter().map(|slot| 1.0 / slot.factor()).collect();
    correlation_time(&part)
}

fn host(history: &History) -> Host {
    Host {
        time: influence(history),
        factors: history.slots.iter().map(Slot::factor).collect(),
        ranks: Vec::new(),
        slot_s: history.slot_ms as f64 / 1e3,
    }
}

/// Records like this one: hosts drawn again where there are several, then blocks of their slots. Of
/// each, the ranks of the factors at `risks`.
fn drawn(seed: u64, hosts: &[Host], ranks: usize, risks: &[f64]) -> Vec<Vec<usize>> {
    let mut rng = Rng::with_seed(seed);
    let mut tally = Tally::new(ranks);
    let mut one = || {
        tally.clear();
        for host in hosts {
            let host = if hosts.len() > 1 { &hosts[rng.usize(..hosts.len())] } else { host };
            let slots = draw(&mut rng, host.factors.len(), block_len(host.time));
            slots.into_iter().for_each(|i| tally.add(host.ranks[i]));
        }
        tally.quantiles(risks)
    };
    (0..DRAWS).map(|_| one()).collect()
}
