//! A new ballastd takes over from one that runs: guests go on, and what is not understood is left alone.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use ballast_api::{Mode, RebootAction, RunState};
use ballast_qemu::process;
use ballast_units::Pages;
use support::{Ballastd, Small, fill, image_or_skip, signal};

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

/// What it finds there was written by the one before: it has nothing to write.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_run_folder_keeps_no_guest_from_the_next_manager() {
    let Some(image) = image_or_skip() else { return };
    let mut ballastd = Ballastd::prepare(&["--budget", "96M"]);
    let Some(small) = Small::mount(ballastd.run_dir(), 48) else { return };
    ballastd.restart();
    let work = "verify-torture --mb 32 --threads 2 --seconds 100000";
    let mut spec = ballastd.guest(image, "vm", 128, work);
    spec.no_balloon = true;
    ballastd.client.run(&spec).await.unwrap();
    let mut console = ballastd.console("vm");
    ballastd.checks_go_on(&mut console, 1000).await;
    let vmm = ballastd.vm("vm").await.pid;
    for handover in [false, true] {
        if handover {
            fill(&small.0);
            assert!(ballastd.take_over().success());
        } else {
            ballastd.kill();
            fill(&small.0);
            ballastd.restart();
        }
        is_paged(&ballastd, "vm").await;
        assert_eq!(ballastd.vm("vm").await.pid, vmm);
        // Where nothing can be compressed or shared any more, it goes on all the same.
        ballastd.checks_go_on(&mut console, 1000).await;
    }
    ballastd.client.shutdown(true).await.unwrap();
    assert!(ballastd.end().success());
}

/// Or all that an idle guest has would be taken for active, and its balloon let down.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_measured_of_a_vm_is_handed_on() {
    let Some(image) = image_or_skip() else { return };
    let sampling = "[sampling]\nperiod_s = 2\n";
    let mut ballastd = Ballastd::start_configured(&["--budget", "256M"], sampling);
    ballastd.client.run(&ballastd.guest(image, "idle", 128, "")).await.unwrap();
    let seen = async |least: u64| {
        let seen = async || ballastd.vm("idle").await.active.periods >= least;
        ballastd.eventually("it is sampled", seen).await;
        ballastd.vm("idle").await.active
    };
    let before = seen(6).await;
    assert!(before.estimate < 128 << 20, "{before:?}");
    assert!(ballastd.take_over().success());
    is_paged(&ballastd, "idle").await;
    // Six more periods take longer than that.
    let after = ballastd.vm("idle").await.active;
    assert!(after.periods >= before.periods && after.estimate < 128 << 20, "{after:?}");
    ballastd.client.shutdown(true).await.unwrap();
    assert!(ballastd.end().success());
}

/// It has ended, and is held back before it is started again: the next manager has it all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_reboots_comes_through_a_handover() {
    let Some(image) = image_or_skip() else { return };
    let mut ballastd = Ballastd::start(&["--budget", "256M"]);
    let mut spec = ballastd.guest(image, "again", 96, "");
    // Each of its lives lasts for longer than a handover does.
    spec.append += " rootdelay=5 rdinit=/nonexistent init=/nonexistent root=/dev/none";
    spec.on_reboot = RebootAction::Restart;
    let first = ballastd.client.run(&spec).await.unwrap();
    ballastd.eventually("it reboots", async || ballastd.client.vm("again").await.is_err()).await;
    let old = ballastd.pid();
    assert!(ballastd.take_over().success());
    assert_ne!(ballastd.host().await.pid, old);
    is_paged(&ballastd, "again").await;
    assert_ne!(ballastd.vm("again").await.pid, first.pid);
    ballastd.client.shutdown(true).await.unwrap();
    assert!(ballastd.end().success());
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

/// Of a file with pages.
fn header(magic: &[u8], version: u32) -> Vec<u8> {
    let mut bytes = vec![0; 8192];
    bytes[..8].copy_from_slice(magic);
    bytes[8..12].copy_from_slice(&version.to_le_bytes());
    bytes
}

/// Of a VM with this VMM, with `more` at its end.
fn record(name: &str, vmm: u32, more: &str) -> String {
    let started = ballast_api::record::process_started(vmm).unwrap().unwrap();
    format!(
        "{{\"version\":1,\"name\":\"{name}\",\"spec\":null,\"params\":{{\"shares\":1,\"min\":0,\
         \"max\":1024,\"tax\":null}},\"size\":1024,\"overhead\":1,\"pid\":{vmm},\
         \"pid_started\":{started},\"accel\":\"tcg\"{more}}}"
    )
}

