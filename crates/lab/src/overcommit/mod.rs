//! Guests whose memory is taken away step by step, under Ballast and under what the kernel offers
//! instead: plain QEMU in a memory cgroup, with swap on a file, on zram, or on a file and KSM.
//!
//! All sides run the same guests, loads and steps, and get the same machine memory for guests: the
//! sum of configured memory divided by the overcommitment factor. What else each needs is counted
//! alike: QEMU's own memory is outside the budget on all sides (`peer` tells how it is measured),
//! and what a tier takes is inside (Ballast's by its own books, zram's by its own count, for which
//! the cgroup's limit is lowered).
//!
//! Guests report what they have done, and how long each operation took, every two seconds; what
//! arrives within a step's window counts for that step, and for as long as it is a report of. An
//! operation's time is that from its beginning, not from when it was due: of a guest that does less than
//! it is asked for, the rate says so.

mod load;
mod ours;
mod peer;
pub(crate) mod report;
mod tally;
mod yardstick;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ballast_qemu::process;
use ballast_units::Bytes;

use crate::bench::sharing::cpu;
use crate::console::{Event, Story};
use crate::image::Image;
use crate::say;
pub use load::Load;
use ours::Ours;
use peer::{Gone, Peer};
pub use tally::Tally;
use yardstick::{Speed, Yardstick};

/// Who hands out the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// With balloons. At its defaults but for how often it looks, at samples and for equal pages (`ours`): steps are short.
    Ballast,
    /// The kernel, with swap on a file.
    Swap,
    /// On zram.
    Zram,
    /// On a file, and KSM.
    Ksm,
    /// Ballast with guests that have no balloon: sharing, compression and swap alone. Not a peer, but it
    /// shows what the balloon does.
    Paging,
    /// Ballast with balloons first in any case, as in OSDI'02. Its own default is to measure which tool costs
    /// less where guests are emulated, as these are.
    BalloonFirst,
}

/// All of them, in the order of their numbers.
pub(crate) const SIDES: [Side; 6] =
    [Side::Ballast, Side::Swap, Side::Zram, Side::Ksm, Side::Paging, Side::BalloonFirst];
/// Those that are not Ballast.
pub(crate) const PEERS: [Side; 3] = [Side::Swap, Side::Zram, Side::Ksm];

impl Side {
    /// In figures' names.
    pub fn name(self) -> &'static str {
        match self {
            Side::Ballast => "ballast",
            Side::Swap => "swap",
            Side::Zram => "zram",
            Side::Ksm => "ksm",
            Side::Paging => "ballast_paging",
            Side::BalloonFirst => "ballast_balloon_first",
        }
    }

    /// For people.
    pub fn title(self) -> &'static str {
        match self {
            Side::Ballast => "Ballast",
            Side::Swap => "QEMU, kernel swap",
            Side::Zram => "QEMU, zram",
            Side::Ksm => "QEMU, kernel swap and KSM",
            Side::Paging => "Ballast, guests without balloons",
            Side::BalloonFirst => "Ballast, balloon first",
        }
    }

    /// Its number in tables.
    pub fn number(self) -> f64 {
        SIDES.iter().position(|s| *s == self).map_or(f64::NAN, |n| n as f64)
    }
}

/// What is done on every side.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// One guest for each.
    pub guests: Vec<Load>,
    /// Configured memory of each guest.
    pub memory: Bytes,
    /// Sum of configured memory / machine memory, rising.
    pub factors: Vec<f64>,
    /// From a new factor until its window begins.
    pub settle: Duration,
    /// How long a step is measured.
    pub window: Duration,
    /// From the moment when all guests have written their data until the first step.
    pub warm: Duration,
}

impl Plan {
    /// Of all guests together.
    pub fn configured(&self) -> Bytes {
        Bytes(self.memory.0 * self.guests.len() as u64)
    }

    /// Machine memory for guests; whole pages.
    pub fn budget(&self, factor: f64) -> Bytes {
        Bytes((self.configured().0 as f64 / factor) as u64 >> 12 << 12)
    }
}

