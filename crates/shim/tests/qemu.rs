//! The shim in a whole, unmodified QEMU. No guest kernel: the firmware runs and touches memory.
//! Privileged.
#![allow(clippy::unwrap_used, reason = "a panic here is the test failing")]

mod common;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ballast_shim_proto::{Op, OpKind};
use ballast_units::Bytes;
use common::{FakeManager, Managed, PAGE};
use rustix::fs::MemfdFlags;

const RAM: u64 = 64 << 20;
/// The firmware copies and clears itself and its tables: far more pages than this.
const FIRMWARE_FAULTS: u64 = 50;

fn qemu() -> Option<Command> {
    // Another version of QEMU may be named here.
    let binary = std::env::var("BALLAST_TEST_QEMU");
    let binary = binary.as_deref().unwrap_or("qemu-system-x86_64");
    let mut command = Command::new(binary);
    if let Err(e) = Command::new(binary).arg("--version").output() {
        return common::skip(&format!("{binary}: {e}"));
    }
    if let Ok(firmware) = std::env::var("BALLAST_TEST_QEMU_FIRMWARE") {
        command.args(["-L", &firmware]);
    }
    command.args(["-nodefaults", "-no-user-config", "-display", "none", "-m", "64M"]);
    command.args(["-accel", "tcg,tb-size=16", "-machine", "q35,memory-backend=mem"]);
    command.stdin(Stdio::null());
    Some(command)
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(manager: &FakeManager, mut qemu: Command, object: &str) -> (Killed, Managed) {
    let child = manager.prepare(qemu.args(["-object", object]), RAM).spawn().unwrap();
    let child = Killed(child);
    let vm = manager.accept(0);
    assert_eq!(vm.ram().len, Bytes(RAM));
    (child, vm)
}

fn wait_for_faults(vm: &Managed, at_least: u64) {
    // Bounded by the test runner's patience only: how fast a crowded machine is proves nothing.
    while vm.missing() < at_least {
        std::thread::sleep(Duration::from_millis(20));
    }
}

const MEMFD: &str = "memory-backend-memfd,id=mem,size=64M,share=on";

#[test]
fn a_guest_on_a_memfd_is_served_and_outlives_its_manager() {
    let (Some(manager), Some(qemu)) = (FakeManager::start(), qemu()) else { return };
    let (mut child, vm) = start(&manager, qemu, MEMFD);
    // The first faults come before the first instruction of the guest: QEMU loads its ROMs.
    wait_for_faults(&vm, 2);
    drop(vm);
    let vm = manager.accept_again(0);
    wait_for_faults(&vm, FIRMWARE_FAULTS);
    assert!(child.0.try_wait().unwrap().is_none(), "QEMU runs");
    let threads = format!("/proc/{}/task", child.0.id());
    let names: Vec<String> = std::fs::read_dir(threads)
        .unwrap()
        .flatten()
        .filter_map(|t| std::fs::read_to_string(t.path().join("comm")).ok())
        .collect();
    assert_eq!(names.iter().filter(|n| n.trim() == "ballast-shim").count(), 1, "{names:?}");
    drop(child);
    vm.wait_for_close();
}

#[test]
fn a_guest_on_a_file_of_a_tmpfs_is_served() {
    let (Some(manager), Some(qemu)) = (FakeManager::start(), qemu()) else { return };
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().display();
    // A directory (QEMU makes and unlinks a file in it), as libvirt uses it.
    let object = format!("memory-backend-file,id=mem,size=64M,share=on,mem-path={path}");
    let (_child, vm) = start(&manager, qemu, &object);
    wait_for_faults(&vm, FIRMWARE_FAULTS);
}

#[test]
fn preallocated_memory_goes_through_the_manager_as_well() {
    let (Some(manager), Some(qemu)) = (FakeManager::start(), qemu()) else { return };
    let (_child, vm) = start(&manager, qemu, &format!("{MEMFD},prealloc=on"));
    wait_for_faults(&vm, RAM / PAGE);
}

/// As libvirt starts it.
const SANDBOX: [&str; 2] =
    ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"];

#[test]
fn a_sandboxed_guest_is_served() {
    let (Some(manager), Some(mut qemu)) = (FakeManager::start(), qemu()) else { return };
    qemu.args(SANDBOX);
    let (mut child, vm) = start(&manager, qemu, MEMFD);
    wait_for_faults(&vm, 2);
    drop(vm);
    wait_for_faults(&manager.accept_again(0), FIRMWARE_FAULTS);
    assert!(child.0.try_wait().unwrap().is_none(), "QEMU runs");
}

#[test]
fn a_daemonized_guest_is_served_in_the_daemon() {
    let (Some(manager), Some(mut qemu)) = (FakeManager::start(), qemu()) else { return };
    let pid_file = manager.dir.path().join("pid");
    qemu.arg("-daemonize").arg("-pidfile").arg(&pid_file);
    let (mut parent, vm) = start(&manager, qemu, MEMFD);
    let daemon = vm.connection.peer().unwrap().pid;
    let daemon = rustix::process::Pid::from_raw(daemon as i32).unwrap();
    wait_for_faults(&vm, 2);
    assert!(parent.0.wait().unwrap().success(), "the parent reports a good start");
    assert_ne!(daemon.as_raw_nonzero().get() as u32, parent.0.id());
    assert_eq!(read_pid(&pid_file), daemon.as_raw_nonzero().get());
    drop(vm);
    let vm = manager.accept_again(0);
    wait_for_faults(&vm, FIRMWARE_FAULTS);
    rustix::process::kill_process(daemon, rustix::process::Signal::KILL).unwrap();
    vm.wait_for_close();
}

/// QEMU marks its RAM (not to be inherited, in huge pages, and here not to be dumped, as under
/// libvirt); what comes home is marked the same, or it would stay a mapping of its own.
#[test]
fn pages_of_a_guest_come_home_into_the_mapping_they_left() {
    let (Some(manager), Some(mut qemu)) = (FakeManager::start(), qemu()) else { return };
    qemu.args(["-machine", "dump-guest-core=off"]).args(SANDBOX);
    let (mut child, vm) = start(&manager, qemu, MEMFD);
    wait_for_faults(&vm, FIRMWARE_FAULTS);
    let (pages, middle) = (RAM / PAGE, RAM / PAGE / 2);
    let before = vm.maps(0, pages);
    // Whether the firmware uses them or not: they show what they showed.
    let store = File::from(rustix::fs::memfd_create("store", MemfdFlags::CLOEXEC).unwrap());
    let path = format!("/proc/self/fd/{}", store.as_raw_fd());
    let readable = File::open(path).unwrap();
    vm.hold(true);
    let mut ops = Vec::new();
    for (slot, page) in (middle..middle + 8).step_by(2).enumerate() {
        vm.protect(page, 1);
        let (mut bytes, slot) = (vec![0; PAGE as usize], slot as u64 * PAGE);
        vm.ram_file.read_exact_at(&mut bytes, page * PAGE).unwrap();
        store.write_all_at(&bytes, slot).unwrap();
        let (addr, len) = (vm.addr(page), Bytes(PAGE));
        ops.push(Op { kind: OpKind::MapStore, addr, len, file_offset: slot, fd_index: 0 });
    }
    assert_eq!(vm.batch(1, ops.clone(), &[&readable]), (4, 0));
    vm.hold(false);
    assert_eq!(vm.maps(0, pages).parts().len(), before.parts().len() + 8);
    vm.hold(true);
    vm.protect(middle, 8);
    for op in &mut ops {
        *op = Op { kind: OpKind::MapHome, file_offset: 0, ..*op };
    }
    assert_eq!(vm.batch(2, ops, &[]), (4, 0));
    vm.uffd.unprotect(vm.addr(middle), Bytes(8 * PAGE), false).unwrap();
    vm.hold(false);
    assert_eq!(vm.maps(0, pages), before);
    assert!(child.0.try_wait().unwrap().is_none(), "QEMU runs");
}

fn read_pid(path: &Path) -> i32 {
    std::fs::read_to_string(path).unwrap().trim().parse().unwrap()
}
