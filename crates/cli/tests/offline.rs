//! `vm stop` while no manager runs: the right process is ended, however it takes it, and no other.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use ballast_api::record::{RECORD_VERSION, process_started, record_path};
use common::Fake;
use serde_json::{Value, json};

/// A process that says when it is ready, and what it then does on SIGTERM.
struct Process(Child);

impl Process {
    fn start(script: &str) -> Process {
        let mut child = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Process(child)
    }
    fn obedient() -> Process {
        Process::start("echo ready; exec sleep 1000")
    }
    fn deaf() -> Process {
        Process::start("trap '' TERM; echo ready; while :; do sleep 1; done")
    }
    fn is_alive(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn note(run_dir: &Path, name: &str, pid: u32, started: u64) {
    let path = record_path(run_dir, name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    let record = json!({
        "version": RECORD_VERSION, "name": name, "pid": pid, "pid_started": started,
    });
    std::fs::write(path, record.to_string()).unwrap();
}

fn note_alive(run_dir: &Path, name: &str, process: &Process) {
    let pid = process.0.id();
    note(run_dir, name, pid, process_started(pid).unwrap().unwrap());
}

fn stop_command(run_dir: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ballast"));
    command.arg("--socket").arg(run_dir.join("api.sock"));
    command.args(["vm", "stop"]).args(more);
    command
}

fn stop(run_dir: &Path, more: &[&str]) -> Output {
    stop_command(run_dir, more).output().unwrap()
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[track_caller]
fn refused(output: &Output, code: i32, part: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert!(said.contains(part) && said.lines().count() == 1, "{said}");
}

#[test]
fn a_process_that_obeys_is_asked_and_one_that_does_not_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let mut good = Process::obedient();
    note_alive(dir.path(), "good", &good);
    let said = text(&stop(dir.path(), &["good"]));
    assert!(
        said.contains("good: no ballastd runs") && said.contains("SIGTERM), and has"),
        "{said}"
    );
    assert_eq!(good.0.wait().unwrap().signal(), Some(15));

    let mut deaf = Process::deaf();
    note_alive(dir.path(), "deaf", &deaf);
    let said = text(&stop(dir.path(), &["deaf", "--grace", "100ms", "--json"]));
    let ended: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(ended["end"], "killed");
    assert_eq!((&ended["name"], &ended["grace_ms"]), (&json!("deaf"), &json!(100)));
    assert_eq!(deaf.0.wait().unwrap().signal(), Some(9));
    // Once more: it is gone, and that is no error.
    assert!(text(&stop(dir.path(), &["deaf"])).contains("had ended already"));
    let said = text(&stop(dir.path(), &["deaf", "--grace", "100ms", "--json"]));
    let ended: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&ended["end"], &ended["grace_ms"]), (&json!("gone"), &json!(0)));

    let mut forced = Process::obedient();
    note_alive(dir.path(), "forced", &forced);
    assert!(text(&stop(dir.path(), &["forced", "--force"])).contains("was killed"));
    assert_eq!(forced.0.wait().unwrap().signal(), Some(9));
    // Records are the next manager's to clear.
    assert!(record_path(dir.path(), "good").exists());
}

/// It asks the guest, which a signal does not.
#[test]
fn a_manager_that_comes_back_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = Process::obedient();
    note_alive(dir.path(), "web", &process);
    let mut command = stop_command(dir.path(), &["web", "--grace", "1m"]);
    let mut stopped = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut errors, mut said) = (BufReader::new(stopped.stderr.take().unwrap()), String::new());
    errors.read_line(&mut said).unwrap();
    assert!(said.contains("waiting up to 5 s"), "{said}");
    let manager = Fake::at(&dir.path().join("api.sock"));
    let stopped = stopped.wait_with_output().unwrap();
    assert!(text(&stopped).contains("web: stopped"), "{stopped:?}");
    assert_eq!(manager.recorded().len(), 1);
    assert!(process.is_alive(), "it was not signalled");
    // Who is to end at once does.
    drop(manager);
    let stopped = stop(dir.path(), &["web", "--force"]);
    assert!(text(&stopped).contains("was killed") && stopped.stderr.is_empty(), "{stopped:?}");
}

/// What it was asked went with it.
#[test]
fn the_next_manager_is_asked_where_one_left_before_the_vm_had_ended() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = Process::obedient();
    note_alive(dir.path(), "web", &process);
    let socket = dir.path().join("api.sock");
    let old = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let run_dir = dir.path().to_owned();
    let stopped = std::thread::spawn(move || stop(&run_dir, &["web", "--grace", "1m"]));
    let asked = old.accept().unwrap();
    std::fs::remove_file(&socket).unwrap();
    let manager = Fake::at(&socket);
    drop((asked, old));
    let stopped = stopped.join().unwrap();
    assert!(text(&stopped).contains("web: stopped"), "{stopped:?}");
    assert!(String::from_utf8_lossy(&stopped.stderr).contains("has left"), "{stopped:?}");
    // With what is left of its grace.
    let grace = manager.recorded()[0].1["grace_s"].as_f64().unwrap();
    assert!(grace > 0.0 && grace < 60.0, "{grace}");
    assert!(process.is_alive(), "it was not signalled");
}

