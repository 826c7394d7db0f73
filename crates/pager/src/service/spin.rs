//! How long the fault service looks for the next fault before it sleeps.
//!
//! Going to sleep and being woken costs more than serving a fault does. A guest that brings back many
//! pages faults again some microseconds after each answer, so looking that long saves the sleep. As
//! with the kernel's `halt_poll_ns`, the time adapts: the thread looks once faults come soon enough to be
//! caught, and does not when they do not, ever less readily the more looks in a row were in vain. So a guest that does not
//! fault costs nothing, and a thread that looks is one that would have had to be woken 20,000 times a second.
//!
//! On a host whose cores are all in use, looking takes them from guests. A thread that lost its core
//! while it looked takes that as a sign, and sleeps at once for the next [`REST`]. So does one whose faults came as soon as it
//! slept, twice in a row: the kernel runs whom it wakes on its own core, where others would have to be woken, and there a guest waits for
//! the look to end.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec, poll};

/// The longest look. A fault that comes later than this is not worth waiting for.
const LONGEST: Duration = Duration::from_micros(50);
/// A sleep that took no longer may have been for a fault that came sooner than that: to be woken takes as long again, where
/// the processor sleeps too.
const SOON: Duration = Duration::from_micros(100);
/// Two looks further apart than this were not made by a thread that kept its core.
const LOST_CORE: Duration = Duration::from_micros(40);
const REST: Duration = Duration::from_millis(100);
/// Who came no later than this after a look in vain had been waiting for the core that it was made on.
const AT_ONCE: Duration = Duration::from_micros(20);
/// One alone may have come just then.
const HELD_UP: u32 = 2;
/// After so many looks in vain, none is harder to come by.
const HARDEST: u32 = 6;

/// What came of one wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waited {
    /// Something came while it looked.
    Caught,
    /// Something came after it had gone to sleep, this long after the wait began.
    Slept(Duration),
    /// It lost its core while it looked.
    Preempted,
}

#[derive(Debug, Default)]
pub(super) struct Spin {
    looks: bool,
    /// Short sleeps, and looks in vain, one after the other; of these, the last that ended as soon as the thread slept.
    short: u32,
    in_vain: u32,
    held_up: u32,
    /// Time since the service began until which it only sleeps.
    rest_until: Duration,
}

impl Spin {
    /// How long to look now; `now` is the time since the service began.
    pub fn window(&self, now: Duration) -> Duration {
        if self.looks && now >= self.rest_until { LONGEST } else { Duration::ZERO }
    }

    /// Whether two looks so far apart show that the core was lost in between.
    pub fn lost_core(gap: Duration) -> bool {
        gap > LOST_CORE
    }

    /// What came of a wait for the next fault alone, in which it `looked` or not, and which ended at `now`, the time since
    /// the service began.
    pub fn learn(&mut self, now: Duration, looked: bool, waited: Waited) {
        match waited {
            Waited::Caught => (self.in_vain, self.held_up) = (0, 0),
            Waited::Slept(time) if looked => {
                self.held_up = if time <= LONGEST + AT_ONCE { self.held_up + 1 } else { 0 };
                if self.held_up >= HELD_UP {
                    return self.rest(now);
                }
                self.in_vain = (self.in_vain + 1).min(HARDEST);
                (self.looks, self.short) = (false, 0);
            }
            Waited::Slept(time) if time <= SOON => {
                self.short += 1;
                // The first look in vain is the end of any row of faults.
                self.looks |= self.short >= 1 << self.in_vain.saturating_sub(1);
            }
            Waited::Slept(_) => (self.looks, self.short) = (false, 0),
            Waited::Preempted => self.rest(now),
        }
    }

    fn rest(&mut self, now: Duration) {
        (self.looks, self.short, self.held_up) = (false, 0, 0);
        self.rest_until = now + REST;
    }
}

