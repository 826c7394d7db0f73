//! What the pager relies on, asserted against the running kernel. Privileged.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::ffi::c_void;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::thread::JoinHandle;
use std::time::Duration;

use ballast_uffd::*;
use ballast_units::{Bytes, HostAddr, PAGE_SIZE};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};

const PAGE: u64 = PAGE_SIZE as u64;
const PAGES: u64 = 16;
const FEATURES: Features = Features::PAGEFAULT_FLAG_WP
    .union(Features::MISSING_SHMEM)
    .union(Features::WP_HUGETLBFS_SHMEM)
    .union(Features::WP_UNPOPULATED)
    .union(Features::EVENT_REMOVE)
    .union(Features::EXACT_ADDRESS);
const FILL: CopyOpts = CopyOpts { wake: true, protect: false };

fn skip<T>(why: &str) -> Option<T> {
    let required = std::env::var_os("BALLAST_REQUIRE_PRIVILEGED").is_some_and(|v| v == "1");
    assert!(!required, "must not be skipped here: {why}");
    eprintln!("SKIPPED: {why}");
    None
}

/// A memfd mapped shared, as a guest's RAM is, and registered.
struct Ram {
    uffd: Uffd,
    file: File,
    base: HostAddr,
}

impl Ram {
    fn new() -> Option<Ram> {
        let uffd = match File::options().read(true).write(true).open(DEVICE_PATH) {
            Ok(device) => Uffd::from_device(device.as_fd()).unwrap(),
            Err(e) => return skip(&format!("{DEVICE_PATH}: {e}")),
        };
        match uffd.handshake(FEATURES) {
            Ok(has) => assert!(has.contains(FEATURES)),
            Err(e) => return skip(&format!("Linux 6.4 or newer is needed: {e}")),
        }
        let file = memfd_create("ram", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, PAGES * PAGE).unwrap();
        let rw = ProtFlags::READ | ProtFlags::WRITE;
        let len = (PAGES * PAGE) as usize;
        // SAFETY: a new mapping, never unmapped, reached through volatile accesses only.
        let at =
            unsafe { mmap(std::ptr::null_mut(), len, rw, MapFlags::SHARED, &file, 0) }.unwrap();
        let base = HostAddr(at as u64);
        // SAFETY: a mapping made for this, reached by its address alone.
        let ioctls =
            unsafe { uffd.register(base, Bytes(PAGES * PAGE), Modes::MISSING | Modes::WP) }
                .unwrap();
        assert!(ioctls.contains(Ioctls::COPY | Ioctls::ZEROPAGE | Ioctls::WRITEPROTECT));
        Some(Ram { uffd, file: File::from(file), base })
    }

    fn at(&self, page: u64) -> HostAddr {
        HostAddr(self.base.0 + page * PAGE)
    }

    /// Touches in a thread of its own, as a vCPU does: it may have to wait.
    fn read(&self, page: u64) -> JoinHandle<u64> {
        let at = self.at(page).0;
        // SAFETY: inside the mapping, which is never unmapped.
        std::thread::spawn(move || unsafe { (at as *const u64).read_volatile() })
    }

    fn write(&self, page: u64, value: u64) -> JoinHandle<()> {
        let at = self.at(page).0;
        // SAFETY: as above; each test writes a page from one thread at a time.
        std::thread::spawn(move || unsafe { (at as *mut u64).write_volatile(value) })
    }

    /// The next events; waits for one.
    fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        while self.uffd.read_events(&mut events).unwrap() == 0 {
            poll(&mut [PollFd::new(&self.uffd, PollFlags::IN)], None).unwrap();
        }
        events
    }

    fn event(&self) -> Event {
        let mut events = self.events();
        assert_eq!(events.len(), 1, "{events:?}");
        events.remove(0)
    }

    fn nothing_to_tell(&self) -> bool {
        self.uffd.read_events(&mut Vec::new()).unwrap() == 0
    }

    fn punch(&self, page: u64) {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.file, hole, page * PAGE, PAGE).unwrap();
    }
}

