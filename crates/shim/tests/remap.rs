//! Pages from a store, over the RAM of a small process, and home again. Privileged.
#![allow(clippy::unwrap_used, reason = "a panic here is the test failing")]

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;

use ballast_shim_proto::{MAX_OPS, Op};
use ballast_uffd::procmap::{Maps, Shown};
use ballast_units::{Bytes, Pages};
use common::store::{
    STAMP, STORE, content, map_again, map_home, map_store, punch, resident, store,
};
use common::{Managed, PAGE, Puppet, RAM, inode, managed, word_of};
use rustix::process::Pid;

/// A seed, which is printed, and numbers below what is asked for.
fn dice() -> (u64, impl FnMut(u64) -> u64) {
    let seed = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic).tv_nsec as u64 | 1;
    println!("seed {seed}");
    let mut state = seed;
    let random = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    (seed, random)
}

#[test]
fn store_pages_are_shared_until_written() {
    let Some((_manager, vm, mut puppet)) = managed(7000) else { return };
    let (_dir, store) = store();
    resident(&mut puppet, 20..23);
    let missing = vm.missing();
    let two = vec![map_store(&vm, 20, 1, 5), map_store(&vm, 21, 2, 1)];
    assert_eq!(vm.batch(1, two, &[&store]), (2, 0));
    assert_eq!(vm.copies(20, 3), [false; 3], "not even touched");
    assert!((20..23).all(|page| vm.is_protected(page)));
    assert_eq!(puppet.read_page(20), STAMP + 5);
    assert_eq!(puppet.read_page(21), STAMP + 1);
    assert_eq!(puppet.read_page(22), STAMP + 2);
    assert_eq!(vm.copies(20, 3), [false; 3], "read only");
    assert_eq!((vm.missing(), vm.protected()), (missing, 0));

    // A write is told, and after un-protecting it is the process's own.
    puppet.write_page(20, 77);
    assert_eq!(vm.protected(), 1);
    assert_eq!(puppet.read_page(20), 77);
    assert_eq!(vm.copies(20, 3), [true, false, false]);
    assert_eq!(word_of(&store, 5), STAMP + 5, "the store is untouched");
    assert_eq!(vm.home_word(20), 1, "and so is the home page");
    puppet.write_page(20, 78);
    assert_eq!(vm.protected(), 1, "its own page is its own");
}

/// What is home is mapped anew as it is: also where the VMM has punched it, for which the shim must not wait.
#[test]
fn what_is_home_is_mapped_again_without_being_touched() {
    let Some((_manager, vm, mut puppet)) = managed(7000) else { return };
    resident(&mut puppet, 20..24);
    let before = vm.maps(0, RAM / PAGE);
    punch(&vm, 22, 1);
    let missing = vm.missing();
    // One that is protected is not any more.
    vm.protect(20, 2);
    assert_eq!(vm.batch(1, vec![map_again(&vm, 20, 5)], &[]), (1, 0));
    assert_eq!((vm.missing(), vm.maps(0, RAM / PAGE)), (missing, before));
    assert_eq!([20, 21, 23].map(|page| puppet.read_page(page)), [1; 3]);
    puppet.write_page(21, 5);
    assert_eq!((vm.home_word(21), vm.missing(), vm.protected()), (5, missing, 0));
    // Faults arrive as before.
    assert_eq!(puppet.read_page(22), 7022);
    assert_eq!(vm.missing(), missing + 1);
    // It may be repeated.
    assert_eq!(vm.batch(2, vec![map_again(&vm, 20, 5), map_again(&vm, 20, 5)], &[]), (2, 0));
    assert_eq!((puppet.read_page(21), vm.home_word(21)), (5, 5));
}

