//! What each page of a mapping shows.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use ballast_units::{HostAddr, PAGE_SIZE, Pages};

use super::marker::marker;

const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
/// A page of a file or of shared memory, not the process's own.
const FILE: u64 = 1 << 61;
const PROTECTED: u64 = 1 << 57;
/// Of a page that is not present: five bits of type, and the rest where it is. All zero to readers
/// without CAP_SYS_ADMIN (and to them only: nothing is ever at the start of a swap device).
const PLACE: u64 = (1 << 55) - 1;
/// Of that, the type.
const TYPE: u64 = 31;

const ENTRY: usize = 8;
/// Entries fetched at once.
const CHUNK: u64 = 4096;

/// /proc/PID/pagemap, of the address space that the process had when it was opened, and of no other.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
}

/// What the kernel tells about one page: the 64 bits of its pagemap entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry(u64);

/// What an access to a page would find.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shown {
    /// Nothing yet: the page of the file, if the file has one.
    Nothing,
    /// A page of the file, or of shared memory.
    File,
    /// The process's own page: of a private mapping, a copy that was made for a write. It may be in
    /// the kernel's swap.
    Copy,
    /// To readers without CAP_SYS_ADMIN: `Nothing`, write-protected; or a write-protected `Copy` that
    /// the kernel has swapped out, or is moving.
    Unclear,
}

impl Entry {
    /// Read with CAP_SYS_ADMIN it is never [`Shown::Unclear`].
    pub fn shown(self) -> Shown {
        match self.0 {
            e if e & (PRESENT | SWAPPED) == 0 => Shown::Nothing,
            e if e & FILE != 0 => Shown::File,
            // A marker counts as swapped.
            e if e & PRESENT == 0 && e & PROTECTED != 0 => match self.type_of_protected() {
                None => Shown::Unclear,
                Some(kind) if kind == marker() => Shown::Nothing,
                Some(_) => Shown::Copy,
            },
            _ => Shown::Copy,
        }
    }

    /// What it says of a page that is write-protected and not present: a type of the kernel's own. None: it is no such page, or
    /// the reader is not shown.
    pub(super) fn type_of_protected(self) -> Option<u64> {
        let is_such = self.0 & (PRESENT | SWAPPED | PROTECTED) == SWAPPED | PROTECTED;
        (is_such && self.0 & PLACE != 0).then_some(self.0 & TYPE)
    }

    /// Whether there is a page in memory: an access would find it at once.
    pub fn is_present(self) -> bool {
        self.0 & PRESENT != 0
    }

    /// Tests: whether a write to it would be a write-protect fault of a userfaultfd.
    pub fn is_protected(self) -> bool {
        self.0 & PROTECTED != 0
    }
}

impl Pagemap {
    /// Of a process that runs; 0 is none.
    ///
    /// # Errors
    /// ENOENT: there is no such process. EACCES: not the caller's to look at.
    pub fn open(pid: u32) -> io::Result<Pagemap> {
        Ok(Pagemap { file: File::open(format!("/proc/{pid}/pagemap"))? })
    }

    /// The entries of `n` pages from `start`, a page's address, on.
    ///
    /// # Errors
    /// `UnexpectedEof`: the process is gone, or has no such addresses.
    pub fn entries(&self, start: HostAddr, n: Pages) -> io::Result<Vec<Entry>> {
        let first = start.0 / PAGE_SIZE as u64;
        let mut entries = Vec::with_capacity(n.0 as usize);
        let mut bytes = vec![0; n.0.min(CHUNK) as usize * ENTRY];
        while (entries.len() as u64) < n.0 {
            let done = entries.len() as u64;
            let count = (n.0 - done).min(CHUNK) as usize;
            let bytes = &mut bytes[..count * ENTRY];
            self.file.read_exact_at(bytes, (first + done) * ENTRY as u64)?;
            let (chunks, _) = bytes.as_chunks::<ENTRY>();
            entries.extend(chunks.iter().map(|bytes| Entry(u64::from_ne_bytes(*bytes))));
        }
        Ok(entries)
    }

    /// Whether each of `n` pages from `start` on is the process's own copy. Where that is unclear
    /// ([`Shown::Unclear`]), it is said to be one: a copy that is overlooked would be lost.
    ///
    /// # Errors
    /// As of [`Pagemap::entries`].
    pub fn copies(&self, start: HostAddr, n: Pages) -> io::Result<Vec<bool>> {
        let is_copy = |entry: &Entry| matches!(entry.shown(), Shown::Copy | Shown::Unclear);
        Ok(self.entries(start, n)?.iter().map(is_copy).collect())
    }
}

/// Whether the calling thread is shown where pages are, so that nothing is [`Shown::Unclear`] to it: one with
/// CAP_SYS_ADMIN, in the first user namespace. Those of who opens a [`Pagemap`] count, not those of who reads it.
pub fn sees_places() -> bool {
    // A page that is in memory, since it is being looked at.
    let here = 0u8;
    let at = HostAddr(std::ptr::from_ref(std::hint::black_box(&here)).addr() as u64);
    let page = HostAddr(at.0 - at.0 % PAGE_SIZE as u64);
    let entries = Pagemap::open(std::process::id()).and_then(|map| map.entries(page, Pages(1)));
    entries.is_ok_and(|entries| entries[0].is_present() && entries[0].0 & PLACE != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_told_by_its_flags() {
        let (known, other) = (marker(), marker() - 1);
        for (entry, shown) in [
            (0, Shown::Nothing),
            (PROTECTED, Shown::Nothing),
            (PRESENT | FILE | 0x1234, Shown::File),
            (PRESENT | FILE | PROTECTED, Shown::File),
            (PRESENT, Shown::Copy),
            (PRESENT | PROTECTED | known, Shown::Copy),
            (SWAPPED, Shown::Copy),
            (SWAPPED | 7 << 5, Shown::Copy),
            (SWAPPED | FILE, Shown::File),
            (SWAPPED | PROTECTED, Shown::Unclear),
            (SWAPPED | PROTECTED | known | 1 << 5, Shown::Nothing),
            (SWAPPED | PROTECTED | other | 1 << 5, Shown::Copy),
            (SWAPPED | known | 1 << 5, Shown::Copy),
            (SWAPPED | PROTECTED | 7 << 5, Shown::Copy),
        ] {
            assert_eq!(Entry(entry).shown(), shown, "{entry:#x}");
            assert_eq!(Entry(entry).is_protected(), entry & PROTECTED != 0);
        }
    }
}
