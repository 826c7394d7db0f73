//! What is asked of each VM now (OSDI'02 s.6.3).
//!
//! [`plan`] compares what VMs consume with what they are entitled to, and the free memory with the
//! goal of reclamation:
//!
//! | state | balloons grow | eviction | blocked |
//! | --- | --- | --- | --- |
//! | high | no | no | no |
//! | soft | by the deficit | what balloons cannot deliver, or not in time | no |
//! | hard | by the deficit | the whole deficit | no |
//! | low | by the deficit | the whole deficit | VMs above target |
//!
//! Where measurements say that a VM's balloon costs more than paging ([`tools`](crate::tools)), the two
//! change places for that VM: paging takes what it has room and time for, and the balloon the rest. While
//! nothing is missing, a balloon that costs much more is let down in exchange for paging. In low both are asked
//! for all that is missing of a VM that has waited for memory for a fifth of the time lately.
//!
//! In high, room for VMs that start is made as in soft.
//!
//! In every state a balloon never holds more than size - target, so that a VM can use what it is
//! entitled to, and a VM above its max is brought to its max: limits hold in plenty too.
//!
//! The deficit is the goal less the free memory. It is taken from VMs above target by min-funding
//! revocation, page by page from the smallest rho. Goals are absolute ("the balloon holds so much
//! that no more than this can be left"), so a turn that comes before the last one's orders are
//! carried out repeats them and does not add to them.

use ballast_units::Pages;
use serde::{Deserialize, Serialize};

use crate::balloon::Health;
use crate::pools::{Member, Pool, PoolId, Tree, allocate_pages};
use crate::shares::{Claim, VmDemand};
use crate::state::{State, Thresholds};
use crate::tools::Tools;

mod mix;
mod reason;

use mix::Exchange;
pub use reason::{EvictCause, Reason};

/// One VM as it is seen: all that the policy knows of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmState {
    /// Its parameters and activity, from which rho at what it consumes follows.
    pub demand: VmDemand,
    /// Machine pages it has now.
    pub consumed: Pages,
    /// Configured size of the guest; `demand.max` may be a limit below it.
    pub size: Pages,
    /// The balloon goal in force.
    pub balloon_goal: Pages,
    /// How its balloon does what it is told.
    pub balloon_health: Health,
    /// The largest balloon the guest bears now, from [`BalloonOutput`](crate::BalloonOutput).
    pub balloon_limit: Pages,
    /// Pages per second at which its balloon was seen to grow. None: not known.
    #[serde(default)]
    pub balloon_rate: Option<Pages>,
    /// The guest says that it runs short of memory.
    #[serde(default)]
    pub short: bool,
    /// It would use more if it had it: it waits for memory, is swapping in, or is ballooned.
    pub wants_more: bool,
    /// Room for evicted pages.
    pub swap_free: Pages,
    /// None: a child of the host.
    #[serde(default)]
    pub pool: Option<PoolId>,
    /// What it costs beside its pages; counts against the bounds of its pools.
    #[serde(default)]
    pub overhead: Pages,
    /// Pages of its own that it uses beyond its size: memory that was never plugged into it, or that it has unplugged.
    #[serde(default)]
    pub beyond: Pages,
    /// What is known of its tools.
    #[serde(default)]
    pub tools: Tools,
    /// What sharing saves of its pages: it uses them, and they are not in `consumed`.
    #[serde(default)]
    pub saved: Pages,
}

impl VmState {
    /// Its place in the tree of pools.
    pub fn member(&self) -> Member {
        Member { pool: self.pool, overhead: self.overhead }
    }

    /// Its guest's pages that are in memory, whatever they cost. What its balloon holds is none of them, though others share it.
    pub fn used(&self) -> Pages {
        let shared = self.saved.saturating_sub(self.tools.unsaved);
        // Of a balloon that is being let down its guest may use all by the time that QEMU says so.
        let held = self.tools.grown.min(self.balloon_goal);
        (self.consumed + shared).min(self.left_by(held)).max(self.consumed)
    }

    /// What `pages` of its guest's pages that are in memory cost, as all of them do on average.
    fn cost_of(&self, pages: Pages) -> Pages {
        pages.scaled(self.consumed, self.used())
    }

    /// What it may use so that it consumes no more than `level`, by the same average.
    fn used_at(&self, level: Pages) -> Pages {
        level.scaled(self.used(), self.consumed)
    }