#[test]
fn what_is_shown_comes_home_written_or_not() {
    let Some((_manager, vm, mut puppet)) = managed(7000) else { return };
    let (_dir, store) = store();
    // Page 24 was never in the RAM file, and none is when it comes home.
    resident(&mut puppet, 20..24);
    let missing = vm.missing();
    let before = vm.maps(0, RAM / PAGE);
    assert_eq!(before.parts().len(), 1);
    let ops = vec![map_store(&vm, 20, 4, 8), map_store(&vm, 24, 1, 3)];
    assert_eq!(vm.batch(1, ops, &[&store]), (2, 0));
    puppet.ask(&format!("read {}", 21 * PAGE));
    puppet.write_page(22, 77);
    punch(&vm, 20, 5);

    vm.protect(20, 5);
    assert_eq!(vm.batch(2, vec![map_home(&vm, 20, 5)], &[]), (1, 0));
    assert!((20..25).all(|page| vm.is_home(page)));
    assert_eq!(vm.maps(0, RAM / PAGE), before, "one mapping as before");
    for (page, word) in [(20, 908), (21, 909), (22, 910), (23, 911), (24, 903)] {
        let mut expected = content(word);
        if page == 22 {
            expected[..8].copy_from_slice(&77u64.to_le_bytes());
        }
        let mut bytes = vec![0; PAGE as usize];
        vm.ram_file.read_exact_at(&mut bytes, page * PAGE).unwrap();
        assert_eq!(bytes, expected, "page {page}, whole, in the RAM file");
        assert_eq!(puppet.read_page(page), u64::from_le_bytes(expected[..8].try_into().unwrap()));
    }
    assert_eq!(vm.copies(20, 5), [false; 5]);
    puppet.write_page(20, 3);
    assert_eq!(vm.home_word(20), 3, "home is the RAM file again");
    assert_eq!((vm.missing(), vm.protected()), (missing, 1), "no fault since it came home");

    // And it is registered: what is taken away is missed, what is protected is told.
    punch(&vm, 21, 1);
    assert_eq!(puppet.read_page(21), 7021);
    assert_eq!(vm.missing(), missing + 1);
    vm.protect(22, 1);
    puppet.write_page(22, 4);
    assert_eq!(vm.protected(), 2);
}

/// What is bound to a NUMA node, as QEMU binds its RAM, is bound when it comes home: else it would stay a mapping of its own.
#[test]
fn what_is_bound_to_a_node_is_one_mapping_again_when_it_is_home() {
    let Some((_manager, vm, mut puppet)) = managed(7000) else { return };
    let (_dir, store) = store();
    puppet.ask(&format!("bind 0 {RAM}"));
    resident(&mut puppet, 20..24);
    let before = vm.maps(0, RAM / PAGE);
    assert_eq!(before.parts().len(), 1);
    for batch in [1, 3] {
        let (at, n) = if batch == 1 { (20, 2) } else { (22, 1) };
        assert_eq!(vm.batch(batch, vec![map_store(&vm, at, n, 8)], &[&store]), (1, 0));
        assert_eq!(vm.maps(0, RAM / PAGE).parts().len(), 3);
        punch(&vm, at, n);
        vm.protect(at, n);
        assert_eq!(vm.batch(batch + 1, vec![map_home(&vm, at, n)], &[]), (1, 0));
        assert_eq!(vm.maps(0, RAM / PAGE), before, "one mapping as before");
    }
}

/// Starts a write and waits until it waits.
fn blocked_write(vm: &Managed, puppet: &mut Puppet, page: u64, value: u64) {
    vm.hold(true);
    let before = vm.protected();
    puppet.order(&format!("write {} {value}", page * PAGE));
    while vm.protected() == before {
        std::thread::yield_now();
    }
}

#[test]
fn a_write_that_waits_while_its_page_comes_home_is_made_there() {
    let Some((_manager, vm, mut puppet)) = managed(7000) else { return };
    let (_dir, store) = store();
    resident(&mut puppet, 20..22);
    assert_eq!(vm.batch(1, vec![map_store(&vm, 20, 2, 5)], &[&store]), (1, 0));
    puppet.write_page(21, 77);
    vm.protect(21, 1);
    for (page, was) in [(20, STAMP + 5), (21, 77)] {
        assert_eq!(puppet.read_page(page), was);
        blocked_write(&vm, &mut puppet, page, 500 + page);
        assert_eq!(vm.batch(2, vec![map_home(&vm, page, 1)], &[]), (1, 0));
        assert_eq!(vm.home_word(page), was, "not written yet");
        vm.uffd.wake(vm.addr(page), Bytes(PAGE)).unwrap();
        assert_eq!(puppet.answer(), "ok");
        assert_eq!(vm.home_word(page), 500 + page);
        assert!(vm.is_home(page));
    }
}

