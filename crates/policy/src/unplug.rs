//! The second actuator beside the balloon: memory that was plugged into a guest while it ran (virtio-mem) is
//! unplugged where the balloon does not deliver what is to be taken.
//!
//! A balloon comes first, for it takes single pages and gives them back at once; memory that is unplugged goes in
//! blocks whose pages the guest has to move elsewhere. What is unplugged is
//!
//! - what is to be taken beyond the largest balloon: QEMU's device knows only of what the guest began with,
//! - what a balloon that is missing or stuck does not take.
//!
//! To the policy both are one balloon: what they hold together, how much more the guest bears, and whether it comes
//! ([`together`]). What is plugged is in QEMU's books, but nothing keeps a guest from using what it has unplugged:
//! whether either is believed is told by the pages that it uses, of which the balloon's controller knows.

use std::collections::VecDeque;
use std::time::Duration;

use ballast_units::Pages;

use crate::balloon::{
    BalloonConfig, BalloonControl, BalloonInput, BalloonOutput, Health, MAX_PACE, per_pace,
    remember,
};

/// What is known of the guest's memory now.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct UnplugInput {
    /// Monotonic time since any fixed moment.
    pub now: Duration,
    /// What is to be withheld from the guest in all, by its balloon and by unplugging.
    pub goal: Pages,
    /// What was given to the guest by plugging: it would have that if nothing were withheld.
    pub given: Pages,
    /// Of it, what the guest has, by QEMU's books.
    pub plugged: Pages,
    /// What the guest has altogether: what it began with and what is plugged.
    pub size: Pages,
    /// The largest balloon that its device and its configuration allow.
    pub balloon_most: Pages,
    /// What its balloon holds, as it says.
    pub balloon: Pages,
    /// What it holds, as far as that can be believed.
    pub held: Pages,
    /// Memory that the guest could use without swapping, if it told so lately.
    pub guest_available: Option<Pages>,
}

/// What is to be asked of virtio-mem, and what to expect of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnplugOutput {
    /// Ask for so much less than was given.
    pub withhold: Pages,
    /// So much is withheld now.
    pub withheld: Pages,
    /// The most that can be withheld so now.
    pub limit: Pages,
    /// Less is withheld than was asked for a balloon's patience ago.
    pub late: bool,
    /// It is asked for no more than that in a second.
    pub rate: Pages,
}

/// The controller of one guest's memory that was plugged; call [`step`](Self::step) about once a second.
#[derive(Clone, Debug)]
pub struct UnplugControl {
    config: BalloonConfig,
    withhold: Pages,
    /// Since when what was asked for was not done, and nothing moved.
    idle_since: Option<Duration>,
    /// Not asked for more before then.
    rests_until: Duration,
    /// The last turns, oldest first: as far back as statistics that count may be.
    moments: VecDeque<Moment>,
    /// The guest has told what it has available.
    has_told: bool,
}

#[derive(Clone, Copy, Debug)]
struct Moment {
    at: Duration,
    /// What was asked for then, ...
    withhold: Pages,
    /// ... and what had come of it.
    withheld: Pages,
}

/// A guest that does not unplug what it was asked for is not asked for more for so many times the patience with it:
/// each attempt moves pages about in the guest.
const REST: u32 = 6;
/// virtio-mem takes and gives blocks of this size.
pub const BLOCK: Pages = Pages(512);
/// A guest that cannot split a block of its own further has done what it could: Linux's are of 4 MiB.
const SLACK: Pages = Pages(1024);
/// A guest is asked for no more in a second: it has to empty whole blocks, and a request is due as one whole.
const RATE: Pages = Pages::from_mib(64);
/// A balloon that stands still is asked for so much more than it holds, so that it is seen when it moves again.
const PROBE: Pages = Pages(512);

impl UnplugControl {
    /// For a guest of which a former manager may have withheld some: what it was asked for less than it was given.
    pub fn new(config: BalloonConfig, withhold: Pages) -> UnplugControl {
        UnplugControl {
            config,
            withhold,
            idle_since: None,
            rests_until: Duration::ZERO,
            moments: VecDeque::new(),
            has_told: false,
        }
    }

