//! The scenario file as it is written. What is wrong with one value is told while it is read; what
//! is wrong between values, by [`crate::check`]. docs/simulator.md describes every key, under its name here.

use std::path::PathBuf;

use ballast_policy::{PolicyKind, Scale, TaxRate, ToolOrder};
use serde::Deserialize;
use toml::Spanned;

use crate::amount::{Amount, Length, Part, Size};
use crate::models::Models;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    pub name: Option<String>,
    pub duration: Spanned<Length>,
    pub seed: Option<u64>,
    pub hosts: Option<Spanned<u64>>,
    pub tick: Option<Spanned<Length>>,
    pub calm: Option<Spanned<Length>>,
    pub record: Option<Spanned<Length>>,
    pub host: HostTable,
    #[serde(default)]
    pub policy: PolicyTable,
    pub sampling: Option<Spanned<SamplingTable>>,
    pub balloon: Option<Spanned<BalloonTable>>,
    #[serde(default)]
    pub tools: ToolsTable,
    pub models: Option<Spanned<Models>>,
    #[serde(default)]
    pub vm: Vec<Spanned<VmTable>>,
    #[serde(default)]
    pub event: Vec<Spanned<EventTable>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostTable {
    pub memory: Spanned<Size>,
    pub swap: Option<Size>,
    #[serde(default)]
    pub thresholds: Scale,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyTable {
    #[serde(default)]
    pub kind: PolicyKind,
    #[serde(default)]
    pub tax: TaxRate,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolsTable {
    pub order: Option<ToolOrder>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SamplingTable {
    pub samples: Option<u32>,
    pub period: Option<Length>,
    pub slow_gain: Option<f64>,
    pub fast_gain: Option<f64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BalloonTable {
    pub rate_mib_s: Option<u64>,
    pub deflate_rate_mib_s: Option<u64>,
    pub max_fraction: Option<f64>,
    pub patience: Option<Length>,
    pub guest_reserve: Option<Size>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmTable {
    pub name: String,
    pub count: Option<u64>,
    pub size: Size,
    pub min: Option<Amount>,
    pub max: Option<Amount>,
    pub shares: Option<u32>,
    pub tax: Option<TaxRate>,
    pub start: Option<Length>,
    pub stagger: Option<Length>,
    pub stop: Option<Length>,
    pub boot: Option<Length>,
    pub boot_touch: Option<Amount>,
    #[serde(default)]
    pub balloon: DriverWord,
    pub balloon_mib_s: Option<u64>,
    pub cache: Option<Part>,
    pub share: Option<Part>,
    pub touch_every: Option<Length>,
    pub idle_reuse: Option<Length>,
    pub skew: Option<f64>,
    pub load: Spanned<LoadTable>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DriverWord {
    #[default]
    Works,
    None,
    Dead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    Idle,
    Steady,
    Bursty,
    Diurnal,
    Leak,
    Walk,
    Recorded,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadTable {
    pub kind: Kind,
    pub active: Option<Amount>,
    pub used: Option<Amount>,
    pub low: Option<Amount>,
    pub high: Option<Amount>,
    pub on: Option<Length>,
    pub off: Option<Length>,
    pub period: Option<Length>,
    pub jitter: Option<Length>,
    pub from: Option<Amount>,
    pub per_hour: Option<Amount>,
    pub step: Option<Amount>,
    pub every: Option<Length>,
    pub file: Option<PathBuf>,
    pub vm: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EventTable {
    pub at: Length,
    pub vm: Option<String>,
    pub shares: Option<u32>,
    pub min: Option<Size>,
    pub max: Option<Size>,
    pub tax: Option<TaxRate>,
    pub balloon: Option<DriverWord>,
    pub memory: Option<Size>,
    pub disk: Option<DiskWord>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskWord {
    Works,
    Fails,
}
