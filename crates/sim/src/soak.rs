//! Hosts that are never left alone: scenarios drawn from a seed, in which VMs come and go, all that can be set is set,
//! drivers die, budgets shrink and disks fail; and what must hold of every host whatever happens to it.

use std::fmt::Write;

use ballast_units::Pages;

use crate::random::Random;
use crate::run::{HostResult, VmPoint, VmResult};

/// Of one host: what was drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    /// The scenario, as a user would write it (docs/simulator.md).
    pub text: String,
    /// VMs that ask to be started.
    pub vms: usize,
    /// Changes of the host's or of VMs' parameters.
    pub events: usize,
    /// The host's budget changes.
    pub shrinks: bool,
    /// Swap cannot be written at times.
    pub fails: bool,
}

const MINUTE: f64 = 60.0;
const HOUR: f64 = 3600.0;
/// Mean times: between the starts of two VMs, of a VM's life, between two changes.
const STARTS: f64 = 8.0 * MINUTE;
const LIFE: f64 = 2.0 * HOUR;
const CHANGES: f64 = 4.0 * MINUTE;
/// VMs whose `min` is all of their memory are called so.
const WHOLE: &str = "whole";

/// Who has less than its min waits while others give up what it lacks (200 MiB/s are written): for so long, and so small a part of its time. (Steps
/// of a second, in which three decisions follow crossed thresholds; a manager decides at each.)
const AT_ONCE_MS: u64 = 20_000;
const AT_ONCE_PART: u64 = 100;

struct Draws {
    random: Random,
    text: String,
}