/// Where memory is that guests were promised. Bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Reclaimed {
    /// Given up by guests.
    pub ballooned: Bytes,
    /// In memory, as large as it was before: in Ballast's tier, or in zram.
    pub compressed: Bytes,
    /// In swap files.
    pub swapped: Bytes,
    /// By page sharing.
    pub saved: Bytes,
    /// Machine memory in use for guests and tiers, as the kernel counts it.
    pub used: Bytes,
    /// Of the guests' memory, what a guest finds where it looks for it; a page that several share counts for
    /// each of them.
    pub at_hand: Bytes,
    /// In the kernel's swap cache, on its way out or brought ahead; a part of `used`, and none of `at_hand`.
    pub passing: Bytes,
    /// QEMU's own, in memory beside the budget.
    pub vmms: Bytes,
}

/// Why nothing was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lost {
    /// A VMM was killed.
    Killed,
    /// The kernel did not get down to the limit.
    Thrashing,
    /// Either had happened at a lower factor.
    NotRun,
}

impl Lost {
    /// In figures' names.
    pub fn name(self) -> &'static str {
        match self {
            Lost::Killed => "killed",
            Lost::Thrashing => "thrashing",
            Lost::NotRun => "not_run",
        }
    }

    /// Its number in tables, where 0 is one that was measured.
    pub fn number(self) -> f64 {
        match self {
            Lost::Killed => 1.0,
            Lost::Thrashing => 2.0,
            Lost::NotRun => 3.0,
        }
    }
}

/// One step of one side.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    /// Who handed out the memory.
    pub side: Side,
    /// Of overcommitment.
    pub factor: f64,
    /// Machine memory for guests, by the factor.
    pub budget: Bytes,
    /// What the guests did in the window.
    pub tally: Tally,
    /// At the end of the window.
    pub reclaimed: Reclaimed,
    /// Of all processors, used by guests and those who manage their memory.
    pub cpu_percent: f64,
    /// The same, used by this program to measure, the yardstick included.
    pub lab_cpu_percent: f64,
    /// Of the window, in which idle processors were kept from sleeping: nobody's processor time, but not free.
    pub awake_percent: f64,
    /// Read by the VMMs, nearly all of it from the guests' disks, per second.
    pub reads: Bytes,
    /// Faults on pages that had been taken, per second: of the tiers, or the kernel's major faults.
    pub returns: f64,
    /// Pages that were brought back, per second: those of read-ahead, and those that the peers' kernel found on their way
    /// to swap or just come from there, are no faults that wait for a device.
    pub back: f64,
    /// Of the machine meanwhile.
    pub speed: Speed,
    /// Nothing was measured.
    pub lost: Option<Lost>,
}

enum Host {
    Ours(Box<Ours>),
    Peer(Box<Peer>),
}

impl Host {
    async fn start(side: Side, plan: &Plan, image: &Image) -> Result<Host> {
        Ok(match side {
            Side::Ballast | Side::Paging | Side::BalloonFirst => {
                Host::Ours(Box::new(Ours::start(plan, image, side).await?))
            }
            Side::Swap | Side::Zram | Side::Ksm => {
                Host::Peer(Box::new(Peer::start(side, plan, image).await?))
            }
        })
    }

    /// New events with the number of their guest. A guest's trouble is an error.
    async fn poll(&mut self) -> Result<Vec<(usize, Event)>> {
        match self {
            Host::Ours(host) => host.poll().await,
            Host::Peer(host) => host.poll().await,
        }
    }

    fn stories(&self) -> Vec<&Story> {
        match self {
            Host::Ours(host) => host.stories(),
            Host::Peer(host) => host.stories(),
        }
    }

    /// A window begins, or has ended: within it, what is done from here is not to take CPU from guests.
    fn measure(&mut self, measuring: bool) {
        match self {
            Host::Ours(_) => {}
            Host::Peer(host) => host.measure(measuring),
        }
    }

    async fn set_budget(&mut self, budget: Bytes) -> Result<()> {
        match self {
            Host::Ours(host) => host.set_budget(budget).await,
            Host::Peer(host) => host.set_budget(budget).await,
        }
    }

    async fn cpu_s(&self) -> Result<f64> {
        match self {
            Host::Ours(host) => host.cpu_s().await,
            Host::Peer(host) => host.cpu_s(),
        }
    }

