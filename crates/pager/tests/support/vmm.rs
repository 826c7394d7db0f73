//! A VMM process of the tests' own: this test binary, executed again. It maps the RAM file, makes
//! the userfaultfd, hands it over, and lets threads loose on its memory. What both sides count is
//! in a page that they share.

#![allow(dead_code, reason = "each test file uses its own part of this module")]

use std::collections::HashSet;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ballast_pager::guest_ram::{GuestRam, RamLayout, RamPart};
use ballast_uffd::{Features, Modes, Uffd};
use ballast_units::{Bytes, HostAddr, PAGE_SIZE, Pages};
use rustix::io::FdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

/// Counters and flags by index into the shared page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cell {
    Go,
    Stop,
    /// Threads that have verified all and ended.
    Done,
    Errors,
    Accesses,
    Discards,
    /// Progress of a role, as it likes.
    Step,
    /// The manager's wish that threads wait.
    Pause,
    /// Threads that do.
    Paused,
    /// Progress of the manager in its start.
    Phase,
    /// A page that the test wants to be read, and one; 0: it has been.
    Wanted,
}

pub struct Board(*mut u8);

// SAFETY: the page is shared memory of atomics, mapped for the life of the process.
unsafe impl Send for Board {}
// SAFETY: as above.
unsafe impl Sync for Board {}

impl Board {
    fn map(fd: BorrowedFd<'_>) -> Board {
        Board(map_shared(fd, PAGE_SIZE))
    }
    pub fn cell(&self, cell: Cell) -> &AtomicU64 {
        // SAFETY: inside the page, aligned, and only ever used as an atomic.
        unsafe { &*self.0.add(cell as usize * 64).cast::<AtomicU64>() }
    }
    pub fn get(&self, cell: Cell) -> u64 {
        self.cell(cell).load(Ordering::SeqCst)
    }
    pub fn add(&self, cell: Cell, n: u64) {
        self.cell(cell).fetch_add(n, Ordering::SeqCst);
    }
    pub fn subtract(&self, cell: Cell, n: u64) {
        self.cell(cell).fetch_sub(n, Ordering::SeqCst);
    }
    pub fn set(&self, cell: Cell, n: u64) {
        self.cell(cell).store(n, Ordering::SeqCst);
    }
}

pub fn map_shared(fd: BorrowedFd<'_>, len: usize) -> *mut u8 {
    // SAFETY: a fresh mapping, never unmapped.
    unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            len,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            fd,
            0,
        )
        .unwrap()
        .cast()
    }
}

pub fn memfd(name: &str, len: usize) -> OwnedFd {
    use rustix::fs::MemfdFlags;
    let fd =
        rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, len as u64).unwrap();
    fd
}

/// Executes this test binary again, to run one ignored test with these descriptors.
pub fn again(test: &str, fds: &[(&str, BorrowedFd<'_>)], env: &[(&str, String)]) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture", "--test-threads=1"]);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    for (name, fd) in fds {
        rustix::io::fcntl_setfd(fd, FdFlags::empty()).unwrap();
        command.env(name, fd.as_raw_fd().to_string());
    }
    command.envs(env.iter().map(|(k, v)| (*k, v)));
    let child = command.spawn().unwrap();
    for (_, fd) in fds {
        rustix::io::fcntl_setfd(fd, FdFlags::CLOEXEC).unwrap();
    }
    child
}

/// Has one manager after the other manage `vmm`, each for `most` at the longest once it has begun, and kills it:
/// BALLAST_KILLS_BESIDE of them (25). How many.
pub fn kill_managers(vmm: &Vmm, dir: &Path, most: Duration) -> u64 {
    let kills: u64 =
        std::env::var("BALLAST_KILLS_BESIDE").ok().and_then(|s| s.parse().ok()).unwrap_or(25);
    let mut random = Random(0xdead);
    for kill in 0..kills {
        let before = vmm.board.get(Cell::Step);
        let mut child = again(
            "manager_process",
            &[
                ("MANAGER_UFFD", vmm.uffd.as_fd()),
                ("MANAGER_RAM", vmm.ram.as_fd()),
                ("MANAGER_BOARD", vmm.board_fd.as_fd()),
                ("MANAGER_LINK", vmm.link.as_fd()),
            ],
            &[
                ("MANAGER_BASE", vmm.layout.base.0.to_string()),
                ("MANAGER_PID", vmm.pid.to_string()),
                ("MANAGER_DIR", dir.display().to_string()),
            ],
        );
        // Mostly under load; every fifth in its start or recovery, wherever that is.
        if kill == 0 || kill % 5 != 0 {
            wait_for("manager", || vmm.board.get(Cell::Step) > before);
        }
        std::thread::sleep(Duration::from_micros(random.below(most.as_micros() as u64)));
        child.kill().unwrap();
        // It had not ended before, by a panic.
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL), "kill {kill}");
        assert_eq!(vmm.board.get(Cell::Errors), 0, "memory was corrupted, kill {kill}");
    }
    kills
}

