//! What became of what was asked. Pure: decisions in their order in, outcomes out.
//!
//! | aim | begins with a turn that | has come true when |
//! | --- | --- | --- |
//! | `Relief` | leaves state high | the state is high again |
//! | `Reclaim` | takes memory from a VM | the VM consumes no more than it was to be left |
//! | `Grow` | lets a VM's balloon down | the VM consumes its target |
//! | `Block` | lets a VM's allocations wait | they wait no more |
//!
//! An aim that later turns repeat goes on; its numbers are those of the last turn that asked.

use std::collections::HashMap;

use ballast_policy::{Decision, Reason, State};
use ballast_units::{Pages, VmId};
use serde::{Deserialize, Serialize};

use crate::turn::Moment;

/// What was asked.
#[allow(missing_docs, reason = "told with the variant")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aim {
    /// The host is to come back to state high; this is the worst it came to.
    Relief { worst: State },
    /// Of the VM, which consumed `from`, no more than `leave` is to be left.
    Reclaim { from: Pages, leave: Pages },
    /// The VM, which consumed `from`, may grow to its target: its balloon is let down.
    Grow { from: Pages, target: Pages },
    /// The VM's allocations wait.
    Block,
}

/// How it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// It came true.
    Reached,
    /// Later turns did not ask for it any more.
    Dropped,
    /// The VM left.
    Gone,
}

/// An aim that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// `None`: the host.
    pub vm: Option<VmId>,
    /// What was asked.
    pub aim: Aim,
    /// The turn that asked first.
    pub since: u64,
    /// Milliseconds from there to the turn that saw the end.
    pub took_ms: u64,
    /// What the VM consumed at the end, or what was free on the host.
    pub now: Pages,
    /// How it ended.
    pub end: End,
}

/// An aim that has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnderWay {
    /// What was asked.
    pub aim: Aim,
    /// The turn that asked first.
    pub since: u64,
    /// Milliseconds since then.
    pub for_ms: u64,
}

#[derive(Clone, Copy, Debug)]
struct Open {
    aim: Aim,
    since: u64,
    since_ms: u64,
}

/// Follows aims through the turns of one manager.
#[derive(Clone, Debug, Default)]
pub struct Tracker {
    relief: Option<Open>,
    vms: HashMap<VmId, PerVm>,
}

#[derive(Clone, Copy, Debug, Default)]
struct PerVm {
    reclaim: Option<Open>,
    grow: Option<Open>,
    block: Option<Open>,
    seen: u64,
}

impl PerVm {
    fn is_idle(&self) -> bool {
        self.reclaim.is_none() && self.grow.is_none() && self.block.is_none()
    }
}

impl Tracker {
    /// Takes in the next turn; answers what ended with it.
    pub fn observe(&mut self, moment: Moment, decision: &Decision) -> Vec<Outcome> {
        let mut ended = Vec::new();
        let snapshot = &decision.snapshot;
        let open = |aim| Open { aim, since: moment.n, since_ms: moment.up_ms };
        let close = |vm, open: Open, now, end| Outcome {
            vm,
            aim: open.aim,
            since: open.since,
            took_ms: moment.up_ms.saturating_sub(open.since_ms),
            now,
            end,
        };

        match (&mut self.relief, decision.state) {
            (None, State::High) => {}
            (Some(relief), State::High) => {
                ended.push(close(None, *relief, snapshot.free, End::Reached));
                self.relief = None;
            }
            (Some(Open { aim: Aim::Relief { worst }, .. }), state) => *worst = state.max(*worst),
            (slot, worst) => *slot = Some(open(Aim::Relief { worst })),
        }

        let rows = snapshot.vms.iter().zip(&decision.results).zip(&decision.plans);
        for ((vm, result), plan) in rows {
            let id = Some(vm.demand.id);
            let takes = matches!(plan.reason, Reason::Reclaim { .. });
            let gives = plan.balloon_goal < vm.balloon_goal;
            let known = self.vms.contains_key(&vm.demand.id);
            if !(takes || gives || plan.block || known) {
                continue;
            }
            let per = self.vms.entry(vm.demand.id).or_default();
            per.seen = moment.n;

            if let Some(asked @ Open { aim: Aim::Reclaim { from, leave }, .. }) = per.reclaim {
                if vm.consumed <= leave {
                    ended.push(close(id, asked, vm.consumed, End::Reached));
                    per.reclaim = None;
                } else if takes {
                    let aim = Aim::Reclaim { from, leave: plan.leave };
                    per.reclaim = Some(Open { aim, ..asked });
                } else {
                    ended.push(close(id, asked, vm.consumed, End::Dropped));
                    per.reclaim = None;
                }
            }
            if takes && per.reclaim.is_none() {
                per.reclaim = Some(open(Aim::Reclaim { from: vm.consumed, leave: plan.leave }));
            }

            if let Some(asked @ Open { aim: Aim::Grow { target, .. }, .. }) = per.grow {
                if vm.consumed >= target {
                    ended.push(close(id, asked, vm.consumed, End::Reached));
                    per.grow = None;
                } else if takes || !vm.wants_more {
                    ended.push(close(id, asked, vm.consumed, End::Dropped));
                    per.grow = None;
                }
            }
            if gives && per.grow.is_none() && vm.wants_more && vm.consumed < result.target {
                per.grow = Some(open(Aim::Grow { from: vm.consumed, target: result.target }));
            }

            match (per.block, plan.block) {
                (None, true) => per.block = Some(open(Aim::Block)),
                (Some(asked), false) => {
                    ended.push(close(id, asked, vm.consumed, End::Reached));
                    per.block = None;
                }
                _ => {}
            }
        }

        // Those that this turn did not see have left. In order of their numbers: the same turns
        // always give the same outcomes.
        let mut gone: Vec<(VmId, PerVm)> = self
            .vms
            .iter()
            .filter(|(_, per)| per.seen != moment.n)
            .map(|(id, per)| (*id, *per))
            .collect();
        gone.sort_by_key(|(id, _)| *id);
        for (id, per) in gone {
            let asked = [per.reclaim, per.grow, per.block].into_iter().flatten();
            ended.extend(asked.map(|a| close(Some(id), a, Pages::ZERO, End::Gone)));
        }
        self.vms.retain(|_, per| per.seen == moment.n && !per.is_idle());
        ended
    }

    /// All that was asked and has not ended by the turn of `moment`; `None` is the host.
    pub fn open_at(&self, moment: Moment) -> Vec<(Option<VmId>, UnderWay)> {
        let host = self.relief.map(|open| (None, open));
        let vms = self.vms.iter().flat_map(|(id, per)| {
            let asked = [per.reclaim, per.grow, per.block].into_iter().flatten();
            asked.map(|open| (Some(*id), open))
        });
        let under_way = |open: Open| UnderWay {
            aim: open.aim,
            since: open.since,
            for_ms: moment.up_ms.saturating_sub(open.since_ms),
        };
        host.into_iter().chain(vms).map(|(id, open)| (id, under_way(open))).collect()
    }
}

#[cfg(test)]
#[path = "outcome_tests.rs"]
mod tests;
