//! VMs that come just when another goes that they count on: the former one of their name, or the manager.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use ballast_api::client::Client;
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

/// A start that takes long, until it is given up: meanwhile the manager is to leave, and does not yet.
fn slow_start(socket: &Path) -> Connection {
    let slow = Connection::connect(socket).unwrap();
    let ram = evil::memfd(MIB);
    slow.send(&Message::Hello(evil::hello("slow", MIB)), &[ram.as_fd()]).unwrap();
    assert!(matches!(slow.recv(Some(support::PATIENT)), Ok((Message::Welcome { .. }, _))));
    slow
}

/// Whether a manager starts nothing any more, for it is to leave.
async fn is_ending(client: &Client) -> bool {
    let spec = VmSpec {
        name: "none".into(),
        max: 64 * MIB,
        kernel: "/etc/hostname".into(),
        qemu: Some("/bin/false".into()),
        accel: Accel::Tcg,
        ..VmSpec::default()
    };
    client.run(&spec).await.is_err_and(|e| e.to_string().contains("is ending"))
}

/// Who would have come after is gone: nobody comes, and the VMs would stand still.
#[tokio::test(flavor = "multi_thread")]
async fn a_manager_that_was_to_leave_to_somebody_who_goes_away_stays() {
    let Some(ballastd) = ballastd() else { return };
    let (client, socket) = (&ballastd.client, ballastd.run_dir().join("shim.sock"));
    let vmm = Evil::start(&socket, "first", "quiet", 16);
    ballastd.eventually("it is known", async || client.vm("first").await.is_ok()).await;
    let pid = ballastd.pid();
    let slow = slow_start(&socket);
    let before_ms = ballast_qemu::process::since_boot().as_millis() as u64 + 3_600_000;
    let body = format!("{{\"leave_vms\":true,\"before_ms\":{before_ms}}}");
    let mut asks = UnixStream::connect(ballastd.run_dir().join("api.sock")).unwrap();
    let head = "POST /v1/shutdown HTTP/1.1\r\nhost: ballast\r\ncontent-type: application/json\r\n";
    write!(asks, "{head}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
    ballastd.eventually("it is to leave", async || is_ending(client).await).await;
    drop(asks);
    // Nobody is told when that is seen.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(is_ending(client).await, "nothing held it any more: this machine is too slow");
    drop(slow);
    ballastd.eventually("it stays", async || !is_ending(client).await).await;
    let host = ballastd.host().await;
    assert_eq!((host.pid, host.vms), (pid, 1));
    let next = Evil::start(&socket, "next", "quiet", 16);
    ballastd.eventually("it is known", async || client.vm("next").await.is_ok()).await;
    drop((vmm, next));
}

/// One that is started while a manager is being replaced is the next one's.
#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_comes_while_the_manager_is_being_replaced_is_taken_by_the_next_one() {
    let Some(mut ballastd) = ballastd() else { return };
    let socket = ballastd.run_dir().join("shim.sock");
    let slow = slow_start(&socket);
    let client = ballastd.client.clone();
    let late = tokio::spawn(async move {
        while !is_ending(&client).await {
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
