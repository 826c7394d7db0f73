//! VMMs and strangers that mean harm: none of them reads or changes what is another VM's, ends or
//! hangs the manager, or makes it use more than it is entitled to.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic here is the test failing")]

mod support;

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use ballast_api::{Accel, ErrorCode, RunState, VmChange, VmSpec};
use ballast_lab::console::Console;
use ballast_shim_proto::{Batch, Connection, Hello, Message, Part, Step};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use support::evil::{self, Evil, hello, memfd, part, say};
use support::{Ballastd, MIB, PATIENT, ZEROS, image_or_skip, refused_as, required};

const RAM: u64 = 16 << 20;

#[test]
#[ignore = "the hostile VMM of the other tests"]
fn evil_process() {
    evil::play();
}

async fn is_as_before(ballastd: &Ballastd) {
    ballastd
        .eventually("nothing is kept of it", async || {
            let host = ballastd.host().await;
            let folders = std::fs::read_dir(ballastd.run_dir().join("vms")).map(Iterator::count);
            host.vms == 0 && host.free == host.budget - ZEROS && folders.unwrap_or(0) == 0
        })
        .await;
}

fn no_panic(ballastd: &Ballastd) {
    let log = std::fs::read_to_string(ballastd.log()).unwrap();
    assert!(!log.contains("panicked"), "{log}");
}

/// A RAM file that may be sealed, with these seals.
fn sealed(seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("sealed", flags).unwrap();
    rustix::fs::ftruncate(&fd, RAM).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

/// What it would say if it were good.
fn good() -> Hello {
    hello("x", RAM)
}

/// RAM of which there can be none.
async fn impossible_ram_is_refused(ballastd: &Ballastd, socket: &Path, ram: &OwnedFd) {
    let of = |addr: u64, len: u64, file_offset: u64| {
        Message::Hello(Hello { parts: vec![Part { file_offset, ..part(addr, len) }], ..good() })
    };
    const AT: u64 = 0x7000_0000_0000;
    let refusal = |message: &Message| say(socket, message, &[ram.as_fd()]);
    for (message, part) in [
        (of(AT, 0, 0), "empty"),
        (of(AT, RAM + 4096, 0), "RAM file has only"),
        (of(AT, u64::MAX, 0), ""),
        (of(AT, 1 << 46, 0), ""),
        (of(AT, RAM, u64::MAX - 4095), "its end is beyond"),
        (of(AT, RAM, 1), "page boundary"),
        (of(AT, RAM, 4096), "RAM file has only"),
        (of(1, RAM, 0), "page boundary"),
        (of(u64::MAX - 4095, RAM, 0), "its end is beyond"),
        (Message::Hello(Hello { page_size: 0, ..good() }), "pages of 0 bytes"),
        (Message::Hello(Hello { page_size: 1 << 21, ..good() }), "only 4 KiB pages"),
    ] {
        let why = refusal(&message).unwrap_or_else(|| panic!("{message:?}: no answer"));
        assert!(why.contains(part), "{message:?}: {why}");
        is_as_before(ballastd).await;
    }
}

/// Descriptors that are not what they are said to be.
fn other_descriptors_are_refused(socket: &Path, ram: &OwnedFd) {
    let open = |path: &str, flags| rustix::fs::open(path, flags, Mode::empty()).unwrap();
    let on_disk = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    on_disk.as_file().set_len(RAM).unwrap();
    let written = memfd(RAM);
    assert_eq!(rustix::io::write(&written, &[1]), Ok(1));
    let (pipe, _end) = rustix::pipe::pipe().unwrap();
    let (stream, _other) = Connection::pair().unwrap();
    let read_only =
        open(&format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(ram)), OFlags::RDONLY);
    for (fd, part) in [
        (open("/dev/null", OFlags::RDWR), "nor a userfaultfd: /dev/null"),
        (open("/dev/zero", OFlags::RDWR), "nor a userfaultfd: /dev/zero"),
        (open("/dev/shm", OFlags::RDONLY), "nor a userfaultfd: /dev/shm"),
        (pipe, "nor a userfaultfd: pipe:"),
        (stream.into(), "nor a userfaultfd: socket:"),
        (memfd(0), "has only"),
        (memfd(RAM - 1), "has only"),
        (written, "holds something already"),
        (read_only, "not open for writing"),
        (on_disk.reopen().unwrap().into(), "neither memory (a memfd, a file on a tmpfs)"),
        (sealed(SealFlags::WRITE | SealFlags::SEAL), "sealed against writing"),
        (sealed(SealFlags::FUTURE_WRITE | SealFlags::SEAL), "sealed against writing"),
        (sealed(SealFlags::empty()), "can be, sealed against writing"),
    ] {
        let why = say(socket, &Message::Hello(good()), &[fd.as_fd()]).unwrap();
        assert!(why.contains(part), "{part}: {why}");
    }
}

