//! Checks a scenario as it was read, and makes of it what is run.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use ballast_policy::{BalloonConfig, SamplingConfig, default_shares};
use ballast_units::{Pages, VM_NAME_RULE, good_vm_name};
use toml::Spanned;

use crate::Millis;
use crate::amount::{Amount, Length};
use crate::file::{
    BalloonTable, DiskWord, DriverWord, EventTable, File, Kind, LoadTable, SamplingTable, VmTable,
};
use crate::guest::Nature;
use crate::load::{Load, Shape};
use crate::models::Models;
use crate::random::Random;
use crate::recorded;
use crate::scenario::{Change, Event, Group, Scenario, ScenarioError, Settings, duration};
use crate::vm::{Driver, VmSpec};

/// Makes the error of a mistake at an offset of the text.
type Wrong<'a> = &'a dyn Fn(usize, String) -> ScenarioError;

const MOST_HOSTS: u64 = 1_000_000;
const MOST_VMS: u64 = 100_000;
const MOST_POINTS: u64 = 100_000;

pub(crate) fn check(file: File, path: &Path, wrong: Wrong) -> Result<Scenario, ScenarioError> {
    let Times { duration, tick, calm, record } = times(&file, wrong)?;
    let hosts = file.hosts.as_ref().map_or(1, |h| *h.get_ref());
    let what = format!("hosts: not between 1 and {MOST_HOSTS}");
    require((1..=MOST_HOSTS).contains(&hosts), file.hosts.as_ref(), what, wrong)?;
    let memory = file.host.memory.get_ref().0;
    let enough = memory >= Pages::from_mib(32);
    require(enough, Some(&file.host.memory), "host.memory: below 32 MiB", wrong)?;
    let models = file.models.as_ref().map_or_else(Models::default, |m| *m.get_ref());
    models.check().map_err(|(key, what)| {
        wrong(start(file.models.as_ref()), format!("models.{key}: {what}"))
    })?;
    let groups = groups(&file, path, wrong)?;
    let settings = Settings {
        tick,
        calm,
        memory,
        swap: file.host.swap.map_or(Pages(u64::MAX / 4), |s| s.0),
        scale: file.host.thresholds,
        policy: file.policy.kind,
        sampling: sampling(file.sampling.as_ref().map(Spanned::get_ref))
            .map_err(|what| wrong(start(file.sampling.as_ref()), what))?,
        balloon: balloon(file.balloon.as_ref().map(Spanned::get_ref))
            .map_err(|what| wrong(start(file.balloon.as_ref()), what))?,
        tools: file.tools.order.unwrap_or_default(),
        models,
        events: events(&file, &groups, wrong)?,
    };
    let title = path.file_stem().map(|s| s.to_string_lossy().into_owned());
    Ok(Scenario {
        name: file.name.or(title).unwrap_or_default(),
        duration,
        seed: file.seed.unwrap_or(1),
        hosts,
        record,
        settings: Arc::new(settings),
        groups,
    })
}

/// How long a scenario runs, how long its steps are, and how far its points are apart.
struct Times {
    duration: Millis,
    tick: Millis,
    calm: Millis,
    record: Millis,
}

fn times(file: &File, wrong: Wrong) -> Result<Times, ScenarioError> {
    let duration = file.duration.get_ref().0;
    let what = "duration: nothing happens in no time";
    require(duration > 0, Some(&file.duration), what, wrong)?;
    let tick = file.tick.as_ref().map_or(1_000, |t| t.get_ref().0);
    let what = "tick: not between 10ms and 60s";
    require((10..=60_000).contains(&tick), file.tick.as_ref(), what, wrong)?;
    let calm = file.calm.as_ref().map_or(tick, |c| c.get_ref().0);
    require(calm >= tick, file.calm.as_ref(), "calm: shorter than a tick", wrong)?;
    let record = file.record.as_ref().map_or((duration / 400).max(tick), |r| r.get_ref().0);
    let fits = record >= tick && duration / record <= MOST_POINTS;
    let what = format!("record: shorter than a tick, or more than {MOST_POINTS} points");
    require(fits, file.record.as_ref(), what, wrong)?;
    Ok(Times { duration, tick, calm, record })
}

