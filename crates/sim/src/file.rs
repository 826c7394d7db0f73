//! The scenario file as it is written. What is wrong with one value is told while it is read; what
//! is wrong between values, by [`crate::check`]. docs/simulator.md describes every key, under its name here.

use std::path::PathBuf;

use ballast_policy::{PolicyKind, Scale, TaxRate, ToolOrder};
use serde::Deserialize;
use toml::Spanned;

use crate::amount::{Amount, Length, Part, Size};
use crate::models::Models;

/// A scenario.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    /// Default: the file's own name, without what follows the point.
    pub name: Option<String>,
    /// Virtual time that each host runs for; above 0.
    pub duration: Spanned<Length>,
    /// Decides all random numbers; default 1.
    pub seed: Option<u64>,
    /// How many there are, each with random numbers of its own: 1 to 1,000,000; default 1.
    pub hosts: Option<Spanned<u64>>,
    /// Length of a step while anything moves: 10 ms to 60 s; default 1 s.
    pub tick: Option<Spanned<Length>>,
    /// The longest step while nothing moves, at least `tick`; default `tick`.
    pub calm: Option<Spanned<Length>>,
    /// Distance of points in the series: at least `tick`, at most 100,000 points; default a 400th of `duration`.
    pub record: Option<Spanned<Length>>,
    /// Required.
    pub host: HostTable,
    /// Who gets how much. A table that is left out has its defaults.
    #[serde(default)]
    pub policy: PolicyTable,
    /// How active memory is estimated.
    pub sampling: Option<Spanned<SamplingTable>>,
    /// How balloons are driven.
    pub balloon: Option<Spanned<BalloonTable>>,
    /// Which tool takes memory first.
    #[serde(default)]
    pub tools: ToolsTable,
    /// `[models]`: figures that replace those measured.
    pub models: Option<Spanned<Models>>,
    /// 1 to 100,000 VMs on each host in all.
    #[serde(default)]
    pub vm: Vec<Spanned<VmTable>>,
    /// In any order.
    #[serde(default)]
    pub event: Vec<Spanned<EventTable>>,
}

/// `[host]`: what each host has.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostTable {
    /// Budget of each host at first; at least 32 MiB.
    pub memory: Spanned<Size>,
    /// Room for swap that a host may promise; default: no limit.
    pub swap: Option<Size>,
    /// How thresholds of free memory follow from the budget; default "measured".
    #[serde(default)]
    pub thresholds: Scale,
}

/// `[policy]`: who gets how much.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyTable {
    /// Which reading of what VMs need decides; default "idle-tax".
    #[serde(default)]
    pub kind: PolicyKind,
    /// On idle memory: 0 <= tax < 1; default 0.75.
    #[serde(default)]
    pub tax: TaxRate,
}

/// `[tools]`: which tool takes memory first.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolsTable {
    /// How the first tool is found; default "automatic".
    pub order: Option<ToolOrder>,
}

/// `[sampling]`: how active memory is estimated. The defaults are ballastd's.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SamplingTable {
    /// Pages under sample at a time, 1 to 10,000; default 100.
    pub samples: Option<u32>,
    /// Length of a sampling period, above 0; default 30 s.
    pub period: Option<Length>,
    /// Weight of the newest period in the slow average, above 0 and at most `fast_gain`; default 1/8.
    pub slow_gain: Option<f64>,
    /// The same in the fast average, at most 1; default 1/2.
    pub fast_gain: Option<f64>,
}

/// `[balloon]`: how balloons are driven. The defaults are ballastd's.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalloonTable {
    /// Inflation, MiB per second: above 0, at most 16 TiB/s; default 128.
    pub rate_mib_s: Option<u64>,
    /// Deflation, MiB per second, in the same range; default 256.
    pub deflate_rate_mib_s: Option<u64>,
    /// The largest balloon as a part of the VM's size, 0 to 0.95; default 0.65.
    pub max_fraction: Option<f64>,
    /// How long a balloon may do nothing of what it was asked: 0.1 s to a day; default 10 s.
    pub patience: Option<Length>,
    /// Available memory that is left to the guest at least; default 16 MiB.
    pub guest_reserve: Option<Size>,
}

