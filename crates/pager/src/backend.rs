//! The seam to a guest's memory: what the page-state machine may do to pages. The real one drives
//! a userfaultfd and the RAM file; tests have one that fails, delays and crashes on demand.

use std::ops::Range;

use ballast_sharing::StorePage;
use ballast_units::{PAGE_SIZE, Ppn};

/// Why an operation on guest memory did not happen.
#[allow(missing_docs, reason = "of fields: the messages say it")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemError {
    /// A REMOVE event waits to be read; the operation was not done. Read events, then retry.
    #[error("a discard is pending")]
    Again,
    /// The page to be filled is there already; nothing was changed.
    #[error("the page is present")]
    Exists,
    /// The VMM process is gone.
    #[error("the VMM is gone")]
    Gone,
    /// The kernel has no memory.
    #[error("the host kernel is out of memory")]
    NoMemory,
    /// Anything else; caused by the kernel or by a VMM that changed its mappings.
    #[error("{op} at {ppn}: {source}")]
    Os { op: &'static str, ppn: Ppn, source: Errno },
    /// The VMM did not say in time whether its mappings are changed: they must be looked up before
    /// anything is concluded.
    #[error("the VMM has not answered")]
    Unanswered,
    /// What is kept of the page is not what was stored. Caused by memory or a disk that lies, or by
    /// whoever wrote to the manager's files.
    #[error("{ppn}: its compressed contents are damaged")]
    Damaged { ppn: Ppn },
    /// Its mappings cannot be changed: no shim, or one of an older version.
    #[error("its mappings cannot be changed")]
    Fixed,
    /// Tests: the manager dies here.
    #[error("crash injected")]
    Crash,
}

/// An errno that compares and clones.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Errno(pub i32);

impl std::fmt::Display for Errno {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::io::Error::from_raw_os_error(self.0).fmt(f)
    }
}
impl std::fmt::Debug for Errno {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "errno {}", self.0)
    }
}
impl std::error::Error for Errno {}

/// One page of bytes.
pub type PageBuf = [u8; PAGE_SIZE];

/// What is mapped where the guest sees a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// The RAM file, shared: the page's home.
    Home,
    /// A page of the store, private.
    Store(StorePage),
    /// The page of zeros that every VM reads, private.
    Zeros,
}

/// A run of pages to be mapped elsewhere; store pages count up with the pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remap {
    /// Page of the VM at which the run begins.
    pub first: Ppn,
    /// Pages of the run, at least one.
    pub n: u64,
    /// What the first page is to show. With a page of the store, the others show the store's next ones.
    pub to: Place,
}

impl Remap {
    /// Adds one page, to the last run if it continues it.
    pub fn push(runs: &mut Vec<Remap>, ppn: Ppn, to: Place) {
        if let Some(last) = runs.last_mut()
            && last.first.0 + last.n == ppn.0
            && match (last.to, to) {
                (Place::Store(first), Place::Store(page)) => {
                    u64::from(first.get()) + last.n == u64::from(page.get())
                }
                (a, b) => a == b,
            }
        {
            last.n += 1;
        } else {
            runs.push(Remap { first: ppn, n: 1, to });
        }
    }
    /// The pages of the run, in rising order.
    pub fn pages(&self) -> impl Iterator<Item = Ppn> + use<> {
        (self.first.0..self.first.0 + self.n).map(Ppn)
    }
}

/// Operations on the pages of one VM. All are safe to call from several threads; the page-state
/// machine calls them only while it holds the page's busy bit.
pub trait Backend: Send + Sync {
    /// Write-protects a home page: from the return on, a write to it waits. Absent pages too.
    fn protect(&self, ppn: Ppn) -> Result<(), MemError>;
    /// Lifts the protection and wakes whoever waits to write.
    fn unprotect(&self, ppn: Ppn) -> Result<(), MemError>;
    /// The pages that a guest which has this one has for sure, as far as is known: some that it has, it has not yet.
    fn surely_has(&self, ppn: Ppn) -> Range<u64> {
        let _ = ppn;
        0..u64::MAX
    }
    /// Reads a home page; zeros where there is none. Allocates nothing.
    fn read_home(&self, ppn: Ppn, into: &mut PageBuf) -> Result<(), MemError>;
    /// Frees `n` home pages in every mapping. Absent pages are passed over. A part of a large page may
    /// stay there, zeroed: the kernel cannot split one that somebody holds (direct I/O, for one).
    fn punch(&self, ppn: Ppn, n: u64) -> Result<(), MemError>;
    /// Makes up to `n` absent home pages from `ppn` on present, zeroed and mapped, and wakes
    /// waiters. Answers how many, at least one.
    fn zero(&self, ppn: Ppn, n: u64) -> Result<u64, MemError>;
    /// Makes an absent home page present with these bytes, unprotected, and wakes waiters.
    fn fill(&self, ppn: Ppn, bytes: &PageBuf) -> Result<(), MemError>;
    /// `fill` of neighbours: of as many as could be, at least one. An error is about the first of them.
    fn fill_run(&self, first: Ppn, pages: &[PageBuf]) -> Result<u64, MemError> {
        match pages {
            [] => Ok(0),
            [page, ..] => self.fill(first, page).map(|()| 1),
        }
    }
    /// Lets whoever waits for any of `n` pages try again.
    fn wake(&self, ppn: Ppn, n: u64) -> Result<(), MemError>;
    /// The first home page of `[ppn, end)` that is there; `end` when none is.
    fn next_present(&self, ppn: Ppn, end: u64) -> Result<u64, MemError>;
    /// The first page of `[ppn, end)` whose home page is not there; `end` when all are.
    fn next_absent(&self, ppn: Ppn, end: u64) -> Result<u64, MemError> {
        let mut at = ppn.0;
        while at < end && self.next_present(Ppn(at), at + 1)? == at {
            at += 1;
        }
        Ok(at)
    }
    /// Reads neighbouring home pages at once; zeros where there is none. Allocates nothing.
    fn read_homes(&self, first: Ppn, into: &mut [PageBuf]) -> Result<(), MemError> {
        for (i, page) in into.iter_mut().enumerate() {
            self.read_home(Ppn(first.0 + i as u64), page)?;
        }
        Ok(())
    }
    /// Write-protects `n` pages from `first` on.
    fn protect_run(&self, first: Ppn, n: u64) -> Result<(), MemError> {
        (first.0..first.0 + n).try_for_each(|p| self.protect(Ppn(p)))
    }

