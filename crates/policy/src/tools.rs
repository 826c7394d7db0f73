//! What the two tools of reclamation cost a VM now, and which of them is used first.
//!
//! The balloon makes its guest drop page cache, and the guest reads it again from its disk; paging
//! (compressing and swapping) makes it fault. Which is cheaper depends on the guest, its disk, its
//! processor, and the moment, so it is measured, for each VM:
//!
//! ```text
//! cost of a tool = how often a page it holds comes back (per second) x what bringing it back costs
//! ```
//!
//! - The balloon: what the guest reads beyond what it read without a balloon, over the pages the balloon
//!   holds. What it reads without one is learnt while the balloon is (nearly) empty; later it is only
//!   ever lowered, for a guest that reads less than that reads nothing because of its balloon. Who manages a VM
//!   after another is told of it.
//! - Paging: faults on compressed and swapped pages, over the pages that are compressed or swapped.
//!
//! Both are averages over what a tool holds, at the same time and under the same load, so that a busy or a
//! starved guest raises or lowers both alike.
//!
//! [`ToolControl`] follows them as they are measured and says which tool comes first; [`plan`](mod@crate::plan)
//! asks it first and the other for what remains. The rules:
//!
//! - Nothing measured: the balloon first, as in OSDI'02 s.6.3, unless a read costs the guest's processor
//!   [`PRESUMED`] times what a fault costs, as under emulation: then paging.
//! - A tool that holds nothing cannot be measured. It counts as free of charge, so it is tried when the
//!   other is seen to cost something; what was measured of it lately ([`FORGET`]) spares the trial. Where reads
//!   are so dear, the balloon counts instead as if each page that paging brings back were read. Such a read waits for a
//!   disk and for processors as long as the guest's own were seen to lately, or else as the fault did, two seeks of a disk
//!   at most.
//! - The order changes when the first tool costs more than [`DEARER`] times the other, and at least
//!   [`LEAST`] in all; not before it was in force for a while, which doubles with every change and is
//!   halved after a long time without one. So it cannot swing, whatever is measured.
//! - A smaller balloon says nothing of what a larger one would cost: the balloon holds first what its guest
//!   misses least. So what it cost when it lost its place counts for [`FORGET`], unless it is measured
//!   anew at that size.
//! - While paging comes first and the balloon costs more than [`MUCH_DEARER`] times as much, the balloon is
//!   let down in steps, in exchange for paging ([`Tools::ceiling`]).

use std::fmt;
use std::time::Duration;

use ballast_units::Pages;
use serde::{Deserialize, Serialize};

/// A tool of reclamation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tool {
    /// Driven by `BalloonControl`: its guest gives pages up.
    #[default]
    Balloon,
    /// Sharing, compressing and swapping by the host.
    Paging,
}

/// How the first tool is found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ToolOrder {
    /// The cheaper one, as measured, where a read costs the guest's processor [`PRESUMED`] times what a
    /// fault costs, as under emulation; elsewhere the balloon.
    #[default]
    Automatic,
    /// The cheaper one, as measured.
    Measured,
    /// The balloon, whatever it costs (OSDI'02).
    BalloonFirst,
}

impl fmt::Display for ToolOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            ToolOrder::Automatic => "automatic",
            ToolOrder::Measured => "measured",
            ToolOrder::BalloonFirst => "balloon-first",
        })
    }
}

/// What a page that a tool holds costs: nanoseconds of its guest's or the host's time per second. In two
/// significant digits, so that what hardly changes is the same number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Cost(pub u64);

impl Cost {
    /// Rounds. What is not a number is no cost.
    pub fn of(nanos_per_second: f64) -> Cost {
        let exact = nanos_per_second.clamp(0.0, 1e15) as u64;
        let mut unit = 1;
        while exact / unit >= 100 {
            unit *= 10;
        }
        Cost((exact + unit / 2) / unit * unit)
    }

    /// Of `pages` pages: seconds per second.
    pub fn of_all(self, pages: Pages) -> f64 {
        self.0 as f64 * pages.0 as f64 / 1e9
    }

    /// Milliseconds per second of a thousand pages.
    pub fn ms_per_1000(self) -> f64 {
        self.0 as f64 / 1e3
    }
}

/// "1.2 ms/s per 1000 pages".
impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.ms_per_1000() {
            ms if ms >= 10.0 || ms == 0.0 => format!("{ms:.0}"),
            ms if ms >= 1.0 => format!("{ms:.1}"),
            ms => format!("{ms:.3}").trim_end_matches('0').to_owned(),
        };
        write!(f, "{text} ms/s per 1000 pages")
    }
}

