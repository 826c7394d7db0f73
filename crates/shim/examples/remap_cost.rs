//! What remapping costs: the shim in a real process, told by batches what to do. Privileged.
//!
//! cargo build --release -p ballast-shim --lib --examples
//! cargo run --release -p ballast-shim --example remap_cost
//!
//! CPU time is that of the shim's thread, as the scheduler counts it; the time by the clock includes
//! the socket and whatever else the machine does. One line per kind of work, medians of five runs.
#![allow(clippy::unwrap_used, reason = "it has a person in front of it")]

#[path = "../tests/common/mod.rs"]
mod common;

use std::fs::File;
use std::io::Write;
use std::time::{Duration, Instant};

use ballast_shim_proto::{MAX_OPS, Op, OpKind};
use ballast_uffd::procmap::{Maps, max_map_count};
use ballast_units::{Bytes, Pages};
use common::{FakeManager, Managed, PAGE, Puppet};

const RUNS: usize = 5;
const PAGES: u64 = 56 << 10;
const STORE: u64 = 8 << 10;
const RUN: u64 = 16;

/// One order of mapping and what it cost.
struct Row {
    name: &'static str,
    pages: u64,
    cpu: Duration,
    clock: Duration,
}

struct Vm {
    _manager: FakeManager,
    puppet: Puppet,
    managed: Managed,
    store: File,
    _dir: tempfile::TempDir,
}

impl Vm {
    /// A process whose pages are all there, and mapped.
    fn new() -> Option<Vm> {
        let manager = FakeManager::start()?;
        let mut puppet = manager.puppet(PAGES * PAGE);
        puppet.order(&format!("map memfd {}", PAGES * PAGE));
        let managed = manager.accept(1);
        puppet.answer();
        let all = rustix::fs::FallocateFlags::empty();
        rustix::fs::fallocate(&managed.ram_file, all, 0, PAGES * PAGE).unwrap();
        assert_eq!(puppet.ask(&format!("touch 0 {}", PAGES * PAGE)), "ok");
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("store");
        let mut file = File::create(&path).unwrap();
        for page in 0..STORE {
            file.write_all(&[page as u8; PAGE as usize]).unwrap();
        }
        let store = File::open(path).unwrap();
        // The first operation of a process finds out what its RAM is like.
        let vm = Vm { _manager: manager, puppet, managed, store, _dir: dir };
        vm.send(&[(0, 1)], OpKind::MapStore);
        vm.send(&[(0, 1)], OpKind::MapHome);
        Some(vm)
    }

    fn send(&self, ranges: &[(u64, u64)], kind: OpKind) {
        for (id, some) in ranges.chunks(MAX_OPS).enumerate() {
            let op = |(page, pages): &(u64, u64)| Op {
                kind,
                addr: self.managed.addr(*page),
                len: Bytes(pages * PAGE),
                file_offset: match kind {
                    OpKind::MapStore => page * 7919 % (STORE - pages) * PAGE,
                    _ => 0,
                },
                fd_index: 0,
            };
            let ops: Vec<Op> = some.iter().map(op).collect();
            let fds: &[&File] = if kind == OpKind::MapStore { &[&self.store] } else { &[] };
            let count = ops.len() as u32;
            assert_eq!(self.managed.batch(id as u64, ops, fds), (count, 0));
        }
    }

    fn measure(&self, name: &'static str, ranges: &[(u64, u64)], kind: OpKind) -> Row {
        let pages = ranges.iter().map(|(_, pages)| pages).sum();
        let (cpu, clock) = (self.shim_cpu(), Instant::now());
        self.send(ranges, kind);
        let clock = clock.elapsed();
        Row { name, pages, cpu: self.shim_cpu() - cpu, clock }
    }

    fn shim_cpu(&self) -> Duration {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.puppet.child.id())).unwrap();
        let task = tasks
            .flatten()
            .map(|task| task.path())
            .find(|task| {
                std::fs::read_to_string(task.join("comm")).is_ok_and(|c| c.trim() == "ballast-shim")
            })
            .unwrap();
        let stat = std::fs::read_to_string(task.join("schedstat")).unwrap();
        Duration::from_nanos(stat.split(' ').next().unwrap().parse().unwrap())
    }

    fn protect(&self, ranges: &[(u64, u64)]) {
        ranges.iter().for_each(|(page, pages)| self.managed.protect(*page, *pages));
    }

    fn punch(&self) {
        use rustix::fs::{FallocateFlags, fallocate};
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.managed.ram_file, hole, 0, PAGES * PAGE).unwrap();
    }
}

