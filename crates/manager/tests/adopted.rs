//! VMs that somebody else started with the shim, and whose QMP nobody told of.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use ballast_api::client::ClientError;
use ballast_api::{
    Accel, ErrorCode, Mode, PoolChange, RebootAction, RunState, VmChange, VmSpec, VmView,
};
use ballast_lab::image::Image;
use ballast_shim_proto::Message;
use rustix::fs::MemfdFlags;
use support::evil::{self, Evil};
use support::http::raw;
use support::{Ballastd, MIB, ZEROS, image_or_skip, refused_as, required};
use tokio::task::JoinHandle;

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

async fn adopted(ballastd: &Ballastd, role: &str, mib: u64) -> Evil {
    let vmm = Evil::start(&ballastd.run_dir().join("shim.sock"), "vm", role, mib);
    ballastd.eventually("it is known", async || ballastd.client.vm("vm").await.is_ok()).await;
    vmm
}

/// The RAM of a VMM, open in this process too.
fn its_ram(vmm: &Evil) -> File {
    let fds = std::fs::read_dir(format!("/proc/{}/fd", vmm.child.id())).unwrap();
    let mut paths = fds.flatten().map(|entry| entry.path());
    let is_ram = |path: &std::path::Path| {
        std::fs::read_link(path).is_ok_and(|to| to.to_string_lossy().starts_with("/memfd:ram"))
    };
    File::open(paths.find(|path| is_ram(path)).unwrap()).unwrap()
}