    /// Seconds for which idle processors were kept awake so far; peers keep none.
    async fn awake_s(&self) -> Result<f64> {
        match self {
            Host::Ours(host) => host.awake_s().await,
            Host::Peer(_) => Ok(0.0),
        }
    }

    /// Bytes that the VMMs have read so far.
    async fn read(&self) -> Result<u64> {
        let pids = match self {
            Host::Ours(host) => host.pids().await?,
            Host::Peer(host) => host.pids(),
        };
        pids.into_iter().map(read_by).sum()
    }

    /// Faults so far on pages that had been taken.
    async fn returns(&self) -> Result<u64> {
        match self {
            Host::Ours(host) => host.returns().await,
            Host::Peer(host) => {
                let faults = |pid| {
                    process::major_faults(pid).with_context(|| format!("process {pid} is gone"))
                };
                host.pids().into_iter().map(faults).sum()
            }
        }
    }

    /// Pages brought back so far.
    async fn back(&self) -> Result<u64> {
        match self {
            Host::Ours(host) => host.back().await,
            Host::Peer(_) => swapped_in(),
        }
    }

    async fn reclaimed(&self) -> Result<Reclaimed> {
        match self {
            Host::Ours(host) => host.reclaimed().await,
            Host::Peer(host) => host.reclaimed(),
        }
    }

    /// Err, too, of what was left behind or not put back.
    async fn end(self) -> Result<()> {
        match self {
            Host::Ours(host) => host.end().await,
            Host::Peer(host) => host.end(),
        }
    }
}

/// How often consoles are read.
const POLL: Duration = Duration::from_millis(500);
/// For booting, and for writing the guests' data.
const FILL_LIMIT: Duration = Duration::from_secs(600);

/// All steps of all sides, one side after the other.
pub(crate) async fn run_all(plan: &Plan, image: &Image) -> Result<Vec<Step>> {
    let mut steps = Vec::new();
    for side in SIDES {
        steps.extend(run(side, plan, image).await?);
    }
    Ok(steps)
}

/// All steps of one side, with guests of its own.
async fn run(side: Side, plan: &Plan, image: &Image) -> Result<Vec<Step>> {
    say::step(&format!(
        "{}: {} guests of {}, factors {:?}",
        side.title(),
        plan.guests.len(),
        plan.memory,
        plan.factors
    ));
    match steps(side, plan, image).await {
        // Its figures are missing, and what is held against them is not met.
        Err(e) if e.downcast_ref::<peer::Unavailable>().is_some() => {
            say::detail(&format!("left out: {e:#}"));
            Ok(Vec::new())
        }
        steps => steps.with_context(|| side.title()),
    }
}

async fn steps(side: Side, plan: &Plan, image: &Image) -> Result<Vec<Step>> {
    let begin = Instant::now();
    let mut host = Host::start(side, plan, image).await?;
    fill(&mut host).await?;
    say::detail(&format!("filled after {:.0} s", begin.elapsed().as_secs_f64()));
    watch(&mut host, plan.warm, &mut Tally::new(&plan.guests)).await?;
    let mut steps = Vec::new();
    for factor in &plan.factors {
        let mut step = step(&mut host, side, *factor, plan).await;
        if step.is_err() {
            // What was asked of a guest that is being killed may have failed in any way.
            tokio::time::sleep(POLL).await;
            if let Err(e) = host.poll().await
                && e.downcast_ref::<Gone>().is_some()
            {
                step = Err(e);
            }
        }
        // What a peer does to its guests is part of the comparison; what we do is an error.
        let gone = step.as_ref().err().and_then(|e| e.downcast_ref::<Gone>());
        if let Some(gone) = gone.filter(|_| PEERS.contains(&side)) {
            say::detail(&format!("{factor:.2}: {gone}"));
            steps.push(lost(side, *factor, plan, gone.how));
            let others = &plan.factors[steps.len()..];
            steps.extend(others.iter().map(|f| lost(side, *f, plan, Lost::NotRun)));
            break;
        }
        let step = step?;
        say::detail(&line(&step));
        steps.push(step);
    }
    host.end().await?;
    Ok(steps)
}

