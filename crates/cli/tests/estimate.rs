//! `ballast share estimate` against processes whose memory is known to the page.
#![allow(clippy::unwrap_used, reason = "a panic here is the test failing")]

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};

use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
use serde_json::Value;

const PAGE: usize = 4096;
const RAM: usize = 32 << 20;
const WHO: &str = "BALLAST_TEST_GUEST";

// Pages of a guest, from the start of its RAM on; the rest is never touched.
const EQUAL: usize = 300;
const ZERO: usize = 100;
const OWN: usize = 200;
/// Further on: pages that are mapped from a store, every other one of them. All hold what the equal
/// ones do; the first are written, the next read, the others not touched where they are mapped.
const STORED_AT: usize = 1000;
const STORED: usize = 20;
const WRITTEN: usize = 6;
const READ: usize = 4;
/// Where the zeros are mapped that stand for nothing, one page read, one not.
const NOTHING_AT: usize = 2000;

/// Not a test but a process for the tests to look at, which they start from this very program.
#[test]
#[ignore = "a process for the other tests to look at"]
fn guest() {
    let Ok(who) = std::env::var(WHO) else { return };
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let memfd = |name: &str| -> OwnedFd {
        let fd = memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, RAM as u64).unwrap();
        fd
    };
    let (ram, store) = (memfd("ram"), memfd("store"));
    let start = if who == "anonymous" {
        // SAFETY: a new mapping at a place of the kernel's choice.
        unsafe { mmap_anonymous(std::ptr::null_mut(), RAM, protection, MapFlags::PRIVATE) }
    } else {
        // SAFETY: a new mapping at a place of the kernel's choice.
        unsafe { mmap(std::ptr::null_mut(), RAM, protection, MapFlags::SHARED, &ram, 0) }
    };
    let start = start.unwrap().cast::<u8>();
    let fill = |page: usize, content: &[u8]| {
        // SAFETY: inside the mapping of RAM bytes, which nothing else in this process refers to.
        let bytes = unsafe { std::slice::from_raw_parts_mut(start.add(page * PAGE), PAGE) };
        bytes.fill(0);
        bytes[PAGE - content.len()..].copy_from_slice(content);
    };
    for page in 0..EQUAL {
        fill(page, b"common to all");
    }
    for page in EQUAL..EQUAL + ZERO {
        fill(page, b"");
    }
    for page in EQUAL + ZERO..EQUAL + ZERO + OWN {
        fill(page, format!("{who} {page}").as_bytes());
    }
    if who != "anonymous" {
        for i in 0..STORED {
            let place = start.wrapping_add((STORED_AT + 2 * i) * PAGE).cast();
            let content = [&[0; PAGE - 13][..], b"common to all"].concat();
            rustix::io::pwrite(&store, &content, (i * PAGE) as u64).unwrap();
            // SAFETY: over a page of the mapping above that nothing refers to.
            unsafe {
                let (flags, offset) = (MapFlags::PRIVATE | MapFlags::FIXED, (i * PAGE) as u64);
                mmap(place, PAGE, protection, flags, &store, offset).unwrap();
            }
            if i < WRITTEN {
                fill(STORED_AT + 2 * i, format!("{who} broke {i}").as_bytes());
            } else if i < WRITTEN + READ {
                // SAFETY: a byte of the page that was just mapped.
                assert_eq!(unsafe { place.cast::<u8>().read_volatile() }, 0);
            }
        }
    }
    if who != "anonymous" {
        let zeros = memfd_create("zeros", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&zeros, 2 << 20).unwrap();
        let place = start.wrapping_add(NOTHING_AT * PAGE).cast();
        // SAFETY: over two pages of the mapping above that nothing refers to; then a byte of it.
        unsafe {
            let flags = MapFlags::PRIVATE | MapFlags::FIXED;
            mmap(place, 2 * PAGE, protection, flags, &zeros, 0).unwrap();
            assert_eq!(place.cast::<u8>().read_volatile(), 0);
        }
    }
    let tell = || println!("\nblocks {}", fstat(ram.as_fd()).unwrap().st_blocks);
    tell();
    for line in std::io::stdin().lines() {
        line.unwrap();
        tell();
    }
}

struct Guest {
    child: Child,
    ask: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    blocks: u64,
}

impl Guest {
    fn start(who: &str) -> Guest {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "guest", "--ignored", "--nocapture"])
            .env(WHO, who)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        let mut guest = Guest { ask: child.stdin.take(), child, answers, blocks: 0 };
        guest.blocks = guest.answer();
        guest
    }

    fn answer(&mut self) -> u64 {
        let mut lines = self.answers.by_ref().lines().map(Result::unwrap);
        let blocks = lines.find_map(|line| line.strip_prefix("blocks ").map(str::to_owned));
        blocks.unwrap().parse().unwrap()
    }

    /// What its RAM file takes now, in blocks of 512 bytes.
    fn blocks_now(&mut self) -> u64 {
        self.ask.as_mut().unwrap().write_all(b"\n").unwrap();
        self.answer()
    }

    fn pid(&self) -> String {
        self.child.id().to_string()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // It ends with its standard input.
        self.ask = None;
        let _ = self.child.wait();
    }
}

fn estimate(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ballast"))
        .args(["share", "estimate"])
        .args(arguments)
        .env("BALLAST_SOCKET", "/nonexistent/api.sock")
        .output()
        .unwrap()
}