fn groups(file: &File, path: &Path, wrong: Wrong) -> Result<Vec<Group>, ScenarioError> {
    let mut groups: Vec<Group> = Vec::new();
    for vm in &file.vm {
        let wrong_here = |what: String| wrong(vm.span().start, what);
        let group = group(vm.get_ref(), groups.len(), file, path, wrong)
            .map_err(|e| e.unwrap_or_else(wrong_here))?;
        if groups.iter().any(|g| g.name == group.name) {
            return Err(wrong_here(format!("vm.name: '{}' is there twice", group.name)));
        }
        groups.push(group);
    }
    let count = groups.iter().fold(0, |sum: u64, g| sum.saturating_add(g.count));
    let what = format!("vm: {count} VMs, not between 1 and {MOST_VMS}");
    require((1..=MOST_VMS).contains(&count), file.vm.first(), what, wrong)?;
    check_names(&groups, &file.vm, wrong)?;
    Ok(groups)
}

/// The names of VMs, as they are numbered: they go into CSV as they are, and who reads that tells VMs apart by them.
fn check_names(
    groups: &[Group],
    tables: &[Spanned<VmTable>],
    wrong: Wrong,
) -> Result<(), ScenarioError> {
    let mut seen = HashSet::new();
    for (group, table) in groups.iter().zip(tables) {
        let wrong_here = |what: String| wrong(table.span().start, format!("vm.name: {what}"));
        for name in (0..group.count).map(|i| group.vm_name(i)) {
            if !good_vm_name(&name) {
                return Err(wrong_here(format!("'{name}': {VM_NAME_RULE}")));
            }
            if let Some(name) = seen.replace(name) {
                return Err(wrong_here(format!("'{name}' is there twice")));
            }
        }
    }
    Ok(())
}

fn events(file: &File, groups: &[Group], wrong: Wrong) -> Result<Vec<Event>, ScenarioError> {
    let checked = |e: &Spanned<EventTable>| {
        event(e.get_ref(), groups).map_err(|what| wrong(e.span().start, what))
    };
    file.event.iter().map(checked).collect()
}

/// Unless it is `good`, an error where the key stands; at the beginning of the file, if it does not.
fn require<T>(
    good: bool,
    key: Option<&Spanned<T>>,
    what: impl Into<String>,
    wrong: Wrong,
) -> Result<(), ScenarioError> {
    if good { Ok(()) } else { Err(wrong(start(key), what.into())) }
}

/// Where a table or a key begins; the beginning of the file, if it is not there.
fn start<T>(table: Option<&Spanned<T>>) -> usize {
    table.map_or(0, |t| t.span().start)
}

/// What went wrong: an error of its own, or a sentence about the VM.
enum Fault {
    Error(ScenarioError),
    Words(String),
}

impl Fault {
    fn unwrap_or_else(self, here: impl Fn(String) -> ScenarioError) -> ScenarioError {
        match self {
            Fault::Error(e) => e,
            Fault::Words(what) => here(what),
        }
    }
}

impl From<String> for Fault {
    fn from(what: String) -> Fault {
        Fault::Words(what)
    }
}

fn group(vm: &VmTable, n: usize, file: &File, path: &Path, wrong: Wrong) -> Result<Group, Fault> {
    if !good_vm_name(&vm.name) {
        return Err(format!("vm.name: {VM_NAME_RULE}").into());
    }
    check_stop(vm)?;
    let size = vm.size.0;
    if size < Pages::from_mib(1) {
        return Err(format!("vm.size: {size} is below 1 MiB").into());
    }
    let (min, max) = bounds(vm, size)?;
    if vm.shares == Some(0) {
        return Err("vm.shares: at least 1".to_owned().into());
    }
    let nature = nature(vm, size)?;
    let driver = driver_of(vm)?;
    let shape = shape(vm.load.get_ref(), size, path).map_err(|fault| match fault {
        Fault::Words(what) => Fault::Error(wrong(vm.load.span().start, what)),
        error => error,
    })?;
    let like = VmSpec {
        name: vm.name.clone(),
        group: n,
        nature,
        min: min.0,
        max: max.0,
        shares: vm.shares.unwrap_or_else(|| default_shares(size)),
        tax: vm.tax.unwrap_or(file.policy.tax),
        driver,
        load: Load::new(shape.clone(), Random::new(0, 0)),
        start: vm.start.map_or(0, |l| l.0),
        stop: vm.stop.map(|l| l.0),
        boot: vm.boot.map_or(0, |l| l.0),
        boot_touch: vm.boot_touch.map_or(Pages::ZERO, |a| a.of(size)).0,
    };
    Ok(Group {
        name: vm.name.clone(),
        count: vm.count.unwrap_or(1),
        like,
        shape,
        stagger: vm.stagger.map_or(0, |l| l.0),
    })
}

