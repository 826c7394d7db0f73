//! The manager, its guests, and what must hold of them after every step.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ballast_api::client::Client;
use ballast_api::{HostChange, HostView, PoolChange, VmChange, VmView};
use ballast_units::Bytes;

use super::books::{self, Process};
use super::draw::{Random, Settings};
use crate::console::{Console, ENDED};
use crate::image::Image;
use crate::manager::{Manager, Options, SharingOptions};
use crate::say;

/// What guests have at first: three and a half of the smaller ones fit.
pub const BUDGET: Bytes = Bytes::from_mib(336);
/// Enough for all guests that there can be.
pub const PLENTY: Bytes = Bytes::from_mib(1200);
/// The small place of swap files: less than one guest's file.
const SMALL_SWAP: Bytes = Bytes::from_mib(96);
/// How long the manager may take to answer.
const ANSWER: Duration = Duration::from_secs(30);
/// How long anything may take that the manager does by itself.
const SOON: Duration = Duration::from_secs(90);
/// A guest that makes no check for so long may be kept waiting by the policy: it is given memory.
const PATIENCE: Duration = Duration::from_secs(30);
/// And then it must go on within this time.
const LIMIT: Duration = Duration::from_secs(180);
/// A guest may take so long to boot and fill its memory.
const BOOT: Duration = Duration::from_secs(240);

/// A guest that should be alive.
pub struct Live {
    /// Of the VM.
    pub name: String,
    /// What it tells.
    pub console: Console,
    started: Instant,
    /// Checks when it was last judged.
    seen: u64,
}

/// What happened so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// What the manager did not want to do.
    pub refusals: u64,
    /// Times that limits were lifted because a guest waited.
    pub reliefs: u64,
    /// Checks of guests that have ended.
    pub checks: u64,
    /// Times that every VM's books were looked through as it was taken over.
    pub looked_through: u64,
    /// VMs that were ended while no manager ran.
    pub orphans_killed: u64,
    /// Errors in the manager's log.
    pub errors: u64,
    /// Times that more was handed out at one instant than the budget was.
    pub overruns: u64,
    /// By how much at most, bytes.
    pub over_most: u64,
    /// What came back.
    pub away: Away,
}

/// Pages that were away when their guest used them, as far as a manager was asked before its end.
#[derive(Clone, Copy, Debug, Default)]
pub struct Away {
    /// From swap.
    pub swapped: u64,
    /// From the compressed tier.
    pub compressed: u64,
    /// Copies of shared ones.
    pub shared: u64,
}

impl Away {
    fn of(host: &HostView) -> Away {
        Away {
            swapped: Bytes(host.counters.swapped_in).pages().0,
            compressed: Bytes(host.compression.restored).pages().0,
            shared: host.sharing.breaks,
        }
    }

    pub fn add(&mut self, other: Away) {
        self.swapped += other.swapped;
        self.compressed += other.compressed;
        self.shared += other.shared;
    }
}

/// All of it.
pub struct Soak<'a> {
    image: &'a Image,
    /// Alive but inside a step.
    pub manager: Manager,
    /// Those that should be alive.
    pub guests: Vec<Live>,
    /// What all is drawn from.
    pub random: Random,
    /// In the configuration file.
    pub settings: Settings,
    /// What the guests have to share.
    pub budget: Bytes,
    /// The largest budget of this manager, or what it found in use, bytes.
    most: u64,
    /// By how much this manager has handed out more than that, bytes.
    over: u64,
    /// In use after the last step, bytes.
    booked: u64,
    /// What this manager had brought back by then.
    pub away: Away,
    /// The budget that guests have had since then, bytes.
    in_force: u64,
    /// How many managers there were before this one.
    pub life: usize,
    /// Guests that there ever were.
    pub made: u64,
    /// See there.
    pub counts: Counts,
    log_read: usize,
    began: Instant,
}

impl<'a> Soak<'a> {
    /// A manager without guests.
    pub fn new(image: &'a Image, seed: u64) -> Result<Soak<'a>> {
        let settings = Settings::default();
        let manager = Manager::start(&options(BUDGET, settings))?;
        Ok(Soak {
            image,
            manager,
            guests: Vec::new(),
            random: Random::seeded(seed),
            settings,
            budget: BUDGET,
            most: BUDGET.0,
            over: 0,
            booked: 0,
            away: Away::default(),
            in_force: BUDGET.0,
            life: 0,
            made: 0,
            counts: Counts::default(),
            log_read: 0,
            began: Instant::now(),
        })
    }

    /// Since the first manager was started.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// What guests boot.
    pub fn image(&self) -> &'a Image {
        self.image
    }

    /// For the next manager.
    pub fn options(&self) -> Options {
        options(self.budget, self.settings)
    }

