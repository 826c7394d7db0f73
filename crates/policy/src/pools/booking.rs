//! Promises in pools: whose min is taken from whom (vSphere's admission control of reservations).
//!
//! What a VM is promised, min and overhead, is taken from its pool. A pool takes its own min from its
//! parent, used or not. One that is expandable takes more from its parent when its VMs are promised
//! more than its min; one that is not refuses. No pool promises more than its max.

use std::fmt;

use ballast_units::Pages;

use super::{Pool, PoolId, ancestors};
use crate::admission::told_apart;

/// What is promised on a host.
#[derive(Clone, Debug)]
pub struct Books<'a> {
    /// All pools.
    pub pools: &'a [Pool],
    /// Machine memory that may be promised on the host.
    pub capacity: Pages,
    /// Each promise: the pool it is taken from, and min + overhead.
    pub promises: Vec<(Option<PoolId>, Pages)>,
}

/// What holds a pool back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lack {
    /// The host's memory.
    Host,
    /// The pool's min, which it may not exceed.
    Min,
    /// The pool's max.
    Max,
}

/// A promise that cannot be made: which pool lacks how much.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Shortage {
    /// None: the host itself.
    pub pool: Option<String>,
    /// What it would have to promise in addition; nothing where it may promise less than it has.
    pub need: Pages,
    /// What it has left.
    pub left: Pages,
    /// Of how much.
    pub of: Pages,
    /// What it had promised before.
    pub promised: Pages,
    /// What holds it back.
    pub lack: Lack,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shortage { pool, need, left, of, promised, lack } = self;
        let name = pool.as_deref().unwrap_or_default();
        if need.is_zero() {
            let (promised, of) = told_apart(*promised, *of);
            return match lack {
                Lack::Host => write!(f, "{promised} is promised, {of} can be"),
                Lack::Min => write!(
                    f,
                    "pool {name} has promised {promised}, and its min is {of} (it is not expandable)"
                ),
                Lack::Max => write!(f, "pool {name} has promised {promised}, and its max is {of}"),
            };
        }
        let (need, left) = told_apart(*need, *left);
        match lack {
            Lack::Host => write!(f, "needs {need} unreserved, {left} free of promises"),
            Lack::Min => write!(
                f,
                "needs {need} unreserved, pool {name} has {left} left of its min of {of} (it is not \
                 expandable)"
            ),
            Lack::Max => {
                write!(f, "needs {need} unreserved, pool {name} has {left} left of its max of {of}")
            }
        }
    }
}

/// What a pool, or the host, has promised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promised {
    /// To its VMs and pools.
    pub used: Pages,
    /// The most it may promise; None: what its parent has.
    pub allowed: Option<Pages>,
    lack: Lack,
}

impl Promised {
    /// What it may still promise of its own; None: whatever its parent has.
    pub fn left(&self) -> Option<Pages> {
        self.allowed.map(|allowed| allowed.saturating_sub(self.used))
    }

    fn excess(&self) -> Pages {
        self.allowed.map_or(Pages::ZERO, |allowed| self.used.saturating_sub(allowed))
    }
}

impl Books<'_> {
    /// What each pool has promised, in their order, and last the host.
    pub fn promised(&self) -> Vec<Promised> {
        let pools = self.pools;
        let mut found: Vec<Promised> = pools.iter().map(Promised::nothing).collect();
        let host = Promised { used: Pages::ZERO, allowed: Some(self.capacity), lack: Lack::Host };
        found.push(host);
        for &(pool, pages) in &self.promises {
            let at = ancestors(pools, pool).next().unwrap_or(pools.len());
            add(&mut found[at].used, pages);
        }
        // The innermost first: what they take from their parents is known then.
        let mut order: Vec<usize> = (0..pools.len()).collect();
        order.sort_by_key(|&i| std::cmp::Reverse(ancestors(pools, Some(pools[i].id)).count()));
        for i in order {
            let taken = found[i].used.max(pools[i].min);
            let parent = ancestors(pools, pools[i].parent).next().unwrap_or(pools.len());
            add(&mut found[parent].used, taken);
        }
        found
    }

    /// Whether `pages` more can be promised to a VM in `pool`.
    ///
    /// # Errors
    /// The innermost pool that cannot, else the host, with its numbers.
    pub fn admit(&self, pool: Option<PoolId>, pages: Pages) -> Result<(), Shortage> {
        let mut after = self.clone();
        after.promises.push((pool, pages));
        after.no_worse_than(self)
    }

    /// Whether these promises can be made in place of `before`: none may be exceeded further than it
    /// was. So a change that heals one of two shortages is allowed, and so is one elsewhere.
    ///
    /// # Errors
    /// The innermost pool that cannot, else the host.
    pub fn no_worse_than(&self, before: &Books<'_>) -> Result<(), Shortage> {
        let (now, old) = (self.promised(), before.promised());
        let old_of = |i: usize| match self.pools.get(i) {
            Some(pool) => before.pools.iter().position(|p| p.id == pool.id).map(|i| &old[i]),
            None => old.last(),
        };
        let depth = |i: usize| {
            self.pools.get(i).map_or(0, |pool| ancestors(self.pools, Some(pool.id)).count())
        };
        let worse = |i: &usize| now[*i].excess() > old_of(*i).map_or(Pages::ZERO, Promised::excess);
        let Some(i) = (0..now.len()).filter(worse).max_by_key(|&i| depth(i)) else {
            return Ok(());
        };
        let (of, lack) = (now[i].allowed.unwrap_or_default(), now[i].lack);
        let was = old_of(i).map_or(Pages::ZERO, |old| old.used);
        Err(Shortage {
            pool: self.pools.get(i).map(|pool| pool.name.clone()),
            need: now[i].used.saturating_sub(was),
            left: of.saturating_sub(was),
            of,
            promised: was,
            lack,
        })
    }
}

impl Promised {
    fn nothing(pool: &Pool) -> Promised {
        let (allowed, lack) = match pool.max {
            max if pool.expandable => (max, Lack::Max),
            Some(max) if max < pool.min => (Some(max), Lack::Max),
            _ => (Some(pool.min), Lack::Min),
        };
        Promised { used: Pages::ZERO, allowed, lack }
    }
}

fn add(sum: &mut Pages, pages: Pages) {
    sum.0 = sum.0.saturating_add(pages.0);
}

#[cfg(test)]
#[path = "booking_tests.rs"]
mod tests;
