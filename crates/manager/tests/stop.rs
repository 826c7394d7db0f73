//! VMs are ended whatever state they and the manager are in: without a manager, and while they wait for
//! one to take them over.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use ballast_api::{RunState, VmChange};
use support::http::raw;
use support::{Ballastd, cli, image_or_skip, signal, wait};

/// Whether a thread of the process waits in a page fault that only a manager can serve.
fn waits_in_a_fault(pid: u32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    tasks.flatten().any(|task| {
        let told = |file: &str| std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
        told("wchan").contains("userfault") || told("stack").contains("userfault")
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_waits_in_a_fault_is_ended_without_a_manager() {
    let Some(image) = image_or_skip() else { return };
    let mut ballastd = Ballastd::start(&["--budget", "112M"]);
    let work = "verify-torture --mb 24 --threads 2 --seconds 100000";
    for name in ["stuck", "forced"] {
        let mut spec = ballastd.guest(image, name, 96, work);
        spec.no_balloon = true;
        ballastd.client.run(&spec).await.unwrap();
    }
    for name in ["stuck", "forced"] {
        ballastd.checks_go_on(&mut ballastd.console(name), 100).await;
    }
    let pids = [ballastd.vm("stuck").await.pid.unwrap(), ballastd.vm("forced").await.pid.unwrap()];
    ballastd.kill();
    wait("both wait in a fault", || pids.iter().all(|&pid| waits_in_a_fault(pid)).then_some(()));
    let stop = |more: &[&str]| {
        let mut command = Command::new(cli());
        command.arg("--socket").arg(ballastd.client.socket()).args(["vm", "stop"]);
        let output = command.args(more).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        String::from_utf8(output.stdout).unwrap()
    };
    // SIGTERM does nothing to it: this is what the grace is for.
    let said = stop(&["stuck", "--grace", "500ms"]);
    assert!(said.contains("did not obey SIGTERM within 0.5 s"), "{said}");
    let said = stop(&["forced", "--force"]);
    assert!(said.contains("was killed"), "{said}");
    assert!(stop(&["stuck"]).contains("had ended already"));
    assert!(ballast_lab::leftovers::processes(&ballastd.root).is_empty());
    // The next manager clears up after them.
    assert!(ballastd.swap_file("stuck").exists());
    ballastd.restart();
    for name in ["stuck", "forced"] {
        ballastd.assert_nothing_left(name);
        assert!(ballastd.is_gone(name).await);
    }
    assert!(ballastd.term().success());
    assert!(!ballastd.run_dir().exists() && !ballastd.swap_dir().exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_waits_to_be_taken_over_is_ended_by_name() {
    let Some(image) = image_or_skip() else { return };
    let mut ballastd = Ballastd::start(&["--budget", "256M"]);
    ballastd.client.run(&ballastd.guest(image, "waits", 96, "")).await.unwrap();
    let pid = ballastd.vm("waits").await.pid.unwrap();
    ballastd.kill();
    // Its shim cannot come.
    signal(pid, rustix::process::Signal::STOP);
    ballastd.restart();
    // It is shown meanwhile, with what it holds, and the books add up.
    let waits = ballastd.vm("waits").await;
    let reason = waits.management.reason.clone().unwrap_or_default();
    assert!(reason.contains("waits for its shim since"), "{waits:?}");
    assert_eq!((waits.state, waits.pid), (RunState::Paused, Some(pid)));
    assert!(waits.memory.consumed > 0 && waits.memory.overhead > 0, "{:?}", waits.memory);
    assert_eq!(ballastd.client.vms().await.unwrap().len(), 1);
    let host = ballastd.host().await;
    assert_eq!((host.vms, host.waiting), (1, 1));
    assert_eq!(host.consumed, waits.memory.consumed);
    assert_eq!(host.budget, host.consumed + host.overhead + host.free);
    let mut shown = Command::new(cli());
    shown.arg("--socket").arg(ballastd.client.socket()).arg("host");
    let shown = String::from_utf8(shown.output().unwrap().stdout).unwrap();
    assert!(shown.contains("1 VM (1 not taken over yet)"), "{shown}");
    let (_, _, metrics) = raw(ballastd.client.socket(), "GET", "/metrics", "");
    for line in ["ballast_vms_waiting 1.0", "ballast_vm_consumed_bytes{vm=\"waits\"}"] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    // What cannot be done before says so.
    let change = VmChange { shares: Some(7), ..VmChange::default() };
    let refused = ballastd.client.change("waits", &change).await.unwrap_err().to_string();
    assert!(refused.contains("waits to be taken over"), "{refused}");
    let last = ballastd.client.stop("waits", Duration::from_secs(30)).await.unwrap();
    assert_eq!((last.state, last.name.as_str()), (RunState::Stopped, "waits"));
    ballastd.assert_nothing_left("waits");
    // Its name is free at once.
    ballastd.client.run(&ballastd.guest(image, "waits", 96, "")).await.unwrap();
    ballastd.client.shutdown(true).await.unwrap();
    assert!(ballastd.end().success());
    assert!(!ballastd.run_dir().exists() && !ballastd.swap_dir().exists());
}

/// In the moments in which a new manager has not found its QMP yet, or not even its shim.
#[tokio::test(flavor = "multi_thread")]
async fn a_guest_is_asked_right_after_the_manager_was_replaced() {
    let Some(image) = image_or_skip() else { return };
    let mut ballastd = Ballastd::start(&["--budget", "256M"]);
    let grace = Duration::from_secs(600);
    for busy in [false, true] {
        let name = if busy { "busy" } else { "polite" };
        ballastd.client.run(&ballastd.guest(image, name, 96, "")).await.unwrap();
        let mut console = ballastd.console(name);
        ballastd
            .eventually("it has booted", async || {
                console.poll();
                console.story.ready.is_some()
            })
            .await;
        ballastd.kill();
        // QEMU talks to one at a time: it greets the manager when this one is gone.
        let qmp = ballastd.folder(name).join("qmp.sock");
        let other = busy.then(|| UnixStream::connect(qmp).unwrap());
        ballastd.restart();
        let client = ballastd.client.clone().with_timeout(grace);
        let stop = tokio::spawn(async move { client.stop(name, grace).await });
        if busy {
            ballastd.is_paged(name).await;
            tokio::time::sleep(Duration::from_secs(3)).await;
            assert!(!stop.is_finished(), "it was not waited for");
        }
        drop(other);
        let last = stop.await.unwrap().unwrap();
        assert_eq!((last.state, last.ended), (RunState::Stopped, None));
        let said =
            std::fs::read(ballastd.root.join(format!("console/{name}.console.log"))).unwrap();
        let was_asked = String::from_utf8_lossy(&said).contains("\"power\":\"button\"");
        assert!(was_asked, "{name} was not asked");
        ballastd.assert_nothing_left(name);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_that_answers_late_has_all_of_its_grace() {
    let Some(image) = image_or_skip() else { return };
    let ballastd = Ballastd::start(&["--budget", "256M"]);
    ballastd.client.run(&ballastd.guest(image, "late", 96, "")).await.unwrap();
    let mut console = ballastd.console("late");
    ballastd
        .eventually("it has booted", async || {
            console.poll();
            console.story.ready.is_some()
        })
        .await;
    let vm = ballastd.vm("late").await;
    let (pid, ran) = (vm.pid.unwrap(), vm.vmm_uptime_s.unwrap());
    // As one that waits in a page fault: it hears nothing for longer than a QMP command may take.
    signal(pid, rustix::process::Signal::STOP);
    let grace = Duration::from_secs(600);
    let client = ballastd.client.clone().with_timeout(grace);
    let stop = tokio::spawn(async move { client.stop("late", grace).await });
    tokio::time::sleep(Duration::from_secs(8)).await;
    assert!(!stop.is_finished(), "it was killed within its grace");
    signal(pid, rustix::process::Signal::CONT);
    let last = stop.await.unwrap().unwrap();
    assert!(last.vmm_uptime_s.unwrap() >= ran + 8.0, "{last:?}: it ran until its end");
    assert_eq!((last.state, last.ended), (RunState::Stopped, None));
    console.poll();
    let said = std::fs::read_to_string(ballastd.root.join("console/late.console.log")).unwrap();
    assert!(said.contains("\"power\":\"button\""), "{}", console.tail(5));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_still_boots_is_asked_again() {
    let Some(image) = image_or_skip() else { return };
    let ballastd = Ballastd::start(&["--budget", "256M"]);
    ballastd.client.run(&ballastd.guest(image, "boots", 96, "")).await.unwrap();
    // Nothing of it sees a power button yet: its kernel has said nothing.
    let grace = Duration::from_secs(600);
    let client = ballastd.client.clone().with_timeout(grace);
    let last = client.stop("boots", grace).await.unwrap();
    assert_eq!((last.state, last.ended), (RunState::Stopped, None), "it was killed");
    let said = std::fs::read_to_string(ballastd.root.join("console/boots.console.log")).unwrap();
    assert!(said.contains("\"power\":\"button\""), "{said}");
}

/// Its VMs end, and it with them: one that stayed would start none any more.
#[tokio::test(flavor = "multi_thread")]
async fn who_asks_for_the_end_of_all_need_not_wait_for_it() {
    let Some(image) = image_or_skip() else { return };
    let mut ballastd = Ballastd::start(&["--budget", "256M"]);
    for name in ["a", "b"] {
        ballastd.client.run(&ballastd.guest(image, name, 96, "idle")).await.unwrap();
    }
    let body = "{\"stop_vms\":true}";
    let request = format!(
        "POST /v1/shutdown HTTP/1.1\r\nhost: ballast\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = UnixStream::connect(ballastd.client.socket()).unwrap();
    std::io::Write::write_all(&mut stream, request.as_bytes()).unwrap();
    // What hangs up before its request was read has asked for nothing.
    ballastd
        .eventually("its VMs are asked to stop", async || {
            let vm = ballastd.client.vm("a").await;
            vm.map_or(true, |vm| matches!(vm.state, RunState::Stopping | RunState::Stopped))
        })
        .await;
    // Nobody waits for the answer.
    drop(stream);
    assert!(ballastd.end().success(), "{}", ballastd.last_words());
    assert!(ballast_lab::leftovers::processes(&ballastd.root).is_empty());
}
