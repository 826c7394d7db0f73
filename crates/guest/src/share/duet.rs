//! Pages that several threads write at once, each its own words of them: on a guest with more than
//! one processor, two first writes to one shared page meet.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::memory::Mapping;
use crate::page::{PAGE, WORDS, mix};

/// Different values that a thread writes: few, so that pages have twins.
const TUNES: u8 = 3;

pub struct Duet {
    mapping: Mapping,
    voices: usize,
}

// SAFETY: after new() the mapping is only ever accessed as atomics, through word().
unsafe impl Sync for Duet {}

impl Duet {
    pub fn new(pages: usize, voices: usize) -> Result<Duet, String> {
        Ok(Duet { mapping: Mapping::new(pages)?, voices: voices.max(1) })
    }

    pub fn pages(&self) -> usize {
        self.mapping.pages()
    }

    fn word(&self, page: usize, at: usize) -> &AtomicU64 {
        assert!(page < self.pages() && at < WORDS, "word {at} of page {page}");
        let base: *mut u8 = self.mapping.base();
        // SAFETY: inside the mapping (asserted), aligned, zeroed by the kernel, lives as long as self;
        // nobody makes a plain reference to it.
        unsafe { AtomicU64::from_ptr(base.add(page * PAGE + at * 8).cast()) }
    }
}

/// One thread's words of all pages, and what it wrote to them last.
pub struct Voice<'a> {
    duet: &'a Duet,
    voice: usize,
    tunes: Vec<u8>,
}

impl<'a> Voice<'a> {
    /// `voice` counts from 0 to the duet's voices.
    pub fn new(duet: &'a Duet, voice: usize) -> Voice<'a> {
        Voice { duet, voice, tunes: vec![0; duet.pages()] }
    }

    fn words(&self) -> impl Iterator<Item = usize> + use<> {
        (self.voice..WORDS).step_by(self.duet.voices)
    }

    /// Tune 0 is what was never written.
    fn note(&self, tune: u8, at: usize) -> u64 {
        if tune == 0 { 0 } else { mix(u64::from(tune) << 32 | at as u64) }
    }

    /// Writes this thread's words of the page: all of them.
    pub fn write(&mut self, page: usize) {
        let tune = self.tunes[page] % TUNES + 1;
        self.tunes[page] = tune;
        for at in self.words() {
            self.duet.word(page, at).store(self.note(tune, at), Ordering::Relaxed);
        }
    }

    pub fn verify(&self, page: usize) -> Result<(), String> {
        let tune = self.tunes[page];
        for at in self.words() {
            let (got, want) =
                (self.duet.word(page, at).load(Ordering::Relaxed), self.note(tune, at));
            if got != want {
                return Err(format!(
                    "page {page} of the common ones: thread {} wrote {want:#018x} to word {at} and \
                     reads {got:#018x}",
                    self.voice
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn voices_do_not_disturb_one_another() {
        let duet = Duet::new(4, 3).unwrap();
        std::thread::scope(|scope| {
            for v in 0..3 {
                let mut voice = Voice::new(&duet, v);
                scope.spawn(move || {
                    for round in 0..1000 {
                        voice.write(round % 4);
                        (0..4).for_each(|page| voice.verify(page).unwrap());
                    }
                });
            }
        });
    }

    #[test]
    fn a_word_that_another_wrote_is_found() {
        let duet = Duet::new(1, 2).unwrap();
        let mut voice = Voice::new(&duet, 1);
        voice.write(0);
        voice.verify(0).unwrap();
        duet.word(0, 2).store(5, Ordering::Relaxed);
        voice.verify(0).unwrap();
        duet.word(0, 3).store(5, Ordering::Relaxed);
        assert!(voice.verify(0).unwrap_err().contains("word 3"));
    }
}
