//! An array whose memory follows what is in it: 4 KiB chunks of 256 entries, there only while one
//! of them is not empty.

use ballast_units::Bytes;

/// An entry of [`Chunks`].
pub(super) trait Slot: Copy {
    const EMPTY: Self;
    fn is_empty(&self) -> bool;
}

/// Entries per chunk.
pub(super) const CHUNK: usize = 256;

/// Invariants (`check`): `used[c]` counts the entries of chunk `c` that are not empty; chunk `c`
/// exists exactly when that is not zero; the last one exists.
pub(super) struct Chunks<T> {
    chunks: Vec<Option<Box<[T; CHUNK]>>>,
    used: Vec<u16>,
    /// Chunks that exist.
    there: usize,
}

fn split(i: u32) -> (usize, usize) {
    (i as usize / CHUNK, i as usize % CHUNK)
}

impl<T: Slot> Chunks<T> {
    pub const fn new() -> Chunks<T> {
        Chunks { chunks: Vec::new(), used: Vec::new(), there: 0 }
    }

    /// Entry `i`; an empty one where there is no chunk.
    pub fn get(&self, i: u32) -> T {
        let (c, at) = split(i);
        match self.chunks.get(c) {
            Some(Some(chunk)) => chunk[at],
            _ => T::EMPTY,
        }
    }

    /// To change an entry that is not empty, and will not be.
    pub fn get_mut(&mut self, i: u32) -> Option<&mut T> {
        let (c, at) = split(i);
        self.chunks.get_mut(c)?.as_mut().map(|chunk| &mut chunk[at])
    }

    /// Sets entry `i`. Its chunk comes with the first entry that is not empty, and goes with the last.
    pub fn put(&mut self, i: u32, entry: T) {
        let (c, at) = split(i);
        if c >= self.chunks.len() {
            if entry.is_empty() {
                return;
            }
            self.chunks.resize_with(c + 1, || None);
            self.used.resize(c + 1, 0);
        }
        let slot = &mut self.chunks[c];
        if slot.is_none() {
            if entry.is_empty() {
                return;
            }
            self.there += 1;
        }
        let chunk = slot.get_or_insert_with(|| Box::new([T::EMPTY; CHUNK]));
        let was_empty = std::mem::replace(&mut chunk[at], entry).is_empty();
        match (was_empty, entry.is_empty()) {
            (true, false) => self.used[c] += 1,
            (false, true) => {
                self.used[c] -= 1;
                if self.used[c] == 0 {
                    self.drop_chunk(c);
                }
            }
            _ => {}
        }
    }

    fn drop_chunk(&mut self, c: usize) {
        self.chunks[c] = None;
        self.there -= 1;
        if c + 1 < self.chunks.len() {
            return;
        }
        let len = self.used.iter().rposition(|&n| n > 0).map_or(0, |last| last + 1);
        self.chunks.truncate(len);
        self.used.truncate(len);
        if self.chunks.capacity() / 4 > len {
            self.chunks.shrink_to(len * 2);
            self.used.shrink_to(len * 2);
        }
    }

    /// The first entry of `[from, to)` that is not empty.
    pub fn next_in(&self, from: u32, to: u32) -> Option<(u32, T)> {
        let (mut c, mut at) = split(from);
        while let Some(chunk) = self.chunks.get(c) {
            let chunk = chunk.as_deref().map_or(&[][..], |chunk| &chunk[at..]);
            if let Some(n) = chunk.iter().position(|entry| !entry.is_empty()) {
                let i = (c * CHUNK + at + n) as u32;
                return (i < to).then_some((i, chunk[n]));
            }
            (c, at) = (c + 1, 0);
            if c * CHUNK >= to as usize {
                return None;
            }
        }
        None
    }

