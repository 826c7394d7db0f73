//! The least that a fault costs which user space answers: a thread of the process's own that does nothing else, has the
//! page at hand as it was, and puts it there. What a pager adds to it is its own; what the kernel's swap is below it no
//! pager over userfaultfd can reach.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use ballast_uffd::{CopyOpts, Event, Features, Modes, Uffd};
use ballast_units::{Bytes, HostAddr};
use rustix::event::{PollFd, PollFlags, poll};

use super::super::memory::{Memory, PAGE, WORDS};
use super::contents::Kind;
use super::round::{Faulter, Plan, Times};

/// How the thread waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Waits {
    /// Until the kernel wakes it.
    Asleep,
    /// Not at all: it asks again and again, and has a processor to itself.
    Spinning,
}

impl Waits {
    pub const ALL: [Waits; 2] = [Waits::Asleep, Waits::Spinning];

    /// In figures' names.
    pub fn name(self) -> &'static str {
        match self {
            Waits::Asleep => "floor",
            Waits::Spinning => "floor_spinning",
        }
    }

    /// What the process is told.
    pub fn command(self) -> &'static str {
        match self {
            Waits::Asleep => "floor asleep",
            Waits::Spinning => "floor spinning",
        }
    }
}

/// One round.
pub async fn round(waits: Waits, kind: Kind, plan: &Plan) -> Result<Times> {
    let mut faulter = Faulter::start(plan, kind, true, &BTreeMap::new())?;
    faulter.fill().await?;
    faulter.keep_aside(waits).await?;
    faulter.read(plan).await.with_context(|| waits.name().to_owned())
}

/// Takes all memory out of its file, and has a thread bring back what is touched, until the process ends.
pub fn begin(memory: &mut Memory, waits: Waits) -> Result<()> {
    let pages = memory.pages();
    let bytes = |page: &[u64; WORDS]| -> Vec<u8> {
        page.iter().flat_map(|word| word.to_ne_bytes()).collect()
    };
    let aside: Vec<Vec<u8>> = (0..pages).map(|page| bytes(memory.page(page))).collect();
    let base = HostAddr(std::ptr::from_mut(memory.page(0)).addr() as u64);
    let uffd = Uffd::open().context("a userfaultfd")?;
    uffd.handshake(Features::MISSING_SHMEM)?;
    memory.advise(libc::MADV_REMOVE)?;
    // SAFETY: a mapping made for this, reached by its address alone.
    unsafe { uffd.register(base, Bytes((pages * PAGE) as u64), Modes::MISSING)? };
    std::thread::Builder::new().name("floor".into()).spawn(move || {
        // An error is seen as a read that never ends.
        let mut events = Vec::new();
        loop {
            if waits == Waits::Asleep {
                let _ = poll(&mut [PollFd::new(&uffd, PollFlags::IN)], None);
            }
            let _ = uffd.read_events(&mut events);
            for event in events.drain(..) {
                if let Event::Missing { addr, .. } = event {
                    let page = (addr.0 - base.0) as usize / PAGE;
                    let at = HostAddr(base.0 + (page * PAGE) as u64);
                    let _ = uffd.copy(at, &aside[page], CopyOpts { wake: true, protect: false });
                }
            }
        }
    })?;
    Ok(())
}