    /// What of its memory cannot be taken from it: its guest bears no larger balloon, or has none that does what it is told, and
    /// there is no room for its pages.
    pub(crate) fn fixed(&self) -> Pages {
        let left = self.cost_of(self.left_by(self.balloon_limit));
        let held = if mix::usable(self) { left } else { self.consumed };
        self.consumed.min(held).saturating_sub(mix::room(self))
    }

    /// What cannot be taken from it in time: a balloon that hardly moves must not be what all others wait for.
    fn fixed_for_now(&self) -> Pages {
        let in_time = self.balloon_rate.map_or(0, |rate| rate.0.saturating_mul(IN_TIME_S));
        let kept = match self.balloon_health {
            Health::Slow => self.consumed.saturating_sub(self.cost_of(Pages(in_time))),
            _ => Pages::ZERO,
        };
        self.fixed().max(kept.saturating_sub(mix::room(self)))
    }

    /// Of what it may use and does not, `unused`: what it was given back of its balloon. The rest it never had, or that went
    /// another way, and is not free for it. Of a VM without a pager that is not known apart.
    fn owed(&self, unused: Pages) -> Pages {
        let is_known = !self.tools.ballooned.is_zero() || !mix::room(self).is_zero();
        // What its guest reports as free is among it, and was never given back. What its balloon still holds beyond its goal
        // was, and of the rest a part of its size may have been.
        let coming = self.tools.grown.saturating_sub(self.balloon_goal);
        let known = coming.max(Pages(self.size.0 / mix::OWED));
        let owed = self.tools.owed(self.balloon_goal).min(known);
        if is_known { unused.min(owed) } else { unused }
    }

    /// What a balloon of `goal` leaves the guest.
    pub(crate) fn left_by(&self, goal: Pages) -> Pages {
        self.size.saturating_sub(goal)
    }
}

/// A VM beside what it is entitled to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Standing {
    /// The VM.
    pub vm: VmState,
    /// What it is entitled to.
    pub target: Pages,
}

/// The same without a copy, for hosts of many VMs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen<'a> {
    /// The VM.
    pub vm: &'a VmState,
    /// Its demand as the policy in force reads it, which may be another than the VM's own.
    pub demand: &'a VmDemand,
    /// What it is entitled to.
    pub target: Pages,
    /// It can have no more by its balloon, whatever is free.
    pub most: Pages,
    /// It is given back no more than this of its balloon because memory is to spare.
    pub most_released: Pages,
}

impl<'a> Seen<'a> {
    pub fn new(vm: &'a VmState, demand: &'a VmDemand, target: Pages) -> Seen<'a> {
        let all = Pages(u64::MAX);
        Seen { vm, demand, target, most: all, most_released: all }
    }

    /// What its balloon leaves it, or will when it is let down to what it is entitled to.
    fn room(&self) -> Pages {
        self.vm.left_by(self.vm.balloon_goal).max(self.floor()).min(self.most)
    }

    /// What it can be given back at most while memory is to spare.
    fn most_to_have(&self) -> Pages {
        self.most.min(self.most_released).min(self.demand.max)
    }

    /// What reclamation leaves it: its target, and its guarantee in any case.
    fn floor(&self) -> Pages {
        self.target.max(self.demand.min).min(self.demand.max)
    }
}

/// What is asked of one VM.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmPlan {
    /// Of which VM.
    pub id: ballast_units::VmId,
    /// The size its balloon is to have.
    pub balloon_goal: Pages,
    /// Pages to evict now; replaces what an earlier plan asked for.
    pub evict: Pages,
    /// What is to be left of it, at least its target and its min: eviction ends when the VM
    /// consumes no more, for its balloon may have been faster.
    pub leave: Pages,
    /// Its next allocations wait until the state is left: it had more than it is to have when this was decided. Between two
    /// turns the pager holds each VM by the same rule, page by page.
    pub block: bool,
    /// Why this and nothing else.
    pub reason: Reason,
}

/// The host's memory, as far as plans depend on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Supply {
    /// What is handed out to nobody.
    pub free: Pages,
    /// Machine memory for VMs.
    pub budget: Pages,
    /// Of free memory, by state.
    pub thresholds: Thresholds,
    /// To be made free beside the goal, for VMs that start.
    pub room: Pages,
}

impl Supply {
    /// The free memory that is aimed for.
    pub fn goal(&self) -> Pages {
        Pages(self.thresholds.goal().0.saturating_add(self.room.0))
    }

    /// What is missing to it. In plenty nothing is, unless a VM that starts would end it.
    pub fn deficit(&self, state: State) -> Pages {
        let enough = self.thresholds.lower_edge(State::High).0.saturating_add(self.room.0);
        if state == State::High && (self.room.is_zero() || self.free.0 >= enough) {
            return Pages::ZERO;
        }
        self.goal().saturating_sub(self.free)
    }

