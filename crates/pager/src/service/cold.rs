//! Victims that their guest has not touched for a while, where that can be seen (ADR 25).

use ballast_units::Ppn;

use super::reclaim::Reclaim;
use crate::backend::Backend;
use crate::memory::Memory;
use crate::word::State;

/// Pages that are watched together: one system call, and one flush of the guest's translations.
const TOGETHER: u64 = 64;
/// Pages that are asked about for one victim. If all of them are in use, one is as good as another.
const ASKED: u32 = 128;
/// Steps of the back hand for one victim: most pages may be elsewhere.
const STEPS: u32 = 8 * ASKED;

impl Reclaim {
    /// A page that was not accessed since the front hand passed it. None: that is not known, or there was none
    /// among those that the back hand came to.
    pub(super) fn cold(&mut self) -> Option<Ppn> {
        let vm = self.vm.clone();
        let mut asked = 0;
        for _ in 0..STEPS {
            if !self.watch_ahead() {
                return None;
            }
            let ppn = self.clock.back()?;
            if !may_leave(&vm.memory, ppn) {
                self.consider_shared(ppn);
                continue;
            }
            if !vm.memory.backend().was_accessed(ppn) {
                return Some(ppn);
            }
            asked += 1;
            if asked == ASKED {
                break;
            }
        }
        None
    }

    /// Has the front hand go on, if it may by enough. Answers whether what it passes can be watched.
    fn watch_ahead(&mut self) -> bool {
        if self.clock.room() < TOGETHER.min(self.vm.memory.pmap().len().0) {
            return true;
        }
        let memory = self.vm.memory.clone();
        let mut some = Vec::with_capacity(TOGETHER as usize);
        for _ in 0..TOGETHER {
            let Some(ppn) = self.clock.front() else { break };
            // One that is spared is left mapped, and counts as in use: it would be, and what it cost is saved.
            if may_leave(&memory, ppn) && !self.is_spared(ppn) {
                some.push(ppn);
            }
        }
        // The kernel finds neighbours sooner.
        some.sort_unstable();
        some.is_empty() || memory.backend().watch(&some)
    }
}

/// Whether a page could be evicted, as far as its state tells.
pub(super) fn may_leave<B: Backend>(memory: &Memory<B>, ppn: Ppn) -> bool {
    let word = memory.pmap().load(ppn);
    word.state() == State::Resident && word.is_idle() && !memory.regions().is_large(ppn)
}
