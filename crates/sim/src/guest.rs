//! One VM: a guest with its memory, counted by class and place, and what the mechanisms do to it.
//!
//! ```text
//!   size = active + idle + untouched + balloon
//!          active, idle: each resident, compressed or swapped
//! ```
//!
//! Active pages are touched again and again, idle ones were touched once. Within the active pages
//! accesses are skewed: the most popular part x of them gets x^(1 - skew) of the accesses. Eviction
//! is random, as the pager's; a balloon takes what the guest can spare best: pages it never touched,
//! then idle ones, then page cache it still uses. Sharing and compression are fractions.

use ballast_units::Pages;

use crate::load::Demand;
use crate::models::Models;
use crate::places::{Places, portion};

/// What of a guest does not change.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Nature {
    /// Pages configured.
    pub size: u64,
    /// Part of what it uses, 0 to 1, that it could drop and read again: page cache.
    pub cache: f64,
    /// Part of its resident pages, 0 to 1, that other pages equal.
    pub share: f64,
    /// Seconds between two touches of an active page, above 0.
    pub touch_every: f64,
    /// Seconds between two touches of an idle page; 0: never.
    pub idle_reuse: f64,
    /// 0 to 0.95. 0: all active pages are touched alike; towards 1: few pages get nearly all accesses.
    pub skew: f64,
}

/// The memory of one guest, in pages.
#[derive(Clone, Debug)]
pub struct Guest {
    /// What does not change.
    pub nature: Nature,
    /// What it would use now, at most its size.
    pub demand: Demand,
    /// Where its active pages are.
    pub active: Places,
    /// Where those are that it touched and does not use now.
    pub idle: Places,
    /// Never touched, or given up and given back by its balloon.
    pub untouched: u64,
    /// Held by its balloon.
    pub balloon: u64,
    /// Resident pages that are backed by common ones, and cost nothing.
    pub shared: u64,
    /// Pages that the guest was seen to give up, a running count.
    pub discarded: u64,
    carry: Carry,
}

/// Parts of pages that slow flows have left over.
#[derive(Clone, Copy, Debug, Default)]
struct Carry {
    fault: f64,
    share: f64,
}

/// What accesses did in one step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Accesses {
    /// Pages touched for the first time.
    pub touched: u64,
    /// Faults served from the compressed tier.
    pub compressed: u64,
    /// Faults served from swap.
    pub swapped: u64,
    /// Pages that the guest read again from its own disk: what its balloon cost it.
    pub guest_reads: f64,
    /// The part of the work it wanted to do that it did, 0 to 1.
    pub work: f64,
    /// It waited for machine memory.
    pub waited: bool,
}

impl Guest {
    /// One that has touched nothing.
    pub fn new(nature: Nature) -> Guest {
        Guest {
            nature,
            demand: Demand::default(),
            active: Places::default(),
            idle: Places::default(),
            untouched: nature.size,
            balloon: 0,
            shared: 0,
            discarded: 0,
            carry: Carry::default(),
        }
    }

    /// What the guest may touch: its size less its balloon, pages.
    pub fn room(&self) -> u64 {
        self.nature.size - self.balloon
    }

    /// Pages in machine memory, shared ones among them.
    pub fn resident(&self) -> u64 {
        self.active.resident + self.idle.resident
    }

    /// Pages in the compressed tier.
    pub fn compressed(&self) -> u64 {
        self.active.compressed + self.idle.compressed
    }

    /// Pages in swap.
    pub fn swapped(&self) -> u64 {
        self.active.swapped + self.idle.swapped
    }

    /// Pages that hold something, wherever they are.
    pub fn touched(&self) -> u64 {
        self.active.total() + self.idle.total()
    }

    /// The most machine pages that compressed pages may take.
    fn cache(&self, m: &Models) -> u64 {
        (self.nature.size as f64 * m.compress_percent / 100.0) as u64
    }

    /// Machine pages of that which are left: by so much at least it shrinks without swap.
    pub fn spare_room(&self, m: &Models) -> u64 {
        if m.compress_fits > 0.0 { self.cache(m).saturating_sub(self.frames(m)) } else { 0 }
    }

    /// Machine pages that compressed pages take.
    fn frames(&self, m: &Models) -> u64 {
        match self.compressed() {
            0 => 0,
            pages => (pages as f64 * m.compress_frame).ceil() as u64,
        }
    }

    /// Machine pages that are charged to it.
    pub fn consumed(&self, m: &Models) -> u64 {
        self.resident() - self.shared + self.frames(m)
    }

    /// The invariants of the counts; panics where one does not hold.
    pub fn check(&self) {
        assert_eq!(self.touched() + self.untouched + self.balloon, self.nature.size, "{self:?}");
        assert!(self.shared <= self.resident(), "{self:?}");
    }

    /// Pages that the guest cannot give up without swapping itself.
    pub fn hard(&self) -> u64 {
        (self.demand.used.0 as f64 * (1.0 - self.nature.cache)) as u64
    }

