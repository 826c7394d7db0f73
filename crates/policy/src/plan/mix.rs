//! The cheapest sufficient mix of one VM's tools: what is asked of which, when measurements say that
//! the balloon is the dearer one ([`tools`](crate::tools)).

use ballast_units::Pages;

use super::{IN_TIME_S, Seen, VmState};
use crate::balloon::Health;
use crate::state::State;
use crate::tools::Tool;

/// Pages that can be evicted now.
pub(super) fn room(vm: &VmState) -> Pages {
    Pages(vm.swap_free.0.saturating_add(vm.tools.spare_room.0))
}

/// Whether paging comes first. In low both tools are asked for all that is missing, whatever it costs, where the VM has
/// been held up for a while: paging does not end the shortage. Not before, and the dear one not for more, for what a
/// balloon takes in a moment of need, it keeps for long.
pub(super) fn paging_first(state: State, vm: &VmState) -> bool {
    pages_cheaply(vm) && !(state == State::Low && vm.tools.held_up)
}

/// Whether paging is the cheaper tool of a VM that has both.
pub(super) fn pages_cheaply(vm: &VmState) -> bool {
    vm.tools.first == Tool::Paging && !room(vm).is_zero() && usable(vm)
}

pub(super) fn usable(vm: &VmState) -> bool {
    matches!(vm.balloon_health, Health::Healthy | Health::Slow)
}

/// Of `take`, what paging has no room for, or was seen to be too slow for: the balloon's part.
pub(super) fn beyond_paging(vm: &VmState, take: Pages) -> Pages {
    let in_time = vm.tools.paging_rate.map_or(take, |rate| Pages(rate.0.saturating_mul(IN_TIME_S)));
    take - take.min(room(vm)).min(in_time)
}

/// The balloon that a VM keeps where paging alone is asked: of a dear one no more than it has grown to, whatever it was
/// asked for in a moment of need. (Pages that a guest gave up while they were shared are in the balloon, and not in
/// the pager's count of what was given up.)
pub(super) fn so_far(vm: &VmState) -> Pages {
    if pages_cheaply(vm) { vm.tools.ballooned.max(vm.tools.grown) } else { Pages(u64::MAX) }
}

/// The balloon that brings `more` pages beyond what the guest has given up so far. Absolute: what has
/// come of it meanwhile is in both terms.
pub(super) fn grown_by(vm: &VmState, more: Pages) -> Pages {
    vm.tools.given_up().min(vm.balloon_goal) + more
}

/// An exchange of the balloon for paging.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Exchange {
    /// The balloon is let down by this now: so much memory is free for it.
    pub down: Pages,
    /// To be evicted, so that what the balloon gives back is made up for.
    pub evict: Pages,
}

/// The exchanges of all VMs while nothing is missing. A balloon is let down only by what is free beyond
/// `safe` already, where reclamation would begin; and for what balloons give back, and for what guests
/// have been given back and not used yet, so much is evicted that `goal` stays free beside it.
pub(super) fn exchanges(free: Pages, safe: Pages, goal: Pages, vms: &[Seen]) -> Vec<Exchange> {
    let turns: Vec<Option<Turn>> = vms.iter().map(Turn::of).collect();
    let sum = |f: fn(&Turn) -> Pages| turns.iter().flatten().map(f).sum::<Pages>();
    let (owed, steps) = (sum(|t| t.owed), sum(|t| t.step));
    let mut spare = free.saturating_sub(safe).saturating_sub(owed);
    let mut lacking = (goal + owed + steps).saturating_sub(free);
    let exchange = |(s, turn): (&Seen, &Option<Turn>)| {
        let Some(Turn { owed, step }) = *turn else { return Exchange::default() };
        let down = step.min(spare);
        spare -= down;
        let above = s.vm.consumed.saturating_sub(s.floor());
        let evict = (owed + step).min(lacking).min(above).min(room(s.vm));
        lacking -= evict;
        Exchange { down, evict }
    };
    vms.iter().zip(&turns).map(exchange).collect()
}

/// Where a VM's exchange stands.
#[derive(Clone, Copy, Debug)]
struct Turn {
    /// What the guest was given back and has not used yet.
    owed: Pages,
    /// What it is given back next.
    step: Pages,
}

impl Turn {
    fn of(s: &Seen) -> Option<Turn> {
        let vm = s.vm;
        let ceiling = vm.tools.ceiling?;
        if vm.tools.first != Tool::Paging || !usable(vm) {
            return None;
        }
        let may = s.most.saturating_sub(vm.left_by(vm.balloon_goal));
        let step = vm.balloon_goal.saturating_sub(ceiling).min(room(vm)).min(may);
        // More than this is not of an exchange: the guest reports free pages, or was given much back.
        let owed = vm.tools.owed(vm.balloon_goal).min(Pages(vm.size.0 / OWED));
        // As long as the guest has not used what it got, it gets no more.
        let step = if owed.0 > step.0 / 2 { Pages::ZERO } else { step };
        Some(Turn { owed, step })
    }
}

/// What a guest was given back counts up to this part of its size.
pub(super) const OWED: u64 = 16;