fn page_of(value: u64) -> Vec<u8> {
    let mut page = vec![0; PAGE_SIZE];
    page[..8].copy_from_slice(&value.to_ne_bytes());
    page
}

#[test]
fn who_waits_is_counted_until_he_is_woken() {
    let Some(ram) = Ram::new() else { return };
    let wait_for = |wanted| {
        for _ in 0..60_000 {
            if ram.uffd.waiters().unwrap() == wanted {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("{:?} instead of {wanted:?}", ram.uffd.waiters());
    };
    wait_for(Waiters::default());
    let guest = ram.read(3);
    wait_for(Waiters { unread: 1, read: 0 });
    let mut events = Vec::new();
    assert_eq!(ram.uffd.read_events(&mut events).unwrap(), 1);
    assert_eq!(ram.uffd.waiters().unwrap(), Waiters { unread: 0, read: 1 });
    // Who is let try again, and finds nothing, waits with a fault that is new.
    ram.uffd.wake(ram.base, Bytes(PAGES * PAGE)).unwrap();
    wait_for(Waiters { unread: 1, read: 0 });
    assert_eq!(ram.uffd.zeropage(ram.at(3), PAGE_SIZE, true), Ok(PAGE_SIZE));
    assert_eq!((guest.join().unwrap(), ram.uffd.waiters().unwrap()), (0, Waiters::default()));
}

#[test]
fn a_missing_page_is_told_and_filled_by_copy_and_by_zeros() {
    let Some(ram) = Ram::new() else { return };
    assert!(ram.nothing_to_tell());
    let reader = ram.read(3);
    match ram.event() {
        Event::Missing { addr, write: false } => assert_eq!(addr, ram.at(3)),
        other => panic!("{other:?}"),
    }
    assert_eq!(ram.uffd.copy(ram.at(3), &page_of(42), FILL), Ok(PAGE_SIZE));
    assert_eq!(reader.join().unwrap(), 42);
    let mut word = [0; 8];
    ram.file.read_exact_at(&mut word, 3 * PAGE).unwrap();
    assert_eq!(u64::from_ne_bytes(word), 42, "it is the page of the file");

    let writer = ram.write(4, 7);
    assert!(matches!(ram.event(), Event::Missing { write: true, .. }));
    assert_eq!(ram.uffd.zeropage(ram.at(4), PAGE_SIZE, true), Ok(PAGE_SIZE));
    writer.join().unwrap();
    assert_eq!(ram.read(4).join().unwrap(), 7);
}

#[test]
fn a_waiter_that_was_not_woken_waits_until_it_is() {
    let Some(ram) = Ram::new() else { return };
    let reader = ram.read(0);
    ram.event();
    let quiet = CopyOpts { wake: false, protect: false };
    assert_eq!(ram.uffd.copy(ram.at(0), &page_of(1), quiet), Ok(PAGE_SIZE));
    std::thread::sleep(Duration::from_millis(50));
    assert!(!reader.is_finished());
    ram.uffd.wake(ram.at(0), Bytes(PAGE)).unwrap();
    assert_eq!(reader.join().unwrap(), 1);
}

#[test]
fn a_present_page_is_not_overwritten_and_partial_progress_is_reported() {
    let Some(ram) = Ram::new() else { return };
    ram.uffd.copy(ram.at(2), &page_of(2), FILL).unwrap();
    assert_eq!(ram.uffd.copy(ram.at(2), &page_of(9), FILL), Err(UffdError::Exists));
    assert_eq!(ram.read(2).join().unwrap(), 2);
    let four = page_of(5).repeat(4);
    assert_eq!(ram.uffd.copy(ram.at(0), &four, FILL), Ok(2 * PAGE_SIZE));
    assert_eq!(ram.uffd.copy(ram.at(2), &four[2 * PAGE_SIZE..], FILL), Err(UffdError::Exists));
    assert_eq!(ram.uffd.zeropage(ram.at(2), PAGE_SIZE, true), Err(UffdError::Exists));
}

#[test]
fn a_page_of_the_file_that_is_not_mapped_needs_no_fault() {
    let Some(ram) = Ram::new() else { return };
    ram.file.write_all_at(&page_of(8), PAGE).unwrap();
    assert_eq!(ram.read(1).join().unwrap(), 8);
    assert!(ram.nothing_to_tell());
}

#[test]
fn protected_pages_trap_writes_and_only_those() {
    let Some(ram) = Ram::new() else { return };
    ram.uffd.copy(ram.at(1), &page_of(1), FILL).unwrap();
    ram.file.write_all_at(&page_of(2), 2 * PAGE).unwrap();
    // One is in the page table, the other in the file only.
    ram.uffd.protect(ram.at(1), Bytes(2 * PAGE)).unwrap();
    for page in [1, 2] {
        assert_eq!(ram.read(page).join().unwrap(), page);
        let writer = ram.write(page, 50 + page);
        match ram.event() {
            Event::Protected { addr } => assert_eq!(addr, ram.at(page)),
            other => panic!("{other:?}"),
        }
        assert_eq!(ram.read(page).join().unwrap(), page, "the write did not happen");
        ram.uffd.unprotect(ram.at(page), Bytes(PAGE), true).unwrap();
        writer.join().unwrap();
        assert_eq!(ram.read(page).join().unwrap(), 50 + page);
    }
}

#[test]
fn a_page_is_filled_and_protected_in_one_step() {
    let Some(ram) = Ram::new() else { return };
    let opts = CopyOpts { wake: true, protect: true };
    ram.uffd.copy(ram.at(1), &page_of(1), opts).unwrap();
    let writer = ram.write(1, 2);
    assert!(matches!(ram.event(), Event::Protected { .. }));
    ram.uffd.unprotect(ram.at(1), Bytes(PAGE), true).unwrap();
    writer.join().unwrap();
}

#[test]
fn evicting_drops_the_protection_of_what_is_filled_next() {
    let Some(ram) = Ram::new() else { return };
    ram.uffd.copy(ram.at(1), &page_of(1), FILL).unwrap();
    ram.uffd.protect(ram.at(1), Bytes(PAGE)).unwrap();
    let writer = ram.write(1, 2);
    assert!(matches!(ram.event(), Event::Protected { .. }));
    ram.punch(1);
    ram.uffd.wake(ram.at(1), Bytes(PAGE)).unwrap();
    match ram.event() {
        Event::Missing { addr, write: true } => assert_eq!(addr, ram.at(1)),
        other => panic!("{other:?}"),
    }
    ram.uffd.copy(ram.at(1), &page_of(1), FILL).unwrap();
    writer.join().unwrap();
    assert!(ram.nothing_to_tell(), "the refilled page was not protected");
    assert_eq!(ram.read(1).join().unwrap(), 2);
}

#[test]
fn a_discard_is_told_and_holds_everything_up_until_it_is_read() {
    let Some(ram) = Ram::new() else { return };
    ram.uffd.copy(ram.at(5), &page_of(1), FILL).unwrap();
    let at = ram.at(5).0;
    let discard = std::thread::spawn(move || {
        // SAFETY: inside the mapping; the content is this test's to lose.
        unsafe { libc::madvise(at as *mut c_void, 2 * PAGE_SIZE, libc::MADV_REMOVE) }
    });
    poll(&mut [PollFd::new(&ram.uffd, PollFlags::IN)], None).unwrap();
    let page = page_of(3);
    assert_eq!(ram.uffd.copy(ram.at(9), &page, FILL), Err(UffdError::Again));
    assert_eq!(ram.uffd.zeropage(ram.at(9), PAGE_SIZE, true), Err(UffdError::Again));
    assert_eq!(ram.uffd.protect(ram.at(5), Bytes(PAGE)), Err(UffdError::Again));
    assert!(!discard.is_finished());
    match ram.event() {
        Event::Remove { start, end } => assert_eq!((start, end), (ram.at(5), ram.at(7))),
        other => panic!("{other:?}"),
    }
    assert_eq!(discard.join().unwrap(), 0);
    assert_eq!(ram.uffd.copy(ram.at(9), &page, FILL), Ok(PAGE_SIZE));
    let reader = ram.read(5);
    assert!(matches!(ram.event(), Event::Missing { .. }));
    ram.uffd.zeropage(ram.at(5), PAGE_SIZE, true).unwrap();
    assert_eq!(reader.join().unwrap(), 0);
}

#[test]
fn many_faults_come_in_one_reading() {
    let Some(ram) = Ram::new() else { return };
    let readers: Vec<_> = (0..PAGES).map(|p| ram.read(p)).collect();
    let mut seen = Vec::new();
    while seen.len() < PAGES as usize {
        seen.extend(ram.events().into_iter().map(|e| match e {
            Event::Missing { addr, .. } => addr.0,
            other => panic!("{other:?}"),
        }));
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..PAGES).map(|p| ram.at(p).0).collect::<Vec<_>>());
    ram.uffd.zeropage(ram.base, (PAGES * PAGE) as usize, true).unwrap();
    assert!(readers.into_iter().all(|r| r.join().unwrap() == 0));
}

#[test]
fn addresses_are_exact() {
    let Some(ram) = Ram::new() else { return };
    let at = ram.at(2).0 + 123;
    // SAFETY: inside the mapping.
    let reader = std::thread::spawn(move || unsafe { (at as *const u8).read_volatile() });
    assert!(matches!(ram.event(), Event::Missing { addr: HostAddr(a), .. } if a == at));
    ram.uffd.zeropage(ram.at(2), PAGE_SIZE, true).unwrap();
    reader.join().unwrap();
}

#[test]
fn wrong_ranges_are_told_apart() {
    let Some(ram) = Ram::new() else { return };
    let page = page_of(0);
    let odd = HostAddr(ram.base.0 + 1);
    let invalid = |op| Err(UffdError::Other { op, errno: libc::EINVAL });
    assert_eq!(ram.uffd.copy(odd, &page, FILL), invalid("copy"));
    assert_eq!(ram.uffd.copy(ram.base, &page[..100], FILL), invalid("copy"));
    assert_eq!(ram.uffd.wake(odd, Bytes(PAGE)), invalid("wake").map(|_: usize| ()));
    ram.uffd.unregister(ram.at(8), Bytes(8 * PAGE)).unwrap();
    assert_eq!(ram.uffd.copy(ram.at(9), &page, FILL), Err(UffdError::NotRegistered));
    assert_eq!(ram.uffd.protect(ram.at(9), Bytes(PAGE)), Err(UffdError::NotRegistered));
    assert_eq!(ram.read(9).join().unwrap(), 0, "ordinary memory again");
}

#[test]
fn only_a_userfaultfd_is_taken_for_one() {
    let Some(ram) = Ram::new() else { return };
    let copy: OwnedFd = ram.uffd.try_clone().unwrap().into();
    let received = Uffd::from_fd(copy).unwrap();
    assert_eq!(received.zeropage(ram.at(0), PAGE_SIZE, true), Ok(PAGE_SIZE));
    let null = File::open("/dev/null").unwrap();
    let error = Uffd::from_fd(null.into()).unwrap_err();
    assert!(error.to_string().contains("/dev/null"), "{error}");
    let null = File::open("/dev/null").unwrap();
    assert!(Uffd::from_device(null.as_fd()).is_err());
}

#[test]
fn a_handshake_may_be_tried_with_less_but_not_done_twice() {
    let Some(_) = Ram::new() else { return };
    let uffd = Uffd::open().unwrap();
    let unknown = Features::from_bits_retain(1 << 63);
    let wanted = FEATURES | unknown;
    assert_eq!(uffd.handshake(wanted), Err(HandshakeError::Unsupported { wanted }));
    uffd.handshake(FEATURES).unwrap();
    assert!(uffd.handshake(FEATURES).is_err());
}

#[test]
fn a_process_that_is_gone_is_gone() {
    let Some(_) = Ram::new() else { return };
    let (shm, len) = (memfd_create("ram", MemfdFlags::CLOEXEC).unwrap(), PAGE as usize);
    rustix::fs::ftruncate(&shm, PAGE).unwrap();
    let uffd_of_child = uffd_of(|| {
        // In the child: it has its own address space, and registers memory of that.
        let uffd = Uffd::open().ok()?;
        uffd.handshake(FEATURES).ok()?;
        let rw = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping that nobody touches.
        let at = unsafe { mmap(std::ptr::null_mut(), len, rw, MapFlags::SHARED, &shm, 0) }.ok()?;
        // SAFETY: a mapping made for this, reached by its address alone.
        unsafe { uffd.register(HostAddr(at as u64), Bytes(PAGE), Modes::MISSING | Modes::WP) }
            .ok()?;
        Some((uffd, HostAddr(at as u64)))
    });
    let (uffd, at) = uffd_of_child;
    assert_eq!(uffd.copy(at, &page_of(1), FILL), Err(UffdError::Gone));
    assert_eq!(uffd.zeropage(at, PAGE_SIZE, true), Err(UffdError::Gone));
    assert_eq!(uffd.protect(at, Bytes(PAGE)), Err(UffdError::Gone));
    assert_eq!(uffd.read_events(&mut Vec::new()).unwrap(), 0);
}

/// Runs `make` in a forked child, takes over the userfaultfd it makes, and ends the child.
fn uffd_of(make: impl FnOnce() -> Option<(Uffd, HostAddr)>) -> (Uffd, HostAddr) {
    use std::io::{Read, Write};
    use std::os::fd::{AsRawFd, FromRawFd};
    let (mut ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    // SAFETY: the child makes system calls, allocates nothing that another thread may have locked
    // (glibc's fork takes care of malloc), and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        if let Some((uffd, at)) = make() {
            let _ = (&theirs).write_all(&(uffd.as_raw_fd() as u64).to_ne_bytes());
            let _ = (&theirs).write_all(&at.0.to_ne_bytes());
            // SAFETY: waits for the end.
            unsafe { libc::pause() };
        }
        // SAFETY: ends the child without running the parent's code.
        unsafe { libc::_exit(1) };
    }
    drop(theirs);
    let mut words = [0; 16];
    ours.read_exact(&mut words).unwrap();
    let word = |i: usize| u64::from_ne_bytes(words[8 * i..8 * i + 8].try_into().unwrap());
    // SAFETY: plain calls about our own child; the descriptor that pidfd_getfd returns is ours.
    let fd = unsafe {
        let pidfd = libc::syscall(libc::SYS_pidfd_open, child, 0);
        let fd = libc::syscall(libc::SYS_pidfd_getfd, pidfd, word(0), 0);
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        libc::close(pidfd as i32);
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
        OwnedFd::from_raw_fd(fd as i32)
    };
    (Uffd::from_fd(fd).unwrap(), HostAddr(word(1)))
}

#[test]
fn events_are_read_without_waiting_whatever_others_made_of_the_descriptor() {
    let Some(ram) = Ram::new() else { return };
    let duplicate = ram.uffd.try_clone().unwrap();
    let flags = rustix::fs::fcntl_getfl(&duplicate).unwrap();
    rustix::fs::fcntl_setfl(&duplicate, flags - rustix::fs::OFlags::NONBLOCK).unwrap();
    let (say, said) = std::sync::mpsc::channel();
    std::thread::spawn(move || say.send(ram.uffd.read_events(&mut Vec::new()).unwrap()).unwrap());
    assert_eq!(said.recv_timeout(Duration::from_secs(10)), Ok(0), "it waits");
}
