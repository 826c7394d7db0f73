//! Why a plan asks what it asks of a VM, in plain words.

use std::fmt;

use ballast_units::Pages;
use serde::{Deserialize, Serialize};

use crate::state::State;
use crate::tools::Cost;

/// Why pages are evicted rather than ballooned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EvictCause {
    /// Hard or low: paging reclaims whatever balloons do.
    Shortage(State),
    /// The guest has no balloon driver ([`Missing`](crate::Health::Missing)).
    NoBalloon,
    /// The balloon does not move ([`Stuck`](crate::Health::Stuck)): it gets none of what is to be taken.
    BalloonStuck,
    /// The balloon moves, but is behind ([`Slow`](crate::Health::Slow)): what it was asked before is
    /// evicted; what is new it gets a chance to do.
    BalloonSlow,
    /// The balloon does what it is told, but was seen to be too slow to deliver all of it in time.
    BalloonLate,
    /// The balloon is healthy, but the guest bears no more of it.
    BalloonLimit,
    /// The balloon holds what it was asked for, and part of that freed nothing: others share it.
    BalloonInVain,
    /// Paging was measured to cost less than the balloon, or not measured yet and is tried.
    Cheaper {
        /// Of a page that the balloon holds. None: not measured lately.
        balloon: Option<Cost>,
        /// Of a page that is compressed or swapped. None: not measured lately.
        paging: Option<Cost>,
    },
}

impl fmt::Display for EvictCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EvictCause::Shortage(state) => {
                write!(f, "in state {state} paging reclaims without waiting for the balloon")
            }
            EvictCause::NoBalloon => f.write_str("the guest has no balloon driver"),
            EvictCause::BalloonStuck => f.write_str("its balloon does not move"),
            EvictCause::BalloonSlow => f.write_str("its balloon is behind what it was asked"),
            EvictCause::BalloonLate => {
                f.write_str("its balloon does not grow fast enough to deliver it all in time")
            }
            EvictCause::BalloonLimit => f.write_str("the guest bears no larger balloon"),
            EvictCause::BalloonInVain => f.write_str(
                "what its balloon is yet to bring frees less than that: others share pages of it",
            ),
            EvictCause::Cheaper { balloon, paging } => costs(f, *balloon, *paging),
        }
    }
}

/// Why a VM gets the plan it gets.
///
/// A `target` in them is what reclamation leaves the VM: what it is entitled to, but at least its min and
/// at most its max.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Reason {
    /// It consumes no more than its target.
    WithinTarget {
        /// Machine pages it has.
        consumed: Pages,
        /// At least as many.
        target: Pages,
    },
    /// It consumes more than its target, and nobody needs it.
    Plenty {
        /// Machine pages it has.
        consumed: Pages,
        /// Fewer than that.
        target: Pages,
    },
    /// It consumes more than its target, and VMs with a smaller rho cover the deficit.
    Spared {
        /// As of the plan; not high.
        state: State,
        /// Missing to the goal, over all VMs.
        deficit: Pages,
        /// Machine pages it has.
        consumed: Pages,
        /// Fewer than that.
        target: Pages,
        /// Its allocations wait: the state is low.
        block: bool,
    },
    /// Its balloon kept from it what it is entitled to.
    Entitled {
        /// What it is to be able to use.
        target: Pages,
        /// The balloon goal so far: more than size - target.
        from: Pages,
        /// The balloon goal from now on.
        to: Pages,
    },
    /// Its balloon is let down because free memory allows it.
    Released {
        /// By which the balloon goal is lowered.
        pages: Pages,
        /// The balloon goal from now on.
        left: Pages,
    },
    /// The guest itself runs short: its balloon is let down to what it bears.
    GuestShort {
        /// The balloon goal so far.
        from: Pages,
        /// The largest balloon that the guest bears now.
        limit: Pages,
    },
    /// Its balloon costs much more than paging: it is let down in exchange for that.
    Exchanged {
        /// The balloon goal so far.
        from: Pages,
        /// The balloon goal from now on; the same while too little is free for a step.
        to: Pages,
        /// Pages to evict in exchange.
        evict: Pages,
        /// Of a page that the balloon holds. None: not measured lately.
        balloon: Option<Cost>,
        /// Of a page that is compressed or swapped. None: not measured lately.
        paging: Option<Cost>,
    },
    /// Its balloon is kept for the NUMA node that it is bound to, where there is no more memory for it.
    NodeFull {
        /// The kernel's number of the node.
        node: u32,
        /// The balloon goal that the host has memory for.
        host: Pages,
        /// The balloon goal from now on.
        to: Pages,
    },
    /// Its balloon costs more than paging, which is enough again: it grows no further.
    Enough {
        /// The balloon goal so far.
        from: Pages,
        /// What the guest has given up of it, the goal from now on.
        to: Pages,
        /// Of a page that the balloon holds. None: not measured lately.
        balloon: Option<Cost>,
        /// Of a page that is compressed or swapped. None: not measured lately.
        paging: Option<Cost>,
    },
    /// Memory is taken from it.
    Reclaim {
        /// As of the plan: high only if all of it is above a max.
        state: State,
        /// Free memory missing to the goal, over all VMs.
        deficit: Pages,
        /// Of what is taken, this is above the VM's max, or a pool's above it; ...
        over_max: Pages,
        /// ... and of that, this is because of the pool.
        #[serde(default)]
        over_pool: Pages,
        /// Machine pages it has.
        consumed: Pages,
        /// What is to be left of it.
        leave: Pages,
        /// Size its balloon is to have.
        balloon: Pages,
        /// Pages to evict now, as far as there is room for them.
        evict: Pages,
        /// Why pages should be evicted. None: all is left to the balloon.
        cause: Option<EvictCause>,
        /// What should be evicted beside, had it the swap space.
        no_swap_for: Pages,
        /// Its allocations wait: the state is low, and it is above target.
        block: bool,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Reason::WithinTarget { consumed, target } => {
                write!(f, "it uses {consumed}, within its target of {target}: nothing is taken")
            }
            Reason::Plenty { consumed, target } => write!(
                f,
                "it uses {consumed}, above its target of {target}, but enough memory is free: \
                 nothing is taken"
            ),
            Reason::Spared { deficit, consumed, target, block, .. } => {
                write!(
                    f,
                    "it uses {consumed}, above its target of {target}; the missing {deficit} come \
                     from VMs with a smaller rho"
                )?;
                blocked(f, block)
            }
            Reason::Entitled { target, from, to } => write!(
                f,
                "its balloon of {from} kept it below its target of {target}: let down to {to}"
            ),
            Reason::Released { pages, left } => write!(
                f,
                "enough memory is free: {pages} given back from its balloon, which keeps {left}"
            ),
            Reason::GuestShort { from, limit } => write!(
                f,
                "the guest itself runs short: its balloon goes from {from} down to the {limit} it \
                 bears"
            ),
            Reason::Exchanged { from, to, evict, balloon, paging } => {
                exchanged(f, (from, to), evict)?;
                costs(f, balloon, paging)
            }
            Reason::NodeFull { node, host, to } => kept(f, node, host, to),
            Reason::Enough { from, to, balloon, paging } => {
                write!(f, "its balloon, asked for {from}, stays at {to}: paging is enough, and ")?;
                costs(f, balloon, paging)
            }
            Reason::Reclaim {
                deficit,
                over_max,
                over_pool,
                consumed,
                leave,
                balloon,
                evict,
                cause,
                no_swap_for,
                block,
                ..
            } => {
                taken(f, (consumed, leave), deficit, (over_max, over_pool))?;
                write!(f, "; balloon to {balloon}")?;
                evicted(f, evict, cause, no_swap_for)?;
                blocked(f, block)
            }
        }
    }
}

