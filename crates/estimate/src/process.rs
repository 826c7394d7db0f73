//! The present pages of one process.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use ballast_sharing::is_zero;
use ballast_uffd::procmap::{Entry, Pagemap, Shown};
use ballast_units::{Bytes, HostAddr, PAGE_SIZE, Pages};

use crate::EstimateError;
use crate::count::Contents;
use crate::pace::{Pace, Progress};
use crate::ram::{Claims, FileId, Found, Part, find};
use crate::store::Store;

const PAGE: u64 = PAGE_SIZE as u64;
/// Looked up and read at once, 1 MiB: little time passes between the two, in which pages may go.
const WINDOW: u64 = 256;

/// A process whose guest RAM was found and may be read.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    /// Its name, where it is one of the manager's VMs.
    pub vm: Option<String>,
    parts: Vec<Part>,
    stores: HashMap<FileId, Store>,
    pagemap: Pagemap,
    memory: File,
}

/// Where the contents of a page are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Where {
    Memory,
    Store,
    Nowhere,
}

/// What there was to read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Read {
    pub guest_ram: Bytes,
    /// Read and counted.
    pub present: Pages,
    /// Of these, pages of a store.
    pub shared_now: Pages,
    /// Said to be present, and not there any more.
    pub unread: Pages,
}

impl Process {
    /// `min`: the least of a piece of guest RAM.
    ///
    /// # Errors
    /// No such process; not ours to read; no guest RAM, or none that `claims` has not.
    pub fn open(
        pid: u32,
        vm: Option<String>,
        min: Bytes,
        claims: &mut Claims,
    ) -> Result<Process, EstimateError> {
        let path = |name: &str| format!("/proc/{pid}/{name}");
        let maps = std::fs::read(path("maps")).map_err(|e| failed(pid, "maps", e))?;
        // The memory first: who may read that may read everything.
        let memory = File::open(path("mem")).map_err(|e| failed(pid, "mem", e))?;
        let pagemap = Pagemap::open(pid).map_err(|e| failed(pid, "pagemap", e))?;
        let parts = match find(&String::from_utf8_lossy(&maps), min, pid, claims) {
            Found::Ram(parts) => parts,
            Found::Nothing => return Err(EstimateError::NoRam { pid, min }),
            Found::Counted(by) => return Err(EstimateError::Counted { pid, by }),
        };
        let stores = Store::open_all(pid, &parts);
        Ok(Process { pid, vm, parts, stores, pagemap, memory })
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The VM that it is, where that was said.
    pub fn vm(&self) -> Option<&str> {
        self.vm.as_deref()
    }

    /// The mappings that are taken for guest RAM.
    pub fn guest_ram(&self) -> Bytes {
        Bytes(self.parts.iter().map(|part| part.len().0).sum())
    }

    /// Counts all pages that are there.
    ///
    /// # Errors
    /// [`EstimateError::Gone`] if it ended meanwhile.
    pub(crate) fn read(
        &self,
        contents: &mut Contents,
        pace: &mut Pace,
        tell: &mut impl FnMut(Progress),
    ) -> Result<Read, EstimateError> {
        let mut read = Read { guest_ram: self.guest_ram(), ..Read::default() };
        let mut buffer = vec![0; WINDOW as usize * PAGE_SIZE];
        for part in &self.parts {
            let mut at = part.start;
            while at < part.end {
                let n = Pages(((part.end.0 - at.0) / PAGE).min(WINDOW));
                let before = read.present;
                self.window(part, at, n, &mut buffer, contents, &mut read)?;
                tell(pace.step(n, read.present - before));
                at = HostAddr(at.0 + n.bytes().0);
            }
        }
        Ok(read)
    }

    fn window(
        &self,
        part: &Part,
        start: HostAddr,
        n: Pages,
        buffer: &mut [u8],
        contents: &mut Contents,
        read: &mut Read,
    ) -> Result<(), EstimateError> {
        let entries = self.pagemap.entries(start, n).map_err(|e| failed(self.pid, "pagemap", e))?;
        let store = part.store.and_then(|place| Some((place, self.stores.get(&place.file)?)));
        let found = |entry: &Entry| match store {
            Some(_) if entry.shown() != Shown::Copy => Where::Store,
            _ if entry.is_present() => Where::Memory,
            _ => Where::Nowhere,
        };
        let mut at = start.0;
        for run in entries.chunk_by(|a, b| found(a) == found(b)) {
            let length = run.len() as u64 * PAGE;
            let buffer = &mut buffer[..length as usize];
            match (run.first().map(found), store) {
                (Some(Where::Store), Some((place, store))) if !store.is_empty => {
                    let offset = place.offset + (at - part.start.0);
                    self.common(store, offset, buffer, contents, read)?;
                }
                (Some(Where::Memory), _) => {
                    if part.store.is_some() {
                        let of_file = run.iter().filter(|entry| entry.shown() == Shown::File);
                        read.shared_now += Pages(of_file.count() as u64);
                    }
                    self.run(at, buffer, contents, read)?;
                }
                _ => {}
            }
            at += length;
        }
        Ok(())
    }

    /// Pages of a store. Zero pages are dropped and not shared: one that is all zero there means that
    /// the guest has nothing.
    fn common(
        &self,
        store: &Store,
        offset: u64,
        buffer: &mut [u8],
        contents: &mut Contents,
        read: &mut Read,
    ) -> Result<(), EstimateError> {
        let pages = store.read(offset, buffer).map_err(|e| failed(self.pid, "map_files", e))?;
        for page in pages.iter().filter(|page| !is_zero(page)) {
            contents.add(page);
            read.present += Pages(1);
            read.shared_now += Pages(1);
        }
        Ok(())
    }

    /// Through /proc/PID/mem: unlike process_vm_readv, it does not wait for a userfault where a page
    /// went away in between, but fails, so that even then nothing is allocated.
    fn run(
        &self,
        start: u64,
        buffer: &mut [u8],
        contents: &mut Contents,
        read: &mut Read,
    ) -> Result<(), EstimateError> {
        let mut done = 0;
        while done < buffer.len() {
            let rest = &mut buffer[done..];
            let whole = match self.memory.read_at(rest, start + done as u64) {
                Ok(0) => return Err(EstimateError::Gone { pid: self.pid }),
                Ok(length) => length / PAGE_SIZE,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) if is_absent(&e) => 0,
                Err(e) => return Err(failed(self.pid, "mem", e)),
            };
            let (pages, _) = rest.as_chunks::<PAGE_SIZE>();
            pages.iter().take(whole).for_each(|page| contents.add(page));
            read.present += Pages(whole as u64);
            if whole == 0 {
                read.unread += Pages(1);
            }
            done += whole.max(1) * PAGE_SIZE;
        }
        Ok(())
    }
}

/// How the kernel says that a page cannot be read, or is not mapped any more.
fn is_absent(e: &io::Error) -> bool {
    const EIO: i32 = 5;
    const EFAULT: i32 = 14;
    matches!(e.raw_os_error(), Some(EIO | EFAULT))
}

fn failed(pid: u32, what: &'static str, source: io::Error) -> EstimateError {
    const ESRCH: i32 = 3;
    match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::UnexpectedEof => EstimateError::Gone { pid },
        io::ErrorKind::PermissionDenied => EstimateError::Refused { pid, source },
        _ if source.raw_os_error() == Some(ESRCH) => EstimateError::Gone { pid },
        _ => EstimateError::Read { pid, what, source },
    }
}

#[cfg(test)]
#[path = "process_tests.rs"]
mod tests;
