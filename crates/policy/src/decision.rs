//! A decision with all that led to it, and its explanation in plain words (`ballast why VM`).

use ballast_units::{Pages, VmId};
use serde::{Deserialize, Serialize};

use crate::nodes::NodeState;
use crate::plan::{Reason, VmPlan, VmState};
use crate::pools::{Pool, PoolId, PoolShare, ancestors, divide_in};
use crate::shares::{Bound, Entitlement, TaxRate, VmDemand};
use crate::state::State;
use crate::tools::{Cost, Tool, Tools};
use crate::turn::{Snapshot, entitle};

/// One turn of the loop: what went in, what came out. Made by [`decide`](crate::decide).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// What it was made from.
    pub snapshot: Snapshot,
    /// The state that the host is in from here on.
    pub state: State,
    /// Pages that were shared out as targets.
    pub available: Pages,
    /// In the order of the snapshot's VMs, as are the plans.
    pub results: Vec<Entitlement>,
    /// In the order of the snapshot's pools.
    #[serde(default)]
    pub pools: Vec<PoolShare>,
    /// What is asked of each VM, in the order of the snapshot.
    pub plans: Vec<VmPlan>,
    /// In the order of the snapshot's nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<NodeState>,
}

impl Decision {
    /// What caused it; names the new state where that changed.
    pub fn trigger(&self) -> String {
        let Snapshot { before, trigger, .. } = &self.snapshot;
        if *before == self.state {
            trigger.clone()
        } else {
            format!("free memory moved from {before} to {}", self.state)
        }
    }

    /// Below how much free memory who gives up pages is held where that is to bring it: for as long as a shortage is not
    /// over. Guests go on faulting while pages leave, and the next turn may be a second away.
    pub fn hold_until(&self) -> Pages {
        match self.state {
            State::High => Pages::ZERO,
            _ => self.snapshot.thresholds.goal() + self.snapshot.room,
        }
    }

    /// As the policy in force reads them.
    fn demands(&self) -> Vec<VmDemand> {
        self.snapshot.policy.demands(self.available, &self.snapshot.pools, &self.snapshot.vms)
    }

    /// One sentence that says what was decided for a VM, and the steps that led to it, with their
    /// numbers. `name_of` gives VMs their names.
    pub fn explain(&self, id: VmId, name_of: impl Fn(VmId) -> String) -> (String, Vec<String>) {
        let name = name_of(id);
        let demands = self.demands();
        let input = demands.iter().find(|v| v.id == id);
        let result = self.results.iter().find(|e| e.id == id);
        let plan = self.plans.iter().find(|p| p.id == id);
        let (Some(input), Some(result)) = (input, result) else {
            let verdict = format!(
                "{name} has no part in this decision: it came after it, or it \
                 has no memory that can be shared out"
            );
            return (verdict, Vec::new());
        };
        let why = self.why(input, result);
        let mut verdict = format!("{name} is entitled to {}: {}", result.target, why.short());
        if let Some(plan) = plan {
            verdict.push_str(&action(plan));
        }
        let own = self.snapshot.vms.iter().map(|vm| &vm.demand).find(|v| v.id == id);
        let note = own.and_then(|own| self.snapshot.policy.note(own, input));
        let mut steps = vec![self.host_step(), self.supply_step()];
        steps.extend(self.pool_steps(id));
        steps.extend(self.node_step(id));
        steps.extend(note.map(|note| format!("{note}.")));
        steps.push(rho_step(&name, input, result));
        steps.push(format!("{}: {}.", why.short(), self.outcome(&name, input, result, why)));
        steps.extend(self.others_step(id, &name_of));
        let tools = self.snapshot.vms.iter().find(|vm| vm.demand.id == id).map(|vm| vm.tools);
        steps.extend(tools.and_then(tools_step));
        if let Some(plan) = plan {
            steps.push(format!("Now: {}.", plan.reason));
        }
        (verdict, steps)
    }

    fn host_step(&self) -> String {
        let Snapshot { free, room, .. } = self.snapshot;
        let enough = self.snapshot.thresholds.lower_edge(State::High) + room;
        let meaning = match self.state {
            State::High if free < enough && !room.is_zero() => {
                "what VMs that start lack is reclaimed as in soft"
            }
            State::High => "nothing needs to be reclaimed",
            State::Soft => "balloons reclaim, and paging where a balloon cannot",
            State::Hard => "paging reclaims beside the balloons",
            State::Low => {
                "paging reclaims beside the balloons, and VMs above target wait at their next allocation"
            }
        };
        let goal = self.snapshot.thresholds.goal() + room;
        let aim = if free < goal {
            format!("{} short of the {goal} it aims for", goal - free)
        } else {
            format!("at least the {goal} it aims for")
        };
        let start = if room.is_zero() {
            String::new()
        } else {
            format!(" ({room} of it for VMs that start)")
        };
        format!("The host has {free} free, {aim}{start}; its state is {}: {meaning}.", self.state)
    }

