//! CPU-bound programs that use no device and hardly the kernel, for throughput: sorting, compressing,
//! a stencil over a grid of floating point, a hash table, a search with backtracking. All are
//! deterministic: each must give the same in every round, or the machine has lost something.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::time::Instant;

use crate::args::Args;
use crate::page::{Random, mix};
use crate::report::{self, Progress};

const NAME: &str = "compute";

type Program = fn(input: &[u64]) -> u64;

const PROGRAMS: [(&str, Program); 5] = [
    ("sort", sort),
    ("compress", compress),
    ("stencil", stencil),
    ("table", table),
    ("queens", queens),
];

pub fn run(mut args: Args) -> Result<(), String> {
    let mb = args.at_least("mb", 8u64, 1)?;
    let limit = args.seconds("seconds", 0.0)?;
    let seed = args.number("seed", 1u64)?;
    let every = args.seconds("every", 3.0)?;
    args.done()?;

    let input = input(mb, seed);
    let expected = PROGRAMS.map(|(_, program)| program(&input));
    let mut progress = Progress::new(NAME).every(every);
    let begin = Instant::now();
    while limit.is_zero() || begin.elapsed() < limit {
        for ((name, program), want) in PROGRAMS.iter().zip(expected) {
            let got = program(&input);
            if got != want {
                let what = format!("{name} gave {got:#018x} instead of {want:#018x}");
                return Err(report::corrupt(NAME, &what));
            }
            progress.checks += 1;
        }
        progress.passes += 1;
        let rate = progress.passes as f64 / begin.elapsed().as_secs_f64();
        progress.tick(|o| o.num("rounds_per_s", rate));
    }
    // Whole rounds over the time that they took, the last one's included.
    let rate = progress.passes as f64 / begin.elapsed().as_secs_f64();
    progress.now("done", |o| o.num("rounds_per_s", rate));
    Ok(())
}

/// Numbers of which half repeat, for compression to find something.
fn input(mb: u64, seed: u64) -> Vec<u64> {
    let mut random = Random(seed);
    (0..mb << 17).map(|n| if n >> 4 & 1 == 0 { n / 64 } else { random.below(1 << 20) }).collect()
}

/// A quarter of the input, in order.
fn sort(input: &[u64]) -> u64 {
    let mut values: Vec<u64> = input.iter().step_by(4).map(|v| mix(*v)).collect();
    values.sort_unstable();
    values.iter().step_by(97).fold(0, |sum, v| sum.rotate_left(5) ^ v)
}

/// Matches of at least four bytes in the last 64 KiB, found through a table of where the last of
/// each kind was.
fn compress(input: &[u64]) -> u64 {
    let bytes: Vec<u8> = input.iter().take(1 << 15).flat_map(|v| v.to_le_bytes()).collect();
    let mut last = vec![0u32; 1 << 14];
    let (mut at, mut out, mut sum) = (0, 0u64, 0u64);
    while at + 4 <= bytes.len() {
        let word = u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let slot = (word.wrapping_mul(0x9e37_79b1) >> 18) as usize;
        let from = last[slot] as usize;
        last[slot] = at as u32;
        let ahead = bytes[at..].iter().zip(&bytes[from..at]);
        let length = ahead.take_while(|(a, b)| a == b).count();
        if length >= 4 && at - from < 1 << 16 {
            sum = sum.rotate_left(7) ^ ((at - from) << 16 | length) as u64;
            at += length;
            out += 3;
        } else {
            sum = sum.rotate_left(3) ^ u64::from(bytes[at]);
            at += 1;
            out += 1;
        }
    }
    mix(sum ^ out)
}

/// Relaxation on a square grid.
fn stencil(input: &[u64]) -> u64 {
    const SIDE: usize = 256;
    let mut grid: Vec<f64> = input.iter().cycle().take(SIDE * SIDE).map(|v| *v as f64).collect();
    let mut next = grid.clone();
    for _ in 0..4 {
        for y in 1..SIDE - 1 {
            for x in 1..SIDE - 1 {
                let at = y * SIDE + x;
                let sum = grid[at - 1] + grid[at + 1] + grid[at - SIDE] + grid[at + SIDE];
                next[at] = 0.25 * sum + 0.125 * grid[at];
            }
        }
        std::mem::swap(&mut grid, &mut next);
    }
    grid.iter().fold(0, |sum: u64, v| sum.rotate_left(1) ^ v.to_bits())
}

/// std's own hasher is seeded anew in each process.
#[derive(Default)]
struct Mixer(u64);

impl Hasher for Mixer {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|b| self.0 = mix(self.0 ^ u64::from(*b)));
    }
    fn write_u64(&mut self, value: u64) {
        self.0 = mix(self.0 ^ value);
    }
}

/// How often each value is there.
fn table(input: &[u64]) -> u64 {
    let mut counts: HashMap<u64, u32, BuildHasherDefault<Mixer>> = HashMap::default();
    for value in input.iter().step_by(16) {
        *counts.entry(*value).or_default() += 1;
    }
    // The order of a table's entries is nobody's business.
    counts.iter().fold(0, |sum: u64, (v, n)| sum.wrapping_add(mix(*v).wrapping_mul(u64::from(*n))))
}

/// Ways to place nine queens, which is the same whatever the input.
fn queens(_: &[u64]) -> u64 {
    fn place(free: u32, left: u32, right: u32) -> u64 {
        let mut open = free & !(left | right);
        let mut found = u64::from(free == 0);
        while open != 0 {
            let bit = open & open.wrapping_neg();
            open ^= bit;
            found += place(free ^ bit, (left | bit) << 1, (right | bit) >> 1);
        }
        found
    }
    place(0x1ff, 0, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_give_the_same_for_the_same_and_another_for_another() {
        let (small, other) = (input(1, 1), input(1, 2));
        for (name, program) in PROGRAMS {
            assert_eq!(program(&small), program(&input(1, 1)), "{name}");
            if name != "queens" {
                assert_ne!(program(&small), program(&other), "{name}");
            }
        }
        assert_eq!(queens(&small), 352);
    }

    #[test]
    fn rounds_are_counted_and_checked() {
        let words = ["--mb", "1", "--seconds", "0.3"].map(str::to_owned).to_vec();
        run(Args::parse(words).unwrap()).unwrap();
    }
}
