//! The seam to a guest's memory: what the page-state machine may do to pages. The real one drives
//! a userfaultfd and the RAM file; tests have one that fails, delays and crashes on demand.

use ballast_units::{PAGE_SIZE, Ppn};

/// Why an operation on guest memory did not happen.
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

/// Operations on the pages of one VM. All are safe to call from several threads; the page-state
/// machine calls them only while it holds the page's busy bit.
pub trait Backend: Send + Sync {
    /// Write-protects a home page: from the return on, a write to it waits. Absent pages too.
    fn protect(&self, ppn: Ppn) -> Result<(), MemError>;
    /// Lifts the protection and wakes whoever waits to write.
    fn unprotect(&self, ppn: Ppn) -> Result<(), MemError>;
    /// Reads a home page; zeros where there is none. Allocates nothing.
    fn read_home(&self, ppn: Ppn, into: &mut PageBuf) -> Result<(), MemError>;
    /// Frees `n` home pages in every mapping. Absent pages are passed over.
    fn punch(&self, ppn: Ppn, n: u64) -> Result<(), MemError>;
    /// Makes up to `n` absent home pages from `ppn` on present, zeroed and mapped, and wakes
    /// waiters. Answers how many, at least one.
    fn zero(&self, ppn: Ppn, n: u64) -> Result<u64, MemError>;
    /// Makes an absent home page present with these bytes, unprotected, and wakes waiters.
    fn fill(&self, ppn: Ppn, bytes: &PageBuf) -> Result<(), MemError>;
    /// Lets whoever waits for any of `n` pages try again.
    fn wake(&self, ppn: Ppn, n: u64) -> Result<(), MemError>;
    /// The first home page of `[ppn, end)` that is there; `end` when none is.
    fn next_present(&self, ppn: Ppn, end: u64) -> Result<u64, MemError>;
    /// Whether the home page is there.
    fn present(&self, ppn: Ppn) -> Result<bool, MemError> {
        Ok(self.next_present(ppn, ppn.0 + 1)? == ppn.0)
    }
}