/// Out of turn, and not of the protocol at all.
fn what_is_no_hello_is_refused(socket: &Path) {
    for message in [
        Message::Managed,
        Message::BatchDone { id: 1, done: 1, errno: 0 },
        Message::Batch(Batch::new(1, Vec::new()).unwrap()),
        Message::Failed { step: Step::Create, errno: 1 },
    ] {
        let why = say(socket, &message, &[]).unwrap();
        assert!(why.contains("instead of Hello"), "{why}");
    }
    // One after the other, or there were too many of them.
    let raw = |bytes: &[u8]| {
        let kind = SocketType::SEQPACKET;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
        let fd = fd.unwrap();
        rustix::net::connect(&fd, &SocketAddrUnix::new(socket).unwrap()).unwrap();
        set_socket_timeout(&fd, Timeout::Recv, Some(PATIENT)).unwrap();
        let _ = rustix::net::send(&fd, bytes, SendFlags::NOSIGNAL);
        let mut answer = vec![0; 1 << 16];
        match rustix::net::recv(&fd, &mut *answer, RecvFlags::empty()) {
            Ok((0, _)) | Err(Errno::CONNRESET) => {}
            Ok((n, _)) => {
                let said = Message::decode(&answer[..n]).unwrap();
                assert!(matches!(said, Message::Refuse { .. }), "{bytes:?}: {said:?}");
            }
            Err(e) => panic!("{bytes:?}: {e}"),
        }
    };
    let whole = Message::Hello(good()).encode();
    for n in 0..whole.len() {
        raw(&whole[..n]);
        let mut bad = whole.clone();
        bad[n] ^= 0xff;
        raw(&bad);
    }
    raw(&vec![0xff; 60_000]);
}