fn shuffled(mut ranges: Vec<(u64, u64)>) -> Vec<(u64, u64)> {
    let mut state = 88_172_645_463_325_252u64;
    for i in (1..ranges.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        ranges.swap(i, (state % (i as u64 + 1)) as usize);
    }
    ranges
}

fn run() -> Option<Vec<Row>> {
    let mut rows = Vec::new();
    let most = max_map_count().unwrap().min(PAGES) - 1000;
    let scattered: Vec<_> = (0..most / 2).map(|i| (2 * i, 1)).collect();
    let random = shuffled(scattered.clone());
    let sorted: Vec<_> = random
        .chunks(MAX_OPS)
        .flat_map(|batch| {
            let mut batch = batch.to_vec();
            batch.sort_unstable();
            batch
        })
        .collect();
    let runs = shuffled((0..PAGES / (2 * RUN)).map(|i| (2 * RUN * i, RUN)).collect());

    let vm = Vm::new()?;
    rows.push(vm.measure("MapStore, page by page, random order", &random, OpKind::MapStore));
    vm.punch();
    vm.protect(&random);
    rows.push(vm.measure("MapHome of these, never touched", &random, OpKind::MapHome));

    let mut vm = Vm::new()?;
    rows.push(vm.measure("MapStore, batches in order of address", &sorted, OpKind::MapStore));
    assert_eq!(vm.puppet.ask(&format!("touch 0 {}", most * PAGE)), "ok");
    vm.punch();
    vm.protect(&random);
    rows.push(vm.measure("MapHome of these, in memory", &random, OpKind::MapHome));

    let vm = Vm::new()?;
    let beside: Vec<_> = (0..most / 2).map(|i| (i, 1)).collect();
    rows.push(vm.measure("MapStore, page by page side by side", &beside, OpKind::MapStore));

    let vm = Vm::new()?;
    rows.push(vm.measure("MapStore, runs of 16, random order", &runs, OpKind::MapStore));
    vm.punch();
    vm.protect(&runs);
    rows.push(vm.measure("MapHome of these, never touched", &runs, OpKind::MapHome));

    let vm = Vm::new()?;
    vm.send(&random, OpKind::MapStore);
    let here = || Instant::now();
    let read =
        |name, pages, at: Instant| Row { name, pages, cpu: Duration::ZERO, clock: at.elapsed() };
    let at = here();
    vm.managed.pagemap().copies(vm.managed.addr(0), Pages(PAGES)).unwrap();
    rows.push(read("reading pagemap, all at once", PAGES, at));
    let (at, pagemap) = (here(), vm.managed.pagemap());
    for (page, _) in &random {
        pagemap.copies(vm.managed.addr(*page), Pages(1)).unwrap();
    }
    rows.push(read("reading pagemap, page by page", random.len() as u64, at));
    let at = here();
    let maps = vm.managed.maps(0, PAGES);
    rows.push(read("reading maps, per mapping", maps.parts().len() as u64, at));
    let at = here();
    let count = Maps::count_all(vm.puppet.child.id()).unwrap();
    rows.push(read("counting mappings, per mapping", count, at));
    Some(rows)
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_unstable_by(f64::total_cmp);
    all[all.len() / 2]
}

fn main() {
    let mut runs = Vec::new();
    for _ in 0..RUNS {
        match run() {
            Some(rows) => runs.push(rows),
            None => return,
        }
    }
    println!("{:40} {:>8} {:>12} {:>12}", "microseconds per page", "pages", "CPU of shim", "clock");
    for row in 0..runs[0].len() {
        let per_page = |of: fn(&Row) -> Duration| {
            let per_page =
                |rows: &Vec<Row>| of(&rows[row]).as_secs_f64() * 1e6 / rows[row].pages as f64;
            median(runs.iter().map(per_page).collect())
        };
        let Row { name, pages, .. } = &runs[0][row];
        let (cpu, clock) = (per_page(|row| row.cpu), per_page(|row| row.clock));
        let cpu = if cpu > 0.0 { format!("{cpu:.3}") } else { String::new() };
        println!("{name:40} {pages:>8} {cpu:>12} {clock:>12.3}");
    }
}
