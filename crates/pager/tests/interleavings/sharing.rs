//! Pages that move into the store, to the zeros and home, while guests write, discard and exit.

use ballast_pager::sharing::examine::{Examiner, Marking};
use ballast_pager::word::State;
use ballast_units::Ppn;
use shuttle::sync::atomic::Ordering;
use shuttle::thread;

use super::support::site::Site;
use super::support::{Discard, Unanswered};
use super::*;

/// Looks at pages, as the VM's share thread does.
fn examine(rig: &Rig, pages: &[u64]) {
    let pages: Vec<Ppn> = pages.iter().copied().map(Ppn).collect();
    Examiner::default().examine(&rig.memory, &pages, Marking::All).unwrap();
}

fn examiner(pages: &'static [u64], times: usize) -> Actor {
    actor(move |rig| {
        for _ in 0..times {
            examine(rig, pages);
            thread::yield_now();
        }
    })
}

fn homer(pages: &'static [u64], times: usize) -> Actor {
    actor(move |rig| {
        let pages: Vec<Ppn> = pages.iter().copied().map(Ppn).collect();
        for _ in 0..times {
            rig.memory.go_home(&pages).unwrap();
            thread::yield_now();
        }
    })
}

/// Reads what must not have changed.
fn reader(ppn: u64, token: u64, times: usize) -> Actor {
    actor(move |rig| {
        for _ in 0..times {
            assert_eq!(rig.ram.0.guest_read(ppn), token, "ppn {ppn}");
        }
    })
}

/// Actors, and one that goes on until they are done, and is told then.
fn beside<'a>(
    actors: Vec<(&'a Arc<Rig>, Actor)>,
    at: &'a Arc<Rig>,
    again: impl Fn(&Rig, bool) + Send + 'static,
) -> Vec<(&'a Arc<Rig>, Actor)> {
    let left = Arc::new(AtomicUsize::new(actors.len()));
    let counted = |inner: Actor| {
        let left = left.clone();
        actor(move |rig| {
            inner(rig);
            left.fetch_sub(1, Ordering::SeqCst);
        })
    };
    let mut all: Vec<_> = actors.into_iter().map(|(rig, inner)| (rig, counted(inner))).collect();
    all.push((
        at,
        actor(move |rig| {
            while left.load(Ordering::SeqCst) > 0 {
                again(rig, false);
                thread::yield_now();
            }
            again(rig, true);
        }),
    ));
    all
}

/// Of the VMs of a site, when nothing moves.
fn check_all(site: &Site, vms: &[&Arc<Rig>]) {
    let mut booked = site.reserve() + site.domain.stats().common;
    let mut words = Vec::new();
    for vm in vms {
        assert_eq!(vm.memory.settle_parked(), Ok(0));
        vm.check();
        booked += vm.memory.charged() - vm.memory.owed();
        words.extend((0..vm.memory.pmap().len().0).map(|p| vm.memory.pmap().load(Ppn(p))));
    }
    site.check(words);
    assert_eq!(site.host.ledger.used(), booked);
}

/// Two VMs with the same pages at home: 7, 8, ... from page 0 on.
fn twins(budget: u64, pages: u64) -> (Site, Arc<Rig>, Arc<Rig>) {
    let site = Site::new(budget, 2);
    let (a, b) = (Rig::at(&site, pages, 1), Rig::at(&site, pages, 1));
    for p in 0..pages {
        a.put(p, 7 + p);
        b.put(p, 7 + p);
    }
    (site, a, b)
}

/// The same, shared already.
fn sharers(budget: u64, pages: u64) -> (Site, Arc<Rig>, Arc<Rig>) {
    let (site, a, b) = twins(budget, pages);
    let all: Vec<u64> = (0..pages).collect();
    examine(&a, &all);
    examine(&b, &all);
    assert_eq!(site.domain.stats().shared, Pages(2 * pages));
    check_all(&site, &[&a, &b]);
    (site, a, b)
}

/// What a page holds in the end, whatever state it is in.
fn expect(rig: &Rig, ppn: u64, token: u64) {
    let mut serve = Serve::default();
    for _ in 0..10 {
        match rig.ram.0.try_access(ppn, None) {
            Ok(seen) => return assert_eq!(seen, token, "ppn {ppn}"),
            Err(access) => {
                let mut tasks = Vec::new();
                serve.fault(&rig.memory, Ppn(ppn), access, &mut tasks);
                for task in tasks {
                    match task {
                        Task::Read(ppn, stored) => {
                            let bytes = rig.swap.lock().unwrap()[&stored.slot.0].clone();
                            serve.arrived(&rig.memory, ppn, Some(&bytes), &mut Vec::new());
                        }
                        Task::Came(_) => {}
                        other => panic!("{other:?}"),
                    }
                }
                for ppn in rig.memory.take_reads_of_untouched() {
                    rig.memory.map_zeros(ppn, 1).unwrap();
                }
            }
        }
    }
    panic!("ppn {ppn} is never served");
}

