//! Batches that end in the middle: what is done, what is not, and how to go on. Privileged.
#![allow(clippy::unwrap_used, reason = "a panic here is the test failing")]

mod common;

use std::os::fd::AsFd;

use ballast_shim_proto::{Batch, Message, Op};
use ballast_uffd::Modes;
use ballast_units::{Bytes, HostAddr};
use common::store::{STAMP, STORE, map_home, map_store, resident, store, unreadable};
use common::{FakeManager, Managed, PAGE, RAM, inode, managed};
use rustix::process::{Pid, Resource, Rlimit, prlimit};

#[test]
fn a_batch_with_one_bad_operation_does_nothing() {
    let Some((_manager, vm, mut puppet)) = managed(7000) else { return };
    let (dir, store) = store();
    puppet.write_page(20, 1);
    let good = map_store(&vm, 20, 1, 0);
    let last = RAM / PAGE;
    for bad in [
        Op { addr: vm.addr(last), ..good },
        Op { addr: vm.addr(last - 1), len: Bytes(2 * PAGE), ..good },
        Op { addr: HostAddr(0), ..good },
        Op { len: Bytes(0), ..good },
        Op { fd_index: 1, ..good },
        Op { file_offset: STORE * PAGE, ..good },
    ] {
        assert_eq!(vm.batch(1, vec![good, bad], &[&store]), (0, libc::EINVAL), "{bad:?}");
        assert_eq!(puppet.read_page(20), 1);
    }
    // What fails while it is done leaves the count of those before it.
    let fails = Op { fd_index: 1, ..map_store(&vm, 24, 1, 0) };
    let ops = vec![good, fails, map_store(&vm, 26, 1, 0)];
    assert_eq!(vm.batch(2, ops, &[&store, &unreadable(&dir)]), (1, libc::EACCES));
    assert_eq!(puppet.read_page(20), STAMP);
    assert!(vm.is_home(24) && vm.is_home(26));
}

fn limit(vm: &Managed, resource: Resource, current: Option<u64>) {
    let pid = Pid::from_raw(vm.hello.pid as i32).unwrap();
    prlimit(Some(pid), resource, Rlimit { current, maximum: None }).unwrap();
}

/// What the kernel counts: not the page of old system calls, which /proc shows as well.
fn mappings(vm: &Managed) -> u64 {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", vm.hello.pid)).unwrap();
    maps.lines().filter(|line| !line.ends_with("[vsyscall]")).count() as u64
}

#[test]
fn mappings_for_which_there_is_no_room_are_not_counted_and_can_be_sent_again() {
    let Some((_manager, vm, mut puppet)) = managed(7000) else { return };
    let (_dir, store) = store();
    resident(&mut puppet, 20..30);
    // The first batch takes memory of its own for what it answers.
    assert_eq!(
        vm.batch(0, vec![map_store(&vm, 40, 1, 40), map_home(&vm, 40, 1)], &[&store]),
        (2, 0)
    );
    // Private writable memory is limited, too: what the process has now, and three pages.
    let status = std::fs::read_to_string(format!("/proc/{}/status", vm.hello.pid)).unwrap();
    let data = status.lines().find_map(|l| l.strip_prefix("VmData:")).unwrap();
    let data: u64 = data.trim().trim_end_matches("kB").trim().parse().unwrap();
    limit(&vm, Resource::Data, Some(data * 1024 + 3 * PAGE));
    // Those side by side are done together, up to the one that fails.
    let pages = [20, 22, 23, 24, 25, 27];
    let ops: Vec<_> = pages.iter().map(|page| map_store(&vm, *page, 1, *page)).collect();
    let (done, errno) = vm.batch(1, ops.clone(), &[&store]);
    // Newer kernels do not count what is replaced against the page that replaces it.
    assert!(errno == libc::ENOMEM && (3..=4).contains(&done), "{done}, {errno}");
    let (counted, rest) = pages.split_at(done as usize);
    assert!(counted.iter().all(|page| !vm.is_home(*page) && vm.is_protected(*page)), "whole");
    assert!(rest.iter().all(|page| vm.is_home(*page) && !vm.is_protected(*page)), "untouched");
    assert_eq!(puppet.read_page(23), STAMP + 23);
    puppet.write_page(23, 77);

    limit(&vm, Resource::Data, None);
    let again = ops[done as usize..].to_vec();
    assert_eq!(vm.batch(2, again, &[&store]), (6 - done, 0));
    assert_eq!(puppet.read_page(27), STAMP + 27);
    assert_eq!(puppet.read_page(23), 77);
}

