//! One manager with guests on it, watched once a second.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ballast_api::{Accel, HostView, VmSpec, VmView};
use ballast_units::Bytes;

use crate::console::{Console, Event};
use crate::guest::Guest;
use crate::image::Image;
use crate::manager::{Manager, Options};

const BOOT_LIMIT: Duration = Duration::from_secs(180);
/// As often as of a plain VM.
const POLL: Duration = Duration::from_millis(20);

/// Ended by force when it is dropped; `end` does it in order.
pub struct Stage {
    /// Of this stage alone.
    pub manager: Manager,
    /// Names, in the order in which they were added.
    pub guests: Vec<(String, Console)>,
    started: Instant,
}

impl Stage {
    /// Without guests.
    pub fn new(options: &Options) -> Result<Stage> {
        Ok(Stage { manager: Manager::start(options)?, guests: Vec::new(), started: Instant::now() })
    }

    /// Since the manager was started.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Starts a guest; `change` may adapt what the manager is asked for.
    pub async fn add(
        &mut self,
        guest: &Guest,
        image: &Image,
        change: impl FnOnce(&mut VmSpec),
    ) -> Result<VmView> {
        // As plain QEMU beside it, whatever this host can do: what is compared is not the accelerator.
        let mut spec = guest.spec(image, Accel::Tcg);
        change(&mut spec);
        let view = self.manager.client().run(&spec).await;
        let view = view.with_context(|| format!("starting {}", guest.name))?;
        self.guests.push((guest.name.clone(), Console::new(&guest.console)));
        Ok(view)
    }

    /// Starts guests, all at the same moment.
    pub async fn add_at_once(&mut self, guests: Vec<(Guest, VmSpec)>) -> Result<()> {
        let mut starts = tokio::task::JoinSet::new();
        for (guest, spec) in guests {
            let client = self.manager.client().clone();
            self.guests.push((guest.name.clone(), Console::new(&guest.console)));
            starts.spawn(async move { (guest.name, client.run(&spec).await) });
        }
        while let Some(started) = starts.join_next().await {
            let (name, view) = started.context("a task that starts a guest")?;
            view.with_context(|| format!("starting {name}"))?;
        }
        Ok(())
    }

    /// Reads all consoles; new events with the number of their guest. Trouble ends the experiment.
    pub fn poll(&mut self) -> Result<Vec<(usize, Event)>> {
        let mut events = Vec::new();
        for (n, (name, console)) in self.guests.iter_mut().enumerate() {
            events.extend(console.poll().into_iter().map(|e| (n, e)));
            if let Some(trouble) = &console.story.trouble {
                bail!("{name}: {trouble}");
            }
        }
        if !self.manager.alive() {
            bail!("ballastd ended by itself: {}", self.manager.last_words());
        }
        Ok(events)
    }

    /// Until each guest's first program runs; an error after three minutes.
    pub async fn wait_for_boot(&mut self) -> Result<()> {
        let begin = Instant::now();
        loop {
            self.poll()?;
            let waiting = self.guests.iter().find(|(_, c)| c.story.ready.is_none());
            let Some((name, console)) = waiting else { return Ok(()) };
            if begin.elapsed() > BOOT_LIMIT {
                bail!("{name} is not ready after {} s: {}", BOOT_LIMIT.as_secs(), console.tail(3));
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// One after the other: not quite of the same moment.
    pub async fn views(&self) -> Result<(HostView, Vec<VmView>)> {
        let host = self.manager.client().host().await?;
        let vms = self.manager.client().vms().await?;
        Ok((host, vms))
    }

    /// Waits until the guest's statistics tell of so much that its balloon may take: for a second or two they are still those of
    /// when it had touched it, and what its balloon cannot take is paged.
    pub async fn until_free(&self, guest: &str, wanted: Bytes, at_most: Duration) -> Result<()> {
        let begun = Instant::now();
        while self.manager.client().vm(guest).await?.balloon.limit < wanted.0 {
            if begun.elapsed() > at_most {
                bail!("{guest} has not {wanted} free after {} s", at_most.as_secs());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    /// Stops everything. What was left behind is an error: no measurement excuses it.
    pub async fn end(self) -> Result<HostView> {
        let (host, left) = self.manager.finish().await?;
        match left.first() {
            None => Ok(host),
            Some(what) => bail!("left behind: {what} (and {} more)", left.len() - 1),
        }
    }
}
