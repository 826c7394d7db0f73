//! The shim in a small process, with a manager that is just enough. Privileged.
#![allow(clippy::unwrap_used, reason = "a panic here is the test failing")]

mod common;

use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use ballast_shim_proto::{Connection, ConnectionError, Message, ONE_PART, Op, OpKind};
use ballast_units::Bytes;
use common::{FakeManager, MAP, PAGE, Puppet, RAM, managed, puppet_command};
use rustix::process::{Resource, Rlimit, prlimit};

#[test]
fn the_ram_is_introduced_as_it_is_and_its_faults_are_served() {
    let Some((_manager, vm, mut puppet)) = managed(7000) else { return };
    assert_eq!(vm.hello.vm.as_str(), "testvm");
    assert_eq!((vm.hello.parts.len(), vm.hello.version), (1, ONE_PART));
    assert_eq!((vm.ram().len, vm.ram().file_offset), (Bytes(RAM), 0));
    assert_eq!(vm.hello.page_size, 4096);
    assert_eq!(vm.hello.pid, puppet.child.id());
    assert_eq!(vm.connection.peer().unwrap().pid, puppet.child.id());
    assert_eq!(vm.missing(), 0, "nobody touched the RAM before it was managed");

    assert_eq!(puppet.read_page(3), 7003);
    assert_eq!(puppet.read_page(4095), 7000 + 4095);
    puppet.write_page(3, 42);
    assert_eq!(puppet.read_page(3), 42);
    assert_eq!(vm.missing(), 2);

    // The descriptor that came along is the RAM.
    let mut word = [0; 8];
    vm.ram_file.read_exact_at(&mut word, 3 * PAGE).unwrap();
    assert_eq!(u64::from_le_bytes(word), 42);
    // Write protection of shared memory works on what the shim registered.
    vm.uffd.protect(vm.addr(3), Bytes(PAGE)).unwrap();
    puppet.write_page(3, 43);
    assert_eq!(vm.seen.protected.load(std::sync::atomic::Ordering::Acquire), 1);
    // Discarding is told, and what is touched there next is missing again.
    assert_eq!(puppet.ask(&format!("discard {} {}", 3 * PAGE, 2 * PAGE)), "ok");
    // The kernel lets the process go on when the event is read, before the reader has noted it.
    let removed = || vm.seen.removed.lock().unwrap().clone();
    while removed().is_empty() {
        std::thread::yield_now();
    }
    assert_eq!(removed(), [(vm.addr(3).0, vm.addr(5).0)]);
    assert_eq!(puppet.read_page(3), 7003);
}

#[test]
fn a_regular_file_is_ram_too_and_a_second_mapping_is_not() {
    let Some(manager) = FakeManager::start() else { return };
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut puppet = manager.puppet(RAM);
    puppet.order(&format!("map {} {RAM}", dir.path().join("ram").display()));
    let vm = manager.accept(100);
    let first = puppet.answer();
    assert_eq!(puppet.read_page(1), 101);
    assert_ne!(puppet.ask("map-again"), first);
    assert!(matches!(
        manager.listener.accept(Some(Duration::from_millis(300))),
        Err(ConnectionError::TimedOut(_))
    ));
    assert_eq!(vm.ram().addr.0.to_string(), first);
}

#[test]
fn without_a_manager_the_process_waits_and_the_next_one_goes_on() {
    let Some((manager, vm, mut puppet)) = managed(1000) else { return };
    for round in 2..5 {
        puppet.write_page(0, round);
    }
    drop(vm);
    // Faults while nobody listens: they wait for whoever comes, and no zeros are read.
    puppet.order(&format!("read {}", 9 * PAGE));
    let vm = manager.accept_again(2000);
    assert_eq!(puppet.answer(), "2009");
    assert_eq!(puppet.read_page(0), 4, "what was there is there");
    drop(vm);
    let vm = manager.accept_again(3000);
    assert_eq!(puppet.read_page(10), 3010);
    // Batches work over the new connection too.
    let again = Op {
        kind: OpKind::MapAgain,
        addr: vm.addr(100),
        len: Bytes(PAGE),
        file_offset: 0,
        fd_index: 0,
    };
    assert_eq!(vm.batch(5, vec![again], &[]), (1, 0));
}

/// Asks the shim to keep the RAM file, and answers with the errno.
fn keep(vm: &common::Managed, id: u64) -> i32 {
    let op = Op {
        kind: OpKind::Keep,
        addr: vm.ram().addr,
        len: vm.ram().len,
        file_offset: 0,
        fd_index: 0,
    };
    vm.batch(id, vec![op], &[]).1
}