    /// Entries from `from` on that are not empty, by number.
    pub fn all_from(&self, from: u32) -> impl Iterator<Item = (u32, T)> + '_ {
        let mut from = from;
        std::iter::from_fn(move || {
            let found = self.next_in(from, u32::MAX)?;
            from = found.0 + 1;
            Some(found)
        })
    }

    /// Heap memory, as asked of the allocator.
    pub fn memory(&self) -> Bytes {
        let directory = self.chunks.capacity() * size_of::<Option<Box<[T; CHUNK]>>>()
            + self.used.capacity() * size_of::<u16>();
        Bytes((self.there * size_of::<[T; CHUNK]>() + directory) as u64)
    }

    /// What must hold.
    ///
    /// # Errors
    /// What does not.
    pub fn check(&self) -> Result<(), String> {
        if self.used.len() != self.chunks.len() || self.used.last() == Some(&0) {
            return Err(format!("{} chunks, {} counts", self.chunks.len(), self.used.len()));
        }
        let mut there = 0;
        for (c, (chunk, used)) in self.chunks.iter().zip(&self.used).enumerate() {
            let found = match chunk {
                Some(chunk) => chunk.iter().filter(|entry| !entry.is_empty()).count(),
                None => 0,
            };
            there += usize::from(chunk.is_some());
            if found != usize::from(*used) || chunk.is_some() != (found > 0) {
                return Err(format!(
                    "chunk {c} (there: {}): {found} entries, {used} booked",
                    chunk.is_some()
                ));
            }
        }
        if there != self.there {
            return Err(format!("{there} chunks there, {} booked", self.there));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Slot for u64 {
        const EMPTY: u64 = 0;
        fn is_empty(&self) -> bool {
            *self == 0
        }
    }

    #[test]
    fn chunks_come_with_their_first_entry_and_go_with_their_last() {
        let mut chunks = Chunks::<u64>::new();
        assert_eq!(chunks.memory(), Bytes(0));
        for i in [0, 255, 256, 100_000] {
            chunks.put(i, u64::from(i) + 1);
            chunks.check().unwrap();
        }
        assert_eq!(chunks.there, 3);
        assert_eq!((chunks.get(255), chunks.get(254), chunks.get(4_000_000_000)), (256, 0, 0));
        assert_eq!(chunks.all_from(0).map(|(i, _)| i).collect::<Vec<_>>(), [0, 255, 256, 100_000]);
        assert_eq!(chunks.next_in(1, 256), Some((255, 256)));
        assert_eq!(chunks.next_in(1, 255), None);
        assert_eq!(chunks.next_in(256, 256), None);
        assert_eq!(chunks.next_in(257, 100_000), None);
        assert_eq!(chunks.next_in(257, 100_001), Some((100_000, 100_001)));
        assert_eq!(chunks.next_in(200_000, 300_000), None);
        for i in [100_000, 0, 256, 255, 255, 3_000_000] {
            chunks.put(i, 0);
            chunks.check().unwrap();
        }
        assert_eq!(chunks.there, 0);
        assert_eq!(chunks.memory(), Bytes(0), "the directory goes too");
    }

    /// What it says it takes is its chunks, and a pointer and a count for each place of the directory.
    #[test]
    fn memory_is_that_of_chunks_and_directory() {
        let mut chunks = Chunks::<u64>::new();
        chunks.put((9 * CHUNK) as u32, 1);
        chunks.put(0, 1);
        let (places, counts) = (chunks.chunks.capacity(), chunks.used.capacity());
        assert!(places >= 10 && counts >= 10);
        assert_eq!(chunks.memory(), Bytes((2 * CHUNK * 8 + 8 * places + 2 * counts) as u64));
    }

    /// Memory for the directory is given back when three quarters of it are of no use.
    #[test]
    fn the_directory_shrinks_with_the_chunks() {
        let mut chunks = Chunks::<u64>::new();
        let first = |c: usize| (c * CHUNK) as u32;
        (0..64).for_each(|c| chunks.put(first(c), 1));
        let mut shrunk = 0;
        for len in (0..64).rev() {
            let before = chunks.chunks.capacity();
            chunks.put(first(len), 0);
            let expected = if before >= (len + 1) * 4 { len * 2 } else { before };
            let after = [chunks.chunks.capacity(), chunks.used.capacity()];
            assert_eq!(after, [expected; 2], "{len} chunks");
            shrunk += usize::from(expected < before);
        }
        assert!(shrunk >= 3, "{shrunk}");
    }

    #[test]
    fn damage_is_found() {
        type Damage = fn(&mut Chunks<u64>);
        let damages: [Damage; 7] = [
            |c| c.used[1] = 2,
            |c| c.there = 2,
            |c| c.used.truncate(2),
            |c| c.chunks[1] = None,
            |c| (c.chunks[1], c.used[1]) = (None, 0),
            |c| (c.chunks[1], c.used[1]) = (Some(Box::new([0; CHUNK])), 0),
            |c| {
                c.chunks.push(None);
                c.used.push(0);
            },
        ];
        for (i, damage) in damages.iter().enumerate() {
            let mut chunks = Chunks::<u64>::new();
            [0, 300, 600].into_iter().for_each(|at| chunks.put(at, 1));
            chunks.check().unwrap();
            damage(&mut chunks);
            assert!(chunks.check().is_err(), "damage {i}");
        }
    }
}
