//! Pages divided among the children of pools, page by page in effect: each goes to the child with the
//! largest rho, inside it likewise.
//!
//! What a group holds is always a beginning of one fixed sequence: its children's floors, then the
//! page with the lowest price, and so on. A price, or a number of pages, says how far. `curve` says
//! about where that is; from there the pages are granted or revoked one by one, which takes about one
//! step for each child.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use ballast_units::Pages;

use super::curve::{Curve, Sum};
use super::tree::{Child, HOST, Tree};
use crate::shares::{self, Claim, Price};

/// Who has what.
#[derive(Clone, Debug)]
pub(crate) struct Allocation {
    /// Pages of each claim.
    pub held: Vec<u64>,
    /// Of each group of the tree.
    pub groups: Vec<Held>,
}

/// What a group holds, and why not more or less.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Held {
    /// Of all its VMs.
    pub pages: u64,
    /// The least it could have been given.
    pub floor: u64,
    /// The most it could have been given.
    pub ceil: u64,
    /// What its VMs' pages are charged as, idle ones at k.
    pub charge: f64,
    /// 1/rho among its siblings.
    pub price: f64,
    /// Price of the dearest page that a child of it holds beyond what is guaranteed; None if the
    /// children have all they can use.
    pub dearest: Option<f64>,
}

/// Divides `amount` pages, or as many as may and must be held.
pub(crate) fn allocate(tree: &Tree, amount: Pages, claims: &[Claim]) -> Allocation {
    if tree.groups.len() == 1 {
        return flat(amount, claims);
    }
    let work = Work::done(tree, amount, claims);
    let groups = (0..tree.groups.len()).map(|g| work.outcome(g)).collect();
    Allocation { held: work.held, groups }
}

/// The same for who does not ask what groups hold, nor why: the pages of each claim.
pub(crate) fn allocate_pages(tree: &Tree, amount: Pages, claims: &[Claim]) -> Vec<u64> {
    if tree.groups.len() == 1 {
        return shares::allocate(amount, claims).0;
    }
    Work::done(tree, amount, claims).held
}

/// The same for a host without pools, in half the time.
fn flat(amount: Pages, claims: &[Claim]) -> Allocation {
    let (held, dearest) = shares::allocate(amount, claims);
    let sum = |of: &dyn Fn(&Claim) -> u64| claims.iter().map(of).fold(0, u64::saturating_add);
    let charge = claims.iter().zip(&held).map(|(claim, &pages)| claim.charge(pages)).sum::<f64>();
    let host = Held {
        pages: held.iter().copied().fold(0, u64::saturating_add),
        floor: sum(&Claim::floor),
        ceil: sum(&Claim::ceil),
        charge,
        price: charge.max(1.0),
        dearest,
    };
    Allocation { held, groups: vec![host] }
}

/// A child's offer for its next page, or the price of its last one; void once it holds another number
/// of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Bid {
    price: Price,
    /// VMs before pools, then by number.
    rank: (bool, u32),
    child: u32,
    pages: u64,
}

#[derive(Clone, Debug, Default)]
struct Node {
    floor: u64,
    ceil: u64,
    /// The same of all children together.
    floors: u64,
    ceils: u64,
    pages: u64,
    charge: f64,
    curve: Option<Curve>,
    /// Its children's shares on average.
    mean_shares: f64,
    /// Bids for a page more, and for the last one: each set up when it is first asked for.
    next: Option<BinaryHeap<Reverse<Bid>>>,
    last: Option<BinaryHeap<Bid>>,
}

struct Work<'a> {
    tree: &'a Tree,
    claims: &'a [Claim],
    held: Vec<u64>,
    nodes: Vec<Node>,
}

