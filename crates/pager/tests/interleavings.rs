//! The page-state machine and the order of the fault service, on a double of guest memory, under
//! every schedule that shuttle finds. Run:
//! `cargo test -p ballast-pager --features shuttle --test interleavings`
//!
//! In every scenario: a read sees the last write (after a discard: zeros, or what was there), nobody
//! waits for ever, no more is present than is booked at any instant, and at the end the books are
//! exact.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "interleavings/compression.rs"]
mod compression;
#[path = "interleavings/sharing.rs"]
mod sharing;
mod support;

use std::collections::HashMap;
use std::sync::Arc;

use ballast_compress::Algorithm;
use ballast_pager::backend::{MemError, PageBuf};
use ballast_pager::host::Host;
use ballast_pager::memory::{Access, Memory};
use ballast_pager::pmap::Pmap;
use ballast_pager::service::around::Around;
use ballast_pager::service::serve::{Landed, Met, Serve, Task};
use ballast_pager::stage::{Stage, StageLayout};
use ballast_pager::swap::Stored;
use ballast_pager::tier::{Compression, Tier};
use ballast_pager::word::State;
use ballast_units::{Pages, Ppn};
use shuttle::rand::Rng;
use shuttle::sync::Mutex;
use shuttle::sync::atomic::{AtomicUsize, Ordering};
use shuttle::thread;
use support::evict::{Evicted, evict};
use support::site::{Site, check_places};
use support::{Discard, Double, Ram, host, token_of};

const TIER: Compression = Compression {
    algorithm: Some(Algorithm::Lz4),
    percent: 100,
    adaptive: false,
    same_filled: false,
};
const LAYOUT: StageLayout = StageLayout { cluster: 8, clusters: 1, holds: 2 };

/// A VM with its fault service, its reclaim operations, and a swap file in memory.
struct Rig {
    memory: Arc<Memory<Ram>>,
    ram: Ram,
    swap: Mutex<HashMap<u64, Box<PageBuf>>>,
}

impl Rig {
    fn new(pages: u64, budget: u64, fault_around: u64) -> Arc<Rig> {
        let host = host(budget);
        let ram = Double::ram(pages, host.clone());
        Rig::over(ram, host, pages, fault_around)
    }

    /// One that shares pages with the others of its site.
    fn at(site: &Site, pages: u64, fault_around: u64) -> Arc<Rig> {
        let ram = Double::on(&site.machine, pages);
        let rig = Rig::over(ram, site.host.clone(), pages, fault_around);
        site.domain.join(&rig.memory).unwrap();
        rig
    }

    fn over(ram: Ram, host: Arc<Host>, pages: u64, fault_around: u64) -> Arc<Rig> {
        let stage = Stage::on_heap(LAYOUT).unwrap();
        let pmap = Pmap::on_heap(Pages(pages));
        let around = Pages(fault_around);
        let tier = Tier::on_heap(Pages(pages.max(2)), TIER).unwrap();
        let memory = Memory::new(pmap, ram.clone(), stage, Pages(16), host, around).with_tier(tier);
        let swap = Mutex::new(HashMap::new());
        Arc::new(Rig { memory: Arc::new(memory), ram, swap })
    }

    /// Serves what the fault service gives away, until that has ended (`None`).
    fn help(&self, board: &Board) {
        loop {
            let job = match board.jobs.lock().unwrap().pop() {
                Some(Some(job)) => Some(job),
                Some(None) => return,
                None => None,
            };
            if let Some((ppn, access)) = job {
                let met = Met::serve(&self.memory, ppn, access);
                board.back.lock().unwrap().push(met);
                board.out.fetch_sub(1, Ordering::SeqCst);
            }
            thread::yield_now();
        }
    }

