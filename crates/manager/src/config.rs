//! Configuration: one TOML file, overridden by the command line, checked as a whole before anything
//! is started.

mod accounts;
mod budget;
mod journal;
mod lines;
pub mod rules;
mod tools;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ballast_compress::Algorithm;
use ballast_pager::file_memory;
use ballast_pager::tier::Compression;
use ballast_policy::{BalloonConfig, PolicyKind, SamplingConfig, SamplingError, Scale, TaxRate};
use ballast_units::{Bytes, Pages};
use serde::Deserialize;

use crate::layout;
use crate::limits::Wrong;
use crate::manager::capacity;
use budget::{BudgetOf, HostMemory};
pub use budget::{check_budget, of_huge_pages, of_what_is_available};
use rules::{PoolRule, PoolTable, VmRule, VmTable};
pub use tools::ToolSettings;

/// What is wrong with a configuration. Nothing of it is in force.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("configuration {}: {source}", .path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("configuration {}, line {line}: {what}", .path.display())]
    Syntax { path: PathBuf, line: usize, what: String },
    #[error("configuration {origin}{}: {key}: {what}", Line(.line))]
    Value { origin: String, line: Option<usize>, key: String, what: String },
}

/// ", line 4"
struct Line<'a>(&'a Option<usize>);

impl std::fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.map_or(Ok(()), |line| write!(f, ", line {line}"))
    }
}

/// In which order a VM's pages are looked at for sharing (OSDI'02 s.4.3 chooses them at random).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScanOrder {
    /// The extents of a VM in another order each pass.
    #[default]
    Random,
    /// By address.
    Sequential,
    /// At random, of the pages that were written since the last pass.
    Written,
}

/// What looking for pages to share may cost, and how it is done.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharingSettings {
    /// Without it nothing is looked for; what is shared stays so.
    pub enabled: bool,
    /// In which each VM is looked through.
    pub order: ScanOrder,
    /// Pages per second, of all VMs together.
    pub rate: Pages,
    /// Pages per second of one VM.
    pub vm_rate: Pages,
    /// Of one core: above 0, at most 100.
    pub cpu_percent: f64,
    /// In which all memory is to be looked at once, if the limits above allow it.
    pub scan_time: Duration,
    /// For how long a page that was written while shared stays where the kernel put its copy.
    pub rehome_after: Duration,
}

impl Default for SharingSettings {
    fn default() -> SharingSettings {
        SharingSettings {
            enabled: true,
            order: ScanOrder::default(),
            rate: Pages::from_mib(256),
            vm_rate: Pages::from_mib(128),
            cpu_percent: 10.0,
            scan_time: Duration::from_secs(3600),
            rehome_after: Duration::from_secs(2),
        }
    }
}

/// The file as it is written; see docs/configuration.md.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    budget: Option<String>,
    reserve: Option<String>,
    run_dir: Option<PathBuf>,
    swap_dir: Option<PathBuf>,
    socket: Option<PathBuf>,
    shim: Option<PathBuf>,
    shim_group: Option<String>,
    tax: Option<f64>,
    thresholds: Option<Scale>,
    #[serde(default)]
    sampling: Sampling,
    #[serde(default)]
    balloon: Balloon,
    #[serde(default)]
    pager: Pager,
    #[serde(default)]
    sharing: Sharing,
    #[serde(default)]
    compression: CompressionTable,
    #[serde(default)]
    swap: Swap,
    #[serde(default)]
    admission: Admission,
    #[serde(default)]
    adopt: Adopt,
    #[serde(default)]
    journal: journal::Table,
    defaults: Option<VmTable>,
    #[serde(default)]
    vm: Vec<VmTable>,
    #[serde(default)]
    pool: BTreeMap<String, PoolTable>,
    #[serde(default)]
    policy: PolicyTable,
    #[serde(default)]
    tools: tools::Table,
}

