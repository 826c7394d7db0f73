//! VMs that come just when another goes that they count on: the former one of their name, or the manager.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use std::fs::File;
use std::os::fd::AsFd;
use std::time::Duration;

use ballast_api::{Accel, VmSpec};
use ballast_shim_proto::{Connection, Message};
use support::evil::{self, Evil};
use support::{Ballastd, MIB, required, signal};

#[test]
#[ignore = "the VMM of the other tests"]
fn evil_process() {
    evil::play();
}

/// Without sharing: it answers no batches.
fn ballastd() -> Option<Ballastd> {
    if File::open("/dev/userfaultfd").is_err() {
        assert!(!required(), "no userfaultfd");
        eprintln!("SKIPPED: no userfaultfd");
        return None;
    }
    Some(Ballastd::start_configured(&["--budget", "160M"], "[sharing]\nenabled = false\n"))
}

/// As a guest that libvirt restarts: what its former VMM had takes a while to give back.
#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_is_started_anew_at_once_is_not_refused_for_its_predecessor() {
    let Some(ballastd) = ballastd() else { return };
    let socket = ballastd.run_dir().join("shim.sock");
    let mut vmm = Evil::start(&socket, "vm", "quiet", 64);
    for _ in 0..3 {
        // The end of the one and the first words of the next are seen in one moment.
        signal(ballastd.pid(), rustix::process::Signal::STOP);
        vmm.child.kill().unwrap();
        vmm.child.wait().unwrap();
        vmm = Evil::begin(&socket, "vm", "quiet", 64);
        tokio::task::block_in_place(|| vmm.says("asked"));
        signal(ballastd.pid(), rustix::process::Signal::CONT);
        // Refused, it would not come so far.
        tokio::task::block_in_place(|| vmm.says("filled"));
        let pid = Some(vmm.child.id());
        ballastd
            .eventually("it is the VM", async || {
                ballastd.client.vm("vm").await.is_ok_and(|vm| vm.pid == pid)
            })
            .await;
        assert!(ballastd.host().await.refused.is_empty());
    }
    ballastd.assert_books_balance().await;
}

/// One that is started while a manager is being replaced is the next one's.
#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_comes_while_the_manager_is_being_replaced_is_taken_by_the_next_one() {
    let Some(mut ballastd) = ballastd() else { return };
    let socket = ballastd.run_dir().join("shim.sock");
    // One whose start takes long, until it is given up: meanwhile the manager is to leave, and does not yet.
    let slow = Connection::connect(&socket).unwrap();
    let ram = evil::memfd(MIB);
    slow.send(&Message::Hello(evil::hello("slow", MIB)), &[ram.as_fd()]).unwrap();
    assert!(matches!(slow.recv(Some(support::PATIENT)), Ok((Message::Welcome { .. }, _))));
    let client = ballastd.client.clone();
    let late = tokio::spawn(async move {
        let spec = VmSpec {
            name: "none".into(),
            max: 64 * MIB,
            kernel: "/etc/hostname".into(),
            ..VmSpec::default()
        };
        let spec = VmSpec { qemu: Some("/bin/false".into()), accel: Accel::Tcg, ..spec };
        while !client.run(&spec).await.is_err_and(|e| e.to_string().contains("is ending")) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let start = move || Evil::under_shim(&socket, "vm", "breaks off", 16);
        tokio::task::spawn_blocking(start).await.unwrap()
    });
    let (mut ballastd, old) = tokio::task::spawn_blocking(move || {
        let old = ballastd.take_over();
        (ballastd, old)
    })
    .await
    .unwrap();
    assert!(old.success());
    let vmm = late.await.unwrap();
    let host = ballastd.host().await;
    assert!(host.refused.is_empty(), "{:?}", host.refused);
    assert_eq!(ballastd.vm("vm").await.pid, Some(vmm.child.id()));
    drop((vmm, slow));
    ballastd.eventually("it is gone", async || ballastd.is_gone("vm").await).await;
    assert!(ballastd.term().success());
}