    /// Serves until everybody else is done and everything is booked. Of the faults some, by chance, are given to a
    /// helper.
    fn serve(&self, actors: &AtomicUsize, board: &Board) {
        let mut serve = Serve::default();
        let mut around = Around::default();
        let mut landing: Vec<(Ppn, Box<PageBuf>)> = Vec::new();
        loop {
            // In this order: what an actor caused before it ended is read after.
            let actors = actors.load(Ordering::SeqCst);
            let mark = self.memory.mark();
            let notices = self.ram.0.read_events();
            let mut tasks = Vec::new();
            serve.take(&self.memory, &notices, mark, &mut tasks, |ppn, access| {
                let given = shuttle::rand::thread_rng().gen_bool(0.5);
                if given {
                    board.out.fetch_add(1, Ordering::SeqCst);
                    board.jobs.lock().unwrap().push(Some((ppn, access)));
                }
                given
            });
            // In this order: what comes back after it is looked for was out before.
            let out = board.out.load(Ordering::SeqCst);
            let back = std::mem::take(&mut *board.back.lock().unwrap());
            let quiet = out == 0 && back.is_empty();
            back.into_iter().for_each(|met| serve.met(&self.memory, met, &mut tasks));
            landing.retain(|(ppn, bytes)| {
                serve.arrived(&self.memory, *ppn, Some(bytes), &mut tasks) != Landed::Done
            });
            serve.retry(&self.memory, &mut tasks);
            if notices.is_empty() && self.memory.runs_ahead() {
                let ran = self.memory.run_ahead();
                assert!(matches!(ran, Ok(()) | Err(MemError::Again)), "{ran:?}");
            }
            for task in tasks {
                match task {
                    Task::Read(ppn, stored) => {
                        let bytes = self.swap.lock().unwrap()[&stored.slot.0].clone();
                        assert!(stored.sum.fits(&bytes), "{ppn}: {stored:?}");
                        landing.push((ppn, bytes));
                    }
                    Task::Came(ppn) => self.bring_neighbours(&mut around, &serve, ppn),
                    Task::Trouble(what) | Task::Damaged(_, what) => panic!("{what}"),
                }
            }
            if actors == 0 && notices.is_empty() && landing.is_empty() && quiet && settled(&serve) {
                board.jobs.lock().unwrap().push(None);
                return;
            }
            thread::yield_now();
        }
    }

    /// All of the swap file was read ahead.
    fn bring_neighbours(&self, around: &mut Around, serve: &Serve, ppn: Ppn) {
        // It does not change what was read: slots are used again by others.
        let swap = self.swap.lock().unwrap().clone();
        let may = |ppn| !serve.pending().discard_outstanding(ppn);
        let kept = |_, stored: Stored| {
            swap.get(&stored.slot.0).filter(|b| stored.sum.fits(b)).map(|b| &**b)
        };
        around.came(&self.memory, ppn, may, kept).unwrap();
    }

    /// Runs the actors beside a fault service, then checks everything.
    fn run(self: &Arc<Self>, actors: Vec<Actor>) {
        run_all(actors.into_iter().map(|actor| (self, actor)).collect());
        self.check();
        assert_eq!(self.memory.host().ledger.used(), self.memory.charged());
    }

    fn check(&self) {
        self.memory.reconcile(Ppn(0), self.memory.pmap().len().0).1.unwrap();
        self.memory.check_quiet().unwrap();
        assert_eq!(self.ram.0.waiting(), 0);
        let held = self.memory.pmap().in_state(State::Held).0;
        // A discard may have dropped the copy of a broken page.
        let broken = self.memory.pmap().in_state(State::Broken).0;
        let home = self.ram.0.present() - self.ram.0.copied_pages();
        let frames = self.memory.tier().occupancy().frames;
        assert_eq!(self.memory.charged().0, home + held + broken + frames);
        assert!(self.ram.0.copied_pages() <= broken);
        check_places(&self.memory, &self.ram);
    }

