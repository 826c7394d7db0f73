//! Pages around a fault: when one is served, neighbours whose contents are at hand come home too, as far
//! as that pays (`runs`). After the guest that faulted has been woken, so it does not wait for them; if it gets
//! to one of them while it is on its way, it is woken when it is there.

use ballast_units::{PAGE_SIZE, Pages, Ppn};

use super::runs::{Runs, Way};
use crate::backend::{Backend, MemError, PageBuf};
use crate::memory::Memory;
use crate::swap::Stored;
use crate::word::{State, Word};

/// Pages that are put in place together: a guest that is faster than we are waits for no more.
const TOGETHER: usize = 8;
/// The run is over where so many pages that are not away follow one another.
const GAP: u64 = 32;

/// What one VM's fault service brings home unasked.
pub struct Around {
    runs: Runs,
    buffers: Vec<PageBuf>,
    /// Pages to be brought home; emptied each time.
    pages: Vec<Ppn>,
}

impl Default for Around {
    fn default() -> Around {
        Around {
            runs: Runs::default(),
            buffers: vec![[0; PAGE_SIZE]; TOGETHER],
            pages: Vec::with_capacity(Runs::MOST),
        }
    }
}

impl Around {
    /// Memory of the buffers.
    pub const PAGES: Pages = Pages(TOGETHER as u64);

    /// A page that was away has come home, because it was wanted. Brings home neighbours of it, those
    /// that `may`, swapped ones if they are `kept` in memory; answers which (some of them may have been
    /// held by others, and be where they were).
    ///
    /// # Errors
    /// What a fault on them would have met.
    pub fn came<'a, B: Backend>(
        &mut self,
        memory: &Memory<B>,
        ppn: Ppn,
        may: impl Fn(Ppn) -> bool,
        kept: impl Fn(Ppn, Stored) -> Option<&'a PageBuf>,
    ) -> Result<&[Ppn], MemError> {
        let worth = self.runs.met(ppn);
        self.pages.clear();
        let comes = |ppn: Ppn, word: Word| {
            let here = || word.state() != State::Swapped || kept(ppn, word.stored()).is_some();
            Memory::<B>::may_come(word) && may(ppn) && here()
        };
        let mut next = self.look(memory, ppn, worth.way, worth.pages as usize, comes);
        let mut brought = 0;
        let mut result = Ok(());
        for some in self.pages.chunks_mut(TOGETHER) {
            let first = some[0];
            if worth.way == Way::Down {
                some.reverse();
            }
            let came = memory.bring_home(some, &mut self.buffers, &kept);
            brought += *came.as_ref().unwrap_or(&0);
            if !matches!(came, Ok(1..)) {
                next = Some(first);
                result = came.map(drop);
                break;
            }
        }
        let (up, down) = match worth.way {
            Way::Up if worth.known => (next, None),
            Way::Up => (next, beyond(memory, ppn, Way::Down, |_, _| false)),
            Way::Down => (None, next),
        };
        self.runs.left(worth, brought as u32, up, down);
        result.map(|()| &self.pages[..])
    }

    /// Brings pages home that nobody has asked for, those that `may` and whose contents are at hand.
    ///
    /// # Errors
    /// What a fault on them would have met.
    pub fn bring<'a, B: Backend>(
        &mut self,
        memory: &Memory<B>,
        pages: &[Ppn],
        may: impl Fn(Ppn) -> bool,
        kept: impl Fn(Ppn, Stored) -> Option<&'a PageBuf>,
    ) -> Result<u64, MemError> {
        self.pages.clear();
        self.pages.extend(pages.iter().copied().filter(|&ppn| may(ppn)));
        let mut brought = 0;
        for some in self.pages.chunks(TOGETHER) {
            brought += memory.bring_home(some, &mut self.buffers, &kept)?;
        }
        Ok(brought)
    }

    /// Collects up to `most` pages that come, and answers the first page behind them that is away.
    fn look<B: Backend>(
        &mut self,
        memory: &Memory<B>,
        from: Ppn,
        way: Way,
        most: usize,
        comes: impl Fn(Ppn, Word) -> bool,
    ) -> Option<Ppn> {
        let pages = &mut self.pages;
        beyond(memory, from, way, |ppn, word| {
            let taken = pages.len() < most && comes(ppn, word);
            if taken {
                pages.push(ppn);
            }
            taken
        })
    }
}

/// The first page that is away from there on and that `pass` does not pass over.
fn beyond<B: Backend>(
    memory: &Memory<B>,
    from: Ppn,
    way: Way,
    mut pass: impl FnMut(Ppn, Word) -> bool,
) -> Option<Ppn> {
    let (mut at, mut gap) = (from, 0);
    while gap < GAP {
        at = match way {
            Way::Up => Ppn(at.0 + 1),
            Way::Down => Ppn(at.0.checked_sub(1)?),
        };
        if at.0 >= memory.pmap().len().0 {
            return None;
        }
        let word = memory.pmap().load(at);
        if !Memory::<B>::is_away(word.state()) {
            gap += 1;
        } else if pass(at, word) {
            gap = 0;
        } else {
            return Some(at);
        }
    }
    None
}
