//! A VM that a former manager left running is taken over, or given back.

use std::cell::RefCell;
use std::sync::Arc;

use ballast_uffd::Event;
use ballast_units::{Pages, Ppn};

use super::super::pending::Pending;
use super::{PagedVm, PagerConfig, StartError, VmFiles, open_tier};
use crate::advance::Advance;
use crate::backend::MemError;
use crate::guest_ram::GuestRam;
use crate::host::Host;
use crate::memory::{Mark, Memory, RecoverError, Recovered, Unbooked};
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
        let ready = discard_all(vm.memory(), discards)
            .map_err(|e| StartError::from(RecoverError::Memory(e)))
            .and_then(|unbooked| vm.spawn_faults(unbooked, config.fault_threads))
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

/// Books what was given up while nobody listened. Answers what could not be booked, for the fault service.
fn discard_all(
    memory: &Memory<GuestRam>,
    discards: Vec<(Ppn, u64, Mark)>,
) -> Result<Vec<(Unbooked, Mark)>, MemError> {
    let book = |(first, n, mark)| {
        let (left, result) = memory.discard(first, n, mark);
        result.map(|()| (left, mark))
    };
    discards.into_iter().map(book).collect()
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

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::memory::{Access, Fault};
    use crate::service::testing::vm_that_tells;
    use crate::word::State;

    #[test]
    fn what_was_given_up_while_nobody_listened_is_booked_and_what_is_there_is_looked_at_again() {
        let Some(vm) = vm_that_tells(6) else { return };
        let memory = &vm.memory;
        let at = |p: u64| memory.backend().at(Ppn(p)).0;
        for p in 0..6 {
            assert_eq!(memory.fault(Ppn(p), Access::Missing), Fault::Served);
            // SAFETY: RAM of this process, that stays, and that nobody else looks at.
            unsafe { (at(p) as *mut u64).write_volatile(p + 1) };
        }
        assert_eq!(memory.evict_run(Ppn(0), 2, 0).unwrap().len(), 2);
        let mark = memory.mark();
        let mut discards = Pending::default();
        // Two that are away and one at home, whose memory goes, and then one whose memory stays.
        for (first, n, how) in [(0, 3, libc::MADV_REMOVE), (4, 1, libc::MADV_DONTNEED)] {
            let (from, len) = (at(first) as usize, n * ballast_units::PAGE_SIZE);
            // SAFETY: as above. It waits until that is read.
            let gives_up = move || unsafe { libc::madvise(from as *mut libc::c_void, len, how) };
            let vmm = std::thread::spawn(gives_up);
            let before = discards.discards();
            while discards.discards() == before {
                assert!(!vmm.is_finished(), "nobody was told");
                drain_events(memory, &mut discards, mark);
                std::thread::yield_now();
            }
            assert_eq!(vmm.join().unwrap(), 0);
        }
        let left = discard_all(memory, discards.take_discards()).unwrap();
        let present: Vec<_> = left.into_iter().flat_map(|(left, _)| left.present).collect();
        assert_eq!(present, [(Ppn(4), 1)]);
        let state = |p| memory.pmap().load(Ppn(p)).state();
        assert_eq!([0, 1, 2].map(state), [State::Ballooned; 3]);
        assert_eq!([3, 4, 5].map(state), [State::Resident; 3]);
        assert_eq!(memory.charged(), Pages(3));
    }
}