/// Looks at the descriptors for as long as `spin`, then sleeps until there is something, at most
/// `patience`.
pub(super) fn await_any(
    fds: &mut [PollFd<'_>],
    spin: Duration,
    patience: Duration,
) -> rustix::io::Result<Waited> {
    let begun = Instant::now();
    let mut last = begun;
    while last - begun < spin {
        if poll(fds, Some(&Timespec::default()))? > 0 {
            return Ok(Waited::Caught);
        }
        let now = Instant::now();
        if Spin::lost_core(now - last) {
            return Ok(Waited::Preempted);
        }
        last = now;
    }
    poll(fds, Timespec::try_from(patience).ok().as_ref())?;
    Ok(Waited::Slept(begun.elapsed()))
}

#[cfg(test)]
mod tests {
    use rustix::event::PollFlags;

    use super::*;

    const US: Duration = Duration::from_micros(1);

    #[test]
    fn faults_that_come_soon_are_looked_for_and_others_are_not() {
        let mut spin = Spin::default();
        assert_eq!(spin.window(US), Duration::ZERO);
        spin.learn(US, false, Waited::Slept(SOON + US));
        assert_eq!(spin.window(US), Duration::ZERO);
        spin.learn(US, false, Waited::Slept(SOON));
        assert_eq!(spin.window(US), LONGEST);
        spin.learn(US, true, Waited::Caught);
        assert_eq!(spin.window(US), LONGEST);
        spin.learn(US, true, Waited::Slept(3_000 * US));
        assert_eq!(spin.window(US), Duration::ZERO);
        // That was the end of a row: the next begins as the first did.
        spin.learn(US, false, Waited::Slept(3_000 * US));
        spin.learn(US, false, Waited::Slept(SOON));
        assert_eq!(spin.window(US), LONGEST);
    }

    #[test]
    fn where_looks_are_in_vain_they_are_ever_rarer_until_one_is_not() {
        let mut spin = Spin::default();
        // A guest that faults a little later than is looked for.
        let mut looks = 0;
        for _ in 0..1_000 {
            let looked = spin.window(US) > Duration::ZERO;
            looks += u32::from(looked);
            spin.learn(US, looked, Waited::Slept(80 * US));
        }
        assert!((10..40).contains(&looks), "{looks} of 1,000");
        while spin.window(US).is_zero() {
            spin.learn(US, false, Waited::Slept(20 * US));
        }
        spin.learn(US, true, Waited::Caught);
        spin.learn(US, true, Waited::Slept(SOON + US));
        spin.learn(US, false, Waited::Slept(20 * US));
        assert_eq!(spin.window(US), LONGEST);
    }

    #[test]
    fn a_thread_that_loses_its_core_rests() {
        let mut spin = Spin::default();
        spin.learn(US, false, Waited::Slept(US));
        assert_eq!(spin.window(US), LONGEST);
        assert!(Spin::lost_core(1_000 * US) && !Spin::lost_core(2 * US));
        spin.learn(US, true, Waited::Preempted);
        spin.learn(2 * US, false, Waited::Slept(US));
        assert_eq!(spin.window(2 * US), Duration::ZERO, "it rests");
        assert_eq!(spin.window(2 * US + REST), LONGEST, "and then looks again");
    }

    #[test]
    fn who_waited_for_the_core_that_is_looked_on_is_not_looked_for_for_a_while() {
        let looks_from = |ends: [Duration; 2]| {
            let mut spin = Spin::default();
            for time in ends {
                spin.learn(US, false, Waited::Slept(12 * US));
                spin.learn(US, true, Waited::Slept(time));
            }
            // Who shares its core comes soon after it sleeps, again and again.
            let looks = |n: &u32| {
                spin.learn(*n * 12 * US, false, Waited::Slept(12 * US));
                spin.window(*n * 12 * US) > Duration::ZERO
            };
            (1..100_000).find(looks).unwrap()
        };
        let (late, at_once) = (LONGEST + AT_ONCE + US, LONGEST + AT_ONCE);
        for ends in [[late, at_once], [at_once, late], [late, late]] {
            assert!(looks_from(ends) < 4, "{ends:?}");
        }
        assert_eq!(looks_from([at_once, at_once]), (REST / 12).as_micros() as u32 + 1);
    }

    #[test]
    fn what_comes_while_it_looks_is_caught_and_what_comes_later_wakes_it() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let long = Duration::from_secs(60);
        let wait = |spin| {
            let mut fds = [PollFd::new(&reader, PollFlags::IN)];
            let waited = await_any(&mut fds, spin, Duration::from_millis(1)).unwrap();
            (waited, fds[0].revents().contains(PollFlags::IN))
        };
        // Nothing: it goes to sleep, or has lost its core while it looked.
        assert!(matches!(wait(Duration::ZERO), (Waited::Slept(_), false)));
        assert!(matches!(
            wait(Duration::from_micros(20)),
            (Waited::Slept(_) | Waited::Preempted, false)
        ));
        rustix::io::write(&writer, b"x").unwrap();
        assert_eq!(wait(long), (Waited::Caught, true));
        assert!(matches!(wait(Duration::ZERO), (Waited::Slept(_), true)));
    }
}
