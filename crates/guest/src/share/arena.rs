//! Memory in chunks, with a table that says what every page of it must hold.

use crate::memory::Mapping;

use super::content::{Contents, Expected, Poke};

/// Pages of one mapping.
pub const CHUNK: usize = 256;

struct Chunk {
    mapping: Mapping,
    expected: Vec<Expected>,
}

impl Chunk {
    fn new() -> Result<Chunk, String> {
        Ok(Chunk { mapping: Mapping::new(CHUNK)?, expected: vec![Expected::default(); CHUNK] })
    }
}

/// Pages are numbered through all chunks.
pub struct Arena {
    chunks: Vec<Chunk>,
    contents: Contents,
}

impl Arena {
    pub fn new(chunks: usize, contents: Contents) -> Result<Arena, String> {
        let chunks = (0..chunks.max(1)).map(|_| Chunk::new()).collect::<Result<_, _>>()?;
        Ok(Arena { chunks, contents })
    }

    pub fn chunks(&self) -> usize {
        self.chunks.len()
    }

    pub fn verify(&self, page: usize) -> Result<(), String> {
        let (chunk, at) = (&self.chunks[page / CHUNK], page % CHUNK);
        self.contents
            .verify(chunk.expected[at], chunk.mapping.page(at))
            .map_err(|what| format!("page {page}: {what}"))
    }

    /// Rewrites the whole page.
    pub fn write(&mut self, page: usize, content: u8) {
        let (chunk, at) = (&mut self.chunks[page / CHUNK], page % CHUNK);
        chunk.expected[at] = Expected { content, poke: None };
        self.contents.fill(content, chunk.mapping.page_mut(at));
    }

    /// Writes a single byte. A page that was poked before gets its old byte back, and so its twins.
    pub fn poke(&mut self, page: usize, poke: Poke) {
        let (chunk, at) = (&mut self.chunks[page / CHUNK], page % CHUNK);
        let expected = &mut chunk.expected[at];
        let poke = match expected.poke.take() {
            Some(before) => before,
            None => *expected.poke.insert(poke),
        };
        poke.apply(chunk.mapping.page_mut(at));
    }

    /// Copies what the page holds, not what it should hold.
    pub fn copy(&mut self, from: usize, to: usize) {
        let source = &self.chunks[from / CHUNK];
        let (content, expected) =
            (*source.mapping.page(from % CHUNK), source.expected[from % CHUNK]);
        let target = &mut self.chunks[to / CHUNK];
        *target.mapping.page_mut(to % CHUNK) = content;
        target.expected[to % CHUNK] = expected;
    }

    /// Gives pages of one chunk back to the guest's kernel: they read as zeros from now on.
    pub fn free(&mut self, from: usize, count: usize) -> Result<(), String> {
        let (chunk, at) = (&mut self.chunks[from / CHUNK], from % CHUNK);
        chunk.mapping.discard(at, count)?;
        chunk.expected[at..at + count].fill(Expected::default());
        Ok(())
    }

    /// Unmaps a chunk and maps another in its place.
    pub fn remap(&mut self, chunk: usize) -> Result<(), String> {
        // The new one first: its address differs then, and other pages of the guest stand behind it.
        self.chunks[chunk] = Chunk::new()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SET: Contents = Contents { seed: 9, count: 6 };

    #[test]
    fn what_is_done_to_pages_is_what_they_are_checked_for() {
        let mut a = Arena::new(2, SET).unwrap();
        let poke = Poke { at: 1000, xor: 7 };
        for page in 0..2 * CHUNK {
            a.verify(page).unwrap();
            a.write(page, (page % 6) as u8);
        }
        a.poke(3, poke);
        a.copy(3, CHUNK + 4);
        a.poke(3, Poke { at: 5, xor: 1 });
        a.free(10, 20).unwrap();
        for page in 0..2 * CHUNK {
            a.verify(page).unwrap();
        }
        a.remap(1).unwrap();
        for page in 0..2 * CHUNK {
            a.verify(page).unwrap();
        }
    }

    #[test]
    fn a_lost_and_a_leaked_write_are_found() {
        let mut a = Arena::new(1, SET).unwrap();
        a.write(0, 4);
        a.write(1, 4);
        // Lost: the table says that it was poked.
        a.poke(0, Poke { at: 9, xor: 1 });
        a.chunks[0].mapping.page_mut(0)[1] ^= 1 << 8;
        assert!(a.verify(0).unwrap_err().contains("content 4 found"));
        // Leaked: the twin has changed too.
        a.chunks[0].mapping.page_mut(1)[1] ^= 1 << 8;
        assert!(a.verify(1).unwrap_err().contains("word"));
    }
}
