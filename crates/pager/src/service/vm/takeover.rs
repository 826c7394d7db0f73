//! A VM that a former manager left running is taken over, or given back.

use std::cell::RefCell;
use std::sync::Arc;

use ballast_uffd::Event;
use ballast_units::{Pages, Ppn};

use super::super::pending::Pending;
use super::{PagedVm, PagerConfig, StartError, VmFiles, open_tier};
use crate::advance::Advance;
use crate::guest_ram::GuestRam;
use crate::host::Host;
use crate::memory::{Mark, Memory, RecoverError, Recovered};
use crate::pmap::Pmap;
use crate::sharing::{Domain, DomainError};
use crate::stage::Stage;

/// What a VM that is taken over has to do with others.
#[derive(Clone, Copy, Default)]
pub struct Inherited<'a> {
    /// With whom it shares pages.
    pub domain: Option<&'a Arc<Domain<GuestRam>>>,
    /// What is booked for it so far.
    pub advance: Option<&'a Advance>,
}

/// A VM in the books, without threads yet, and what its guest gave up while nobody listened.
struct Booked {
    vm: PagedVm,
    found: Recovered,
    discards: Vec<(Ppn, u64, Mark)>,
}

impl PagedVm {
    /// Takes over a VM that a former manager left running: fault service first, for discards that
    /// nobody read stand in the way of everything else. After an error the books are as they were
    /// before, but that as much is booked in advance as it found, if it came so far.
    ///
    /// # Errors
    /// A file cannot be used, what is in it contradicts another or the VMM's memory, or a thread cannot be started.
    pub fn take_over(
        name: &str,
        config: PagerConfig,
        files: VmFiles,
        ram: GuestRam,
        overhead: Pages,
        host: Arc<Host>,
        inherited: Inherited<'_>,
    ) -> Result<(PagedVm, Recovered), StartError> {
        ram.check().map_err(StartError::Layout)?;
        let pmap = Pmap::open(&files.pmap, ram.layout().len())?;
        let stage = Stage::open(&files.stage)?;
        // Without room to break them, there were none.
        let large =
            stage.layout().can_break() && ram.has_large_pages().map_err(StartError::LargePages)?;
        let ram = if large { ram.with_large_pages() } else { ram };
        let slots = files.swap.slots();
        let tier = open_tier(&files, ram.layout().len(), config.compression)?;
        let memory = Memory::new(pmap, ram, stage, slots, host, config.fault_around);
        let memory = Arc::new(memory.with_tier(tier));
        let booked = book(name, &memory, files, overhead, inherited, config.check);
        let Booked { mut vm, found, discards } =
            booked.inspect_err(|_| memory.disown(inherited.advance))?;
        let mut unbooked = Vec::with_capacity(discards.len());
        let ready = discards.into_iter().try_for_each(|(first, n, mark)| {
            let (left, result) = vm.memory().discard(first, n, mark);
            unbooked.push((left, mark));
            result.map_err(RecoverError::Memory)
        });
        let ready = ready
            .map_err(StartError::from)
            .and_then(|()| vm.spawn_faults(unbooked, config.fault_threads))
            .and_then(|()| vm.spawn_reclaim(config.seed, &found));
        match ready {
            Ok(()) => Ok((vm, found)),
            Err(e) => {
                vm.undo_take_over(inherited.advance);
                Err(e)
            }
        }
    }

    /// Undoes a takeover that cannot be completed: the VM is left for the next one, as `leave` does, and is
    /// taken out of its domain; what its pages are charged is booked in `advance`, that of the takeover, until the next one
    /// books it again. Its overhead stays reserved: it is the caller's again, as after an error of `take_over`.
    pub fn undo_take_over(mut self, advance: Option<&Advance>) {
        self.stop_threads();
        self.memory().disown(advance);
    }
}

fn book(
    name: &str,
    memory: &Arc<Memory<GuestRam>>,
    files: VmFiles,
    overhead: Pages,
    inherited: Inherited<'_>,
    check: bool,
) -> Result<Booked, StartError> {
    // First: in its domain others may look at its pages.
    memory.let_pages_move(false);
    if let Some(domain) = inherited.domain {
        let has_any =
            || memory.pmap().known().any(|p| memory.pmap().load(p).store_page().is_some());
        match domain.join(memory) {
            // As at its start, then: it shares nothing, and would stand still for that.
            Err(DomainError::Full) if !has_any() => {}
            joined => joined?,
        }
    }
    let mark = memory.mark();
    let discards = RefCell::new(Pending::default());
    let drain = || drain_events(memory, &mut discards.borrow_mut(), mark);
    drain();
    let found = memory.recover(&drain, inherited.advance)?;
    if check {
        memory.check_quiet().map_err(RecoverError::Unsound)?;
    }
    let vm = PagedVm::assemble(name, memory.clone(), files, overhead)?;
    Ok(Booked { vm, found, discards: discards.take().take_discards() })
}

/// How often what the kernel has to tell is read at a time. Who gives up pages as fast as it is read is not to hold up
/// the takeover: the fault service reads the rest.
const READS: usize = 1024;

/// Reads what the kernel has to tell before the fault service runs. Discards are kept for after the
/// recovery, each page's once; faults are dropped, which is why recovery wakes all waiters at its end.
fn drain_events(memory: &Memory<GuestRam>, discards: &mut Pending, mark: Mark) {
    let layout = memory.backend().layout();
    let mut events = Vec::new();
    for _ in 0..READS {
        if !matches!(memory.backend().uffd().read_events(&mut events), Ok(1..)) {
            return;
        }
        let mut given_up = Vec::new();
        for event in events.drain(..) {
            if let Event::Remove { start, end } = event {
                given_up.extend(layout.pages_within(start, end));
            }
        }
        discards.keep_discards(given_up, mark);
    }
}
