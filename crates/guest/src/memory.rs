//! Anonymous memory, counted in pages, each with the generation it was last written in.

use crate::page::{Mark, PAGE, Page};

/// A private anonymous mapping.
pub struct Mapping {
    base: *mut Page,
    pages: usize,
}

// SAFETY: the mapping belongs to this value alone, like the heap block of a Box.
unsafe impl Send for Mapping {}

impl Mapping {
    pub fn new(pages: usize) -> Result<Mapping, String> {
        let bytes = pages.checked_mul(PAGE).filter(|b| *b > 0).ok_or("no memory asked for")?;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches nothing
        // that exists.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            let error = std::io::Error::last_os_error();
            return Err(format!("mmap of {} MiB: {error}", bytes >> 20));
        }
        Ok(Mapping { base: base.cast(), pages })
    }

    pub fn pages(&self) -> usize {
        self.pages
    }

    /// For those who hold no references into it.
    pub fn base(&self) -> *mut u8 {
        self.base.cast()
    }

    pub fn page(&self, index: usize) -> &Page {
        assert!(index < self.pages, "page {index} of {}", self.pages);
        // SAFETY: inside the mapping (asserted); it is page-aligned, readable, initialized (the
        // kernel gives zeros), and &self keeps out writers.
        unsafe { &*self.base.add(index) }
    }

    pub fn page_mut(&mut self, index: usize) -> &mut Page {
        assert!(index < self.pages, "page {index} of {}", self.pages);
        // SAFETY: as in page(), and &mut self keeps out all others.
        unsafe { &mut *self.base.add(index) }
    }

    pub fn discard(&mut self, from: usize, count: usize) -> Result<(), String> {
        assert!(from + count <= self.pages, "pages {from}+{count} of {}", self.pages);
        // SAFETY: inside the mapping (asserted); &mut self means that no reference into it lives.
        let rc =
            unsafe { libc::madvise(self.base.add(from).cast(), count * PAGE, libc::MADV_DONTNEED) };
        if rc == 0 {
            return Ok(());
        }
        Err(format!("madvise(DONTNEED): {}", std::io::Error::last_os_error()))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in new() with this size, and no reference into it survives
        // its owner.
        unsafe { libc::munmap(self.base.cast(), self.pages * PAGE) };
    }
}

/// Checked memory. Generation 0 stands for a page that was not written: it must be zero.
pub struct Memory {
    mapping: Mapping,
    generations: Vec<u32>,
    seed: u64,
    content: Content,
}

#[derive(Clone, Copy, PartialEq)]
enum Content {
    /// Like no other page; one in three compresses ([`Mark::fill`]).
    Random,
    /// See [`Mark::fill_rows`].
    Rows,
}

impl Memory {
    pub fn new(mb: u64, seed: u64) -> Result<Memory, String> {
        Memory::of(Content::Random, mb, seed)
    }

    /// Its pages can be compressed to a little under half.
    pub fn of_rows(mb: u64, seed: u64) -> Result<Memory, String> {
        Memory::of(Content::Rows, mb, seed)
    }

    fn of(content: Content, mb: u64, seed: u64) -> Result<Memory, String> {
        let pages = usize::try_from(mb << 8).map_err(|_| format!("{mb} MB is too much"))?;
        Ok(Memory { mapping: Mapping::new(pages)?, generations: vec![0; pages], seed, content })
    }

    pub fn pages(&self) -> usize {
        self.mapping.pages
    }

    fn mark(&self, index: usize) -> Mark {
        Mark { seed: self.seed, index: index as u64, generation: self.generations[index] }
    }

    /// Writes the whole page in a new generation.
    pub fn write(&mut self, index: usize) {
        self.generations[index] = self.generations[index].wrapping_add(1).max(1);
        let mark = self.mark(index);
        let page = self.mapping.page_mut(index);
        match self.content {
            Content::Random => mark.fill(page),
            Content::Rows => mark.fill_rows(page),
        }
    }

    /// Checks the whole page; the error tells what is wrong with it.
    pub fn verify(&self, index: usize) -> Result<(), String> {
        let page = self.mapping.page(index);
        let wrong = match self.generations[index] {
            0 => page
                .iter()
                .position(|w| *w != 0)
                .map(|at| format!("page {index} was never written, but word {at} is not zero")),
            _ if self.content == Content::Rows => self.mark(index).verify_rows(page),
            _ => self.mark(index).verify(page),
        };
        wrong.map_or(Ok(()), Err)
    }

    /// Gives the pages back to the guest's kernel; from now on they must read as zeros.
    pub fn free(&mut self, from: usize, count: usize) -> Result<(), String> {
        self.mapping.discard(from, count)?;
        self.generations[from..from + count].fill(0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_rewritten_and_freed_pages_verify() {
        for content in [Content::Random, Content::Rows] {
            let mut m = Memory::of(content, 1, 5).unwrap();
            assert_eq!(m.pages(), 256);
            for i in 0..m.pages() {
                m.verify(i).unwrap();
                m.write(i);
            }
            m.write(3);
            m.free(10, 20).unwrap();
            for i in 0..m.pages() {
                m.verify(i).unwrap();
            }
        }
    }

    #[test]
    fn damage_is_found() {
        let mut m = Memory::new(1, 5).unwrap();
        m.write(3);
        m.mapping.page_mut(3)[100] ^= 1;
        assert!(m.verify(3).unwrap_err().contains("word 100"));
        m.mapping.page_mut(4)[5] = 1;
        assert!(m.verify(4).unwrap_err().contains("never written"));
    }

    #[test]
    fn no_memory_is_refused() {
        assert!(Memory::new(0, 1).is_err());
    }
}
