//! The slots of a VM: one range of numbers over all its swap files, those of the highest priority first.

use std::sync::Arc;

use ballast_units::{Pages, SlotId};

use super::{Location, SlotMap};

/// What is written to a location that has failed, to see whether that goes again: as much as leaves the stage together.
const TRY: Pages = Pages(32);

#[derive(Debug)]
struct Part {
    /// Its slot 0 among all.
    first: u64,
    map: SlotMap,
    location: Arc<Location>,
    /// Writes of this VM there that have not come to an end.
    under_way: u64,
}

impl Part {
    /// Whether the VM waits for what may never answer: it gives no more of its stage to that, whoever else tries it meanwhile.
    fn is_hanging(&self) -> bool {
        self.under_way > 0 && self.location.is_failed()
    }
}

/// Which slots are free, used, and retired.
///
/// Invariants (`check`): those of each part's map; parts follow one another without a gap; a retired slot
/// is taken.
#[derive(Debug)]
pub struct SlotSpace {
    parts: Vec<Part>,
    retired: u64,
}

impl From<Pages> for SlotSpace {
    /// One file, in a location of its own.
    fn from(len: Pages) -> SlotSpace {
        SlotSpace::new([(len, Arc::default())])
    }
}

impl SlotSpace {
    /// All free. By part: its slots, and how its location fares.
    pub fn new(parts: impl IntoIterator<Item = (Pages, Arc<Location>)>) -> SlotSpace {
        let mut first = 0;
        let parts = parts
            .into_iter()
            .map(|(len, location)| {
                let part = Part { first, map: SlotMap::new(len), location, under_way: 0 };
                first += len.0;
                part
            })
            .collect();
        SlotSpace { parts, retired: 0 }
    }