impl<'a> Work<'a> {
    fn done(tree: &'a Tree, amount: Pages, claims: &'a [Claim]) -> Work<'a> {
        let mut work = Work::new(tree, claims);
        let amount = amount.0.clamp(work.nodes[HOST].floor, work.nodes[HOST].ceil);
        work.fill(HOST, amount);
        work
    }

    fn new(tree: &'a Tree, claims: &'a [Claim]) -> Work<'a> {
        let mut nodes = vec![Node::default(); tree.groups.len()];
        for (g, group) in tree.groups.iter().enumerate().rev() {
            let (mut floors, mut ceils, mut shares) = (0u64, 0u64, 0.0);
            for &child in &group.children {
                let (floor, ceil, own) = match child {
                    Child::Leaf(i) => {
                        let claim = &claims[i as usize];
                        (claim.floor(), claim.ceil(), claim.shares())
                    }
                    Child::Group(c) => {
                        let node = &nodes[c as usize];
                        (node.floor, node.ceil, tree.groups[c as usize].shares)
                    }
                };
                shares += own;
                floors = floors.saturating_add(floor);
                ceils = ceils.saturating_add(ceil);
            }
            let ceil = group.max.min(ceils).max(floors);
            let floor = group.min.min(ceil).max(floors);
            let mean_shares = shares / group.children.len().max(1) as f64;
            nodes[g] = Node { floor, ceil, floors, ceils, mean_shares, ..Node::default() };
        }
        Work { tree, claims, held: vec![0; claims.len()], nodes }
    }

    fn children(&self, g: usize) -> &'a [Child] {
        &self.tree.groups[g].children
    }

    fn pages(&self, child: Child) -> u64 {
        match child {
            Child::Leaf(i) => self.held[i as usize],
            Child::Group(c) => self.nodes[c as usize].pages,
        }
    }

    fn charge(&self, child: Child) -> f64 {
        match child {
            Child::Leaf(i) => self.claims[i as usize].charge(self.held[i as usize]),
            Child::Group(c) => self.nodes[c as usize].charge,
        }
    }

    fn floor(&self, child: Child) -> u64 {
        match child {
            Child::Leaf(i) => self.claims[i as usize].floor(),
            Child::Group(c) => self.nodes[c as usize].floor,
        }
    }

    fn shares(&self, child: Child) -> f64 {
        match child {
            Child::Leaf(i) => self.claims[i as usize].shares(),
            Child::Group(c) => self.tree.groups[c as usize].shares,
        }
    }

    /// Gives a group exactly so many pages, which lie between its floor and its ceiling.
    fn fill(&mut self, g: usize, pages: u64) {
        let node = &self.nodes[g];
        if pages <= node.floors || pages >= node.ceils {
            let least = pages <= node.floors;
            for &child in self.children(g) {
                match child {
                    Child::Leaf(i) => {
                        let claim = &self.claims[i as usize];
                        self.held[i as usize] = if least { claim.floor() } else { claim.ceil() };
                    }
                    Child::Group(c) => {
                        let node = &self.nodes[c as usize];
                        let pages = if least { node.floor } else { node.ceil };
                        self.fill(c as usize, pages);
                    }
                }
            }
            return self.add_up(g);
        }
        let about = self.curve(g).at_pages(pages as f64);
        self.settle_children(g, about.price_of_whole(self.nodes[g].mean_shares));
        while self.nodes[g].pages > pages && self.revoke(g) {}
        while self.nodes[g].pages < pages && self.grant(g) {}
    }

    /// Gives a group all pages whose price is at most `price`, and those it holds in any case.
    fn settle(&mut self, g: usize, price: f64) {
        let spend = self.tree.groups[g].spend(price);
        let (floor, ceil) = (self.nodes[g].floor, self.nodes[g].ceil);
        let about = self.curve(g).at_charge(spend);
        if about.pages() <= floor as f64 {
            self.fill(g, floor);
        } else if about.pages() >= ceil as f64 {
            self.fill(g, ceil);
        } else {
            self.settle_children(g, about.price_of_whole(self.nodes[g].mean_shares));
        }
        while self.nodes[g].pages > ceil && self.revoke(g) {}
        while self.nodes[g].pages < floor && self.grant(g) {}
        let shares = self.tree.groups[g].shares;
        while self.nodes[g].pages > floor && self.nodes[g].charge / shares > price && self.revoke(g)
        {
        }
        while self.nodes[g].pages < ceil
            && self.next_step(g).is_some_and(|step| (self.nodes[g].charge + step) / shares <= price)
            && self.grant(g)
        {}
    }

    fn settle_children(&mut self, g: usize, price: f64) {
        for &child in self.children(g) {
            match child {
                Child::Leaf(i) => self.held[i as usize] = self.claims[i as usize].held(price),
                Child::Group(c) => self.settle(c as usize, price),
            }
        }
        self.add_up(g);
    }

    fn add_up(&mut self, g: usize) {
        let (mut pages, mut charge) = (0u64, 0.0);
        for &child in self.children(g) {
            pages = pages.saturating_add(self.pages(child));
            charge += self.charge(child);
        }
        let node = &mut self.nodes[g];
        (node.pages, node.charge) = (pages, charge);
        (node.next, node.last) = (None, None);
    }

    fn curve(&mut self, g: usize) -> &Curve {
        if self.nodes[g].curve.is_none() {
            let mut sum = Sum::of(self.children(g).len());
            for &child in self.children(g) {
                match child {
                    Child::Leaf(i) => sum.add_claim(&self.claims[i as usize]),
                    Child::Group(c) => {
                        let shares = self.tree.groups[c as usize].shares;
                        sum.add(shares, self.curve(c as usize).corners());
                    }
                }
            }
            let node = &mut self.nodes[g];
            node.curve = Some(sum.curve(node.floor as f64, node.ceil as f64));
        }
        self.nodes[g].curve.get_or_insert_default()
    }

    /// What one page more would be charged to a child; None if it takes none.
    fn step_up(&mut self, child: Child) -> Option<f64> {
        match child {
            Child::Leaf(i) => {
                let (claim, held) = (&self.claims[i as usize], self.held[i as usize]);
                (held < claim.ceil()).then(|| claim.charge(held + 1) - claim.charge(held))
            }
            Child::Group(c) => {
                let node = &self.nodes[c as usize];
                if node.pages < node.ceil { self.next_step(c as usize) } else { None }
            }
        }
    }

    /// What the next page of a group would be charged.
    fn next_step(&mut self, g: usize) -> Option<f64> {
        let bid = self.peek_next(g)?;
        self.step_up(self.children(g)[bid.child as usize])
    }

    fn next_bid(&mut self, g: usize, at: usize) -> Option<Bid> {
        let child = self.children(g)[at];
        let step = self.step_up(child)?;
        let price = (self.charge(child) + step) / self.shares(child);
        Some(self.bid(child, at, price))
    }

    fn last_bid(&self, g: usize, at: usize) -> Option<Bid> {
        let child = self.children(g)[at];
        let holds_more = self.pages(child) > self.floor(child);
        holds_more.then(|| self.bid(child, at, self.charge(child) / self.shares(child)))
    }

    fn bid(&self, child: Child, at: usize, price: f64) -> Bid {
        let rank = match child {
            Child::Leaf(i) => (false, self.claims[i as usize].id().0),
            Child::Group(c) => (true, self.tree.groups[c as usize].id.0),
        };
        Bid { price: Price(price), rank, child: at as u32, pages: self.pages(child) }
    }

    fn is_void(&self, g: usize, bid: &Bid) -> bool {
        self.pages(self.children(g)[bid.child as usize]) != bid.pages
    }

    /// The best of the bids for one page more.
    fn peek_next(&mut self, g: usize) -> Option<Bid> {
        if self.nodes[g].next.is_none() {
            let all = 0..self.children(g).len();
            let next: Vec<_> = all.filter_map(|at| self.next_bid(g, at).map(Reverse)).collect();
            self.nodes[g].next = Some(next.into());
        }
        loop {
            let &Reverse(bid) = self.nodes[g].next.as_ref()?.peek()?;
            if !self.is_void(g, &bid) {
                return Some(bid);
            }
            self.nodes[g].next.as_mut()?.pop();
        }
    }

    /// The dearest of the pages that were granted.
    fn peek_last(&mut self, g: usize) -> Option<Bid> {
        if self.nodes[g].last.is_none() {
            let all = 0..self.children(g).len();
            let last: Vec<_> = all.filter_map(|at| self.last_bid(g, at)).collect();
            self.nodes[g].last = Some(last.into());
        }
        loop {
            let &bid = self.nodes[g].last.as_ref()?.peek()?;
            if !self.is_void(g, &bid) {
                return Some(bid);
            }
            self.nodes[g].last.as_mut()?.pop();
        }
    }

    /// One page more, to the child that pays best; false if none takes it.
    fn grant(&mut self, g: usize) -> bool {
        let Some(bid) = self.peek_next(g) else { return false };
        let child = self.children(g)[bid.child as usize];
        let before = self.charge(child);
        match child {
            Child::Leaf(i) => self.held[i as usize] += 1,
            Child::Group(c) => {
                if !self.grant(c as usize) {
                    return false;
                }
            }
        }
        self.moved(g, bid.child as usize, before);
        self.nodes[g].pages += 1;
        true
    }

    /// One page less, from the child that pays worst; false if all are down to what is guaranteed.
    fn revoke(&mut self, g: usize) -> bool {
        let Some(bid) = self.peek_last(g) else { return false };
        let child = self.children(g)[bid.child as usize];
        let before = self.charge(child);
        match child {
            Child::Leaf(i) => self.held[i as usize] -= 1,
            Child::Group(c) => {
                if !self.revoke(c as usize) {
                    return false;
                }
            }
        }
        self.moved(g, bid.child as usize, before);
        self.nodes[g].pages -= 1;
        true
    }

    fn moved(&mut self, g: usize, at: usize, before: f64) {
        let charge = self.charge(self.children(g)[at]);
        self.nodes[g].charge += charge - before;
        if self.nodes[g].next.is_some() {
            let bid = self.next_bid(g, at).map(Reverse);
            self.nodes[g].next.get_or_insert_default().extend(bid);
        }
        if self.nodes[g].last.is_some() {
            let bid = self.last_bid(g, at);
            self.nodes[g].last.get_or_insert_default().extend(bid);
        }
    }

    fn outcome(&self, g: usize) -> Held {
        let node = &self.nodes[g];
        let granted = (0..self.children(g).len()).filter_map(|at| self.last_bid(g, at));
        let dearest = granted.map(|bid| bid.price.0).fold(0.0, f64::max);
        Held {
            pages: node.pages,
            floor: node.floor,
            ceil: node.ceil,
            charge: node.charge,
            price: node.charge.max(1.0) / self.tree.groups[g].shares,
            dearest: (node.pages < node.ceils).then_some(dearest),
        }
    }
}