/// `[[vm]]`: VMs that are alike. Moments are since the scenario began.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmTable {
    /// Unique in its scenario; with a `count` above 1 a number follows it, from 1. With that it is a name that a VM may have,
    /// and no other VM of the scenario has it.
    pub name: String,
    /// How many there are on each host; default 1.
    pub count: Option<u64>,
    /// Configured memory; at least 1 MiB.
    pub size: Size,
    /// Guaranteed memory, at most `max`; default 0.
    pub min: Option<Amount>,
    /// The most that it may have, above 0; default `size`.
    pub max: Option<Amount>,
    /// At least 1; default 10 per MiB of `size`.
    pub shares: Option<u32>,
    /// On its idle memory: 0 <= tax < 1; default `policy.tax`.
    pub tax: Option<TaxRate>,
    /// When the first of them asks to be started; default 0.
    pub start: Option<Length>,
    /// Time between the start of one and the next; default 0.
    pub stagger: Option<Length>,
    /// When they are stopped, after the start of the last of them; default: never.
    pub stop: Option<Length>,
    /// For so long after its start it boots, and has no balloon; default 0.
    pub boot: Option<Length>,
    /// What it holds meanwhile at least, half of it active; default 0.
    pub boot_touch: Option<Amount>,
    /// Default "works".
    #[serde(default)]
    pub balloon: DriverWord,
    /// Speed of a driver that works, MiB per second: 1 to 1,000,000; default: the model's. Not with another driver.
    pub balloon_mib_s: Option<u64>,
    /// Part of what it uses that it could drop and read again; default 50%.
    pub cache: Option<Part>,
    /// Part of its resident pages that others equal; default 0%.
    pub share: Option<Part>,
    /// Time between two touches of an active page, above 0; default 5 s.
    pub touch_every: Option<Length>,
    /// Time between two touches of an idle page, 0: never; default 2 h.
    pub idle_reuse: Option<Length>,
    /// Of accesses, 0 (all active pages alike) to 0.95 (few pages get nearly all); default 0.
    pub skew: Option<f64>,
    /// What its guest does with its memory; required.
    pub load: Spanned<LoadTable>,
}

/// What a guest's balloon driver does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DriverWord {
    /// It follows.
    #[default]
    Works,
    /// There is none.
    None,
    /// There is one, and it does not move.
    Dead,
}

/// `load.kind`: what a guest does with its memory over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// The same all the time, little of it active.
    Idle,
    /// The same all the time.
    Steady,
    /// Between two levels, for random times.
    Bursty,
    /// From one level to another and back, as days go.
    Diurnal,
    /// Holds more and more, until it is restarted.
    Leak,
    /// Random steps between two levels.
    Walk,
    /// As a trace says.
    Recorded,
}

/// `load`: of its keys, those that its kind has. Parts are of the VM's size.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadTable {
    /// Decides which of the other keys mean anything; required.
    pub kind: Kind,
    /// Touched again and again. Idle: default 2%; steady: required; leak: default `from`.
    pub active: Option<Amount>,
    /// Held, with what is active. Default: idle 90%, steady `active`, leak (where it is restarted) 100%, else `high`.
    pub used: Option<Amount>,
    /// Bursty, diurnal, walk: the lower level of active memory, at most `high`; required.
    pub low: Option<Amount>,
    /// The same: the upper level; required.
    pub high: Option<Amount>,
    /// Bursty: mean time at `high`, at least 1 s; required.
    pub on: Option<Length>,
    /// Bursty: mean time at `low`, where it begins, at least 1 s; required.
    pub off: Option<Length>,
    /// Diurnal: length of a day, at least 1 s; default 24 h.
    pub period: Option<Length>,
    /// Diurnal: each VM begins up to so much later in its day; default 0.
    pub jitter: Option<Length>,
    /// Leak: held at first and after each restart, below `used`; required.
    pub from: Option<Amount>,
    /// Leak: how much more is held an hour later; required.
    pub per_hour: Option<Amount>,
    /// Walk: how far a step goes; required.
    pub step: Option<Amount>,
    /// Walk: time between two steps, at least 1 s; required.
    pub every: Option<Length>,
    /// Recorded: the trace, looked up beside the scenario; required.
    pub file: Option<PathBuf>,
    /// Recorded: whose lines of the trace; required.
    pub vm: Option<String>,
}

/// `[[event]]`: what changes at one moment; at least one thing.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EventTable {
    /// When, since the scenario began.
    pub at: Length,
    /// Whose parameters change: a name, or the beginning of names with `*` behind it. Required if any do.
    pub vm: Option<String>,
    /// At least 1: 0 counts as 1.
    pub shares: Option<u32>,
    /// Guaranteed memory; no more than the VM's size counts.
    pub min: Option<Size>,
    /// The most that it may have; no more than the VM's size counts.
    pub max: Option<Size>,
    /// On its idle memory: 0 <= tax < 1.
    pub tax: Option<TaxRate>,
    /// What its driver does from now on; a VM without one gets none.
    pub balloon: Option<DriverWord>,
    /// The host's budget.
    pub memory: Option<Size>,
    /// Whether the host can write swap from now on.
    pub disk: Option<DiskWord>,
}

/// Whether swap can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskWord {
    /// It can.
    Works,
    /// It cannot.
    Fails,
}