impl Draws {
    /// In `low <= x < high`.
    fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.random.unit()
    }

    /// The same, whole numbers, `high` included.
    fn whole(&mut self, low: u64, high: u64) -> u64 {
        low + (self.random.unit() * (high - low + 1) as f64) as u64
    }

    fn one_of<'a>(&mut self, all: &[&'a str]) -> &'a str {
        all[(self.random.unit() * all.len() as f64) as usize]
    }

    fn once_in(&mut self, n: u64) -> bool {
        self.whole(1, n) == 1
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        // Into memory: it does not fail.
        let _ = self.text.write_fmt(line);
        self.text.push('\n');
    }

    /// A load of any kind that needs no file, with its keys.
    fn load(&mut self) -> String {
        let (low, high) = (self.whole(1, 30), self.whole(31, 95));
        let used = self.whole(high, 100);
        match self.whole(0, 5) {
            0 => format!("kind = \"idle\", active = \"{low}%\", used = \"{used}%\""),
            1 => format!("kind = \"steady\", active = \"{high}%\", used = \"{used}%\""),
            2 => {
                let (on, off) = (self.whole(30, 1800), self.whole(30, 3600));
                format!(
                    "kind = \"bursty\", low = \"{low}%\", high = \"{high}%\", on = \"{on}s\", off = \"{off}s\", \
                     used = \"{used}%\""
                )
            }
            3 => {
                let period = self.whole(10, 600);
                format!(
                    "kind = \"diurnal\", low = \"{low}%\", high = \"{high}%\", period = \"{period}m\", used = \"{used}%\""
                )
            }
            4 => {
                let hourly = self.whole(1, 200);
                format!(
                    "kind = \"leak\", from = \"{low}%\", per_hour = \"{hourly}M\", used = \"{high}%\""
                )
            }
            _ => {
                let every = self.whole(5, 300);
                format!(
                    "kind = \"walk\", low = \"{low}%\", high = \"{high}%\", step = \"10%\", every = \"{every}s\", \
                     used = \"{used}%\""
                )
            }
        }
    }

    /// A VM that comes at `start`. Its name, size and min in MiB.
    fn vm(&mut self, n: usize, start: f64) -> (String, u64, u64) {
        let whole = self.once_in(8);
        let size = if whole { self.whole(64, 256) } else { self.whole(128, 2048) };
        let min = if whole { size } else { self.whole(0, size / 3) };
        let name = format!("{}{n}", if whole { WHOLE } else { "vm" });
        let life = self.random.exponential(LIFE).max(MINUTE);
        let load = self.load();
        let shares = self.whole(1, 20_000);
        let tax = self.between(0.0, 0.95);
        self.line(format_args!(
            "[[vm]]\nname = \"{name}\"\nsize = \"{size}M\"\nmin = \"{min}M\"\nshares = {shares}\ntax = {tax:.2}\n\
             start = \"{}s\"\nstop = \"{}s\"\nload = {{ {load} }}",
            start as u64,
            (start + life) as u64 + 1
        ));
        match self.whole(0, 9) {
            0 => self.line(format_args!("balloon = \"none\"")),
            1 => self.line(format_args!("balloon = \"dead\"")),
            2 => {
                let rate = self.whole(1, 100);
                self.line(format_args!("balloon_mib_s = {rate}"));
            }
            _ => {}
        }
        if self.once_in(2) {
            let (boot, touch) = (self.whole(1, 180), self.whole(0, 100));
            self.line(format_args!("boot = \"{boot}s\"\nboot_touch = \"{touch}%\""));
        }
        let (cache, share) = (self.whole(0, 100), self.whole(0, 40));
        let (every, skew) = (self.whole(1, 30), self.between(0.0, 0.95));
        self.line(format_args!(
            "cache = \"{cache}%\"\nshare = \"{share}%\"\ntouch_every = \"{every}s\"\nskew = {skew:.2}\n"
        ));
        (name, size, min)
    }

    /// Something of a VM is set. A min is lowered only: to raise one takes admission, which the simulator has for starts alone.
    fn change(&mut self, at: f64, (name, size, min): &mut (String, u64, u64)) {
        self.line(format_args!("[[event]]\nat = \"{}s\"\nvm = \"{name}\"", at as u64));
        let what = self.whole(0, 4);
        if what == 0 || name.starts_with(WHOLE) {
            let shares = self.whole(1, 20_000);
            return self.line(format_args!("shares = {shares}\n"));
        }
        match what {
            1 => {
                let tax = self.between(0.0, 0.95);
                self.line(format_args!("tax = {tax:.2}\n"));
            }
            2 => {
                let max = self.whole((*min).max(32), *size);
                self.line(format_args!("max = \"{max}M\"\n"));
            }
            3 => {
                *min = self.whole(0, *min);
                self.line(format_args!("min = \"{min}M\"\n"));
            }
            _ => {
                let driver = self.one_of(&["works", "works", "dead"]);
                self.line(format_args!("balloon = \"{driver}\"\n"));
            }
        }
    }

    /// Whether swap works, or how much memory there is.
    fn host(&mut self, at: f64, memory: u64, (shrinks, fails): (bool, bool)) -> usize {
        if shrinks && (!fails || self.once_in(2)) {
            let memory = self.whole(memory / 2, memory);
            self.line(format_args!("[[event]]\nat = \"{}s\"\nmemory = \"{memory}M\"\n", at as u64));
            return 1;
        }
        let back = at + self.random.exponential(5.0 * MINUTE);
        self.line(format_args!("[[event]]\nat = \"{}s\"\ndisk = \"fails\"\n", at as u64));
        self.line(format_args!("[[event]]\nat = \"{}s\"\ndisk = \"works\"\n", back as u64 + 1));
        2
    }
}

