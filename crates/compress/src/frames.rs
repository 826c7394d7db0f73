//! Frames of one page each, cut into slots; which are taken, and which to take next.
//!
//! Invariants (`check`): a frame is in the set of its kind and in no other; `quarters` counts the bits
//! that are set; a slot that is taken is in the order of age, by its first quarter, and no other is.

use std::collections::BTreeSet;

use crate::ages::{Age, Ages};
use crate::place::{Place, QUARTERS, Size};

/// A slot that was taken, and whether its frame is a new one: whoever takes it needs a page of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocated {
    /// The slot.
    pub place: Place,
    /// Nothing else is in its frame.
    pub new_frame: bool,
}

/// What is taken at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    /// Frames with anything in them: pages of machine memory.
    pub frames: u64,
    /// Quarters of those frames that are taken: 1,024 bytes each.
    pub quarters: u64,
    /// Slots taken: pages stored.
    pub pages: u64,
}

/// What was wanted back so far of the slots that came last and of those that came first, and how many there are of
/// either now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Returns {
    /// Pages of young slots that their guest waited for.
    pub from_young: u64,
    /// Of old ones.
    pub from_old: u64,
    /// Slots among the eighth that came last.
    pub young: u64,
    /// Among the eighth that is next to leave.
    pub old: u64,
}

/// Slots of at most `limit` frames.
#[derive(Clone, Debug, Default)]
pub struct Frames {
    /// By frame: its quarters that are taken, a bit each, and which of them begin a slot of a half.
    taken: Vec<u8>,
    halves: Vec<u8>,
    limit: u64,
    /// Frames in which a quarter is free beside one that is taken.
    odd: BTreeSet<u32>,
    /// Of those, the ones in which a half is free, too.
    odd_with_half: BTreeSet<u32>,
    /// Frames with a free half and no odd quarter.
    even: BTreeSet<u32>,
    /// Frames below the highest that was ever used that hold nothing.
    empty: BTreeSet<u32>,
    oldest: Ages,
    now: Occupancy,
    /// Halves that are free in frames that hold something.
    free_halves: u64,
    from_young: u64,
    from_old: u64,
}

impl Frames {
    /// All free. Never more than `limit` frames are taken at a time, but by [`claim`](Self::claim).
    pub fn new(limit: u64) -> Frames {
        Frames { limit, ..Frames::default() }
    }

    /// Frames above a lowered limit stay for as long as anything is in them.
    pub fn set_limit(&mut self, limit: u64) {
        self.limit = limit;
    }
    /// The most frames that may be taken.
    pub fn limit(&self) -> u64 {
        self.limit
    }
    /// What is taken now; above the limit only after [`claim`](Self::claim).
    pub fn occupancy(&self) -> Occupancy {
        self.now
    }

    /// Whether a slot of any size can be had, if its frame's page of memory can.
    pub fn has_room(&self) -> bool {
        self.has_room_for(1)
    }

    /// Whether `n` slots of any size can be had, if their frames' pages of memory can; of as many as the limit is at
    /// most, so that it is true when nothing is taken. While more frames are taken than the limit allows, none can.
    pub fn has_room_for(&self, n: u64) -> bool {
        if self.now.frames > self.limit {
            return false;
        }
        let new = 2 * self.limit.saturating_sub(self.now.frames);
        new + self.free_halves >= n.min(self.limit).max(1)
    }

    fn free_half(&self) -> Option<u32> {
        self.even.first().or_else(|| self.odd_with_half.first()).copied()
    }

    /// Takes a slot: a quarter beside a taken one first, then half of a frame in use, then a new frame,
    /// if `open` allows it. Lower frames first, so that higher ones empty. None: there is no slot of this
    /// size below the limit, or `open` said no; `open` is asked for nothing but a new frame, once.
    pub fn take(&mut self, size: Size, open: impl FnOnce() -> bool) -> Option<Allocated> {
        let used = match size {
            Size::Quarter => self.odd.first().or_else(|| self.even.first()).copied(),
            Size::Half => self.free_half(),
        };
        let (frame, new_frame) = match used {
            Some(frame) => (frame, false),
            None if self.now.frames < self.limit => {
                let next = u32::try_from(self.taken.len()).ok();
                let next = next.filter(|&f| f < u32::MAX / QUARTERS - 1);
                let frame = self.empty.first().copied().or(next)?;
                if !open() {
                    return None;
                }
                (frame, true)
            }
            None => return None,
        };
        let taken = self.taken.get(frame as usize).copied().unwrap_or(0);
        let first = match size {
            Size::Half => [0, 2].into_iter().find(|q| taken & 0b11 << q == 0),
            // The one whose neighbour is taken, lest a half is broken.
            Size::Quarter => (0..QUARTERS)
                .find(|q| taken & 1 << q == 0 && taken & 1 << (q ^ 1) != 0)
                .or_else(|| (0..QUARTERS).find(|q| taken & 1 << q == 0)),
        }?;
        let place = Place { quarter: frame * QUARTERS + first, size };
        self.mark(place);
        Some(Allocated { place, new_frame })
    }

