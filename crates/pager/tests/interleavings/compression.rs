//! Compression, and the way from there to swap, against everything that may want the page meanwhile.

use ballast_compress::Compressor;
use ballast_pager::memory::{Compressed, NotBack};

use super::*;

impl Rig {
    /// What the reclaim thread does: evict, compress, and on to swap what cannot be.
    fn compress(&self, ppn: u64, stage_slot: u64) {
        let mut compressor = Compressor::new(Algorithm::Lz4).unwrap();
        if evict(&self.memory, Ppn(ppn), stage_slot) != Ok(Evicted::Staged) {
            return;
        }
        if !matches!(
            self.memory.compress(Ppn(ppn), stage_slot, Some(&mut compressor)),
            Compressed::Stored { .. }
        ) {
            self.write_out(ppn, stage_slot);
        }
    }

    /// The cluster write of one page.
    fn write_out(&self, ppn: u64, stage_slot: u64) {
        let (slot, _) = self.memory.take_slots(1).unwrap();
        // SAFETY: the slot is not reused before `written` has said that it may be.
        let bytes = Box::new(*unsafe { self.memory.stage().page(stage_slot) });
        token_of(&bytes);
        let stored = Stored::new(slot, &bytes);
        self.swap.lock().unwrap().insert(slot.0, bytes);
        while !self.memory.written(Ppn(ppn), stage_slot, stored) {
            thread::yield_now();
        }
    }

    fn write_back(&self, stage_slot: u64) {
        for place in self.memory.tier().oldest(4) {
            match self.memory.write_back(place, stage_slot) {
                Ok(ppn) => return self.write_out(ppn.0, stage_slot),
                Err(NotBack::Left) => {}
                Err(e) => panic!("{e:?}"),
            }
        }
    }
}

#[test]
fn guest_write_against_compression() {
    explore(|| {
        let rig = Rig::new(1, 3, 1);
        rig.put(0, 7);
        rig.run(vec![writer(0, 100, 3), actor(|rig| rig.compress(0, 0))]);
    });
}

#[test]
fn a_slot_of_the_stage_is_used_again_at_once() {
    explore(|| {
        let rig = Rig::new(2, 4, 1);
        rig.put(0, 7);
        rig.put(1, 8);
        rig.run(vec![
            writer(0, 100, 2),
            actor(|rig| assert_eq!(rig.ram.0.guest_read(1), 8)),
            actor(|rig| {
                for ppn in [0, 1, 0] {
                    rig.compress(ppn, 0);
                }
            }),
        ]);
    });
}

#[test]
fn no_memory_for_a_frame() {
    explore(|| {
        // Every page of the budget is the guest's: frames come out of what eviction frees.
        let rig = Rig::new(2, 2, 1);
        rig.put(0, 7);
        rig.put(1, 8);
        rig.run(vec![
            writer(0, 100, 2),
            actor(|rig| {
                rig.compress(1, 0);
                rig.compress(0, 1);
                rig.write_back(2);
            }),
        ]);
        assert!(rig.memory.host().ledger.peak().0 <= 2);
    });
}

#[test]
fn guest_accesses_against_the_way_on_to_swap() {
    explore(|| {
        let rig = Rig::new(2, 4, 1);
        for ppn in 0..2 {
            rig.put(ppn, 7 + ppn);
            rig.compress(ppn, ppn);
        }
        assert_eq!(rig.memory.tier().occupancy().pages, 2);
        rig.run(vec![
            writer(0, 100, 2),
            actor(|rig| assert_eq!(rig.ram.0.guest_read(1), 8)),
            actor(|rig| {
                rig.write_back(0);
                rig.write_back(1);
                rig.compress(1, 2);
            }),
        ]);
    });
}

#[test]
fn discard_against_compression_and_the_way_on() {
    for how in [Discard::PunchThenTell, Discard::TellThenPunch] {
        explore(move || {
            let rig = Rig::new(1, 3, 1);
            rig.put(0, 7);
            rig.run(vec![
                discarder(0, how, &[7]),
                actor(|rig| {
                    rig.compress(0, 0);
                    rig.write_back(1);
                    rig.compress(0, 2);
                }),
            ]);
        });
    }
}

#[test]
fn sampling_against_compression() {
    explore(|| {
        let rig = Rig::new(1, 3, 1);
        rig.put(0, 7);
        rig.compress(0, 0);
        rig.run(vec![
            actor(|rig| assert_eq!(rig.ram.0.guest_read(0), 7)),
            actor(|rig| {
                rig.sample(0);
                rig.unsample(0);
            }),
            actor(|rig| rig.write_back(1)),
        ]);
    });
}