/// Each of them is there for some time.
fn check_stop(vm: &VmTable) -> Result<(), String> {
    let ms = |length: Option<Length>| length.map_or(0, |l| l.0);
    let count = vm.count.unwrap_or(1);
    let last = ms(vm.stagger).saturating_mul(count.saturating_sub(1)).saturating_add(ms(vm.start));
    if vm.stop.is_none_or(|stop| stop.0 > last) {
        return Ok(());
    }
    let whose = if count > 1 { "the last one's" } else { "its" };
    Err(format!("vm.stop: not after {whose} start"))
}

/// Its min and max.
fn bounds(vm: &VmTable, size: Pages) -> Result<(Pages, Pages), String> {
    let max = vm.max.map_or(size, |a| a.of(size));
    let min = vm.min.map_or(Pages::ZERO, |a| a.of(size));
    if min > max {
        return Err(format!("vm.min: {min} is above its max, {max}"));
    }
    if max.is_zero() {
        return Err("vm.max: nothing".to_owned());
    }
    Ok((min, max))
}

/// What of its guest does not change.
fn nature(vm: &VmTable, size: Pages) -> Result<Nature, String> {
    let skew = vm.skew.unwrap_or(0.0);
    if !(0.0..=0.95).contains(&skew) {
        return Err(format!("vm.skew: {skew} is not between 0 and 0.95"));
    }
    let touch_every = vm.touch_every.map_or(5_000, |l| l.0);
    if touch_every == 0 {
        return Err("vm.touch_every: longer than nothing".to_owned());
    }
    Ok(Nature {
        size: size.0,
        cache: vm.cache.map_or(0.5, |p| p.0),
        share: vm.share.map_or(0.0, |p| p.0),
        touch_every: touch_every as f64 / 1e3,
        idle_reuse: vm.idle_reuse.map_or(7_200.0, |l| l.0 as f64 / 1e3),
        skew,
    })
}

/// Its balloon's driver, with a speed of its own where the scenario gives one.
fn driver_of(vm: &VmTable) -> Result<Driver, String> {
    match (vm.balloon, vm.balloon_mib_s) {
        (word, None) => Ok(driver(word)),
        (DriverWord::Works, Some(mib @ 1..=1_000_000)) => Ok(Driver::Slow(Pages::from_mib(mib).0)),
        (DriverWord::Works, Some(mib)) => {
            Err(format!("vm.balloon_mib_s: {mib} is not between 1 and 1000000"))
        }
        (DriverWord::None | DriverWord::Dead, Some(_)) => {
            Err("vm.balloon_mib_s: means nothing to a balloon that does not work".to_owned())
        }
    }
}

fn driver(word: DriverWord) -> Driver {
    match word {
        DriverWord::Works => Driver::Follows,
        DriverWord::None => Driver::None,
        DriverWord::Dead => Driver::Dead,
    }
}

