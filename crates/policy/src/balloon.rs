//! Control of one guest's balloon (OSDI'02 s.3.2): how fast and how far it is inflated, and
//! whether it does what it is told.
//!
//! The balloon is driven by commands ("be this large"). What QEMU reports as its size is the
//! guest's own word, late, and possibly a lie; it serves only as evidence that something moves.
//! Amounts come from the commands themselves (of a balloon that had followed one, and of which the guest
//! took a part back, from what it says is left), from the pages that the pager saw the guest give up, and,
//! for the guest's own sake, from its statistics: a guest that lies there hurts itself.
//!
//! ```text
//!            no device, or no sign of a driver
//!   Missing <--------------------------------- any
//!      | a driver answers
//!      v          behind what was asked `patience` ago
//!   Healthy <-----------------------------------------> Slow
//!      ^  ^       caught up                              | ^
//!      |  +------------------- caught up --------+       | | moves again
//!      |                                         |       v |
//!      +--------------------------------------- Stuck <----+
//!                                       no movement for `patience`
//! ```

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use ballast_units::Pages;
use serde::{Deserialize, Serialize};

/// How to drive a balloon.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BalloonConfig {
    /// Inflation, pages per second: above 0, at most [`MOST_RATE`](Self::MOST_RATE).
    pub rate: Pages,
    /// Deflation, pages per second, in the same range: giving back may be faster than taking.
    pub deflate_rate: Pages,
    /// The largest balloon, as a fraction of the VM's size (ESX: 0.65), 0 to 0.95.
    pub max_fraction: f64,
    /// How long a balloon may do nothing of what it was asked before others do it: 0.1 s to
    /// [`MOST_PATIENCE`](Self::MOST_PATIENCE).
    pub patience: Duration,
    /// Guest statistics older than this say nothing about the guest now.
    pub fresh: Duration,
    /// Available memory that is left to the guest: at least this much, ...
    pub guest_reserve: Pages,
    /// ... and at least this fraction of its size; below 0 counts as 0.
    pub guest_reserve_fraction: f64,
    /// How long a driver may take from a command to having changed the guest's statistics.
    pub settle: Duration,
}

impl Default for BalloonConfig {
    fn default() -> BalloonConfig {
        BalloonConfig {
            rate: Pages::from_mib(128),
            deflate_rate: Pages::from_mib(256),
            max_fraction: 0.65,
            patience: Duration::from_secs(10),
            fresh: Duration::from_secs(10),
            guest_reserve: Pages::from_mib(16),
            guest_reserve_fraction: 1.0 / 16.0,
            settle: Duration::from_secs(2),
        }
    }
}

/// A configuration of balloons that cannot work: which field, and why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {what}")]
pub struct BadBalloonConfig {
    /// Name of the field.
    pub field: &'static str,
    /// What is wrong with it.
    pub what: String,
}

impl BalloonConfig {
    /// The highest rate, pages per second: 16 TiB/s, with which nothing overflows.
    pub const MOST_RATE: Pages = Pages(1 << 32);
    /// The longest patience: a day.
    pub const MOST_PATIENCE: Duration = Duration::from_secs(86_400);

    /// # Errors
    /// The first field that is out of range.
    pub fn check(&self) -> Result<(), BadBalloonConfig> {
        let bad = |field, what: String| Err(BadBalloonConfig { field, what });
        for (field, rate) in [("rate", self.rate), ("deflate_rate", self.deflate_rate)] {
            if rate.is_zero() {
                return bad(field, "a rate of 0 MiB/s moves nothing".to_owned());
            }
            if rate > BalloonConfig::MOST_RATE {
                return bad(field, "above 16 TiB/s".to_owned());
            }
        }
        if !(0.0..=0.95).contains(&self.max_fraction) {
            return bad("max_fraction", "not between 0 and 0.95".to_owned());
        }
        if !(Duration::from_millis(100)..=BalloonConfig::MOST_PATIENCE).contains(&self.patience) {
            return bad("patience", "not between 0.1 s and 86400 s".to_owned());
        }
        Ok(())
    }