    /// Recovery: takes the slot that a pmap word names. Answers whether its frame is a new one; None if
    /// it is another page's, wholly or in part. Takes no account of the limit: what is there is there.
    pub fn claim(&mut self, place: Place) -> Option<bool> {
        let taken = self.taken.get(place.frame() as usize).copied().unwrap_or(0);
        if taken & place.mask() != 0 {
            return None;
        }
        self.mark(place);
        Some(taken == 0)
    }

    fn mark(&mut self, place: Place) {
        let frame = place.frame();
        if self.taken.len() <= frame as usize {
            let from = self.taken.len() as u32;
            self.taken.resize(frame as usize + 1, 0);
            self.halves.resize(frame as usize + 1, 0);
            self.empty.extend(from..=frame);
        }
        let before = self.taken[frame as usize];
        let after = before | place.mask();
        if place.size == Size::Half {
            self.halves[frame as usize] |= 1 << (place.quarter % QUARTERS);
        }
        self.file(frame, before, after);
        self.oldest.push(place.quarter);
        self.now.frames += u64::from(before == 0);
        self.now.quarters += u64::from(place.size.quarters());
        self.now.pages += 1;
    }

    /// Frees a slot, which must be taken. Answers whether its frame holds nothing more, so that its page
    /// of memory can be given back.
    pub fn release(&mut self, place: Place) -> bool {
        debug_assert!(self.is_taken(place), "{place:?} freed twice");
        let frame = place.frame();
        let before = self.taken[frame as usize];
        let after = before & !place.mask();
        self.halves[frame as usize] &= !place.mask();
        self.file(frame, before, after);
        self.oldest.remove(place.quarter);
        self.now.frames -= u64::from(after == 0);
        self.now.quarters -= u64::from(place.size.quarters());
        self.now.pages -= 1;
        after == 0
    }

    /// Whether this very slot is taken.
    pub fn is_taken(&self, place: Place) -> bool {
        self.at(place.quarter) == Some(place)
    }

    /// The slot that begins at a quarter.
    fn at(&self, quarter: u32) -> Option<Place> {
        let frame = (quarter / QUARTERS) as usize;
        let bit = 1u8 << (quarter % QUARTERS);
        if self.taken.get(frame)? & bit == 0 {
            return None;
        }
        let size = if self.halves[frame] & bit != 0 { Size::Half } else { Size::Quarter };
        // The second quarter of a half begins nothing.
        let second = quarter % 2 == 1 && self.halves[frame] & bit >> 1 != 0;
        (!second).then_some(Place { quarter, size })
    }

    /// Notes that the guest waits for the page of a slot, which is still taken.
    pub fn wanted_back(&mut self, place: Place) {
        match self.oldest.of(place.quarter) {
            Age::Young => self.from_young += 1,
            Age::Middle => {}
            Age::Old => self.from_old += 1,
        }
    }

    /// Who was wanted back so far.
    pub fn returns(&self) -> Returns {
        let (young, old) = self.oldest.young_and_old();
        Returns { from_young: self.from_young, from_old: self.from_old, young, old }
    }