async fn step(host: &mut Host, side: Side, factor: f64, plan: &Plan) -> Result<Step> {
    let budget = plan.budget(factor);
    let begin = Instant::now();
    host.set_budget(budget).await.with_context(|| format!("a budget of {budget}"))?;
    let settle = plan.settle.saturating_sub(begin.elapsed());
    watch(host, settle, &mut Tally::new(&plan.guests)).await?;
    let mut tally = Tally::new(&plan.guests);
    let (lab_s, yardstick) = (own_cpu_s()?, Yardstick::start()?);
    let (cpu_s, read) = (host.cpu_s().await?, host.read().await?);
    let (returns, back, awake_s) =
        (host.returns().await?, host.back().await?, host.awake_s().await?);
    host.measure(true);
    let watched = watch(host, plan.window, &mut tally).await;
    host.measure(false);
    watched?;
    let speed = yardstick.end()?;
    let lab_s = own_cpu_s()? - lab_s;
    let (cpu_s, read) = (host.cpu_s().await? - cpu_s, host.read().await?.saturating_sub(read));
    let returns = host.returns().await?.saturating_sub(returns) as f64 / tally.seconds;
    let back = host.back().await?.saturating_sub(back) as f64 / tally.seconds;
    let awake_s = host.awake_s().await? - awake_s;
    let processors = std::thread::available_parallelism().map_or(1, usize::from) as f64;
    let tally_seconds = tally.seconds;
    let percent = 100.0 / tally_seconds / processors;
    let reclaimed = host.reclaimed().await?;
    let reads = Bytes((read as f64 / tally.seconds) as u64);
    Ok(Step {
        side,
        factor,
        budget,
        tally,
        reclaimed,
        cpu_percent: cpu_s * percent,
        lab_cpu_percent: lab_s * percent,
        awake_percent: awake_s * 100.0 / tally_seconds,
        reads,
        returns,
        back,
        speed,
        lost: None,
    })
}

fn lost(side: Side, factor: f64, plan: &Plan, how: Lost) -> Step {
    Step {
        side,
        factor,
        budget: plan.budget(factor),
        tally: Tally::new(&plan.guests),
        reclaimed: Reclaimed::default(),
        cpu_percent: f64::NAN,
        lab_cpu_percent: f64::NAN,
        awake_percent: f64::NAN,
        reads: Bytes::default(),
        returns: f64::NAN,
        back: f64::NAN,
        speed: Speed { steps_per_us: f64::NAN, stolen_percent: f64::NAN },
        lost: Some(how),
    }
}

fn line(step: &Step) -> String {
    let r = &step.reclaimed;
    let mut text = format!("{:.2} ({}):", step.factor, step.budget);
    for work in step.tally.works() {
        text.push_str(&format!(
            " {work} {:.1}/s of {:.0}, p95 {:.1} ms;",
            step.tally.rate(work),
            step.tally.asked(work),
            step.tally.latency(work).quantile_ms(0.95)
        ));
    }
    text.push_str(&format!(
        " ballooned {:.0}, compressed {:.0}, swapped {:.0}, shared {:.0}, used {:.0}, at hand {:.0}, \
         QEMU's own {:.0} MiB; {:.0} faults/s on pages taken, {:.0} pages/s back; read {:.1} MiB/s; CPU {:.0}%, the lab's \
         {:.1}%, {:.0}% stolen, awake {:.1}%, speed {:.1}; {:.1} s",
        r.ballooned.mib(),
        r.compressed.mib(),
        r.swapped.mib(),
        r.saved.mib(),
        r.used.mib(),
        r.at_hand.mib(),
        r.vmms.mib(),
        step.returns,
        step.back,
        step.reads.mib(),
        step.cpu_percent,
        step.lab_cpu_percent,
        step.speed.stolen_percent,
        step.awake_percent,
        step.speed.steps_per_us,
        step.tally.seconds
    ));
    if PEERS.contains(&step.side) {
        text.push_str(&format!("; in the swap cache {:.0} MiB", r.passing.mib()));
    }
    text
}

