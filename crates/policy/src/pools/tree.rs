//! Who is whose child: the host, its pools and their VMs as numbered groups, parents first.

use std::collections::HashMap;

use ballast_units::Pages;
use serde::{Deserialize, Serialize};

use super::{Pool, PoolId};

/// The group that is the host itself.
pub(crate) const HOST: usize = 0;

/// A member of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Child {
    /// A VM, by its place among the claims.
    Leaf(u32),
    /// A pool, by its place among the groups.
    Group(u32),
}

/// The host, or a pool.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    /// Settles equal prices among siblings; pools come after VMs.
    pub id: PoolId,
    /// Against its siblings, at least 1.
    pub shares: f64,
    /// Pages that its VMs have in any case: what their overhead takes is left out.
    pub min: u64,
    /// The most pages that its VMs may have, likewise; `u64::MAX`: no limit.
    pub max: u64,
    pub children: Vec<Child>,
}

/// Parents come before their children, so going backwards meets children first.
#[derive(Clone, Debug)]
pub(crate) struct Tree {
    pub groups: Vec<Group>,
    /// Of each pool, in the order they were given in, its group.
    pub of_pool: Vec<usize>,
}

/// A VM as far as pools are concerned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// None, or one that is not there: a child of the host.
    pub pool: Option<PoolId>,
    /// Overhead memory, which counts against the bounds of its pools.
    pub overhead: Pages,
}

impl Tree {
    /// Pools whose parent is missing, or who are their own ancestors, count as children of the host. What `outside` holds
    /// counts against the bounds of its pools, as overhead does, and is no child of theirs.
    pub fn new(
        pools: &[Pool],
        members: impl IntoIterator<Item = Member>,
        outside: &[Member],
    ) -> Tree {
        let places: HashMap<PoolId, usize> =
            pools.iter().enumerate().map(|(i, pool)| (pool.id, i)).collect();
        let mut below: Vec<Vec<usize>> = vec![Vec::new(); pools.len() + 1];
        for (i, pool) in pools.iter().enumerate() {
            let parent = pool.parent.and_then(|id| places.get(&id));
            below[parent.map_or(pools.len(), |&p| p)].push(i);
        }
        let mut tree = Tree { groups: vec![Group::host()], of_pool: vec![HOST; pools.len()] };
        let mut queue: Vec<(usize, usize)> =
            below[pools.len()].iter().map(|&i| (i, HOST)).collect();
        let (mut next, mut seen) = (0, vec![false; pools.len()]);
        loop {
            while let Some(&(i, parent)) = queue.get(next) {
                next += 1;
                if !std::mem::replace(&mut seen[i], true) {
                    let group = tree.groups.len();
                    tree.groups.push(Group::of(&pools[i]));
                    tree.groups[parent].children.push(Child::Group(group as u32));
                    tree.of_pool[i] = group;
                    queue.extend(below[i].iter().map(|&child| (child, group)));
                }
            }
            match seen.iter().position(|seen| !seen) {
                Some(in_a_circle) => queue.push((in_a_circle, HOST)),
                None => break,
            }
        }
        let mut overheads = vec![0u64; tree.groups.len()];
        let leaves = members.into_iter().enumerate().map(|(i, member)| (member, Some(i)));
        for (member, leaf) in leaves.chain(outside.iter().map(|member| (*member, None))) {
            let place = member.pool.and_then(|id| places.get(&id));
            let group = place.map_or(HOST, |&i| tree.of_pool[i]);
            tree.groups[group].children.extend(leaf.map(|leaf| Child::Leaf(leaf as u32)));
            overheads[group] = overheads[group].saturating_add(member.overhead.0);
        }
        for g in (0..tree.groups.len()).rev() {
            for c in 0..tree.groups[g].children.len() {
                if let Child::Group(child) = tree.groups[g].children[c] {
                    overheads[g] = overheads[g].saturating_add(overheads[child as usize]);
                }
            }
            let group = &mut tree.groups[g];
            group.min = group.min.saturating_sub(overheads[g]);
            if group.max != u64::MAX {
                group.max = group.max.saturating_sub(overheads[g]);
            }
        }
        tree
    }
}

impl Group {
    fn host() -> Group {
        Group { id: PoolId(0), shares: 1.0, min: 0, max: u64::MAX, children: Vec::new() }
    }

    fn of(pool: &Pool) -> Group {
        Group {
            id: pool.id,
            shares: f64::from(pool.shares.max(1)),
            min: pool.min.0,
            max: pool.max.map_or(u64::MAX, |max| max.0),
            children: Vec::new(),
        }
    }
}