/// The estimate as JSON, or None after saying loudly that the test is skipped.
fn found(arguments: &[&str]) -> Option<Value> {
    let output = estimate(&[arguments, &["--json"]].concat());
    let errors = String::from_utf8_lossy(&output.stderr);
    // Pages that are shared already are read from their file, which takes root's rights.
    let link = std::fs::read_dir("/proc/self/map_files").and_then(|mut links| {
        let link = links.next().unwrap()?;
        std::fs::File::open(link.path())
    });
    let denied = matches!(&link, Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied);
    if denied || errors.contains("may not be read") {
        let required = std::env::var_os("BALLAST_REQUIRE_PRIVILEGED").is_some_and(|v| v == "1");
        assert!(!required, "must not be skipped here: {link:?} {errors}");
        eprintln!("SKIPPED: no right to read other processes: {link:?} {errors}");
        return None;
    }
    assert_eq!((output.status.code(), &*errors), (Some(0), ""));
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

fn pages(value: &Value) -> u64 {
    value.as_u64().unwrap() / PAGE as u64
}

#[test]
fn pages_are_counted_exactly_and_none_is_allocated() {
    let (mut a, mut b) = (Guest::start("a"), Guest::start("b"));
    let Some(found) = found(&[&a.pid(), &b.pid()]) else { return };
    let shown = EQUAL + STORED - WRITTEN;
    let present = (EQUAL + ZERO + OWN + STORED) as u64;
    for (process, guest) in found["processes"].as_array().unwrap().iter().zip([&a, &b]) {
        assert_eq!(process["pid"], guest.child.id());
        assert_eq!(process["guest_ram"], RAM as u64);
        assert_eq!(pages(&process["present"]), present);
        assert_eq!(pages(&process["zero"]), ZERO as u64);
        assert_eq!(pages(&process["repeated_inside"]), shown as u64 - 1);
        assert_eq!(pages(&process["shared_now"]), (STORED - WRITTEN) as u64);
        assert_eq!(pages(&process["unread"]), 0);
    }
    let total = &found["total"];
    assert_eq!(pages(&total["present"]), 2 * present);
    assert_eq!(pages(&total["zero"]), 2 * ZERO as u64);
    assert_eq!(pages(&total["repeated_inside"]), 2 * (shown as u64 - 1));
    assert_eq!(pages(&total["repeated_across"]), 2 * shown as u64 - 1);
    assert_eq!(found["most_repeated"][0]["copies"], 2 * shown as u64);
    assert_eq!(found["most_repeated"].as_array().unwrap().len(), 1);
    for guest in [&mut a, &mut b] {
        assert_eq!(guest.blocks_now(), guest.blocks);
    }
}

#[test]
fn one_process_twice_is_one_and_the_text_says_what_the_json_says() {
    let a = Guest::start("a");
    let Some(twice) = found(&[&a.pid(), &a.pid()]) else { return };
    assert_eq!(twice["processes"].as_array().unwrap().len(), 1);
    assert_eq!(twice["total"]["repeated_across"], twice["total"]["repeated_inside"]);
    let output = estimate(&[&a.pid(), "--rate-mib-s", "1000"]);
    let text = String::from_utf8(output.stdout).unwrap();
    for part in ["32 MiB", "SHARED NOW", "400 KiB (16.1%)", "1 process, 2.42 MiB present"] {
        assert!(text.contains(part), "{part} is not in:\n{text}");
    }
}

#[test]
fn a_guest_of_anonymous_memory_is_found_too() {
    let a = Guest::start("anonymous");
    let Some(found) = found(&[&a.pid()]) else { return };
    // Neighbours of the process's own may have become one with it.
    let process = &found["processes"][0];
    assert!(process["guest_ram"].as_u64().unwrap() >= RAM as u64, "{process}");
    assert!(pages(&process["present"]) >= (EQUAL + ZERO + OWN) as u64, "{process}");
    assert!(pages(&process["present"]) < (RAM / PAGE / 2) as u64, "{process}");
    assert!(pages(&process["zero"]) >= ZERO as u64, "{process}");
    assert!(pages(&process["repeated_inside"]) >= EQUAL as u64 - 1, "{process}");
}

#[test]
fn what_cannot_be_estimated_is_told_in_one_line() {
    let a = Guest::start("a");
    let refused = |output: Output, expected: &str| {
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(1), &b""[..]), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(text.contains(expected), "{text}");
    };
    // Above the largest number that the kernel gives a process.
    refused(estimate(&["4194305"]), "there is no process 4194305");
    if found(&[&a.pid()]).is_none() {
        return;
    }
    refused(estimate(&[&a.pid(), "--min-size", "64M"]), "no mapping of 64 MiB or more");
    // The same as a user who may not read it; it must reach the program.
    let folder = tempfile::tempdir().unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder.path(), open).unwrap();
    let program = folder.path().join("ballast");
    std::fs::copy(env!("CARGO_BIN_EXE_ballast"), &program).unwrap();
    let mut other = Command::new(&program);
    other.args(["share", "estimate", &a.pid()]);
    if rustix::process::geteuid().is_root() {
        other.uid(65534).gid(65534);
        refused(other.output().unwrap(), "may not be read: Permission denied");
    }
}
