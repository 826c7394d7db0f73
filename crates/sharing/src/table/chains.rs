//! The chains. Shared frames come before hint frames, so a search that prefers the former ends at
//! the first frame of its hash.

use std::ops::{BitOr, BitXor};

use super::ShareTable;
use super::frame::{HintFrame, Link, Place, SharedFrame};
use crate::hash::PageHash;
use crate::ids::PageId;

/// Frames of a chain that are brought near: most have fewer.
const CHAIN: usize = 2;

/// What points at a frame of a chain.
#[derive(Clone, Copy)]
enum Pointer {
    Bucket(u32),
    Frame(Place),
}

impl ShareTable {
    /// Hash and link of a frame.
    pub(super) fn look(&self, place: Place) -> (PageHash, Link) {
        match place {
            Place::Shared(page) => {
                let frame = self.shared.get(page.get());
                (frame.hash, frame.link)
            }
            Place::Hint(page) => {
                let frame = self.hints.get(page.get());
                (frame.hash, frame.link)
            }
        }
    }

    /// Has what lookups and hints of these hashes will want brought near the processor: chains, and those that are parted when the
    /// table grows by as many. A lookup waits for memory two or three times, one after the other; here the waits of
    /// all go on at once. Changes nothing.
    pub fn warm(&self, hashes: impl IntoIterator<Item = PageHash>) {
        let mut heads: Vec<Link> =
            hashes.into_iter().map(|hash| self.buckets.get(self.buckets.of(hash))).collect();
        heads.extend(self.buckets.parted_next(heads.len() as u32));
        for _ in 0..CHAIN {
            for link in &mut heads {
                *link = link.place().map_or(Link::END, |place| self.look(place).1);
            }
        }
        // Else nothing would have to be read.
        std::hint::black_box(heads);
    }

    fn point(&mut self, pointer: Pointer, at: Link) {
        match pointer {
            Pointer::Bucket(bucket) => self.buckets.set(bucket, at),
            Pointer::Frame(Place::Shared(page)) => {
                if let Some(frame) = self.shared.get_mut(page.get()) {
                    frame.link = at;
                }
            }
            Pointer::Frame(Place::Hint(page)) => {
                if let Some(frame) = self.hints.get_mut(page.get()) {
                    frame.link = at;
                }
            }
        }
    }

    fn mark(&mut self, place: Place, chained: bool) {
        match place {
            Place::Shared(page) => {
                if let Some(frame) = self.shared.get_mut(page.get()) {
                    set(&mut frame.flags, SharedFrame::CHAINED, chained);
                }
            }
            Place::Hint(page) => {
                if let Some(frame) = self.hints.get_mut(page.get()) {
                    set(&mut frame.flags, HintFrame::CHAINED, chained);
                }
            }
        }
    }

    /// Puts a frame, which is there with its hash and in no chain, in the chain of its hash.
    pub(super) fn chain(&mut self, place: Place, hash: PageHash) {
        self.insert(place, hash);
        self.mark(place, true);
        self.chained += 1;
        if self.buckets.too_few(self.chained) {
            self.grow();
        }
    }

    fn insert(&mut self, place: Place, hash: PageHash) {
        let mut pointer = Pointer::Bucket(self.buckets.of(hash));
        let mut next = self.buckets.get(self.buckets.of(hash));
        if let Place::Hint(_) = place {
            while let Some(before @ Place::Shared(_)) = next.place() {
                pointer = Pointer::Frame(before);
                next = self.look(before).1;
            }
        }
        self.point(Pointer::Frame(place), next);
        self.point(pointer, place.into());
    }

    /// Takes a frame that is chained out of its chain. It stays where it is.
    pub(super) fn unchain(&mut self, place: Place) {
        let (hash, after) = self.look(place);
        let mut pointer = Pointer::Bucket(self.buckets.of(hash));
        let mut next = self.buckets.get(self.buckets.of(hash));
        while let Some(here) = next.place() {
            if here == place {
                self.point(pointer, after);
                self.mark(place, false);
                self.chained -= 1;
                self.shrink(2);
                return;
            }
            pointer = Pointer::Frame(here);
            next = self.look(here).1;
        }
        debug_assert!(false, "{place:?} is chained, and in no chain");
    }

    /// Takes every hint of `[from, to)` out of the chain of a hash: one walk for all of them.
    pub(super) fn unchain_hints(&mut self, hash: PageHash, from: PageId, to: u32) {
        let mut pointer = Pointer::Bucket(self.buckets.of(hash));
        let mut next = self.buckets.get(self.buckets.of(hash));
        while let Some(here) = next.place() {
            next = self.look(here).1;
            match here {
                Place::Hint(page) if (from.get()..to).contains(&page.get()) => {
                    self.point(pointer, next);
                    self.mark(here, false);
                    self.chained -= 1;
                }
                _ => pointer = Pointer::Frame(here),
            }
        }
    }

    /// One more bucket: the chain it comes from is parted in two, in order.
    fn grow(&mut self) {
        let (from, new) = self.buckets.add();
        let mut next = self.buckets.get(from);
        let (mut stay, mut go) = (Pointer::Bucket(from), Pointer::Bucket(new));
        while let Some(here) = next.place() {
            let (hash, after) = self.look(here);
            let tail = if self.buckets.of(hash) == new { &mut go } else { &mut stay };
            let pointer = std::mem::replace(tail, Pointer::Frame(here));
            self.point(pointer, here.into());
            next = after;
        }
        self.point(stay, Link::END);
        self.point(go, Link::END);
    }

    /// Takes up to `most` buckets away where there are more than frames.
    pub(super) fn shrink(&mut self, most: u64) {
        for _ in 0..most {
            if !self.buckets.too_many(self.chained) {
                return;
            }
            let mut next = self.buckets.remove();
            while let Some(here) = next.place() {
                let (hash, after) = self.look(here);
                self.insert(here, hash);
                next = after;
            }
        }
    }
}

fn set<T: BitOr<Output = T> + BitXor<Output = T> + Copy>(flags: &mut T, flag: T, on: bool) {
    *flags = if on { *flags | flag } else { (*flags | flag) ^ flag };
}