#[test]
fn guest_write_against_entering_the_store() {
    explore(|| {
        let (site, a, b) = twins(8, 1);
        run_all(vec![(&a, writer(0, 100, 3)), (&a, examiner(&[0], 1)), (&b, examiner(&[0], 2))]);
        check_all(&site, &[&a, &b]);
        expect(&a, 0, 102);
        expect(&b, 0, 7);
    });
}

/// Another VM finds our page, makes it common, and joins it, while we write, read and go home.
#[test]
fn a_page_is_made_common_by_another_vm() {
    explore(|| {
        let (site, a, b) = twins(8, 2);
        examine(&a, &[0, 1]);
        run_all(vec![
            (&a, writer(0, 100, 2)),
            (&a, reader(1, 8, 2)),
            (&a, homer(&[0, 1], 2)),
            (&b, examiner(&[0, 1], 1)),
        ]);
        check_all(&site, &[&a, &b]);
        expect(&a, 0, 101);
        expect(&a, 1, 8);
        expect(&b, 0, 7);
    });
}

#[test]
fn two_vms_write_to_the_page_they_share() {
    explore(|| {
        let (site, a, b) = sharers(8, 1);
        run_all(vec![(&a, writer(0, 100, 2)), (&b, writer(0, 200, 2)), (&b, reader(0, 7, 0))]);
        check_all(&site, &[&a, &b]);
        expect(&a, 0, 101);
        expect(&b, 0, 201);
        assert_eq!(site.domain.refs(page_of_word(&a)), 2);
    });
}

fn page_of_word(rig: &Rig) -> ballast_sharing::StorePage {
    rig.memory.pmap().load(Ppn(0)).store_page().unwrap()
}

#[test]
fn break_against_going_home() {
    explore(|| {
        let (site, a, b) = sharers(8, 2);
        run_all(vec![
            (&a, writer(0, 100, 3)),
            (&a, reader(1, 8, 2)),
            (&a, homer(&[0, 1], 2)),
            (&b, homer(&[0], 1)),
        ]);
        check_all(&site, &[&a, &b]);
        expect(&a, 0, 102);
        expect(&b, 0, 7);
    });
}

/// A page that two VMs share comes home for a large page, beside writes to it, to its copy and to the rest of the region, and a look.
#[test]
fn a_shared_page_comes_home_for_a_large_page() {
    explore(|| {
        let site = Site::new(40, 2);
        let ram = Double::on(&site.machine, 2);
        ram.0.set_large(2);
        let a = Rig::over(ram, site.host.clone(), 2, 1);
        site.domain.join(&a.memory).unwrap();
        let b = Rig::at(&site, 1, 1);
        a.put(0, 7);
        a.put(1, 8);
        b.put(0, 7);
        a.memory.break_large(Ppn(0)).unwrap();
        examine(&a, &[0, 1]);
        examine(&b, &[0]);
        assert_eq!(a.memory.can_collapse(0), Some(vec![Ppn(0)]));
        run_all(vec![
            (&a, writer(0, 100, 2)),
            (&a, writer(1, 200, 2)),
            (&b, writer(0, 300, 2)),
            (&b, examiner(&[0], 1)),
            (
                &a,
                actor(|rig| {
                    for _ in 0..2 {
                        rig.memory.collapse(0).unwrap();
                        thread::yield_now();
                    }
                }),
            ),
        ]);
        check_all(&site, &[&a, &b]);
        expect(&a, 0, 101);
        expect(&a, 1, 201);
        expect(&b, 0, 301);
    });
}

/// Home and back into the store, with writes all the while.
#[test]
fn there_and_back_again() {
    explore(|| {
        let (site, a, b) = sharers(8, 1);
        run_all(vec![
            (&a, writer(0, 100, 2)),
            (&a, homer(&[0], 2)),
            (&a, examiner(&[0], 2)),
            (&b, examiner(&[0], 1)),
        ]);
        check_all(&site, &[&a, &b]);
        expect(&a, 0, 101);
        expect(&b, 0, 7);
    });
}

#[test]
fn discard_against_sharing() {
    for how in [Discard::PunchThenTell, Discard::TellThenPunch] {
        explore(move || {
            let (site, a, b) = twins(8, 1);
            run_all(vec![
                (&a, discarder(0, how, &[7, 50])),
                (&a, examiner(&[0], 2)),
                (&b, examiner(&[0], 2)),
            ]);
            check_all(&site, &[&a, &b]);
            expect(&a, 0, 51);
            expect(&b, 0, 7);
        });
    }
}