fn shape(load: &LoadTable, size: Pages, path: &Path) -> Result<Shape, Fault> {
    check_keys(load)?;
    let keys = Keys { load, size };
    Ok(match load.kind {
        Kind::Idle => {
            let part = |a: Option<Amount>, default| a.unwrap_or(Amount::Part(default)).of(size);
            Shape::Steady { active: part(load.active, 0.02), used: part(load.used, 0.9) }
        }
        Kind::Steady => {
            let active = keys.need("active", load.active)?;
            Shape::Steady { active, used: keys.used(active) }
        }
        Kind::Bursty => {
            let (low, high) = keys.levels()?;
            let (on, off) = (keys.time("on", load.on, None)?, keys.time("off", load.off, None)?);
            Shape::Bursty { low, high, used: keys.used(high), on, off }
        }
        Kind::Diurnal => {
            let (low, high) = keys.levels()?;
            let period = keys.time("period", load.period, Some(86_400_000))?;
            let jitter = load.jitter.map_or(0, |l| l.0);
            Shape::Diurnal { low, high, used: keys.used(high), period, jitter }
        }
        Kind::Leak => {
            let (from, to) = (keys.need("from", load.from)?, keys.used(size));
            if from >= to {
                return Err(format!("load.from: {from} is not below load.used, {to}").into());
            }
            let active = load.active.map_or(from, |a| a.of(size));
            Shape::Leak { active, from, to, per_hour: keys.need("per_hour", load.per_hour)? }
        }
        Kind::Walk => {
            let (low, high) = keys.levels()?;
            let every = keys.time("every", load.every, None)?;
            let step = keys.need("step", load.step)?;
            Shape::Walk { low, high, step, every, used: keys.used(high) }
        }
        Kind::Recorded => recorded_shape(load, path)?,
    })
}

/// A key that means nothing to a load of its kind is a mistake.
fn check_keys(load: &LoadTable) -> Result<(), String> {
    let given: [(&str, bool); 14] = [
        ("active", load.active.is_some()),
        ("used", load.used.is_some()),
        ("low", load.low.is_some()),
        ("high", load.high.is_some()),
        ("on", load.on.is_some()),
        ("off", load.off.is_some()),
        ("period", load.period.is_some()),
        ("jitter", load.jitter.is_some()),
        ("from", load.from.is_some()),
        ("per_hour", load.per_hour.is_some()),
        ("step", load.step.is_some()),
        ("every", load.every.is_some()),
        ("file", load.file.is_some()),
        ("vm", load.vm.is_some()),
    ];
    let fits: &[&str] = match load.kind {
        Kind::Idle | Kind::Steady => &["active", "used"],
        Kind::Bursty => &["low", "high", "on", "off", "used"],
        Kind::Diurnal => &["low", "high", "period", "jitter", "used"],
        Kind::Leak => &["active", "from", "used", "per_hour"],
        Kind::Walk => &["low", "high", "step", "every", "used"],
        Kind::Recorded => &["file", "vm"],
    };
    match given.iter().find(|(key, there)| *there && !fits.contains(key)) {
        Some((key, _)) => {
            Err(format!("load.{key}: means nothing to a load that is {}", name_of(load.kind)))
        }
        None => Ok(()),
    }
}

/// A kind as scenarios write it.
fn name_of(kind: Kind) -> String {
    format!("{kind:?}").to_lowercase()
}

/// The keys of a load, whose amounts are of a VM of `size`.
struct Keys<'a> {
    load: &'a LoadTable,
    size: Pages,
}

impl Keys<'_> {
    fn need(&self, key: &str, value: Option<Amount>) -> Result<Pages, String> {
        value.map(|a| a.of(self.size)).ok_or_else(|| self.missing(key))
    }

    /// A second at least.
    fn time(
        &self,
        key: &str,
        value: Option<Length>,
        default: Option<Millis>,
    ) -> Result<Millis, String> {
        match value.map(|l| l.0).or(default) {
            None => Err(self.missing(key)),
            Some(ms) if ms < 1_000 => Err(format!("load.{key}: shorter than a second")),
            Some(ms) => Ok(ms),
        }
    }

    fn missing(&self, key: &str) -> String {
        format!("load.{key}: a load that is {} needs it", name_of(self.load.kind))
    }

    /// The levels between which a load goes up and down.
    fn levels(&self) -> Result<(Pages, Pages), String> {
        let (low, high) = (self.need("low", self.load.low)?, self.need("high", self.load.high)?);
        if low > high {
            return Err(format!("load.low: {low} is above load.high, {high}"));
        }
        Ok((low, high))
    }

    /// What the load holds; `least`, if it does not say.
    fn used(&self, least: Pages) -> Pages {
        self.load.used.map_or(least, |a| a.of(self.size))
    }
}

