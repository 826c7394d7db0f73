//! `ballast top` on a real pseudo-terminal: it draws, changes, waits out an absent manager, and
//! gives the terminal back however it ends.

#![allow(clippy::unwrap_used, reason = "a panic is the test failing")]

mod common;

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use common::Fake;
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use serde_json::json;

const LEAVE_ALTERNATE_SCREEN: &str = "\u{1b}[?1049l";
/// Only for a test that would otherwise hang for ever.
const HANGS: Duration = Duration::from_secs(60);

struct Top {
    child: Child,
    terminal: File,
    output: Receiver<Vec<u8>>,
    seen: String,
    /// Keeps the terminal's other side open, to look at its modes after the end.
    side: OwnedFd,
}

impl Top {
    fn start(socket: &Path) -> Top {
        let control = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&control).unwrap();
        unlockpt(&control).unwrap();
        let path = ptsname(&control, Vec::new()).unwrap();
        let side = File::options().read(true).write(true).open(path.to_str().unwrap()).unwrap();
        let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&control, size).unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_ballast"))
            .args(["top", "--interval", "100ms"])
            .env("BALLAST_SOCKET", socket)
            .env("NO_COLOR", "1")
            .env("TERM", "xterm")
            .stdin(side.try_clone().unwrap())
            .stdout(side.try_clone().unwrap())
            .stderr(side.try_clone().unwrap())
            .spawn()
            .unwrap();
        let terminal = File::from(control);
        let mut reader = terminal.try_clone().unwrap();
        let (sender, output) = channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(n) = reader.read(&mut buffer) {
                if n == 0 || sender.send(buffer[..n].to_vec()).is_err() {
                    return;
                }
            }
        });
        Top { child, terminal, output, seen: String::new(), side: side.into() }
    }

    /// Waits until `text` was drawn since the last `until`.
    fn until(&mut self, text: &str) {
        let end = Instant::now() + HANGS;
        while !self.seen.contains(text) {
            match self.output.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(bytes) => self.seen.push_str(&String::from_utf8_lossy(&bytes)),
                Err(e) => panic!("{text} does not come ({e}); seen: {:?}", self.seen),
            }
        }
        let end = self.seen.find(text).unwrap() + text.len();
        self.seen.drain(..end);
    }

    fn press(&mut self, keys: &str) {
        self.terminal.write_all(keys.as_bytes()).unwrap();
    }

    fn is_raw(&self) -> bool {
        !tcgetattr(&self.side).unwrap().local_modes.contains(LocalModes::ICANON)
    }

    /// The end, with the terminal as it was.
    fn ended(mut self) -> ExitStatus {
        self.until(LEAVE_ALTERNATE_SCREEN);
        let status = self.child.wait().unwrap();
        assert!(!self.is_raw(), "the terminal is still raw");
        status
    }
}

#[test]
fn it_draws_takes_a_change_and_quits() {
    let fake = Fake::start();
    let mut top = Top::start(&fake.socket);
    top.until("web");
    assert!(top.is_raw());
    top.until("quit");
    top.press("s5000\r");
    top.until("shares is now 5000");
    assert_eq!(fake.recorded(), [("PATCH web".to_owned(), json!({"shares": 5000}))]);
    top.press("q");
    assert_eq!(top.ended().code(), Some(0));
}

#[test]
fn in_json_an_absent_manager_is_an_error_in_json_and_waited_for() {
    let mut fake = Fake::start();
    let mut command = Command::new(env!("CARGO_BIN_EXE_ballast"));
    command.args(["--json", "top", "--interval", "100ms"]).env("BALLAST_SOCKET", &fake.socket);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut top = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(top.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with('{'), "{line}");
    // The rest is read by nobody: it is not to end for that.
    let mut errors = BufReader::new(top.stderr.take().unwrap());
    fake.vanish();
    line.clear();
    errors.read_line(&mut line).unwrap();
    top.kill().unwrap();
    top.wait().unwrap();
    let body: serde_json::Value =
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"));
    assert_eq!(body["error"]["code"], "unreachable", "{line}");
}

#[test]
fn signals_end_it_in_order() {
    let fake = Fake::start();
    for signal in [Signal::TERM, Signal::HUP, Signal::INT] {
        let mut top = Top::start(&fake.socket);
        top.until("quit");
        kill_process(Pid::from_child(&top.child), signal).unwrap();
        assert_eq!(top.ended().code(), Some(0), "{signal:?}");
    }
}

#[test]
fn an_absent_manager_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("api.sock");
    let fake = Fake::at(&socket);
    let mut top = Top::start(&socket);
    top.until("quit");
    drop(fake);
    top.until("away,");
    let _back = Fake::at(&socket);
    top.until("up 3m");
    top.press("\u{3}");
    assert_eq!(top.ended().code(), Some(0));
}