#[test]
fn discard_of_shared_and_broken_pages_against_going_home() {
    explore(|| {
        let (site, a, b) = sharers(8, 1);
        run_all(vec![
            (&a, discarder(0, Discard::PunchThenTell, &[7, 50])),
            (&a, homer(&[0], 2)),
            (&b, reader(0, 7, 1)),
        ]);
        check_all(&site, &[&a, &b]);
        expect(&a, 0, 51);
    });
}

#[test]
fn sharing_against_eviction() {
    explore(|| {
        let (site, a, b) = twins(8, 1);
        run_all(vec![
            (&a, reader(0, 7, 2)),
            (&a, examiner(&[0], 2)),
            (
                &a,
                actor(|rig| {
                    rig.reclaim(0, 0);
                    rig.reclaim(0, 1);
                }),
            ),
            (&b, examiner(&[0], 1)),
        ]);
        check_all(&site, &[&a, &b]);
        expect(&a, 0, 7);
        expect(&b, 0, 7);
    });
}

#[test]
fn protection_is_lifted_beside_writes_looks_and_eviction() {
    explore(|| {
        let (site, a, b) = twins(8, 1);
        run_all(vec![
            (&a, writer(0, 100, 2)),
            (&a, examiner(&[0], 2)),
            (
                &a,
                actor(|rig| {
                    for _ in 0..2 {
                        rig.memory.lift_unwritten(Ppn(0), 1).unwrap();
                        thread::yield_now();
                    }
                }),
            ),
            (&a, actor(|rig| rig.reclaim(0, 0))),
        ]);
        check_all(&site, &[&a, &b]);
        expect(&a, 0, 101);
    });
}

#[test]
fn sharing_against_sampling() {
    explore(|| {
        let (site, a, b) = twins(8, 1);
        run_all(vec![
            (&a, writer(0, 100, 2)),
            (&a, examiner(&[0], 2)),
            (
                &a,
                actor(|rig| {
                    for _ in 0..2 {
                        // As the reclaim thread does with a page that it cannot sample: later.
                        if rig.memory.sample(Ppn(0)).unwrap() {
                            rig.unsample(0);
                        }
                    }
                }),
            ),
            (&b, examiner(&[0], 1)),
        ]);
        check_all(&site, &[&a, &b]);
        expect(&a, 0, 101);
    });
}

#[test]
fn zeros_are_read_and_written() {
    explore(|| {
        let site = Site::new(8, 1);
        let a = Rig::at(&site, 2, 1);
        let readers = actor(|rig| {
            for _ in 0..2 {
                let seen = rig.ram.0.guest_read(0);
                assert!([0, 100, 101].contains(&seen), "{seen}");
                assert_eq!(rig.ram.0.guest_read(1), 0);
            }
        });
        run_all(beside(vec![(&a, readers), (&a, writer(0, 100, 2))], &a, |rig, _| {
            for ppn in rig.memory.take_reads_of_untouched() {
                rig.memory.map_zeros(ppn, 2).unwrap();
            }
            rig.memory.go_home(&[Ppn(0)]).unwrap();
        }));
        check_all(&site, &[&a]);
        expect(&a, 0, 101);
    });
}

/// Zeros are mapped ahead of reads, where the guest writes for the first time.
#[test]
fn zeros_are_mapped_beside_a_writer() {
    explore(|| {
        let site = Site::new(8, 1);
        let a = Rig::at(&site, 2, 1);
        run_all(vec![
            // Once: a second write would break what the first one was missed in.
            (&a, writer(1, 100, 1)),
            (&a, actor(|rig| assert!(rig.memory.map_zeros(Ppn(0), 2).is_ok()))),
        ]);
        check_all(&site, &[&a]);
        expect(&a, 1, 100);
    });
}

#[test]
fn zeros_are_dropped_while_they_are_written_and_discarded() {
    explore(|| {
        let site = Site::new(8, 1);
        let a = Rig::at(&site, 2, 1);
        a.put(0, 0);
        a.put(1, 0);
        run_all(vec![
            (&a, writer(0, 100, 2)),
            (&a, actor(|rig| rig.ram.0.vmm_discard(1, 1, Discard::PunchThenTell))),
            (&a, examiner(&[0, 1], 2)),
        ]);
        check_all(&site, &[&a]);
        expect(&a, 0, 101);
    });
}