    /// The largest balloon that a guest of `size` ever gets.
    pub fn cap(&self, size: Pages) -> Pages {
        let fraction = if self.max_fraction.is_nan() { 0.0 } else { self.max_fraction };
        Pages((size.0 as f64 * fraction.clamp(0.0, 1.0)) as u64)
    }

    /// What a guest of `size` keeps available while its balloon grows.
    pub fn reserve(&self, size: Pages) -> Pages {
        self.guest_reserve.max(Pages((size.0 as f64 * self.guest_reserve_fraction.max(0.0)) as u64))
    }
}

/// What is known about the guest and its balloon now.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BalloonInput {
    /// Monotonic time since any fixed moment.
    pub now: Duration,
    /// Configured size of the guest.
    pub size: Pages,
    /// The most that its device can be asked for, where that is less: it knows nothing of what was plugged.
    pub most: Option<Pages>,
    /// Balloon size that the policy wants.
    pub goal: Pages,
    /// Whether the VM has a balloon device.
    pub has_device: bool,
    /// The guest's driver has been heard of since its last reset: statistics, a BALLOON_CHANGE event, or a balloon that
    /// holds something.
    pub driver_alive: bool,
    /// The balloon's size as QEMU reports it. Evidence of movement, never computed with.
    pub reported: Option<Pages>,
    /// Running count of pages that the pager saw the guest give up.
    pub discarded: u64,
    /// Machine pages the VM uses, if the pager counts them. A guest that uses more than its size
    /// less its balloon has a smaller balloon than it says. Not older than `size`: what is unplugged is given up first.
    pub consumed: Option<Pages>,
    /// The guest's statistics: memory it could use without swapping, ...
    pub guest_available: Option<Pages>,
    /// ... the memory it sees, ...
    pub guest_total: Option<Pages>,
    /// ... and how old they are.
    pub guest_stats_age: Option<Duration>,
}

/// How a balloon does what it is told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Health {
    /// No device, or no driver has answered yet.
    #[default]
    Missing,
    /// It keeps up with what is asked.
    Healthy,
    /// Moving, but behind what was asked `patience` ago: the next tier takes the rest.
    Slow,
    /// Not moving: the next tier takes all.
    Stuck,
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Health::Missing => "missing",
            Health::Healthy => "healthy",
            Health::Slow => "slow",
            Health::Stuck => "stuck",
        })
    }
}

/// What to do with the balloon, and what to expect of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BalloonOutput {
    /// Set the balloon to this size now. None: leave it.
    pub command: Option<Pages>,
    /// How the balloon does what it is told.
    pub health: Health,
    /// The largest balloon that this guest bears now.
    pub limit: Pages,
    /// Pages per second at which it grew lately while it had more to do. None: not seen yet.
    pub rate: Option<Pages>,
    /// The guest says that it runs short of memory: less than half its reserve is available.
    pub short: bool,
    /// The VM uses more than its size and what its balloon is said to hold leave it.
    pub refuted: bool,
}

impl BalloonOutput {
    /// Of a guest that nothing is known of yet.
    pub const UNKNOWN: BalloonOutput = BalloonOutput {
        command: None,
        health: Health::Missing,
        limit: Pages::ZERO,
        rate: None,
        short: false,
        refuted: false,
    };
}

/// One moment of the last `patience`: the command then in force, and the evidence then seen.
#[derive(Clone, Copy, Debug)]
struct Moment {
    at: Duration,
    command: Pages,
    claimed: Pages,
    /// What the guest said that it held, of the command before.
    has: Pages,
    proven: Pages,
    reported: Option<Pages>,
    discarded: u64,
    /// Its guest told nothing new, and was asked for a part of what others are.
    careful: bool,
}

/// By how much a balloon has grown while it had something to do, and in what time.
#[derive(Clone, Copy, Debug, Default)]
struct Growth {
    pages: Pages,
    time: Duration,
    /// At the last look it had done what it was asked.
    done: bool,
}