    /// Lifts the protection of `n` pages and wakes whoever waits for them.
    fn unprotect_run(&self, first: Ppn, n: u64) -> Result<(), MemError> {
        (first.0..first.0 + n).try_for_each(|p| self.unprotect(Ppn(p)))
    }
    /// Pages of a large page, 1 if there are none. Home pages with one number when divided by it can be
    /// allocated as one.
    fn large(&self) -> u64 {
        1
    }
    /// Allocates the home pages of a whole large page, none of which is there, as one. Maps nothing and
    /// wakes nobody. Until one of them is touched, `next_present` may find none. Answers whether they are one:
    /// if the kernel finds no large page, they are smaller ones.
    fn allocate(&self, first: Ppn, n: u64) -> Result<bool, MemError> {
        let _ = n;
        Err(MemError::Os { op: "large pages", ppn: first, source: Errno(libc::EOPNOTSUPP) })
    }

    /// Makes the home pages of a whole large page, all of them there, into one. Mappings of them are taken away, and
    /// made again small. Answers false, with nothing changed, if the kernel cannot just now; if it can never, that is an
    /// error.
    fn collapse(&self, first: Ppn, n: u64) -> Result<bool, MemError> {
        let _ = n;
        Err(MemError::Os { op: "large pages", ppn: first, source: Errno(libc::EOPNOTSUPP) })
    }

    /// Whether a copy that the kernel made is told from a page that is mapped from elsewhere and was never looked at.
    fn sees_copies(&self) -> bool {
        true
    }
    /// Whether the kernel may refuse to map other pages somewhere with what was there before gone. Then nothing more is
    /// to be; what is mapped can go home all the same.
    fn may_leave_holes(&self) -> bool {
        false
    }
    /// Whether `remap` can do anything.
    fn can_remap(&self) -> bool {
        false
    }
    /// Puts other mappings over pages, run by run. To the store and to the zeros: private, and
    /// write-protected at once; a write in the instant before that is copied by the kernel. Home: what
    /// the guest sees now is copied into the RAM file, then mapped, unprotected. Answers how many runs
    /// are done whole. Never of what is home: a hole there would be waited for. The rest is done in part or not at all: where its pages are is to be looked up
    /// with `places`, and what is mapped elsewhere may be neither registered nor protected (`rearm`).
    fn remap(&self, runs: &[Remap]) -> (usize, Result<(), MemError>) {
        let _ = runs;
        (0, Err(MemError::Fixed))
    }
    /// Whether `map_again` can do anything.
    fn can_map_again(&self) -> bool {
        false
    }
    /// Maps home pages anew, unprotected: nothing of them is read or written, and who accesses them meanwhile sees what is
    /// there. After an error it is done or not, and may not be registered (`rearm`).
    fn map_again(&self, first: Ppn, n: u64) -> Result<(), MemError> {
        let _ = (first, n);
        Err(MemError::Fixed)
    }
    /// Where pages are mapped, for each that is asked for, in any order; an error of its own for one that is
    /// mapped as only the VMM could have done it. Slow; only while no `remap` is under way.
    fn places(&self, pages: &[Ppn]) -> Result<Vec<Result<Place, MemError>>, MemError> {
        Ok(vec![Ok(Place::Home); pages.len()])
    }
    /// Which of these privately mapped pages the guest has written to, so that the kernel copied them.
    fn copied(&self, first: Ppn, n: u64) -> Result<Vec<bool>, MemError> {
        let _ = first;
        Ok(vec![false; n as usize])
    }
    /// Makes faults of a page arrive again, after a remap that was cut short, and write-protects it.
    fn rearm(&self, ppn: Ppn) -> Result<(), MemError> {
        let _ = ppn;
        Ok(())
    }

    /// Has the next access to each of these home pages seen by `accessed`. Their contents stay where they are.
    /// Answers false if that cannot be done.
    fn watch(&self, pages: &[Ppn]) -> bool {
        let _ = pages;
        false
    }
    /// Which of `n` pages that were watched have been accessed since; all of them if that is not known.
    fn accessed(&self, first: Ppn, n: u64) -> Vec<bool> {
        let _ = first;
        vec![true; n as usize]
    }

    /// Whether the home page is there.
    fn present(&self, ppn: Ppn) -> Result<bool, MemError> {
        Ok(self.next_present(ppn, ppn.0 + 1)? == ppn.0)
    }
}