/// Until all guests have written their data.
async fn fill(host: &mut Host) -> Result<()> {
    let begin = Instant::now();
    // By what each told last: the first of them may be done before the last has booted.
    while !host.stories().into_iter().all(filled) {
        host.poll().await?;
        ensure!(
            begin.elapsed() < FILL_LIMIT,
            "guests have not written their data after {} s",
            FILL_LIMIT.as_secs()
        );
        tokio::time::sleep(POLL).await;
    }
    Ok(())
}

fn filled(story: &Story) -> bool {
    let told = |e: &Event| {
        // A hog is done when it has told that it holds its memory.
        matches!(e.text("phase"), "filled" | "serve") || e.number("held_mb").is_some()
    };
    story.progress.as_ref().is_some_and(told)
}

async fn watch(host: &mut Host, time: Duration, tally: &mut Tally) -> Result<()> {
    // What was told before belongs to what was before.
    host.poll().await?;
    let begin = Instant::now();
    while begin.elapsed() < time {
        tokio::time::sleep(POLL.min(time.saturating_sub(begin.elapsed()))).await;
        for (guest, event) in host.poll().await? {
            tally.take(guest, &event);
        }
    }
    tally.seconds += begin.elapsed().as_secs_f64();
    Ok(())
}

/// CPU seconds of this program so far.
fn own_cpu_s() -> Result<f64> {
    cpu::process_s(std::process::id() as i32)
}

/// Bytes that a process has read with system calls.
fn read_by(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/io");
    let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    let value = text.lines().find_map(|l| l.strip_prefix("rchar: ")).and_then(|n| n.parse().ok());
    value.with_context(|| format!("{path}: no rchar"))
}

/// Reads a disk image once, so that it is in the host's page cache, and charged to nobody's cgroup
/// but this program's: on no side does the budget pay for the guests' disks.
fn warm_up(disk: &Path) -> Result<()> {
    let mut file = std::fs::File::open(disk).with_context(|| disk.display().to_string())?;
    std::io::copy(&mut file, &mut std::io::sink())
        .map(drop)
        .with_context(|| disk.display().to_string())
}

/// Pages that the host has read from swap since it started. While a peer is measured, nobody else has any there.
fn swapped_in() -> Result<u64> {
    let path = "/proc/vmstat";
    let text = std::fs::read_to_string(path).context(path)?;
    let value = text.lines().find_map(|l| l.strip_prefix("pswpin ")).and_then(|n| n.parse().ok());
    value.with_context(|| format!("{path}: no pswpin"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_read_from_swap_only_become_more() {
        let before = swapped_in().unwrap();
        assert!(swapped_in().unwrap() >= before);
    }

    #[test]
    fn budgets_are_whole_pages() {
        let plan = Plan {
            guests: vec![Load::hog(10), Load::hog(10), Load::hog(10)],
            memory: Bytes::from_mib(256),
            factors: Vec::new(),
            settle: Duration::ZERO,
            window: Duration::ZERO,
            warm: Duration::ZERO,
        };
        assert_eq!(plan.configured(), Bytes::from_mib(768));
        assert_eq!(plan.budget(2.0), Bytes::from_mib(384));
        assert_eq!(plan.budget(1.66).0 % 4096, 0);
    }

    #[test]
    fn a_guest_that_serves_or_holds_has_written_its_data() {
        let story = |line: &str| {
            let mut story = Story::default();
            story.progress = Event::parse(line);
            story
        };
        assert!(filled(&story("@ballast {\"phase\":\"serve\"}")));
        assert!(filled(&story("@ballast {\"phase\":\"filled\"}")));
        assert!(filled(&story("@ballast {\"held_mb\":5}")));
        assert!(!filled(&story("@ballast {\"phase\":\"fill\"}")));
        assert!(!filled(&Story::default()));
    }

    #[test]
    fn what_a_process_reads_is_counted() {
        let me = std::process::id();
        let before = read_by(me).unwrap();
        let read = std::fs::read("/proc/self/exe").unwrap().len() as u64;
        assert!(read_by(me).unwrap() >= before + read);
        assert!(read_by(u32::MAX).is_err());
    }

    #[test]
    fn sides_are_numbered_in_order() {
        assert_eq!(SIDES.map(Side::number), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        let ours = [Side::Ballast, Side::Paging, Side::BalloonFirst];
        assert!(!PEERS.iter().any(|peer| ours.contains(peer)));
    }
}