/// The controller of one balloon; call [`step`](Self::step) about once a second, and as soon as more is asked of it.
#[derive(Clone, Debug)]
pub struct BalloonControl {
    config: BalloonConfig,
    command: Pages,
    health: Health,
    /// The largest of our commands that the balloon was seen to have followed.
    proven: Pages,
    /// The largest of our commands that the guest says it has followed: enough where only the
    /// guest itself is at stake.
    claimed: Pages,
    /// Oldest first; spans at least `patience` once as much has passed.
    moments: VecDeque<Moment>,
    /// When the command was last sent, and when it was last raised.
    sent: Duration,
    raised: Option<Duration>,
    /// Pages per second, averaged.
    rate: Option<f64>,
    /// What has been seen since that was measured, in looks too close together to tell.
    growth: Growth,
    /// What the guest bore by its last statistics that were fresh, or by the first that were seen.
    borne: Option<(Pages, Pages)>,
}

impl BalloonControl {
    /// Of a guest whose balloon is empty.
    pub fn new(config: BalloonConfig) -> BalloonControl {
        BalloonControl {
            config,
            command: Pages::ZERO,
            health: Health::Missing,
            proven: Pages::ZERO,
            claimed: Pages::ZERO,
            moments: VecDeque::new(),
            sent: Duration::ZERO,
            raised: None,
            rate: None,
            growth: Growth::default(),
            borne: None,
        }
    }

    /// For a balloon that was driven before: by a former manager, or by hand. `holds` is what it was
    /// last asked for, as far as is known; from there it is led on instead of let down at once.
    pub fn resume(config: BalloonConfig, holds: Pages) -> BalloonControl {
        BalloonControl { command: holds, claimed: holds, ..BalloonControl::new(config) }
    }

    /// From now on.
    pub fn set_config(&mut self, config: BalloonConfig) {
        self.config = config;
    }

    /// The command in force: the size last asked for.
    pub fn command(&self) -> Pages {
        self.command
    }

    /// How the balloon did what it was told, at the last step.
    pub fn health(&self) -> Health {
        self.health
    }

    /// What the guest says that its balloon holds, as far as that was asked of it.
    pub fn holds(&self) -> Pages {
        self.claimed
    }

    /// What the guest says that its balloon holds now, of what was asked: also what lies between two commands.
    fn has(&self, input: &BalloonInput) -> Pages {
        // Who does not answer has what it had.
        let had = || self.moments.back().map_or(self.claimed, |last| last.has.max(self.claimed));
        input.reported.unwrap_or_else(had).min(self.command)
    }

    /// What its balloon holds, of what was asked, as far as the pages that the VM uses leave room for it: also what lies
    /// between two commands.
    pub fn held(&self, input: &BalloonInput) -> Pages {
        match input.reported.map(|reported| reported.min(self.command)) {
            Some(held) if !refuted(input, held) => held,
            _ => self.proven,
        }
    }

    /// The largest balloon that its device and its configuration allow, whatever the guest bears.
    pub fn most(&self, input: &BalloonInput) -> Pages {
        let most = self.config.cap(input.most.unwrap_or(input.size));
        self.config.cap(input.size).min(most)
    }

    /// What the guest says it could use without swapping, if that is fresh and makes sense.
    pub fn available(&self, input: &BalloonInput) -> Option<Pages> {
        self.fresh_available(input).map(|(available, _)| available)
    }