#[test]
fn a_page_that_cannot_be_written_to_the_ram_file_stays_where_it_is() {
    let Some((_manager, vm, mut puppet)) = managed(7000) else { return };
    let (_dir, store) = store();
    assert_eq!(vm.batch(1, vec![map_store(&vm, 20, 6, 5)], &[&store]), (1, 0));
    puppet.write_page(24, 77);
    // The second of the pages of the second operation is beyond the limit.
    limit(&vm, Resource::Fsize, Some(24 * PAGE));
    vm.protect(20, 6);
    let ops = vec![map_home(&vm, 20, 2), map_home(&vm, 23, 3)];
    assert_eq!(vm.batch(2, ops.clone(), &[]), (1, libc::EFBIG));
    assert_eq!((20..26).map(|p| vm.is_home(p)).filter(|home| *home).count(), 2);
    assert_eq!(puppet.read_page(24), 77);
    assert!((22..26).all(|page| vm.is_protected(page)), "and is as it was");

    limit(&vm, Resource::Fsize, None);
    assert_eq!(vm.batch(3, ops[1..].to_vec(), &[]), (1, 0));
    for (page, word) in [(20, 905), (21, 906), (23, 908), (24, 77), (25, 910)] {
        assert_eq!((vm.home_word(page), vm.is_home(page)), (word, true));
    }
}

/// What a process may have of mappings is used up: nothing is lost, and pages can still come home.
#[test]
fn at_the_limit_of_mappings_sharing_ends_and_pages_come_home() {
    let limit = ballast_uffd::procmap::max_map_count().unwrap();
    // Address space only: every second page is mapped from the store, two mappings for each.
    let ram = ((limit / 2 + 2048) * 2 * PAGE).next_multiple_of(1 << 20);
    if ram > 16 << 30 {
        eprintln!("SKIPPED: vm.max_map_count of {limit} needs too large a process");
        return;
    }
    let Some(manager) = FakeManager::start() else { return };
    let mut puppet = manager.puppet(ram);
    puppet.order(&format!("map memfd {ram}"));
    let vm = manager.accept(7000);
    puppet.answer();
    let (_dir, store) = store();
    assert_eq!(vm.batch(0, vec![map_store(&vm, 0, 4, 5)], &[&store]), (1, 0));
    // Two mappings at a time end at the limit or one above it, where the kernel maps nothing at all:
    // here at the limit. The last page of the RAM is one mapping more.
    if !(limit - mappings(&vm)).is_multiple_of(2) {
        assert_eq!(vm.batch(0, vec![map_store(&vm, ram / PAGE - 1, 1, 5)], &[&store]), (1, 0));
    }
    let (mut next, mut errno, mut id) = (3, 0, 1);
    while errno == 0 {
        let pages = (next..ram / PAGE / 2).take(ballast_shim_proto::MAX_OPS).map(|i| 2 * i + 1);
        let ops: Vec<_> = pages.map(|page| map_store(&vm, page, 1, page % STORE)).collect();
        assert!(!ops.is_empty(), "there are more pages than mappings");
        let (done, why) = vm.batch(id, ops, &[&store]);
        (next, errno, id) = (next + u64::from(done), why, id + 1);
    }
    assert_eq!(errno, libc::ENOMEM);
    assert_eq!(mappings(&vm), limit);
    // The one that was refused is home, and the last that was not is shared.
    let last = 2 * next - 1;
    assert!(vm.is_home(last + 2) && !vm.is_home(last) && vm.is_protected(last));
    assert_eq!(puppet.read_page(last + 2), 7000 + last + 2);
    assert_eq!(puppet.read_page(last), STAMP + last % STORE);
    puppet.write_page(last, 77);

    // The middle of a mapping would make three of it.
    vm.protect(0, 4);
    assert_eq!(vm.batch(id, vec![map_home(&vm, 1, 1)], &[]), (0, libc::ENOMEM));
    assert_eq!(puppet.read_page(1), STAMP + 6);
    assert_eq!(vm.batch(id, vec![map_home(&vm, 0, 4)], &[]), (1, 0), "the whole is none");
    assert_eq!(vm.home_word(1), STAMP + 6);
    let count = mappings(&vm);

    vm.protect(last, 1);
    vm.protect(last - 2, 1);
    let ops = vec![map_home(&vm, last, 1), map_home(&vm, last - 2, 1)];
    assert_eq!(vm.batch(id, ops, &[]), (2, 0), "home again, even now");
    assert_eq!(vm.home_word(last), 77);
    assert_eq!(vm.home_word(last - 2), STAMP + (last - 2) % STORE);
    assert_eq!(mappings(&vm), count - 4);
    assert_eq!(vm.batch(id + 1, vec![map_store(&vm, last, 1, 3)], &[&store]), (1, 0));
}

