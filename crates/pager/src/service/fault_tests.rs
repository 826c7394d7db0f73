use ballast_uffd::Modes;
use ballast_units::{Bytes, PAGE_SIZE, Pages};
use rustix::mm::{MapFlags, ProtFlags};

use super::*;
use crate::memory::Fault;
use crate::service::serve::Met;
use crate::service::{FaultThreads, Health};

#[test]
fn what_is_not_ready_for_long_is_tried_seldom_and_what_changes_often() {
    let (mut tries, begun) = (Tries::default(), Instant::now());
    let mut after = |ms, state| tries.patience(state, begun + Duration::from_millis(ms));
    assert_eq!([0, 0].map(|ms| after(ms, (1, 0, 0))), [Tries::OFTEN; 2]);
    assert_eq!(after(16, (1, 0, 0)), Duration::from_millis(1));
    assert_eq!(after(1000, (1, 0, 0)), Tries::SELDOM);
    assert_eq!(after(1001, (1, 1, 0)), Tries::OFTEN);
    tries.begin_anew();
    let later = begun + Duration::from_secs(9);
    assert_eq!(tries.patience((1, 1, 0), later), Tries::OFTEN);
}

#[test]
fn faults_that_were_kept_waiting_are_timed_from_when_that_began() {
    let Some(vm) = crate::service::testing::vm(16, 1) else { return };
    let crew = Crew::new(vm.clone(), FaultThreads::default());
    let mut service = FaultService::new(vm.clone(), Vec::new(), crew).unwrap();
    // Nobody came meanwhile, or it took no time.
    let long_ago = Instant::now() - Duration::from_secs(1_000);
    service.kept_from(long_ago);
    assert_eq!(service.kept_since, None);
    let base = vm.memory.backend().layout().at(Ppn(0)).addr.0;
    let touch = |page: u64| {
        // SAFETY: inside the mapping, which stays; nobody else uses the page.
        std::thread::spawn(move || unsafe {
            ((base + page * PAGE_SIZE as u64) as *mut u8).write_volatile(1);
        })
    };
    let serve = |service: &mut FaultService| {
        while !service.has_events() {
            std::thread::yield_now();
        }
        service.kept_from(Instant::now() + Duration::from_secs(1_000));
        assert_eq!(service.kept_since, None);
        service.kept_from(long_ago);
        assert!(service.crew.is_crowded(Instant::now()));
        service.take_events(&mut Vec::new()).unwrap();
    };
    let guest = touch(3);
    serve(&mut service);
    guest.join().unwrap();
    assert!(vm.fault_times.sum() >= Duration::from_secs(1_000));
    assert_eq!(vm.fault_times.counts().iter().sum::<u64>(), 1);
    // Not those that are read after them.
    assert_eq!(service.kept_since, None);
}

#[test]
fn what_was_refused_is_tried_again_at_once_unless_there_is_something_to_be_read() {
    let Some(vm) = crate::service::testing::vm(16, 1) else { return };
    let crew = Crew::new(vm.clone(), FaultThreads::default());
    let mut service = FaultService::new(vm.clone(), Vec::new(), crew).unwrap();
    let keep = |service: &mut FaultService, ppn, why| {
        let (access, outcome) = (Access::Missing, Fault::Wait(why));
        let met = Met { ppn: Ppn(ppn), access, away: false, outcome };
        service.serve.met(&vm.memory, met, &mut service.tasks);
    };
    keep(&mut service, 3, Wait::Discard);
    keep(&mut service, 5, Wait::Kernel);
    // Bytes that were read, and for which the kernel had no memory.
    service.unfilled.push((70, Wait::Kernel));
    service.chase();
    assert_eq!(service.serve.pending().waiting(), [Ppn(5)]);
    assert_eq!(std::mem::take(&mut service.unfilled), [(70, Wait::Kernel)]);
    keep(&mut service, 4, Wait::Discard);
    let base = vm.memory.backend().layout().at(Ppn(7)).addr.0;
    // SAFETY: inside the mapping, which stays; nobody else uses the page.
    let guest = std::thread::spawn(move || unsafe { (base as *mut u8).write_volatile(1) });
    while !service.has_events() {
        std::thread::yield_now();
    }
    service.chase();
    assert_eq!(service.serve.pending().waiting(), [Ppn(4), Ppn(5)]);
    service.take_events(&mut Vec::new()).unwrap();
    guest.join().unwrap();
    service.chase();
    assert_eq!(service.serve.pending().waiting(), [Ppn(5)]);
}

#[test]
fn what_a_takeover_could_not_book_is_booked() {
    let Some(vm) = crate::service::testing::vm(16, 1) else { return };
    for ppn in [1, 2] {
        assert_eq!(vm.memory.fault(Ppn(ppn), Access::Missing), Fault::Served);
    }
    vm.memory.backend().punch(Ppn(1), 1).unwrap();
    let left = Unbooked { busy: vec![(Ppn(1), 2)], present: Vec::new() };
    let crew = Crew::new(vm.clone(), FaultThreads::default());
    let unbooked = vec![(left, vm.memory.mark())];
    let mut service = FaultService::new(vm.clone(), unbooked, crew).unwrap();
    service.retry();
    let states = [1, 2].map(|ppn| vm.memory.pmap().load(Ppn(ppn)).state());
    assert_eq!((states, vm.memory.charged()), ([State::Ballooned, State::Resident], Pages(1)));
}