/// An opening that ends half way.
async fn half_an_opening_leaves_nothing(ballastd: &Ballastd, socket: &Path, ram: &OwnedFd) {
    for second in ["closes", "wrong descriptor", "out of turn", "failed"] {
        let connection = loop {
            let connection = Connection::connect(socket).unwrap();
            let first = connection.send(&Message::Hello(good()), &[ram.as_fd()]);
            match first.and_then(|()| connection.recv(Some(Duration::from_secs(60)))) {
                Ok((Message::Welcome { .. }, _)) => break connection,
                Ok((Message::Refuse { .. }, _)) | Err(_) => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                Ok(other) => panic!("{other:?}"),
            }
        };
        let ready = Message::Ready { features: u64::MAX, ioctls: u64::MAX };
        let said = match second {
            "closes" => Ok(()),
            "wrong descriptor" => connection.send(&ready, &[ram.as_fd()]),
            "out of turn" => connection.send(&Message::Managed, &[]),
            _ => connection.send(&Message::Failed { step: Step::Register, errno: -1 }, &[]),
        };
        said.unwrap();
        drop(connection);
        is_as_before(ballastd).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nonsense_at_the_shims_socket_is_refused_and_leaves_nothing() {
    let ballastd = Ballastd::start(&["--budget", "64M"]);
    let socket = ballastd.run_dir().join("shim.sock");
    let ram = memfd(RAM);
    impossible_ram_is_refused(&ballastd, &socket, &ram).await;
    let again = Hello { reconnect: true, ..good() };
    let why = say(&socket, &Message::Hello(again), &[ram.as_fd(), ram.as_fd()]).unwrap();
    assert!(why.contains("does not know 'x'"), "{why}");
    other_descriptors_are_refused(&socket, &ram);
    is_as_before(&ballastd).await;
    what_is_no_hello_is_refused(&socket);
    is_as_before(&ballastd).await;
    no_panic(&ballastd);
    // A userfaultfd that is none, and an opening that ends half way.
    if std::fs::File::open("/dev/userfaultfd").is_err() {
        assert!(!required(), "no userfaultfd");
        eprintln!("SKIPPED: the second half of the opening: no userfaultfd");
        return;
    }
    half_an_opening_leaves_nothing(&ballastd, &socket, &ram).await;
    no_panic(&ballastd);
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_say_nothing_keep_no_vm_from_starting() {
    let Some(image) = image_or_skip() else { return };
    let ballastd = Ballastd::start(&["--budget", "192M"]);
    let socket = ballastd.run_dir().join("shim.sock");
    let before = ballastd.host().await.manager_rss;
    // Where a start takes so long that they time out before its end, it says nothing of them.
    for _ in 0..5 {
        let silent: Vec<_> = (0..300).filter_map(|_| Connection::connect(&socket).ok()).collect();
        let view = ballastd.client.run(&ballastd.guest(image, "vm", 96, "")).await.unwrap();
        assert_eq!(view.management.mode, ballast_api::Mode::Paged, "{view:?}");
        assert!(ballastd.host().await.manager_rss < before + 64 * MIB);
        // All that had no place have heard so: they came before it.
        if silent.iter().any(is_open) {
            return no_panic(&ballastd);
        }
        ballastd.client.stop("vm", Duration::ZERO).await.unwrap();
    }
    panic!("it started when they had timed out");
}

/// Whether the other side has not let go of it.
fn is_open(connection: &Connection) -> bool {
    let mut fds = [PollFd::new(connection, PollFlags::RDHUP)];
    poll(&mut fds, Some(&Timespec::default())) == Ok(0)
}

/// One of that name and role, in the trust domain of `good`. More is taken from it than it gives.
async fn join(ballastd: &Ballastd, role: &str, mib: u64) -> Evil {
    let (client, socket) = (&ballastd.client, ballastd.run_dir().join("shim.sock"));
    let evil = Evil::start(&socket, role, role, mib);
    ballastd.eventually("it is known", async || client.vm(role).await.is_ok()).await;
    let salt = VmChange { salt: Some("one".try_into().unwrap()), ..VmChange::default() };
    client.change(role, &salt).await.unwrap();
    // The other's name it does not get.
    let thief = say(&socket, &Message::Hello(hello("good", RAM)), &[memfd(RAM).as_fd()]);
    assert!(thief.unwrap().contains("runs already"), "{role}");
    let limit = VmChange { max: Some(mib * MIB / 2), ..VmChange::default() };
    client.change(role, &limit).await.unwrap();
    evil
}

/// The checks of `good` go on beside some of these, and after them.
async fn they_harm_nobody(ballastd: &Ballastd, console: &mut Console, evil: Vec<(&str, Evil)>) {
    let pid = ballastd.pid();
    ballastd.checks_go_on(console, 3000).await;
    let host = ballastd.host().await;
    assert_eq!(host.pid, pid);
    assert!(host.measured_used <= host.budget, "{host:?}");
    for (role, vmm) in evil {
        drop(vmm);
        ballastd.eventually("it is gone", async || ballastd.is_gone(role).await).await;
        ballastd.assert_nothing_left(role);
        let good = ballastd.vm("good").await;
        assert_eq!((good.state, good.trouble), (RunState::Running, None), "{role}");
    }
}

/// Hostile VMMs in the trust domain of a good one: what it has is whole, whatever they do.
#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_vmm_harms_nobody_but_itself() {
    let Some(image) = image_or_skip() else { return };
    let mut ballastd = Ballastd::prepare(&["--budget", "160M"]);
    let config = ballastd.root.join("ballast.toml");
    let sharing = "[sharing]\ncpu_percent = 100.0\nscan_time_s = 0.1\nrehome_after_ms = 50\n";
    std::fs::write(&config, sharing).unwrap();
    ballastd.add_option("--config", &config);
    ballastd.restart();
    let client = &ballastd.client;
    let work = "verify-torture --mb 40 --threads 2 --seconds 100000";
    let mut spec = ballastd.guest(image, "good", 128, work);
    spec.salt = Some("one".try_into().unwrap());
    client.run(&spec).await.unwrap();
    let mut console = ballastd.console("good");
    ballastd.checks_go_on(&mut console, 100).await;
    // These do something at once. Nothing is taken from one without QMP before it is paged: the checks that count begin then.
    for role in ["floods", "truncates", "unmaps"] {
        let evil = join(&ballastd, role, 48).await;
        ballastd.is_paged(role).await;
        // What floods never answers: what is taken from it is not held up for longer than an answer may take.
        ballastd
            .eventually("it is in trouble, or has as little as it is to have", async || {
                let vm = client.vm(role).await.unwrap();
                if role == "floods" { vm.memory.consumed <= 24 * MIB } else { vm.trouble.is_some() }
            })
            .await;
        they_harm_nobody(&ballastd, &mut console, vec![(role, evil)]).await;
    }
    // And these when they are told to map or protect anything: not before all that they are made of is known.
    let mut told = Vec::new();
    for role in ["liar", "forger", "nonsense", "silent", "vanishes"] {
        told.push((role, join(&ballastd, role, 16).await));
    }
    tokio::task::block_in_place(|| told.iter().for_each(|(_, evil)| evil.says("told")));
    they_harm_nobody(&ballastd, &mut console, told).await;
    no_panic(&ballastd);
    ballastd.checks_go_on(&mut console, 3000).await;
    ballastd.assert_books_balance().await;
    client.shutdown(true).await.unwrap();
    assert!(ballastd.end().success());
    assert!(!ballastd.run_dir().exists() && !ballastd.swap_dir().exists());
}

/// It says that it is a VMM of this version, and never whether it keeps its RAM: nothing is taken from it, and others neither
/// wait for that nor are they promised what it has.
#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_that_is_never_found_fit_is_not_what_others_wait_for() {
    let Some(image) = image_or_skip() else { return };
    let ballastd = Ballastd::start_without_sharing(&["--budget", "160M"]);
    let client = &ballastd.client;
    let socket = ballastd.run_dir().join("shim.sock");
    let _evil = Evil::start(&socket, "evil", "never keeps", 96);
    // Before that it may be fit for all that is known.
    ballastd
        .eventually("its machine counts as built", async || {
            client.vm("evil").await.is_ok_and(|vm| vm.uptime_s > 11.0)
        })
        .await;
    let mut spec =
        ballastd.guest(image, "good", 128, "verify-torture --mb 48 --threads 2 --seconds 100000");
    spec.append += " nowatchdog";
    (spec.no_balloon, spec.min) = (true, 100 * MIB);
    refused_as(client.run(&spec).await, ErrorCode::NoRoom, "evil");
    spec.min = 24 * MIB;
    client.run(&spec).await.unwrap();
    let mut console = ballastd.console("good");
    ballastd.checks_go_on(&mut console, 1000).await;
    ballastd
        .eventually("what cannot be taken is nobody else's", async || {
            let (evil, host) = (ballastd.vm("evil").await, ballastd.host().await);
            let good = ballastd.vm("good").await.memory;
            assert!(evil.management.mode != ballast_api::Mode::Paged, "{evil:?}");
            assert!(evil.memory.consumed >= 96 * MIB, "{evil:?}");
            good.swapped > 0 && good.target + evil.memory.consumed <= host.budget
        })
        .await;
    ballastd.checks_go_on(&mut console, 1000).await;
    client.stop("good", Duration::ZERO).await.unwrap();
}

/// However often a VMM asks to be taken over and breaks that off, its pages are in the books once at most.
#[tokio::test(flavor = "multi_thread")]
async fn takeovers_that_are_broken_off_leave_nothing_in_the_books() {
    if std::fs::File::open("/dev/userfaultfd").is_err() {
        assert!(!required(), "no userfaultfd");
        eprintln!("SKIPPED: no userfaultfd");
        return;
    }
    let mut ballastd = Ballastd::start(&["--budget", "96M"]);
    let evil = Evil::start(&ballastd.run_dir().join("shim.sock"), "evil", "deaf", 16);
    // One that is only known would not be taken over, but go on without a pager.
    ballastd
        .eventually("it is paged", async || {
            ballastd
                .client
                .vm("evil")
                .await
                .is_ok_and(|vm| vm.management.mode == ballast_api::Mode::Paged)
        })
        .await;
    ballastd.kill();
    ballastd.restart();
    ballastd
        .eventually("it has tried often", async || {
            let log = std::fs::read_to_string(ballastd.log()).unwrap();
            log.lines().filter(|line| line.contains("a shim in process")).count() >= 5
        })
        .await;
    let host = ballastd.host().await;
    let used = host.budget - host.free;
    assert!(used < ZEROS + 16 * MIB + 8 * MIB, "{} MiB", used / MIB);
    // Between two tries: for a moment of each it is a VM like others.
    ballastd
        .eventually("it is in trouble", async || {
            ballastd.client.vm("evil").await.is_ok_and(|view| view.trouble.is_some())
        })
        .await;
    drop(evil);
    is_as_before(&ballastd).await;
    ballastd.assert_nothing_left("evil");
    no_panic(&ballastd);
}

/// The pager has its pages, for which it pays: it is not rid of them by saying that it never had any.
#[tokio::test(flavor = "multi_thread")]
async fn who_was_paged_cannot_come_as_if_it_never_was() {
    if std::fs::File::open("/dev/userfaultfd").is_err() {
        assert!(!required(), "no userfaultfd");
        eprintln!("SKIPPED: no userfaultfd");
        return;
    }
    let mut ballastd = Ballastd::start(&["--budget", "96M"]);
    let evil = Evil::start(&ballastd.run_dir().join("shim.sock"), "evil", "anew", 16);
    ballastd.is_paged("evil").await;
    ballastd.kill();
    ballastd.restart();
    tokio::task::block_in_place(|| evil.says("it was paged already"));
    assert!(ballastd.folder("evil").join("pmap").exists());
    // As what it is, it has what it had.
    ballastd.is_paged("evil").await;
    assert!(ballastd.vm("evil").await.memory.consumed >= 16 * MIB);
    drop(evil);
    is_as_before(&ballastd).await;
    ballastd.assert_nothing_left("evil");
    no_panic(&ballastd);
}

/// A VMM has one guest, also while that waits to be taken over.
#[tokio::test(flavor = "multi_thread")]
async fn who_waits_to_be_taken_over_gets_no_second_name() {
    if std::fs::File::open("/dev/userfaultfd").is_err() {
        assert!(!required(), "no userfaultfd");
        eprintln!("SKIPPED: no userfaultfd");
        return;
    }
    let mut ballastd = Ballastd::start(&["--budget", "96M"]);
    let socket = ballastd.run_dir().join("shim.sock");
    let evil = Evil::start(&socket, "evil", "deaf", 16);
    let record = ballastd.run_dir().join("vms/evil/vm.json");
    ballastd.eventually("it is recorded", async || record.exists()).await;
    ballastd.kill();
    // This process has a VM, too, as far as the next manager knows: one that waits.
    let text = std::fs::read_to_string(&record).unwrap();
    let mut known: serde_json::Value = serde_json::from_str(&text).unwrap();
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let after_name = stat.rsplit_once(") ").unwrap().1;
    let started: u64 = after_name.split(' ').nth(19).unwrap().parse().unwrap();
    known["name"] = "mine".into();
    known["pid"] = std::process::id().into();
    known["pid_started"] = started.into();
    let mine = ballastd.run_dir().join("vms/mine");
    std::fs::create_dir(&mine).unwrap();
    std::fs::write(mine.join("vm.json"), known.to_string()).unwrap();
    ballastd.restart();
    let ram = memfd(RAM);
    let why = say(&socket, &Message::Hello(hello("second", RAM)), &[ram.as_fd()]);
    // What is left of VMs is ended with the test: this process is not to be.
    std::fs::remove_dir_all(&mine).unwrap();
    let why = why.unwrap();
    assert!(why.contains("waits to be taken over, as 'mine'"), "{why}");
    assert!(ballastd.client.vm("second").await.is_err());
    drop(evil);
    no_panic(&ballastd);
}

/// A VMM that the manager started with memory to plug, and whose RAM is not what it asked for.
#[tokio::test(flavor = "multi_thread")]
async fn parts_that_were_not_asked_for_are_refused_with_the_reason() {
    let ballastd = Ballastd::start(&["--budget", "128M"]);
    let socket = ballastd.run_dir().join("shim.sock");
    for (case, part) in [
        ("overlap", "its parts overlap"),
        ("same file", "two parts of its RAM are the same file"),
        ("other size", "part 2 of its RAM has 4 MiB, 8 MiB was expected"),
        ("other order", "part 1 of its RAM has 8 MiB, 16 MiB was expected"),
        ("one", "its RAM has one part, 2 parts were expected"),
        ("three", "its RAM has 3 parts, 2 parts were expected"),
        ("beyond", "its RAM file has only 16 MiB"),
        ("used", "was used before all were there"),
    ] {
        let vmm = ballastd.root.join("vmm");
        let text = format!(
            "#!/bin/sh\nexec env EVIL_ROLE=announces EVIL_SOCKET='{}' EVIL_NAME=x EVIL_CASE='{case}' \
             '{}' --exact evil_process --ignored --nocapture --test-threads=1\n",
            socket.display(),
            std::env::current_exe().unwrap().display()
        );
        std::fs::write(&vmm, text).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(&vmm, mode).unwrap();
        let spec = VmSpec {
            name: "x".into(),
            max: RAM,
            hotplug: evil::MORE,
            accel: Accel::Tcg,
            qemu: Some(vmm.clone()),
            kernel: vmm,
            ..VmSpec::default()
        };
        refused_as(ballastd.client.run(&spec).await, ErrorCode::Internal, part);
        is_as_before(&ballastd).await;
    }
    // Of a VMM that somebody else started, one part is taken in.
    let ram = [memfd(RAM), memfd(RAM)];
    let (parts, version) = (vec![part(1 << 40, RAM), part(1 << 41, RAM)], Hello::version_for(2));
    let two = Message::Hello(Hello { parts, version, ..hello("y", RAM) });
    let why = say(&socket, &two, &ram.each_ref().map(|fd| fd.as_fd())).unwrap();
    assert!(why.contains("2 parts, and only one that Ballast started may"), "{why}");
    // More than there may be are no message of the protocol: nobody answers.
    let mut bytes = two.encode();
    bytes[25] = 5;
    let kind = SocketType::SEQPACKET;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
    let fd = fd.unwrap();
    rustix::net::connect(&fd, &SocketAddrUnix::new(&socket).unwrap()).unwrap();
    rustix::net::send(&fd, &bytes, SendFlags::NOSIGNAL).unwrap();
    let connection = Connection::from_fd(fd);
    assert!(connection.recv(Some(Duration::from_secs(60))).is_err());
    is_as_before(&ballastd).await;
    no_panic(&ballastd);
}