    /// What it tells as its available memory, pages.
    pub fn available(&self) -> u64 {
        self.room().saturating_sub(self.hard())
    }

    /// Pages that it would touch at once: it wants them, and has nothing there.
    pub fn to_touch(&self) -> u64 {
        let want = self.demand.used.0.min(self.room()).saturating_sub(self.touched());
        want.min(self.untouched)
    }

    fn wanted_active(&self) -> u64 {
        self.demand.active.0.min(self.room())
    }

    /// It demands something else from now on: pages become active or idle. False: nothing changed.
    pub fn set_demand(&mut self, demand: Demand) -> bool {
        let size = Pages(self.nature.size);
        let demand = Demand { active: demand.active.min(size), used: demand.used.min(size) };
        let changed = demand != self.demand;
        self.demand = demand;
        self.shift();
        changed
    }

    fn shift(&mut self) {
        let (want, have) = (self.wanted_active(), self.active.total());
        if want > have {
            let moved = self.idle.take(want - have);
            self.active.put(moved);
        } else {
            let moved = self.active.take(have - want);
            self.idle.put(moved);
        }
    }

    /// The balloon moves to `size`, or as far as the guest lets it; returns whether it had to keep
    /// back for the guest's sake.
    pub fn set_balloon(&mut self, size: u64) -> bool {
        // With deflate-on-oom a guest takes back what it cannot do without (docs/adr/0006).
        let most = self.nature.size - self.hard();
        let goal = size.min(most);
        if goal >= self.balloon {
            let mut more = goal - self.balloon;
            self.balloon = goal;
            let free = more.min(self.untouched);
            self.untouched -= free;
            more -= free;
            let idle = self.idle.take(more);
            more -= idle.total();
            let active = self.active.take(more);
            self.discarded += idle.total() + active.total();
            self.unshare();
            self.shift();
        } else {
            self.untouched += self.balloon - goal;
            self.balloon = goal;
        }
        size > most
    }

    fn unshare(&mut self) {
        self.shared = self.shared.min((self.resident() as f64 * self.nature.share) as u64);
    }

    /// Looks for equal pages for `dt` seconds, and shares them.
    pub fn scan(&mut self, m: &Models, dt: f64) {
        let most = (self.resident() as f64 * self.nature.share) as u64;
        let found = most.saturating_sub(self.shared) as f64 * (dt / m.scan_time_s).min(1.0);
        self.carry.share += found;
        let pages = (self.carry.share as u64).min(most.saturating_sub(self.shared));
        self.carry.share -= self.carry.share.floor();
        self.shared += pages;
    }

    /// Evicts at most `pages` pages, to no less than `leave` consumed, with at most `writes` of
    /// them to swap, which has room for `room` more. Returns how many left their homes and how many
    /// were written.
    pub fn evict(
        &mut self,
        m: &Models,
        pages: u64,
        leave: u64,
        writes: u64,
        room: u64,
    ) -> (u64, u64) {
        let pages = pages.min(self.consumed(m).saturating_sub(leave));
        if pages == 0 {
            return (0, 0);
        }
        // A victim that another page equals is shared instead; only unshared ones are victims.
        let resident = self.resident();
        let alone = resident - self.shared;
        let most = (resident as f64 * self.nature.share) as u64;
        let shared = portion(pages, most.saturating_sub(self.shared), alone);
        self.shared += shared;
        let victims = (pages - shared).min(alone);
        let cached = (self.cache(m) as f64 / m.compress_frame.max(0.01)) as u64;
        let fit = (victims as f64 * m.compress_fits) as u64;
        let squeezed = fit.min(cached.saturating_sub(self.compressed()));
        // What finds no room in the cache pushes out as many that were there longer.
        let written = (victims - squeezed).min(writes).min(room);
        let leaving = squeezed + written;
        let from_active = portion(leaving, self.active.resident, resident);
        let from_active = from_active.max(leaving.saturating_sub(self.idle.resident));
        for (class, n) in [(&mut self.active, from_active), (&mut self.idle, leaving - from_active)]
        {
            let squeezed = portion(n, squeezed, leaving);
            class.resident -= n;
            class.compressed += squeezed;
            class.swapped += n - squeezed;
        }
        self.unshare();
        // Nothing of its own is at home any more: what is compressed takes memory, too.
        let mut gone = leaving + shared;
        let mut all_written = written;
        if self.resident() == self.shared && gone < pages {
            let back = self.write_back(m, pages - gone, (writes - written).min(room - written));
            gone += back.0;
            all_written += back.1;
        }
        (gone, all_written)
    }