    /// One turn. Time that goes backwards counts as standing still.
    pub fn step(&mut self, input: &BalloonInput) -> BalloonOutput {
        if !input.has_device || !input.driver_alive {
            return self.missing(input);
        }
        let now = self.moments.back().map_or(input.now, |m| m.at.max(input.now));
        let pace = self.moments.back().map_or(Duration::from_secs(1), |m| now - m.at);
        self.judge(input, now);
        self.measure(input, now);

        let (limit, limit_now) = self.limits(input, now);
        let (previous, has) = (self.command, self.has(input));
        // However many looks there are in a second, and however long the last one was ago: so much in a second.
        let second = Duration::from_secs(1);
        let growth = self.raised.map_or(second, |raised| now.saturating_sub(raised).min(second));
        self.command = self.next_command(input, limit_now, [pace.min(MAX_PACE), growth]);
        if self.command > previous {
            self.raised = Some(now);
        }
        let moment = Moment {
            at: now,
            command: self.command,
            claimed: self.claimed,
            has,
            proven: self.proven,
            reported: input.reported,
            discarded: input.discarded,
            careful: self.fresh_available(input).is_none(),
        };
        remember(&mut self.moments, moment, |m| m.at, &self.config);
        let unfollowed = input.reported != Some(self.command)
            && now.saturating_sub(self.sent) >= self.config.patience;
        let command = (self.command != previous || unfollowed).then_some(self.command);
        if command.is_some() {
            self.sent = now;
        }
        BalloonOutput {
            command,
            health: self.health,
            limit,
            rate: self.rate_told(input),
            short: self.short(input),
            refuted: refuted(input, self.claimed),
        }
    }

    /// Without a driver nothing can be asked, and a driver that comes back (a guest that rebooted)
    /// must not find an old command waiting: a balloon set before the driver loads is inflated
    /// without any rate.
    fn missing(&mut self, input: &BalloonInput) -> BalloonOutput {
        let command = (!self.command.is_zero()).then_some(Pages::ZERO);
        *self = BalloonControl::new(self.config);
        BalloonOutput {
            command: command.filter(|_| input.has_device),
            health: Health::Missing,
            limit: Pages::ZERO,
            rate: None,
            short: false,
            refuted: refuted(input, Pages::ZERO),
        }
    }

    /// How fast it grows, from the last look to this one, while it has something to do. A driver that
    /// is done before the next look is as fast as it is asked to be.
    fn measure(&mut self, input: &BalloonInput, now: Duration) {
        let Some(last) = self.moments.back() else { return };
        // What it says is worth nothing where it was not believed.
        let said = last.reported.map(|held| held.min(last.command));
        let believed = if last.proven < last.claimed { None } else { said };
        let had_to_grow = believed.unwrap_or(last.proven) < last.command;
        if !had_to_grow {
            self.growth = Growth::default();
            return;
        }
        let (grown, done) = grown(last, input);
        // Time in which it had nothing more to do is none that it took for the next order.
        if self.growth.done && !done {
            self.growth = Growth::default();
        }
        self.growth.pages += grown;
        self.growth.time += now.saturating_sub(last.at);
        self.growth.done = done;
        // Of what was asked a moment ago it says nothing that nothing has come yet.
        if self.growth.time < SHORTEST {
            return;
        }
        let Growth { pages: grown, time, .. } = std::mem::take(&mut self.growth);
        let seconds = time.as_secs_f64();
        let seen = grown.0 as f64 / seconds;
        let known = self.rate.map_or(0.0, |rate| rate * FASTER);
        self.rate = match self.rate {
            // Much, more than is known of it, and done before the look: it is as fast as it is ever asked to be. All of a part
            // says nothing of the rest.
            _ if done
                && seen > known
                && !last.careful
                && grown.0 >= self.config.rate.0 / CAREFUL =>
            {
                Some(self.config.rate.0 as f64)
            }
            // Of a little that was done in time nobody knows; a rate below it was wrong.
            _ if done && seen > known && last.careful => None,
            Some(rate) if done => Some(rate.max(seen)),
            None if done => None,
            None => Some(seen),
            Some(rate) => Some(seen + (rate - seen) * RATE_KEPT.powf(seconds)),
        };
    }

    /// The measured rate, but no more than it is asked for: that much comes of a guest that tells nothing, whatever it could do.
    fn rate_told(&self, input: &BalloonInput) -> Option<Pages> {
        let measured = self.rate.map(|rate| Pages(rate as u64));
        match self.fresh_available(input) {
            Some(_) => measured.map(|rate| rate.min(self.config.rate)),
            None => {
                let asked = Pages(self.config.rate.0 / CAREFUL);
                Some(measured.map_or(asked, |rate| rate.min(asked)))
            }
        }
    }

