//! VMMs whose QMP connection ends while they run, or that are not to be reached when a manager comes. No guest is
//! needed for that, nor any privilege: the VMM is this test binary, executed again, and speaks QMP as one does that
//! somebody else started.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ballast_api::{AttachSpec, BalloonHealth, ErrorCode, Mode, RunState, VmChange};
use serde_json::{Value, json};
use support::{Ballastd, MIB, refused_as, wait};

/// Of its guest, all in use.
const SIZE: u64 = 64 * MIB;
/// What its limit takes of it, by its balloon.
const TAKEN: u64 = 24 * MIB;
/// What is asked of it then, as the VMM tells it.
const ASKED: &str = "balloon 40";

#[test]
#[ignore = "the VMM of the other tests"]
fn vmm_process() {
    let Some(socket) = std::env::var_os("VMM_SOCKET") else { return };
    // Ends the line that the test's name is on.
    println!();
    let memory = std::hint::black_box(vec![1_u8; SIZE as usize]);
    let mib = |name: &str| std::env::var(name).map_or(0, |mib| mib.parse::<u64>().unwrap() * MIB);
    let all = SIZE + mib("VMM_DIMM");
    let vmm = Arc::new(Mutex::new(Vmm {
        socket: Some(socket.into()),
        client: None,
        all,
        actual: all - mib("VMM_HOLDS"),
        wanted: all - mib("VMM_HOLDS"),
        pace: u64::MAX,
        told: std::env::var("VMM_TOLD").ok().map(|at| at.parse().unwrap()),
        status: "running".to_owned(),
        deaf: std::env::var_os("VMM_DEAF").is_some(),
    }));
    let serving = vmm.clone();
    std::thread::spawn(move || serve(&serving));
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let mut vmm = vmm.lock().unwrap();
        match line.split_once(' ').unwrap_or((line.as_str(), "")) {
            ("hang-up", _) => vmm.hang_up(),
            ("go", _) => {
                vmm.socket = None;
                vmm.hang_up();
            }
            ("come", path) => vmm.socket = Some(path.into()),
            ("stop", "") => vmm.status = "paused".to_owned(),
            ("stop", why) => vmm.status = why.to_owned(),
            ("cont", _) => vmm.status = "running".to_owned(),
            ("slow", _) => vmm.pace = MIB / 4,
            // Its balloon says what it held, and its statistics are those of before.
            ("reset", _) => {
                vmm.told = Some(now());
                vmm.say("RESET");
            }
            ("boot", _) => vmm.told = None,
            // As for a device that reaches it past the kernel.
            ("lock", _) => {
                // SAFETY: its own memory, which stays where it is.
                unsafe { rustix::mm::mlock(memory.as_ptr().cast_mut().cast(), 2 << 20) }.unwrap();
            }
            other => panic!("{other:?}"),
        }
    }
    // The test has ended, however it did.
    std::process::exit(0);
}

/// A VMM, in its own process.
struct Vmm {
    /// Where it listens.
    socket: Option<PathBuf>,
    client: Option<UnixStream>,
    /// What its balloon takes from, bytes: its guest's memory at its start, and a DIMM.
    all: u64,
    /// What its balloon leaves its guest, bytes.
    actual: u64,
    /// What it was last asked for.
    wanted: u64,
    /// By how much it moves there from one look to the next, at most.
    pace: u64,
    /// When its guest told statistics last, seconds since 1970; 0 is never. None: just now.
    told: Option<u64>,
    /// QEMU's word for whether it runs, or why not.
    status: String,
    /// The next to ask what its balloon holds gets no answer.
    deaf: bool,
}

impl Vmm {
    /// Its balloon is let down in the same moment: nobody hears of that.
    fn hang_up(&mut self) {
        (self.actual, self.wanted) = (self.all, self.all);
        if let Some(client) = self.client.take() {
            // Who was connected may have gone by itself.
            let _ = client.shutdown(Shutdown::Both);
        }
    }

    fn say(&self, event: &str) {
        let time = json!({ "seconds": now(), "microseconds": 0 });
        let event = json!({ "event": event, "timestamp": time });
        // In one piece: an answer may be on its way.
        self.client.as_ref().unwrap().write_all(format!("{event}\n").as_bytes()).unwrap();
    }

