//! A RAM of two parts, handed over together when both are mapped. Privileged.
#![allow(clippy::unwrap_used, reason = "a panic here is the test failing")]

mod common;

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use ballast_shim_proto::{Connection, ConnectionError, Hello, Message, Op, OpKind, VERSION};
use ballast_uffd::Uffd;
use ballast_units::{Bytes, HostAddr};
use common::store::{STAMP, store};
use common::{
    FakeManager, MAP, Managed, PAGE, PATIENCE, Puppet, RAM, inode, puppet_command, word_of,
};
use libc::EINVAL;

const MORE: u64 = 8 << 20;
const MAP_MORE: &str = "map memfd 8388608";

fn of_two(manager: &FakeManager) -> Puppet {
    let mut command = puppet_command();
    manager.prepare(&mut command, RAM).env("BALLAST_RAM_SIZE", format!("{RAM},{MORE}"));
    Puppet::spawn(&mut command)
}

fn waits_for_nobody(manager: &FakeManager) {
    assert!(matches!(
        manager.listener.accept(Some(Duration::from_millis(300))),
        Err(ConnectionError::TimedOut(_))
    ));
}

/// Of a first Hello, up to Managed, and the file of the second part.
fn take(
    manager: &FakeManager,
    connection: Connection,
    hello: Hello,
    fds: Vec<OwnedFd>,
) -> (Managed, File) {
    let device = [manager.device.as_fd()];
    connection.send(&Message::Welcome { version: hello.version }, &device).unwrap();
    let (message, mut ready) = connection.recv(PATIENCE).unwrap();
    assert!(matches!(message, Message::Ready { .. }), "{message:?} instead of Ready");
    let uffd = Uffd::from_fd(ready.remove(0)).unwrap();
    let [first, second] = <[OwnedFd; 2]>::try_from(fds).unwrap().map(File::from);
    (Managed::begin(connection, hello, first, uffd, 0), second)
}

#[test]
fn both_parts_are_announced_once_and_served_by_one_userfaultfd() {
    let Some(manager) = FakeManager::start() else { return };
    let mut puppet = of_two(&manager);
    let first = puppet.ask(MAP);
    // How the VMM wants the first part comes before the second is there.
    assert_eq!(puppet.ask(&format!("hugepage 0 {RAM}")), "ok");
    // As large as none of them.
    assert_ne!(puppet.ask("map memfd 4194304"), "");
    waits_for_nobody(&manager);
    puppet.order(MAP_MORE);
    let (connection, hello, fds) = manager.accept_hello();
    assert_eq!((hello.version, hello.reconnect, hello.parts.len()), (VERSION, false, 2));
    let (vm, second) = take(&manager, connection, hello, fds);
    let more = puppet.answer();
    let [a, b] = [vm.hello.parts[0], vm.hello.parts[1]];
    assert_eq!((a.addr.0.to_string(), a.len), (first.clone(), Bytes(RAM)));
    assert_eq!((b.addr.0.to_string(), b.len), (more, Bytes(MORE)));
    assert!(!vm.flags(0).contains(" hg"), "large pages are for the manager to make");

    // The second part is the one that the puppet uses now.
    puppet.write_page(3, 42);
    assert_eq!((word_of(&second, 3), vm.missing()), (42, 1));
    assert_eq!(puppet.ask(&format!("use {first} {RAM}")), "ok");
    puppet.write_page(3, 7);
    assert_eq!((vm.home_word(3), word_of(&second, 3)), (7, 42));

    // What comes home goes to the file of its own part.
    let (_dir, store) = store();
    let at = HostAddr(b.addr.0 + 3 * PAGE);
    let op = |kind, len| Op { kind, addr: at, len: Bytes(len), file_offset: 0, fd_index: 0 };
    assert_eq!(vm.batch(1, vec![op(OpKind::MapStore, PAGE)], &[&store]), (1, 0));
    assert_eq!(puppet.ask(&format!("use {} {MORE}", b.addr.0)), "ok");
    assert_eq!(puppet.read_page(3), STAMP);
    assert_eq!(vm.batch(2, vec![op(OpKind::MapHome, PAGE)], &[]), (1, 0));
    assert_eq!((puppet.read_page(3), word_of(&second, 3), vm.home_word(3)), (STAMP, STAMP, 7));
    let beyond = vec![op(OpKind::MapAgain, MORE)];
    assert_eq!(vm.batch(3, beyond, &[]), (0, EINVAL), "beyond the end of its part");

    // The next manager gets all of it.
    let files = [inode(&vm.ram_file), inode(&second)];
    drop(vm);
    puppet.order(&format!("read {}", 9 * PAGE));
    let (connection, hello, mut fds) = manager.accept_hello();
    assert_eq!((hello.version, hello.reconnect), (VERSION, true));
    assert_eq!(hello.parts, [a, b]);
    assert_eq!(fds.len(), 3);
    let uffd = Uffd::from_fd(fds.pop().unwrap()).unwrap();
    let [one, two] = <[OwnedFd; 2]>::try_from(fds).unwrap().map(File::from);
    assert_eq!([inode(&one), inode(&two)], files);
    let _vm = Managed::begin(connection, hello, one, uffd, 0);
    assert_eq!(puppet.answer(), "0");
    assert_eq!(puppet.read_page(3), STAMP);
}

#[test]
fn refused_both_parts_are_memory_as_any_other() {
    let Some(manager) = FakeManager::start() else { return };
    let mut puppet = of_two(&manager);
    let first = puppet.ask(MAP);
    puppet.order(MAP_MORE);
    let (connection, _, _) = manager.accept_hello();
    connection.send(&Message::refuse("not today"), &[]).unwrap();
    assert_ne!(puppet.answer(), "");
    assert_eq!(puppet.read_page(1), 0);
    assert_eq!(puppet.ask(&format!("use {first} {RAM}")), "ok");
    assert_eq!(puppet.read_page(1), 0);
    drop(connection);
    // It has no copy of anything that it would keep.
    let answer = puppet.ask("fork");
    let (child, telltales) = answer.split_once(' ').unwrap();
    assert_eq!(telltales, "0");
    let pid = rustix::process::Pid::from_raw(child.parse().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    assert!(puppet.end().contains("not today"));
}
