use ballast_units::Pages;

use super::super::shared::HELD_TOGETHER;
use super::*;
use crate::replacement::Random;
use crate::service::testing::{PAGES, reclaim, reclaim_that_compresses};
use crate::word::{Busy, NO_STORE_PAGE, Word};

#[test]
fn what_is_held_leaves_together_but_where_a_fault_waits_for_it() {
    let Some(mut reclaim) = reclaim() else { return };
    let vm = reclaim.vm.clone();
    let charged = vm.memory.charged();
    vm.hold_until.store(u64::MAX, Ordering::Relaxed);
    let grown_by = |n: u64| vm.hold_at.store((charged - Pages(n)).0, Ordering::Relaxed);
    grown_by(HELD_TOGETHER - 1);
    assert!(!reclaim.goes_on());
    grown_by(HELD_TOGETHER);
    assert!(reclaim.goes_on());
    vm.evict_goal.store(0, Ordering::Relaxed);
    grown_by(1);
    assert!(!reclaim.goes_on());
    vm.waiting.store(1, Ordering::Relaxed);
    assert!(reclaim.goes_on());
}

#[test]
fn who_waits_for_memory_waits_for_no_more_than_leave_together() {
    let Some(mut reclaim) = reclaim() else { return };
    let chosen = |reclaim: &mut Reclaim| {
        reclaim.vm.evict_goal.store(100, Ordering::Relaxed);
        assert!(reclaim.next_victim().is_some());
        let chosen = reclaim.victims.len() as u64 + 1;
        reclaim.victims.clear();
        chosen
    };
    assert!(chosen(&mut reclaim) > RUN);
    reclaim.vm.waiting.store(1, Ordering::Relaxed);
    assert!(chosen(&mut reclaim) <= RUN);
}

/// Whether the fault service was woken since this was asked last.
fn was_woken(vm: &Shared) -> bool {
    rustix::io::read(&vm.wake_fd, &mut [0u8; 8]).is_ok()
}

fn evict(reclaim: &mut Reclaim, pages: u64) {
    reclaim.vm.evict_goal.store(pages, Ordering::Relaxed);
    reclaim.evict();
    assert_eq!(reclaim.vm.evict_goal.load(Ordering::Relaxed), 0);
}

#[test]
fn who_waits_for_memory_is_woken_when_a_page_leaves_unless_its_vm_has_too_much() {
    let Some(mut reclaim) = reclaim() else { return };
    let vm = reclaim.vm.clone();
    evict(&mut reclaim, 1);
    assert!(!was_woken(&vm), "nobody waits");
    vm.waiting.store(1, Ordering::Relaxed);
    evict(&mut reclaim, 1);
    assert!(was_woken(&vm));
    vm.memory.host().set_low(true);
    vm.memory.set_target(Pages(1));
    assert!(vm.memory.is_blocked());
    evict(&mut reclaim, 1);
    assert!(!was_woken(&vm), "it finds none");
}

#[test]
fn who_waits_for_memory_is_woken_when_a_frame_of_the_tier_is_empty() {
    let Some(mut reclaim) = reclaim_that_compresses() else { return };
    let vm = reclaim.vm.clone();
    // A page that goes into a frame which is there: with it, one of two is gained.
    evict(&mut reclaim, 1);
    let frames = || vm.memory.tier().occupancy().frames;
    assert_eq!(frames(), 1);
    vm.waiting.store(1, Ordering::Relaxed);
    while frames() > 0 {
        assert!(!was_woken(&vm), "nothing has become free");
        let cluster = reclaim.open_cluster().unwrap();
        assert!(reclaim.write_back(cluster));
    }
    assert!(was_woken(&vm));
}

#[test]
fn a_walk_for_victims_ends_with_its_vm() {
    let Some(mut reclaim) = reclaim() else { return };
    reclaim.vm.evict_goal.store(100, Ordering::Relaxed);
    assert!(reclaim.next_victim().is_some());
    reclaim.victims.clear();
    reclaim.vm.stop();
    assert!(reclaim.next_victim().is_none() && reclaim.victims.is_empty());
}

/// Else a failed location that does not answer would be given one cluster after another.
#[test]
fn what_is_being_written_is_counted_until_it_has_ended() {
    let Some(mut reclaim) = reclaim() else { return };
    let memory = reclaim.vm.memory.clone();
    // Zeros are not written.
    for p in 0..PAGES {
        let at = memory.backend().at(Ppn(p)).0 as *mut u64;
        // SAFETY: RAM of this process, that stays, and that nobody else looks at.
        unsafe { at.write_volatile(p + 1) };
    }
    // Part of a cluster, which waits for more.
    evict(&mut reclaim, 2);
    let cluster = reclaim.clusters.iter().position(|c| !c.sealed && c.pages.len() == 2).unwrap();
    assert_eq!(memory.writes_under_way(), 0);
    reclaim.write(cluster);
    assert_eq!(memory.writes_under_way(), 1);
    reclaim.flush_all();
    assert_eq!((memory.writes_under_way(), memory.swap_used()), (0, Pages(2)));
}