/// Whichever thread of this process panics ends it: who started it sees that.
pub fn end_on_panic() {
    let tell = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |what| {
        tell(what);
        std::process::abort();
    }));
}

/// A descriptor that `again` passed; None where the test was not started by `again`.
pub fn inherited(name: &str) -> Option<OwnedFd> {
    let number: i32 = std::env::var(name).ok()?.parse().ok()?;
    // SAFETY: `again` left this descriptor open for us alone.
    Some(unsafe { OwnedFd::from_raw_fd(number) })
}

/// The manager's view of a VMM process.
pub struct Vmm {
    pub child: Option<Child>,
    pub board: Board,
    pub board_fd: OwnedFd,
    pub ram: OwnedFd,
    pub uffd: Uffd,
    pub layout: RamPart,
    /// A second part with its file, of one that has it.
    pub more: Option<(OwnedFd, RamPart)>,
    /// To the thread that changes its mappings, if it has one.
    pub link: OwnedFd,
    pub pid: u32,
}

impl Vmm {
    pub fn start(role: &str, pages: u64) -> Vmm {
        Vmm::start_with(memfd("guest", pages as usize * PAGE_SIZE), role, pages)
    }

    /// One whose RAM has a second part, of `more` pages.
    pub fn start_parts(role: &str, pages: u64, more: u64) -> Vmm {
        let of = |name, pages: u64| memfd(name, pages as usize * PAGE_SIZE);
        Vmm::start_both(of("guest", pages), Some((of("more", more), more)), role, pages)
    }

    /// One whose RAM is that file, of `pages` pages.
    pub fn start_with(ram: OwnedFd, role: &str, pages: u64) -> Vmm {
        Vmm::start_both(ram, None, role, pages)
    }