#[test]
fn what_is_being_given_up_does_not_come_home_beside_what_is_wanted() {
    for is_given_up in [false, true] {
        let Some(vm) = crate::service::testing::vm(16, 1) else { return };
        let memory = &vm.memory;
        for p in 0..4 {
            assert_eq!(memory.fault(Ppn(p), Access::Missing), Fault::Served);
            let at = memory.backend().at(Ppn(p)).0 as *mut u64;
            // SAFETY: RAM of this process, that stays, and that nobody else looks at.
            unsafe { at.write_volatile(p + 1) };
        }
        assert_eq!(memory.evict_run(Ppn(0), 4, 0).unwrap().len(), 4);
        let crew = Crew::new(vm.clone(), FaultThreads::default());
        let mut service = FaultService::new(vm.clone(), Vec::new(), crew).unwrap();
        if is_given_up {
            let left = Unbooked { busy: vec![(Ppn(2), 1)], present: Vec::new() };
            service.serve.resume(left, memory.mark());
        }
        for p in [0, 1] {
            assert!(service.serve.fault(memory, Ppn(p), Access::Missing, &mut service.tasks));
            service.work();
        }
        let state = memory.pmap().load(Ppn(2)).state();
        assert_eq!(state == State::Staged, is_given_up, "{state:?}");
    }
}

#[test]
fn a_fault_that_was_read_and_is_in_no_book_is_met_again() {
    let Some(vm) = crate::service::testing::vm(16, 1) else { return };
    let crew = Crew::new(vm.clone(), FaultThreads::default());
    let mut service = FaultService::new(vm.clone(), Vec::new(), crew).unwrap();
    let base = vm.memory.backend().layout().at(Ppn(5)).addr.0;
    // SAFETY: inside the mapping, which stays; nobody else uses the page.
    let guest = std::thread::spawn(move || unsafe { (base as *mut u8).write_volatile(1) });
    while !service.has_events() {
        std::thread::yield_now();
    }
    // Somebody else read it.
    assert_eq!(vm.memory.backend().uffd().read_events(&mut Vec::new()).unwrap(), 1);
    let begun = Instant::now();
    let look = |service: &mut FaultService, ms| {
        service.look_for_overdue(begun + Duration::from_millis(ms));
        matches!(vm.trouble(), Health::Ill { .. })
    };
    assert_eq!([2_000, 2_000].map(|ms| look(&mut service, ms)), [false; 2]);
    // Not while another waits, and as soon as none does.
    service.failed.insert(Ppn(9), begun);
    assert!(!look(&mut service, 4_000));
    service.failed.clear();
    assert!(look(&mut service, 4_001));
    while !service.has_events() {
        std::thread::yield_now();
    }
    service.take_events(&mut Vec::new()).unwrap();
    guest.join().unwrap();
    assert_eq!(vm.memory.backend().uffd().waiters().unwrap().read, 0);
    // One that is in the books is not met again, however long it waits.
    vm.memory.host().ledger.set_budget(Pages(1));
    // SAFETY: as above.
    let guest = std::thread::spawn(move || unsafe {
        ((base + PAGE_SIZE as u64) as *mut u8).write_volatile(1);
    });
    while !service.has_events() {
        std::thread::yield_now();
    }
    service.take_events(&mut Vec::new()).unwrap();
    (6..20).for_each(|s| _ = look(&mut service, 1_000 * s));
    assert!(!service.has_events());
    assert_eq!(vm.memory.backend().uffd().waiters().unwrap().read, 1);
    vm.memory.host().ledger.set_budget(Pages(100));
    service.retry();
    guest.join().unwrap();
}

#[test]
fn what_is_kept_for_threads_that_wait_no_more_is_let_go() {
    let few = Watch::FEW;
    let Some(vm) = crate::service::testing::vm(few + 16, 1) else { return };
    let crew = Crew::new(vm.clone(), FaultThreads::default());
    let mut service = FaultService::new(vm.clone(), Vec::new(), crew).unwrap();
    vm.memory.host().ledger.set_budget(Pages(0));
    let base = vm.memory.backend().layout().at(Ppn(5)).addr.0;
    // SAFETY: inside the mapping, which stays; nobody else uses the page.
    let guest = std::thread::spawn(move || unsafe { (base as *mut u8).write_volatile(1) });
    let meet = |service: &mut FaultService| {
        while !service.has_events() {
            std::thread::yield_now();
        }
        service.take_events(&mut Vec::new()).unwrap();
    };
    meet(&mut service);
    let call_off = |service: &mut FaultService, pages: std::ops::Range<u64>| {
        for ppn in pages {
            let (access, outcome) = (Access::Missing, Fault::Wait(Wait::Memory));
            let met = Met { ppn: Ppn(ppn), access, away: false, outcome };
            service.serve.met(&vm.memory, met, &mut service.tasks);
        }
    };
    let begun = Instant::now();
    let looks = |service: &mut FaultService, seconds: [u64; 3]| {
        seconds.map(|s| {
            service.look_for_overdue(begun + Duration::from_secs(s));
            service.serve.pending().faults() as u64
        })
    };
    call_off(&mut service, 6..6 + few);
    assert_eq!(looks(&mut service, [2, 3, 4]), [few + 1; 3], "as many as are let be");
    call_off(&mut service, 6 + few..7 + few);
    assert_eq!(looks(&mut service, [5, 5, 6]), [few + 2, few + 2, 0]);
    // Who does wait says so again.
    meet(&mut service);
    assert_eq!(service.serve.pending().waiting(), [Ppn(5)]);
    assert_eq!(looks(&mut service, [7, 8, 9]), [1; 3]);
    vm.memory.host().ledger.set_budget(Pages(100));
    service.retry();
    guest.join().unwrap();
}

