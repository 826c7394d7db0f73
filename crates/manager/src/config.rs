//! Configuration: one TOML file, overridden by the command line, checked as a whole before anything
//! is started.

mod lines;
pub mod rules;
mod tools;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ballast_compress::Algorithm;
use ballast_pager::tier::Compression;
use ballast_policy::{BalloonConfig, PolicyKind, SamplingConfig, Scale, TaxRate};
use ballast_units::{Bytes, Pages};
use serde::Deserialize;

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
    pub enabled: bool,
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
            scan_time: Duration::from_secs(600),
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
    journal: crate::journal::Table,
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
    pub budget: Option<Bytes>,
    pub run_dir: Option<PathBuf>,
    pub swap_dir: Option<PathBuf>,
    pub socket: Option<PathBuf>,
    pub shim: Option<PathBuf>,
    pub tax: Option<f64>,
    pub samples: Option<u32>,
    pub sample_period: Option<f64>,
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
    pub budget: Pages,
    pub run_dir: PathBuf,
    /// The one location, where none is named; made if it is not there.
    pub swap_dir: Option<PathBuf>,
    /// Where swap files are, the highest priority first.
    pub swap: Vec<SwapLocation>,
    pub socket: PathBuf,
    pub shim: PathBuf,
    pub tax: TaxRate,
    /// Which policy decides.
    pub policy: PolicyKind,
    pub scale: Scale,
    pub sampling: SamplingConfig,
    pub balloon: BalloonConfig,
    pub tools: ToolSettings,
    pub fault_around: Pages,
    /// VMs of at least this size get large pages. `None`: no VM does that is not asked for it.
    pub large_pages_from: Option<Pages>,
    pub sharing: SharingSettings,
    pub compression: Compression,
    /// How long a start may wait for memory to be made free for it.
    pub start_wait: Duration,
    /// Whether what VMMs take beside their guests' RAM is measured and taken from the budget.
    pub books_vmms: bool,
    /// What VMs get that nothing else was said of; see [`rules::rule_for`].
    pub vms: Vec<VmRule>,
    pub pools: Vec<PoolRule>,
    /// `None`: no journal of decisions is kept.
    pub journal: Option<ballast_journal::Settings>,
}

/// A VM of this size can pay for a few large pages of which it touches little.
const LARGE_PAGES_FROM: Pages = Pages::from_mib(1024);

/// Long enough for a balloon of 64 MiB/s to make room for a guest of several GiB.
const START_WAIT: Duration = Duration::from_secs(60);

/// The smallest budget that makes sense: below it the thresholds are a few pages.
const MIN_BUDGET: Pages = Pages::from_mib(32);

impl Config {
    /// Reads the file, if any, lays the command line over it, and checks all.
    pub fn load(path: Option<&Path>, overrides: Overrides) -> Result<Config, ConfigError> {
        let host = host_memory().unwrap_or(Bytes(0));
        let Some(path) = path else {
            return Config::check(File::default(), overrides, "(command line and defaults)", host);
        };
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Config::read(path, &text, overrides, host)
    }

