//! Against a real QEMU without a guest: start, talk, freeze, thaw, end.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod common;

use std::time::Duration;

use ballast_api::VmSpec;
use ballast_qemu::{
    AccelChoice, Exit, LaunchError, Monitor, ProcessHandle, QmpError, check_spec, command,
    last_log_line, process, spawn,
};
use ballast_units::Bytes;
use common::{Guestless, PATIENT, have_qemu, launch, paths, skip, start, stock_kernel};
use rustix::process::{Pid, Signal, getsid};
use serde_json::{Value, json};

const SIZE: Bytes = Bytes::from_mib(64);

/// A command without arguments, by its name.
async fn tell(monitor: &Monitor, command: &str) {
    monitor.qmp().execute(command, Value::Null, PATIENT).await.unwrap();
}

#[tokio::test]
async fn a_vm_starts_answers_and_quits() {
    if !have_qemu() {
        return;
    }
    let vm = start(|_| ()).await;
    let monitor = vm.monitor().await;
    let status = monitor.query_status().await.unwrap();
    assert_eq!((status.running, status.status.as_str()), (false, "prelaunch"));
    tell(&monitor, "cont").await;
    assert!(monitor.query_status().await.unwrap().running);
    tell(&monitor, "stop").await;
    assert_eq!(monitor.query_status().await.unwrap().status, "paused");
    tell(&monitor, "cont").await;

    // Nobody answers the balloon: what QEMU says it holds must stay nothing.
    assert!(monitor.has_balloon());
    monitor.enable_guest_stats(1).await.unwrap();
    monitor.balloon(Bytes::from_mib(32)).await.unwrap();
    assert_eq!(monitor.query_balloon().await.unwrap(), SIZE);
    assert_eq!(monitor.guest_stats().await.unwrap(), None);
    // It has no drive, and KVM or not, it says so.
    assert_eq!(monitor.disk_reads().await.unwrap(), ballast_qemu::DiskReads::default());
    monitor.has_kvm().await.unwrap();
    monitor.system_powerdown().await.unwrap();

    let memdevs = monitor.memdevs().await.unwrap();
    assert_eq!(memdevs.len(), 1);
    assert_eq!((memdevs[0].size, memdevs[0].share), (SIZE.0, Some(true)));
    let blocks = monitor.ram_blocks().await.unwrap();
    let ram = blocks.iter().find(|b| b.name == "mem").unwrap();
    assert_eq!((ram.page_size, ram.used), (Bytes(4096), SIZE));

    assert!(process::rss_anon(vm.vmm.pid).unwrap() > Bytes::ZERO);
    assert!(process::comm(vm.vmm.pid).unwrap().starts_with("qemu"));

    let mut events = monitor.qmp().events();
    tell(&monitor, "quit").await;
    assert_eq!(vm.vmm.process.exited().await, Exit::Code(0));
    let shutdown = events.recv().await.unwrap();
    assert_eq!(shutdown.name, "SHUTDOWN");
    assert_eq!(shutdown.reason.as_deref(), Some("host-qmp-quit"));
    let error = monitor.query_status().await.unwrap_err();
    assert!(matches!(error, QmpError::Closed { .. }), "{error}");
    assert_eq!(process::rss_anon(vm.vmm.pid), None);
}

#[tokio::test]
async fn refusals_carry_qemus_words_and_leave_the_connection() {
    if !have_qemu() {
        return;
    }
    let vm = start(|spec| spec.no_balloon = true).await;
    let monitor = vm.monitor().await;
    assert!(!monitor.has_balloon());
    let error = monitor.balloon(SIZE).await.unwrap_err();
    match &error {
        QmpError::Refused { class, command, .. } => {
            assert_eq!((class.as_str(), command.as_str()), ("DeviceNotActive", "balloon"));
        }
        other => panic!("{other}"),
    }
    assert!(monitor.guest_stats().await.unwrap().is_none());
    let unknown = monitor.qmp().execute("no-such-command", Value::Null, PATIENT).await;
    assert!(unknown.unwrap_err().to_string().contains("no-such-command"));
    assert!(monitor.query_status().await.is_ok());
}

#[tokio::test]
async fn a_balloon_of_any_id_is_found() {
    if !have_qemu() {
        return;
    }
    for device in ["virtio-balloon-pci,id=other", "virtio-balloon-pci"] {
        let vm = start(|spec| {
            spec.no_balloon = true;
            spec.extra.extend(["-device".into(), device.into()]);
        })
        .await;
        let monitor = vm.monitor().await;
        assert!(monitor.has_balloon(), "{device}");
        monitor.enable_guest_stats(2).await.unwrap();
    }
}

#[tokio::test]
async fn a_frozen_qemu_costs_the_deadline_and_no_more() {
    if !have_qemu() {
        return;
    }
    let vm = start(|_| ()).await;
    let qmp = vm.qmp().await;
    vm.vmm.process.signal(Signal::STOP).unwrap();
    let deadline = Duration::from_millis(200);
    // More than the window of commands at QEMU, and some that change it.
    for _ in 0..20 {
        let error = qmp.execute("query-status", Value::Null, deadline).await.unwrap_err();
        assert!(matches!(error, QmpError::Deadline { .. }), "{error}");
    }
    let second = ballast_qemu::Qmp::connect(&vm.qmp_socket, deadline).await.unwrap_err();
    assert!(matches!(second, QmpError::NoGreeting { .. }), "{second}");
    assert!(vm.vmm.process.is_alive());
    vm.vmm.process.signal(Signal::CONT).unwrap();
    let status = qmp.execute("query-status", Value::Null, PATIENT).await.unwrap();
    assert_eq!(status["status"], "prelaunch");
    // An answer goes to its own question, also after many that came late.
    let balloon = qmp.execute("query-balloon", Value::Null, PATIENT).await.unwrap();
    assert_eq!(balloon, json!({ "actual": SIZE.0 }));
    // And a frozen one can be killed.
    vm.vmm.process.signal(Signal::STOP).unwrap();
    vm.vmm.process.kill().unwrap();
    assert_eq!(vm.vmm.process.exited().await, Exit::Signal(9));
    assert!(!qmp.closed().await.is_empty());
}

