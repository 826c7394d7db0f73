//! What a balloon took in vain: pages that others share, and known zeros, which free nothing.
//!
//! The pager's books have no such pages: they stay as they are, mapped or not, until their guest writes to them. What a
//! balloon holds by QEMU's word, less what the pager has as given up at that moment, is what is in vain while the balloon rests, as
//! far as there are pages that are passed over when they are given up. When it is let down, the difference falls at once, and rises
//! again as the guest uses what it got; so that a fall is believed slowly.

use std::time::Duration;

use ballast_units::Pages;

/// Of a fall that goes on, all but a third is believed after so long.
const BELIEVED: Duration = Duration::from_secs(15);

/// Follows one VM's balloon.
#[derive(Clone, Copy, Debug, Default)]
pub struct InVain {
    pages: f64,
    /// Monotonic time of the last step.
    at: Duration,
}

impl InVain {
    /// What the balloon holds in vain, where the pager does not have `unseen` of its pages as given up (it may have others, that the
    /// guest reported as free), and no more than `most` would stay as they are. `now` is the monotonic time since any fixed moment.
    pub fn step(&mut self, now: Duration, unseen: Pages, most: Pages) -> Pages {
        let seen = unseen.min(most).0 as f64;
        let passed = now.saturating_sub(self.at).as_secs_f64();
        let kept = (-passed / BELIEVED.as_secs_f64()).exp();
        self.pages = (seen + (self.pages - seen).max(0.0) * kept).min(most.0 as f64);
        self.at = now;
        Pages(self.pages as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    const MANY: Pages = Pages(700);

    #[test]
    fn what_is_let_down_and_not_yet_used_is_not_taken_for_freed() {
        let mut balloon = InVain::default();
        // Of 2,000 pages 600 are shared.
        assert_eq!(balloon.step(at(1), Pages(600), MANY), Pages(600));
        // 100 are given back, and lie untouched.
        let soon = balloon.step(at(2), Pages(500), MANY);
        assert!(soon > Pages(590) && soon <= Pages(600), "{soon:?}");
        // They are used.
        assert!(balloon.step(at(3), Pages(600), MANY) >= Pages(600));
        // What is gone from it for good is believed in the end, and never is it more than can be.
        assert!(balloon.step(at(150), Pages(0), MANY) < Pages(2));
        assert_eq!(balloon.step(at(151), Pages(1_000), MANY), MANY);
        assert_eq!(balloon.step(at(152), Pages(0), Pages(10)), Pages(10));
        assert_eq!(balloon.step(at(153), Pages(0), Pages(0)), Pages(0));
    }

    #[test]
    fn more_is_believed_at_once() {
        let mut balloon = InVain::default();
        balloon.step(at(9), Pages(10), MANY);
        // A clock that was set back makes nothing of it.
        assert_eq!(balloon.step(at(3), Pages(410), MANY), Pages(410));
    }
}