fn kept(f: &mut fmt::Formatter<'_>, node: u32, host: Pages, to: Pages) -> fmt::Result {
    write!(
        f,
        "its balloon is to hold {to}, and not the {host} that would do for the host: node {node}, to which it is bound, has no more to \
         give back"
    )
}

/// How far the balloon comes down, or that it cannot yet.
fn exchanged(f: &mut fmt::Formatter<'_>, (from, to): (Pages, Pages), evict: Pages) -> fmt::Result {
    if to < from {
        write!(f, "its balloon goes from {from} down to {to}")?;
    } else {
        write!(f, "its balloon of {from} is to come down when memory is free for that")?;
    }
    write!(f, " in exchange for paging ({evict} evicted), because ")
}

/// How much is taken, and whether for a max, for the host, or for both.
fn taken(
    f: &mut fmt::Formatter<'_>,
    (consumed, leave): (Pages, Pages),
    deficit: Pages,
    (over_max, over_pool): (Pages, Pages),
) -> fmt::Result {
    let take = consumed.saturating_sub(leave);
    let whose = if over_pool.is_zero() { "its" } else { "its pool's" };
    if take <= over_max {
        write!(f, "it uses {consumed}, {over_max} above {whose} max: {take} are taken")
    } else if over_max.is_zero() {
        write!(
            f,
            "{deficit} are missing, {take} of them are taken here, from {consumed} down to {leave}"
        )
    } else {
        write!(
            f,
            "it uses {consumed}, {over_max} above {whose} max, and {deficit} are missing: {take} are \
             taken"
        )
    }
}

/// How much is evicted and why, or why not although there was a cause.
fn evicted(
    f: &mut fmt::Formatter<'_>,
    evict: Pages,
    cause: Option<EvictCause>,
    no_swap_for: Pages,
) -> fmt::Result {
    if !evict.is_zero() {
        write!(f, "; {evict} evicted")?;
    }
    match cause {
        Some(cause) if !evict.is_zero() => write!(f, ", because {cause}")?,
        Some(cause) => write!(f, "; nothing evicted although {cause}")?,
        None => {}
    }
    if !no_swap_for.is_zero() {
        write!(f, "; no swap space for {no_swap_for} more")?;
    }
    Ok(())
}

fn blocked(f: &mut fmt::Formatter<'_>, block: bool) -> fmt::Result {
    if block { f.write_str("; its allocations wait, for it is above target") } else { Ok(()) }
}

/// Why paging comes before the balloon.
fn costs(f: &mut fmt::Formatter<'_>, balloon: Option<Cost>, paging: Option<Cost>) -> fmt::Result {
    match (balloon, paging) {
        (Some(balloon), Some(paging)) => {
            write!(f, "its balloon costs {balloon}, and paging {paging}")
        }
        (Some(balloon), None) => {
            write!(f, "its balloon costs {balloon}, and what paging costs is to be found out")
        }
        (None, Some(paging)) => {
            write!(
                f,
                "paging, at {paging}, was the cheaper tool when the balloon was measured last"
            )
        }
        (None, None) => f.write_str("paging was the cheaper tool when both were measured last"),
    }
}