/// Pages go to the store and come home by the order of the protocol while they are written all the
/// time; what is in the windows of that order is not lost either.
#[test]
fn no_write_is_lost_on_the_way_there_and_back() {
    const PAGES: u64 = 24;
    let Some((_manager, vm, mut puppet)) = managed(7000) else { return };
    let (dir, store) = store();
    let writer = File::options().write(true).open(dir.path().join("store")).unwrap();
    const ROUNDS: u32 = 2000;
    resident(&mut puppet, 0..PAGES);
    puppet.write_page(PAGES, 0);
    let (seed, mut random) = dice();
    let mut away = [false; PAGES as usize];
    let (mut shared, mut homed, mut copied) = (0, 0, 0);
    puppet.order(&format!("hammer {PAGES} {}", PAGES * PAGE));
    for round in 0..ROUNDS {
        let there = random(2) == 0;
        let mut ops = Vec::new();
        vm.hold(true);
        let mut page = random(PAGES);
        while page < PAGES && ops.len() < 8 {
            if away[page as usize] != there {
                away[page as usize] = there;
                vm.protect(page, 1);
                if there {
                    let mut bytes = vec![0; PAGE as usize];
                    vm.ram_file.read_exact_at(&mut bytes, page * PAGE).unwrap();
                    writer.write_all_at(&bytes, page * PAGE).unwrap();
                    ops.push((page, map_store(&vm, page, 1, page)));
                } else {
                    copied += u32::from(vm.copies(page, 1)[0]);
                    ops.push((page, map_home(&vm, page, 1)));
                }
            }
            // Often side by side.
            page += 1 + random(2) * random(4);
        }
        let count = ops.len() as u32;
        let batch = ops.iter().map(|(_, op)| *op).collect();
        assert_eq!(vm.batch(round.into(), batch, &[&store]), (count, 0), "seed {seed}");
        if there {
            shared += count;
            ops.iter().for_each(|(page, _)| punch(&vm, *page, 1));
        } else {
            homed += count;
        }
        vm.hold(false);
        if random(3) == 0 {
            // Time to write to what is away.
            std::thread::sleep(std::time::Duration::from_micros(random(1500)));
        }
    }
    vm.ram_file.write_all_at(&1u64.to_le_bytes(), PAGES * PAGE).unwrap();
    let answer = puppet.answer();
    let writes: u64 = answer.parse().unwrap_or_else(|_| panic!("{answer}, seed {seed}"));
    assert_eq!(vm.missing(), PAGES + 1, "what was brought home was never missing");
    assert!(shared > 0 && homed > 0 && copied > 0 && writes > 0);
    println!("{shared} shared, {homed} home, {copied} of them copied; {writes} writes");
}

/// The manager must know: there is a copy that it has not granted.
#[test]
fn a_first_touch_that_writes_is_copied_before_it_is_told() {
    let Some((_manager, vm, mut puppet)) = managed(7000) else { return };
    let (_dir, store) = store();
    assert_eq!(vm.batch(1, vec![map_store(&vm, 20, 2, 5)], &[&store]), (1, 0));
    blocked_write(&vm, &mut puppet, 20, 77);
    assert_eq!(vm.copies(20, 2), [true, false]);
    assert!(vm.is_protected(20));
    vm.uffd.unprotect(vm.addr(20), Bytes(PAGE), true).unwrap();
    assert_eq!(puppet.answer(), "ok");

    // Of a page that was read before, there is none.
    assert_eq!(puppet.read_page(21), STAMP + 6);
    blocked_write(&vm, &mut puppet, 21, 78);
    assert_eq!(vm.copies(20, 2), [true, false]);
    vm.uffd.unprotect(vm.addr(21), Bytes(PAGE), true).unwrap();
    assert_eq!(puppet.answer(), "ok");
    assert_eq!(vm.copies(20, 2), [true, true]);
}

#[test]
fn a_discard_drops_the_copy_and_leaves_the_protection_as_it_was() {
    let Some((_manager, vm, mut puppet)) = managed(7000) else { return };
    let (_dir, store) = store();
    assert_eq!(vm.batch(1, vec![map_store(&vm, 20, 2, 5)], &[&store]), (1, 0));
    puppet.write_page(20, 77);
    assert_eq!(puppet.read_page(21), STAMP + 6);
    assert_eq!((vm.copies(20, 2), vm.protected()), (vec![true, false], 1));
    assert_eq!(puppet.ask(&format!("drop {} {}", 20 * PAGE, 2 * PAGE)), "ok");
    assert_eq!(vm.copies(20, 2), [false, false]);
    assert_eq!((vm.is_protected(20), vm.is_protected(21)), (false, true));
    assert_eq!(puppet.read_page(20), STAMP + 5, "the store's page again");
    puppet.write_page(20, 78);
    puppet.write_page(21, 79);
    assert_eq!(vm.protected(), 2, "one was told before, one now, the third is nobody's to tell");
    assert_eq!(vm.copies(20, 2), [true, true]);

    // A discard just before it comes home: the store's page is brought.
    vm.protect(20, 2);
    assert_eq!(puppet.ask(&format!("drop {} {PAGE}", 20 * PAGE)), "ok");
    assert_eq!(vm.batch(2, vec![map_home(&vm, 20, 2)], &[]), (1, 0));
    assert_eq!((vm.home_word(20), vm.home_word(21)), (STAMP + 5, 79));
}