    /// What balloons can be let down by beyond targets.
    pub fn surplus(&self, state: State) -> Pages {
        let margin = Pages(self.budget.0 / RELEASE_MARGIN);
        match state {
            State::High => self.free.saturating_sub(self.goal()).saturating_sub(margin),
            _ => Pages::ZERO,
        }
    }
}

/// What to do now, in the order of `vms`.
pub fn plan(state: State, supply: &Supply, pools: &[Pool], vms: &[Standing]) -> Vec<VmPlan> {
    let tree = Tree::new(pools, vms.iter().map(|s| s.vm.member()), &[]);
    let seen: Vec<Seen> = vms.iter().map(|s| Seen::new(&s.vm, &s.vm.demand, s.target)).collect();
    plan_in(&tree, state, supply, &seen)
}

pub(crate) fn plan_in(tree: &Tree, state: State, supply: &Supply, vms: &[Seen]) -> Vec<VmPlan> {
    let deficit = supply.deficit(state);
    // Room for a VM that starts is made by the means of soft: nobody is blocked for it.
    let state = if deficit.is_zero() { state } else { state.max(State::Soft) };
    let takes = distribute(tree, deficit, vms);
    let rooms = release(tree, supply.surplus(state), vms);
    let mut exchanges = vec![Exchange::default(); vms.len()];
    if deficit.is_zero() && vms.iter().any(|s| s.vm.tools.ceiling.is_some()) {
        let before = vms.iter().map(Seen::room);
        let released = rooms.iter().zip(before).map(|(&room, was)| room.saturating_sub(was)).sum();
        let safe = supply.thresholds.lower_edge(State::High) + supply.room;
        let free = supply.free.saturating_sub(released);
        exchanges = mix::exchanges(free, safe, supply.goal(), vms);
    }
    vms.iter()
        .zip(takes)
        .zip(rooms)
        .zip(exchanges)
        .map(|(((s, take), room), exchange)| plan_one(state, deficit, s, take, room, exchange))
        .collect()
}

/// In which time a balloon is to deliver what is missing, seconds; what it was seen to be too slow for is
/// evicted meanwhile. As long as a balloon that does nothing is waited for.
pub const IN_TIME_S: u64 = 10;

/// Balloons are let down beyond targets only while this part of the budget is free above the goal,
/// so that a release does not call for reclamation.
const RELEASE_MARGIN: u64 = 128;

/// What is to be taken from one VM.
#[derive(Clone, Copy, Debug)]
struct Take {
    pages: Pages,
    /// Of that, because it or a pool above it is above its max; whatever is free.
    over_max: Pages,
}

/// What is to be taken from each VM: whatever is above its max, or its pool's; then, from those above
/// target, the rest of the deficit by min-funding revocation. What a VM cannot give is asked of the others: else they
/// would wait for it in low, for good.
fn distribute(tree: &Tree, deficit: Pages, vms: &[Seen]) -> Vec<Take> {
    let claims = Claim::all(vms.iter().map(|s| {
        let ceil = s.vm.consumed.min(s.demand.max);
        (s.demand, s.floor().max(s.vm.fixed()).min(ceil), ceil)
    }));
    // What all may keep together as far as limits go.
    let within = allocate_pages(tree, Pages(u64::MAX), &claims);
    let limit: Pages = within.iter().copied().map(Pages).sum();
    let comes = vms.iter().zip(&within).map(|(s, &within)| {
        s.vm.consumed
            .saturating_sub(s.vm.fixed_for_now())
            .min(s.vm.consumed.saturating_sub(Pages(within)))
    });
    let deficit = deficit.saturating_sub(comes.sum());
    let kept = if deficit.is_zero() {
        within.clone()
    } else {
        let claims = Claim::all(vms.iter().map(|s| {
            let ceil = s.vm.consumed.min(s.demand.max);
            (s.demand, s.floor().max(s.vm.fixed_for_now()).min(ceil), ceil)
        }));
        allocate_pages(tree, limit.saturating_sub(deficit), &claims)
    };
    vms.iter()
        .zip(within)
        .zip(kept)
        .map(|((s, limit), kept)| Take {
            pages: s.vm.consumed.saturating_sub(Pages(kept)),
            over_max: s.vm.consumed.saturating_sub(Pages(limit)),
        })
        .collect()
}