/// All that a plan goes by of a VM's tools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Tools {
    /// Which is asked first; the other takes what remains.
    pub first: Tool,
    /// Of a page that the balloon holds. None: not measured lately.
    pub balloon: Option<Cost>,
    /// Of a page that is compressed or swapped. None: not measured lately.
    pub paging: Option<Cost>,
    /// The balloon costs so much more than paging that it is to be let down to this, as memory allows.
    /// None: it is not.
    pub ceiling: Option<Pages>,
    /// Pages per second that paging took when it last had any to take. None: it had none yet.
    pub paging_rate: Option<Pages>,
    /// The VM has waited for memory for much of the time lately, a shortage that paging does not end.
    pub held_up: bool,
    /// Pages that the guest has given up and not used again since, by the pager's books.
    pub ballooned: Pages,
    /// How large its balloon is, by QEMU's word.
    pub grown: Pages,
    /// Of that, what freed nothing, by [`InVain`](crate::InVain): it is not among `ballooned`.
    pub in_vain: Pages,
    /// Of that, what others share; the rest are zeros, by which nothing was saved.
    pub unsaved: Pages,
    /// Pages that can be evicted beyond the room in swap: into the compressed tier.
    pub spare_room: Pages,
}

impl Tools {
    /// Pages that the guest has given up and not used again since, whatever that freed.
    pub(crate) fn given_up(&self) -> Pages {
        self.ballooned + self.in_vain
    }

    /// What the guest was given back of its balloon of `goal` and has not used yet.
    pub(crate) fn owed(&self, goal: Pages) -> Pages {
        self.given_up().saturating_sub(goal)
    }

    /// What `pages` more of its balloon free, going by what it holds.
    pub(crate) fn freed_by(&self, pages: Pages) -> Pages {
        pages.scaled(self.grown.saturating_sub(self.in_vain), self.grown)
    }
}

/// Running totals of one VM at one moment, and what a page costs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ToolsInput {
    /// Monotonic time since any fixed moment.
    pub now: Duration,
    /// Configured size of the guest.
    pub size: Pages,
    /// What its balloon holds of what it was asked to hold: never more than the guest has given up.
    pub balloon: Pages,
    /// Pages that the guest has read from its disks.
    pub reads: u64,
    /// Nanoseconds that its disks took for that.
    pub read_ns: u64,
    /// Nanoseconds of the guest's processor that each page it reads costs beside.
    pub read_cpu_ns: u64,
    /// Pages that are swapped or compressed now, those kept as one number among the latter.
    pub paged: Pages,
    /// Faults on such pages so far.
    pub refaults: u64,
    /// Nanoseconds that serving them took.
    pub refault_ns: u64,
    /// Nanoseconds that each such fault costs beside.
    pub refault_cpu_ns: u64,
    /// Pages evicted so far.
    pub evicted: u64,
    /// Nanoseconds so far in which it had pages to evict.
    pub evict_ns: u64,
    /// Nanoseconds so far in which it waited for memory, with any of its vCPUs.
    pub starved_ns: u64,
    /// Pages that the guest has given up and not used again.
    pub ballooned: Pages,
    /// Pages can leave their homes at all; else the balloon comes first.
    pub can_page: bool,
}

/// Costs are measured over at least this long; a caller turns every two seconds, more or less.
pub const POLL: Duration = Duration::from_millis(1_500);
/// What was measured longer ago says nothing about now.
pub const FORGET: Duration = Duration::from_secs(600);
/// How much more the first tool must cost before the other takes its place.
pub const DEARER: f64 = 1.5;
/// How much more the balloon must cost to be let down in exchange for paging.
pub const MUCH_DEARER: f64 = 2.0;
/// A page that its guest reads costs so many times what a fault costs: its balloon is presumed dear.
pub const PRESUMED: u64 = 8;
/// No fault costs less, whatever is said of it: nanoseconds.
const LEAST_FAULT: u64 = 10_000;
/// What costs less than this in all is not worth a change: seconds per second.
pub const LEAST: f64 = 0.005;
/// The shortest time that an order is in force.
pub const HOLD: Duration = Duration::from_secs(10);
/// The longest time that an order stays in force against measurements.
pub const LONGEST_HOLD: Duration = Duration::from_secs(3_600);
/// After so many holds without a change they get shorter again.
const CALM: u32 = 4;
/// Weight of the newest measurement.
const GAIN: f64 = 0.3;
/// A cost is known when it was measured so often.
const SETTLED: u32 = 3;
/// Pages that a guest reads between two looks, from which on its disks' time says something.
const SOME_READS: f64 = 8.0;
/// The longest wait of a read that is only presumed, nanoseconds: two seeks of a disk that turns. What a fault waits
/// longer for is no reason to presume it of disks, and guests without any would never be rid of a slow swap.
const LONGEST_READ: f64 = 20e6;
/// A tool that holds less than this part of the guest is not measured.
const ENOUGH: u64 = 64;
/// How fast paging is shows when it had something to do for so long between two looks: nanoseconds.
const LEAST_BUSY: f64 = 10e6;
/// A VM that waits for memory for so much of the time is held up.
const HELD_UP: f64 = 0.2;
/// The balloon is let down by this part of itself at a time.
const STEP: u64 = 4;