    /// From now on.
    pub fn set_config(&mut self, config: BalloonConfig) {
        self.config = config;
    }

    /// What is withheld of what was `given`, where so much is `plugged`. What is on its way back counts until the
    /// guest has it: it could not use it before.
    pub fn withheld(&self, given: Pages, plugged: Pages) -> Pages {
        let most = self.lately().map(|m| m.withhold).fold(self.withhold, Pages::max);
        most.min(given.saturating_sub(plugged))
    }

    /// The last moments, as far back as statistics that count may be.
    fn lately(&self) -> impl Iterator<Item = &Moment> {
        let window = self.config.fresh.saturating_add(self.config.settle);
        let since = self.moments.back().map_or(Duration::ZERO, |m| m.at.saturating_sub(window));
        self.moments.iter().filter(move |m| m.at >= since)
    }

    /// One turn, after that of the balloon, `balloon`. Time that goes backwards counts as standing still.
    pub fn step(&mut self, input: &UnplugInput, balloon: &BalloonOutput) -> UnplugOutput {
        let last = self.moments.back().copied();
        let now = last.map_or(input.now, |last| last.at.max(input.now));
        let pace = last.map_or(Duration::from_secs(1), |last| now - last.at).min(MAX_PACE);
        self.withhold = self.withhold.min(whole(input.given));
        let withheld = self.withheld(input.given, input.plugged);
        self.has_told |= input.guest_available.is_some();
        self.judge(now, withheld, last.map(|last| last.withheld));

        let limit = self.limit(input, balloon, now, withheld);
        let balloon_part = match balloon.health {
            Health::Healthy | Health::Slow => input.balloon_most,
            // What it holds it may keep; more cannot be expected of it.
            Health::Stuck => input.held,
            Health::Missing => Pages::ZERO,
        };
        // What was unplugged in the place of a balloon that moves again stays so until it is given back: it would be
        // given back first, and taken again by a balloon that may stand still as soon.
        let stays = self.withhold.min(input.goal.saturating_sub(input.held));
        let wanted = input.goal.saturating_sub(balloon_part).max(stays);
        let wanted = whole(wanted).min(whole(limit));
        // Of a guest that tells nothing, slowly.
        let parts = if input.guest_available.is_some() { 1 } else { 4 };
        let rate = Pages(self.config.rate.min(RATE).0 / parts).max(BLOCK);
        let step = |rate: Pages| whole(per_pace(rate, pace)).max(BLOCK);
        self.withhold = if wanted <= self.withhold {
            wanted.max(self.withhold.saturating_sub(step(self.config.deflate_rate)))
        } else if now < self.rests_until || self.withhold > withheld + SLACK {
            // Asking for more before the last is done would only pile up.
            self.withhold
        } else {
            wanted.min(self.withhold + step(rate))
        };
        let late = withheld + SLACK < self.due(now);
        let moment = Moment { at: now, withhold: self.withhold, withheld };
        remember(&mut self.moments, moment, |m| m.at, &self.config);
        UnplugOutput { withhold: self.withhold, withheld, limit, late, rate }
    }

    /// What must be withheld by now: the least that was asked for during the last patience, as of a balloon.
    fn due(&self, now: Duration) -> Pages {
        let Some(since) = now.checked_sub(self.config.patience) else { return Pages::ZERO };
        let Some(start) = self.moments.iter().rposition(|m| m.at <= since) else {
            return Pages::ZERO;
        };
        let asked = self.moments.iter().skip(start).map(|m| m.withhold);
        asked.fold(self.withhold, Pages::min)
    }

    /// Gives up what the guest does not do: nothing of it came for as long as a balloon's patience.
    fn judge(&mut self, now: Duration, withheld: Pages, before: Option<Pages>) {
        let behind = self.withhold > withheld + SLACK;
        if !behind || before.is_some_and(|before| withheld > before) {
            self.idle_since = None;
            return;
        }
        let since = *self.idle_since.get_or_insert(now);
        if now.saturating_sub(since) >= self.config.patience {
            self.withhold = whole(withheld);
            self.rests_until = now.saturating_add(self.config.patience.saturating_mul(REST));
            self.idle_since = None;
        }
    }