    /// Brings a page to its home with contents, while nobody else runs.
    fn put(&self, ppn: u64, token: u64) {
        let mut serve = Serve::default();
        while self.ram.0.try_access(ppn, Some(token)).is_err() {
            let access = self.ram.0.try_access(ppn, Some(token)).unwrap_err();
            serve.fault(&self.memory, Ppn(ppn), access, &mut Vec::new());
        }
    }

    /// What the reclaim thread does with one page: evict, and write to swap.
    fn reclaim(&self, ppn: u64, stage_slot: u64) {
        let (slot, n) = self.memory.take_slots(1).unwrap();
        assert_eq!(n, 1);
        if evict(&self.memory, Ppn(ppn), stage_slot) != Ok(Evicted::Staged) {
            self.memory.free_slot(slot);
            return;
        }
        // SAFETY: the slot is not reused before `written` has said that it may be.
        let bytes = Box::new(*unsafe { self.memory.stage().page(stage_slot) });
        token_of(&bytes);
        let stored = Stored::new(slot, &bytes);
        self.swap.lock().unwrap().insert(slot.0, bytes);
        while !self.memory.written(Ppn(ppn), stage_slot, stored) {
            thread::yield_now();
        }
    }

    /// The same with neighbours that leave together, into stage slots from 0 on.
    fn reclaim_run(&self, first: u64, n: u64) {
        let Ok(left) = self.memory.evict_run(Ppn(first), n, 0) else { return };
        for page in left {
            let Some(stage_slot) = page.slot else { continue };
            let (slot, _) = self.memory.take_slots(1).unwrap();
            // SAFETY: the slot is not reused before `written` has said that it may be.
            let bytes = Box::new(*unsafe { self.memory.stage().page(stage_slot) });
            token_of(&bytes);
            let stored = Stored::new(slot, &bytes);
            self.swap.lock().unwrap().insert(slot.0, bytes);
            while !self.memory.written(page.ppn, stage_slot, stored) {
                thread::yield_now();
            }
        }
    }

    fn sample(&self, ppn: u64) {
        while !self.memory.sample(Ppn(ppn)).unwrap() {
            thread::yield_now();
        }
    }

    fn unsample(&self, ppn: u64) {
        while !self.memory.unsample(Ppn(ppn)).unwrap() {
            thread::yield_now();
        }
    }
}

/// What a fault service has given away, and what came of it.
#[derive(Default)]
struct Board {
    /// None: there is nothing more to come.
    jobs: Mutex<Vec<Option<(Ppn, Access)>>>,
    back: Mutex<Vec<Met>>,
    out: AtomicUsize,
}

/// Runs actors at VMs, each of which has a fault service, to the end of all.
fn run_all(actors: Vec<(&Arc<Rig>, Actor)>) {
    let mut rigs: Vec<Arc<Rig>> = Vec::new();
    for (rig, _) in &actors {
        if !rigs.iter().any(|other| Arc::ptr_eq(other, rig)) {
            rigs.push((*rig).clone());
        }
    }
    let count = Arc::new(AtomicUsize::new(actors.len()));
    let mut threads: Vec<_> = actors
        .into_iter()
        .map(|(rig, actor)| {
            let (rig, count) = (rig.clone(), count.clone());
            thread::spawn(move || {
                actor(&rig);
                count.fetch_sub(1, Ordering::SeqCst);
            })
        })
        .collect();
    for rig in rigs {
        let (board, count) = (Arc::new(Board::default()), count.clone());
        let (helper, helped) = (rig.clone(), board.clone());
        threads.push(thread::spawn(move || helper.help(&helped)));
        threads.push(thread::spawn(move || rig.serve(&count, &board)));
    }
    for thread in threads {
        thread.join().unwrap();
    }
}

/// All but pages to be looked at again, which wait for a clock.
fn settled(serve: &Serve) -> bool {
    serve.pending().faults() == 0 && !serve.pending().is_brief()
}

type Actor = Box<dyn FnOnce(&Rig) + Send>;

fn actor(f: impl FnOnce(&Rig) + Send + 'static) -> Actor {
    Box::new(f)
}