/// The average of one tool's cost.
#[derive(Clone, Copy, Debug, Default)]
struct Average {
    nanos: f64,
    samples: u32,
    at: Duration,
}

impl Average {
    fn see(&mut self, now: Duration, nanos: f64) {
        let gain = if self.samples == 0 { 1.0 } else { GAIN };
        self.nanos += gain * (nanos - self.nanos);
        self.samples = self.samples.saturating_add(1);
        self.at = now;
    }

    /// While the tool holds too little to be measured.
    fn rest(&mut self, now: Duration) {
        if self.samples < SETTLED || now.saturating_sub(self.at) > FORGET {
            *self = Average::default();
        }
    }

    fn cost(&self) -> Option<Cost> {
        (self.samples >= SETTLED).then(|| Cost::of(self.nanos))
    }
}

/// Follows the costs of one VM's tools; call [`step`](Self::step) as often as there are new totals.
#[derive(Clone, Debug)]
pub struct ToolControl {
    order: ToolOrder,
    last: Option<ToolsInput>,
    /// Pages per second that the guest reads without a balloon.
    plain_reads: f64,
    /// Whether that was seen while its balloon was empty.
    is_learnt: bool,
    balloon: Average,
    paging: Average,
    /// What the pages that paging brings back would cost if their guest read them.
    as_reads: Average,
    /// Nanoseconds that its guest's disks took for a page lately, and when that was seen last.
    device: Option<(f64, Duration)>,
    rate: Option<f64>,
    /// For how much of the time the VM waited for memory.
    waits: f64,
    first: Tool,
    /// When the order, or how long it is held, last changed.
    since: Duration,
    hold: Duration,
    ceiling: Option<Pages>,
    /// The balloon that was too dear, what it cost, and when that was seen last.
    dear: Option<(Pages, Cost, Duration)>,
}

impl ToolControl {
    /// Of a VM of which nothing was measured.
    pub fn new(order: ToolOrder) -> ToolControl {
        ToolControl {
            order,
            last: None,
            plain_reads: 0.0,
            is_learnt: false,
            balloon: Average::default(),
            paging: Average::default(),
            as_reads: Average::default(),
            device: None,
            rate: None,
            waits: 0.0,
            first: Tool::Balloon,
            since: Duration::ZERO,
            hold: HOLD,
            ceiling: None,
            dear: None,
        }
    }

    /// Of a VM that was met before: what its guest reads without a balloon, pages per second.
    #[must_use]
    pub fn with_plain_reads(mut self, reads: Option<f64>) -> ToolControl {
        if let Some(reads) = reads.filter(|reads| reads.is_finite() && *reads >= 0.0) {
            (self.plain_reads, self.is_learnt) = (reads, true);
        }
        self
    }

    /// What its guest reads without a balloon, pages per second. None: that was not seen yet.
    pub fn plain_reads(&self) -> Option<f64> {
        self.is_learnt.then_some(self.plain_reads)
    }

    /// From now on.
    pub fn set_order(&mut self, order: ToolOrder) {
        self.order = order;
    }

    /// One look. What comes too soon after the last, or from the past, is not measured.
    pub fn step(&mut self, input: &ToolsInput) -> Tools {
        match self.last {
            None => {
                self.last = Some(*input);
                self.since = input.now;
                if presumed_dear(input) {
                    self.first = Tool::Paging;
                }
            }
            Some(last) if input.now >= last.now + POLL => {
                self.measure(&last, input);
                self.last = Some(*input);
                self.choose(input);
            }
            Some(_) => {}
        }
        let measured = match self.order {
            ToolOrder::Automatic => presumed_dear(input),
            ToolOrder::Measured => true,
            ToolOrder::BalloonFirst => false,
        };
        let forced = !measured || !input.can_page;
        Tools {
            first: if forced { Tool::Balloon } else { self.first },
            balloon: self.balloon.cost(),
            paging: self.paging.cost(),
            ceiling: self.ceiling.filter(|_| !forced),
            paging_rate: self.rate.map(|rate| Pages(rate as u64)),
            held_up: self.waits >= HELD_UP,
            ballooned: input.ballooned,
            ..Tools::default()
        }
    }