/// Where what VMMs take beside their guests' RAM comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum VmmMemory {
    /// The host's reserve.
    #[default]
    Reserve,
    /// The budget.
    Budget,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Admission {
    wait_s: Option<f64>,
    vmm_memory: Option<VmmMemory>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Adopt {
    max: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyTable {
    kind: Option<PolicyKind>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Swap {
    #[serde(default)]
    location: Vec<SwapLocation>,
}

/// A folder of swap files.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwapLocation {
    /// Absolute once it was checked.
    pub path: PathBuf,
    /// Higher ones are used first.
    #[serde(default)]
    pub priority: i32,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sampling {
    samples: Option<u32>,
    period_s: Option<f64>,
    slow_gain: Option<f64>,
    fast_gain: Option<f64>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Balloon {
    rate_mib_s: Option<u64>,
    deflate_rate_mib_s: Option<u64>,
    max_fraction: Option<f64>,
    patience_s: Option<f64>,
    guest_reserve: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Pager {
    fault_around: Option<String>,
    large_pages_from: Option<String>,
    wakeful: Option<bool>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sharing {
    enabled: Option<bool>,
    order: Option<ScanOrder>,
    rate_mib_s: Option<u64>,
    vm_rate_mib_s: Option<u64>,
    cpu_percent: Option<f64>,
    scan_time_s: Option<f64>,
    rehome_after_ms: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct CompressionTable {
    enabled: Option<bool>,
    algorithm: Option<AlgorithmName>,
    cache_percent: Option<u32>,
    adaptive: Option<bool>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum AlgorithmName {
    #[default]
    Lz4,
    Zstd,
}

/// What the command line overrides.
#[derive(Clone, Debug, Default)]
pub struct Overrides {
    /// Machine memory for guests.
    pub budget: Option<Bytes>,
    /// A relative one is of the current folder, as all of these.
    pub run_dir: Option<PathBuf>,
    /// Not beside locations in the file.
    pub swap_dir: Option<PathBuf>,
    /// Of the API.
    pub socket: Option<PathBuf>,
    /// The library that VMMs preload.
    pub shim: Option<PathBuf>,
    /// 0 <= rate < 1.
    pub tax: Option<f64>,
    /// Pages a period.
    pub samples: Option<u32>,
    /// Seconds of VM execution time, 0.1 to 86400.
    pub sample_period: Option<f64>,
    /// See [`Config::check_takeovers`].
    pub check_takeovers: bool,
}

impl Overrides {
    /// The keys that the command line has the last word on.
    fn keys(&self) -> Vec<&'static str> {
        let given = [
            ("budget", self.budget.is_some()),
            ("run_dir", self.run_dir.is_some()),
            ("swap_dir", self.swap_dir.is_some()),
            ("socket", self.socket.is_some()),
            ("shim", self.shim.is_some()),
            ("tax", self.tax.is_some()),
            ("sampling.samples", self.samples.is_some()),
            ("sampling.period_s", self.sample_period.is_some()),
        ];
        given.into_iter().filter(|(_, given)| *given).map(|(key, _)| key).collect()
    }
}

/// A configuration that was checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// At least 32 MiB, at most the host's memory.
    pub budget: Pages,
    /// The same where nothing is set aside for huge pages.
    pub whole_budget: Pages,
    /// Where the budget is from.
    pub budget_of: BudgetOf,
    /// Absolute, as all paths here. On a tmpfs, or no pages are shared.
    pub run_dir: PathBuf,
    /// The one location, where none is named; made if it is not there.
    pub swap_dir: Option<PathBuf>,
    /// Where swap files are, the highest priority first.
    pub swap: Vec<SwapLocation>,
    /// Of the API.
    pub socket: PathBuf,
    /// The library that VMMs preload; it is there.
    pub shim: PathBuf,
    /// Number of the group whose processes may reach the shims' socket, beside ballastd's own user.
    pub shim_group: Option<u32>,
    /// Of VMs that have none of their own, nor by their pools.
    pub tax: TaxRate,
    /// Which policy decides.
    pub policy: PolicyKind,
    /// Where the thresholds of the reclamation states are.
    pub scale: Scale,
    /// Of active memory.
    pub sampling: SamplingConfig,
    /// Of all balloons.
    pub balloon: BalloonConfig,
    /// Which of balloon and paging comes first.
    pub tools: ToolSettings,
    /// Handed out around a fault while memory is plentiful: a power of two from 1 to 512.
    pub fault_around: Pages,
    /// Whether idle processors are kept awake while guests wait for page after page.
    pub wakeful: bool,
    /// VMs of at least this size get large pages. `None`: no VM does that is not asked for it.
    pub large_pages_from: Option<Pages>,
    /// Of all VMs.
    pub sharing: SharingSettings,
    /// Of VMs that are started or taken over from now on.
    pub compression: Compression,
    /// How long a start may wait for memory to be made free for it.
    pub start_wait: Duration,
    /// Whether what VMMs take beside their guests' RAM is measured and taken from the budget.
    pub books_vmms: bool,
    /// The largest VM that is taken in of those that somebody else started.
    pub adopt_max: Option<Bytes>,
    /// What VMs get that nothing else was said of; see [`rules::rule_for`].
    pub vms: Vec<VmRule>,
    /// In order of their names; each is inside one that is here too, or none.
    pub pools: Vec<PoolRule>,
    /// `None`: no journal of decisions is kept.
    pub journal: Option<ballast_journal::Settings>,
    /// Whether a VM is only taken over if all its pages and books are found sound: a debug build always looks.
    pub check_takeovers: bool,
}

/// A VM of this size can pay for a few large pages of which it touches little.
const LARGE_PAGES_FROM: Pages = Pages::from_mib(1024);

/// Long enough for a balloon that brings 64 MiB/s to make room for a guest of several GiB.
const START_WAIT: Duration = Duration::from_secs(60);

impl Config {
    /// Reads the file, if any, lays the command line over it, and checks all.
    ///
    /// # Errors
    /// The file cannot be read, is no TOML, or has a value that cannot be, which the error names.
    pub fn load(path: Option<&Path>, overrides: Overrides) -> Result<Config, ConfigError> {
        let host = HostMemory::now();
        let Some(path) = path else {
            return Config::check(File::default(), overrides, "(command line and defaults)", host);
        };
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Config::read(path, &text, overrides, host)
    }

    fn read(
        path: &Path,
        text: &str,
        over: Overrides,
        host: HostMemory,
    ) -> Result<Config, ConfigError> {
        let file = parse(path, text)?;
        let mut overridden = over.keys();
        // What the file says there is read all the same, and may be what is wrong.
        if size("budget", &file.budget).is_err() {
            overridden.retain(|key| *key != "budget");
        }
        Config::check(file, over, &path.display().to_string(), host).map_err(|e| match e {
            ConfigError::Value { key, what, .. } if overridden.contains(&&*key) => {
                let origin = "(command line)".to_owned();
                ConfigError::Value { origin, line: None, key, what }
            }
            ConfigError::Value { origin, key, what, .. } => {
                let line = lines::line_of(text, &key);
                ConfigError::Value { origin, line, key, what }
            }
            other => other,
        })
    }

    fn check(
        file: File,
        over: Overrides,
        origin: &str,
        host: HostMemory,
    ) -> Result<Config, ConfigError> {
        let bad = |key: &str, what: String| ConfigError::Value {
            origin: origin.to_owned(),
            line: None,
            key: key.to_owned(),
            what,
        };
        let wrong = |(key, what): Wrong| bad(key, what);
        let wrong_rule = |(key, what): (String, String)| bad(&key, what);
        let budget = budget::check(&file, over.budget, host).map_err(wrong)?;
        let tax = over.tax.or(file.tax).unwrap_or(0.75);
        let tax = TaxRate::new(tax).map_err(|e| bad("tax", e.to_string()))?;
        let sampling = sampling(&file.sampling, &over).map_err(wrong)?;
        let balloon = balloon(&file.balloon).map_err(wrong)?;
        let tools = file.tools.check().map_err(wrong)?;
        let (fault_around, large_pages_from) = pager(&file.pager).map_err(wrong)?;
        let sharing = sharing(&file.sharing).map_err(wrong)?;
        let compression = compression(&file.compression).map_err(wrong)?;
        let (start_wait, books_vmms) = admission(&file.admission).map_err(wrong)?;
        let adopt_max = size("adopt.max", &file.adopt.max).map_err(wrong)?;
        let pools = rules::pool_rules(file.pool).map_err(wrong_rule)?;
        let vms = rules::vm_rules(file.defaults, file.vm, &pools).map_err(wrong_rule)?;
        let scale = file.thresholds.unwrap_or_default();
        let capacity = capacity(budget.whole, &scale.thresholds(budget.whole));
        check_mins(&pools, capacity).map_err(wrong_rule)?;

        let run_dir = run_dir(over.run_dir.or(file.run_dir)).map_err(wrong)?;
        let named = over.swap_dir.or(file.swap_dir);
        let (swap_dir, swap) = swap_places(named, file.swap.location, &run_dir).map_err(wrong)?;
        let socket = socket(over.socket.or(file.socket), &run_dir).map_err(wrong)?;
        let shim = shim(over.shim.or(file.shim)).map_err(wrong)?;
        let shim_group = shim_group(file.shim_group.as_deref()).map_err(wrong)?;
        let journal = journal::check(&file.journal, &run_dir).map_err(wrong)?;
        Ok(Config {
            budget: budget.counts,
            whole_budget: budget.whole,
            budget_of: budget.of,
            socket,
            run_dir,
            swap_dir,
            swap,
            shim,
            shim_group,
            tax,
            policy: file.policy.kind.unwrap_or_default(),
            scale,
            sampling,
            balloon,
            tools,
            fault_around,
            large_pages_from,
            wakeful: file.pager.wakeful.unwrap_or(true),
            sharing,
            compression,
            start_wait,
            adopt_max,
            books_vmms,
            vms,
            pools,
            journal,
            check_takeovers: over.check_takeovers,
        })
    }
}

fn parse(path: &Path, text: &str) -> Result<File, ConfigError> {
    toml::from_str(text).map_err(|e| {
        let span = e.span().unwrap_or_default();
        let line = text[..span.start.min(text.len())].matches('\n').count() + 1;
        let what = e.message().replace('\n', "; ");
        match lines::key_at(text, &span) {
            None => ConfigError::Syntax { path: path.to_owned(), line, what },
            Some(key) => ConfigError::Value {
                origin: path.display().to_string(),
                line: Some(line),
                what: format!("{what}{}", hint(&what, &key)),
                key,
            },
        }
    })
}

/// How it is written, where the mistake is an easy one.
fn hint(what: &str, key: &str) -> String {
    if what == "invalid type: map, expected a sequence" {
        format!(" (write [[{key}]])")
    } else if what.starts_with("invalid type: integer") && what.ends_with("expected a string") {
        " (in quotes)".to_owned()
    } else {
        String::new()
    }
}

fn size(key: &'static str, text: &Option<String>) -> Result<Option<Bytes>, Wrong> {
    let size = text.as_deref().map(str::parse::<Bytes>).transpose();
    size.map_err(|e| (key, e.to_string()))
}

/// VMMs run in folders of their own: nothing that they are told may be relative.
fn absolute(key: &'static str, path: PathBuf) -> Result<PathBuf, Wrong> {
    std::path::absolute(&path).map_err(|e| (key, format!("{}: {e}", path.display())))
}

/// The table `[sampling]`, checked; an error names its key.
fn sampling(file: &Sampling, over: &Overrides) -> Result<SamplingConfig, Wrong> {
    let d = SamplingConfig::default();
    let sampling = SamplingConfig {
        samples: over.samples.or(file.samples).unwrap_or(d.samples),
        period: match over.sample_period.or(file.period_s) {
            None => d.period,
            Some(s) => seconds(s).ok_or_else(|| {
                ("sampling.period_s", format!("{s} is not between 0.1 and 86400"))
            })?,
        },
        slow_gain: file.slow_gain.unwrap_or(d.slow_gain),
        fast_gain: file.fast_gain.unwrap_or(d.fast_gain),
    };
    let key = |e: &SamplingError| match e {
        SamplingError::NoSamples | SamplingError::ManySamples => "sampling.samples",
        SamplingError::NoPeriod => "sampling.period_s",
        SamplingError::Gains { .. } if file.slow_gain.is_some() => "sampling.slow_gain",
        SamplingError::Gains { .. } => "sampling.fast_gain",
    };
    sampling.check().map_err(|e| (key(&e), e.to_string())).map(|()| sampling)
}

/// The table `[balloon]`, checked; an error names its key.
fn balloon(file: &Balloon) -> Result<BalloonConfig, Wrong> {
    let d = BalloonConfig::default();
    // Far above what is allowed, and far below what wraps.
    let mib =
        |v: Option<u64>, default: Pages| v.map_or(default, |mib| Pages::from_mib(mib.min(1 << 40)));
    let balloon = BalloonConfig {
        rate: mib(file.rate_mib_s, d.rate),
        deflate_rate: mib(file.deflate_rate_mib_s, d.deflate_rate),
        max_fraction: file.max_fraction.unwrap_or(d.max_fraction),
        patience: match file.patience_s {
            None => d.patience,
            Some(s) => seconds(s).ok_or_else(|| {
                ("balloon.patience_s", format!("{s} is not between 0.1 and 86400"))
            })?,
        },
        guest_reserve: size("balloon.guest_reserve", &file.guest_reserve)?
            .map_or(d.guest_reserve, Bytes::pages_ceil),
        ..d
    };
    balloon.check().map_err(|e| (balloon_key(e.field), e.what)).map(|()| balloon)
}

/// The table `[pager]`, checked: the pages handed out around a fault, and the size from which on VMs get large pages;
/// an error names its key.
fn pager(file: &Pager) -> Result<(Pages, Option<Pages>), Wrong> {
    let around = size("pager.fault_around", &file.fault_around)?.unwrap_or(Bytes(64 << 10));
    if !around.0.is_power_of_two() || !(4 << 10..=2 << 20).contains(&around.0) {
        return Err(("pager.fault_around", "not a power of two from 4K to 2M".into()));
    }
    let large_pages_from = match file.large_pages_from.as_deref() {
        Some("never") => None,
        _ => Some(
            size("pager.large_pages_from", &file.large_pages_from)?
                .map_or(LARGE_PAGES_FROM, Bytes::pages_ceil),
        ),
    };
    Ok((around.pages(), large_pages_from))
}

/// The table `[admission]`, checked: how long a start may wait, and whether VMMs are taken from the budget; an error
/// names its key.
fn admission(file: &Admission) -> Result<(Duration, bool), Wrong> {
    let start_wait = match file.wait_s {
        None => START_WAIT,
        Some(s) => seconds(s)
            .ok_or_else(|| ("admission.wait_s", format!("{s} is not between 0.1 and 86400")))?,
    };
    Ok((start_wait, file.vmm_memory == Some(VmmMemory::Budget)))
}

/// What pools are guaranteed fits into `capacity`; an error names its key.
fn check_mins(pools: &[PoolRule], capacity: Pages) -> Result<(), (String, String)> {
    crate::pools::check_rules(pools, capacity).map_err(|lack| {
        let key = lack.pool.as_deref().map_or("pool".into(), |p| rules::pool_key(p, "min"));
        (key, format!("its pools' mins do not fit: {lack}"))
    })
}

fn run_dir(named: Option<PathBuf>) -> Result<PathBuf, Wrong> {
    absolute("run_dir", named.unwrap_or_else(|| layout::RUN_DIR.into()))
}

/// Of the API: in the run folder, if none is named.
fn socket(named: Option<PathBuf>, run_dir: &Path) -> Result<PathBuf, Wrong> {
    absolute("socket", named.unwrap_or_else(|| run_dir.join(layout::API_SOCKET)))
}

/// The library that VMMs preload; it is there.
fn shim(named: Option<PathBuf>) -> Result<PathBuf, Wrong> {
    let shim = absolute("shim", named.unwrap_or_else(default_shim))?;
    if !shim.is_file() {
        return Err(("shim", format!("{} is not there", shim.display())));
    }
    Ok(shim)
}

fn shim_group(named: Option<&str>) -> Result<Option<u32>, Wrong> {
    named.map(accounts::group).transpose().map_err(|e| ("shim_group", e))
}

/// The folder for swap files that the manager makes, if no locations are named; and all locations, the highest
/// priority first.
fn swap_places(
    named: Option<PathBuf>,
    mut swap: Vec<SwapLocation>,
    run_dir: &Path,
) -> Result<(Option<PathBuf>, Vec<SwapLocation>), Wrong> {
    let swap_dir = match named {
        Some(_) if !swap.is_empty() => {
            return Err(("swap.location", "give either swap_dir or locations, not both".into()));
        }
        None if !swap.is_empty() => None,
        Some(dir) => Some(absolute("swap_dir", dir)?),
        None if run_dir == Path::new(layout::RUN_DIR) => Some(layout::SERVICE_SWAP.into()),
        // VMs of a former manager may wait for this one, wherever they swap to.
        None if ![layout::SWAP, layout::VMS].iter().any(|dir| run_dir.join(dir).exists())
            && is_in_memory(run_dir) =>
        {
            let dir = run_dir.join(layout::SWAP);
            let what = "on a tmpfs, where what is swapped stays in memory: name one on a disk";
            return Err(("swap_dir", format!("{} would be {what}", dir.display())));
        }
        None => Some(run_dir.join(layout::SWAP)),
    };
    // Who checks the file is elsewhere than who is started with it.
    if let Some(location) = swap.iter().find(|location| location.path.is_relative()) {
        return Err((
            "swap.location",
            format!("{}: not an absolute path", location.path.display()),
        ));
    }
    for location in &mut swap {
        // Without what stands for nothing in it: it is held against others.
        location.path = absolute("swap.location", std::mem::take(&mut location.path))?;
    }
    let same = |i: usize| swap[..i].iter().any(|other| other.path == swap[i].path);
    if let Some(twice) = (0..swap.len()).find(|&i| same(i)) {
        return Err(("swap.location", format!("{}: named twice", swap[twice].path.display())));
    }
    swap.extend(swap_dir.iter().map(|dir| SwapLocation { path: dir.clone(), priority: 0 }));
    swap.sort_by_key(|location| std::cmp::Reverse(location.priority));
    Ok((swap_dir, swap))
}

/// Whether a folder is on a tmpfs, or will be when it is made.
fn is_in_memory(folder: &Path) -> bool {
    let nearest = folder.ancestors().find_map(|folder| std::fs::File::open(folder).ok());
    nearest.is_some_and(|folder| file_memory::is_in_memory(folder).unwrap_or(false))
}

/// The table `[sharing]`, checked; an error names its key.
fn sharing(file: &Sharing) -> Result<SharingSettings, Wrong> {
    let d = SharingSettings::default();
    let rate = |key, mib: Option<u64>, default| match mib {
        None => Ok(default),
        Some(0) => Err((key, "a rate of 0 MiB/s looks at nothing (enabled = false does)".into())),
        Some(mib) if mib > 1 << 24 => Err((key, "a rate above 16 TiB/s".into())),
        Some(mib) => Ok(Pages::from_mib(mib)),
    };
    let cpu_percent = file.cpu_percent.unwrap_or(d.cpu_percent);
    if !(0.1..=100.0).contains(&cpu_percent) {
        return Err(("sharing.cpu_percent", format!("{cpu_percent} is not between 0.1 and 100")));
    }
    let scan_time = match file.scan_time_s {
        None => d.scan_time,
        Some(s) => seconds(s)
            .ok_or_else(|| ("sharing.scan_time_s", format!("{s} is not between 0.1 and 86400")))?,
    };
    let rehome_after = match file.rehome_after_ms {
        None => d.rehome_after,
        Some(ms @ 1..=3_600_000) => Duration::from_millis(ms),
        Some(ms) => {
            return Err(("sharing.rehome_after_ms", format!("{ms} is not between 1 and 3600000")));
        }
    };
    Ok(SharingSettings {
        enabled: file.enabled.unwrap_or(d.enabled),
        order: file.order.unwrap_or(d.order),
        rate: rate("sharing.rate_mib_s", file.rate_mib_s, d.rate)?,
        vm_rate: rate("sharing.vm_rate_mib_s", file.vm_rate_mib_s, d.vm_rate)?,
        cpu_percent,
        scan_time,
        rehome_after,
    })
}

/// The table `[compression]`, checked; an error names its key.
fn compression(file: &CompressionTable) -> Result<Compression, Wrong> {
    let percent = file.cache_percent.unwrap_or(Compression::default().percent);
    if !(1..=50).contains(&percent) {
        let what = format!("{percent} is not between 1 and 50 (enabled = false keeps none)");
        return Err(("compression.cache_percent", what));
    }
    if file.enabled == Some(false) {
        return Ok(Compression::OFF);
    }
    let algorithm = match file.algorithm.unwrap_or_default() {
        AlgorithmName::Lz4 => Algorithm::Lz4,
        AlgorithmName::Zstd => Algorithm::Zstd,
    };
    let default = Compression::default();
    let adaptive = file.adaptive.unwrap_or(default.adaptive);
    Ok(Compression { algorithm: Some(algorithm), percent, adaptive, ..default })
}

fn seconds(s: f64) -> Option<Duration> {
    (0.1..=86_400.0).contains(&s).then(|| Duration::from_secs_f64(s))
}

/// Beside the program that runs, as a build leaves it, or where packages put it.
fn default_shim() -> PathBuf {
    const NAME: &str = "libballast_shim.so";
    let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join(NAME)));
    match beside {
        Some(path) if path.is_file() => path,
        _ => Path::new("/usr/lib/ballast").join(NAME),
    }
}

/// The key of a field of `BalloonConfig`.
fn balloon_key(field: &str) -> &'static str {
    match field {
        "rate" => "balloon.rate_mib_s",
        "deflate_rate" => "balloon.deflate_rate_mib_s",
        "max_fraction" => "balloon.max_fraction",
        "patience" => "balloon.patience_s",
        _ => "balloon",
    }
}

#[cfg(test)]
mod tests;