#[tokio::test]
async fn a_death_is_noticed_by_its_parent_and_by_others() {
    if !have_qemu() {
        return;
    }
    let vm = start(|_| ()).await;
    let stranger = ProcessHandle::open(vm.vmm.pid).unwrap();
    assert!(stranger.is_alive() && vm.vmm.process.is_alive());
    assert_eq!(stranger.try_exit(), None);
    let waiting = tokio::spawn(async move { stranger.exited().await });
    vm.vmm.process.kill().unwrap();
    // Two handles race to reap; whoever comes first learns how it ended, both that it did.
    let exits = [vm.vmm.process.exited().await, waiting.await.unwrap()];
    assert!(exits.iter().all(|e| matches!(e, Exit::Signal(9) | Exit::Unknown)), "{exits:?}");
    assert!(!vm.vmm.process.is_alive());
    vm.vmm.process.kill().unwrap();
    let gone = ProcessHandle::open(vm.vmm.pid).unwrap_err();
    assert_eq!(gone.raw_os_error(), Some(rustix::io::Errno::SRCH.raw_os_error()));
    assert!(ProcessHandle::open(0).is_err() && ProcessHandle::open(u32::MAX).is_err());
}

#[tokio::test]
async fn a_vmm_is_reaped_though_nobody_waits_for_it() {
    if !have_qemu() {
        return;
    }
    let vm = start(|_| ()).await;
    let pid = vm.vmm.pid;
    let watcher = ProcessHandle::open(pid).unwrap();
    watcher.kill().unwrap();
    drop(vm);
    // A zombie still has its entry in /proc; only reaping removes it.
    tokio::time::timeout(PATIENT, async {
        while std::path::Path::new(&format!("/proc/{pid}")).exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_vmm_has_a_session_of_its_own() {
    if !have_qemu() {
        return;
    }
    let vm = start(|_| ()).await;
    let pid = Pid::from_raw(vm.vmm.pid as i32);
    assert_eq!(getsid(pid).unwrap(), pid.unwrap());
    let target = std::fs::read_link(format!("/proc/{}/fd/0", vm.vmm.pid)).unwrap();
    assert_eq!(target.to_str(), Some("/dev/null"));
    let cwd = std::fs::read_link(format!("/proc/{}/cwd", vm.vmm.pid)).unwrap();
    assert_eq!(cwd, vm.dir.path().canonicalize().unwrap());
}

#[tokio::test]
async fn a_qemu_that_refuses_its_arguments_is_quoted() {
    if !have_qemu() {
        return;
    }
    let vm = start(|spec| spec.extra = vec!["-no-such-option".into()]).await;
    let error = vm.vmm.connect_qmp(&vm.qmp_socket, PATIENT).await.unwrap_err();
    assert!(matches!(error, LaunchError::Ended { exit: Exit::Code(1), .. }), "{error}");
    assert!(error.to_string().contains("no-such-option"), "{error}");
    assert!(last_log_line(&vm.dir.path().join("qemu.log")).is_some());
}

#[tokio::test]
async fn a_program_or_log_that_cannot_be_used_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let mut no_program = launch(dir.path(), |_| ());
    no_program.program = "/nonexistent/qemu".into();
    let error = spawn(&no_program).await.unwrap_err().to_string();
    assert!(error.contains("/nonexistent/qemu"), "{error}");
    let mut no_log = launch(dir.path(), |_| ());
    no_log.log = "/nonexistent/log".into();
    let error = spawn(&no_log).await.unwrap_err().to_string();
    assert!(error.contains("/nonexistent/log"), "{error}");
}

#[tokio::test]
async fn a_guest_that_panics_ends_its_vmm() {
    if !have_qemu() {
        return;
    }
    let Some(kernel) = stock_kernel() else {
        return skip("no kernel in BALLAST_TEST_KERNEL or /boot");
    };
    let dir = tempfile::tempdir().unwrap();
    // Without a root file system the kernel panics as soon as it has booted.
    let spec = VmSpec {
        name: "panicking".into(),
        max: 128 << 20,
        kernel,
        append: "root=none".into(),
        extra: vec!["-S".into()],
        ..VmSpec::default()
    };
    check_spec(&spec).unwrap();
    let paths = paths(dir.path());
    let mut launch = command(&spec, &AccelChoice::Tcg { why: "test".into() }, &paths);
    // Without the shim.
    launch.env.clear();
    let vm =
        Guestless { vmm: spawn(&launch).await.unwrap(), qmp_socket: paths.qmp_socket.clone(), dir };
    let monitor = vm.monitor().await;
    let mut events = monitor.qmp().events();
    tell(&monitor, "cont").await;
    let exit = tokio::time::timeout(2 * PATIENT, vm.vmm.process.exited()).await.unwrap();
    assert_eq!(exit, Exit::Code(0), "{:?}", last_log_line(&paths.qemu_log));
    let console = std::fs::read_to_string(&paths.console).unwrap();
    assert!(console.contains("Linux version") && console.contains("Kernel panic"), "{console}");
    let mut reason = None;
    while let Ok(event) = events.recv().await {
        if event.name == "SHUTDOWN" {
            reason = event.reason;
            break;
        }
    }
    assert_eq!(reason.as_deref(), Some("guest-reset"));
}