    fn measure(&mut self, last: &ToolsInput, input: &ToolsInput) {
        let now = input.now;
        let seconds = (now - last.now).as_secs_f64();
        let grown = |now: u64, then: u64| now.saturating_sub(then) as f64;
        let each = |nanos: f64, n: f64| if n > 0.0 { nanos / n } else { 0.0 };
        let enough = Pages((input.size.0 / ENOUGH).max(1));

        let reads = grown(input.reads, last.reads);
        let device = each(grown(input.read_ns, last.read_ns), reads);
        self.see_device(now, reads, device);
        let per_second = reads / seconds;
        let held = last.balloon.min(input.balloon);
        if held < enough {
            if last.balloon.max(input.balloon) < enough {
                self.plain_reads += GAIN * (per_second - self.plain_reads);
                self.is_learnt = true;
            }
            self.balloon.rest(now);
        } else {
            if per_second < self.plain_reads {
                self.plain_reads += GAIN * (per_second - self.plain_reads);
            }
            let caused = (per_second - self.plain_reads).max(0.0);
            let nanos = caused * (device + input.read_cpu_ns as f64) / held.0 as f64;
            self.balloon.see(now, nanos);
        }

        let faults = grown(input.refaults, last.refaults);
        let service = each(grown(input.refault_ns, last.refault_ns), faults);
        let paged = last.paged.0.midpoint(input.paged.0);
        if paged < enough.0 {
            self.paging.rest(now);
            self.as_reads.rest(now);
        } else {
            let nanos = service + input.refault_cpu_ns as f64;
            let returns = faults / seconds / paged as f64;
            self.paging.see(now, returns * nanos);
            let waits = self.device.map_or(service.min(LONGEST_READ), |(nanos, _)| nanos);
            self.as_reads.see(now, returns * (waits + input.read_cpu_ns as f64));
        }

        let waited = grown(input.starved_ns, last.starved_ns) / 1e9 / seconds;
        self.waits += GAIN * (waited.min(1.0) - self.waits);

        let busy = grown(input.evict_ns, last.evict_ns);
        if busy >= LEAST_BUSY {
            let evicted = grown(input.evicted, last.evicted) / (busy / 1e9);
            self.rate = Some(self.rate.map_or(evicted, |rate| rate + GAIN * (evicted - rate)));
        }
    }

    /// How long the guest's disks took for each of some reads.
    fn see_device(&mut self, now: Duration, reads: f64, nanos: f64) {
        if reads >= SOME_READS {
            let average = self.device.map_or(nanos, |(known, _)| known + GAIN * (nanos - known));
            self.device = Some((average, now));
        } else if self.device.is_some_and(|(_, at)| now.saturating_sub(at) > FORGET) {
            self.device = None;
        }
    }

    /// What the balloon would cost if it came first again.
    fn once_dear(&mut self, now: Cost, input: &ToolsInput) -> Cost {
        let Some((size, cost, at)) = self.dear else { return now };
        if input.balloon.0 >= size.0 - size.0 / 8 {
            self.dear = Some((size, now, input.now));
        } else if input.now.saturating_sub(at) > FORGET {
            self.dear = None;
        } else {
            return now.max(cost);
        }
        now
    }

    fn choose(&mut self, input: &ToolsInput) {
        let presumed = self.as_reads.cost().filter(|_| presumed_dear(input));
        let balloon = self.balloon.cost().or(presumed).unwrap_or_default();
        let paging = self.paging.cost().unwrap_or_default();
        let dear = |own: Cost, held: Pages, other: Cost, times: f64| {
            own.of_all(held) >= LEAST && own.0 as f64 > times * other.0 as f64
        };
        let change = match self.first {
            Tool::Balloon => dear(balloon, input.balloon, paging, DEARER),
            Tool::Paging => dear(paging, input.paged, self.once_dear(balloon, input), DEARER),
        };
        let held_for = input.now.saturating_sub(self.since);
        if change && held_for >= self.hold {
            (self.first, self.dear) = match self.first {
                Tool::Balloon => (Tool::Paging, Some((input.balloon, balloon, input.now))),
                Tool::Paging => (Tool::Balloon, None),
            };
            self.since = input.now;
            self.hold = (self.hold * 2).min(LONGEST_HOLD);
        } else if held_for >= self.hold * CALM && self.hold > HOLD {
            self.since = input.now;
            self.hold = (self.hold / 2).max(HOLD);
        }
        let exchange =
            self.first == Tool::Paging && dear(balloon, input.balloon, paging, MUCH_DEARER);
        self.ceiling = exchange.then(|| {
            let step = (input.balloon.0 / STEP).max(input.size.0 / ENOUGH).min(input.balloon.0);
            match self.ceiling {
                // It has not come down to the last one yet.
                Some(ceiling) if ceiling < input.balloon => ceiling,
                _ => input.balloon - Pages(step),
            }
        });
    }
}

fn presumed_dear(input: &ToolsInput) -> bool {
    input.read_cpu_ns > PRESUMED.saturating_mul(input.refault_cpu_ns.max(LEAST_FAULT))
}

#[cfg(test)]
#[path = "tools_tests.rs"]
mod tests;