    /// Compressed pages go on to swap, at most `most` of them, until `want` machine pages are free of them. Returns how
    /// many of these are, and how many went.
    fn write_back(&mut self, m: &Models, want: u64, most: u64) -> (u64, u64) {
        let before = self.frames(m);
        let n = (want as f64 / m.compress_frame.max(0.01)).ceil() as u64;
        let n = n.min(most).min(self.compressed());
        let from_active = portion(n, self.active.compressed, self.compressed());
        let from_active = from_active.max(n.saturating_sub(self.idle.compressed));
        for (class, n) in [(&mut self.active, from_active), (&mut self.idle, n - from_active)] {
            class.compressed -= n;
            class.swapped += n;
        }
        (before - self.frames(m), n)
    }

    /// The guest works for `dt` seconds, with at most `free` pages handed out to it and `reads`
    /// pages read from swap; it is `held` if its allocations wait.
    pub fn work(&mut self, m: &Models, dt: f64, free: u64, reads: u64, held: bool) -> Accesses {
        let mut seen = Accesses { work: 1.0, ..Accesses::default() };
        let mut free = if held { 0 } else { free };

        // What it touches for the first time, or again after its balloon has given it back.
        let want = self.to_touch();
        let pace = (Pages::from_mib(1).0 as f64 * m.touch_mib_s * dt) as u64;
        let granted = want.min(pace).min(free);
        if want.min(pace) > 0 {
            seen.waited = granted < want.min(pace);
            seen.work = granted as f64 / want.min(pace) as f64;
        }
        self.untouched -= granted;
        self.idle.resident += granted;
        seen.touched = granted;
        free -= granted;
        self.shift();

        // What it uses again and again: a second of work asks for so many pages ...
        let n = self.nature;
        let active = self.active.total();
        let touches = self.demand.active.0 as f64 / n.touch_every;
        let fits = hit(self.wanted_active(), self.demand.active.0, n.skew);
        let there = hit(self.active.resident, active, n.skew);
        let misses = if active == 0 { 0.0 } else { touches * fits * (1.0 - there) };
        let guest_misses = touches * (1.0 - fits);
        let swapped = if self.active.gone() == 0 {
            0.0
        } else {
            self.active.swapped as f64 / self.active.gone() as f64
        };
        let fault_us = swapped * m.swap_fault_us + (1.0 - swapped) * m.compress_fault_us;
        // ... and waits for each that is not there.
        let stall =
            (misses * fault_us + guest_misses * (m.guest_disk_us + m.guest_read_cpu_us)) * 1e-6;
        let pace = 1.0 / (1.0 + stall);
        seen.guest_reads = guest_misses * pace * dt;

        // Idle pages come up now and then; those that the balloon made it drop are read again.
        let dropped = self.demand.used.0.saturating_sub(self.room());
        let dropped = dropped.saturating_sub(self.demand.active.0 - self.wanted_active());
        if n.idle_reuse > 0.0 {
            seen.guest_reads += dropped as f64 / n.idle_reuse * dt;
        }
        let idle = if n.idle_reuse > 0.0 { self.idle.gone() as f64 / n.idle_reuse } else { 0.0 };
        self.carry.fault += idle * dt;
        let idle = (self.carry.fault as u64).min(self.idle.gone());
        self.carry.fault -= self.carry.fault.floor();

        let asked = ((misses * pace * dt).ceil() as u64).min(self.active.gone());
        let back = self.fault_in(asked, idle, free, reads);
        seen.compressed = back.compressed;
        seen.swapped = back.swapped;
        let served = back.total().min(asked + idle);
        let part = if asked + idle == 0 { 1.0 } else { served as f64 / (asked + idle) as f64 };
        seen.waited |= part < 1.0 && free.saturating_sub(served) == 0;
        seen.work = seen.work.min(if asked == 0 { pace } else { pace * part });
        seen
    }

    fn fault_in(&mut self, active: u64, idle: u64, free: u64, reads: u64) -> Places {
        let mut all = Places::default();
        let (mut free, mut reads) = (free, reads);
        for (class, n) in [(&mut self.active, active), (&mut self.idle, idle)] {
            let n = n.min(class.gone()).min(free);
            let compressed = portion(n, class.compressed, class.gone());
            let swapped = (n - compressed).min(class.swapped).min(reads);
            class.compressed -= compressed;
            class.swapped -= swapped;
            class.resident += compressed + swapped;
            free -= compressed + swapped;
            reads -= swapped;
            all.compressed += compressed;
            all.swapped += swapped;
        }
        all
    }

    /// Faults and misses per second that the guest would see with `pages` pages of its own, if
    /// `active` of them were its active memory.
    pub fn misses_at(&self, pages: u64, active: u64) -> f64 {
        let touches = active as f64 / self.nature.touch_every;
        touches * (1.0 - hit(pages.min(active), active, self.nature.skew))
    }
}

/// The part of the accesses that find their page when `have` of `all` pages are there.
fn hit(have: u64, all: u64, skew: f64) -> f64 {
    if have >= all {
        1.0
    } else {
        let part = have as f64 / all as f64;
        if skew == 0.0 { part } else { part.powf(1.0 - skew) }
    }
}

#[cfg(test)]
#[path = "guest_tests.rs"]
mod tests;
