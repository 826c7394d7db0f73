//! Configuration is taken whole or not at all, a run folder has one manager, and who starts it is told that it answers.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use std::fs::Permissions;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use ballast_api::LocationState;
use support::Ballastd;

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

/// It ended by itself, unhappily, with one line that has all `parts` in it, and made nothing.
#[track_caller]
fn refused(output: &Output, parts: &[&str]) {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
    assert!(parts.iter().all(|part| errors.contains(part)), "{parts:?}: {errors}");
    assert!(output.stdout.is_empty());
}

#[test]
fn mistakes_are_refused_as_a_whole() {
    let ballastd = Ballastd::prepare(&[]);
    let path = ballastd.root.join("ballast.toml");
    let shown = path.display().to_string();
    for (text, parts) in [
        ("budget = \"256M\"\nbudgte = \"1G\"\n", ["line 2", "budgte"]),
        ("budget = \"256M\"\n\n[pager]\nfault_around = 7\n", ["line 4", "string"]),
        ("budget = \"256M\n", ["line 1", "string"]),
        ("budget = \"plenty\"\n", ["budget", "plenty"]),
        ("budget = \"4000000G\"\n", ["budget", "host"]),
        ("budget = \"256M\"\ntax = 1.5\n", ["tax", "1.5"]),
        ("budget = \"256M\"\n[sampling]\nperiod_s = -1\n", ["sampling.period_s", "-1"]),
        ("budget = \"256M\"\nshim = \"/nonexistent.so\"\n", ["shim", "/nonexistent.so"]),
        (
            "budget = \"256M\"\n[[swap.location]]\npath = \"/nonexistent\"\n",
            ["swap.location", "not both"],
        ),
    ] {
        std::fs::write(&path, text).unwrap();
        for check in [false, true] {
            let mut command = ballastd.command();
            command.arg("--config").arg(&path);
            if check {
                command.arg("--check");
            }
            let output = command.output().unwrap();
            refused(&output, &[&shown, parts[0], parts[1]]);
            assert!(!ballastd.run_dir().exists() && !ballastd.swap_dir().exists(), "{text}");
        }
    }
    let absent = ballastd.command().args(["--config", "/nonexistent.toml"]).output().unwrap();
    refused(&absent, &["/nonexistent.toml", "No such file"]);
    assert_eq!(String::from_utf8_lossy(&absent.stderr).matches("No such file").count(), 1);
    std::fs::write(&path, [0xff, 0xfe]).unwrap();
    refused(&ballastd.command().arg("--config").arg(&path).output().unwrap(), &[&shown]);
    for bad in [["--budget", "1M"], ["--tax", "2"]] {
        refused(&ballastd.command().args(bad).output().unwrap(), &[&bad[0][2..]]);
    }
    std::fs::write(&path, "budget = \"256M\"\n").unwrap();
    let good = ballastd.command().arg("--config").arg(&path).arg("--check").output().unwrap();
    assert!(good.status.success() && !ballastd.run_dir().exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_folder_has_one_manager_and_is_private() {
    let mut ballastd = Ballastd::start(&["--budget", "64M"]);
    let socket = ballastd.client.socket().to_owned();
    assert_eq!(mode(&ballastd.run_dir()), 0o700);
    assert_eq!(mode(&ballastd.swap_dir()), 0o700);
    assert_eq!(mode(&socket), 0o600);
    assert_eq!(mode(&ballastd.run_dir().join("shim.sock")) & 0o077, 0);

    let run_dir = ballastd.run_dir().display().to_string();
    // As often as one likes: what belongs to the one that runs stays.
    for _ in 0..2 {
        refused(&ballastd.command().output().unwrap(), &["another ballastd", &run_dir]);
        assert!(ballastd.run_dir().join("lock").exists() && ballastd.swap_dir().exists());
        assert!(ballastd.run_dir().join("shim.sock").exists());
    }
    // Another folder makes it neither another API nor another folder of swap files.
    let elsewhere = ballastd.root.join("other");
    let second = |swap_dir: &Path, socket: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ballastd"));
        command.args(["--budget", "64M", "--run-dir"]).arg(&elsewhere);
        command.arg("--swap-dir").arg(swap_dir).arg("--socket").arg(socket);
        command.output().unwrap()
    };
    let output = second(&ballastd.root.join("swap"), &socket);
    refused(&output, &["another ballastd", &socket.display().to_string()]);
    let output = second(&ballastd.swap_dir(), &ballastd.root.join("other.sock"));
    let text = String::from_utf8_lossy(&output.stderr);
    let last = text.lines().last().unwrap_or_default();
    assert!(!output.status.success() && output.stdout.is_empty(), "{text}");
    assert!(last.contains("another ballastd") && last.contains("a folder of its own"), "{text}");
    assert!(ballastd.swap_dir().exists() && !ballastd.root.join("swap").exists());
    assert!(!elsewhere.exists(), "a manager that does not start leaves no folder");
    assert_eq!(ballastd.host().await.pid, ballastd.pid());

    // Sockets of a manager that is dead are replaced.
    ballastd.kill();
    assert!(socket.exists() && ballastd.client.host().await.is_err());
    ballastd.restart();
    assert_eq!(ballastd.host().await.pid, ballastd.pid());

    // A clean end without VMs leaves nothing.
    assert!(ballastd.term().success());
    assert!(!ballastd.run_dir().exists() && !ballastd.swap_dir().exists());
}

/// As systemd does with a unit of `Type=notify`.
#[tokio::test(flavor = "multi_thread")]
async fn a_service_manager_is_told_when_it_answers_and_not_before() {
    let ballastd = Ballastd::prepare(&["--budget", "128M"]);
    let path = ballastd.root.join("notify");
    let notified = UnixDatagram::bind(&path).unwrap();
    notified.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut command = ballastd.command();
    command.env("NOTIFY_SOCKET", &path).stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = command.spawn().unwrap();
    let mut text = [0; 64];
    let told = notified.recv(&mut text);
    let answers = UnixStream::connect(ballastd.client.socket());
    let ended = ballastd.client.shutdown(true).await;
    let _ = ended.inspect_err(|_| drop(child.kill()));
    child.wait().unwrap();
    assert_eq!(text[..told.unwrap()].trim_ascii(), b"READY=1");
    answers.unwrap();
}

#[test]
fn only_a_socket_is_replaced_by_the_socket() {
    let ballastd = Ballastd::prepare(&["--budget", "64M"]);
    let path = ballastd.root.join("precious");
    std::fs::write(&path, "data").unwrap();
    let output = ballastd.command().arg("--socket").arg(&path).output().unwrap();
    refused(&output, &["precious", "no socket"]);
    assert_eq!(std::fs::read(&path).unwrap(), b"data");
    assert!(!ballastd.run_dir().exists());
    // One that nobody answers at any more is.
    let stale = ballastd.root.join("stale.sock");
    drop(UnixListener::bind(&stale).unwrap());
    let mut ballastd = ballastd;
    ballastd.add_option("--socket", &stale);
    ballastd.restart();
    assert!(ballastd.term().success() && !stale.exists());
}

#[test]
fn folders_that_others_write_to_are_refused() {
    let ballastd = Ballastd::prepare(&["--budget", "64M"]);
    let (run_dir, swap_dir) = (ballastd.run_dir(), ballastd.swap_dir());
    for (open, other) in [(&run_dir, &swap_dir), (&swap_dir, &run_dir)] {
        std::fs::create_dir(open).unwrap();
        std::fs::set_permissions(open, Permissions::from_mode(0o777)).unwrap();
        let output = ballastd.command().output().unwrap();
        refused(&output, &[&open.display().to_string(), "others than its owner may write to it"]);
        assert!(!other.exists() && mode(open) == 0o777, "what was there is as it was");
        std::fs::remove_dir(open).unwrap();
    }
    // Nor may a group put another in their place.
    let way = ballastd.root.join("way");
    std::fs::create_dir(&way).unwrap();
    std::os::unix::fs::chown(&way, None, Some(65534)).unwrap();
    std::fs::set_permissions(&way, Permissions::from_mode(0o775)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ballastd"));
    command.args(["--budget", "64M", "--run-dir"]).arg(way.join("run"));
    command.arg("--swap-dir").arg(&swap_dir);
    refused(&command.output().unwrap(), &["way is group 65534's to change"]);
    assert!(!way.join("run").exists());
}

/// A swap location that comes while ballastd runs is looked at as those that were there.
#[tokio::test(flavor = "multi_thread")]
async fn a_location_that_comes_later_is_not_trusted_unseen() {
    let mut ballastd = Ballastd::prepare(&[]);
    ballastd.names_swap_dir = false;
    let [good, late] = ["good", "late"].map(|name| ballastd.root.join(name));
    std::fs::create_dir(&good).unwrap();
    std::fs::create_dir(&late).unwrap();
    std::fs::set_permissions(&good, Permissions::from_mode(0o700)).unwrap();
    let config = ballastd.root.join("ballast.toml");
    let text = format!(
        "budget = \"64M\"\n[[swap.location]]\npath = {good:?}\n[[swap.location]]\npath = {late:?}\npriority = 1\n"
    );
    std::fs::write(&config, text).unwrap();
    ballastd.add_option("--config", &config);
    ballastd.restart();
    let state = async || {
        let host = ballastd.host().await;
        host.swap_locations.into_iter().find(|place| place.path == late).unwrap().state
    };
    let is = async |wanted| {
        ballastd.eventually("it is seen", async || state().await == wanted).await;
    };
    is(LocationState::Good).await;
    std::fs::remove_dir(&late).unwrap();
    is(LocationState::Missing).await;
    std::fs::create_dir(&late).unwrap();
    std::fs::set_permissions(&late, Permissions::from_mode(0o777)).unwrap();
    ballastd
        .eventually("it is refused", async || {
            let log = std::fs::read_to_string(ballastd.log()).unwrap();
            log.contains("no swap files are made there: folder")
        })
        .await;
    is(LocationState::Missing).await;
    std::fs::set_permissions(&late, Permissions::from_mode(0o700)).unwrap();
    is(LocationState::Good).await;
}

#[test]
fn the_group_of_shims_reaches_their_socket_and_nothing_else() {
    let ballastd = Ballastd::prepare(&[]);
    let above = ballastd.root.join("above");
    let run_dir = above.join("it/run");
    let file = ballastd.root.join("ballast.toml");
    // Its own group: who is not root may give files to no other.
    let group = rustix::process::getegid().as_raw();
    let text = format!("budget = \"64M\"\nshim_group = \"{group}\"\nrun_dir = {run_dir:?}\n");
    std::fs::write(&file, format!("{text}swap_dir = {:?}\n", ballastd.swap_dir())).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ballastd"));
    command.arg("--config").arg(&file);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut first = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
    // One that is refused leaves it open to the group.
    let mut second = Command::new(env!("CARGO_BIN_EXE_ballastd"));
    second.args(["--budget", "64M", "--run-dir"]).arg(&run_dir);
    second.arg("--swap-dir").arg(ballastd.root.join("other-swap"));
    second.arg("--socket").arg(ballastd.root.join("other.sock"));
    refused(&second.output().unwrap(), &["another ballastd", &run_dir.display().to_string()]);
    let modes = [&above, &above.join("it"), &run_dir, &run_dir.join("shim.sock")].map(|p| mode(p));
    // As systemd leaves them when it has a unit reload.
    for (path, mode) in [(&run_dir, 0o755), (&run_dir.join("shim.sock"), 0o600)] {
        std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }
    support::signal(child.id(), rustix::process::Signal::HUP);
    let begun = std::time::Instant::now();
    while [mode(&run_dir), mode(&run_dir.join("shim.sock"))] != [0o710, 0o660] {
        assert!(begun.elapsed().as_secs() < 60, "the group has not got it back");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    support::signal(child.id(), rustix::process::Signal::TERM);
    assert!(child.wait().unwrap().success() && first.starts_with("ready:"), "{first}");
    assert_eq!(modes, [0o711, 0o711, 0o710, 0o660], "{modes:?}");
    assert!(!above.exists());
}