/// A VMM dies while others share its pages and look at them.
#[test]
fn a_vm_exits() {
    explore(|| {
        let (site, a, b) = twins(8, 2);
        examine(&b, &[0]);
        let domain = site.domain.clone();
        run_all(vec![
            (&a, examiner(&[0], 2)),
            (&a, writer(1, 100, 1)),
            (
                &b,
                actor(move |rig| {
                    examine(rig, &[0, 1]);
                    // As `PagedVm::release` does, when its own threads have ended.
                    rig.memory.close();
                    for p in (0..2).map(Ppn) {
                        if let Some(page) = rig.memory.pmap().load(p).store_page() {
                            domain.release(page);
                        }
                    }
                    domain.leave(&rig.memory);
                    rig.ram.0.vmm_punch(0, 2);
                    rig.ram.0.vmm_zap(0, 2);
                    let owned = rig.memory.charged() - rig.memory.owed();
                    rig.memory.host().ledger.release(owned);
                }),
            ),
        ]);
        check_all(&site, &[&a]);
        expect(&a, 0, 7);
        expect(&a, 1, 100);
    });
}

/// It moves to another domain: nothing of it stays in the old one, nothing gets mixed up.
#[test]
fn a_vm_changes_its_domain() {
    explore(|| {
        let (site, a, b) = twins(12, 1);
        let other = Site::new(12, 0);
        let into = other.domain.clone();
        run_all(vec![
            (&a, examiner(&[0], 2)),
            (
                &a,
                actor(move |rig| {
                    rig.memory.go_home(&[Ppn(0)]).unwrap();
                    let _ = rig.memory.change_domain(&into, || true).unwrap();
                }),
            ),
            (&b, examiner(&[0], 2)),
        ]);
        expect(&a, 0, 7);
        expect(&b, 0, 7);
        let in_old = a.memory.membership().is_some_and(|m| Arc::ptr_eq(&m.domain, &site.domain));
        if in_old {
            return check_all(&site, &[&a, &b]);
        }
        assert_eq!(a.memory.pmap().load(Ppn(0)).state(), State::Resident);
        let word = b.memory.pmap().load(Ppn(0));
        site.domain.check([word]).unwrap();
        other.domain.check([]).unwrap();
    });
}

/// The VMM does not answer for a while; the guest writes meanwhile, and waits.
#[test]
fn a_vmm_answers_late() {
    for how in [Unanswered::Done, Unanswered::Later] {
        explore(move || {
            let (site, a, b) = twins(8, 1);
            examine(&b, &[0]);
            a.ram.0.be_silent(how);
            let actors = vec![(&a, examiner(&[0], 2)), (&a, writer(0, 100, 2))];
            run_all(beside(actors, &a, |rig, _| {
                thread::yield_now();
                rig.ram.0.shim_answers();
                rig.memory.settle_parked().unwrap();
            }));
            a.ram.0.shim_answers();
            check_all(&site, &[&a, &b]);
            expect(&a, 0, 101);
            expect(&b, 0, 7);
        });
    }
}

/// No memory for the copies: who writes waits until there is some.
#[test]
fn a_break_waits_for_memory() {
    explore(|| {
        // Both pages at home, then both shared: one page of memory is free, two want it.
        let (site, a, b) = sharers(3, 1);
        site.host.ledger.set_budget(site.reserve() + Pages(2));
        assert_eq!(site.host.ledger.free(), Pages(1));
        let plenty = site.reserve() + Pages(4);
        let (its_a, its_b, slot) = (a.clone(), b.clone(), AtomicUsize::new(0));
        run_all(beside(
            vec![(&a, writer(0, 100, 1)), (&b, writer(0, 200, 1))],
            &a,
            move |_, done| {
                if done {
                    // For faults that are kept, and that nobody waits for any more.
                    return its_a.memory.host().ledger.set_budget(plenty);
                }
                // Home, and to swap: both copies cannot be there at once with the store's page.
                for (rig, other) in [(&its_a, &its_b), (&its_b, &its_a)] {
                    if rig.ram.0.waiting() > 0 || other.ram.0.waiting() == 0 {
                        continue;
                    }
                    rig.memory.go_home(&[Ppn(0)]).unwrap();
                    if rig.ram.0.is_present(0) {
                        rig.reclaim(0, slot.fetch_add(1, Ordering::SeqCst) as u64 % 8);
                    }
                }
            },
        ));
        check_all(&site, &[&a, &b]);
        expect(&a, 0, 100);
        expect(&b, 0, 200);
    });
}

/// However two VMs that look at one another's pages at one time get into each other's way: what is equal is
/// shared in the end, by one page of the store, though nobody writes to any of them meanwhile.
#[test]
fn two_that_look_at_the_same_pages_share_them_in_the_end() {
    explore(|| {
        let (site, a, b) = twins(8, 2);
        run_all(vec![(&a, examiner(&[0, 1], 1)), (&b, examiner(&[0, 1], 1))]);
        for _ in 0..2 {
            examine(&a, &[0, 1]);
            examine(&b, &[0, 1]);
        }
        check_all(&site, &[&a, &b]);
        let stats = site.domain.stats();
        assert_eq!((stats.shared, stats.common), (Pages(4), Pages(2)));
    });
}