/// How much each ballooned VM that wants memory may hold when `surplus` pages are handed out to
/// the largest rho first, but to guests that run short before all others. What was released and is not
/// yet used is still owed, and counts.
fn release(tree: &Tree, surplus: Pages, vms: &[Seen]) -> Vec<Pages> {
    let gains = |s: &Seen| !s.vm.balloon_goal.is_zero() && s.most_to_have() > s.room();
    let short = |s: &Seen| s.vm.short && gains(s);
    if !vms.iter().any(short) {
        return release_to(tree, surplus, vms, |s| s.vm.wants_more && gains(s));
    }
    release_to(tree, surplus, vms, short)
}

fn release_to(
    tree: &Tree,
    surplus: Pages,
    vms: &[Seen],
    eligible: impl Fn(&Seen) -> bool,
) -> Vec<Pages> {
    let owed = |s: &Seen| s.vm.owed(s.room().saturating_sub(s.vm.used()));
    let owed: Pages = vms.iter().filter(|s| eligible(s)).map(owed).sum();
    let surplus = surplus.saturating_sub(owed);
    if surplus.is_zero() || !vms.iter().any(&eligible) {
        return vms.iter().map(Seen::room).collect();
    }
    let claims = Claim::all(vms.iter().map(|s| {
        // Who does not use what it has gets no more for that.
        let used = s.vm.used() + surplus;
        let most = s.most_to_have().min(used).max(s.room());
        let ceil = if eligible(s) { most } else { s.room() };
        (s.demand, s.room(), ceil)
    }));
    let amount = vms.iter().map(Seen::room).sum::<Pages>() + surplus;
    allocate_pages(tree, amount, &claims).into_iter().map(Pages).collect()
}

fn plan_one(
    state: State,
    deficit: Pages,
    s: &Seen,
    take: Take,
    room: Pages,
    exchange: Exchange,
) -> VmPlan {
    let (vm, floor) = (s.vm, s.floor());
    let consumed = vm.consumed;
    let Take { pages: take, over_max } = take;
    let level = consumed.saturating_sub(take);
    let step = balloon_step(state, s, take, room);
    let mut balloon_goal = step.goal;

    let (wanted, cause) = wanted_of_paging(state, vm, take, (step.stays, balloon_goal));
    let mut evict = wanted.min(mix::room(vm));
    let block = state == State::Low && consumed > floor;
    let mut leave = level;

    let reason = if !take.is_zero() {
        Reason::Reclaim {
            state,
            deficit,
            over_max,
            over_pool: over_max.saturating_sub(consumed.saturating_sub(s.demand.max)),
            consumed,
            leave: level,
            balloon: balloon_goal,
            evict,
            cause: cause.filter(|_| !wanted.is_zero()),
            no_swap_for: wanted - evict,
            block,
        }
    } else if vm.balloon_goal > step.entitled.min(step.bearable) {
        if step.bearable < step.entitled {
            Reason::GuestShort { from: vm.balloon_goal, limit: step.bearable }
        } else {
            Reason::Entitled { target: floor, from: vm.balloon_goal, to: balloon_goal }
        }
    } else if exchange != Exchange::default() {
        balloon_goal = balloon_goal.min(vm.balloon_goal.saturating_sub(exchange.down));
        evict = exchange.evict;
        leave = consumed.saturating_sub(evict);
        let (balloon, paging) = (vm.tools.balloon, vm.tools.paging);
        Reason::Exchanged { from: vm.balloon_goal, to: balloon_goal, evict, balloon, paging }
    } else if !step.spared.is_zero() {
        let (balloon, paging) = (vm.tools.balloon, vm.tools.paging);
        Reason::Enough { from: vm.balloon_goal, to: balloon_goal, balloon, paging }
    } else if !step.released.is_zero() {
        Reason::Released { pages: step.released, left: balloon_goal }
    } else if consumed <= floor {
        Reason::WithinTarget { consumed, target: floor }
    } else if state == State::High {
        Reason::Plenty { consumed, target: floor }
    } else {
        Reason::Spared { state, deficit, consumed, target: floor, block }
    };
    VmPlan { id: s.demand.id, balloon_goal, evict, leave, block, reason }
}

/// Where a VM's balloon goes from where it is, one reason after the other.
struct BalloonStep {
    /// It may not be larger: the VM is entitled to the rest of its memory.
    entitled: Pages,
    /// It may not be larger: its guest does not bear more.
    bearable: Pages,
    /// What it gives back of memory that is to spare.
    released: Pages,
    /// What it gives back because paging takes as much for less.
    spared: Pages,
    /// What it would be if nothing were to be taken by it.
    stays: Pages,
    /// What it is to be.
    goal: Pages,
}