/// That of a trace, whose file is found beside the scenario at `path`.
fn recorded_shape(load: &LoadTable, path: &Path) -> Result<Shape, Fault> {
    let (Some(file), Some(vm)) = (&load.file, &load.vm) else {
        return Err("load.file, load.vm: a recorded load needs both".to_owned().into());
    };
    let file = path.parent().unwrap_or(Path::new("")).join(file);
    let points = recorded::load(&file, vm)
        .map_err(|what| Fault::Error(ScenarioError::Trace { path: file.clone(), what }))?;
    Ok(Shape::Recorded(points))
}

fn event(table: &EventTable, groups: &[Group]) -> Result<Event, String> {
    let mut changes = Vec::new();
    changes.extend(table.shares.map(|s| Change::Shares(s.max(1))));
    changes.extend(table.min.map(|s| Change::Min(s.0)));
    changes.extend(table.max.map(|s| Change::Max(s.0)));
    changes.extend(table.tax.map(Change::Tax));
    changes.extend(table.balloon.map(|word| Change::Driver(driver(word))));
    let of_vms = !changes.is_empty();
    changes.extend(table.memory.map(|s| Change::Memory(s.0)));
    changes.extend(table.disk.map(|word| Change::Disk(word == DiskWord::Works)));
    if changes.is_empty() {
        return Err("event: nothing changes".to_owned());
    }
    if of_vms && table.vm.is_none() {
        return Err("event.vm: which VM? (a name, or * for all)".to_owned());
    }
    let event = Event { at: table.at.0, vm: table.vm.clone().unwrap_or_default(), changes };
    if of_vms && !groups.iter().any(|group| names_one_of(&event, group)) {
        return Err(format!("event.vm: no VM is called '{}'", event.vm));
    }
    Ok(event)
}

/// Whether an event is about a VM of the group.
fn names_one_of(event: &Event, group: &Group) -> bool {
    if group.count == 1 {
        return event.names(&group.name);
    }
    let beginning = event.vm.strip_suffix('*');
    if beginning.is_some_and(|beginning| group.name.starts_with(beginning)) {
        return group.count > 0;
    }
    // Of the numbers that begin with some digits, the least is those digits.
    let digits = beginning.unwrap_or(&event.vm).strip_prefix(group.name.as_str());
    let number = digits.filter(|d| !d.starts_with(['0', '+'])).and_then(|d| d.parse::<u64>().ok());
    number.is_some_and(|n| (1..=group.count).contains(&n))
}

fn sampling(table: Option<&SamplingTable>) -> Result<SamplingConfig, String> {
    let d = SamplingConfig::default();
    let Some(table) = table else { return Ok(d) };
    let config = SamplingConfig {
        samples: table.samples.unwrap_or(d.samples),
        period: table.period.map_or(d.period, |l| duration(l.0)),
        slow_gain: table.slow_gain.unwrap_or(d.slow_gain),
        fast_gain: table.fast_gain.unwrap_or(d.fast_gain),
    };
    config.check().map_err(|e| format!("sampling: {e}"))?;
    Ok(config)
}

fn balloon(table: Option<&BalloonTable>) -> Result<BalloonConfig, String> {
    let d = BalloonConfig::default();
    let Some(table) = table else { return Ok(d) };
    let config = BalloonConfig {
        // What overflows is above all that is allowed.
        rate: table.rate_mib_s.map_or(d.rate, |mib| Pages(mib.saturating_mul(256))),
        deflate_rate: table
            .deflate_rate_mib_s
            .map_or(d.deflate_rate, |mib| Pages(mib.saturating_mul(256))),
        max_fraction: table.max_fraction.unwrap_or(d.max_fraction),
        patience: table.patience.map_or(d.patience, |l| duration(l.0)),
        guest_reserve: table.guest_reserve.map_or(d.guest_reserve, |s| s.0),
        ..d
    };
    config.check().map_err(|e| format!("balloon.{e}"))?;
    Ok(config)
}
