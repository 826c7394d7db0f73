//! Which page goes. Pluggable; random by default, because a hypervisor's knowledge of a guest's
//! pages is poor and random choice cannot be in resonance with the guest's own replacement
//! (OSDI'02 s.3.4).

use ballast_units::{Pages, Ppn};

/// Proposes pages to evict. Proposals need not be resident: the caller asks again.
pub trait Replacement: Send {
    fn propose(&mut self, size: Pages) -> Ppn;
}

/// Uniformly random pages.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    pub fn seeded(seed: u64) -> Random {
        Random { state: seed }
    }

    /// SplitMix64 (Steele, Lea, Flood 2014): full period, and every seed is a good one.
    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
}

impl Replacement for Random {
    fn propose(&mut self, size: Pages) -> Ppn {
        // Multiply-shift: a bias below size / 2^64.
        Ppn(((u128::from(self.next()) * u128::from(size.0)) >> 64) as u64)
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn proposals_are_uniform_and_in_range() {
        let mut random = Random::seeded(7);
        let mut seen = [0u32; 100];
        for _ in 0..100_000 {
            seen[random.propose(Pages(100)).index()] += 1;
        }
        // Binomial(100000, 1/100): sigma 31.5; six sigma.
        assert!(seen.iter().all(|&n| (811..=1189).contains(&n)), "{seen:?}");
    }
}