#[test]
fn a_sample_ends_where_no_page_can_be_held_any_more_and_when_its_vm_is_stopped() {
    let Some(mut reclaim) = reclaim() else { return };
    let memory = reclaim.vm.memory.clone();
    assert_eq!((memory.most_samples(), memory.may_hold()), (2, true));
    reclaim.sample((0..PAGES).map(Ppn).collect());
    assert_eq!((reclaim.sampled.len(), memory.may_hold()), (2, false));
    reclaim.end_sample();
    reclaim.vm.stop();
    reclaim.sample((0..PAGES).map(Ppn).collect());
    assert!(reclaim.sampled.is_empty());
}

/// Whoever has it reads its slot of the stage, and may leave it there.
#[test]
fn the_slot_of_a_page_that_is_wanted_back_while_it_is_to_be_compressed_is_given_to_no_other() {
    let Some(mut reclaim) = reclaim_that_compresses() else { return };
    let memory = reclaim.vm.memory.clone();
    let used = |reclaim: &Reclaim| reclaim.clusters[0].next_slot() - reclaim.clusters[0].base;
    for (is_wanted, taken) in [(false, 0), (true, 1)] {
        let ppn = Ppn(5 + u64::from(is_wanted));
        let left = memory.evict_run(ppn, 1, reclaim.clusters[0].next_slot()).unwrap();
        if is_wanted {
            memory.pmap().store(ppn, memory.pmap().load(ppn).set_busy(Busy::Filling));
        }
        reclaim.have_left(0, &left, true);
        assert_eq!(used(&reclaim), taken, "{is_wanted}");
    }
}

/// Nobody else would ever put it back: eviction takes what is at home, and a hold is one page of a sample.
#[test]
fn what_is_left_of_a_sample_is_put_back_by_whoever_comes_next() {
    let Some(reclaim) = reclaim() else { return };
    let memory = reclaim.vm.memory.clone();
    let state = || memory.pmap().load(Ppn(3)).state();
    assert!(memory.sample(Ppn(3)).unwrap());
    assert_eq!(state(), State::Held);
    let found = Recovered { held: vec![Ppn(3)], ..Recovered::default() };
    let (random, clock) = (Box::new(Random::seeded(1)), Clock::new(Pages(PAGES), 1));
    let mut next = Reclaim::new(reclaim.vm.clone(), random, clock, &found);
    next.end_sample();
    assert_eq!((state(), next.sampled.len()), (State::Resident, 0));
    // One that somebody else is at is put back later.
    next.sample(vec![Ppn(3)]);
    let word = memory.pmap().load(Ppn(3));
    memory.pmap().store(Ppn(3), word.set_busy(Busy::Filling));
    next.end_sample();
    assert_eq!(next.sampled, [Ppn(3)]);
    memory.pmap().store(Ppn(3), word);
    next.end_sample();
    assert_eq!((state(), next.sampled.len()), (State::Resident, 0));
}

#[test]
fn a_broken_page_that_cannot_go_home_now_is_taken_another_time() {
    let Some(mut reclaim) = reclaim() else { return };
    let memory = reclaim.vm.memory.clone();
    memory.pmap().store(Ppn(0), Word::with_slot(State::Broken, NO_STORE_PAGE));
    memory.give_back_broken([Ppn(0)]);
    assert!(!reclaim.bring_home(), "it has no shim");
    assert_eq!(memory.take_broken(9), [Ppn(0)]);
}

/// Who is asked in its place is told by that.
#[test]
fn a_stage_that_has_room_again_is_not_full() {
    let Some(mut reclaim) = reclaim() else { return };
    let vm = reclaim.vm.clone();
    let is_full = || vm.stage_full.load(Ordering::Relaxed);
    vm.stage_full.store(true, Ordering::Relaxed);
    vm.in_vain.store(true, Ordering::Relaxed);
    reclaim.clusters[0].sealed = true;
    reclaim.clusters[0].pages.clear();
    assert!(reclaim.open_cluster().is_none());
    reclaim.clusters[0].sealed = false;
    reclaim.settle_all();
    assert!(!is_full() && !vm.in_vain.load(Ordering::Relaxed));
}