/// The next one does not know it: it has ended if its process has, and else it is nobody's.
#[test]
fn one_that_the_next_manager_does_not_know_has_ended_only_if_its_process_has() {
    for ends in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let mut process = Process::obedient();
        note_alive(dir.path(), "old", &process);
        let socket = dir.path().join("api.sock");
        let left = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let run_dir = dir.path().to_owned();
        let stopped = std::thread::spawn(move || stop(&run_dir, &["old", "--grace", "1m"]));
        let asked = left.accept().unwrap();
        if ends {
            process.0.kill().unwrap();
            process.0.wait().unwrap();
        }
        std::fs::remove_file(&socket).unwrap();
        let _manager = Fake::at(&socket);
        drop((asked, left));
        let stopped = stopped.join().unwrap();
        if ends {
            assert!(text(&stopped).contains("old: ended, while ballastd was replaced"));
        } else {
            let said = String::from_utf8_lossy(&stopped.stderr);
            assert!(said.ends_with("no VM named 'old'\n"), "{said}");
            assert!(stopped.status.code() == Some(1) && process.is_alive(), "{stopped:?}");
        }
    }
}

/// That one is waited for cannot be told, and changes nothing: the VM is ended.
#[test]
fn it_is_ended_also_where_nobody_can_be_told_that_a_manager_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    for json in [false, true] {
        let mut process = Process::obedient();
        note_alive(dir.path(), "web", &process);
        let mut command = Command::new(env!("CARGO_BIN_EXE_ballast"));
        command.arg("--socket").arg(dir.path().join("api.sock"));
        command.args(["vm", "stop", "web", "--grace", "3s"]).stdout(Stdio::null());
        if json {
            let said = command.arg("--json").output().unwrap();
            assert!(said.status.success() && said.stderr.is_empty(), "{said:?}");
        } else {
            let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
            assert!(command.stderr(full).status().unwrap().success());
        }
        assert_eq!(process.0.wait().unwrap().signal(), Some(15));
    }
}

#[test]
fn a_number_that_is_another_process_by_now_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let mut other = Process::obedient();
    let pid = other.0.id();
    note(dir.path(), "old", pid, process_started(pid).unwrap().unwrap() - 1);
    assert!(text(&stop(dir.path(), &["old", "--force"])).contains("had ended already"));
    for nobody in [0, u32::MAX] {
        note(dir.path(), "odd", nobody, 1);
        assert!(text(&stop(dir.path(), &["odd"])).contains("had ended already"));
    }
    assert!(other.is_alive());
}

#[test]
fn what_is_not_understood_is_refused_and_nobody_is_signalled() {
    let dir = tempfile::tempdir().unwrap();
    let mut process = Process::obedient();
    note_alive(dir.path(), "vm", &process);
    let path = record_path(dir.path(), "vm");
    let good = std::fs::read_to_string(&path).unwrap();
    let newer = good.replace(
        &format!("\"version\":{RECORD_VERSION}"),
        &format!("\"version\":{}", RECORD_VERSION + 1),
    );
    assert_ne!(good, newer);
    for (content, part) in [(newer.as_str(), "newer manager"), ("{", "vm.json"), ("", "vm.json")] {
        std::fs::write(&path, content).unwrap();
        refused(&stop(dir.path(), &["vm"]), 1, part);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
    }
    std::fs::write(&path, &good).unwrap();
    // A copy of its folder.
    let copy = record_path(dir.path(), "vm.old");
    std::fs::create_dir(copy.parent().unwrap()).unwrap();
    std::fs::write(&copy, &good).unwrap();
    refused(&stop(dir.path(), &["vm.old"]), 1, "the record of a VM named 'vm': copied, or moved?");
    assert!(process.is_alive());
    // A manager that has the folder, and does not answer yet.
    let lock = std::fs::File::create(dir.path().join("lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    refused(&stop(dir.path(), &["vm", "--grace", "1s"]), 1, "try again");
    drop(lock);
    // A VM that nobody knows: who has its run folder elsewhere is told how to name it.
    let unknown = stop(dir.path(), &["nobody"]);
    refused(&unknown, 3, "no ballastd at");
    refused(&unknown, 3, &format!("{} has no record of such a VM", dir.path().display()));
    refused(&unknown, 3, "--run-dir");
    assert!(process.is_alive());
    let elsewhere = tempfile::tempdir().unwrap();
    let run_dir = dir.path().display().to_string();
    let said = text(&stop(elsewhere.path(), &["vm", "--run-dir", &run_dir]));
    assert!(said.contains("vm: no ballastd runs"), "{said}");
    assert!(!process.is_alive());
}

#[test]
fn of_a_run_folder_that_is_named_no_other_manager_is_asked() {
    let fake = Fake::start();
    let folder = tempfile::tempdir().unwrap();
    let run_dir = folder.path().display().to_string();
    let mut process = Process::obedient();
    // A name that the other manager has too.
    note_alive(folder.path(), "web", &process);
    let stop = |name: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ballast"));
        command.arg("--socket").arg(&fake.socket).env("BALLAST_SOCKET", &fake.socket);
        command.args(["vm", "stop", name, "--run-dir", &run_dir]).output().unwrap()
    };
    let said = text(&stop("web"));
    assert!(said.contains("web: no ballastd runs"), "{said}");
    assert_eq!(process.0.wait().unwrap().signal(), Some(15));
    refused(&stop("db"), 3, &run_dir);
    assert_eq!(fake.recorded(), []);
    // The one that runs there is.
    let own = Fake::at(&folder.path().join("api.sock"));
    text(&stop("db"));
    assert_eq!((own.recorded().len(), fake.recorded().len()), (1, 0));
}