#[test]
fn the_manager_can_do_the_second_half_itself() {
    let Some((_manager, vm, mut puppet)) = managed(7000) else { return };
    let (_dir, store) = store();
    resident(&mut puppet, 20..22);
    assert_eq!(vm.batch(1, vec![map_store(&vm, 20, 1, 5)], &[&store]), (1, 0));
    puppet.write_page(20, 77);
    // Undone, as if S had not come to it.
    vm.uffd.unregister(vm.addr(20), Bytes(PAGE)).unwrap();
    puppet.write_page(20, 78);
    assert_eq!(vm.protected(), 1);
    let modes = Modes::MISSING | Modes::WP;
    // The whole RAM, of which most is registered.
    // SAFETY: memory of another process.
    unsafe { vm.uffd.register(vm.addr(0), Bytes(RAM), modes) }.unwrap();
    vm.protect(20, 1);
    puppet.write_page(20, 79);
    assert_eq!(vm.protected(), 2);
    assert_eq!(puppet.read_page(20), 79);
    assert_eq!(puppet.read_page(100), 7100);
}

#[test]
fn a_new_manager_sees_how_far_the_last_batch_came() {
    let Some((manager, vm, mut puppet)) = managed(7000) else { return };
    let (dir, store) = store();
    resident(&mut puppet, 20..40);
    assert_eq!(vm.batch(1, vec![map_store(&vm, 30, 2, 5)], &[&store]), (1, 0));
    puppet.write_page(31, 77);
    vm.protect(30, 2);
    // It dies after it sent this; the third fails.
    let ops = vec![
        map_store(&vm, 20, 2, 8),
        map_home(&vm, 30, 2),
        Op { fd_index: 1, ..map_store(&vm, 24, 1, 7) },
        map_store(&vm, 24, 1, 9),
    ];
    let batch = Message::Batch(Batch::new(2, ops).unwrap());
    vm.connection.send(&batch, &[store.as_fd(), unreadable(&dir).as_fd()]).unwrap();
    drop(vm);

    let vm = manager.accept_again(8000);
    let shared = |page| {
        let maps = vm.maps(page, 1);
        let part = maps.at(vm.addr(page)).unwrap();
        (part.inode == inode(&store)).then_some(part.offset / PAGE)
    };
    assert_eq!([20, 21, 24].map(shared), [Some(8), Some(9), None]);
    assert!([24, 30, 31].iter().all(|page| vm.is_home(*page)));
    assert_eq!((vm.home_word(30), vm.home_word(31)), (STAMP + 5, 77));
    puppet.write_page(20, 78);
    assert_eq!(vm.protected(), 1);
    assert_eq!(vm.copies(20, 2), [true, false]);
}

/// Whose descriptors are used up: nothing is lost, the conversation goes on, and what needs no descriptor is done.
#[test]
fn without_a_descriptor_left_a_batch_is_refused_and_the_next_is_done() {
    let Some((_manager, vm, mut puppet)) = managed(7000) else { return };
    let (_dir, store) = store();
    assert_eq!(vm.batch(1, vec![map_store(&vm, 21, 1, 21)], &[&store]), (1, 0));
    puppet.write_page(20, 1);
    let open = std::fs::read_dir(format!("/proc/{}/fd", vm.hello.pid)).unwrap();
    let open: Vec<u64> =
        open.map(|fd| fd.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect();
    let free = (0..).find(|fd| !open.contains(fd)).unwrap();
    let before = rustix::process::getrlimit(Resource::Nofile);
    let limit = |limit| {
        let pid = Pid::from_raw(vm.hello.pid as i32).unwrap();
        prlimit(Some(pid), Resource::Nofile, limit).unwrap();
    };
    limit(Rlimit { current: Some(free), ..before });
    let to_store = vec![map_store(&vm, 20, 1, 20)];
    for n in 2..4 {
        assert_eq!(vm.batch(n, to_store.clone(), &[&store]), (0, libc::EMFILE));
        assert!(vm.is_home(20));
    }
    assert_eq!(vm.batch(4, vec![map_home(&vm, 21, 1)], &[]), (1, 0));

    limit(before);
    assert_eq!(vm.batch(5, to_store, &[&store]), (1, 0));
    assert_eq!((puppet.read_page(20), puppet.read_page(21)), (STAMP + 20, STAMP + 21));
}