    fn read(path: &Path, text: &str, over: Overrides, host: Bytes) -> Result<Config, ConfigError> {
        let file = parse(path, text)?;
        let overridden = over.keys();
        Config::check(file, over, &path.display().to_string(), host).map_err(|e| match e {
            // The line, unless it is the command line that is wrong.
            ConfigError::Value { origin, key, what, .. } if !overridden.contains(&&*key) => {
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
        host: Bytes,
    ) -> Result<Config, ConfigError> {
        let bad = |key: &str, what: String| ConfigError::Value {
            origin: origin.to_owned(),
            line: None,
            key: key.to_owned(),
            what,
        };
        let size = |key: &str, text: &Option<String>| match text {
            None => Ok(None),
            Some(t) => t.parse::<Bytes>().map(Some).map_err(|e| bad(key, e.to_string())),
        };
        let reserve = size("reserve", &file.reserve)?;
        let budget = match over.budget.or(size("budget", &file.budget)?) {
            Some(_) if reserve.is_some() && over.budget.is_none() => {
                return Err(bad("reserve", "give either budget or reserve, not both".into()));
            }
            Some(budget) => budget,
            // VMMs, page tables, the kernel and everything that is not a guest live in the reserve.
            None => {
                let reserve = reserve.unwrap_or(Bytes((host.0 / 5).max(1 << 30)));
                host.saturating_sub(reserve)
            }
        };
        let budget = budget.pages();
        budget_within(budget, host).map_err(|e| bad("budget", e))?;
        let tax = over.tax.or(file.tax).unwrap_or(0.75);
        let tax = TaxRate::new(tax).map_err(|e| bad("tax", e.to_string()))?;

        let d = SamplingConfig::default();
        let period = over.sample_period.or(file.sampling.period_s);
        let sampling = SamplingConfig {
            samples: over.samples.or(file.sampling.samples).unwrap_or(d.samples),
            period: match period {
                None => d.period,
                Some(s) => seconds(s).ok_or_else(|| {
                    bad("sampling.period_s", format!("{s} is not between 0.1 and 86400"))
                })?,
            },
            slow_gain: file.sampling.slow_gain.unwrap_or(d.slow_gain),
            fast_gain: file.sampling.fast_gain.unwrap_or(d.fast_gain),
        };
        sampling.check().map_err(|e| bad("sampling", e.to_string()))?;
        if sampling.samples > 10_000 {
            return Err(bad("sampling.samples", "more than 10000".into()));
        }

        let d = BalloonConfig::default();
        let mib = |v: Option<u64>, default: Pages| v.map_or(default, Pages::from_mib);
        let balloon = BalloonConfig {
            rate: mib(file.balloon.rate_mib_s, d.rate),
            deflate_rate: mib(file.balloon.deflate_rate_mib_s, d.deflate_rate),
            max_fraction: file.balloon.max_fraction.unwrap_or(d.max_fraction),
            patience: match file.balloon.patience_s {
                None => d.patience,
                Some(s) => seconds(s).ok_or_else(|| {
                    bad("balloon.patience_s", format!("{s} is not between 0.1 and 86400"))
                })?,
            },
            guest_reserve: size("balloon.guest_reserve", &file.balloon.guest_reserve)?
                .map_or(d.guest_reserve, Bytes::pages_ceil),
            ..d
        };
        if !(0.0..=0.95).contains(&balloon.max_fraction) {
            return Err(bad("balloon.max_fraction", "not between 0 and 0.95".into()));
        }
        if balloon.rate.is_zero() || balloon.deflate_rate.is_zero() {
            return Err(bad("balloon", "a rate of 0 MiB/s moves nothing".into()));
        }
        if balloon.rate.0 > 1 << 32 || balloon.deflate_rate.0 > 1 << 32 {
            return Err(bad("balloon", "a rate above 16 TiB/s".into()));
        }

        let tools = file.tools.check().map_err(|(key, what)| bad(key, what))?;

        let fault_around = size("pager.fault_around", &file.pager.fault_around)?
            .map_or(Pages(16), Bytes::pages_ceil);
        if !fault_around.0.is_power_of_two() || fault_around.0 > 512 {
            return Err(bad("pager.fault_around", "not a power of two from 4K to 2M".into()));
        }

        let large_pages_from = match file.pager.large_pages_from.as_deref() {
            Some("never") => None,
            _ => Some(
                size("pager.large_pages_from", &file.pager.large_pages_from)?
                    .map_or(LARGE_PAGES_FROM, Bytes::pages_ceil),
            ),
        };

        let sharing = sharing(&file.sharing).map_err(|(key, what)| bad(key, what))?;

        let compression = compression(&file.compression).map_err(|(key, what)| bad(key, what))?;

        let start_wait = match file.admission.wait_s {
            None => START_WAIT,
            Some(s) => seconds(s).ok_or_else(|| {
                bad("admission.wait_s", format!("{s} is not between 0.1 and 86400"))
            })?,
        };
        let pools = rules::pool_rules(file.pool).map_err(|(key, what)| bad(&key, what))?;
        let vms = rules::vm_rules(file.defaults, file.vm, &pools)
            .map_err(|(key, what)| bad(&key, what))?;
        let scale = file.thresholds.unwrap_or_default();
        let capacity = budget.saturating_sub(scale.thresholds(budget).goal());
        if let Err(lack) = crate::pools::check_rules(&pools, capacity) {
            let key = lack.pool.as_deref().map_or("pool".into(), |p| rules::pool_key(p, "min"));
            return Err(bad(&key, format!("its pools' mins do not fit: {lack}")));
        }

        // VMMs run in folders of their own: nothing that they are told may be relative.
        let absolute = |key: &str, path: PathBuf| {
            std::path::absolute(&path).map_err(|e| bad(key, format!("{}: {e}", path.display())))
        };
        let run_dir = over.run_dir.or(file.run_dir).unwrap_or_else(|| "/run/ballast".into());
        let run_dir = absolute("run_dir", run_dir)?;
        let named = over.swap_dir.or(file.swap_dir);
        let mut swap = file.swap.location;
        let swap_dir = match named {
            Some(_) if !swap.is_empty() => {
                return Err(bad(
                    "swap.location",
                    "give either swap_dir or locations, not both".into(),
                ));
            }
            None if !swap.is_empty() => None,
            Some(dir) => Some(absolute("swap_dir", dir)?),
            None if run_dir == Path::new("/run/ballast") => Some("/var/lib/ballast/swap".into()),
            None => Some(run_dir.join("swap")),
        };
        for location in &mut swap {
            location.path = absolute("swap.location", std::mem::take(&mut location.path))?;
        }
        let same = |i: usize| swap[..i].iter().any(|other| other.path == swap[i].path);
        if let Some(twice) = (0..swap.len()).find(|&i| same(i)) {
            let what = format!("{}: named twice", swap[twice].path.display());
            return Err(bad("swap.location", what));
        }
        swap.extend(swap_dir.iter().map(|dir| SwapLocation { path: dir.clone(), priority: 0 }));
        swap.sort_by_key(|location| std::cmp::Reverse(location.priority));
        let socket = over.socket.or(file.socket).unwrap_or_else(|| run_dir.join("api.sock"));
        let socket = absolute("socket", socket)?;
        let shim = absolute("shim", over.shim.or(file.shim).unwrap_or_else(default_shim))?;
        if !shim.is_file() {
            return Err(bad("shim", format!("{} is not there", shim.display())));
        }
        let journal = crate::journal::check(&file.journal, &run_dir);
        let journal = journal.map_err(|(key, what)| bad(key, what))?;
        Ok(Config {
            budget,
            socket,
            run_dir,
            swap_dir,
            swap,
            shim,
            tax,
            policy: file.policy.kind.unwrap_or_default(),
            scale,
            sampling,
            balloon,
            tools,
            fault_around,
            large_pages_from,
            sharing,
            compression,
            start_wait,
            books_vmms: file.admission.vmm_memory == Some(VmmMemory::Budget),
            vms,
            pools,
            journal,
        })
    }
}

fn parse(path: &Path, text: &str) -> Result<File, ConfigError> {
    toml::from_str(text).map_err(|e| {
        let at = e.span().map_or(0, |span| span.start.min(text.len()));
        ConfigError::Syntax {
            path: path.to_owned(),
            line: text[..at].matches('\n').count() + 1,
            what: e.message().replace('\n', "; "),
        }
    })
}

/// A budget that this host can have.
pub fn check_budget(budget: Pages) -> Result<(), String> {
    budget_within(budget, host_memory().unwrap_or(Bytes(0)))
}

fn budget_within(budget: Pages, host: Bytes) -> Result<(), String> {
    if budget < MIN_BUDGET {
        return Err(format!("{budget} is below {MIN_BUDGET}"));
    }
    if host.0 > 0 && budget > host.pages() {
        return Err(format!("{budget} is more than the host's memory, {host}"));
    }
    Ok(())
}

/// The table `[sharing]`, checked; an error names its key.
fn sharing(file: &Sharing) -> Result<SharingSettings, (&'static str, String)> {
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
fn compression(file: &CompressionTable) -> Result<Compression, (&'static str, String)> {
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
    Ok(Compression { algorithm: Some(algorithm), percent, ..Compression::default() })
}

fn seconds(s: f64) -> Option<Duration> {
    (0.1..=86_400.0).contains(&s).then(|| Duration::from_secs_f64(s))
}

fn host_memory() -> Option<Bytes> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok().map(|k: u64| Bytes(k << 10))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> Result<Config, ConfigError> {
        let shim = std::env::current_exe().ok();
        let over = Overrides { shim, ..Overrides::default() };
        Config::read(Path::new("ballast.toml"), text, over, Bytes::from_mib(16 << 10))
    }

    #[test]
    fn an_empty_file_is_the_defaults() {
        let config = check("").unwrap();
        assert_eq!(config.budget, Bytes((16384 << 20) - (16384 << 20) / 5).pages());
        assert_eq!(config.tax, TaxRate::new(0.75).unwrap());
        assert_eq!(config.sampling, SamplingConfig::default());
        assert_eq!(config.socket, Path::new("/run/ballast/api.sock"));
        assert_eq!(config.sharing, SharingSettings::default());
        assert!(config.sharing.enabled);
    }

    #[test]
    fn sharing_is_read_in_full() {
        let text = "[sharing]\nenabled = false\norder = \"written\"\nrate_mib_s = 64\n\
                    vm_rate_mib_s = 16\ncpu_percent = 2.5\nscan_time_s = 3600\n\
                    rehome_after_ms = 500\n";
        let expected = SharingSettings {
            enabled: false,
            order: ScanOrder::Written,
            rate: Pages::from_mib(64),
            vm_rate: Pages::from_mib(16),
            cpu_percent: 2.5,
            scan_time: Duration::from_secs(3600),
            rehome_after: Duration::from_millis(500),
        };
        assert_eq!(check(text).unwrap().sharing, expected);
    }

    #[test]
    fn compression_is_read_in_full() {
        assert_eq!(check("").unwrap().compression, Compression::default());
        let text = "[compression]\nalgorithm = \"zstd\"\ncache_percent = 25\n";
        let expected =
            Compression { algorithm: Some(Algorithm::Zstd), percent: 25, ..Compression::default() };
        assert_eq!(check(text).unwrap().compression, expected);
        let off = check("[compression]\nenabled = false\n").unwrap().compression;
        assert_eq!(off, Compression::OFF);
    }

    #[test]
    fn vms_and_pools_are_read_in_full() {
        let config = check(
            "[defaults]\nshares = 100\n[[vm]]\nname = \"db-*\"\npool = \"prod/db\"\nmin = \"50%\"\n\
             max = \"2G\"\ntax = 0.25\n[pool.prod]\nmin = \"4G\"\nmax = \"8G\"\nshares = 7\n\
             [pool.\"prod/db\"]\nexpandable = false\nmin = \"1G\"\ntax = 0.5\n",
        )
        .unwrap();
        let rule = rules::rule_for(&config.vms, "db-7");
        assert_eq!((rule.shares, rule.tax), (Some(100), Some(0.25)));
        assert_eq!(rule.pool.as_deref(), Some("prod/db"));
        assert_eq!(rule.min.map(|m| m.of(Pages(100))), Some(Pages(50)));
        assert_eq!(rule.max.map(|m| m.of(Pages(100))), Some(Pages::from_mib(2048)));
        assert_eq!(rules::rule_for(&config.vms, "web").pool, None);
        let [prod, db] = &config.pools[..] else { panic!("{:?}", config.pools) };
        assert_eq!((prod.min, prod.max), (Pages::from_mib(4096), Some(Pages::from_mib(8192))));
        assert_eq!((prod.shares, prod.expandable, prod.tax), (7, true, None));
        assert_eq!((db.parent(), db.expandable), (Some("prod"), false));
        assert_eq!(db.tax.map(TaxRate::get), Some(0.5));
    }

    #[test]
    fn the_journal_is_kept_unless_it_is_not_wanted() {
        let default = check("").unwrap().journal.unwrap();
        assert_eq!(
            (default.folder.to_str(), default.limit),
            (Some("/var/lib/ballast/journal"), 64 << 20)
        );
        let elsewhere = check("run_dir = \"/a\"\n").unwrap().journal.unwrap();
        assert_eq!(elsewhere.folder, Path::new("/a/journal"));
        let own = check("[journal]\nfolder = \"/b\"\nlimit = \"2M\"\n").unwrap().journal.unwrap();
        assert_eq!((own.folder.to_str(), own.limit), (Some("/b"), 2 << 20));
        assert_eq!(check("[journal]\nenabled = false\n").unwrap().journal, None);
    }

    #[test]
    fn swap_locations_are_in_order_of_priority() {
        let config = check(
            "[[swap.location]]\npath = \"/disk\"\n[[swap.location]]\npath = \"/ssd\"\n\
             priority = 10\n[[swap.location]]\npath = \"/slow\"\npriority = -1\n",
        )
        .unwrap();
        let places: Vec<_> =
            config.swap.iter().map(|l| (l.path.to_str().unwrap(), l.priority)).collect();
        assert_eq!(places, [("/ssd", 10), ("/disk", 0), ("/slow", -1)]);
        assert_eq!(config.swap_dir, None);
        let lone = check("swap_dir = \"/only\"\n").unwrap();
        assert_eq!(lone.swap_dir.as_deref(), Some(Path::new("/only")));
        assert_eq!(lone.swap, [SwapLocation { path: "/only".into(), priority: 0 }]);
    }

    #[test]
    fn mistakes_are_refused_as_a_whole_and_name_their_line_or_key() {
        for (text, wanted) in [
            ("budget = \"1G\"\nshares = 4\n", "line 2"),
            ("budget = \"1G\"\n\n[sampling]\nsamples = \"many\"\n", "line 4"),
            ("budget = \n", "line 1"),
            ("budget = \"12Q\"\n", "budget: '12Q' is not a size"),
            ("budget = \"1M\"\n", "budget: 1 MiB is below"),
            ("budget = \"64G\"\n", "more than the host's memory"),
            ("budget = \"1G\"\nreserve = \"1G\"\n", "reserve: give either"),
            ("tax = 1.0\n", "tax"),
            ("[sampling]\nperiod_s = 0\n", "ballast.toml, line 2: sampling.period_s"),
            ("[admission]\nwait_s = 0\n", "line 2: admission.wait_s"),
            ("[admission]\nvmm_memory = \"none\"\n", "line 2"),
            ("[[vm]]\nshares = 4\n", "line 1: vm[0]: without a name"),
            ("[[vm]]\nname = \"a b\"\n", "line 2: vm[0].name: 'a b' is not"),
            ("[[vm]]\nname = \"a\"\n\n[[vm]]\nname = \"b\"\nshares = 0\n", "line 6: vm[1].shares"),
            ("[[vm]]\nname = \"a\"\nmin = \"120%\"\n", "line 3: vm[0].min: '120%' is not"),
            ("[[vm]]\nname = \"a\"\nmin = \"2G\"\nmax = \"1G\"\n", "line 3: vm[0].min: above max"),
            ("[[vm]]\nname = \"a\"\npool = \"x\"\n", "line 3: vm[0].pool: no pool 'x'"),
            ("[[vm]]\nname = \"a\"\nsize = 3\n", "line 3"),
            ("[defaults]\ntax = 1.5\n", "line 2: defaults.tax"),
            ("[defaults]\nname = \"x\"\n", "line 2: defaults.name"),
            ("[pool.\"a/b\"]\n", "line 1: pool.\"a/b\": the pool 'a' that it is in"),
            ("[pool.a]\nmin = \"2G\"\nmax = \"1G\"\n", "line 3: pool.a.max: 1 GiB is below min"),
            ("[pool.\"a//b\"]\n", "is not a name"),
            ("[pool.a]\nexpandable = 1\n", "line 2"),
            ("[pool.a]\nmin = \"99G\"\n", "line 1: pool: its pools' mins do not fit"),
            (
                "[pool.a]\nmin = \"1G\"\nexpandable = false\n[pool.\"a/b\"]\nmin = \"2G\"\n",
                "line 2: pool.a.min: its pools' mins do not fit: needs 2 GiB unreserved, pool a has \
                 1 GiB left of its min",
            ),
            ("[sampling]\nsamples = 0\n", "sampling"),
            ("[balloon]\nmax_fraction = 2.0\n", "balloon.max_fraction"),
            ("[balloon]\nrate_mib_s = 0\n", "balloon"),
            ("[pager]\nfault_around = \"12K\"\n", "pager.fault_around"),
            ("[pager]\nlarge_pages_from = \"always\"\n", "pager.large_pages_from"),
            ("thresholds = \"steep\"\n", "line 1"),
            ("[policy]\nkind = \"steep\"\n", "line 2"),
            ("[sharing]\norder = \"alphabetic\"\n", "line 2"),
            ("[sharing]\nenabled = 1\n", "line 2"),
            ("[sharing]\nsalt = \"x\"\n", "line 2"),
            ("[sharing]\nrate_mib_s = 0\n", "sharing.rate_mib_s"),
            ("[sharing]\nvm_rate_mib_s = 99999999999\n", "sharing.vm_rate_mib_s"),
            ("[sharing]\ncpu_percent = 0\n", "sharing.cpu_percent"),
            ("[sharing]\ncpu_percent = nan\n", "sharing.cpu_percent"),
            ("[sharing]\ncpu_percent = 400\n", "sharing.cpu_percent"),
            ("[sharing]\nscan_time_s = -1\n", "sharing.scan_time_s"),
            ("[sharing]\nrehome_after_ms = 0\n", "sharing.rehome_after_ms"),
            ("[journal]\nlimit = \"1K\"\n", "journal.limit: 1 KiB is below 1 MiB"),
            ("[journal]\nsize = \"1M\"\n", "line 2"),
            ("[compression]\nalgorithm = \"lzw\"\n", "line 2"),
            ("[compression]\ncache_percent = 0\n", "compression.cache_percent"),
            ("[compression]\nenabled = false\ncache_percent = 51\n", "compression.cache_percent"),
            ("[[swap.location]]\npriority = 1\n", "line 1"),
            ("[[swap.location]]\npath = \"/a\"\npriority = \"x\"\n", "line 3"),
            ("swap_dir = \"/b\"\n[[swap.location]]\npath = \"/a\"\n", "swap.location: give either"),
            (
                "[[swap.location]]\npath = \"/a\"\n[[swap.location]]\npath = \"/a\"\n",
                "swap.location: /a: named twice",
            ),
        ] {
            let error = check(text).unwrap_err().to_string();
            assert!(error.contains(wanted), "{text:?}: {error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn the_command_line_wins() {
        let file = parse(Path::new("x"), "budget = \"1G\"\ntax = 0.5\nrun_dir = \"/a\"\n").unwrap();
        let over = Overrides {
            budget: Some(Bytes::from_mib(512)),
            run_dir: Some("/b".into()),
            shim: std::env::current_exe().ok(),
            ..Overrides::default()
        };
        let config = Config::check(file, over, "x", Bytes::from_mib(2048)).unwrap();
        assert_eq!(config.budget, Pages::from_mib(512));
        assert_eq!(config.run_dir, Path::new("/b"));
        assert_eq!(config.swap_dir.as_deref(), Some(Path::new("/b/swap")));
        assert_eq!(config.tax, TaxRate::new(0.5).unwrap());
    }
}