    fn supply_step(&self) -> String {
        let demands = self.demands();
        let (min, max): (Pages, Pages) =
            (demands.iter().map(|v| v.min).sum(), demands.iter().map(|v| v.max).sum());
        let given: Pages = self.results.iter().map(|e| e.target).sum();
        let all_max = self.results.iter().zip(&demands).all(|(e, v)| e.target >= v.max);
        let vms = match self.snapshot.vms.len() {
            1 => "1 VM".to_owned(),
            n => format!("{n} VMs"),
        };
        let supply = format!("{} can be given to {vms}", self.available);
        if min > self.available {
            format!(
                "{supply}, which are guaranteed {min} together: more than there is, so \
                 everyone gets its min."
            )
        } else if given > self.available {
            format!(
                "{supply}, which are guaranteed {given} together, their pools' mins among it: more than there \
                 is, so everyone gets what is guaranteed."
            )
        } else if all_max {
            format!("{supply}, which may use {max} together: everyone can have its max.")
        } else if max <= self.available {
            let pools = &self.snapshot.pools;
            let held = |pool: &Pool| pool.max.is_some_and(|max| max < self.available);
            let why = match pools.iter().any(held) {
                true => "not everyone's pool may have as much",
                false => "not everyone can have it now",
            };
            format!("{supply}, which may use {max} together: it suffices for all, but {why}.")
        } else {
            format!(
                "{supply}, which may use {max} together: it does not suffice for all, so each \
                 page goes where it has the most shares behind it (largest rho)."
            )
        }
    }

    /// The node that the VM is bound to, if it is short.
    fn node_step(&self, id: VmId) -> Option<String> {
        let mut nodes = self.snapshot.nodes.iter().zip(&self.nodes);
        let (node, decided) = nodes.find(|(node, _)| node.bound.contains(&id))?;
        if decided.missing.is_zero() {
            return None;
        }
        Some(format!(
            "Its memory is bound to node {}, which has {} of {} free, {} short of what is aimed for there; its state is {}: what \
             is missing is taken from the VMs that are bound to it.",
            node.id, node.free, node.size, decided.missing, decided.state
        ))
    }

    /// Whether it gets less than the host has for it.
    fn is_short_of_host(&self, id: VmId) -> bool {
        let vms: Vec<&VmState> = self.snapshot.vms.iter().collect();
        let tree = self.snapshot.tree();
        let pools = &self.snapshot.pools;
        let (host, _) = entitle(&tree, self.available, pools, &vms, &self.demands());
        self.results
            .iter()
            .zip(host)
            .any(|(got, of_host)| got.id == id && got.target < of_host.target)
    }

    /// The pools that the VM is in, from the outside in.
    fn pool_steps(&self, id: VmId) -> Vec<String> {
        let pools = &self.snapshot.pools;
        let mut above: Vec<usize> = ancestors(pools, self.pool_of(id)).collect();
        above.reverse();
        let outer = std::iter::once(None).chain(above.iter().map(|&i| Some(&pools[i])));
        let step = |(outer, &i): (Option<&Pool>, &usize)| {
            let (pool, share) = (&pools[i], self.pools.get(i)?);
            let from = outer.map_or("the host".to_owned(), |outer| format!("pool {}", outer.name));
            let why = match share.bound {
                Bound::Min if share.target > pool.min => {
                    "it gets what its VMs are guaranteed, or cannot give".to_owned()
                }
                Bound::Min => format!("it gets its min of {}", pool.min),
                Bound::Max => match pool.max {
                    Some(max) => {
                        format!("it gets all that its VMs can use within its max of {max}")
                    }
                    None => "it gets all that its VMs can use".to_owned(),
                },
                Bound::Shares => "its shares decide".to_owned(),
            };
            let outside = self.held_outside(i);
            let less = match outside.is_zero() {
                true => String::new(),
                false => format!(", of which VMs that start or are out of reach have {outside}"),
            };
            Some(format!(
                "Pool {} gets {} from {from}: {why}{less} ({} shares, rho {}).",
                pool.name,
                share.target,
                pool.shares,
                ratio(share.rho)
            ))
        };
        outer.zip(&above).filter_map(step).collect()
    }