#[test]
fn a_ram_file_that_is_kept_is_sent_to_nobody_whoever_the_manager_is() {
    let Some((manager, vm, mut puppet)) = managed(1000) else { return };
    assert_eq!((puppet.ask("send-other").as_str(), keep(&vm, 1)), ("ok", 0));
    for send in ["send", "send-many"] {
        assert!(puppet.ask(send).contains("Operation not permitted"), "{send}");
    }
    assert_eq!(puppet.ask("send-other"), "ok");
    drop(vm);
    assert!(puppet.ask("send").contains("Operation not permitted"));
    // What was refused was not sent.
    let vm = manager.accept_again(2000);
    assert_eq!(keep(&vm, 1), 0);
    assert_eq!(puppet.read_page(7), 2007);
    assert!(puppet.end().contains("not given to another process"));
}

#[test]
fn a_ram_file_that_was_sent_cannot_be_kept_and_can_be_sent_again() {
    let Some((manager, vm, mut puppet)) = managed(1000) else { return };
    assert_eq!(puppet.ask("send"), "ok");
    assert_eq!(keep(&vm, 1), libc::EBUSY);
    drop(vm);
    let vm = manager.accept_again(2000);
    assert_eq!((keep(&vm, 1), puppet.ask("send").as_str()), (libc::EBUSY, "ok"));
}

#[test]
fn the_ram_of_a_vm_that_is_not_managed_is_its_own_to_send() {
    let Some(manager) = FakeManager::start() else { return };
    let mut puppet = manager.puppet(RAM);
    puppet.order(MAP);
    let (connection, ..) = manager.accept_hello();
    connection.send(&Message::refuse("not today"), &[]).unwrap();
    puppet.answer();
    assert_eq!([puppet.ask("send"), puppet.ask("send-many")], ["ok", "ok"]);
}

#[test]
fn a_manager_that_refuses_a_reconnection_is_asked_again_and_no_page_is_lost() {
    let Some((manager, vm, mut puppet)) = managed(1000) else { return };
    puppet.write_page(0, 5);
    drop(vm);
    let (connection, hello, _fds) = manager.accept_hello();
    assert!(hello.reconnect);
    connection.send(&Message::refuse("still recovering"), &[]).unwrap();
    drop(connection);
    puppet.order(&format!("read {}", 8 * PAGE));
    let _vm = manager.accept_again(2000);
    assert_eq!(puppet.answer(), "2008");
    assert_eq!(puppet.read_page(0), 5);
    assert!(puppet.end().contains("still recovering"));
}

/// What keeps it from coming back is told, at once where nobody but whoever started it can put that in order.
#[test]
fn a_vmm_that_cannot_come_back_says_why_and_comes_when_it_can() {
    let Some((manager, mut vm, mut puppet)) = managed(1000) else { return };
    let said = said(&mut puppet);
    puppet.write_page(0, 5);
    let pid = rustix::process::Pid::from_raw(vm.hello.pid as i32).unwrap();
    let before = rustix::process::getrlimit(Resource::Nofile);
    let limit = |limit| prlimit(Some(pid), Resource::Nofile, limit).unwrap();
    // What may pass by itself is told after 10 s: a slow machine may take as long now and then.
    let mut is_at_once = false;
    for page in 8..13 {
        // The descriptor of its last connection is not to be had either.
        limit(Rlimit { current: Some(3), ..before });
        let begun = Instant::now();
        drop(vm);
        let line = waits(&said);
        assert!(line.contains("testvm") && line.contains("Too many open files"), "{line}");
        is_at_once |= begun.elapsed() < Duration::from_secs(10);
        limit(before);
        vm = manager.accept_again(2000);
        assert_eq!((puppet.read_page(0), puppet.read_page(page)), (5, 2000 + page));
        if is_at_once {
            break;
        }
    }
    assert!(is_at_once, "it was not told at once");
    let (socket, away) = (manager.socket(), manager.dir.path().join("away"));
    std::fs::rename(&socket, &away).unwrap();
    drop(vm);
    let line = waits(&said);
    assert!(line.contains("shim.sock") && line.contains("No such file"), "{line}");
    std::fs::rename(&away, &socket).unwrap();
    let _vm = manager.accept_again(3000);
    assert_eq!((puppet.read_page(0), puppet.read_page(7)), (5, 3007));
}

/// What the shim says from now on.
fn said(puppet: &mut Puppet) -> Receiver<String> {
    let stderr = BufReader::new(puppet.child.stderr.take().unwrap());
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        stderr.lines().map_while(Result::ok).for_each(|line| _ = sender.send(line));
    });
    lines
}

/// That its guest waits.
fn waits(said: &Receiver<String>) -> String {
    loop {
        let line = said.recv_timeout(Duration::from_secs(60)).unwrap();
        if line.contains("its guest waits, asking again") {
            return line;
        }
    }
}