/// What a page should be, by a plain model.
#[derive(Clone, Copy)]
struct Page {
    shown: u64,
    home: u64,
    /// Which page of the store it is mapped from.
    store: Option<u64>,
}

/// Random operations, which are done in `model` as well.
fn random_ops(vm: &Managed, model: &mut [Page], random: &mut impl FnMut(u64) -> u64) -> Vec<Op> {
    let all = model.len() as u64;
    let mut ops = Vec::new();
    for _ in 0..random(40) {
        if ops.len() > MAX_OPS - 21 {
            break;
        }
        let page = random(all);
        let pages = 1 + random(4).min(all - page - 1);
        let range = page as usize..(page + pages) as usize;
        match random(4) {
            0 => {
                // As the manager does it; and pages that are home stay there.
                if model[range.clone()].iter().any(|page| page.store.is_none()) {
                    continue;
                }
                ops.push(map_home(vm, page, pages));
                for page in &mut model[range] {
                    *page = Page { home: page.shown, store: None, ..*page };
                }
            }
            1 => {
                if model[range].iter().all(|page| page.store.is_none()) {
                    ops.push(map_again(vm, page, pages));
                }
            }
            _ => {
                // Often the next one, beside the last.
                let mut page = page;
                for _ in 0..=random(20) {
                    if page + pages > all {
                        break;
                    }
                    let from = random(STORE - pages);
                    ops.push(map_store(vm, page, pages, from));
                    for i in 0..pages {
                        let at = &mut model[(page + i) as usize];
                        *at = Page { shown: STAMP + from + i, store: Some(from + i), ..*at };
                    }
                    page += pages;
                }
            }
        }
    }
    ops
}

/// Where each page is mapped from, and what is at its home.
fn is_mapped_as(model: &[Page], vm: &Managed, store: &File, seed: u64) {
    let maps = vm.maps(0, model.len() as u64);
    for (page, expected) in model.iter().enumerate() {
        let at = vm.addr(page as u64);
        let part = maps.at(at).unwrap();
        let (file, offset) = match expected.store {
            Some(from) => (store, from),
            None => (&vm.ram_file, page as u64),
        };
        let mapped = (part.inode, part.offset_of(at), part.shared);
        let wanted = (inode(file), offset * PAGE, expected.store.is_none());
        assert_eq!(mapped, wanted, "page {page}, seed {seed}");
        assert_eq!(vm.home_word(page as u64), expected.home, "page {page}, seed {seed}");
    }
    let neighbours = maps.parts().windows(2).filter(|two| two[0].shared && two[1].shared);
    assert_eq!(neighbours.count(), 0, "home mappings are one, seed {seed}");
}

/// Side by side, far apart, overlapping, all kinds mixed: always what a plain model says.
#[test]
fn random_batches_do_what_a_model_says() {
    const PAGES: u64 = 48;
    let Some((_manager, vm, mut puppet)) = managed(7000) else { return };
    let (_dir, store) = store();
    resident(&mut puppet, 0..PAGES);
    let mut model = [Page { shown: 1, home: 1, store: None }; PAGES as usize];
    let (seed, mut random) = dice();
    for id in 0..150u64 {
        let ops = random_ops(&vm, &mut model, &mut random);
        let count = ops.len() as u32;
        assert_eq!(vm.batch(id, ops, &[&store]), (count, 0), "seed {seed}");
        for _ in 0..random(4) {
            let page = random(PAGES);
            let pages = 1 + random(4).min(PAGES - page - 1);
            assert_eq!(puppet.ask(&format!("drop {} {}", page * PAGE, pages * PAGE)), "ok");
            for page in &mut model[page as usize..(page + pages) as usize] {
                page.shown = page.store.map_or(page.home, |store| STAMP + store);
            }
        }
        for _ in 0..random(20) {
            let (page, value) = (random(PAGES), 10_000 + random(1000));
            puppet.write_page(page, value);
            let page = &mut model[page as usize];
            page.shown = value;
            if page.store.is_none() {
                page.home = value;
            }
        }
        is_mapped_as(&model, &vm, &store, seed);
        if id % 10 == 0 {
            for (page, expected) in model.iter().enumerate() {
                let shown = puppet.read_page(page as u64);
                assert_eq!(shown, expected.shown, "page {page}, seed {seed}");
            }
        }
    }
    assert_eq!(vm.missing(), PAGES, "only the first touch of each was ever missing");
}