    fn short(&self, input: &BalloonInput) -> bool {
        let reserve = self.config.reserve(input.size);
        self.fresh_available(input).is_some_and(|(available, _)| available.0 < reserve.0 / 2)
    }

    /// Updates what is believed of the balloon from the evidence.
    fn judge(&mut self, input: &BalloonInput, now: Duration) {
        // A guest may take back a part by itself (`deflate-on-oom`): it still has what it says, which is less than it had.
        let kept = input.reported.filter(|&reported| reported < self.claimed);
        let commands = || {
            let past = self.moments.iter().map(|m| m.command).chain(kept);
            past.chain([self.command, self.proven, self.claimed]).filter(|&c| c <= self.command)
        };
        let largest = |found: Option<Pages>| found.unwrap_or(Pages::ZERO);
        let claimed = largest(commands().filter(|&c| claimed(input, c)).max());
        let proven = largest(commands().filter(|&c| followed(input, c)).max());
        (self.claimed, self.proven) = (claimed, proven);
        let due = self.due(now);
        self.health = if followed(input, due) {
            match self.health {
                // What stood still must be seen to follow an order before it is trusted again.
                Health::Stuck if !self.moving(input, due, now) && input.reported.is_none() => {
                    Health::Stuck
                }
                _ => Health::Healthy,
            }
        } else if self.moving(input, due, now) || self.did(due, now) {
            Health::Slow
        } else {
            Health::Stuck
        };
    }

    /// What must be done by now: the smallest command in force during the last `patience`; nothing
    /// before as much time has passed.
    fn due(&self, now: Duration) -> Pages {
        let Some(since) = now.checked_sub(self.config.patience) else { return Pages::ZERO };
        match self.moments.front() {
            Some(first) if first.at <= since => {
                self.since(since).map(|m| m.command).min().unwrap_or(Pages::ZERO)
            }
            _ => Pages::ZERO,
        }
    }

    /// Whether it had done that much within the last `patience`.
    fn did(&self, due: Pages, now: Duration) -> bool {
        let since = now.saturating_sub(self.config.patience);
        !due.is_zero() && self.since(since).any(|m| m.proven >= due)
    }

    /// The moments from the one in force at `since`, which is the last at or before it.
    fn since(&self, since: Duration) -> impl Iterator<Item = &Moment> {
        let start = self.moments.iter().rposition(|m| m.at <= since).unwrap_or(0);
        self.moments.iter().skip(start)
    }

    /// Whether anything moved the right way during the last `patience`: all that is lacking, or enough of it to be done within
    /// some time, and more than what a guest gives up anyway now and then.
    fn moving(&self, input: &BalloonInput, due: Pages, now: Duration) -> bool {
        let since = now.saturating_sub(self.config.patience);
        let Some(then) = self.since(since).next() else { return true };
        let lacking = due.saturating_sub(self.held(input));
        // One that stood still is to be well within that time: at the edge of it, it would be the one and the other by turns.
        let paces = if self.health == Health::Stuck { PACES / 2 } else { PACES };
        let enough = Pages(lacking.0 / paces).max(lacking.min(SLACK)).max(Pages(1));
        // A size beyond what was asked is no movement, for nobody asked for it; nor is one that
        // the pages the VM uses leave no room for.
        let claimed = input.reported.map(|r| r.min(self.command)).filter(|&r| !refuted(input, r));
        input.discarded >= then.discarded + enough.0
            || claimed.zip(then.reported).is_some_and(|(claim, old)| claim >= old + enough)
    }