    /// What VMs that have no part in the decision hold in a pool.
    fn held_outside(&self, pool: usize) -> Pages {
        let Snapshot { pools, outside, .. } = &self.snapshot;
        let inside = outside.iter().filter(|of| ancestors(pools, of.pool).any(|i| i == pool));
        inside.map(|of| of.overhead).sum()
    }

    fn pool_of(&self, id: VmId) -> Option<PoolId> {
        let vm = self.snapshot.vms.iter().find(|vm| vm.demand.id == id);
        vm.and_then(|vm| vm.pool).filter(|pool| self.snapshot.pools.iter().any(|p| p.id == *pool))
    }

    fn why(&self, input: &VmDemand, result: &Entitlement) -> Why {
        match result.bound {
            Bound::Min => Why::Min,
            Bound::Max => Why::Max,
            Bound::Shares if self.is_short_of_host(input.id) => Why::Node,
            Bound::Shares => {
                let (untaxed, all) = (self.untaxed(input.id), self.with_all(input.id));
                if all > result.target {
                    Why::Kept(all)
                } else if untaxed > result.target {
                    Why::TaxTook(untaxed)
                } else if untaxed < result.target {
                    Why::TaxGave(untaxed)
                } else {
                    Why::Shares
                }
            }
        }
    }

    /// What the VM would get if nobody were taxed.
    fn untaxed(&self, id: VmId) -> Pages {
        let demands: Vec<VmDemand> =
            self.demands().iter().map(|v| VmDemand { tax: TaxRate::NONE, ..*v }).collect();
        let vms: Vec<&VmState> = self.snapshot.vms.iter().collect();
        let tree = self.snapshot.tree();
        let (found, _) = entitle(&tree, self.available, &self.snapshot.pools, &vms, &demands);
        target_of(id, &found)
    }

    /// What it would get if all that VMs have could be taken from them.
    fn with_all(&self, id: VmId) -> Pages {
        let tree = self.snapshot.tree();
        let (found, _) = divide_in(&tree, self.available, &self.snapshot.pools, &self.demands());
        target_of(id, &found)
    }

    fn outcome(&self, name: &str, input: &VmDemand, result: &Entitlement, why: Why) -> String {
        match why {
            Why::Min => format!(
                "by shares and activity it would get less, but {} are guaranteed to it",
                input.min
            ),
            Why::Max => format!("it gets all of its {} and can use no more", input.max),
            Why::Shares => format!(
                "at {} its rho equals that of the others that shares decide for; the tax makes no \
                 difference",
                result.target
            ),
            Why::Node => {
                "it is shared out among those that are bound to it as the host's is among \
                          all, by shares and activity"
                    .to_owned()
            }
            Why::Kept(all) => format!(
                "it would get {all} if others could give what they have beyond their own part: they have no room for \
                 more of their pages, and no balloon that brings them"
            ),
            Why::TaxTook(untaxed) => format!(
                "without the tax, shares alone would give {name} {untaxed}; the tax on its idle \
                 pages moves {} to VMs that use theirs",
                untaxed - result.target
            ),
            Why::TaxGave(untaxed) => format!(
                "without the tax, shares alone would give {name} {untaxed}; idle pages of others, \
                 taxed, bring it {} more",
                result.target - untaxed
            ),
        }
    }

    /// What the others get that it competes with, largest first.
    fn others_step(&self, id: VmId, name_of: &impl Fn(VmId) -> String) -> Option<String> {
        const SHOWN: usize = 5;
        let pool = self.pool_of(id);
        let known = |id: &PoolId| self.snapshot.pools.iter().any(|p| p.id == *id);
        let mut others: Vec<&Entitlement> = self
            .results
            .iter()
            .zip(&self.snapshot.vms)
            .filter(|(e, vm)| e.id != id && vm.pool.filter(known) == pool)
            .map(|(e, _)| e)
            .collect();
        if others.is_empty() {
            return None;
        }
        others.sort_by_key(|e| (std::cmp::Reverse(e.target), e.id));
        let list: Vec<String> = others
            .iter()
            .take(SHOWN)
            .map(|e| {
                let bound = match e.bound {
                    Bound::Min => ", its min",
                    Bound::Max => ", its max",
                    Bound::Shares => "",
                };
                format!("{} {} (rho {}{bound})", name_of(e.id), e.target, ratio(e.rho))
            })
            .collect();
        let more = match others.len().saturating_sub(SHOWN) {
            0 => String::new(),
            n => format!(", and {n} more"),
        };
        let who = if pool.is_some() { "The others in its pool" } else { "The others" };
        Some(format!("{who} get: {}{more}.", list.join(", ")))
    }
}

