//! The memory of a process that a benchmark is about: private, or a shared file as QEMU's RAM.

use anyhow::{Context, Result, ensure};

/// Of a page, 8 bytes each.
pub const WORDS: usize = 512;
/// Bytes.
pub const PAGE: usize = WORDS * 8;

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

    /// Gives up the pages from `first` on, one by one, over and over, in a thread of its own until the process ends. What
    /// they hold is lost: nobody reads or writes them from now on.
    pub fn give_up_from(&self, first: usize) -> Result<()> {
        ensure!(first < self.pages, "there is none to be given up");
        let (base, pages, advice) = (self.base.expose_provenance(), self.pages, self.gives_up);
        let give = move || {
            for page in (first..pages).cycle() {
                let at = std::ptr::with_exposed_provenance_mut(base + page * PAGE);
                // SAFETY: a page of the mapping, which stays, and to which no reference is made any more.
                if unsafe { libc::madvise(at, PAGE, advice) } != 0 {
                    // Seen as a thread that is not there.
                    return;
                }
            }
        };
        std::thread::Builder::new().name("gives".into()).spawn(give)?;
        Ok(())
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