    /// The largest balloon the guest bears, and how far it may be sure of that now: the cap, and
    /// with statistics no more than leaves it its reserve. A guest that tells nothing new (it is paused, or waits for
    /// memory) bears what it bore.
    fn limits(&mut self, input: &BalloonInput, now: Duration) -> (Pages, Pages) {
        let cap = self.most(input);
        let Some(told) = self.sane_available(input) else {
            // Of one that has told something once it is not known to bear more since.
            return self.borne.map_or((cap, cap), |(_, sure)| (sure.min(cap), sure.min(cap)));
        };
        let is_fresh = told.1 <= self.config.fresh;
        let (limit, sure) = match self.borne {
            // It is asked for no more than it was sure to bear, and nobody is to wait for more.
            Some((_, sure)) if !is_fresh => (sure, sure),
            // Of one that is led on from where somebody else left it, the last that was told is all that is known.
            _ => self.limits_by(input, told, now),
        };
        self.borne = Some((limit, sure));
        (limit.min(cap), sure.min(cap))
    }

    fn limits_by(
        &self,
        input: &BalloonInput,
        (available, age): (Pages, Duration),
        now: Duration,
    ) -> (Pages, Pages) {
        let cap = self.most(input);
        let reserve = self.config.reserve(input.size);
        // The statistics know of the balloon as it was when they were taken. Growth is counted from the smallest that the
        // guest said it was since shortly before, retreat from the largest; between them nothing moves.
        // What a driver has yet to do, it may still do, and counts as taken.
        let before = age.saturating_add(self.config.settle);
        let since = now.saturating_sub(before);
        // Of one that was led on from where it was nobody knows how large it was before that.
        let is_known =
            self.moments.front().is_some_and(|first| first.at.saturating_add(before) <= now);
        let has = self.has(input);
        let (mut smallest, mut largest) = (if is_known { has } else { Pages::ZERO }, has);
        for moment in self.since(since) {
            smallest = smallest.min(moment.has);
            largest = largest.max(moment.has);
        }
        let limit = if available >= reserve {
            let spare = available - reserve;
            // What has come is not given back for what the statistics cannot know yet. What has not may have become too much.
            let has_told = is_known && input.reported.is_some();
            let kept = if has_told { has.max(smallest + spare) } else { self.command };
            let kept = self.command.min(kept);
            let sure = kept.clamp(smallest + spare, largest + spare);
            return (cap.min(largest + spare), cap.min(sure));
        } else if available.0 >= reserve.0 / 2 {
            // Near the edge: no further, but no way back either, or it would swing.
            self.command.min(largest)
        } else {
            self.command.min(largest.saturating_sub(reserve - available))
        };
        (limit.min(cap), limit.min(cap))
    }

    /// What the guest says is available, and the age of that, if it is fresh and makes sense.
    fn fresh_available(&self, input: &BalloonInput) -> Option<(Pages, Duration)> {
        self.sane_available(input).filter(|(_, age)| *age <= self.config.fresh)
    }

    /// As `fresh_available`, however old.
    fn sane_available(&self, input: &BalloonInput) -> Option<(Pages, Duration)> {
        let age = input.guest_stats_age?;
        let available = input.guest_available?;
        let sane = available <= input.size && input.guest_total.is_none_or(|t| available <= t);
        sane.then_some((available, age))
    }

    /// `fall` and `rise` are the times that it may shrink and grow for.
    fn next_command(
        &self,
        input: &BalloonInput,
        limit: Pages,
        [fall, rise]: [Duration; 2],
    ) -> Pages {
        let wanted = input.goal.min(limit);
        if wanted <= self.command {
            // What has not come yet is called off at once.
            let held = if input.reported.is_some() { self.has(input) } else { self.command };
            let step = per_pace(self.config.deflate_rate, fall);
            return wanted.max(held.saturating_sub(step));
        }
        let careful = self.fresh_available(input).is_none();
        let full = per_pace(self.config.rate, rise);
        let least = Pages(full.0 / CAREFUL);
        let came = self.moments.back().map_or(Pages::ZERO, |last| grown(last, input).0);
        let step = match self.health {
            // It has not done what it was asked: asking for more would only pile up.
            Health::Stuck => Pages::ZERO,
            // Nor is it asked for more than it brings: what it lacks would grow until it counts as stuck.
            Health::Slow => Pages(full.0 / SLOWED).min(came),
            _ if careful => least,
            // Nor does one that is still at it become slow by being asked for more than it can do.
            _ if !claimed(input, self.command) => came.max(least).min(full),
            _ => full,
        };
        wanted.min(self.command + step)
    }
}

