//! What is different from the turn before, in words: what `ballast journal` lists.

use std::collections::HashMap;

use ballast_policy::{Decision, Reason, VmPlan, VmState};
use ballast_units::{Pages, VmId};

use crate::turn::{Names, name_of};

/// A change, and the VM that it is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// `None`: the host.
    pub vm: Option<VmId>,
    /// A sentence.
    pub text: String,
}

/// A target that has moved by no more than this part of the VM's size since it was told last is not told.
const TARGET_STEP: u64 = 64;

struct Row<'a> {
    vm: &'a VmState,
    target: Pages,
    plan: &'a VmPlan,
}

fn rows(decision: &Decision) -> impl Iterator<Item = Row<'_>> {
    decision
        .snapshot
        .vms
        .iter()
        .zip(&decision.results)
        .zip(&decision.plans)
        .map(|((vm, result), plan)| Row { vm, target: result.target, plan })
}

/// The targets of VMs as they were told last, or first seen: one that drifts is told of, too.
#[derive(Clone, Debug, Default)]
pub struct Told(HashMap<VmId, Pages>);

/// All that changed and is worth a line; VMs in the order of the decision. `told` goes from turn to turn.
pub fn changes(before: &Decision, now: &Decision, names: &Names, told: &mut Told) -> Vec<Change> {
    let mut found = Vec::new();
    let mut say = |vm: Option<VmId>, text: String| found.push(Change { vm, text });
    if before.state != now.state {
        say(None, format!("the host goes from {} to {}", before.state, now.state));
    }
    if before.snapshot.budget != now.snapshot.budget {
        let (was, is) = (before.snapshot.budget, now.snapshot.budget);
        say(None, format!("the budget goes from {was} to {is}"));
    }
    for node in &now.nodes {
        let was = before.nodes.iter().find(|n| n.id == node.id).map(|n| n.state);
        if let Some(was) = was.filter(|was| *was != node.state) {
            say(None, format!("node {} goes from {was} to {}", node.id, node.state));
        }
    }
    let mut old: HashMap<VmId, Row<'_>> = rows(before).map(|row| (row.vm.demand.id, row)).collect();
    for row in rows(now) {
        let id = row.vm.demand.id;
        let name = name_of(names, id);
        let Some(was) = old.remove(&id) else {
            say(Some(id), format!("{name} arrives: target {}", row.target));
            continue;
        };
        for text in parameters(was.vm, row.vm) {
            say(Some(id), format!("{name}: {text}"));
        }
        let last = told.0.entry(id).or_insert(was.target);
        if row.target.0.abs_diff(last.0).saturating_mul(TARGET_STEP) > row.vm.size.0 {
            say(Some(id), format!("{name}: target {last} -> {}", row.target));
            *last = row.target;
        }
        if let Some(text) = orders(was.plan, row.plan) {
            say(Some(id), format!("{name}: {text}"));
        }
    }
    let mut left: Vec<VmId> = old.into_keys().collect();
    left.sort_unstable();
    for id in left {
        told.0.remove(&id);
        say(
            Some(id),
            format!(
                "{} leaves: it ended, was let go of, or cannot be managed now",
                name_of(names, id)
            ),
        );
    }
    found
}

fn parameters(was: &VmState, is: &VmState) -> Vec<String> {
    let (was, is) = (&was.demand, &is.demand);
    let mut found = Vec::new();
    let mut say = |what: &str, was: String, is: String| {
        if was != is {
            found.push(format!("{what} {was} -> {is}"));
        }
    };
    say("shares", was.shares.to_string(), is.shares.to_string());
    say("min", was.min.to_string(), is.min.to_string());
    say("max", was.max.to_string(), is.max.to_string());
    say("tax", was.tax.to_string(), is.tax.to_string());
    found
}

/// Orders of another kind than before; their numbers move with every turn.
fn orders(was: &VmPlan, is: &VmPlan) -> Option<String> {
    let kind = std::mem::discriminant::<Reason>;
    if kind(&was.reason) == kind(&is.reason) && was.block == is.block {
        None
    } else {
        Some(is.reason.to_string())
    }
}
