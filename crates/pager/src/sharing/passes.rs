//! When a VM's pages are gone through again: soon after a pass that found much, ever later after those that found
//! little, up to the operator's longest. While memory is plentiful nobody needs what would be found, so that what finds little is
//! bounded by what it takes of the processor.

use std::time::Duration;

use super::examine::Examined;

/// From the beginning of one pass to that of the next, at least.
const SHORTEST: Duration = Duration::from_millis(500);
/// The same at most, of a VM that much has come to since.
const OF_ONE_THAT_GROWS: Duration = Duration::from_secs(5);
/// That is one page of so many.
const MUCH: u64 = 64;
/// A pass found enough for the next to come sooner: one page of so many that it went over, read or not. Of those read
/// alone it would be no measure: where next to nothing is written, a few zeros among the few pages that are read would have
/// the VM gone through twice a second, and each pass protects what was not written, at a fault for the next write.
const ENOUGH: u64 = 100;
/// One that found less than one page of so many found next to nothing: there is no need to come twice for that.
const NEXT_TO_NOTHING: u64 = 500;
/// Nor does the next come before so many times what that one took of the processor: a VM costs a hundredth of a per cent
/// of a core at most while it is gone through for nothing; a thousandth while memory is plentiful.
const FOR_NOTHING: u32 = 10_000;
const FOR_NOTHING_IN_PLENTY: u32 = 100_000;
/// The same of a pass that found little, while memory is plentiful.
const FOR_LITTLE_IN_PLENTY: u32 = 10_000;

/// Once memory is not plentiful any more, what was left alone until then (large pages) is gone through as soon as what grows,
/// and not before so many times what the dearest pass of late took (half of that where another was in between): it may be
/// plentiful again, and not, every few seconds.
const FOR_WHAT_WAS_LEFT: u32 = 1_000;

/// Follows one VM.
#[derive(Debug)]
pub(crate) struct Passes {
    interval: Duration,
    /// While memory is plentiful, no less than that.
    in_plenty: Duration,
    /// The last pass left large pages alone.
    left: bool,
    /// What a pass takes of the processor: the dearest of late.
    cpu: Duration,
}

impl Default for Passes {
    fn default() -> Passes {
        let zero = Duration::ZERO;
        Passes { interval: SHORTEST, in_plenty: zero, left: false, cpu: zero }
    }
}

impl Passes {
    /// Memory is plentiful, and there are large pages: what is found in them then is left for later.
    pub fn leave(&mut self) {
        self.left = true;
    }

    /// A pass came to its end, which took so much of the processor, and began so long after the one before.
    pub fn ended(&mut self, done: &Examined, cpu: Duration, after: Duration, longest: Duration) {
        self.left = done.large > 0;
        self.cpu = cpu.max(self.cpu / 2);
        let over = done.scanned + done.passed;
        let found = done.shared + done.zero;
        let much = found * ENOUGH >= over.max(1) && done.scanned > 0;
        let nothing = found * NEXT_TO_NOTHING < over;
        self.in_plenty = cpu.saturating_mul(match (much, nothing) {
            (true, _) => 0,
            (false, false) => FOR_LITTLE_IN_PLENTY,
            (false, true) => FOR_NOTHING_IN_PLENTY,
        });
        let next = match (much, nothing) {
            // As long as it took to find so much, where it was just enough; what was found after long does not call for
            // passes in which a quarter of it would be found.
            (true, _) => {
                let less = found as f64 * ENOUGH as f64 / over.max(1) as f64;
                after.div_f64(less.clamp(1.0, 4.0))
            }
            (false, false) => self.interval * 2,
            (false, true) => (self.interval * 4).max(cpu.saturating_mul(FOR_NOTHING)),
        };
        self.interval = next.clamp(SHORTEST, longest.max(SHORTEST));
    }