/// Whatever a newer manager left, this one says so in one line, and not a byte of it changes.
#[tokio::test(flavor = "multi_thread")]
async fn state_of_a_newer_manager_is_refused_untouched() {
    let ballastd = Ballastd::prepare(&["--budget", "64M"]);
    let folder = ballastd.folder("vm");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::create_dir_all(ballastd.run_dir().join("store")).unwrap();
    // A VM that is alive: this process.
    let record = record("vm", std::process::id(), ",\"more\":0");
    let good = [
        (ballastd.run_dir().join("format"), b"ballast run folder 1\n".to_vec()),
        (folder.join("vm.json"), record.into_bytes()),
        (folder.join("pmap"), header(b"BLSTPMAP", 2)),
        (folder.join("stage"), header(b"BLSTSTAG", 1)),
        (ballastd.run_dir().join("store/key"), vec![7; 32]),
        (ballastd.run_dir().join("store/vm-vm.pages"), vec![1; 4096]),
    ];
    let newer: [(usize, Vec<u8>, &str); 5] = [
        (0, b"ballast run folder 2\n".to_vec(), "newer manager (version 2"),
        (0, b"something else\n".to_vec(), "format"),
        (1, b"{\"version\":99,\"what\":\"nobody knows\"}".to_vec(), "newer manager (version 99"),
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

/// Of a VM: its name, what is said of it, and its pmap and stage.
type Files = (&'static str, Option<&'static str>, Option<Vec<u8>>, Option<Vec<u8>>);

/// Ended when dropped.
struct Sleeper(Child);

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a manager that died leaves of a VM. Its VMM, which lives.
fn left_behind(
    folder: &Path,
    name: &str,
    pmap: &Option<Vec<u8>>,
    stage: &Option<Vec<u8>>,
) -> Sleeper {
    // Whoever reads what this test says does not wait for it.
    let mut sleep = Command::new("sleep");
    let vmm = sleep.arg("1000").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let vmm = Sleeper(vmm);
    std::fs::create_dir_all(folder).unwrap();
    // More than a pager takes, but for one.
    let overhead = if name == "empty" { "\"overhead\":1," } else { "\"overhead\":1024," };
    let record = record(name, vmm.0.id(), "").replace("\"overhead\":1,", overhead);
    std::fs::write(folder.join("vm.json"), record).unwrap();
    for (file, bytes) in [("pmap", pmap), ("stage", stage)] {
        if let Some(bytes) = bytes {
            std::fs::write(folder.join(file), bytes).unwrap();
        }
    }
    vmm
}

/// A VM whose files are damaged waits, alone and as it is; one whose start was cut short has no damage.
#[tokio::test(flavor = "multi_thread")]
async fn damage_of_one_vm_keeps_the_manager_from_nothing_else() {
    let mut ballastd = Ballastd::prepare(&["--budget", "64M"]);
    let (pmap, stage) = (header(b"BLSTPMAP", 2), header(b"BLSTSTAG", 1));
    let nothing = || Some(vec![0; 8192]);
    let all: [Files; 6] = [
        ("bad-pmap", Some("pmap"), Some(header(b"nonsense", 2)), Some(stage.clone())),
        ("no-words", Some("pmap"), nothing(), Some(stage.clone())),
        ("bad-stage", Some("stage"), Some(pmap.clone()), Some(header(b"nonsense", 1))),
        ("empty", None, Some(Vec::new()), None),
        ("not-begun", None, nothing(), None),
        ("half-begun", None, Some(pmap), nothing()),
    ];
    let left =
        |(name, _, pmap, stage): &Files| left_behind(&ballastd.folder(name), name, pmap, stage);
    let vmms: Vec<Sleeper> = all.iter().map(left).collect();
    // Until it sleeps, what it has grows.
    let sleeps =
        |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") S ");
    ballastd.eventually("they sleep", async || vmms.iter().all(|vmm| sleeps(vmm.0.id()))).await;
    ballastd.restart();
    let listed = ballastd.client.vms().await.unwrap();
    for (name, said, pmap, stage) in &all {
        let view = listed.iter().find(|view| view.name == *name);
        let view = view.unwrap();
        let Some(said) = said else {
            let reason = view.management.reason.as_deref().unwrap_or_default();
            assert!(view.trouble.is_none() && reason.contains("waits for its shim"), "{view:?}");
            continue;
        };
        assert!(view.trouble.as_ref().is_some_and(|why| why.contains(said)), "{view:?}");
        assert_eq!(view.management, ballastd.vm(name).await.management);
        for (file, bytes) in [("pmap", pmap), ("stage", stage)] {
            let now = std::fs::read(ballastd.folder(name).join(file)).ok();
            assert!(now == *bytes, "{name}: {file} was changed");
        }
    }
    // What words tell is booked for each; where there are none that can be read, what its VMM has.
    let unread = process::rss(vmms[0].0.id()).unwrap().pages_ceil().min(Pages(1024)).bytes().0;
    assert!(unread > 0);
    let booked = (64 - 2) * support::MIB - ballastd.host().await.free;
    // Of the one whose record says less than what this manager's pager takes, that.
    let least = booked - unread - 5 * 1024 * 4096;
    assert!((support::MIB..4 * support::MIB).contains(&least), "{booked} for {unread} and {least}");
    drop(vmms);
    ballastd
        .eventually("nothing is booked for them", async || {
            ballastd.host().await.free == (64 - 2) * support::MIB
        })
        .await;
    for (name, ..) in &all {
        ballastd.eventually("its name is free", async || ballastd.is_gone(name).await).await;
        ballastd.assert_nothing_left(name);
    }
    assert!(ballastd.term().success());
    assert!(!ballastd.run_dir().exists());
}
