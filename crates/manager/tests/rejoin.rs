//! A shim's conversation with its manager breaks off, and both live: the same manager takes it in again, and nothing is
//! lost meanwhile.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use std::fs::File;
use std::os::fd::AsFd;

use ballast_shim_proto::{Hello, Message};
use support::evil::{self, Evil, hello, memfd, say};
use support::{Ballastd, MIB, required};

/// MiB of the VM.
const SIZE: u64 = 8;

#[test]
#[ignore = "the VMM of the other tests"]
fn evil_process() {
    evil::play();
}

fn ballastd(config: &str) -> Option<Ballastd> {
    if File::open("/dev/userfaultfd").is_err() {
        assert!(!required(), "no userfaultfd");
        eprintln!("SKIPPED: no userfaultfd");
        return None;
    }
    Some(Ballastd::start_configured(&["--budget", "96M"], config))
}

/// How often a shim has come again.
fn came_again(ballastd: &Ballastd) -> usize {
    let log = std::fs::read_to_string(ballastd.log()).unwrap();
    assert!(!log.contains("panicked"), "{log}");
    log.lines().filter(|line| line.contains("its shim has come again")).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn conversations_that_break_off_in_the_midst_of_sharing_are_taken_up_again() {
    let config = "[sharing]\ncpu_percent = 100.0\nscan_time_s = 0.1\nrehome_after_ms = 50\n";
    let Some(ballastd) = ballastd(config) else { return };
    let socket = ballastd.run_dir().join("shim.sock");
    let mut vmm = Evil::under_shim(&socket, "vm", "breaks off", SIZE);
    ballastd.is_paged("vm").await;
    // One that breaks off before it is let in again is another try.
    ballastd
        .eventually("it has come again", async || came_again(&ballastd) >= evil::BREAKS / 2)
        .await;
    let breaks = async || ballastd.vm("vm").await.sharing.breaks;
    let before = breaks().await;
    // What is shared now breaks once. More has been shared since, then.
    let pages = SIZE * MIB / 4096;
    ballastd.eventually("its pages are shared on", async || breaks().await > before + pages).await;
    assert_eq!(vmm.child.try_wait().unwrap(), None, "it has found a page that is not what it was");
    ballastd.assert_books_balance().await;
    drop(vmm);
    ballastd.eventually("it is gone", async || ballastd.is_gone("vm").await).await;
    ballastd.assert_nothing_left("vm");
    ballastd.assert_books_balance().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_process_of_the_vm_comes_again_and_only_with_its_ram() {
    // It answers no batches.
    let Some(mut ballastd) = ballastd("[sharing]\nenabled = false\n") else { return };
    let socket = ballastd.run_dir().join("shim.sock");
    let vmm = Evil::start(&socket, "vm", "moves", SIZE);
    ballastd.eventually("it has come again", async || came_again(&ballastd) == 1).await;
    let log = std::fs::read_to_string(ballastd.log()).unwrap();
    for why in ["its RAM is not where it was", "its RAM file is another than before"] {
        assert!(log.contains(why), "{why}: {log}");
    }
    let thief = Hello { reconnect: true, ..hello("vm", SIZE * MIB) };
    let ram = memfd(SIZE * MIB);
    let why = say(&socket, &Message::Hello(thief), &[ram.as_fd(), ram.as_fd()]).unwrap();
    let (own, other) = (vmm.child.id(), std::process::id());
    assert_eq!(why, format!("'vm' is process {own}, not {other}"));
    ballastd.is_paged("vm").await;
    assert_eq!(came_again(&ballastd), 1);
    // The next manager has it as any other.
    ballastd.kill();
    ballastd.restart();
    ballastd.is_paged("vm").await;
    assert_eq!(came_again(&ballastd), 1);
    drop(vmm);
    ballastd.eventually("it is gone", async || ballastd.is_gone("vm").await).await;
    ballastd.assert_nothing_left("vm");
}