/// A guest thread that writes numbers of its own and reads each back.
fn writer(ppn: u64, from: u64, times: u64) -> Actor {
    actor(move |rig| {
        for token in from..from + times {
            rig.ram.0.guest_write(ppn, token);
            assert_eq!(rig.ram.0.guest_read(ppn), token, "ppn {ppn}: lost a write");
        }
    })
}

fn iterations() -> usize {
    std::env::var("BALLAST_INTERLEAVINGS").ok().and_then(|n| n.parse().ok()).unwrap_or(400)
}

/// Half of the schedules at random, half by PCT with three and five preemptions. A failure prints
/// the schedule; BALLAST_SEED repeats the random half.
fn explore(scenario: impl Fn() + Send + Sync + Clone + 'static) {
    explore_times(iterations(), scenario);
}

fn explore_times(n: usize, scenario: impl Fn() + Send + Sync + Clone + 'static) {
    let seed = std::env::var("BALLAST_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(0xba11a57);
    eprintln!("BALLAST_SEED={seed}");
    let mut config = shuttle::Config::new();
    config.max_steps = shuttle::MaxSteps::FailAfter(200_000);
    let random = shuttle::scheduler::RandomScheduler::new_from_seed(seed, n / 2);
    shuttle::Runner::new(random, config.clone()).run(scenario.clone());
    for depth in [3, 5] {
        let pct = shuttle::scheduler::PctScheduler::new_from_seed(seed, depth, n / 4);
        shuttle::Runner::new(pct, config.clone()).run(scenario.clone());
    }
}

#[test]
fn guest_write_against_eviction() {
    explore(|| {
        let rig = Rig::new(1, 2, 1);
        rig.put(0, 7);
        rig.run(vec![writer(0, 100, 3), actor(|rig| rig.reclaim(0, 0))]);
    });
}

#[test]
fn guest_write_against_eviction_twice_and_their_clusters() {
    explore(|| {
        let rig = Rig::new(1, 1, 1);
        rig.put(0, 7);
        rig.run(vec![
            writer(0, 100, 3),
            actor(|rig| {
                rig.reclaim(0, 0);
                rig.reclaim(0, 1);
            }),
        ]);
    });
}

#[test]
fn guest_writes_against_eviction_of_neighbours() {
    explore(|| {
        let rig = Rig::new(3, 3, 1);
        (0..3).for_each(|ppn| rig.put(ppn, 7 + ppn));
        rig.run(vec![
            writer(0, 100, 2),
            writer(2, 200, 2),
            actor(|rig| assert_eq!(rig.ram.0.guest_read(1), 8)),
            actor(|rig| rig.reclaim_run(0, 3)),
        ]);
    });
}

#[test]
fn discard_against_eviction_of_neighbours() {
    for how in [Discard::PunchThenTell, Discard::TellThenPunch] {
        explore(move || {
            let rig = Rig::new(2, 3, 1);
            rig.put(0, 7);
            rig.put(1, 8);
            rig.run(vec![
                discarder(1, how, &[8, 50]),
                writer(0, 100, 1),
                actor(|rig| {
                    rig.reclaim_run(0, 2);
                    rig.reclaim_run(0, 2);
                }),
            ]);
        });
    }
}

#[test]
fn two_faults_on_one_page() {
    explore(|| {
        let rig = Rig::new(1, 1, 1);
        rig.put(0, 7);
        rig.reclaim(0, 0);
        rig.run(vec![
            actor(|rig| assert_eq!(rig.ram.0.guest_read(0), 7)),
            actor(|rig| assert_eq!(rig.ram.0.guest_read(0), 7)),
        ]);
        assert_eq!(rig.memory.swap_used(), Pages(0));
    });
}

#[test]
fn fault_against_the_end_of_its_cluster() {
    explore(|| {
        let rig = Rig::new(1, 1, 1);
        rig.put(0, 7);
        let (slot, _) = rig.memory.take_slots(1).unwrap();
        assert_eq!(evict(&rig.memory, Ppn(0), 0), Ok(Evicted::Staged));
        let stored = Stored::new(slot, &support::page_of(7));
        rig.swap.lock().unwrap().insert(slot.0, support::page_of(7));
        rig.run(vec![
            actor(|rig| {
                assert_eq!(rig.ram.0.guest_read(0), 7);
                rig.ram.0.guest_write(0, 8);
                assert_eq!(rig.ram.0.guest_read(0), 8);
            }),
            actor(move |rig| {
                while !rig.memory.written(Ppn(0), 0, stored) {
                    thread::yield_now();
                }
            }),
        ]);
    });
}

#[test]
fn neighbours_on_their_way_home_against_guest_and_reclaim() {
    explore(|| {
        let rig = Rig::new(4, 5, 1);
        for ppn in 0..4 {
            rig.put(ppn, 7 + ppn);
            rig.reclaim(ppn, ppn);
        }
        rig.run(vec![
            actor(|rig| {
                for ppn in 0..3 {
                    assert_eq!(rig.ram.0.guest_read(ppn), 7 + ppn);
                }
            }),
            writer(3, 100, 2),
            actor(|rig| {
                rig.reclaim(1, 4);
                rig.reclaim(2, 5);
            }),
        ]);
    });
}

#[test]
fn neighbours_on_their_way_home_against_their_discard() {
    for how in [Discard::PunchThenTell, Discard::TellThenPunch] {
        explore(move || {
            let rig = Rig::new(3, 5, 1);
            for ppn in 0..3 {
                rig.put(ppn, 7 + ppn);
                rig.reclaim(ppn, ppn);
            }
            rig.run(vec![
                actor(|rig| assert_eq!(rig.ram.0.guest_read(0), 7)),
                discarder(1, how, &[8, 50]),
                actor(|rig| rig.sample(2)),
            ]);
        });
    }
}

/// The guest writes after its discard is done: that write must stay, whatever else moves.
fn discarder(ppn: u64, how: Discard, before: &'static [u64]) -> Actor {
    actor(move |rig| {
        rig.ram.0.vmm_discard(ppn, 1, how);
        let seen = rig.ram.0.guest_read(ppn);
        assert!(seen == 0 || before.contains(&seen), "neither void nor zero: {seen}");
        rig.ram.0.guest_write(ppn, 50);
        thread::yield_now();
        assert_eq!(rig.ram.0.guest_read(ppn), 50, "the discard took a later write");
        rig.ram.0.vmm_discard(ppn, 1, how);
        rig.ram.0.guest_write(ppn, 51);
        thread::yield_now();
        assert_eq!(rig.ram.0.guest_read(ppn), 51, "the discard took a later write");
    })
}

/// A region that nobody has touched is filled, by whoever comes first, and broken at once.
#[test]
fn guest_writes_against_a_region_that_is_filled_and_broken() {
    // What goes wrong goes wrong seldom: once in some ten thousand schedules.
    explore_times(100 * iterations(), || {
        let host = host(40);
        host.set_plenty(Pages(4));
        let ram = Double::ram(2, host.clone());
        ram.0.set_large(2);
        let rig = Rig::over(ram, host, 2, 1);
        rig.run(vec![
            writer(0, 100, 2),
            writer(1, 200, 2),
            actor(|rig| {
                for _ in 0..3 {
                    rig.memory.break_large(Ppn(0)).unwrap();
                    rig.memory.bring_back().unwrap();
                    thread::yield_now();
                }
            }),
        ]);
    });
}

/// A region is made whole under its guest, which writes in it and gives up a page of it.
#[test]
fn guest_writes_and_discards_against_a_region_that_is_made_whole() {
    for how in [Discard::PunchThenTell, Discard::TellThenPunch] {
        explore(move || {
            let host = host(40);
            host.set_plenty(Pages(4));
            let ram = Double::ram(2, host.clone());
            ram.0.set_large(2);
            let rig = Rig::over(ram, host, 2, 1);
            rig.put(0, 7);
            rig.put(1, 8);
            rig.memory.break_large(Ppn(0)).unwrap();
            assert!(rig.memory.can_collapse(0).is_some());
            rig.ram.0.set_can_remap(true);
            rig.run(vec![
                writer(0, 100, 2),
                discarder(1, how, &[8, 50]),
                actor(|rig| {
                    for _ in 0..2 {
                        rig.memory.collapse(0).unwrap();
                        thread::yield_now();
                    }
                }),
            ]);
        });
    }
}

#[test]
fn discard_against_eviction() {
    for how in [Discard::PunchThenTell, Discard::TellThenPunch] {
        explore(move || {
            let rig = Rig::new(1, 2, 1);
            rig.put(0, 7);
            rig.run(vec![
                discarder(0, how, &[7, 50]),
                actor(|rig| {
                    rig.reclaim(0, 0);
                    rig.reclaim(0, 1);
                    rig.reclaim(0, 2);
                }),
            ]);
        });
    }
}

#[test]
fn discard_against_eviction_and_a_fault() {
    explore(|| {
        let rig = Rig::new(1, 2, 1);
        rig.put(0, 7);
        rig.run(vec![
            discarder(0, Discard::PunchThenTell, &[7, 50]),
            actor(|rig| rig.reclaim(0, 0)),
            actor(|rig| {
                let _ = rig.ram.0.guest_read(0);
            }),
        ]);
    });
}

#[test]
fn discard_against_sampling_and_a_fault() {
    explore(|| {
        let rig = Rig::new(1, 2, 1);
        rig.put(0, 7);
        rig.run(vec![
            discarder(0, Discard::PunchThenTell, &[7, 50]),
            actor(|rig| {
                rig.sample(0);
                rig.unsample(0);
                rig.reclaim(0, 0);
                rig.sample(0);
                rig.unsample(0);
            }),
            actor(|rig| {
                let _ = rig.ram.0.guest_read(0);
            }),
        ]);
    });
}

/// It goes home, is written, and is held again in the same place, between the look at when it left and its being dropped.
#[test]
fn discard_of_a_held_page_against_the_next_sample() {
    explore_times(20 * iterations(), || {
        let rig = Rig::new(1, 2, 1);
        rig.put(0, 7);
        rig.sample(0);
        rig.run(vec![
            actor(|rig| {
                rig.ram.0.vmm_discard(0, 1, Discard::PunchThenTell);
                rig.ram.0.guest_write(0, 50);
                thread::yield_now();
                assert_eq!(rig.ram.0.guest_read(0), 50, "the discard took a later write");
            }),
            actor(|rig| {
                rig.unsample(0);
                rig.sample(0);
            }),
        ]);
    });
}

#[test]
fn sampling_against_writes() {
    explore(|| {
        let rig = Rig::new(1, 1, 1);
        rig.put(0, 7);
        rig.run(vec![
            writer(0, 100, 3),
            actor(|rig| {
                rig.sample(0);
                rig.unsample(0);
                rig.sample(0);
                rig.unsample(0);
            }),
        ]);
    });
}

#[test]
fn pages_ahead_of_touches_against_writes_discards_eviction_and_samples() {
    explore(|| {
        // Two around a touch; the third touch finds what came ahead of it, or is met on the way.
        let rig = Rig::new(8, 16, 2);
        rig.run(vec![
            actor(|rig| {
                let pages = [0, 1, 2, 3, 5, 6, 7];
                for ppn in pages {
                    rig.ram.0.guest_write(ppn, 10 + ppn);
                }
                for ppn in pages {
                    assert_eq!(rig.ram.0.guest_read(ppn), 10 + ppn, "ppn {ppn}");
                }
            }),
            discarder(4, Discard::PunchThenTell, &[0, 50]),
            actor(|rig| {
                rig.sample(5);
                rig.unsample(5);
                rig.reclaim(6, 0);
            }),
        ]);
    });
}

#[test]
fn fault_around_against_eviction_and_discards_of_neighbours() {
    explore(|| {
        let rig = Rig::new(4, 8, 4);
        rig.run(vec![
            writer(1, 100, 2),
            discarder(2, Discard::PunchThenTell, &[0, 50]),
            actor(|rig| {
                rig.reclaim(2, 0);
                rig.reclaim(3, 1);
                rig.reclaim(2, 2);
            }),
        ]);
    });
}

#[test]
fn swap_in_against_discard_and_eviction() {
    explore(|| {
        let rig = Rig::new(1, 2, 1);
        rig.put(0, 7);
        rig.reclaim(0, 0);
        rig.run(vec![
            actor(|rig| {
                let _ = rig.ram.0.guest_read(0);
            }),
            discarder(0, Discard::PunchThenTell, &[7, 50]),
            actor(|rig| rig.reclaim(0, 1)),
        ]);
    });
}

/// Nobody else touches the page: the one fault must be answered, with what it was or with zeros.
#[test]
fn swap_in_against_a_discard_alone() {
    explore(|| {
        let rig = Rig::new(1, 2, 1);
        rig.put(0, 7);
        rig.reclaim(0, 0);
        rig.run(vec![
            actor(|rig| assert!([0, 7].contains(&rig.ram.0.guest_read(0)))),
            actor(|rig| rig.ram.0.vmm_discard(0, 1, Discard::PunchThenTell)),
        ]);
    });
}

/// Two pages, memory for one: each fault waits until the other page has gone.
#[test]
fn faults_wait_for_memory_and_go_on() {
    explore(|| {
        let rig = Rig::new(2, 1, 1);
        let done = Arc::new(AtomicUsize::new(0));
        let guest = |ppn: u64| {
            let done = done.clone();
            actor(move |rig| {
                rig.ram.0.guest_write(ppn, 10 + ppn);
                assert_eq!(rig.ram.0.guest_read(ppn), 10 + ppn);
                done.fetch_add(1, Ordering::SeqCst);
            })
        };
        let (a, b) = (guest(0), guest(1));
        let done = done.clone();
        rig.run(vec![
            a,
            b,
            actor(move |rig| {
                let mut stage_slot = 0;
                while done.load(Ordering::SeqCst) < 2 {
                    let ppn = u64::from(!rig.ram.0.is_present(0));
                    if rig.ram.0.waiting() > 0 && rig.ram.0.is_present(ppn) {
                        rig.reclaim(ppn, stage_slot);
                        stage_slot = (stage_slot + 1) % 8;
                    }
                    thread::yield_now();
                }
            }),
        ]);
    });
}

/// The smallest scenario, whole: every schedule of one write against one eviction and its fault.
#[test]
fn every_schedule_of_a_write_and_an_eviction() {
    let config = {
        let mut c = shuttle::Config::new();
        c.max_steps = shuttle::MaxSteps::ContinueAfter(60);
        c
    };
    let scheduler = shuttle::scheduler::DfsScheduler::new(Some(iterations() * 5), false);
    shuttle::Runner::new(scheduler, config).run(|| {
        let rig = Rig::new(1, 1, 1);
        rig.put(0, 7);
        let other = rig.clone();
        let evictor = thread::spawn(move || evict(&other.memory, Ppn(0), 0));
        let written = rig.ram.0.try_access(0, Some(8)).is_ok();
        let evicted = evictor.join().unwrap();
        assert_eq!(evicted, Ok(Evicted::Staged));
        // SAFETY: the eviction is over.
        let token = token_of(unsafe { rig.memory.stage().page(0) });
        assert_eq!(token, if written { 8 } else { 7 });
        rig.put(0, 9);
        rig.memory.check().unwrap();
    });
}