    /// The API, not waited for too long.
    pub fn client(&self) -> Client {
        self.manager.client().clone().with_timeout(ANSWER)
    }

    /// Checks that all guests ever made.
    pub fn checks(&self) -> u64 {
        let alive: u64 = self.guests.iter().map(|guest| guest.console.story.checks).sum();
        self.counts.checks + alive
    }

    /// It was started.
    pub fn joined(&mut self, name: String, console: &Path) {
        let console = Console::new(console);
        self.guests.push(Live { name, console, started: Instant::now(), seen: 0 });
    }

    /// It is to end: nobody waits for its next check.
    pub fn leaves(&mut self, name: &str) -> Result<Option<Live>> {
        self.poll()?;
        let at = self.guests.iter().position(|guest| guest.name == name);
        Ok(at.map(|at| self.guests.remove(at)))
    }

    /// It has ended: its last words are read. That its workloads were ended by a signal for that is none of what is wrong.
    pub fn has_left(&mut self, guest: Option<Live>) -> Result<()> {
        let Some(mut guest) = guest else { return Ok(()) };
        guest.console.poll();
        let story = &guest.console.story;
        self.counts.checks += story.checks;
        match &story.trouble {
            Some(trouble) if !is_wanted(trouble) => bail!("{}: {trouble}", guest.name),
            _ => Ok(()),
        }
    }

    /// There is another manager, with this budget, which may have been lowered just before.
    pub fn has_new_manager(&mut self) {
        self.life += 1;
        self.over = 0;
        self.counts.away.add(std::mem::take(&mut self.away));
        // Until it came, guests took what they were given before.
        self.most = self.budget.0.max(self.booked).max(self.in_force);
        self.in_force = self.budget.0;
    }

    /// Reads all consoles and the manager's log. Err: a guest found something wrong, or a thread of the
    /// manager's has panicked.
    pub fn poll(&mut self) -> Result<()> {
        for guest in &mut self.guests {
            guest.console.poll();
            if let Some(trouble) = &guest.console.story.trouble {
                bail!("{}: {trouble}", guest.name);
            }
        }
        let log = std::fs::read(self.manager.log()).unwrap_or_default();
        let new = String::from_utf8_lossy(log.get(self.log_read..).unwrap_or_default());
        let Some(end) = new.rfind('\n') else { return Ok(()) };
        for line in new[..end].lines() {
            if line.contains("panicked") {
                bail!("ballastd: {line}");
            }
            if line.contains("ERROR") {
                self.counts.errors += 1;
                say::detail(&format!("ballastd: {line}"));
            }
        }
        self.log_read += end + 1;
        Ok(())
    }

    /// Sleeps, and reads what guests say meanwhile.
    pub async fn sleep(&mut self, time: Duration) -> Result<()> {
        let begin = Instant::now();
        while begin.elapsed() < time {
            tokio::time::sleep(Duration::from_millis(100).min(time)).await;
            self.poll()?;
        }
        Ok(())
    }

