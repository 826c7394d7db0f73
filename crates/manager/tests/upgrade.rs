//! A new ballastd takes over from one that runs: guests go on, and what is not understood is left alone.
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic here is the test failing

mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Output;

use ballast_api::{Mode, RunState};
use support::{Ballastd, image_or_skip, signal};

/// Every file under a folder, with its bytes. The lock is whoever's that tries it; a socket has none.
fn bytes_of(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    ballast_lab::leftovers::files(folder)
        .into_iter()
        .filter(|path| path.file_name().is_some_and(|name| name != "lock"))
        .map(|path| (path.clone(), std::fs::read(&path).unwrap_or_default()))
        .collect()
}

#[track_caller]
fn refused(output: &Output, part: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = said.lines().filter(|line| line.starts_with("ballastd: ")).collect();
    assert!(!output.status.success() && lines.len() == 1 && lines[0].contains(part), "{said}");
}

async fn is_paged(ballastd: &Ballastd, vm: &str) {
    ballastd
        .eventually("it is paged again", async || match ballastd.client.vm(vm).await {
            Ok(vm) => vm.state == RunState::Running && vm.management.mode == Mode::Paged,
            Err(_) => false,
        })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_manager_takes_over_from_a_running_one_and_guests_go_on() {
    let Some(image) = image_or_skip() else { return };
    // More than it may have: there is always something on its way out or in.
    let mut ballastd = Ballastd::start(&["--budget", "96M"]);
    let work = "verify-torture --mb 64 --threads 2 --seconds 100000";
    let mut spec = ballastd.guest(image, "vm", 128, work);
    spec.no_balloon = true;
    ballastd.client.run(&spec).await.unwrap();
    let mut console = ballastd.console("vm");
    ballastd.checks_go_on(&mut console, 1000).await;
    let vmm = ballastd.vm("vm").await.pid;
    for _ in 0..3 {
        let old = ballastd.pid();
        assert!(ballastd.take_over().success(), "the old one ends well");
        assert_ne!(ballastd.host().await.pid, old);
        is_paged(&ballastd, "vm").await;
        assert_eq!(ballastd.vm("vm").await.pid, vmm);
        ballastd.checks_go_on(&mut console, 2000).await;
    }
    // One that cannot answer in time is not taken over from, and goes on as if nothing had been.
    let old = ballastd.pid();
    signal(old, rustix::process::Signal::STOP);
    let mut hasty = ballastd.command();
    let output = hasty.args(["--take-over", "--take-over-within", "0.2"]).output();
    signal(old, rustix::process::Signal::CONT);
    refused(&output.unwrap(), "not taken over from");
    ballastd.checks_go_on(&mut console, 2000).await;
    assert_eq!(ballastd.host().await.pid, old);
    // A plain second one does not take over.
    refused(&ballastd.command().output().unwrap(), "--take-over");

    // Nor is it asked to leave where the next one would not know what to do.
    let format = ballastd.run_dir().join("format");
    let ours = std::fs::read(&format).unwrap();
    std::fs::write(&format, "ballast run folder 99\n").unwrap();
    refused(&ballastd.command().arg("--take-over").output().unwrap(), "newer manager (version 99");
    std::fs::write(&format, ours).unwrap();
    ballastd.checks_go_on(&mut console, 2000).await;
    assert_eq!(ballastd.host().await.pid, old);
    ballastd.assert_books_balance().await;
    ballastd.client.shutdown(true).await.unwrap();
    assert!(ballastd.end().success());
    assert!(!ballastd.run_dir().exists() && !ballastd.swap_dir().exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn taking_over_where_nobody_runs_is_a_start() {
    let mut ballastd = Ballastd::prepare(&["--budget", "64M"]);
    ballastd.add_flag("--take-over");
    ballastd.restart();
    assert_eq!(ballastd.host().await.vms, 0);
    assert!(ballastd.term().success());
    assert!(!ballastd.run_dir().exists());
}

/// Whatever a newer manager left, this one says so in one line, and not a byte of it changes.
#[tokio::test(flavor = "multi_thread")]
async fn state_of_a_newer_manager_is_refused_untouched() {
    let ballastd = Ballastd::prepare(&["--budget", "64M"]);
    let folder = ballastd.folder("vm");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::create_dir_all(ballastd.run_dir().join("store")).unwrap();
    // A VM that is alive: this process.
    let me = std::process::id();
    let started = ballast_api::record::process_started(me).unwrap();
    let record = format!(
        "{{\"version\":1,\"name\":\"vm\",\"spec\":null,\"params\":{{\"shares\":1,\"min\":0,\
         \"max\":1024,\"tax\":null}},\"size\":1024,\"overhead\":1,\"pid\":{me},\
         \"pid_started\":{started},\"accel\":\"tcg\",\"more\":0}}"
    );
    let header = |magic: &[u8], version: u32| {
        let mut bytes = vec![0; 8192];
        bytes[..8].copy_from_slice(magic);
        bytes[8..12].copy_from_slice(&version.to_le_bytes());
        bytes
    };
    let good = [
        (ballastd.run_dir().join("format"), b"ballast run folder 1\n".to_vec()),
        (folder.join("vm.json"), record.into_bytes()),
        (folder.join("pmap"), header(b"BLSTPMAP", 2)),
        (folder.join("stage"), header(b"BLSTSTAG", 1)),
        (ballastd.run_dir().join("store/key"), vec![7; 32]),
        (ballastd.run_dir().join("store/vm-vm.pages"), vec![1; 4096]),
    ];
    let newer: [(usize, Vec<u8>, &str); 6] = [
        (0, b"ballast run folder 2\n".to_vec(), "newer manager (version 2"),
        (0, b"something else\n".to_vec(), "format"),
        (1, b"{\"version\":99,\"what\":\"nobody knows\"}".to_vec(), "newer manager (version 99"),
        (1, b"{\"version\":1".to_vec(), "vm.json"),
        (2, header(b"BLSTPMAP", 1000), "pmap"),
        (3, header(b"BLSTSTAG", 1000), "stage"),
    ];
    for (which, bytes, part) in newer {
        for (path, content) in &good {
            std::fs::write(path, content).unwrap();
        }
        std::fs::write(&good[which].0, &bytes).unwrap();
        let before = bytes_of(&ballastd.run_dir());
        assert_eq!(before.len(), good.len());
        for more in [&[][..], &["--take-over"]] {
            refused(&ballastd.command().args(more).output().unwrap(), part);
            assert!(bytes_of(&ballastd.run_dir()) == before, "{part}: something was changed");
        }
    }
}
