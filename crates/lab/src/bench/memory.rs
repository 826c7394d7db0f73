//! The memory of a process that a benchmark is about: private, or a shared file as QEMU's RAM.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

/// Of a page, 8 bytes each.
pub const WORDS: usize = 512;
/// Bytes.
pub const PAGE: usize = WORDS * 8;

/// Pages that a balloon's queue holds, and how long a thread rests that has given up so many.
const QUEUE: u64 = 256;
const REST: Duration = Duration::from_millis(2);

/// A thread that gives up pages, until this is dropped.
pub struct Giving {
    given: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Giving {
    /// Pages given up so far.
    pub fn given(&self) -> u64 {
        self.given.load(Ordering::Relaxed)
    }
}

impl Drop for Giving {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        // It cannot panic.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Mapped until the process ends.
pub struct Memory {
    base: *mut [u64; WORDS],
    pages: usize,
    /// The advice by which pages of it are freed.
    gives_up: i32,
}

impl Memory {
    /// `file`: a shared memfd. Without large pages, where it is private.
    pub fn map(pages: usize, file: bool) -> Result<Memory> {
        let bytes = pages * PAGE;
        let fd = if file { memfd(bytes)? } else { -1 };
        let flags = if file {
            libc::MAP_SHARED
        } else {
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE
        };
        // SAFETY: a new mapping at an address of the kernel's choice. (The memfd stays open, as
        // QEMU's does.)
        let base = unsafe {
            let rw = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), bytes, rw, flags, fd, 0)
        };
        if base == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error()).context("mmap");
        }
        let gives_up = if file { libc::MADV_REMOVE } else { libc::MADV_DONTNEED };
        let memory = Memory { base: base.cast(), pages, gives_up };
        if !file {
            // The kernel would have to split large pages first; that is not what is compared.
            memory.advise(libc::MADV_NOHUGEPAGE)?;
        }
        Ok(memory)
    }

    /// As many as were mapped.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// # Panics
    /// If there is no such page.
    pub fn page(&mut self, index: usize) -> &mut [u64; WORDS] {
        assert!(index < self.pages, "page {index} of {}", self.pages);
        // SAFETY: inside the mapping (asserted), aligned, initialized by the kernel, and borrowed
        // from &mut self.
        unsafe { &mut *self.base.add(index) }
    }

    /// An advice that does not change what the memory holds.
    pub fn advise(&self, advice: i32) -> Result<()> {
        // SAFETY: exactly the mapping; the callers' advices do not change what it holds.
        match unsafe { libc::madvise(self.base.cast(), self.pages * PAGE, advice) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()).context("madvise"),
        }
    }

    /// Has a thread touch the pages from `first` on and give them up, one by one, over and over: as many at a time as a
    /// balloon's queue holds, and a rest. Nobody else may use them.
    pub fn give_up_from(&self, first: usize) -> Result<Giving> {
        ensure!(first < self.pages, "there is none to be given up");
        let (base, pages, advice) = (self.base.expose_provenance(), self.pages, self.gives_up);
        let (given, over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, is_over) = (given.clone(), over.clone());
        let give = move || {
            for (n, page) in (1..).zip((first..pages).cycle()) {
                let at = std::ptr::with_exposed_provenance_mut::<u8>(base + page * PAGE);
                // SAFETY: a page of the mapping, which stays, and which nobody else uses.
                let result = unsafe {
                    at.write_volatile(1);
                    libc::madvise(at.cast(), PAGE, advice)
                };
                // Seen by who counts.
                if result != 0 || is_over.load(Ordering::Relaxed) {
                    return;
                }
                count.fetch_add(1, Ordering::Relaxed);
                if n % QUEUE == 0 {
                    std::thread::sleep(REST);
                }
            }
        };
        let thread = std::thread::Builder::new().name("gives".into()).spawn(give)?;
        Ok(Giving { given, over, thread: Some(thread) })
    }

    /// By page, whether it is in memory: no device and no manager is asked for it when it is touched.
    pub fn resident(&self) -> Result<Vec<bool>> {
        let mut flags = vec![0u8; self.pages];
        // SAFETY: exactly the mapping, and a byte for each of its pages.
        match unsafe { libc::mincore(self.base.cast(), self.pages * PAGE, flags.as_mut_ptr()) } {
            0 => Ok(flags.into_iter().map(|f| f & 1 == 1).collect()),
            _ => Err(std::io::Error::last_os_error()).context("mincore"),
        }
    }
}

fn memfd(bytes: usize) -> Result<i32> {
    // SAFETY: a NUL-ended name.
    let fd = unsafe { libc::memfd_create(c"memory".as_ptr(), libc::MFD_CLOEXEC) };
    // SAFETY: plain call on a descriptor that was just made.
    if fd < 0 || unsafe { libc::ftruncate(fd, bytes as i64) } < 0 {
        return Err(std::io::Error::last_os_error()).context("memfd");
    }
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_up_is_counted_and_the_rest_stays() {
        for file in [false, true] {
            let mut memory = Memory::map(8, file).unwrap();
            memory.page(3)[0] = 1;
            let giving = memory.give_up_from(4).unwrap();
            while giving.given() < 1_000 {
                std::thread::yield_now();
            }
            drop(giving);
            assert_eq!(memory.page(3)[0], 1);
            assert!(memory.give_up_from(8).is_err());
        }
    }

    #[test]
    fn what_was_touched_is_resident() {
        for file in [false, true] {
            let mut memory = Memory::map(8, file).unwrap();
            memory.page(3)[0] = 1;
            let resident = memory.resident().unwrap();
            let there: Vec<usize> = (0..8).filter(|n| resident[*n]).collect();
            assert_eq!(there, [3], "file: {file}");
        }
    }
}