/// What part of its rate a balloon is asked for whose guest tells nothing new, or that has brought nothing since the last
/// look, and at most one that is slow.
const CAREFUL: u64 = 8;
const SLOWED: u64 = 4;
/// What is left of the measured rate after a second in which another was seen.
const RATE_KEPT: f64 = 0.75;
/// Done so much faster than the measured rate, it is not as much as the driver can do.
const FASTER: f64 = 1.25;
/// So short a time tells no rate.
const SHORTEST: Duration = Duration::from_millis(500);
/// A turn that comes late must not bring a burst, of balloons or of what is unplugged.
pub(crate) const MAX_PACE: Duration = Duration::from_secs(2);
/// More are not kept; of a window that has more turns, those that follow one another closely count as one.
const MAX_MOMENTS: usize = 1_024;
/// In how many parts a window is kept then.
const PARTS: u32 = 512;
/// In so many times `patience` a balloon must be done at the pace that it has, or it stands still.
const PACES: u64 = 64;
/// Pages may be in flight between the guest and the books.
const SLACK: Pages = Pages(256);

/// Keeps one moment at or before the start of the longest window that is asked about. `at` tells when a moment was.
pub(crate) fn remember<M>(
    moments: &mut VecDeque<M>,
    moment: M,
    at: impl Fn(&M) -> Duration,
    config: &BalloonConfig,
) {
    let window = config.patience.max(config.fresh.saturating_add(config.settle));
    let since = at(&moment).saturating_sub(window);
    let n = moments.len();
    if n >= PARTS as usize
        && at(&moments[n - 1]).saturating_sub(at(&moments[n - 2])) < window / PARTS
    {
        moments.pop_back();
    }
    moments.push_back(moment);
    while moments.len() > 2 && (at(&moments[1]) <= since || moments.len() > MAX_MOMENTS) {
        moments.pop_front();
    }
}

/// By how much it has grown since, and whether it has done what it was asked then.
fn grown(last: &Moment, input: &BalloonInput) -> (Pages, bool) {
    let held = |reported: Option<Pages>| reported.map(|held| held.min(last.command));
    match (held(input.reported), held(last.reported)) {
        (Some(now), Some(then)) if !refuted(input, now) => {
            (now.saturating_sub(then), now >= last.command)
        }
        // Without a report that can be believed: what was seen to be given up.
        _ => (Pages(input.discarded.saturating_sub(last.discarded)), false),
    }
}

/// Whether the guest says that its balloon is at least as large as our command `asked`. Without a
/// report, the pages it uses must do.
fn claimed(input: &BalloonInput, asked: Pages) -> bool {
    asked.is_zero()
        || match input.reported {
            Some(reported) => reported >= asked,
            None => input.consumed.is_some() && !refuted(input, asked),
        }
}

/// Whether that can be believed. Of an empty balloon it cannot where the VM uses more than it has: memory that was
/// unplugged, or never plugged.
fn followed(input: &BalloonInput, asked: Pages) -> bool {
    claimed(input, asked) && !refuted(input, asked)
}

/// Whether the VM uses more than a balloon of `claim` could leave it.
fn refuted(input: &BalloonInput, claim: Pages) -> bool {
    let left = input.size.saturating_sub(claim);
    let slack = SLACK.max(Pages(input.size.0 / 64));
    input.consumed.is_some_and(|consumed| consumed > left + slack)
}

/// What is done of it in so much time.
pub(crate) fn per_pace(rate: Pages, pace: Duration) -> Pages {
    let exact = u128::from(rate.0) * pace.as_millis() / 1_000;
    Pages(u64::try_from(exact).unwrap_or(u64::MAX / 2))
}

#[cfg(test)]
#[path = "balloon_tests.rs"]
mod tests;