    /// The most that can be withheld: no larger a part of what was given than a balloon has of the rest, with what
    /// the guest can spare beside a balloon that may still grow, and what it did where it does no more.
    fn limit(
        &self,
        input: &UnplugInput,
        balloon: &BalloonOutput,
        now: Duration,
        withheld: Pages,
    ) -> Pages {
        let has = input.plugged + withheld;
        let cap = self.config.cap(input.given).min(has);
        if now < self.rests_until {
            return cap.min(withheld);
        }
        let Some(available) = input.guest_available else {
            // One that tells nothing any more may have nothing left, and no means to take back what was unplugged.
            return if self.has_told { cap.min(withheld) } else { cap };
        };
        let reserve = self.config.reserve(input.size);
        if available.0 < reserve.0 / 2 {
            // The balloon gives back first, as far as it holds anything.
            let lacks = (reserve - available).saturating_sub(input.balloon);
            return cap.min(withheld.saturating_sub(lacks));
        }
        // The statistics are as old as they may be: what was unplugged since counts as taken.
        let known = self.lately().map(|m| m.withheld).fold(withheld, Pages::min);
        let grows = match balloon.health {
            Health::Healthy | Health::Slow => balloon.limit.saturating_sub(input.balloon),
            Health::Stuck | Health::Missing => Pages::ZERO,
        };
        let spare = available.saturating_sub(reserve).saturating_sub(grows);
        cap.min(withheld.max(known + spare))
    }
}

/// Down to blocks.
fn whole(pages: Pages) -> Pages {
    Pages(pages.0 / BLOCK.0 * BLOCK.0)
}

/// What a balloon is to hold of its input's goal, of which so much is `withheld` otherwise, if it holds `most` at most.
///
/// What is unplugged beyond its part is given back first: until then it neither shrinks nor grows. One that stands
/// still is asked for no more than it takes to see that it moves again: all that it was asked for would come at once
/// then, beside what was unplugged in its place.
pub fn balloon_goal(
    input: &BalloonInput,
    withheld: Pages,
    balloon: &BalloonControl,
    most: Pages,
) -> Pages {
    let (goal, rest) = (input.goal, input.goal.saturating_sub(withheld));
    let part = match balloon.health() {
        Health::Stuck => rest.max(balloon.held(input) + PROBE),
        Health::Healthy | Health::Slow => rest.max(balloon.command().min(most)),
        Health::Missing => rest,
    };
    part.min(goal)
}

/// A guest's balloon and what is unplugged of it, as one balloon: how it does what it is told, and the most that it
/// may hold, and how fast. `held` is what the balloon holds.
pub fn together(balloon: &BalloonOutput, held: Pages, unplug: &UnplugOutput) -> BalloonOutput {
    if unplug.limit.is_zero() && unplug.withheld.is_zero() {
        return *balloon;
    }
    let comes = if unplug.late { Health::Slow } else { Health::Healthy };
    let (health, limit) = match balloon.health {
        // It uses what it is said to have given up: others take it.
        health if balloon.refuted => (health, balloon.limit),
        Health::Healthy => (comes, balloon.limit),
        Health::Slow => (Health::Slow, balloon.limit),
        // What comes, comes by unplugging; where that does no more either, all is as it was.
        health if unplug.limit < unplug.withheld + BLOCK => (health, balloon.limit),
        Health::Stuck => (comes, held.min(balloon.limit)),
        Health::Missing => (comes, Pages::ZERO),
    };
    // Once the balloon is as large as it gets, the rest comes by unplugging. How fast late blocks come is not known.
    let unplugs = Some(unplug.rate).filter(|_| !unplug.late);
    let rate = if held + SLACK >= limit { unplugs } else { balloon.rate };
    BalloonOutput { health, limit: limit + unplug.limit, rate, ..*balloon }
}

#[cfg(test)]
#[path = "unplug_tests.rs"]
mod tests;