#[test]
fn what_comes_to_nothing_is_counted_and_rested_for() {
    let few = Watch::FEW;
    let Some(vm) = crate::service::testing::vm(few + 1, 1) else { return };
    let crew = Crew::new(vm.clone(), FaultThreads::default());
    let mut service = FaultService::new(vm.clone(), Vec::new(), crew).unwrap();
    let counted = |service: &mut FaultService| {
        let vain = std::mem::replace(&mut service.vain, Vain::new(Instant::now()));
        !vain.debt().is_zero()
    };
    // The last page that its VMM announced stays, and then it does not.
    let page = Ppn(few);
    assert_eq!(vm.memory.fault(page, Access::Missing), Fault::Served);
    for stays in [true, false] {
        let left = Unbooked { busy: Vec::new(), present: vec![(page, 1)] };
        service.serve.resume(left, vm.memory.mark());
        if !stays {
            vm.memory.backend().punch(page, 1).unwrap();
        }
        while !service.serve.pending().is_empty() {
            service.retry();
        }
        assert_eq!(counted(&mut service), stays);
    }
    vm.memory.host().ledger.set_budget(Pages(0));
    let keep = |service: &mut FaultService, ppn| {
        let (access, outcome) = (Access::Missing, Fault::Wait(Wait::Memory));
        let met = Met { ppn: Ppn(ppn), access, away: false, outcome };
        service.serve.met(&vm.memory, met, &mut service.tasks);
    };
    (0..few).for_each(|ppn| keep(&mut service, ppn));
    service.retry();
    assert!(!counted(&mut service), "so few as a guest has processors, and more");
    keep(&mut service, few);
    service.retry();
    assert!(counted(&mut service));
    // Something came of it.
    vm.memory.host().ledger.set_budget(Pages(1));
    service.retry();
    assert!(!counted(&mut service));
    assert_eq!(service.serve.pending().faults() as u64, few);
    let long = Duration::from_millis(20);
    let begun = Instant::now();
    service.vain.note(begun, Vain::ALLOWED + long / 10);
    service.rest_from_vain();
    assert!(begun.elapsed() >= long);
    // A thread that is to end does.
    service.vain.note(Instant::now(), Duration::from_secs(1_000));
    vm.stop();
    service.rest_from_vain();
}

/// It may wait there, or be woken by its VMM; and it hides no other.
#[test]
fn a_fault_on_what_a_vmm_has_besides_its_ram_is_let_alone() {
    let Some(vm) = crate::service::testing::vm(16, 1) else { return };
    let crew = Crew::new(vm.clone(), FaultThreads::default());
    let mut service = FaultService::new(vm.clone(), Vec::new(), crew).unwrap();
    let begun = Instant::now();
    let (access, private) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: a fresh mapping, never unmapped, reached by its address alone.
    let beside = unsafe {
        rustix::mm::mmap_anonymous(std::ptr::null_mut(), PAGE_SIZE, access, private).unwrap()
    } as u64;
    let uffd = vm.memory.backend().uffd();
    let page = Bytes(PAGE_SIZE as u64);
    // SAFETY: as above.
    unsafe { uffd.register(HostAddr(beside), page, Modes::MISSING) }.unwrap();
    // SAFETY: as above.
    let guest = std::thread::spawn(move || unsafe { (beside as *mut u8).write_volatile(1) });
    while !service.has_events() {
        std::thread::yield_now();
    }
    service.take_events(&mut Vec::new()).unwrap();
    for s in 2..20 {
        service.look_for_overdue(begun + Duration::from_secs(s));
    }
    let Health::Ill { last, .. } = vm.trouble() else { panic!("{:?}", vm.trouble()) };
    assert!(last.contains("outside the RAM"), "{last}");
    assert_eq!((service.outside, uffd.waiters().unwrap().read), (1, 1));
    uffd.zeropage(HostAddr(beside), PAGE_SIZE, true).unwrap();
    guest.join().unwrap();
    service.look_for_overdue(begun + Duration::from_secs(200));
    assert_eq!(service.outside, 0);
}