    fn start_both(ram: OwnedFd, more: Option<(OwnedFd, u64)>, role: &str, pages: u64) -> Vmm {
        let board_fd = memfd("board", PAGE_SIZE);
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let mut fds = vec![
            ("VMM_RAM", ram.as_fd()),
            ("VMM_BOARD", board_fd.as_fd()),
            ("VMM_SOCKET", theirs.as_fd()),
        ];
        let mut env = vec![("VMM_ROLE", role.to_owned()), ("VMM_PAGES", pages.to_string())];
        if let Some((file, pages)) = &more {
            fds.push(("VMM_MORE", file.as_fd()));
            env.push(("VMM_MORE_PAGES", pages.to_string()));
        }
        let child = again("vmm_process", &fds, &env);
        drop(theirs);
        let mut bases = [0u8; 16];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(
            &ours,
            &mut [IoSliceMut::new(&mut bases)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )
        .unwrap();
        assert_eq!(got.bytes, 16, "the VMM process died before it had a userfaultfd");
        let fd = control
            .drain()
            .find_map(|m| match m {
                RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
                _ => None,
            })
            .unwrap();
        let base_at = |at| HostAddr(u64::from_ne_bytes(std::array::from_fn(|i| bases[at + i])));
        let part = |base, pages| RamPart { base, len: Pages(pages), file_offset: 0 };
        let layout = part(base_at(0), pages);
        let more = more.map(|(file, pages)| (file, part(base_at(8), pages)));
        let board = Board::map(board_fd.as_fd());
        let (uffd, pid) = (Uffd::from_fd(fd).unwrap(), child.id());
        Vmm { child: Some(child), board, board_fd, ram, uffd, layout, more, link: ours, pid }
    }

    /// For one manager; the VMM keeps the originals, as the shim does.
    pub fn guest_ram(&self) -> GuestRam {
        let (uffd, ram) = (self.uffd.try_clone().unwrap(), self.ram.try_clone().unwrap());
        let ram = match &self.more {
            // As it is, for those that cannot be.
            None => GuestRam::new(uffd, ram, self.layout),
            Some((file, part)) => {
                let layout = RamLayout::new(&[self.layout, *part]).unwrap();
                GuestRam::of_parts(uffd, vec![ram, file.try_clone().unwrap()], layout)
            }
        };
        ram.see_accesses(self.pid).unwrap();
        ram
    }

    pub fn measured(&self) -> Pages {
        let of = |file: &OwnedFd| rustix::fs::fstat(file).unwrap().st_blocks as u64 / 8;
        Pages(of(&self.ram) + self.more.as_ref().map_or(0, |(file, _)| of(file)))
    }

    /// In a manager process that inherited the descriptors.
    pub fn adopt(
        uffd: OwnedFd,
        ram: OwnedFd,
        board_fd: OwnedFd,
        link: OwnedFd,
        pid: u32,
        base: HostAddr,
        pages: u64,
    ) -> Vmm {
        let layout = RamPart { base, len: Pages(pages), file_offset: 0 };
        let board = Board::map(board_fd.as_fd());
        let uffd = Uffd::from_fd(uffd).unwrap();
        Vmm { child: None, board, board_fd, ram, uffd, layout, more: None, link, pid }
    }

    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What a role of the VMM process has.
pub struct Guest {
    pub role: String,
    pub base: *mut u8,
    /// Of all parts.
    pub pages: u64,
    pub ram: OwnedFd,
    /// The second part: its first page, where it is, its file.
    pub more: Option<(u64, *mut u8, OwnedFd)>,
    pub board: Board,
    pub uffd: Uffd,
    pub socket: OwnedFd,
}

// SAFETY: roles partition the memory among their threads.
unsafe impl Sync for Guest {}
// SAFETY: as above.
unsafe impl Send for Guest {}

impl Guest {
    /// The VMM's side of `Vmm::start`; None in a process that is not one.
    pub fn enter() -> Option<Guest> {
        let ram = inherited("VMM_RAM")?;
        let socket = inherited("VMM_SOCKET")?;
        let board = Board::map(inherited("VMM_BOARD")?.as_fd());
        let pages: u64 = std::env::var("VMM_PAGES").unwrap().parse().unwrap();
        let len = pages as usize * PAGE_SIZE;
        let base = map_shared(ram.as_fd(), len);
        let uffd = Uffd::open().unwrap();
        let wanted = Features::PAGEFAULT_FLAG_WP
            | Features::MISSING_SHMEM
            | Features::EVENT_REMOVE
            | Features::WP_HUGETLBFS_SHMEM;
        uffd.handshake(wanted).unwrap();
        let (addr, modes) = (HostAddr(base as u64), Modes::MISSING | Modes::WP);
        // SAFETY: a mapping made for this, reached by its address alone.
        unsafe { uffd.register(addr, Bytes(len as u64), modes) }.unwrap();
        let fds = [uffd.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let more = inherited("VMM_MORE").map(|file| {
            let more: u64 = std::env::var("VMM_MORE_PAGES").unwrap().parse().unwrap();
            let len = more as usize * PAGE_SIZE;
            let at = map_shared(file.as_fd(), len);
            let modes = Modes::MISSING | Modes::WP;
            // SAFETY: a mapping made for this, reached by its address alone.
            unsafe { uffd.register(HostAddr(at as u64), Bytes(len as u64), modes) }.unwrap();
            (more, (pages, at, file))
        });
        let second = more.as_ref().map_or(0, |(_, (_, at, _))| *at as u64);
        let mut address = [0; 16];
        address[..8].copy_from_slice(&(base as u64).to_ne_bytes());
        address[8..].copy_from_slice(&second.to_ne_bytes());
        let pages = pages + more.as_ref().map_or(0, |(pages, _)| *pages);
        let more = more.map(|(_, more)| more);
        sendmsg(&socket, &[IoSlice::new(&address)], &mut control, SendFlags::empty()).unwrap();
        while board.get(Cell::Go) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let role = std::env::var("VMM_ROLE").unwrap();
        Some(Guest { role, base, pages, ram, more, board, uffd, socket })
    }

    pub fn word(&self, ppn: u64, word: usize) -> *mut u64 {
        assert!(ppn < self.pages && word < PAGE_SIZE / 8);
        let (_, base, at) = self.part(ppn);
        // SAFETY: inside the mapping.
        unsafe { base.add(at as usize * PAGE_SIZE).cast::<u64>().add(word) }
    }

    /// The file and the mapping of the part with this page, and which page of them it is.
    pub fn part(&self, ppn: u64) -> (&OwnedFd, *mut u8, u64) {
        match &self.more {
            Some((first, base, file)) if ppn >= *first => (file, *base, ppn - first),
            _ => (&self.ram, self.base, ppn),
        }
    }

    /// The page at an address of its RAM.
    pub fn page_at(&self, addr: u64) -> u64 {
        let page = |base: *mut u8| addr.wrapping_sub(base as u64) / PAGE_SIZE as u64;
        let first = self.more.as_ref().map_or(self.pages, |(first, ..)| *first);
        match &self.more {
            Some((_, base, _)) if page(self.base) >= first => first + page(*base),
            _ => page(self.base),
        }
    }

    pub fn read_page(&self, ppn: u64) -> [u64; PAGE_SIZE / 8] {
        // SAFETY: inside the mapping; this thread is the only one that uses the page.
        std::array::from_fn(|i| unsafe { self.word(ppn, i).read_volatile() })
    }

    /// Fills a page; word `i` is `f(i)`.
    pub fn write_page(&self, ppn: u64, f: impl Fn(usize) -> u64) {
        for i in 0..PAGE_SIZE / 8 {
            // SAFETY: as for `read_page`.
            unsafe { self.word(ppn, i).write_volatile(f(i)) };
        }
    }
}

/// One at a time: descriptors must not leak into another test's processes.
pub fn alone() -> Option<MutexGuard<'static, ()>> {
    static ALONE: Mutex<()> = Mutex::new(());
    if let Err(e) = Uffd::open() {
        assert!(
            std::env::var("BALLAST_REQUIRE_PRIVILEGED").as_deref() != Ok("1"),
            "no userfaultfd: {e}"
        );
        eprintln!("SKIPPED: no userfaultfd here: {e}");
        return None;
    }
    Some(ALONE.lock().unwrap_or_else(PoisonError::into_inner))
}

pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

pub fn wait_for(what: &str, done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < Duration::from_secs(60), "no {what} after a minute");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Both are read one after the other, while a page may be under way that came back unasked: what is equal in the end
/// counts.
pub fn wait_for_equal<T: PartialEq + std::fmt::Debug>(what: &str, both: impl Fn() -> (T, T)) {
    let begun = Instant::now();
    loop {
        let (one, other) = both();
        if one == other {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "{what}: {one:?} is not {other:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// This process's threads: their ids.
pub fn threads() -> HashSet<std::ffi::OsString> {
    std::fs::read_dir("/proc/self/task").unwrap().flatten().map(|task| task.file_name()).collect()
}

/// Nice values of these threads, where their names begin so.
pub fn nice_of(prefix: &str, threads: &HashSet<std::ffi::OsString>) -> Vec<i32> {
    let task = |id| std::path::Path::new("/proc/self/task").join(id).join("stat");
    let stats = threads.iter().filter_map(|id| std::fs::read_to_string(task(id)).ok());
    // "PID (NAME) STATE ...": nice is the 19th field.
    let parse = |stat: String| {
        let (head, rest) = stat.rsplit_once(')')?;
        let nice = rest.split_whitespace().nth(16)?.parse().ok()?;
        head.split_once('(')?.1.starts_with(prefix).then_some(nice)
    };
    stats.filter_map(parse).collect()
}

pub fn soak_seconds() -> u64 {
    std::env::var("BALLAST_SOAK_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(10)
}
