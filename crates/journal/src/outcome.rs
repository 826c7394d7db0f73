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

use ballast_policy::{Decision, Reason, State, VmPlan, VmState};
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

impl Open {
    /// Asked first at the turn of `moment`.
    fn at(moment: Moment, aim: Aim) -> Open {
        Open { aim, since: moment.n, since_ms: moment.up_ms }
    }

    /// What the turn of `moment` saw become of it.
    fn ended(self, moment: Moment, vm: Option<VmId>, now: Pages, end: End) -> Outcome {
        Outcome {
            vm,
            aim: self.aim,
            since: self.since,
            took_ms: moment.up_ms.saturating_sub(self.since_ms),
            now,
            end,
        }
    }
}

/// One VM at one turn: what it has, and what is asked of it.
struct Row<'a> {
    moment: Moment,
    vm: &'a VmState,
    target: Pages,
    plan: &'a VmPlan,
}

impl Row<'_> {
    /// Memory is taken from it.
    fn takes(&self) -> bool {
        matches!(self.plan.reason, Reason::Reclaim { .. })
    }

    /// Its balloon is let down, and it wants what that gives.
    fn gives(&self) -> bool {
        is_let_down(self.vm, self.target, self.plan)
    }

    fn open(&self, aim: Aim) -> Open {
        Open::at(self.moment, aim)
    }

    fn ended(&self, asked: Open, end: End) -> Outcome {
        asked.ended(self.moment, Some(self.vm.demand.id), self.vm.consumed, end)
    }
}

/// Whether a plan lets a VM's balloon down, below its target, where it wants more.
pub(crate) fn is_let_down(vm: &VmState, target: Pages, plan: &VmPlan) -> bool {
    plan.balloon_goal < vm.balloon_goal && vm.wants_more && vm.consumed < target
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

    /// What was asked of the VM and has not ended.
    fn asked(self) -> impl Iterator<Item = Open> {
        [self.reclaim, self.grow, self.block].into_iter().flatten()
    }

    /// Ends when the VM consumes no more than it was to be left, or nothing more is taken from it.
    fn follow_reclaim(&mut self, row: &Row) -> Option<Outcome> {
        let mut ended = None;
        if let Some(asked @ Open { aim: Aim::Reclaim { from, leave }, .. }) = self.reclaim {
            if row.vm.consumed <= leave {
                ended = Some(row.ended(asked, End::Reached));
                self.reclaim = None;
            } else if row.takes() {
                let aim = Aim::Reclaim { from, leave: row.plan.leave };
                self.reclaim = Some(Open { aim, ..asked });
            } else {
                ended = Some(row.ended(asked, End::Dropped));
                self.reclaim = None;
            }
        }
        if row.takes() && self.reclaim.is_none() {
            let aim = Aim::Reclaim { from: row.vm.consumed, leave: row.plan.leave };
            self.reclaim = Some(row.open(aim));
        }
        ended
    }

    /// Ends when the VM consumes its target, wants no more, or memory is taken from it again.
    fn follow_grow(&mut self, row: &Row) -> Option<Outcome> {
        let mut ended = None;
        if let Some(asked @ Open { aim: Aim::Grow { target, .. }, .. }) = self.grow {
            if row.vm.consumed >= target {
                ended = Some(row.ended(asked, End::Reached));
                self.grow = None;
            } else if row.takes() || !row.vm.wants_more {
                ended = Some(row.ended(asked, End::Dropped));
                self.grow = None;
            }
        }
        if row.gives() && self.grow.is_none() {
            let aim = Aim::Grow { from: row.vm.consumed, target: row.target };
            self.grow = Some(row.open(aim));
        }
        ended
    }

    /// Ends when the VM's allocations wait no more.
    fn follow_block(&mut self, row: &Row) -> Option<Outcome> {
        match (self.block, row.plan.block) {
            (None, true) => {
                self.block = Some(row.open(Aim::Block));
                None
            }
            (Some(asked), false) => {
                self.block = None;
                Some(row.ended(asked, End::Reached))
            }
            _ => None,
        }
    }
}

impl Tracker {
    /// Takes in the next turn; answers what ended with it.
    pub fn observe(&mut self, moment: Moment, decision: &Decision) -> Vec<Outcome> {
        let mut ended: Vec<Outcome> = self.follow_relief(moment, decision).into_iter().collect();
        let rows = decision.snapshot.vms.iter().zip(&decision.results).zip(&decision.plans);
        for ((vm, result), plan) in rows {
            let row = Row { moment, vm, target: result.target, plan };
            let known = self.vms.contains_key(&vm.demand.id);
            if !(row.takes() || row.gives() || plan.block || known) {
                continue;
            }
            let per = self.vms.entry(vm.demand.id).or_default();
            per.seen = moment.n;
            ended.extend(per.follow_reclaim(&row));
            ended.extend(per.follow_grow(&row));
            ended.extend(per.follow_block(&row));
        }
        ended.extend(self.end_of_gone(moment));
        self.vms.retain(|_, per| per.seen == moment.n && !per.is_idle());
        ended
    }

    /// Ends when the host is back in state high.
    fn follow_relief(&mut self, moment: Moment, decision: &Decision) -> Option<Outcome> {
        match (&mut self.relief, decision.state) {
            (slot, State::High) => {
                let asked = slot.take()?;
                return Some(asked.ended(moment, None, decision.snapshot.free, End::Reached));
            }
            (Some(Open { aim: Aim::Relief { worst }, .. }), state) => *worst = state.max(*worst),
            (slot, worst) => *slot = Some(Open::at(moment, Aim::Relief { worst })),
        }
        None
    }

    /// What was asked of VMs that this turn did not see: they have left. In order of their numbers:
    /// the same turns always give the same outcomes.
    fn end_of_gone(&self, moment: Moment) -> Vec<Outcome> {
        let mut gone: Vec<(VmId, PerVm)> = self
            .vms
            .iter()
            .filter(|(_, per)| per.seen != moment.n)
            .map(|(id, per)| (*id, *per))
            .collect();
        gone.sort_by_key(|(id, _)| *id);
        let mut ended = Vec::new();
        for (id, per) in gone {
            let end = |asked: Open| asked.ended(moment, Some(id), Pages::ZERO, End::Gone);
            ended.extend(per.asked().map(end));
        }
        ended
    }

    /// All that was asked and has not ended by the turn of `moment`; `None` is the host.
    pub fn open_at(&self, moment: Moment) -> Vec<(Option<VmId>, UnderWay)> {
        let host = self.relief.map(|open| (None, open));
        let vms = self.vms.iter().flat_map(|(id, per)| per.asked().map(|open| (Some(*id), open)));
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