#[test]
fn a_manager_that_dies_in_the_opening_leaves_nothing_behind() {
    let Some(manager) = FakeManager::start() else { return };
    let mut puppet = manager.puppet(RAM);
    puppet.order(MAP);
    let (connection, _, _, uffd) = manager.accept_ready();
    drop((connection, uffd));
    let _vm = manager.accept(500);
    puppet.answer();
    assert_eq!(puppet.read_page(2), 502);
}

#[test]
fn a_manager_that_has_it_wait_and_leaves_is_followed_by_the_next_one() {
    let Some(manager) = FakeManager::start() else { return };
    let mut puppet = manager.puppet(RAM);
    puppet.order(MAP);
    let opening = manager.accept_hello();
    // Longer than it waits where nobody is.
    std::thread::sleep(Duration::from_secs(6));
    drop(opening);
    let _vm = manager.accept(500);
    puppet.answer();
    assert_eq!(puppet.read_page(2), 502);
}

#[test]
fn a_refused_vm_runs_unmanaged_and_says_why() {
    let Some(manager) = FakeManager::start() else { return };
    let mut puppet = manager.puppet(RAM);
    puppet.order(MAP);
    let (connection, _, _) = manager.accept_hello();
    connection.send(&Message::refuse("no room: 5 GiB are reserved"), &[]).unwrap();
    puppet.answer();
    assert_eq!(puppet.read_page(1), 0);
    let said = puppet.end();
    assert!(said.contains("testvm") && said.contains("no room: 5 GiB are reserved"), "{said}");
}

#[test]
fn a_refusal_after_ready_gives_the_memory_back_to_the_kernel() {
    let Some(manager) = FakeManager::start() else { return };
    let mut puppet = manager.puppet(RAM);
    puppet.order(MAP);
    let (connection, _, _, _uffd) = manager.accept_ready();
    connection.send(&Message::refuse("changed my mind"), &[]).unwrap();
    puppet.answer();
    assert_eq!(puppet.read_page(1), 0, "our copy of the userfaultfd delays nothing");
}

#[test]
fn memory_that_cannot_be_paged_is_reported_and_left_alone() {
    let Some(manager) = FakeManager::start() else { return };
    // A file of a disk's filesystem: registering it for missing faults is EINVAL.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    if rustix::fs::statfs(dir.path()).unwrap().f_type == libc::TMPFS_MAGIC {
        eprintln!("SKIPPED: {} is a tmpfs itself", dir.path().display());
        return;
    }
    let mut puppet = manager.puppet(RAM);
    puppet.order(&format!("map {} {RAM}", dir.path().join("ram").display()));
    // A manager refuses such a file at once; this one takes what comes.
    let accepted = manager.listener.accept(common::PATIENCE).unwrap();
    let connection = Connection::from_fd(accepted.into());
    assert!(matches!(connection.recv(common::PATIENCE).unwrap().0, Message::Hello(_)));
    let device = [std::os::fd::AsFd::as_fd(&manager.device)];
    connection.send(&Message::Welcome { version: ONE_PART }, &device).unwrap();
    let (message, _) = connection.recv(common::PATIENCE).unwrap();
    let step = ballast_shim_proto::Step::Register;
    assert_eq!(message, Message::Failed { step, errno: libc::EINVAL });
    drop(connection);
    puppet.answer();
    assert_eq!(puppet.read_page(1), 0);
    assert!(puppet.end().contains("registering the RAM"));
}

/// A library is installed before its manager is.
#[test]
fn a_manager_of_before_is_spoken_to_as_it_understands() {
    let Some(manager) = FakeManager::start() else { return };
    let mut puppet = manager.puppet(RAM);
    puppet.order(MAP);
    let refused = "protocol version 6; this side speaks versions 1 to 5";
    // Refused in the oldest, it is refused for good.
    for version in [ONE_PART, ONE_PART - 2, ONE_PART - 4] {
        let connection = opening_in(&manager, version);
        connection.send(&Message::refuse(refused), &[]).unwrap();
    }
    puppet.answer();
    assert!(puppet.end().contains("going on unmanaged"));
}

/// Takes the opening of a shim that speaks this version, which may be an older one.
fn opening_in(manager: &FakeManager, version: u32) -> Connection {
    let accepted = manager.listener.accept(common::PATIENCE).unwrap();
    let connection = Connection::from_fd(accepted.into());
    let (message, _) = connection.recv(common::PATIENCE).unwrap();
    let Message::Hello(hello) = message else { panic!("{message:?}") };
    assert_eq!((hello.version, hello.reconnect, hello.parts.len()), (version, false, 1));
    connection
}

