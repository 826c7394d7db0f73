//! The invariants of the module, executable.

use std::collections::HashSet;

use ballast_compress::Place;

use super::Memory;
use crate::backend::Backend;
use crate::sync::lock;
use crate::word::State;

impl<B: Backend> Memory<B> {
    /// Checks every invariant; call it while no transition runs.
    ///
    /// # Errors
    /// The first that does not hold, in words.
    pub fn check(&self) -> Result<(), String> {
        self.pmap.check()?;
        let slots = lock(&self.slots);
        slots.check()?;
        let (mut charged, mut swapped) = (0, HashSet::new());
        let mut staged = HashSet::new();
        let mut compressed = 0;
        for ppn in self.pmap.known() {
            let word = self.pmap.load(ppn);
            if !word.is_idle() {
                return Err(format!("{ppn} is busy: {word:?}"));
            }
            charged += u64::from(word.state().charged());
            if self.regions.is_large(ppn)
                && !matches!(word.state(), State::Resident | State::Ballooned | State::Untouched)
            {
                return Err(format!("{ppn}: {word:?}, in a region that was not broken"));
            }
            match word.state() {
                State::Swapped if !slots.is_taken(word.stored().slot) => {
                    return Err(format!("{ppn}: {word:?}, but the slot is free"));
                }
                State::Swapped if !swapped.insert(word.slot()) => {
                    return Err(format!("{ppn}: {word:?}, another page's slot"));
                }
                State::Staged | State::Held if !staged.insert(word.slot()) => {
                    return Err(format!("{ppn}: {word:?}, another page's stage slot"));
                }
                State::Compressed => {
                    let place = Place::from_bits(word.slot());
                    if !place.is_some_and(|p| self.tier.is_taken(p)) {
                        return Err(format!("{ppn}: {word:?}, but the slot is free"));
                    }
                    let owner = place.and_then(|p| self.tier.owner(p));
                    if owner != Some(ppn) {
                        return Err(format!("{ppn}: {word:?}, a slot of {owner:?}"));
                    }
                    compressed += 1;
                }
                _ => {}
            }
        }
        self.tier.check()?;
        let tier = self.tier.occupancy();
        if tier.pages != compressed {
            return Err(format!("{compressed} pages compressed, {} slots taken", tier.pages));
        }
        charged += tier.frames;
        if charged != self.charged().0 {
            return Err(format!("{charged} charged pages, {} booked", self.charged().0));
        }
        let holds = self.stage.layout().holds as usize - self.stage.holds_free();
        let held = self.pmap.in_state(State::Held).0 as usize;
        if holds != held {
            return Err(format!("{holds} holds taken, {held} pages held"));
        }
        Ok(())
    }

    /// `check`, and no swap slot is taken but by a Swapped page: nothing leaked.
    ///
    /// # Errors
    /// The first that does not hold, in words.
    pub fn check_quiet(&self) -> Result<(), String> {
        self.check()?;
        let used = self.swap_used();
        let swapped = self.pmap.in_state(State::Swapped);
        if used != swapped {
            return Err(format!("{} swap slots taken, {} pages swapped", used.0, swapped.0));
        }
        Ok(())
    }
}