fn target_of(id: VmId, of: &[Entitlement]) -> Pages {
    of.iter().find(|e| e.id == id).map_or(Pages::ZERO, |e| e.target)
}

/// What decided a target.
#[derive(Clone, Copy)]
enum Why {
    Min,
    Max,
    Shares,
    /// Its node has less for it than the host.
    Node,
    /// It would get this much, which is more, if others could give what they have.
    Kept(Pages),
    /// Without tax it would get this much, which is more.
    TaxTook(Pages),
    /// Without tax it would get this much, which is less.
    TaxGave(Pages),
}

impl Why {
    fn short(self) -> &'static str {
        match self {
            Why::Min => "its guaranteed min decides",
            Why::Max => "its max decides",
            Why::Shares => "its shares decide",
            Why::Node => "what its node has decides",
            Why::Kept(_) => "its shares decide, of what others can give",
            Why::TaxTook(_) => "its shares decide, less the tax on its idle memory",
            Why::TaxGave(_) => "its shares decide, with memory that the tax takes from idle VMs",
        }
    }
}

/// What the two tools cost the VM, and which is used first; nothing while neither was measured.
fn tools_step(tools: Tools) -> Option<String> {
    let Tools { first, balloon, paging, .. } = tools;
    if balloon.is_none() && paging.is_none() {
        return None;
    }
    let cost = |cost: Option<Cost>| {
        cost.map_or("a cost not measured lately".to_owned(), |cost| cost.to_string())
    };
    let first = match first {
        Tool::Balloon => "the balloon comes first, paging takes what remains",
        Tool::Paging => "paging comes first, the balloon takes what remains",
    };
    Some(format!(
        "Its tools: what its balloon holds, and it reads again, comes at {}; what is compressed or \
         swapped, and it faults on, at {}; {first}.",
        cost(balloon),
        cost(paging),
    ))
}

/// How rho comes about, with the tax spelt out.
fn rho_step(name: &str, input: &VmDemand, result: &Entitlement) -> String {
    let target = result.target;
    let active = input.active.min(target);
    let idle = target - active;
    let k = input.tax.k();
    let charged = active.0 as f64 + k * idle.0 as f64;
    let tax = if k == 1.0 {
        "there is no idle tax, so they".to_owned()
    } else {
        format!(
            "under a tax of {} an idle page is charged as {} active ones, so they",
            input.tax,
            ratio(k)
        )
    };
    format!(
        "Of {target}, {name} would use {active} and leave {idle} idle (active memory is estimated \
         at {}); {tax} are charged as {}, and with {} shares its rho, the shares behind each page \
         charged, is {}.",
        input.active,
        Pages(charged as u64),
        input.shares,
        ratio(result.rho),
    )
}

/// The end of the verdict: what is asked now.
fn action(plan: &VmPlan) -> String {
    let mut asked = Vec::new();
    match plan.reason {
        Reason::Reclaim { consumed, leave, .. } => {
            asked.push(format!("{} are taken from it", consumed.saturating_sub(leave)));
        }
        Reason::Entitled { .. } | Reason::Released { .. } | Reason::GuestShort { .. } => {
            asked.push("its balloon is let down".to_owned());
        }
        Reason::Exchanged { .. } => {
            asked.push("its balloon is exchanged for paging".to_owned());
        }
        Reason::Enough { .. } => asked.push("its balloon grows no further".to_owned()),
        Reason::NodeFull { .. } => asked.push("its balloon is kept for its node".to_owned()),
        Reason::WithinTarget { .. } | Reason::Plenty { .. } | Reason::Spared { .. } => {
            asked.push("nothing is taken from it".to_owned());
        }
    }
    if !plan.balloon_goal.is_zero() {
        asked.push(format!("its balloon is asked to hold {}", plan.balloon_goal));
    }
    if !plan.evict.is_zero() {
        asked.push(format!("{} are to be evicted", plan.evict));
    }
    if plan.block {
        asked.push("its allocations wait".to_owned());
    }
    format!("; {}", asked.join(", "))
}

/// Four significant digits at most, without a tail of zeros.
fn ratio(value: f64) -> String {
    if value == 0.0 || !value.is_finite() {
        return format!("{value}");
    }
    let digits = (3 - value.abs().log10().floor() as i32).clamp(0, 9) as usize;
    let text = format!("{value:.digits$}");
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

#[cfg(test)]
#[path = "decision_tests.rs"]
mod tests;