/// The scenario of one host for so many hours of virtual time (at least 1; 0 counts as 1). The same seed, the same scenario.
pub fn draw(seed: u64, hours: u64) -> Drawn {
    let end = hours.max(1) as f64 * HOUR;
    let mut draws = Draws { random: Random::new(seed, 0x50a4), text: String::new() };
    let memory = draws.whole(1024, 6144);
    let (shrinks, fails) = (draws.once_in(2), draws.once_in(2));
    let policy = draws.one_of(&["idle-tax", "idle-tax", "idle-tax", "pressure", "miss-ratio"]);
    let order = draws.one_of(&["automatic", "measured", "balloon-first"]);
    let thresholds = draws.one_of(&["measured", "percent", "sliding"]);
    draws.line(format_args!(
        "name = \"soak {seed}\"\nseed = {}\nduration = \"{}s\"\nrecord = \"60s\"\n\n[host]\nmemory = \"{memory}M\"\n\
         thresholds = \"{thresholds}\"\n\n[policy]\nkind = \"{policy}\"\n\n[tools]\norder = \"{order}\"\n",
        seed >> 1,
        end as u64
    ));
    let (mut vms, mut at) = (Vec::new(), 0.0);
    while at < end {
        vms.push((draws.vm(vms.len(), at), at));
        at += draws.random.exponential(STARTS);
    }
    let (mut events, mut at) = (0, 0.0);
    loop {
        at += draws.random.exponential(CHANGES);
        if at >= end {
            break;
        }
        if (shrinks || fails) && draws.once_in(6) {
            events += draws.host(at, memory, (shrinks, fails));
            continue;
        }
        // One of the last few: the others are gone, as a rule.
        let come = vms.iter().take_while(|(_, start)| *start <= at).count();
        let back = draws.whole(1, 8).min(come as u64) as usize;
        draws.change(at, &mut vms[come - back].0);
        events += 1;
    }
    Drawn { text: draws.text, vms: vms.len(), events, shrinks, fails }
}

/// What must not be, of a host that ran what was drawn; empty if all is well.
pub fn wrong(drawn: &Drawn, result: &HostResult) -> Vec<String> {
    let mut wrong = Vec::new();
    let host = &result.measure;
    if host.overdrawn_ms > 0 && !drawn.shrinks {
        wrong.push(format!("more in use than the budget for {} ms", host.overdrawn_ms));
    }
    if let Some(at) =
        result.series.iter().find(|at| at.vm.starts_with(WHOLE) && !has_all(result, at))
    {
        wrong.push(format!("all of {} was promised, and at {} ms it is {at:?}", at.vm, at.at));
    }
    for vm in &result.vms {
        wrong.extend(wrong_of(drawn, vm).into_iter().map(|what| format!("{}: {what}", vm.name)));
    }
    wrong
}

/// Whether a VM whose min is all of it is left alone: whatever happens to the host, so much was promised at its start.
fn has_all(result: &HostResult, at: &VmPoint) -> bool {
    let size = result.vms.iter().find(|vm| vm.name == at.vm).map_or(Pages::ZERO, |vm| vm.size);
    at.target == size && [at.balloon, at.compressed, at.swapped].iter().all(|p| p.is_zero())
}

fn wrong_of(drawn: &Drawn, vm: &VmResult) -> Vec<String> {
    let m = &vm.measure;
    let mut wrong = Vec::new();
    if !(0.0..=m.wanted * (1.0 + 1e-9)).contains(&m.worked) {
        wrong.push(format!("did {} of {}", m.worked, m.wanted));
    }
    if m.written > m.evicted {
        wrong.push(format!("{} pages written of {} evicted", m.written, m.evicted));
    }
    // What is promised is not there where the budget was lowered below it, or nobody can give up anything.
    if drawn.shrinks || drawn.fails {
        return wrong;
    }
    if m.robbed_ms > AT_ONCE_MS + m.ran_ms / AT_ONCE_PART {
        wrong.push(format!("waited below its min for {} ms", m.robbed_ms));
    }
    if vm.name.starts_with(WHOLE) && (m.blocked_ms > 0 || m.faults_swapped > 0) {
        wrong.push(format!(
            "all of it was promised; blocked for {} ms, {} faults from swap",
            m.blocked_ms, m.faults_swapped
        ));
    }
    wrong
}