    /// Asks again and again until `wrong` finds nothing wrong. Err: what is, after a while.
    pub async fn soon(
        &mut self,
        wrong: impl Fn(&Soak, &HostView, &[VmView]) -> Option<String>,
    ) -> Result<(HostView, Vec<VmView>)> {
        let begin = Instant::now();
        loop {
            self.poll()?;
            let (host, vms) = self.views().await?;
            let Some(what) = wrong(self, &host, &vms) else { return Ok((host, vms)) };
            if begin.elapsed() > SOON {
                bail!("after {} s still: {what}", SOON.as_secs());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    async fn views(&mut self) -> Result<(HostView, Vec<VmView>)> {
        if !self.manager.alive() {
            bail!("ballastd ended by itself: {}", self.manager.last_words());
        }
        let host = self.client().host().await.context("the host's view")?;
        let vms = self.client().vms().await.context("the VMs' views")?;
        Ok((host, vms))
    }

    /// The VMs that should be there are, all paged, and no other.
    pub async fn all_served(&mut self) -> Result<()> {
        self.soon(|soak, _, vms| books::unserved(vms, &soak.names())).await.map(drop)
    }

    fn names(&self) -> Vec<&str> {
        self.guests.iter().map(|guest| guest.name.as_str()).collect()
    }

    /// After a step: all guests are served and go on, and the books are sound.
    pub async fn settle(&mut self) -> Result<(HostView, Vec<VmView>)> {
        self.all_served().await?;
        self.guests_go_on().await?;
        let seen = self.soon(|soak, host, vms| {
            let unserved = books::unserved(vms, &soak.names());
            // Also one that was lowered is met, and soon.
            unserved.or_else(|| books::unsound(host, vms)).or_else(|| books::unmet(host))
        });
        let (host, vms) = seen.await?;
        self.booked = host.consumed + host.overhead;
        self.away = Away::of(&host);
        let over = books::over(&host, self.most);
        if over > self.over {
            say::detail(&format!("{over} bytes more were handed out than there ever were"));
            self.over = over;
            self.counts.overruns += 1;
            self.counts.over_most = self.counts.over_most.max(over);
        }
        Ok((host, vms))
    }

    /// Every guest that has booted makes a check more. One that does not is given memory first: the
    /// policy may keep it waiting.
    async fn guests_go_on(&mut self) -> Result<()> {
        let begin = Instant::now();
        let mut relieved = None;
        loop {
            self.poll()?;
            let Some(waits) = self.guests.iter().find(|guest| !guest.goes_on()) else { break };
            let (name, last) = (waits.name.clone(), waits.console.tail(2));
            match relieved {
                None if begin.elapsed() > PATIENCE => {
                    say::detail(&format!("{name} makes no checks: memory for all"));
                    self.counts.reliefs += 1;
                    self.relieve().await?;
                    relieved = Some(Instant::now());
                }
                Some(since) if since.elapsed() > LIMIT => {
                    bail!("{name} makes no checks, with all memory it may want: {last}")
                }
                _ => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
        if relieved.is_some() {
            self.set_budget(self.budget).await?;
        }
        for guest in &mut self.guests {
            guest.seen = guest.console.story.checks;
        }
        Ok(())
    }

    /// Every guest has checked something, and goes on to from now on.
    pub async fn all_check_anew(&mut self) -> Result<()> {
        let begin = Instant::now();
        let before: Vec<u64> =
            self.guests.iter().map(|guest| guest.console.story.reports).collect();
        loop {
            self.poll()?;
            let has_not = |(guest, before): &(&Live, &u64)| {
                let story = &guest.console.story;
                // The first report may be of what was done before.
                story.checks == 0 || story.reports < *before + 2
            };
            let Some((guest, _)) = self.guests.iter().zip(&before).find(has_not) else {
                return Ok(());
            };
            if begin.elapsed() > BOOT {
                let (name, last) = (&guest.name, guest.console.tail(2));
                bail!("{name} makes no checks after {} s: {last}", BOOT.as_secs());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// No limit holds any guest back.
    pub async fn relieve(&mut self) -> Result<()> {
        self.set_budget(PLENTY).await?;
        for pool in self.client().pools().await.context("the pools")? {
            let change = PoolChange { no_max: true, ..PoolChange::default() };
            self.client().change_pool(&pool.name, &change).await.context("lifting a limit")?;
        }
        for vm in self.client().vms().await.context("the VMs' views")? {
            let change = VmChange { max: Some(vm.params.size), ..VmChange::default() };
            self.client().change(&vm.name, &change).await.context("lifting a limit")?;
        }
        Ok(())
    }

    async fn set_budget(&mut self, budget: Bytes) -> Result<()> {
        let change = HostChange { budget: Some(budget.0), ..HostChange::default() };
        self.client().change_host(&change).await.context("the budget")?;
        self.most = self.most.max(budget.0);
        self.in_force = budget.0;
        Ok(())
    }

    /// A budget that was asked for and given.
    pub fn has_budget(&mut self, budget: Bytes) {
        self.budget = budget;
        self.most = self.most.max(budget.0);
        self.in_force = budget.0;
    }

    /// The manager's process.
    pub fn process(&self) -> Result<Process> {
        Process::read(self.manager.pid()?)
    }

    /// Copies the manager's log and all consoles, for those who look for the cause.
    pub fn keep_evidence(&self, folder: &Path) -> Result<()> {
        std::fs::create_dir_all(folder)?;
        std::fs::copy(self.manager.log(), folder.join("ballastd.log"))?;
        for entry in std::fs::read_dir(self.manager.consoles())?.flatten() {
            std::fs::copy(entry.path(), folder.join(entry.file_name()))?;
        }
        Ok(())
    }
}

impl Live {
    fn goes_on(&self) -> bool {
        let checks = self.console.story.checks;
        checks > self.seen || checks == 0 && self.started.elapsed() < BOOT
    }
}

/// How a workload ends whose guest is powered off.
fn is_wanted(trouble: &str) -> bool {
    let how = trouble.split_once(ENDED).map(|(_, how)| how);
    how.is_some_and(|how| ["signal 15", "signal 9"].contains(&how))
}

fn options(budget: Bytes, settings: Settings) -> Options {
    let sharing = SharingOptions { enabled: settings.sharing, ..SharingOptions::brisk() };
    Options {
        sharing: Some(sharing),
        tools_order: settings.order,
        more: settings.toml(),
        small_swap: Some(SMALL_SWAP),
        check_takeovers: true,
        ..Options::budget(budget)
    }
}