fn reason(vm: &VmView) -> &str {
    vm.management.reason.as_deref().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn without_qmp_too_a_vm_is_paged_when_it_is_built_and_looked_at_again() {
    let Some(mut ballastd) = ballastd() else { return };
    let begun = Instant::now();
    let vmm = adopted(&ballastd, "quiet", 32).await;
    let first = ballastd.vm("vm").await;
    assert!(reason(&first).contains("not inspected yet"), "{first:?}");
    // Above what it is entitled to from now on.
    let limit = VmChange { max: Some(16 * MIB), ..VmChange::default() };
    ballastd.client.change("vm", &limit).await.unwrap();
    loop {
        let vm = ballastd.vm("vm").await;
        if begun.elapsed() >= Duration::from_secs(6) {
            break;
        }
        assert!(vm.management.mode != Mode::Paged && vm.memory.resident == 32 * MIB, "{vm:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    ballastd.is_paged("vm").await;
    ballastd
        .eventually("it is evicted from", async || {
            ballastd.vm("vm").await.memory.consumed <= 16 * MIB
        })
        .await;

    // It was built long ago when the next manager comes, which finds no QMP either. A slow machine may need as long
    // as a new one waits, but not again and again.
    let mut is_at_once = false;
    for _ in 0..5 {
        ballastd.kill();
        ballastd.restart();
        let back = Instant::now();
        ballastd.is_paged("vm").await;
        is_at_once |= back.elapsed() < Duration::from_secs(10);
        if is_at_once {
            break;
        }
    }
    assert!(is_at_once, "it waited as a new one does");
    let open = its_ram(&vmm);
    ballastd
        .eventually("what forbids paging is seen", async || {
            reason(&ballastd.vm("vm").await).contains("holds its RAM file open")
        })
        .await;
    drop(open);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_qmp_a_stop_is_sigterm_and_has_its_grace() {
    let Some(ballastd) = ballastd() else { return };
    use std::os::unix::process::ExitStatusExt;
    for (role, grace, signal) in [("quiet", 100.0, libc::SIGTERM), ("stubborn", 2.5, libc::SIGKILL)]
    {
        let mut vmm = adopted(&ballastd, role, 32).await;
        let begun = Instant::now();
        let last = ballastd.client.stop("vm", Duration::from_secs_f64(grace)).await.unwrap();
        assert_eq!(last.state, RunState::Stopped);
        assert_eq!(vmm.child.wait().unwrap().signal(), Some(signal));
        if signal == libc::SIGTERM {
            assert_eq!(last.ended, None);
            assert!(begun.elapsed() < Duration::from_secs(60));
        } else {
            let how = last.ended.unwrap();
            assert!(how.contains("killed") && how.contains("within 2.5 s"), "{how}");
            assert!(begun.elapsed().as_secs_f64() >= grace);
        }
        ballastd.assert_nothing_left("vm");
    }
}

/// A start that waits for as long as it takes for memory that it is promised; its program would end at once.
fn patient(ballastd: &Ballastd, name: &str, min: u64) -> JoinHandle<Result<VmView, ClientError>> {
    let spec = VmSpec {
        name: name.into(),
        max: min.max(96) * MIB,
        min: min * MIB,
        kernel: "/etc/hostname".into(),
        qemu: Some("/bin/false".into()),
        accel: Accel::Tcg,
        wait_s: Some(3000.0),
        ..VmSpec::default()
    };
    let client = ballastd.client.clone();
    tokio::spawn(async move { client.run(&spec).await })
}

async fn waits(ballastd: &Ballastd, name: &str) {
    ballastd
        .eventually(&format!("{name} waits"), async || {
            ballastd.client.starts().await.unwrap().iter().any(|start| start.name == name)
        })
        .await;
}

/// A start that waits for memory which does not come is called off by a stop, and holds up none behind it.
#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_waits_is_called_off_by_a_stop() {
    let Some(ballastd) = ballastd() else { return };
    let client = &ballastd.client;
    let vmm = adopted(&ballastd, "quiet", 96).await;
    // From now on nothing is taken from it: who waits for that waits for ever.
    let _open = its_ram(&vmm);
    let free = ballastd.host().await.free;
    let first = patient(&ballastd, "first", 96);
    waits(&ballastd, "first").await;
    let second = patient(&ballastd, "second", 16);
    waits(&ballastd, "second").await;
    let last = client.stop("first", Duration::ZERO).await.unwrap();
    let how = last.ended.unwrap_or_default();
    assert!(how.contains("called off") && last.pid.is_none(), "{how}");
    assert_eq!((last.state, last.params.min), (RunState::Stopped, 96 * MIB));
    refused_as(first.await.unwrap(), ErrorCode::Conflict, "called off");
    assert!(ballastd.is_gone("first").await);
    // It had its turn: what ended it is the program that it was to run.
    refused_as(second.await.unwrap(), ErrorCode::Internal, "second: QEMU");
    refused_as(client.stop("first", Duration::ZERO).await, ErrorCode::NotFound, "first");
    assert!(client.starts().await.unwrap().is_empty());
    assert!(ballastd.host().await.free.abs_diff(free) <= MIB);
}

/// A guest that reboots at once, over and over, is between two of its lives; its next start waits for as long as it takes, though
/// its first would not have.
async fn reboots(ballastd: &Ballastd, image: &Image, with: VmSpec) {
    let mut spec = ballastd.guest(image, "again", 96, "");
    (spec.min, spec.pool) = (with.min, with.pool);
    spec.append += " rdinit=/nonexistent init=/nonexistent root=/dev/none";
    spec.on_reboot = RebootAction::Restart;
    spec.wait_s = Some(0.0);
    ballastd.client.run(&spec).await.unwrap();
    ballastd.eventually("it reboots", async || ballastd.client.vm("again").await.is_err()).await;
}

/// What it had is not given to one that waits, and never ran.
#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_reboots_comes_before_starts_that_wait() {
    let Some(ballastd) = ballastd() else { return };
    let Some(image) = image_or_skip() else { return };
    let client = &ballastd.client;
    // On a slow machine it may be back before anybody waits for what it had, which says nothing.
    for _ in 0..5 {
        reboots(&ballastd, image, VmSpec::default()).await;
        // Nothing is taken from it, so that who is promised 128 MiB waits for ever. It comes while the other is held back: ten
        // seconds later it would count as one that cannot be managed, with all that it has.
        let vmm = adopted(&ballastd, "quiet", 48).await;
        let _open = its_ram(&vmm);
        let first = patient(&ballastd, "first", 128);
        waits(&ballastd, "first").await;
        let was_away = client.vm("again").await.is_err();
        if was_away {
            ballastd.eventually("it is back", async || client.vm("again").await.is_ok()).await;
            assert_eq!(client.starts().await.unwrap()[0].name, "first");
        }
        client.stop("again", Duration::ZERO).await.unwrap();
        client.stop("first", Duration::ZERO).await.unwrap();
        refused_as(first.await.unwrap(), ErrorCode::Conflict, "called off");
        if was_away {
            return;
        }
        drop(vmm);
        ballastd.eventually("it is gone", async || ballastd.is_gone("vm").await).await;
    }
    panic!("it was back each time before the other waited");
}

/// Its next start waits for room that another's memory takes, for ever: a stop calls it off.
#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_reboots_while_starts_wait_is_stopped_for_good() {
    let Some(ballastd) = ballastd() else { return };
    let Some(image) = image_or_skip() else { return };
    let client = &ballastd.client;
    reboots(&ballastd, image, VmSpec { min: 80 * MIB, ..VmSpec::default() }).await;
    // As above: who is promised 80 MiB waits for ever.
    let vmm = adopted(&ballastd, "quiet", 96).await;
    let _open = its_ram(&vmm);
    waits(&ballastd, "again").await;
    assert_eq!(client.starts().await.unwrap()[0].wait_s, None);
    let last = client.stop("again", Duration::ZERO).await.unwrap();
    let how = last.ended.unwrap_or_default();
    assert!(last.state == RunState::Stopped && how.contains("not started again"), "{how}");
    assert!(ballastd.is_gone("again").await && client.starts().await.unwrap().is_empty());
}

/// Between two of its lives a VM has its name, its promise, and its pool, as in them.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_vm_has_is_kept_while_it_reboots() {
    let Some(mut ballastd) = ballastd() else { return };
    let Some(image) = image_or_skip() else { return };
    let client = ballastd.client.clone();
    client.change_pool("own", &PoolChange::default()).await.unwrap();
    let spec = VmSpec { min: 64 * MIB, pool: Some("own".into()), ..VmSpec::default() };
    reboots(&ballastd, image, spec).await;
    let namesake = patient(&ballastd, "again", 16).await.unwrap();
    refused_as(namesake, ErrorCode::Conflict, "'again'");
    let greedy = patient(&ballastd, "greedy", 96).await.unwrap();
    refused_as(greedy, ErrorCode::NoRoom, "again");
    let removed = client.remove_pool("own").await;
    refused_as(removed, ErrorCode::Conflict, "VM again is in it");
    refused_as(client.shutdown(false).await, ErrorCode::Conflict, "paged VMs run");
    // All ends with it.
    client.shutdown(true).await.unwrap();
    assert!(ballastd.end().success());
    assert!(!ballastd.run_dir().exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_say_nothing_keep_no_stranger_from_starting() {
    let Some(ballastd) = ballastd() else { return };
    let socket = ballastd.run_dir().join("shim.sock");
    // On a slow machine it may come in when they have timed out, after 10 s, which says nothing.
    for _ in 0..5 {
        let begun = Instant::now();
        // Each has as many places as one process may have: together all.
        let mute: Vec<Evil> =
            (0..20).map(|n| Evil::begin(&socket, &n.to_string(), "mute", 1)).collect();
        tokio::task::block_in_place(|| mute.iter().for_each(|one| one.says("filled")));
        let vmm = adopted(&ballastd, "quiet", 16).await;
        if begun.elapsed() < Duration::from_secs(10) {
            return;
        }
        drop((vmm, mute));
        ballastd.eventually("it is gone", async || ballastd.is_gone("vm").await).await;
    }
    panic!("it came in when they had timed out");
}

/// It takes its memory beside the budget: whoever looks sees that, for as long as it runs.
#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_that_is_refused_and_runs_on_is_seen() {
    let Some(ballastd) = ballastd() else { return };
    let socket = ballastd.run_dir().join("shim.sock");
    let _vmm = adopted(&ballastd, "quiet", 16).await;
    assert!(ballastd.host().await.refused.is_empty());
    // Its name is another's.
    let other = Evil::under_shim(&socket, "vm", "breaks off", 16);
    let host = ballastd.host().await;
    let [refused] = &host.refused[..] else { panic!("{:?}", host.refused) };
    assert_eq!((refused.pid, refused.name.as_deref()), (other.child.id(), Some("vm")));
    assert_eq!(refused.size, Some(16 * MIB));
    assert!(refused.why.contains("runs already") && refused.resident >= 16 * MIB, "{refused:?}");
    let gauge = || raw(&ballastd.run_dir().join("api.sock"), "GET", "/metrics", "").2;
    assert!(gauge().contains("\nballast_vmms_refused 1.0\n"), "{}", gauge());
    let listed = std::process::Command::new(support::cli())
        .env("BALLAST_SOCKET", ballastd.run_dir().join("api.sock"))
        .args(["vm", "ls"])
        .output()
        .unwrap();
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let line = format!("vm (pid {}): runs without Ballast", other.child.id());
    assert!(listed.contains(&line), "{listed}");
    drop(other);
    ballastd.eventually("it is forgotten", async || ballastd.host().await.refused.is_empty()).await;
    assert_eq!(ballastd.host().await.vms, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_with_a_device_that_pins_memory_is_refused_and_runs_on() {
    let Some(ballastd) = ballastd() else { return };
    let socket = ballastd.run_dir().join("shim.sock");
    let device = ["-device", "vfio-pci,host=00:01.0"];
    let mut vmm = Evil::under_shim_with(&socket, "vm", "breaks off", 16, &device);
    let host = ballastd.host().await;
    let [refused] = &host.refused[..] else { panic!("{:?}", host.refused) };
    assert_eq!((refused.pid, refused.name.as_deref()), (vmm.child.id(), Some("vm")));
    let why = "-device vfio-pci: the kernel pins no pages that Ballast is to supply";
    assert!(refused.why.contains(why), "{refused:?}");
    // Nothing is kept for it.
    assert!(ballastd.is_gone("vm").await && !ballastd.folder("vm").exists());
    assert_eq!((host.vms, host.free), (0, host.budget - ZEROS));
    assert!(vmm.child.try_wait().unwrap().is_none(), "it has ended");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_above_the_largest_size_is_refused() {
    let ballastd = Ballastd::start_configured(&["--budget", "64M"], "[adopt]\nmax = \"8M\"\n");
    let socket = ballastd.run_dir().join("shim.sock");
    for (mib, part) in [(16, "its RAM, 16 MiB, is above adopt.max, 8 MiB"), (8, "sealed")] {
        let hello = Message::Hello(evil::hello("big", mib * MIB));
        // One that is small enough comes further.
        let ram = unsealed(mib * MIB);
        let why = evil::say(&socket, &hello, &[ram.as_fd()]).unwrap();
        assert!(why.contains(part), "{why}");
    }
    assert!(ballastd.is_gone("big").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_is_for_those_users_alone_that_it_is_said_to_be_for() {
    let own = rustix::process::geteuid().as_raw();
    let text = format!(
        "[defaults]\nusers = []\n[[vm]]\nname = \"db*\"\nusers = [\"{}\"]\n\
         [[vm]]\nname = \"db1\"\nusers = [\"{own}\", \"{}\"]\n",
        own + 1,
        own + 1
    );
    let ballastd = Ballastd::start_configured(&["--budget", "64M"], &text);
    let socket = ballastd.run_dir().join("shim.sock");
    let not = |name| format!("'{name}' is not for user {own} (users of [[vm]])");
    // Who may have it comes further.
    for (name, part) in [("a", not("a")), ("db", not("db")), ("db1", "sealed".to_owned())] {
        let hello = Message::Hello(evil::hello(name, 8 * MIB));
        let ram = unsealed(8 * MIB);
        let why = evil::say(&socket, &hello, &[ram.as_fd()]).unwrap();
        assert!(why.contains(&part), "{name}: {why}");
        assert!(ballastd.is_gone(name).await);
    }
}

/// A RAM file that could be sealed: it is refused for that, once all else is good.
fn unsealed(len: u64) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("ram", flags).unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    fd
}