    /// The slots taken, the oldest first.
    pub fn oldest(&self) -> impl Iterator<Item = Place> + '_ {
        std::iter::successors(self.oldest.first(), |&q| self.oldest.after(q))
            .filter_map(|q| self.at(q))
    }

    /// The slots of the frame in which the oldest is.
    pub fn oldest_frame(&self) -> Vec<Place> {
        let first = self
            .oldest
            .first()
            .map_or(0..0, |q| q / QUARTERS * QUARTERS..(q / QUARTERS + 1) * QUARTERS);
        first.filter_map(|q| self.at(q)).collect()
    }

    /// Moves a frame to the set of what it is now.
    fn file(&mut self, frame: u32, before: u8, after: u8) {
        self.taken[frame as usize] = after;
        self.free_halves = self.free_halves + halves_beside(after) - halves_beside(before);
        for (taken, put) in [(before, false), (after, true)] {
            let set = match kind(taken) {
                Kind::Empty => &mut self.empty,
                Kind::Odd => &mut self.odd,
                Kind::Even => &mut self.even,
                Kind::Full => continue,
            };
            if put {
                set.insert(frame);
            } else {
                set.remove(&frame);
            }
        }
        if is_odd_with_half(after) {
            self.odd_with_half.insert(frame);
        } else if is_odd_with_half(before) {
            self.odd_with_half.remove(&frame);
        }
    }

    /// Whether the invariants hold; walks all frames.
    ///
    /// # Errors
    /// What contradicts what, in words.
    pub fn check(&self) -> Result<(), String> {
        let mut now = Occupancy::default();
        for (frame, &taken) in self.taken.iter().enumerate() {
            let frame = frame as u32;
            now.frames += u64::from(taken != 0);
            now.quarters += u64::from(taken.count_ones());
            let kinds = [
                (Kind::Empty, self.empty.contains(&frame)),
                (Kind::Odd, self.odd.contains(&frame)),
                (Kind::Even, self.even.contains(&frame)),
            ];
            if is_odd_with_half(taken) != self.odd_with_half.contains(&frame) {
                return Err(format!("frame {frame} ({taken:#06b}) and odd ones with a half"));
            }
            for (kind_of_set, is_in) in kinds {
                if is_in != (kind(taken) == kind_of_set) {
                    return Err(format!(
                        "frame {frame} ({taken:#06b}) and {kind_of_set:?}: {is_in}"
                    ));
                }
            }
        }
        let listed: Vec<Place> = self.oldest().collect();
        now.pages = listed.len() as u64;
        let quarters: u64 = listed.iter().map(|p| u64::from(p.size.quarters())).sum();
        if quarters != now.quarters {
            return Err(format!("{quarters} quarters by age, {} taken", now.quarters));
        }
        if now != self.now {
            return Err(format!("{now:?}, booked {:?}", self.now));
        }
        let halves: u64 = self.taken.iter().map(|&taken| halves_beside(taken)).sum();
        if halves != self.free_halves {
            return Err(format!("{halves} halves free, booked {}", self.free_halves));
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Empty,
    Odd,
    Even,
    Full,
}

fn kind(taken: u8) -> Kind {
    let odd = |pair: u8| pair == 0b01 || pair == 0b10;
    match (taken & 0b11, taken >> 2 & 0b11) {
        (0, 0) => Kind::Empty,
        (0b11, 0b11) => Kind::Full,
        (a, b) if odd(a) || odd(b) => Kind::Odd,
        _ => Kind::Even,
    }
}

/// Halves that are free beside something that is taken.
fn halves_beside(taken: u8) -> u64 {
    u64::from(taken != 0 && has_half(taken))
}

fn is_odd_with_half(taken: u8) -> bool {
    kind(taken) == Kind::Odd && has_half(taken)
}

fn has_half(taken: u8) -> bool {
    taken & 0b0011 == 0 || taken & 0b1100 == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Op {
        Take(Size),
        Release(prop::sample::Index),
        Claim(u32, Size),
        Limit(u64),
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let size = prop_oneof![Just(Size::Quarter), Just(Size::Half)];
        prop::collection::vec(
            prop_oneof![
                6 => size.clone().prop_map(Op::Take),
                5 => any::<prop::sample::Index>().prop_map(Op::Release),
                1 => (0u32..80, size).prop_map(|(q, s)| Op::Claim(q, s)),
                1 => (0u64..12).prop_map(Op::Limit),
            ],
            1..300,
        )
    }

    #[test]
    fn there_is_room_for_as_many_as_can_be_taken_whatever_their_size() {
        let mut frames = Frames::new(2);
        assert!(frames.has_room_for(2) && frames.has_room_for(8), "of as many as the limit");
        let first = frames.take(Size::Quarter, || true).unwrap().place;
        assert!(frames.has_room_for(2));
        frames.take(Size::Half, || true).unwrap();
        frames.take(Size::Half, || true).unwrap();
        assert!(frames.has_room_for(1) && !frames.has_room_for(2), "a half is left");
        frames.release(first);
        assert!(frames.has_room_for(2), "and the other half of the first");
        assert!(!Frames::new(0).has_room_for(1));
        frames.set_limit(1);
        assert!(!frames.has_room(), "more frames are taken than may be");
    }

    #[test]
    fn the_frame_of_the_oldest_is_emptied_as_a_whole() {
        let mut frames = Frames::new(10);
        let mut take = |size| frames.take(size, || true).unwrap().place;
        let (half, quarters) = (take(Size::Half), [take(Size::Quarter), take(Size::Quarter)]);
        let other = take(Size::Half);
        assert_eq!(frames.oldest_frame(), [half, quarters[0], quarters[1]]);
        frames.release(half);
        assert_eq!(frames.oldest_frame(), quarters);
        for place in quarters {
            frames.release(place);
        }
        assert_eq!(frames.oldest_frame(), [other]);
        frames.release(other);
        assert_eq!(frames.oldest_frame(), []);
    }

    #[test]
    fn what_is_wanted_back_is_counted_by_its_age() {
        let mut frames = Frames::new(100);
        let places: Vec<Place> =
            (0..80).map(|_| frames.take(Size::Half, || true).unwrap().place).collect();
        for (n, &place) in places.iter().enumerate() {
            if n % 5 == 0 {
                frames.wanted_back(place);
            }
        }
        // 0 and 5 of the first ten, 70 and 75 of the last.
        let returns = Returns { from_young: 2, from_old: 2, young: 10, old: 10 };
        assert_eq!(frames.returns(), returns);
    }

    proptest! {
        /// Against a list of slots, searched from end to end.
        #[test]
        fn behaves_as_a_list_of_slots(ops in ops()) {
            let mut frames = Frames::new(10);
            let mut limit = 10;
            // In order of age.
            let mut model: Vec<Place> = Vec::new();
            let used = |model: &[Place]| {
                let mut all: Vec<u32> = model.iter().map(|p| p.frame()).collect();
                all.sort_unstable();
                all.dedup();
                all.len() as u64
            };
            let clash = |model: &[Place], place: Place| {
                model.iter().any(|p| p.frame() == place.frame() && p.mask() & place.mask() != 0)
            };
            for op in ops {
                match op {
                    Op::Take(size) => {
                        let before = used(&model);
                        let could = model.iter().map(|p| p.frame()).any(|f| {
                            (0..4).step_by(size.quarters() as usize).any(|q| {
                                !clash(&model, Place { quarter: f * 4 + q, size })
                            })
                        });
                        match frames.take(size, || true) {
                            Some(Allocated { place, new_frame }) => {
                                prop_assert_eq!(place.size, size);
                                prop_assert!(!clash(&model, place));
                                prop_assert_eq!(new_frame, !could);
                                model.push(place);
                                prop_assert!(used(&model) <= limit.max(before));
                            }
                            None => prop_assert!(!could && before >= limit),
                        }
                    }
                    Op::Release(at) if !model.is_empty() => {
                        let place = model.remove(at.index(model.len()));
                        let gone = model.iter().all(|p| p.frame() != place.frame());
                        prop_assert_eq!(frames.release(place), gone);
                    }
                    Op::Release(_) => {}
                    Op::Claim(quarter, size) => {
                        let Some(place) = Place::from_bits(Place { quarter, size }.bits()) else {
                            continue;
                        };
                        let new = model.iter().all(|p| p.frame() != place.frame());
                        let free = !clash(&model, place);
                        prop_assert_eq!(frames.claim(place), free.then_some(new));
                        if free {
                            model.push(place);
                        }
                    }
                    Op::Limit(to) => {
                        limit = to;
                        frames.set_limit(to);
                    }
                }
                frames.check().map_err(TestCaseError::fail)?;
                prop_assert_eq!(frames.oldest().collect::<Vec<_>>(), model.clone());
                prop_assert_eq!(frames.occupancy().frames, used(&model));
                for &place in &model {
                    prop_assert!(frames.is_taken(place));
                }
            }
        }
    }

    #[test]
    fn quarters_fill_what_halves_leave_before_a_frame_is_opened() {
        let mut frames = Frames::new(2);
        let mut take = |size| frames.take(size, || true).map(|a| (a.place.quarter, a.new_frame));
        assert_eq!(take(Size::Half), Some((0, true)));
        assert_eq!(take(Size::Quarter), Some((2, false)));
        assert_eq!(take(Size::Half), Some((4, true)));
        assert_eq!(take(Size::Quarter), Some((3, false)));
        assert_eq!(take(Size::Half), Some((6, false)));
        assert_eq!(take(Size::Quarter), None);
    }

    #[test]
    fn a_frame_that_cannot_be_had_is_not_taken() {
        let mut frames = Frames::new(2);
        assert_eq!(frames.take(Size::Half, || false), None);
        assert_eq!(frames.occupancy(), Occupancy::default());
        frames.check().unwrap();
    }
}