    fn answer(&mut self, command: &str, args: &Value) -> Value {
        match command {
            "qmp_capabilities" => {
                println!("client");
                json!({})
            }
            "qom-list" if args["path"] == "/machine/peripheral" => {
                json!([{ "name": "balloon0", "type": "child<virtio-balloon-pci>" }])
            }
            "qom-list" | "query-blockstats" => json!([]),
            "qom-get" => {
                let available = self.actual.saturating_sub(8 * MIB);
                let stats =
                    json!({ "stat-total-memory": self.all, "stat-available-memory": available });
                json!({ "stats": stats, "last-update": self.told.unwrap_or_else(now) })
            }
            "query-balloon" => {
                let pace = self.actual.abs_diff(self.wanted).min(self.pace);
                let grows = self.actual < self.wanted;
                self.actual = if grows { self.actual + pace } else { self.actual - pace };
                json!({ "actual": self.actual })
            }
            "balloon" => {
                self.wanted = args["value"].as_u64().unwrap().min(self.all);
                println!("balloon {}", self.wanted / MIB);
                json!({})
            }
            "query-memory-devices" if self.all > SIZE => {
                json!([{ "type": "dimm", "data": { "id": "dimm0", "size": self.all - SIZE } }])
            }
            "query-memory-devices" => json!([]),
            "query-status" => {
                json!({ "running": self.status == "running", "status": self.status })
            }
            "query-memory-size-summary" => json!({ "base-memory": SIZE }),
            "query-memdev" => json!([{ "id": "mem", "size": SIZE, "share": false }]),
            "query-kvm" => json!({ "enabled": false }),
            "human-monitor-command" => json!(""),
            _ => json!({}),
        }
    }
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// One client after the other, as QEMU does.
fn serve(vmm: &Mutex<Vmm>) {
    let mut listens: Option<(PathBuf, UnixListener)> = None;
    loop {
        let wanted = vmm.lock().unwrap().socket.clone();
        if listens.as_ref().map(|(path, _)| path) != wanted.as_ref() {
            if let Some((path, listener)) = listens.take() {
                drop(listener);
                std::fs::remove_file(path).unwrap();
                println!("gone");
            }
            if let Some(path) = wanted {
                let listener = UnixListener::bind(&path).unwrap();
                listener.set_nonblocking(true).unwrap();
                listens = Some((path, listener));
                println!("listens");
            }
        }
        match listens.as_ref().map(|(_, listener)| listener.accept()) {
            Some(Ok((stream, _))) => attend(vmm, stream),
            _ => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// Until either side ends the connection.
fn attend(vmm: &Mutex<Vmm>, stream: UnixStream) {
    let mut words = stream.try_clone().unwrap();
    vmm.lock().unwrap().client = Some(stream.try_clone().unwrap());
    let greeting = json!({ "QMP": { "version": {}, "capabilities": [] } });
    let mut goes_on = writeln!(words, "{greeting}").is_ok();
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    while let Some(line) = lines.next().filter(|_| goes_on) {
        let asked: Value = serde_json::from_str(&line).unwrap();
        let mut vmm = vmm.lock().unwrap();
        // What was on its way when it hung up is not carried out.
        if vmm.client.is_none() {
            return;
        }
        if asked["execute"] == "query-balloon" && std::mem::take(&mut vmm.deaf) {
            println!("deaf");
            continue;
        }
        let answer = vmm.answer(asked["execute"].as_str().unwrap(), &asked["arguments"]);
        drop(vmm);
        let answer = json!({ "return": answer, "id": asked["id"] });
        goes_on = words.write_all(format!("{answer}\n").as_bytes()).is_ok();
    }
    vmm.lock().unwrap().client = None;
}

/// A VMM, from the side of the test. Ended when dropped.
struct Stranger {
    child: Child,
    socket: PathBuf,
    /// What it told, line by line.
    told: Arc<Mutex<Vec<String>>>,
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Stranger {
    /// Returns when it listens. `with`: what is special about it.
    fn start(socket: PathBuf, with: &[(&str, u64)]) -> Stranger {
        let with = with.iter().map(|(name, value)| (*name, value.to_string()));
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "vmm_process", "--ignored", "--nocapture", "--test-threads=1"])
            .env("VMM_SOCKET", &socket)
            .envs(with)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let told = Arc::new(Mutex::new(Vec::new()));
        let all = told.clone();
        std::thread::spawn(move || {
            lines.map_while(Result::ok).for_each(|line| all.lock().unwrap().push(line));
        });
        let stranger = Stranger { child, socket, told };
        stranger.has_told("listens", 1);
        stranger
    }

    /// Attached to, with a limit that only its balloon keeps it within.
    async fn limited(ballastd: &Ballastd) -> Stranger {
        let stranger = Stranger::attached(ballastd, &[]).await;
        let limit = VmChange { max: Some(SIZE - TAKEN), ..VmChange::default() };
        ballastd.client.change("vm", &limit).await.unwrap();
        stranger.is_led(ballastd, 0).await;
        stranger
    }

    async fn attached(ballastd: &Ballastd, with: &[(&str, u64)]) -> Stranger {
        let stranger = Stranger::start(ballastd.root.join("vm.qmp"), with);
        ballastd.client.attach(&stranger.spec()).await.unwrap();
        stranger
    }

    fn spec(&self) -> AttachSpec {
        AttachSpec {
            name: "vm".into(),
            qmp: self.socket.clone(),
            min: 0,
            shares: None,
            tax: None,
            pool: None,
        }
    }

    fn ask(&mut self, what: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{what}").unwrap();
    }

    /// It listens at `socket`, and nowhere else.
    fn come(&mut self, socket: PathBuf) {
        let before = self.count("listens");
        self.ask(&format!("come {}", socket.display()));
        self.socket = socket;
        self.has_told("listens", before + 1);
    }

    /// It listens nowhere.
    fn go(&mut self) {
        let before = self.count("gone");
        self.ask("go");
        self.has_told("gone", before + 1);
    }

    fn count(&self, line: &str) -> usize {
        self.told.lock().unwrap().iter().filter(|told| *told == line).count()
    }

    /// What was asked of its balloon so far, each time, in MiB that it is to leave.
    fn asked(&self) -> Vec<u64> {
        let told = self.told.lock().unwrap();
        let asked = told.iter().filter_map(|line| line.strip_prefix("balloon "));
        asked.map(|mib| mib.parse().unwrap()).collect()
    }

    fn has_told(&self, line: &str, times: usize) {
        wait(line, || (self.count(line) >= times).then_some(()));
    }

    /// Its balloon is, by commands beyond those `before`, what its limit makes it.
    async fn is_led(&self, ballastd: &Ballastd, before: usize) {
        ballastd
            .eventually("its balloon is led", async || {
                let balloon = ballastd.vm("vm").await.balloon;
                self.count(ASKED) > before
                    && balloon.health == BalloonHealth::Healthy
                    && (balloon.target, balloon.reported) == (TAKEN, TAKEN)
            })
            .await;
    }
}

async fn is_missing(ballastd: &Ballastd) {
    ballastd
        .eventually("its balloon is out of reach", async || {
            ballastd.vm("vm").await.balloon.health == BalloonHealth::Missing
        })
        .await;
}

async fn has_state(ballastd: &Ballastd, state: RunState) {
    ballastd
        .eventually("its state is known", async || ballastd.vm("vm").await.state == state)
        .await;
}

fn log(ballastd: &Ballastd) -> String {
    std::fs::read_to_string(ballastd.log()).unwrap()
}

/// Another process at that socket: greets the first client, and says yes to all it asks. What that was.
fn impostor(socket: &Path) -> JoinHandle<Vec<String>> {
    let listener = UnixListener::bind(socket).unwrap();
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut words = stream.try_clone().unwrap();
        let mut heard = Vec::new();
        let _ = writeln!(words, "{}", json!({ "QMP": {} }));
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            let asked: Value = serde_json::from_str(&line).unwrap();
            heard.push(asked["execute"].as_str().unwrap().to_owned());
            let _ = writeln!(words, "{}", json!({ "return": {}, "id": asked["id"] }));
        }
        heard
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_its_vmm_closes_is_made_again() {
    let ballastd = Ballastd::start(&["--budget", "256M"]);
    let mut vmm = Stranger::limited(&ballastd).await;
    // It hangs up, and listens on: what its balloon holds is learnt again, and what it is to hold asked for again.
    let asked = vmm.count(ASKED);
    vmm.ask("hang-up");
    vmm.is_led(&ballastd, asked).await;
    // It is nowhere to be found for a while, in which its guest is paused.
    let asked = vmm.count(ASKED);
    vmm.go();
    vmm.ask("stop");
    is_missing(&ballastd).await;
    vmm.come(vmm.socket.clone());
    vmm.is_led(&ballastd, asked).await;
    has_state(&ballastd, RunState::Paused).await;
    // And goes on.
    let asked = vmm.count(ASKED);
    vmm.ask("cont");
    vmm.ask("hang-up");
    vmm.is_led(&ballastd, asked).await;
    has_state(&ballastd, RunState::Running).await;
    // Its disk fails: it stands still as well.
    let asked = vmm.count(ASKED);
    vmm.ask("stop io-error");
    vmm.ask("hang-up");
    vmm.is_led(&ballastd, asked).await;
    has_state(&ballastd, RunState::Paused).await;
    // Each time there was one connection, and it was said once.
    assert_eq!(vmm.count("client"), 5);
    let log = log(&ballastd);
    let said = |what: &str| log.lines().filter(|line| line.contains(what)).count();
    assert_eq!((said("out of reach"), said("in reach again"), said("panicked")), (4, 4, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn who_listens_in_the_place_of_a_vmm_is_asked_for_nothing() {
    let mut ballastd = Ballastd::start(&["--budget", "256M"]);
    let mut vmm = Stranger::limited(&ballastd).await;
    let (first, second) = (vmm.socket.clone(), ballastd.root.join("another.qmp"));
    let asked = vmm.count(ASKED);
    vmm.go();
    let other = impostor(&first);
    ballastd
        .eventually("another is found there", async || {
            log(&ballastd).contains("another process listens there")
        })
        .await;
    wait("it is left alone", || other.is_finished().then_some(()));
    assert_eq!(other.join().unwrap(), ["qmp_capabilities"]);
    is_missing(&ballastd).await;
    // It is the VM that it was when it is attached again, wherever it listens by then.
    vmm.come(second.clone());
    ballastd.client.attach(&vmm.spec()).await.unwrap();
    vmm.is_led(&ballastd, asked).await;

    // The next manager finds it where it was last, though not at once.
    let asked = vmm.count(ASKED);
    ballastd.kill();
    vmm.go();
    ballastd.restart();
    is_missing(&ballastd).await;
    vmm.come(second);
    vmm.is_led(&ballastd, asked).await;
}

/// As libvirt makes the socket of its QEMU's first monitor: the kernel names who made it.
#[tokio::test(flavor = "multi_thread")]
async fn who_made_a_socket_and_has_no_guest_is_not_attached_to() {
    let ballastd = Ballastd::start(&["--budget", "256M"]);
    let socket = ballastd.root.join("handed.qmp");
    let vmm = Vmm {
        socket: Some(socket.clone()),
        client: None,
        all: SIZE,
        actual: SIZE,
        wanted: SIZE,
        pace: u64::MAX,
        told: None,
        status: "running".to_owned(),
        deaf: false,
    };
    // Here, where nobody has memory of that size.
    std::thread::spawn(move || serve(&Mutex::new(vmm)));
    wait("it listens", || socket.exists().then_some(()));
    let spec = |name: &str| AttachSpec {
        name: name.into(),
        qmp: socket.clone(),
        min: 0,
        shares: None,
        tax: None,
        pool: None,
    };
    let client = &ballastd.client;
    let why = format!("process {} ", std::process::id());
    refused_as(client.attach(&spec("handed")).await, ErrorCode::BadRequest, &why);
    let why = "made this socket and does not have its guest's memory (64 MiB)";
    refused_as(client.attach(&spec("handed")).await, ErrorCode::BadRequest, why);
    assert!(ballastd.is_gone("handed").await && !ballastd.folder("handed").exists());
    // Nor where its VMM has come by itself.
    let known = Stranger::attached(&ballastd, &[]).await;
    let why = format!("'vm' runs already, as {}; {} made", known.child.id(), std::process::id());
    refused_as(client.attach(&spec("vm")).await, ErrorCode::Conflict, &why);
}

/// QEMU's balloon takes from DIMMs, too, and tells its size as what that leaves of both.
#[tokio::test(flavor = "multi_thread")]
async fn a_dimm_is_not_taken_with_the_balloon() {
    let mut ballastd = Ballastd::start(&["--budget", "256M"]);
    let vmm = Stranger::attached(&ballastd, &[("VMM_DIMM", 64)]).await;
    let limit = VmChange { max: Some(SIZE - TAKEN), ..VmChange::default() };
    ballastd.client.change("vm", &limit).await.unwrap();
    ballastd
        .eventually("its balloon is led", async || {
            ballastd.vm("vm").await.balloon.reported == TAKEN
        })
        .await;
    let asked = vmm.asked();
    assert!(asked.iter().all(|left| (104..=128).contains(left)), "{asked:?}");
    assert_eq!(asked.last(), Some(&104));
    // All is given back when it is let go of.
    ballastd.client.shutdown(true).await.unwrap();
    assert!(ballastd.end().success());
    assert_eq!(vmm.asked().last(), Some(&128));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_balloon_that_is_let_go_of_is_asked_for_nothing_more() {
    let slow = "[balloon]\ndeflate_rate_mib_s = 1\n";
    let mut ballastd = Ballastd::start_configured(&["--budget", "256M"], slow);
    let mut vmm = Stranger::limited(&ballastd).await;
    // Its guest takes seconds to have it back.
    vmm.ask("slow");
    ballastd.client.shutdown(true).await.unwrap();
    assert!(ballastd.end().success());
    let asked = vmm.asked();
    let first = asked.iter().position(|left| *left == 64).expect("it is let down");
    assert!(asked[first..].iter().all(|left| *left == 64), "{asked:?}");
    let log = log(&ballastd);
    assert!(log.contains("left, with all its memory"), "{log}");
}

/// Also of a guest whose statistics come late after the manager was replaced, or not at all.
#[tokio::test(flavor = "multi_thread")]
async fn a_balloon_that_holds_something_is_not_let_down_at_once() {
    let slow = "[balloon]\ndeflate_rate_mib_s = 1\n";
    let ballastd = Ballastd::start_configured(&["--budget", "256M"], slow);
    let vmm = Stranger::attached(&ballastd, &[("VMM_HOLDS", 24), ("VMM_TOLD", 0)]).await;
    let asked = wait("its balloon is led", || Some(vmm.asked()).filter(|asked| asked.len() > 2));
    assert!(asked[..3].iter().all(|left| *left <= 48), "{asked:?}");
}

/// Its VMM does not say in time what its balloon holds: it is asked again, and not let down meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn a_balloon_of_which_is_not_known_what_it_holds_is_not_let_down_for_that() {
    let slow = "[balloon]\ndeflate_rate_mib_s = 1\n";
    let ballastd = Ballastd::start_configured(&["--budget", "256M"], slow);
    let vmm = Stranger::attached(&ballastd, &[("VMM_HOLDS", 24), ("VMM_DEAF", 1)]).await;
    let asked = wait("its balloon is led", || Some(vmm.asked()).filter(|asked| asked.len() > 2));
    assert!(asked[..3].iter().all(|left| *left <= 48), "{asked:?}");
    assert_eq!((vmm.count("deaf"), vmm.count("client")), (1, 2));
}

/// The guest is rebooted inside of its QEMU: what comes up is to find no balloon that it would inflate at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_balloon_is_let_down_when_its_guest_is_reset_and_led_when_it_is_back() {
    let ballastd = Ballastd::start(&["--budget", "256M"]);
    let mut vmm = Stranger::limited(&ballastd).await;
    let asked = vmm.count(ASKED);
    vmm.ask("reset");
    vmm.has_told("balloon 64", 1);
    is_missing(&ballastd).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(vmm.asked().last(), Some(&64), "there is no driver yet");
    vmm.ask("boot");
    vmm.is_led(&ballastd, asked).await;
}

/// What it gives up does nobody any good from then on, so its balloon is let down.
#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_must_not_be_managed_any_more_has_its_balloon_back() {
    let ballastd = Ballastd::start(&["--budget", "256M"]);
    let mut vmm = Stranger::limited(&ballastd).await;
    vmm.ask("lock");
    // Looked at when QMP is in reach again, or in its turn.
    vmm.ask("hang-up");
    ballastd
        .eventually("its balloon is let down", async || {
            let vm = ballastd.vm("vm").await;
            let is_empty = vm.balloon.target == 0 && vm.balloon.reported == 0;
            vm.management.mode == Mode::Unmanaged && is_empty
        })
        .await;
    let reason = ballastd.vm("vm").await.management.reason.unwrap_or_default();
    assert!(reason.contains("locked"), "{reason}");
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(ballastd.vm("vm").await.balloon.reported, 0);
}
