//! Pages that go away between the look and the read. Privileged.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::mpsc;
use std::time::Duration;

use ballast_sharing::Hasher;
use ballast_uffd::{CopyOpts, DEVICE_PATH, Features, Modes, Uffd};
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};

use super::*;

const PAGES: u64 = 8;

fn skip<T>(why: &str) -> Option<T> {
    let required = std::env::var_os("BALLAST_REQUIRE_PRIVILEGED").is_some_and(|v| v == "1");
    assert!(!required, "must not be skipped here: {why}");
    eprintln!("SKIPPED: {why}");
    None
}

fn uffd() -> Option<Uffd> {
    let device = match File::options().read(true).write(true).open(DEVICE_PATH) {
        Ok(device) => device,
        Err(e) => return skip(&format!("{DEVICE_PATH}: {e}")),
    };
    let uffd = Uffd::from_device(device.as_fd()).unwrap();
    match uffd.handshake(Features::MISSING_SHMEM) {
        Ok(_) => Some(uffd),
        Err(e) => skip(&format!("no userfaults of shared memory: {e}")),
    }
}

/// As if all pages had been there when pagemap was read, and most had left since.
#[test]
fn pages_that_left_are_passed_over_without_a_fault() {
    let Some(uffd) = uffd() else { return };
    let file = memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, PAGES * PAGE).unwrap();
    let (rw, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    let length = (PAGES * PAGE) as usize;
    // SAFETY: a new mapping at a place of the kernel's choice, never unmapped nor referred to.
    let at = unsafe { mmap(std::ptr::null_mut(), length, rw, shared, &file, 0) }.unwrap();
    let start = at as u64;
    // SAFETY: a mapping made for this, reached by its address alone.
    unsafe { uffd.register(HostAddr(start), Bytes(PAGES * PAGE), Modes::MISSING) }.unwrap();
    for page in [0, 5] {
        let opts = CopyOpts { wake: false, protect: false };
        uffd.copy(HostAddr(start + page * PAGE), &[7; PAGE_SIZE], opts).unwrap();
    }
    let pid = std::process::id();
    let process = Process {
        pid,
        vm: None,
        parts: Vec::new(),
        stores: HashMap::new(),
        pagemap: Pagemap::open(pid).unwrap(),
        memory: File::open("/proc/self/mem").unwrap(),
    };
    // In a thread of its own: if it waited for the fault, it would do so for ever.
    let (sender, done) = mpsc::channel();
    std::thread::spawn(move || {
        let mut contents = Contents::new(Hasher::new(b"test", "process"));
        let mut read = Read::default();
        let ended = process.run(start, &mut vec![0; length], &mut contents, &mut read);
        sender.send((ended.is_ok(), read, contents.sorted().repeated())).unwrap();
    });
    let (well, read, repeated) = done.recv_timeout(Duration::from_secs(60)).unwrap();
    assert!(well);
    assert_eq!((read.present, read.unread), (Pages(2), Pages(PAGES - 2)));
    assert_eq!(repeated, Pages(1));
    assert_eq!(fstat(&file).unwrap().st_blocks as u64 * 512, 2 * PAGE);
}