fn balloon_step(state: State, s: &Seen, take: Pages, room: Pages) -> BalloonStep {
    let vm = s.vm;
    let level = vm.consumed.saturating_sub(take);
    // The balloon as it may stay: nothing beyond what the VM is entitled to do without, nothing
    // beyond what the guest bears. A guest without a driver keeps its goal for the driver to come.
    let entitled = vm.left_by(s.floor());
    let bearable = if vm.balloon_health == Health::Missing { vm.size } else { vm.balloon_limit };
    let mut balloon_goal = vm.balloon_goal.min(entitled).min(bearable);
    let kept = balloon_goal;
    balloon_goal = balloon_goal.min(vm.left_by(room).max(vm.left_by(s.demand.max)));
    let released = kept - balloon_goal;

    let usable = mix::usable(vm);
    let paging_first = mix::paging_first(state, vm);
    let rest = if paging_first { mix::beyond_paging(vm, take) } else { take };
    if usable && rest.is_zero() {
        balloon_goal = balloon_goal.min(mix::so_far(vm));
    }
    let spared = kept.saturating_sub(released).saturating_sub(balloon_goal);
    let stays = balloon_goal;
    if usable && !rest.is_zero() {
        // Of what others share, more has to go for the same.
        let needed = vm.left_by(vm.used_at(level));
        let mut needed = needed.min(entitled).min(vm.balloon_limit);
        if mix::pages_cheaply(vm) {
            needed = needed.min(mix::grown_by(vm, vm.used_at(rest)));
        }
        balloon_goal = balloon_goal.max(needed);
    }
    BalloonStep { entitled, bearable, released, spared, stays, goal: balloon_goal }
}

/// What paging is asked for of `take`, room or no room, and why, where the balloon goes from the first to the second.
fn wanted_of_paging(
    state: State,
    vm: &VmState,
    take: Pages,
    (stays, balloon_goal): (Pages, Pages),
) -> (Pages, Option<EvictCause>) {
    let consumed = vm.consumed;
    let level = consumed.saturating_sub(take);
    // What is left of the take when the balloon has done its part. No balloon brings what its guest uses beyond its
    // size, nor again what it holds already and did not cost: pages that others share.
    let coming = balloon_goal.saturating_sub(vm.tools.grown.min(vm.balloon_goal));
    let (beyond_balloon, limit) = if mix::usable(vm) {
        let left = vm.cost_of(vm.left_by(balloon_goal));
        let rest = consumed.min(left).saturating_sub(level);
        let in_vain = take.saturating_sub(vm.tools.freed_by(coming));
        let rest = rest.max(vm.beyond.min(take));
        let shares = in_vain > rest;
        let limit = if shares { EvictCause::BalloonInVain } else { EvictCause::BalloonLimit };
        (rest.max(in_vain), limit)
    } else {
        (take, EvictCause::BalloonLimit)
    };
    match (state, vm.balloon_health) {
        _ if mix::paging_first(state, vm) => {
            let (balloon, paging) = (vm.tools.balloon, vm.tools.paging);
            // What it has no room for is the balloon's, as far as that may grow.
            let grown = balloon_goal.saturating_sub(vm.tools.ballooned.min(stays));
            let wanted = take.min(mix::room(vm).max(take.saturating_sub(grown)));
            (wanted, Some(EvictCause::Cheaper { balloon, paging }))
        }
        (State::Hard | State::Low, _) => (take, Some(EvictCause::Shortage(state))),
        (_, Health::Missing) => (take, Some(EvictCause::NoBalloon)),
        (_, Health::Stuck) => (take, Some(EvictCause::BalloonStuck)),
        (_, Health::Slow) => {
            // What it was asked before and has not done; what is new, it gets a chance to do.
            let late = consumed.saturating_sub(vm.cost_of(vm.left_by(vm.balloon_goal)));
            (take.min(late).max(beyond_balloon), Some(EvictCause::BalloonSlow))
        }
        (_, Health::Healthy) => {
            // What it is to give up by its balloon, and what of that comes in time.
            let by_balloon = take.saturating_sub(beyond_balloon);
            let in_time = vm
                .balloon_rate
                .map_or(by_balloon, |rate| vm.cost_of(Pages(rate.0.saturating_mul(IN_TIME_S))));
            match by_balloon.saturating_sub(in_time) {
                late if late.is_zero() => (beyond_balloon, Some(limit)),
                late => (beyond_balloon + late, Some(EvictCause::BalloonLate)),
            }
        }
    }
}

#[cfg(test)]
mod sharing_tests;
#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