#[test]
fn a_page_comes_home_to_what_the_vmm_made_of_its_ram() {
    let Some((_manager, vm, mut puppet)) = managed(7000) else { return };
    let (_dir, store) = store();
    for advice in ["dontdump", "hugepage"] {
        assert_eq!(puppet.ask(&format!("{advice} 0 {RAM}")), "ok");
    }
    // Large pages are the manager's business: the kernel was not told that the VMM wants them.
    let flags = vm.flags(0);
    assert!(flags.contains(" dd") && !flags.contains(" hg"), "{flags}");
    resident(&mut puppet, 20..30);
    let before = vm.maps(0, RAM / PAGE);
    assert_eq!(before.parts().len(), 1);
    let shared = vec![map_store(&vm, 20, 2, 5), map_store(&vm, 24, 1, 1)];
    assert_eq!(vm.batch(1, shared, &[&store]), (2, 0));
    assert_eq!(vm.maps(0, RAM / PAGE).parts().len(), 5);
    vm.protect(20, 5);
    let home = vec![map_home(&vm, 24, 1), map_home(&vm, 20, 2)];
    assert_eq!(vm.batch(2, home, &[]), (2, 0));
    assert_eq!(vm.maps(0, RAM / PAGE), before);
}

#[test]
fn a_child_gets_no_page_whether_home_shared_or_copied() {
    let Some((_manager, vm, mut puppet)) = managed(7000) else { return };
    let (_dir, store) = store();
    resident(&mut puppet, 20..30);
    let ops = vec![map_store(&vm, 20, 2, 5), map_store(&vm, 24, 1, 1)];
    assert_eq!(vm.batch(1, ops, &[&store]), (2, 0));
    puppet.write_page(20, 77);
    let answer = puppet.ask("fork");
    let child: u32 = answer.split_once(' ').unwrap().0.parse().unwrap();
    let range = vm.addr(0)..vm.addr(RAM / PAGE);
    let inherited = Maps::read(child, range).unwrap();
    rustix::process::kill_process(
        Pid::from_raw(child as i32).unwrap(),
        rustix::process::Signal::KILL,
    )
    .unwrap();
    assert_eq!(inherited.parts(), []);
    assert_eq!(vm.copies(20, 2), [true, false]);
    // What is mapped after a fork is as before it.
    assert_eq!(vm.batch(2, vec![map_store(&vm, 26, 1, 3)], &[&store]), (1, 0));
    vm.protect(20, 7);
    let home = vec![map_home(&vm, 20, 2), map_home(&vm, 24, 1), map_home(&vm, 26, 1)];
    assert_eq!(vm.batch(3, home, &[]), (3, 0));
    assert_eq!(vm.maps(0, RAM / PAGE).parts().len(), 1);
    assert_eq!(puppet.read_page(20), 77);
    assert_eq!(puppet.read_page(26), STAMP + 3);
}

/// A page of the file is there to be read, but has never been: it is told from a copy, protected or
/// not.
#[test]
fn what_pagemap_says_of_a_store_page_at_each_stage() {
    let Some((_manager, vm, mut puppet)) = managed(7000) else { return };
    let (_dir, store) = store();
    assert_eq!(vm.batch(1, vec![map_store(&vm, 20, 1, 5)], &[&store]), (1, 0));
    let entry = || vm.pagemap().entries(vm.addr(20), Pages(1)).unwrap()[0];
    assert_eq!((entry().shown(), entry().is_protected()), (Shown::Nothing, true));
    assert_eq!(puppet.read_page(20), STAMP + 5);
    assert_eq!((entry().shown(), entry().is_protected()), (Shown::File, true));
    puppet.write_page(20, 1);
    assert_eq!((entry().shown(), entry().is_protected()), (Shown::Copy, false));
    vm.protect(20, 1);
    assert_eq!((entry().shown(), entry().is_protected()), (Shown::Copy, true));
}
