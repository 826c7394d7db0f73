//! Which parts of a VM's file of words have memory. A guest of a terabyte that uses a little has words
//! for a little: a part gets its memory before its first word is written, so that a tmpfs without
//! room is an error and not a SIGBUS, and a part without memory is never read through the mapping,
//! which would give it some.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::SeekFrom;

use crate::file_memory;

/// Bytes of one part: the words of 32 MiB of a guest.
pub const PART: usize = 64 << 10;

/// The parts of one file.
pub struct Parts {
    file: File,
    len: usize,
    /// One bit per part that has memory. It is set after it was given, and never taken away.
    given: Box<[AtomicU64]>,
    /// One gives at a time.
    giving: Mutex<()>,
}

impl Parts {
    /// Of an empty file, or of one that is there: a part in which anything was ever written has, or is
    /// given, all of its memory. (Memory that was given and never written counts as a hole to the file
    /// system, so it may be given again, which changes nothing.)
    ///
    /// # Errors
    /// Its holes cannot be looked up, or what it has not be given.
    pub fn of(file: File) -> std::io::Result<Parts> {
        let len = file.metadata()?.len() as usize;
        let words = len.div_ceil(PART).div_ceil(64);
        let given = (0..words).map(|_| AtomicU64::new(0)).collect();
        let parts = Parts { file, len, given, giving: Mutex::new(()) };
        let mut from = 0;
        while let Some((start, end)) = parts.data_from(from)? {
            for part in start / PART..end.div_ceil(PART) {
                parts.give(part * PART)?;
            }
            from = end;
        }
        Ok(parts)
    }

    fn end_of(&self, part: usize) -> usize {
        ((part + 1) * PART).min(self.len)
    }

    /// The next stretch of the file in which something was written, at or after `from`.
    fn data_from(&self, from: usize) -> std::io::Result<Option<(usize, usize)>> {
        let Some(start) = next_data(&self.file, from as u64)? else { return Ok(None) };
        let end = rustix::fs::seek(self.file.as_fd(), SeekFrom::Hole(start))?;
        Ok(Some((start as usize, (end as usize).min(self.len))))
    }

    fn mark(&self, part: usize) {
        self.given[part / 64].fetch_or(1 << (part % 64), Ordering::Release);
    }

    /// Whether the byte at `at` may be read and written through a mapping.
    pub fn has(&self, at: usize) -> bool {
        let part = at / PART;
        self.given[part / 64].load(Ordering::Acquire) & 1 << (part % 64) != 0
    }

    /// Gives the part with `at` its memory, if it has none.
    ///
    /// # Errors
    /// ENOSPC: the part has none.
    pub fn give(&self, at: usize) -> std::io::Result<()> {
        self.give_and(at, |_| {})
    }

    /// The same; `first` writes to the part, whose range it is told, before anybody else may.
    ///
    /// # Errors
    /// ENOSPC: the part has none, and `first` was not called.
    pub fn give_and(
        &self,
        at: usize,
        first: impl FnOnce(std::ops::Range<usize>),
    ) -> std::io::Result<()> {
        if self.has(at) {
            return Ok(());
        }
        let _turn = self.giving.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if self.has(at) {
            return Ok(());
        }
        let part = at / PART;
        let range = part * PART..self.end_of(part);
        let (start, len) = (range.start as u64, range.len() as u64);
        file_memory::allocate(&self.file, start, len)?;
        first(range);
        self.mark(part);
        Ok(())
    }

    /// The byte ranges that have memory, in order, as they are now.
    pub fn ranges(&self) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        (0..self.len.div_ceil(PART))
            .filter(|part| self.has(part * PART))
            .map(|part| part * PART..self.end_of(part))
    }

    /// Bytes that have memory.
    pub fn bytes(&self) -> usize {
        self.ranges().map(|range| range.len()).sum()
    }
}

/// Where something was written next, at or after `from`.
///
/// # Errors
/// Of lseek.
pub fn next_data(file: &File, from: u64) -> std::io::Result<Option<u64>> {
    match rustix::fs::seek(file.as_fd(), SeekFrom::Data(from)) {
        Ok(start) => Ok(Some(start)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;

    /// On a tmpfs if there is one, as in the manager: other file systems round differently.
    fn file(len: u64) -> File {
        let file = tempfile::tempfile_in("/dev/shm").or_else(|_| tempfile::tempfile()).unwrap();
        file.set_len(len).unwrap();
        file
    }

    #[test]
    fn a_part_gets_memory_once_and_the_last_is_as_long_as_the_file() {
        let len = 3 * PART + 4096;
        let parts = Parts::of(file(len as u64)).unwrap();
        assert_eq!((parts.bytes(), parts.file.metadata().unwrap().blocks()), (0, 0));
        parts.give(PART + 5).unwrap();
        parts.give(2 * PART - 1).unwrap();
        assert!(parts.has(PART) && !parts.has(PART - 1) && !parts.has(2 * PART));
        parts.give(len - 1).unwrap();
        assert_eq!(parts.ranges().collect::<Vec<_>>(), [PART..2 * PART, 3 * PART..len]);
        let kernel = parts.file.metadata().unwrap().blocks() * 512;
        assert_eq!(kernel, parts.bytes() as u64);
        assert_eq!(parts.file.metadata().unwrap().len(), len as u64);
    }

    #[test]
    fn what_was_written_is_found_again_with_all_of_its_part() {
        let file = file(8 * PART as u64);
        let parts = Parts::of(file.try_clone().unwrap()).unwrap();
        for part in [1, 2, 5] {
            parts.give(part * PART).unwrap();
        }
        file.write_at(&[1], 2 * PART as u64 - 1).unwrap();
        file.write_at(&[1], 2 * PART as u64).unwrap();
        // Whoever gave the seventh was killed over it.
        file.write_at(&[0; 4096], 7 * PART as u64).unwrap();
        let again = Parts::of(file).unwrap();
        let found: Vec<usize> = again.ranges().map(|range| range.start / PART).collect();
        assert_eq!(found, [1, 2, 7]);
        let blocks = again.file.metadata().unwrap().blocks() * 512;
        assert_eq!(blocks, 4 * PART as u64, "the fifth has memory too, and nobody knows");
        again.give(5 * PART).unwrap();
        assert_eq!(again.file.metadata().unwrap().blocks() * 512, blocks);
    }

    #[test]
    fn two_that_give_the_same_part_agree() {
        let parts = Parts::of(file(64 * PART as u64)).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..64).for_each(|part| parts.give(part * PART).unwrap()));
            }
        });
        assert_eq!(parts.bytes(), 64 * PART);
    }
}
