//! The demo, as `./run` starts it: guests overcommitted under the manager, checks passed in each, the
//! budget kept, nothing left behind, whether it ends by time or by a signal.
#![allow(clippy::unwrap_used, reason = "a panic here is the test failing")]

mod common;

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use common::image_or_skip;
use rustix::process::{Pid, Signal, kill_process};

const PROGRAMS: [&str; 2] = ["ballastd", "libballast_shim.so"];

fn demo(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ballast-lab"));
    command.arg("demo").args(words).stdin(Stdio::null());
    command
}

#[test]
fn ends_with_a_summary_in_which_all_checks_have_passed() {
    let Some(_image) = image_or_skip("demo_summary", &PROGRAMS) else { return };
    let output = demo(&["--seconds", "45"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}\n{errors}");
    for part in [
        "peak overcommitment      2.00",
        "never exceeded",
        "integrity of touch1",
        "integrity of files1",
        "integrity of idle1",
        "no process, mount, socket or file",
        "all checks passed",
    ] {
        assert!(text.contains(part), "no '{part}' in\n{text}");
    }
}

#[test]
fn a_signal_ends_it_in_order() {
    let Some(_image) = image_or_skip("demo_signal", &PROGRAMS) else { return };
    let mut child =
        demo(&["--seconds", "600"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut text = String::new();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for line in lines.by_ref() {
        let line = line.unwrap();
        text += &format!("{line}\n");
        // The first table: all guests are ready.
        if line.contains("overcommitment") {
            kill_process(Pid::from_child(&child), Signal::INT).unwrap();
            break;
        }
    }
    lines.for_each(|l| text += &format!("{}\n", l.unwrap()));
    let status = child.wait().unwrap();
    assert!(status.success(), "{status}: {text}");
    assert!(text.contains("no process, mount, socket or file"), "{text}");
    assert!(text.contains("ended by SIGINT"), "{text}");
}

/// As by the kernel's out-of-memory killer.
#[test]
fn a_guest_that_is_killed_is_no_success() {
    let Some(_image) = image_or_skip("demo_killed", &PROGRAMS) else { return };
    let mut command = demo(&["--seconds", "20", "--guests", "1"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut text = String::new();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut is_killed = false;
    for line in lines.map(Result::unwrap) {
        text += &format!("{line}\n");
        if line.contains("overcommitment") && !std::mem::replace(&mut is_killed, true) {
            kill_process(qemu_under(child.id()), Signal::KILL).unwrap();
        }
    }
    assert_eq!(child.wait().unwrap().code(), Some(1), "{text}");
    assert!(text.contains("FAILED touch1: had ended before"), "{text}");
    assert!(!text.contains("all checks passed"), "{text}");
}

/// The one QEMU among the descendants of a process.
fn qemu_under(pid: u32) -> Pid {
    let children = |pid: u32| -> Vec<u32> {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let of = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("children"));
        tasks
            .filter_map(|task| of(task).ok())
            .flat_map(|all| all.split(' ').filter_map(|p| p.parse().ok()).collect::<Vec<_>>())
            .collect()
    };
    let is_qemu = |pid: &u32| {
        std::fs::read_link(format!("/proc/{pid}/exe"))
            .is_ok_and(|exe| exe.to_string_lossy().contains("qemu-system"))
    };
    let mut all = children(pid);
    let mut at = 0;
    while let Some(pid) = all.get(at) {
        all.extend(children(*pid));
        at += 1;
    }
    let found: Vec<u32> = all.into_iter().filter(is_qemu).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    Pid::from_raw(found[0] as i32).unwrap()
}

#[test]
fn a_budget_that_cannot_hold_the_guests_is_refused_in_one_line() {
    let Some(_image) = image_or_skip("demo_refusal", &PROGRAMS) else { return };
    let output = demo(&["--budget", "128M", "--seconds", "5"]).output().unwrap();
    assert!(!output.status.success());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(errors.lines().count(), 1, "{errors}");
}
