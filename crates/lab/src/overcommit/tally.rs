//! What guests have done in a window.

use crate::console::Event;
use crate::latency::Latency;

use super::Load;

/// By guest, in the order of the loads.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tally {
    guests: Vec<Guest>,
    /// Length of the window.
    pub seconds: f64,
}

#[derive(Clone, Debug, PartialEq)]
struct Guest {
    work: &'static str,
    asked: f64,
    operations: f64,
    latency: Latency,
    /// Seconds that its reports are of.
    told: f64,
}

/// Seconds: a report of two, and what an operation takes that it waits for.
const REPORT: f64 = 2.5;

impl Guest {
    /// Operations per second in a window of so many seconds. Reports lie across its ends: where they are of as long
    /// as the window, to a report, they count for what they are of. A guest that was silent for longer did nothing
    /// meanwhile.
    fn rate(&self, window: f64) -> f64 {
        let whole = (self.told - window).abs() <= REPORT;
        self.operations / if whole { self.told } else { window.max(self.told) }
    }
}

impl Tally {
    /// Nothing done, in no time.
    pub fn new(loads: &[Load]) -> Tally {
        let guest = |load: &Load| Guest {
            work: load.work,
            asked: load.asked,
            operations: 0.0,
            latency: Latency::default(),
            told: 0.0,
        };
        Tally { guests: loads.iter().map(guest).collect(), seconds: 0.0 }
    }

    /// What guest number `guest` reported; other events than of its serving count for nothing.
    pub fn take(&mut self, guest: usize, event: &Event) {
        let Some(guest) = self.guests.get_mut(guest) else { return };
        if event.text("phase") == "serve" && event.text("work") == guest.work {
            guest.operations += event.number("ops").unwrap_or(0.0);
            guest.latency.add(event.text("latency"));
            guest.told += event.number("window_s").unwrap_or(0.0);
        }
    }

    /// The kinds of work that serve somebody, in the guests' order.
    pub fn works(&self) -> Vec<&'static str> {
        let mut works = Vec::new();
        for guest in self.guests.iter().filter(|g| g.asked > 0.0) {
            if !works.contains(&guest.work) {
                works.push(guest.work);
            }
        }
        works
    }

    fn of(&self, work: &str) -> impl Iterator<Item = &Guest> {
        self.guests.iter().filter(move |g| g.work == work)
    }

    /// Operations per second of all guests of a kind. A guest that reported nothing did nothing.
    pub fn rate(&self, work: &str) -> f64 {
        self.of(work).map(|g| g.rate(self.seconds)).sum::<f64>()
    }

    /// Operations of all guests of a kind, whenever they were done.
    pub fn operations(&self, work: &str) -> f64 {
        self.of(work).map(|g| g.operations).sum()
    }

    /// Operations per second that all guests of a kind are asked for.
    pub fn asked(&self, work: &str) -> f64 {
        self.of(work).map(|g| g.asked).sum()
    }

    /// Of all operations of a kind.
    pub fn latency(&self, work: &str) -> Latency {
        let mut all = Latency::default();
        self.of(work).for_each(|g| all.merge(&g.latency));
        all
    }

    /// Of what was asked, per cent that was done: the mean over the guests that serve somebody, so
    /// that an operation of one kind weighs what it is asked for.
    pub fn served_percent(&self) -> f64 {
        let parts: Vec<f64> = self
            .guests
            .iter()
            .filter(|g| g.asked > 0.0)
            .map(|g| g.rate(self.seconds) / g.asked)
            .collect();
        100.0 * crate::stats::mean(&parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn serve(work: &str, ops: u64) -> Event {
        serve_for(work, ops, 10.0)
    }

    fn serve_for(work: &str, ops: u64, s: f64) -> Event {
        let line = format!(
            "@ballast {{\"work\":\"{work}\",\"phase\":\"serve\",\"ops\":{ops},\"window_s\":{s},\
             \"latency\":\"3:{ops}\"}}"
        );
        Event::parse(&line).unwrap()
    }

    #[test]
    fn kinds_are_summed_and_weighed_by_what_they_are_asked_for() {
        let loads =
            [Load::store(1, 1, 10.0, 1), Load::store(1, 1, 10.0, 2), Load::office(1, 0.5, 3)];
        let mut tally = Tally::new(&[loads.as_slice(), &[Load::hog(5)]].concat());
        tally.seconds = 10.0;
        tally.take(0, &serve("store", 100));
        tally.take(2, &serve("office", 10));
        tally.take(2, &serve("other", 10));
        tally.take(9, &serve("store", 10));
        assert_eq!(tally.works(), ["store", "office"]);
        assert_eq!((tally.rate("store"), tally.asked("store")), (10.0, 20.0));
        assert_eq!(tally.latency("store").count(), 100);
        assert_eq!(tally.rate("office"), 1.0);
        // All, nothing, and half.
        assert_eq!(tally.served_percent(), 50.0);
    }

    #[test]
    fn reports_across_the_ends_of_a_window_count_for_what_they_are_of() {
        let reports = |each: &[(u64, f64)]| {
            let mut tally = Tally::new(&[Load::store(1, 1, 10.0, 1)]);
            tally.seconds = 30.0;
            each.iter().for_each(|(ops, s)| tally.take(0, &serve_for("store", *ops, *s)));
            tally.served_percent()
        };
        let near = |got: f64, wanted: f64| assert!((got - wanted).abs() < 1e-9, "{got}");
        // Fourteen, fifteen or sixteen reports of two seconds: as much is served.
        for n in 14..=16 {
            near(reports(&vec![(20, 2.0); n]), 100.0);
        }
        // Silent for the second half, or from the first moment on.
        near(reports(&[(20, 2.0); 7]), 100.0 * 14.0 / 30.0);
        near(reports(&[]), 0.0);
        // One report of a stall that began before the window.
        near(reports(&[(20, 50.0)]), 100.0 * 20.0 / 50.0 / 10.0);
    }
}
