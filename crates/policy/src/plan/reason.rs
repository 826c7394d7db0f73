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
    NoBalloon,
    BalloonStuck,
    BalloonSlow,
    /// The balloon does what it is told, but was seen to be too slow to deliver all of it in time.
    BalloonLate,
    /// The balloon is healthy, but the guest bears no more of it.
    BalloonLimit,
    /// Paging was measured to cost less than the balloon, or not measured yet and is tried.
    Cheaper {
        balloon: Option<Cost>,
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
            EvictCause::Cheaper { balloon, paging } => costs(f, *balloon, *paging),
        }
    }
}

/// Why a VM gets the plan it gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Reason {
    /// It consumes no more than its target.
    WithinTarget { consumed: Pages, target: Pages },
    /// It consumes more than its target, and nobody needs it.
    Plenty { consumed: Pages, target: Pages },
    /// It consumes more than its target, and VMs with a smaller rho cover the deficit.
    Spared { state: State, deficit: Pages, consumed: Pages, target: Pages, block: bool },
    /// Its balloon kept from it what it is entitled to.
    Entitled { target: Pages, from: Pages, to: Pages },
    /// Its balloon is let down because free memory allows it.
    Released { pages: Pages, left: Pages },
    /// The guest itself runs short: its balloon is let down to what it bears.
    GuestShort { from: Pages, limit: Pages },
    /// Its balloon costs much more than paging: it is let down in exchange for that.
    Exchanged { from: Pages, to: Pages, evict: Pages, balloon: Option<Cost>, paging: Option<Cost> },
    /// Memory is taken from it.
    Reclaim {
        state: State,
        /// Free memory missing to the goal, over all VMs.
        deficit: Pages,
        /// Of what is taken, this is above the VM's max, or a pool's above it; ...
        over_max: Pages,
        /// ... and of that, this is because of the pool.
        #[serde(default)]
        over_pool: Pages,
        consumed: Pages,
        /// What is to be left of it.
        leave: Pages,
        /// Size its balloon is to have.
        balloon: Pages,
        evict: Pages,
        cause: Option<EvictCause>,
        /// What should be evicted, had it the swap space.
        no_swap_for: Pages,
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
                if to < from {
                    write!(f, "its balloon goes from {from} down to {to}")?;
                } else {
                    write!(
                        f,
                        "its balloon of {from} is to come down when memory is free for that"
                    )?;
                }
                write!(f, " in exchange for paging ({evict} evicted), because ")?;
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
                let take = consumed.saturating_sub(leave);
                let whose = if over_pool.is_zero() { "its" } else { "its pool's" };
                if take <= over_max {
                    write!(
                        f,
                        "it uses {consumed}, {over_max} above {whose} max: {take} are taken"
                    )?;
                } else if over_max.is_zero() {
                    write!(
                        f,
                        "{deficit} are missing on the host, {take} of them are taken here, from \
                         {consumed} down to {leave}"
                    )?;
                } else {
                    write!(
                        f,
                        "it uses {consumed}, {over_max} above {whose} max, and {deficit} are \
                         missing on the host: {take} are taken"
                    )?;
                }
                write!(f, "; balloon to {balloon}")?;
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
                blocked(f, block)
            }
        }
    }
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