#[test]
fn the_next_manager_is_spoken_to_as_any_other_also_in_the_opening() {
    let Some(manager) = FakeManager::start() else { return };
    let mut puppet = manager.puppet(RAM);
    puppet.order(MAP);
    let connection = opening_in(&manager, ONE_PART);
    let refused = "protocol version 6; this side speaks versions 1 to 5";
    connection.send(&Message::refuse(refused), &[]).unwrap();
    // It leaves for the next one, which understands all.
    drop(opening_in(&manager, ONE_PART - 2));
    let vm = manager.accept(500);
    assert_eq!(vm.hello.version, ONE_PART);
    puppet.answer();
    assert_eq!(puppet.read_page(2), 502);
}

/// Who comes after it may understand more.
#[test]
fn a_manager_that_comes_after_one_of_before_is_spoken_to_as_any_other() {
    let Some((manager, vm, mut puppet)) = managed(1000) else { return };
    drop(vm);
    let (connection, hello, _fds) = manager.accept_hello();
    assert_eq!((hello.version, hello.reconnect), (ONE_PART, true));
    let refused = "protocol version 6; this side speaks versions 1 to 5";
    connection.send(&Message::refuse(refused), &[]).unwrap();
    drop(connection);
    let (connection, hello, _fds) = manager.accept_hello();
    assert_eq!((hello.version, hello.reconnect), (ONE_PART - 2, true));
    connection.send(&Message::Managed, &[]).unwrap();
    drop(connection);
    let vm = manager.accept_again(3000);
    assert_eq!((vm.hello.version, vm.hello.reconnect), (ONE_PART, true));
    assert_eq!(puppet.read_page(10), 3010);
}

#[test]
fn without_any_manager_a_vm_does_not_start_unless_told_so() {
    let Some(manager) = FakeManager::start() else { return };
    let nowhere = manager.dir.path().join("nowhere.sock");
    let mut command = puppet_command();
    let command = manager.prepare(&mut command, RAM).env("BALLAST_SHIM_SOCKET", &nowhere);
    let mut puppet = Puppet::spawn(command);
    let mut optional = Puppet::spawn(command.env("BALLAST_OPTIONAL", "1"));
    puppet.order(MAP);
    optional.order(MAP);
    assert_eq!(puppet.answer(), "", "the process ended");
    assert_eq!(puppet.child.wait().unwrap().code(), Some(1));
    assert!(puppet.end().contains("nowhere.sock"));
    assert_ne!(optional.answer(), "");
    assert_eq!(optional.read_page(1), 0);
    assert!(optional.end().contains("going on unmanaged"));
}

#[test]
fn a_wrong_environment_ends_the_process_at_once() {
    let Some(manager) = FakeManager::start() else { return };
    let mut command = puppet_command();
    let command = manager.prepare(&mut command, RAM).env("BALLAST_RAM_SIZE", "256M");
    let mut puppet = Puppet::spawn(command);
    assert_eq!(puppet.child.wait().unwrap().code(), Some(1));
    assert!(puppet.end().contains("BALLAST_RAM_SIZE=\"256M\" is not a number of bytes"));
}

#[test]
fn a_process_that_was_not_asked_for_is_left_alone() {
    let Some(manager) = FakeManager::start() else { return };
    let mut command = puppet_command();
    let command = manager.prepare(&mut command, RAM).env_remove("BALLAST_VM");
    let mut puppet = Puppet::spawn(command);
    assert!(puppet.ask(MAP).parse::<u64>().is_ok());
    assert_eq!(puppet.read_page(1), 0);
    assert!(puppet.ask("exec").starts_with("3 "), "its environment is its own");
    assert!(matches!(
        manager.listener.accept(Some(Duration::from_millis(300))),
        Err(ConnectionError::TimedOut(_))
    ));
    assert_eq!(puppet.end(), "");
}

#[test]
fn children_inherit_nothing() {
    let Some((_manager, vm, mut puppet)) = managed(10) else { return };
    let answer = puppet.ask("exec");
    let (ours, all) = answer.split_once(' ').unwrap();
    assert_eq!(ours, "0");
    assert_ne!(all, "0", "the rest of the environment is inherited");

    // A child that lives on after its parent was killed does not keep the VM alive.
    let answer = puppet.ask("fork");
    let (child, telltales) = answer.split_once(' ').unwrap();
    assert_eq!(telltales, "0", "no userfaultfd, no socket");
    puppet.child.kill().unwrap();
    puppet.child.wait().unwrap();
    vm.wait_for_close();
    let page = vec![0; 4096];
    let opts = ballast_uffd::CopyOpts { wake: true, protect: false };
    let gone = vm.uffd.copy(vm.addr(50), &page, opts);
    assert_eq!(gone, Err(ballast_uffd::UffdError::Gone));
    let pid = rustix::process::Pid::from_raw(child.parse().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}
