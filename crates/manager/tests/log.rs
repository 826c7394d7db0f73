//! A log that cannot be written: what the manager is for goes on.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::process::{Child, Stdio};
use std::time::Duration;

use ballast_api::client::Client;
use support::evil::{self, Evil};
use support::{Ballastd, required, wait};

#[test]
#[ignore = "the VMM of the other test"]
fn evil_process() {
    evil::play();
}

/// Killed when dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A ballastd on the folders of `of`, with this as its standard error, that says much.
fn started(of: &Ballastd, stderr: OwnedFd) -> Running {
    let mut command = of.command();
    command.env("BALLAST_LOG", "debug").stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
    let mut running = Running(command.spawn().unwrap());
    wait("it listens", || {
        assert_eq!(running.0.try_wait().unwrap(), None, "it has ended");
        std::os::unix::net::UnixStream::connect(of.client.socket()).ok()
    });
    running
}

/// Every VM that is killed is let go of, and decisions go on.
async fn does_its_work(of: &Ballastd, mut running: Running) {
    for _ in 0..2 {
        let vmm = Evil::start(&of.run_dir().join("shim.sock"), "vm", "quiet", 16);
        of.eventually("it has part in decisions", async || of.client.why("vm").await.is_ok()).await;
        // A thread that panics when it logs does so within the next turns.
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            of.eventually("decisions go on", async || is_deciding(&of.client).await).await;
        }
        drop(vmm);
        of.eventually("it is let go of", async || of.is_gone("vm").await).await;
    }
    of.client.shutdown(true).await.unwrap();
    let ended = wait("its end", || running.0.try_wait().unwrap());
    assert!(ended.success(), "{ended}");
}

async fn is_deciding(client: &Client) -> bool {
    client.why("vm").await.is_ok_and(|why| why.age_s < 2.5)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_manager_whose_log_cannot_be_written_does_its_work() {
    if File::open("/dev/userfaultfd").is_err() {
        assert!(!required(), "no userfaultfd");
        return eprintln!("SKIPPED: no userfaultfd");
    }
    // Its reader leaves when it runs.
    let (read, write) = std::io::pipe().unwrap();
    let ballastd = Ballastd::prepare(&["--budget", "160M"]);
    let running = started(&ballastd, write.into());
    drop(read);
    does_its_work(&ballastd, running).await;
    // From the first line on.
    let full = File::options().write(true).open("/dev/full").unwrap();
    let ballastd = Ballastd::prepare(&["--budget", "160M"]);
    does_its_work(&ballastd, started(&ballastd, full.into())).await;
}