    /// Slots, free or not.
    pub fn len(&self) -> Pages {
        self.parts.iter().map(|p| p.map.len()).sum()
    }
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len().is_zero()
    }
    /// Slots that a page could be written to now: in a location that has failed no more than one tries at a time, and none
    /// while a write of this VM's is under way there.
    pub fn free(&self) -> Pages {
        let free = |p: &Part| {
            let most = if p.location.is_failed() { TRY } else { Pages(u64::MAX) };
            p.map.free().min(most)
        };
        self.parts.iter().filter(|p| p.location.is_tried() && !p.is_hanging()).map(free).sum()
    }
    /// Slots that hold pages, or are being written.
    pub fn used(&self) -> Pages {
        self.parts.iter().map(|p| p.map.used()).sum::<Pages>().saturating_sub(self.retired())
    }
    /// Slots that could not be written, never to be used again.
    pub fn retired(&self) -> Pages {
        Pages(self.retired)
    }
    /// Used slots per part.
    pub fn used_of(&self, part: usize) -> Pages {
        self.parts.get(part).map_or(Pages::ZERO, |p| p.map.used())
    }

    /// Takes a run of 1 to `most` neighbouring slots of one part; None when none is free where
    /// writes are still tried.
    pub fn take_run(&mut self, most: u64) -> Option<(SlotId, u64)> {
        // Who has no room there does not take the next try from who has.
        let may =
            |p: &&mut Part| !p.map.free().is_zero() && !p.is_hanging() && p.location.may_be_tried();
        self.parts.iter_mut().filter(may).find_map(|part| {
            let (slot, n) = part.map.take_run(most)?;
            Some((SlotId(part.first + slot.0), n))
        })
    }

    /// A write begins to slots of one part, of which this is one.
    pub(crate) fn write_begins(&mut self, slot: SlotId) {
        if let Some((part, _)) = self.part(slot) {
            part.under_way += 1;
        }
    }
    /// It has come to its end, whichever that is.
    pub(crate) fn write_ended(&mut self, slot: SlotId) {
        if let Some((part, _)) = self.part(slot) {
            debug_assert!(part.under_way > 0, "no write to {slot:?} began");
            part.under_way = part.under_way.saturating_sub(1);
        }
    }

    /// Writes that have begun and not ended.
    #[cfg(test)]
    pub(crate) fn under_way(&self) -> u64 {
        self.parts.iter().map(|part| part.under_way).sum()
    }

    /// Frees a slot. Answers false, changing nothing, if it was free or does not exist.
    pub fn release(&mut self, slot: SlotId) -> bool {
        self.part(slot).is_some_and(|(part, slot)| part.map.release(slot))
    }
    /// Frees a slot that could not be written, where that may not have been for the slot: those beyond it are tried next.
    /// False as of `release`.
    pub fn pass(&mut self, slot: SlotId) -> bool {
        self.part(slot).is_some_and(|(part, slot)| part.map.pass(slot))
    }
    /// Recovery: marks a slot that a pmap word names. False if it is taken or does not exist.
    pub fn claim(&mut self, slot: SlotId) -> bool {
        self.part(slot).is_some_and(|(part, slot)| part.map.claim(slot))
    }
    /// A taken slot that no page names is never used again.
    pub fn retire(&mut self, slot: SlotId) {
        debug_assert!(self.is_taken(slot), "{slot:?} is not taken");
        self.retired += 1;
    }
    /// False for one that does not exist.
    pub fn is_taken(&self, slot: SlotId) -> bool {
        let part = self.parts.iter().rfind(|p| p.first <= slot.0);
        part.is_some_and(|p| slot.0 - p.first < p.map.len().0 && p.map.is_taken(slot.0 - p.first))
    }

    fn part(&mut self, slot: SlotId) -> Option<(&mut Part, SlotId)> {
        let part = self.parts.iter_mut().rfind(|p| p.first <= slot.0)?;
        let within = SlotId(slot.0 - part.first);
        Some((part, within))
    }

    /// The invariants of the type.
    ///
    /// # Errors
    /// The first that does not hold, in words.
    pub fn check(&self) -> Result<(), String> {
        let mut first = 0;
        for part in &self.parts {
            part.map.check()?;
            if part.first != first {
                return Err(format!("a part begins at {}, not at {first}", part.first));
            }
            first += part.map.len().0;
        }
        Ok(())
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use std::path::Path;

    use super::*;

    fn fail(location: &Location) {
        while !location.is_failed() {
            location.write_failed();
        }
    }

    #[test]
    fn slots_are_taken_from_the_first_part_that_has_some() {
        let [fast, slow] = [2, 1].map(|p| Location::new(Path::new("/x"), p));
        let mut space = SlotSpace::new([(Pages(40), fast.clone()), (Pages(100), slow)]);
        assert_eq!((space.len(), space.free()), (Pages(140), Pages(140)));
        assert_eq!(space.take_run(32), Some((SlotId(0), 32)));
        assert_eq!(space.take_run(32), Some((SlotId(32), 8)));
        assert_eq!(space.take_run(32), Some((SlotId(40), 32)));
        assert!(space.release(SlotId(5)) && !space.release(SlotId(5)));
        assert_eq!(space.take_run(32), Some((SlotId(5), 1)));
        assert!(space.claim(SlotId(139)) && !space.claim(SlotId(139)) && !space.claim(SlotId(140)));
        assert!(space.is_taken(SlotId(139)) && !space.is_taken(SlotId(138)));
        assert!(!space.is_taken(SlotId(140)));
        assert_eq!(
            (space.used(), space.used_of(0), space.used_of(1)),
            (Pages(73), Pages(40), Pages(33))
        );
        space.check().unwrap();
    }

    #[test]
    fn nothing_is_taken_where_writes_fail_and_retired_slots_stay_out() {
        let [fast, slow] = [2, 1].map(|p| Location::new(Path::new("/x"), p));
        let mut space = SlotSpace::new([(Pages(64), fast.clone()), (Pages(64), slow.clone())]);
        assert_eq!(space.take_run(1), Some((SlotId(0), 1)));
        space.retire(SlotId(0));
        assert_eq!((space.used(), space.retired(), space.free()), (Pages(0), Pages(1), Pages(127)));
        fail(&fast);
        assert_eq!(space.free(), Pages(64));
        assert_eq!(space.take_run(8), Some((SlotId(64), 8)));
        fail(&slow);
        assert_eq!((space.take_run(1), space.free()), (None, Pages(0)));
        assert_eq!(space.used(), Pages(8));
    }

    #[test]
    fn who_has_no_room_left_there_leaves_the_try_of_a_failed_location_to_who_has() {
        let rest = std::time::Duration::from_millis(500);
        let fast = Location::with_rest(Path::new("/x"), 2, rest);
        let slow = Location::new(Path::new("/y"), 1);
        let mut full = SlotSpace::new([(Pages(8), fast.clone()), (Pages(64), slow)]);
        let mut other = SlotSpace::new([(Pages(64), fast.clone())]);
        assert_eq!(full.take_run(8), Some((SlotId(0), 8)));
        fail(&fast);
        assert_eq!((other.take_run(8), other.free()), (None, Pages(0)));
        std::thread::sleep(rest);
        assert_eq!(full.take_run(8), Some((SlotId(8), 8)));
        assert_eq!(other.free(), TRY);
        assert_eq!(other.take_run(8), Some((SlotId(0), 8)));
        // That is the one.
        assert!(!fast.is_tried() && other.take_run(8).is_none());
    }

    #[test]
    fn who_waits_for_a_failed_location_gives_no_more_to_it_and_others_may() {
        let location = Location::with_rest(Path::new("/x"), 1, std::time::Duration::ZERO);
        let [mut hung, mut other] = [0; 2].map(|_| SlotSpace::new([(Pages(64), location.clone())]));
        assert_eq!(hung.take_run(8), Some((SlotId(0), 8)));
        hung.write_begins(SlotId(0));
        assert_eq!(hung.free(), Pages(56), "it has not failed");
        fail(&location);
        assert_eq!((hung.free(), hung.take_run(8), other.free()), (Pages(0), None, TRY));
        assert_eq!(other.take_run(8), Some((SlotId(0), 8)));
        other.write_begins(SlotId(0));
        // As if it had been waited for for long enough: it is another's, again, and not theirs.
        location.was_not_tried();
        assert!(location.is_tried());
        assert_eq!((hung.take_run(8), other.take_run(8), other.free()), (None, None, Pages(0)));
        hung.write_ended(SlotId(0));
        assert_eq!((hung.free(), hung.take_run(8)), (TRY, Some((SlotId(8), 8))));
    }
}
