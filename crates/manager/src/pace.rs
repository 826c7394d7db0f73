//! How often what is done over and over is done: where nothing happens, seldom, and for many VMs at the same
//! moments, so that the host is woken seldom too.

use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::time::sleep_until;

/// Between two turns of a loop that has something to watch.
pub const BRISK: Duration = Duration::from_secs(1);
/// The same where more is asked than at the last turn.
pub const HURRIED: Duration = Duration::from_millis(100);
/// The same where nothing changes.
pub const CALM: Duration = Duration::from_secs(5);
/// The same where nothing has changed for a minute.
pub const ASLEEP: Duration = Duration::from_secs(15);
/// Turns without a change after which nothing is expected to change.
const TURNS: u32 = 10;
/// And so many more, calm ones, are a minute.
const CALM_TURNS: u32 = 12;
/// VMs are spread over so many moments, so apart: what is done for hundreds is not done at once.
const SLOTS: u32 = 8;
const APART: Duration = Duration::from_millis(250);

/// The pace of one loop.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pace {
    still: u32,
}

impl Pace {
    /// Takes note of a turn: whether all was as it had been.
    pub fn note(&mut self, still: bool) {
        self.still = if still { self.still.saturating_add(1) } else { 0 };
    }

    /// Whether nothing has changed for so long that nothing is expected to.
    pub fn is_calm(&self) -> bool {
        self.still >= TURNS
    }

    /// When the next turn begins, where the last one did at `last` of VM number `id`. All times are since
    /// the same moment, which all loops have in common.
    pub fn next(&self, last: Duration, id: u32) -> Duration {
        match self.still {
            still if still >= TURNS + CALM_TURNS => slot_after(last, ASLEEP, id),
            still if still >= TURNS => slot_after(last, CALM, id),
            _ => last + BRISK,
        }
    }
}

/// How a loop that waits for its next turn is told of something.
#[derive(Debug, Default)]
pub struct Stir {
    soon: Notify,
    now: Notify,
}

impl Stir {
    /// Something has changed: a loop that is calm is to turn as soon as a brisk one would.
    pub fn soon(&self) {
        self.soon.notify_one();
    }

    /// More is asked, by who asks no more often than the policy decides: any loop is to turn within moments.
    pub fn now(&self) {
        self.now.notify_one();
    }

    /// Returns once that was so after a turn that began at `begun`.
    pub async fn stirred(&self, begun: Instant, is_calm: bool) {
        let told = async |notify: &Notify, gap| {
            // Nobody makes it turn without end.
            sleep_until((begun + gap).into()).await;
            notify.notified().await;
        };
        tokio::select! {
            () = told(&self.soon, BRISK), if is_calm => {}
            () = told(&self.now, HURRIED) => {}
        }
    }
}

/// The first moment after `now` for VM number `id` of those that come once in `period`.
pub fn slot_after(now: Duration, period: Duration, id: u32) -> Duration {
    let offset = APART * (id % SLOTS);
    if now < offset {
        return offset;
    }
    round_of(now, period, offset) + period + offset
}

/// When the round began in which `now` is: the same for all VMs.
pub fn round_of(now: Duration, period: Duration, offset: Duration) -> Duration {
    let rounds = now.saturating_sub(offset).as_nanos() / period.as_nanos().max(1);
    period * u32::try_from(rounds).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calm_and_sleep_come_late_and_end_at_once() {
        let mut pace = Pace::default();
        let at = Duration::from_secs(100);
        for _ in 0..TURNS {
            assert_eq!(pace.next(at, 3), at + BRISK);
            pace.note(true);
        }
        // To its slot first, which may be near.
        let slot = pace.next(at, 3);
        assert!(pace.is_calm() && slot > at && slot <= at + CALM);
        assert_eq!(pace.next(slot, 3), slot + CALM);
        for _ in 0..CALM_TURNS - 1 {
            pace.note(true);
            assert_eq!(pace.next(slot, 3), slot + CALM);
        }
        pace.note(true);
        let slept = pace.next(slot, 3);
        assert!(slept > slot && slept <= slot + ASLEEP);
        assert_eq!(pace.next(slept, 3), slept + ASLEEP);
        pace.note(false);
        assert_eq!(pace.next(at, 3), at + BRISK);
    }

    #[tokio::test]
    async fn a_stir_is_obeyed_no_sooner_than_the_pace_allows_and_not_lost_until_then() {
        let begun = Instant::now();
        let (long_ago, gap) = (begun - BRISK, begun - HURRIED);
        let turns = async |stir: &Stir, begun, is_calm| {
            tokio::select! {
                biased;
                () = stir.stirred(begun, is_calm) => true,
                () = tokio::task::yield_now() => false,
            }
        };
        let hour = begun + Duration::from_secs(3_600);
        let stir = Stir::default();
        assert!(!turns(&stir, long_ago, true).await);
        stir.soon();
        assert!(!turns(&stir, hour, true).await && !turns(&stir, long_ago - BRISK, false).await);
        tokio::time::timeout(BRISK * 60, stir.stirred(long_ago, true)).await.unwrap();
        stir.now();
        assert!(!turns(&stir, hour, true).await);
        tokio::time::timeout(BRISK * 60, stir.stirred(gap, false)).await.unwrap();
        assert!(!turns(&stir, long_ago, true).await, "each counts once");
    }

    #[test]
    fn slots_are_a_period_apart_and_the_same_for_many() {
        let ms = Duration::from_millis;
        let period = ms(5_000);
        for id in 0..20 {
            let mut at = ms(1_260);
            let mut slots = Vec::new();
            for _ in 0..3 {
                let next = slot_after(at, period, id);
                assert!(next > at && next <= at + period, "{id}: {at:?} {next:?}");
                slots.push(next);
                // A little late, as timers are.
                at = next + ms(3);
            }
            assert!(slots.windows(2).all(|two| two[1] - two[0] == period), "{slots:?}");
            assert_eq!(slots[0], slot_after(ms(1_300), period, id + SLOTS));
            // The round began before it, for all at the same moment.
            let round = round_of(slots[1] + ms(3), period, Duration::ZERO);
            assert!(round <= slots[1] && slots[1] - round < APART * SLOTS, "{id}: {round:?}");
            assert_eq!(round.as_millis() % period.as_millis(), 0, "{id}");
        }
    }
}