    /// Time from the beginning of the last pass to that of the next, of a VM of `pages` to which `came` of them since;
    /// `plentiful`: memory is.
    pub fn interval(&self, came: u64, pages: u64, longest: Duration, plentiful: bool) -> Duration {
        let least = if plentiful { self.in_plenty } else { Duration::ZERO };
        let mut interval = self.interval.max(least).min(longest.max(SHORTEST));
        if self.left && !plentiful {
            let dear = self.cpu.saturating_mul(FOR_WHAT_WAS_LEFT);
            interval = interval.min(dear.max(OF_ONE_THAT_GROWS));
        }
        if came * MUCH > pages { interval.min(OF_ONE_THAT_GROWS) } else { interval }
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    const LONGEST: Duration = Duration::from_secs(600);
    const PAGES: u64 = 50_000;

    fn after(passes: &mut Passes, n: u32, done: Examined) -> Duration {
        for _ in 0..n {
            let after = passes.interval(0, PAGES, LONGEST, false);
            passes.ended(&done, Duration::ZERO, after, LONGEST);
        }
        passes.interval(0, PAGES, LONGEST, false)
    }

    #[test]
    fn who_has_nothing_to_share_is_gone_through_ever_later() {
        let mut passes = Passes::default();
        assert_eq!(passes.interval(0, PAGES, LONGEST, false), SHORTEST);
        let nothing = Examined { scanned: PAGES, ..Examined::default() };
        assert_eq!(after(&mut passes, 2, nothing), SHORTEST * 16);
        let little = Examined { shared: PAGES / 400, ..nothing };
        assert_eq!(after(&mut passes, 3, little), SHORTEST * 128);
        assert_eq!(after(&mut passes, 20, nothing), LONGEST);
        // The operator's word counts from the next look on.
        assert_eq!(passes.interval(0, PAGES, SHORTEST, false), SHORTEST);
        assert_eq!(passes.interval(0, PAGES, Duration::ZERO, false), SHORTEST);
        let much = Examined { shared: PAGES / 25, ..nothing };
        assert_eq!(after(&mut passes, 1, much), LONGEST / 4);
        // Just enough: the next finds as much when it comes after as long.
        let enough = Examined { shared: PAGES / 100, ..nothing };
        assert_eq!(after(&mut passes, 3, enough), LONGEST / 4);
        assert_eq!(after(&mut passes, 1, Examined { shared: PAGES / 50, ..nothing }), LONGEST / 8);
        assert_eq!(after(&mut passes, 20, Examined { zero: PAGES, ..nothing }), SHORTEST);
    }

    #[test]
    fn what_is_looked_for_in_vain_costs_a_ten_thousandth_of_a_processor() {
        let nothing = Examined { scanned: PAGES, ..Examined::default() };
        let little = Examined { shared: PAGES / 400, ..nothing };
        let (cpu, hour) = (Duration::from_millis(50), Duration::from_secs(3600));
        let mut passes = Passes::default();
        // Where something is found it may cost more.
        passes.ended(&little, cpu, SHORTEST, hour);
        assert_eq!(passes.interval(0, PAGES, hour, false), SHORTEST * 2);
        passes.ended(&nothing, cpu, SHORTEST, hour);
        assert_eq!(passes.interval(0, PAGES, hour, false), Duration::from_secs(500));
        assert_eq!(passes.interval(PAGES / 8, PAGES, hour, false), OF_ONE_THAT_GROWS);
        passes.ended(&nothing, cpu, SHORTEST, hour);
        assert_eq!(passes.interval(0, PAGES, hour, false), Duration::from_secs(2000));
        passes.ended(&nothing, Duration::MAX, SHORTEST, hour);
        assert_eq!(passes.interval(0, PAGES, hour, false), hour);
    }

    #[test]
    fn while_memory_is_plentiful_what_finds_little_costs_next_to_nothing() {
        let nothing = Examined { scanned: PAGES, ..Examined::default() };
        let little = Examined { shared: PAGES / 400, ..nothing };
        let much = Examined { shared: PAGES / 25, ..nothing };
        let (cpu, hour) = (Duration::from_millis(20), Duration::from_secs(3600));
        let mut passes = Passes::default();
        assert_eq!(passes.interval(0, PAGES, hour, true), SHORTEST);
        passes.ended(&little, cpu, SHORTEST, hour);
        assert_eq!(passes.interval(0, PAGES, hour, true), Duration::from_secs(200));
        // It is looked for at once when somebody needs it, and what came is looked at either way.
        assert_eq!(passes.interval(0, PAGES, hour, false), SHORTEST * 2);
        assert_eq!(passes.interval(PAGES / 8, PAGES, hour, true), OF_ONE_THAT_GROWS);
        passes.ended(&nothing, cpu, SHORTEST, hour);
        assert_eq!(passes.interval(0, PAGES, hour, true), Duration::from_secs(2000));
        assert_eq!(passes.interval(0, PAGES, hour, false), Duration::from_secs(200));
        // A quarter of the time that it took to find so much, whatever it was to be.
        passes.ended(&much, cpu, Duration::from_secs(2000), hour);
        assert_eq!(passes.interval(0, PAGES, hour, true), Duration::from_secs(500));
    }

    #[test]
    fn large_pages_that_were_left_alone_are_looked_at_once_memory_is_short() {
        let (ms, hour) = (Duration::from_millis, Duration::from_secs(3600));
        let mut passes = Passes::default();
        let left = Examined { large: PAGES, ..Examined::default() };
        let looked = Examined { scanned: PAGES, ..Examined::default() };
        (0..20).for_each(|_| passes.ended(&left, ms(1), SHORTEST, hour));
        assert_eq!(passes.interval(0, PAGES, hour, true), hour);
        assert_eq!(passes.interval(0, PAGES, hour, false), OF_ONE_THAT_GROWS);
        // They were, and plenty comes and goes: a five-hundredth of a processor.
        passes.ended(&looked, ms(80), SHORTEST, hour);
        assert_eq!(passes.interval(0, PAGES, hour, false), hour);
        passes.ended(&left, ms(1), SHORTEST, hour);
        assert_eq!(passes.interval(0, PAGES, hour, false), Duration::from_secs(40));
        assert_eq!(passes.interval(PAGES / 8, PAGES, hour, false), OF_ONE_THAT_GROWS);
        // Large pages that were made since, with no pass in between.
        passes.ended(&looked, ms(80), SHORTEST, hour);
        assert_eq!(passes.interval(0, PAGES, hour, false), hour);
        passes.leave();
        assert_eq!(passes.interval(0, PAGES, hour, false), Duration::from_secs(80));
        passes.ended(&left, ms(1), SHORTEST, hour);
        // The operator may ask for more.
        assert_eq!(passes.interval(0, PAGES, OF_ONE_THAT_GROWS / 2, false), OF_ONE_THAT_GROWS / 2);
    }

    #[test]
    fn a_few_zeros_where_little_is_written_bring_no_pass_soon() {
        let mut passes = Passes::default();
        let rest = Examined { scanned: 80, zero: 3, passed: PAGES - 80, ..Examined::default() };
        assert_eq!(after(&mut passes, 20, rest), LONGEST);
        let enough = Examined { scanned: 8, shared: 4, passed: 92, ..Examined::default() };
        assert_eq!(after(&mut passes, 1, enough), LONGEST / 4);
        assert_eq!(after(&mut passes, 9, Examined { passed: 392, shared: 3, ..enough }), LONGEST);
        // Nor does a pass that read nothing.
        let idle = Examined { passed: PAGES, ..Examined::default() };
        assert_eq!(after(&mut passes, 1, idle), LONGEST);
    }

    #[test]
    fn who_grows_is_gone_through_every_few_seconds() {
        let mut passes = Passes::default();
        after(&mut passes, 20, Examined { scanned: PAGES, ..Examined::default() });
        assert_eq!(passes.interval(PAGES / 64, PAGES, LONGEST, false), LONGEST);
        assert_eq!(passes.interval(PAGES / 64 + 1, PAGES, LONGEST, false), OF_ONE_THAT_GROWS);
    }
}
