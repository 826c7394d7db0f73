// A deterministic mutator for the bounded runs of ordinary tests: the corpus, then changes of it.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

use std::path::Path;

/// Seed of the mutations: BALLAST_FUZZ_SEED, or the same each time.
pub fn seed() -> u64 {
    let given = std::env::var("BALLAST_FUZZ_SEED").ok();
    given.map_or(0x5eed, |text| text.parse().expect("BALLAST_FUZZ_SEED is not a number"))
}

/// Calls `check` with every file of a corpus, then with `n` mutations of them.
pub fn run(corpus: &str, n: u64, check: impl Fn(&[u8])) {
    let seed = seed();
    println!("{corpus}: {n} mutations, BALLAST_FUZZ_SEED={seed}");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(corpus);
    let mut paths: Vec<_> = std::fs::read_dir(&folder)
        .unwrap_or_else(|e| panic!("{}: {e}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    let seeds: Vec<Vec<u8>> = paths.iter().map(|path| std::fs::read(path).unwrap()).collect();
    assert!(seeds.len() > 2, "the corpus is not there");
    seeds.iter().for_each(|bytes| check(bytes));
    let mut random = Random(seed | 1);
    for _ in 0..n {
        let mut bytes = random.of(&seeds).clone();
        for _ in 0..1 + random.below(4) {
            random.mutate(&mut bytes, &seeds);
        }
        check(&bytes);
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
    fn of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }

    fn mutate(&mut self, bytes: &mut Vec<u8>, seeds: &[Vec<u8>]) {
        // Mostly near the beginning, where the fields are.
        let reach = if self.below(3) == 0 { bytes.len() } else { bytes.len().min(160) };
        let at = self.below(reach);
        match self.below(9) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << self.below(8),
            1 if !bytes.is_empty() => bytes[at] = *self.of(&[0, 1, 0x7f, 0x80, 0xff, b'"', b'\n']),
            2 => bytes.truncate(at),
            3 => bytes.insert(at.min(bytes.len()), self.next() as u8),
            4 if !bytes.is_empty() => drop(bytes.remove(at)),
            5 => {
                let width = *self.of(&[2usize, 4, 8]);
                let huge = *self.of(&[0, 1, u64::MAX, 1 << 63, 1 << 31, 0xffff, 257, 4096]);
                if let Some(field) = bytes.get_mut(at / width * width..at / width * width + width) {
                    field.copy_from_slice(&huge.to_le_bytes()[..width]);
                }
            }
            6 => {
                // The head of this one, the tail of another.
                let other = self.of(seeds);
                let from = self.below(other.len());
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from..]);
            }
            7 => {
                let end = (at + self.below(64)).min(bytes.len());
                let piece = bytes.get(at..end).unwrap_or_default().to_vec();
                bytes.splice(at.min(bytes.len())..at.min(bytes.len()), piece);
            }
            _ => bytes.extend((0..self.below(40)).map(|_| self.next() as u8).collect::<Vec<_>>()),
        }
    }
}
