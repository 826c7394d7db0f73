//! VMMs that mean harm: this test binary, executed again. Each opens as a good one does, and then does
//! what its role says. And words at the shims' socket that no good VMM would say.

use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use ballast_shim_proto::{
    Batch, Connection, ConnectionError, Hello, Message, ONE_PART, OpKind, Part, VmName,
};
use ballast_uffd::{Features, Modes, Uffd};
use ballast_units::{Bytes, HostAddr, PAGE_SIZE};
use rustix::mm::{MapFlags, ProtFlags};

const PATIENT: Option<Duration> = Some(Duration::from_secs(60));

pub fn memfd(len: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    fd
}

pub fn hello(name: &str, ram_len: u64) -> Hello {
    Hello {
        version: ONE_PART,
        reconnect: false,
        vm: VmName::new(name).unwrap(),
        pid: std::process::id(),
        parts: vec![part(0x7000_0000_0000, ram_len)],
        page_size: 4096,
    }
}

pub fn part(addr: u64, len: u64) -> Part {
    Part { addr: HostAddr(addr), len: Bytes(len), file_offset: 0 }
}

/// A hostile VMM, from the side of the test. Ended when dropped.
pub struct Evil {
    pub child: Child,
    lines: Receiver<String>,
}

impl Evil {
    /// Starts one; returns when it is managed and has filled its memory.
    pub fn start(shim_socket: &Path, name: &str, role: &str, mib: u64) -> Evil {
        let evil = Evil::begin(shim_socket, name, role, mib);
        evil.says("filled");
        evil
    }

    /// Starts one, and does not wait for it.
    pub fn begin(shim_socket: &Path, name: &str, role: &str, mib: u64) -> Evil {
        Evil::spawn(&mut Evil::command(shim_socket, name, role, mib))
    }

    /// The same under the shim, which speaks for it.
    pub fn under_shim(shim_socket: &Path, name: &str, role: &str, mib: u64) -> Evil {
        Evil::under_shim_with(shim_socket, name, role, mib, &[])
    }

    /// With more words on its command line, as those of a VMM.
    pub fn under_shim_with(
        shim_socket: &Path,
        name: &str,
        role: &str,
        mib: u64,
        words: &[&str],
    ) -> Evil {
        let mut command = Evil::command(shim_socket, name, role, mib);
        command
            .arg("--")
            .args(words)
            .env("LD_PRELOAD", super::shim())
            .env("BALLAST_VM", name)
            .env("BALLAST_SHIM_SOCKET", shim_socket)
            .env("BALLAST_RAM_SIZE", (mib << 20).to_string());
        let evil = Evil::spawn(&mut command);
        evil.says("filled");
        evil
    }

    fn command(shim_socket: &Path, name: &str, role: &str, mib: u64) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "evil_process", "--ignored", "--nocapture", "--test-threads=1"])
            .env("EVIL_SOCKET", shim_socket)
            .env("EVIL_NAME", name)
            .env("EVIL_ROLE", role)
            .env("EVIL_MIB", mib.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        command
    }

    fn spawn(command: &mut Command) -> Evil {
        let mut child = command.spawn().unwrap();
        let of_child = BufReader::new(child.stdout.take().unwrap()).lines();
        let (sender, lines) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for line in of_child.map_while(Result::ok) {
                // Whether anybody listens or not, it does not wait for its pipe.
                let _ = sender.send(line);
            }
        });
        Evil { child, lines }
    }

    /// Waits until it has said this: "asked" to be managed, "filled" its memory, "told" what to do for the first time.
    pub fn says(&self, what: &str) {
        let until = Instant::now() + super::PATIENT;
        loop {
            let line = self.lines.recv_timeout(until.saturating_duration_since(Instant::now()));
            if line.unwrap_or_else(|e| panic!("it has not said {what}: {e}")).contains(what) {
                return;
            }
        }
    }
}

impl Drop for Evil {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In the process that `Evil::start` made; returns at once in any other.
pub fn play() {
    let Ok(role) = std::env::var("EVIL_ROLE") else { return };
    let of = |name: &str| std::env::var(name).unwrap();
    if role == "announces" {
        announce(&of("EVIL_SOCKET"), &of("EVIL_NAME"), &of("EVIL_CASE"));
    }
    let len = of("EVIL_MIB").parse::<u64>().unwrap() << 20;
    if role == "stubborn" {
        // SAFETY: no handler of this program is replaced, and it makes no other thread that wants the signal.
        unsafe { libc::signal(libc::SIGTERM, libc::SIG_IGN) };
    }
    if role == "mute" {
        let _silent: Vec<_> =
            (0..8).map(|_| Connection::connect(Path::new(&of("EVIL_SOCKET")))).collect();
        println!("filled");
        std::thread::sleep(Duration::from_secs(3600));
    }
    if role == "breaks off" {
        break_off_under_shim(len);
    }
    let ram = memfd(len);
    let base = map(&ram, len);
    let connection = Connection::connect(Path::new(&of("EVIL_SOCKET"))).unwrap();
    let hello = Hello { parts: vec![part(base as u64, len)], ..hello(&of("EVIL_NAME"), len) };
    connection.send(&Message::Hello(hello), &[ram.as_fd()]).unwrap();
    println!("asked");
    let device = match connection.recv(PATIENT).unwrap() {
        (Message::Welcome { .. }, mut fds) => fds.remove(0),
        (other, _) => panic!("{other:?}"),
    };
    let uffd = Uffd::from_device(device.as_fd()).unwrap();
    let wanted = Features::PAGEFAULT_FLAG_WP
        | Features::MISSING_SHMEM
        | Features::EVENT_REMOVE
        | Features::WP_HUGETLBFS_SHMEM;
    uffd.handshake(wanted).unwrap();
    // SAFETY: a mapping made for this, reached by its address alone.
    unsafe { uffd.register(HostAddr(base as u64), Bytes(len), Modes::MISSING | Modes::WP) }
        .unwrap();
    let ready = Message::Ready { features: wanted.bits(), ioctls: u64::MAX };
    connection.send(&ready, &[uffd.as_fd()]).unwrap();
    assert_eq!(connection.recv(PATIENT).unwrap().0, Message::Managed);
    // Much that is alike, so that there is something to share.
    for page in 0..len as usize / PAGE_SIZE {
        // SAFETY: inside the mapping, which this thread alone uses.
        let words = unsafe { std::slice::from_raw_parts_mut(base.add(page * PAGE_SIZE), 4096) };
        words.fill(1 + (page % 7) as u8);
    }
    println!("filled");
    act(&role, connection, &ram, &uffd, base, len);
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Of a VM with memory to plug: what it is expected to have beside 16 MiB.
pub const MORE: u64 = 8 << 20;

/// Announces a RAM of two parts that cannot be, says what the manager made of it, and ends.
fn announce(socket: &str, name: &str, case: &str) -> ! {
    const AT: u64 = 0x7000_0000_0000;
    const RAM: u64 = 16 << 20;
    let files = [memfd(RAM), memfd(RAM), memfd(RAM)];
    let mut parts = vec![part(AT, RAM), part(AT - RAM, MORE)];
    let mut fds = vec![files[0].as_fd(), files[1].as_fd()];
    match case {
        "overlap" => parts[1].addr = HostAddr(AT + RAM - 4096),
        "same file" => fds[1] = fds[0],
        "other size" => parts[1].len = Bytes(MORE / 2),
        "other order" => parts.swap(0, 1),
        "one" => drop((parts.pop(), fds.pop())),
        "three" => {
            parts.push(part(AT - 2 * RAM, MORE));
            fds.push(files[2].as_fd());
        }
        "beyond" => parts[1].file_offset = RAM - MORE + 4096,
        "used" => {
            assert_eq!(rustix::io::write(&files[0], &[1]), Ok(1));
        }
        other => panic!("no case {other}"),
    }
    let version = Hello::version_for(parts.len());
    let message = Message::Hello(Hello { version, parts, ..hello(name, RAM) });
    let why = say(Path::new(socket), &message, &fds);
    eprintln!("{}", why.unwrap_or_else(|| "no answer".to_owned()));
    std::process::exit(1);
}

/// How often one that "breaks off" does so.
pub const BREAKS: usize = 16;

/// Not evil at all: has the shim speak for it, writes pages that are alike, and sees that they stay as they were
/// written. Once they are shared, it breaks the shim's conversation off, some times. Ends with 1 if a page is not what
/// it was.
fn break_off_under_shim(len: u64) -> ! {
    let ram = memfd(len);
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    let fd = std::os::fd::AsRawFd::as_raw_fd(&ram);
    // SAFETY: a new mapping at an address of the kernel's choice, never unmapped. Not rustix's mmap, which is none that
    // the shim could see.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), len as usize, prot, flags, fd, 0) };
    assert_ne!(base, libc::MAP_FAILED);
    let word = |page: usize, i: usize| {
        // SAFETY: inside the mapping, which this thread alone uses.
        unsafe { base.cast::<u64>().add(page * PAGE_SIZE / 8 + i) }
    };
    let words = PAGE_SIZE / 8;
    let write = |page: usize, kind: u64| {
        // SAFETY: as above.
        (0..words).for_each(|i| unsafe { word(page, i).write_volatile(kind) });
    };
    let is = |page: usize, kind: u64| {
        // SAFETY: as above.
        (0..words).all(|i| unsafe { word(page, i).read_volatile() } == kind)
    };
    let mut kinds = vec![0u64; len as usize / PAGE_SIZE];
    let mut state = 88_172_645_463_325_252u64;
    let mut random = |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    let mut left = BREAKS;
    for round in 0u64.. {
        for (page, kind) in kinds.iter_mut().enumerate() {
            if round == 0 || random(4) == 0 {
                *kind = 1 + random(7);
                write(page, *kind);
            }
        }
        if round == 0 {
            println!("filled");
        }
        // In the midst of what the manager makes of that, wherever it is.
        std::thread::sleep(Duration::from_millis(random(200)));
        if left > 0 && is_sharing() && break_off() {
            left -= 1;
        }
        std::thread::sleep(Duration::from_millis(400));
        for (page, kind) in kinds.iter().enumerate() {
            if !is(page, *kind) {
                eprintln!("page {page} is not of kind {kind} in round {round}");
                std::process::exit(1);
            }
        }
    }
    unreachable!("rounds have no end")
}

/// Whether pages of a store are mapped.
fn is_sharing() -> bool {
    std::fs::read_to_string("/proc/self/maps").is_ok_and(|maps| maps.contains(".pages"))
}

/// Both ends of the shim's conversation hear that it is over. Answers whether there was one.
fn break_off() -> bool {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let is_socket = |path: &Path| {
        std::fs::read_link(path).is_ok_and(|to| to.to_string_lossy().starts_with("socket:"))
    };
    let number = |path: &Path| path.file_name()?.to_str()?.parse::<i32>().ok();
    let paths = fds.map(|entry| entry.path()).filter(|path| is_socket(path));
    // The first ones are the test's.
    let own = paths.filter_map(|path| number(&path)).filter(|fd| *fd > 2);
    // SAFETY: no memory is involved.
    own.filter(|fd| unsafe { libc::shutdown(*fd, libc::SHUT_RDWR) } == 0).count() > 0
}

fn map(ram: &OwnedFd, len: u64) -> *mut u8 {
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: a new mapping at an address of the kernel's choice, never unmapped by anyone else.
    let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len as usize, prot, flags, ram, 0) };
    base.unwrap().cast()
}

fn act(role: &str, connection: Connection, ram: &OwnedFd, uffd: &Uffd, base: *mut u8, len: u64) {
    match role {
        // Not evil at all: stays, asks every next manager to take it over, and has no QMP.
        "quiet" | "stubborn" => stay(connection, ram, uffd, base, len),
        // Says that all is done, and does nothing.
        "liar" => say_done(&connection, |_| {}),
        // Maps what it likes instead of what it was given.
        "forger" => say_done(&connection, map_own),
        // And comes again whenever it is hung up on.
        "nonsense" => answer_nonsense(connection, ram, uffd, base, len),
        // Comes again as what it is not, and then as what it is.
        "moves" => {
            drop(connection);
            come_as_another(ram, uffd, base, len);
            stay(come_again(ram, uffd, base, len), ram, uffd, base, len)
        }
        // Comes to the next manager as if it had never been paged, with other memory; then as what it is.
        "anew" => {
            while told(&connection).is_ok() {}
            come_anew(base, len);
            stay(come_again(ram, uffd, base, len), ram, uffd, base, len)
        }
        // Asks every next manager to take it over, and hears no answer.
        "deaf" => ask_and_hear_nothing(&connection, ram, uffd, base, len),
        // Does not say whether it keeps its RAM, nor anything else.
        "never keeps" => std::mem::forget(connection),
        "silent" => {
            let said = told(&connection);
            assert!(matches!(said, Ok((Message::Batch(_), _))), "{said:?}");
            println!("told");
            std::mem::forget(connection);
        }
        "vanishes" => {
            let said = told(&connection);
            assert!(matches!(said, Ok((Message::Batch(_), _))), "{said:?}");
            println!("told");
            drop(connection);
            // It goes on with its memory as if nothing had been.
            for page in (0..len as usize / PAGE_SIZE).cycle() {
                // SAFETY: inside the mapping; whatever is there may be read.
                unsafe { base.add(page * PAGE_SIZE).read_volatile() };
            }
        }
        "floods" => {
            keep(&connection);
            loop {
                let answer = Message::BatchDone { id: u64::MAX, done: 0, errno: 0 };
                let _ = connection.send(&answer, &[]);
            }
        }
        "truncates" => {
            rustix::fs::ftruncate(ram, 0).unwrap();
            while told(&connection).is_ok() {}
            std::mem::forget(connection);
        }
        "unmaps" => {
            let half = len as usize / 2;
            // SAFETY: its own memory, which it does not touch afterwards.
            unsafe { rustix::mm::munmap(base.cast(), half) }.unwrap();
            while told(&connection).is_ok() {}
            std::mem::forget(connection);
        }
        other => panic!("no role {other}"),
    }
}

/// Says that it keeps its RAM, the first that it is told: it would not be paged otherwise.
fn keep(connection: &Connection) {
    let said = connection.recv(None);
    let Ok((Message::Batch(batch), _)) = said else { panic!("{said:?}") };
    assert!(batch.ops().iter().all(|op| op.kind == OpKind::Keep), "{batch:?}");
    connection.send(&Message::BatchDone { id: batch.id, done: 1, errno: 0 }, &[]).unwrap();
}

/// What it is told next, but that it is to keep its RAM, which it says that it does: it would not be paged otherwise.
fn told(connection: &Connection) -> Result<(Message, Vec<OwnedFd>), ConnectionError> {
    loop {
        match connection.recv(None)? {
            (Message::Batch(batch), _) if batch.ops().iter().all(|op| op.kind == OpKind::Keep) => {
                connection.send(&Message::BatchDone { id: batch.id, done: 1, errno: 0 }, &[])?;
            }
            other => return Ok(other),
        }
    }
}

/// Whatever it is told to do, it does `deed` instead, and says that all is done.
fn say_done(connection: &Connection, deed: impl Fn(&Batch)) -> ! {
    loop {
        let Ok((Message::Batch(batch), _)) = told(connection) else { continue };
        println!("told");
        deed(&batch);
        let done = batch.ops().len() as u32;
        let answer = Message::BatchDone { id: batch.id, done, errno: 0 };
        let _ = connection.send(&answer, &[]);
    }
}

fn map_own(batch: &Batch) {
    for op in batch.ops() {
        let own = memfd(op.len.0);
        let (prot, flags) = (ProtFlags::READ, MapFlags::PRIVATE | MapFlags::FIXED);
        // SAFETY: inside its own memory, which is nobody's but its own.
        let _ = unsafe {
            rustix::mm::mmap(op.addr.0 as *mut _, op.len.0 as usize, prot, flags, &own, 0)
        };
    }
}

fn answer_nonsense(
    mut connection: Connection,
    ram: &OwnedFd,
    uffd: &Uffd,
    base: *mut u8,
    len: u64,
) -> ! {
    loop {
        let batch = match told(&connection) {
            Ok((Message::Batch(batch), _)) => {
                println!("told");
                batch
            }
            Ok(_) => continue,
            Err(_) => {
                connection = come_again(ram, uffd, base, len);
                continue;
            }
        };
        let wrong = [
            Message::BatchDone { id: batch.id ^ 1, done: 1, errno: 0 },
            Message::BatchDone { id: batch.id, done: u32::MAX, errno: -7 },
            Message::Failed { step: ballast_shim_proto::Step::Register, errno: 0 },
        ];
        for answer in &wrong {
            let _ = connection.send(answer, &[]);
        }
    }
}

/// With its RAM at another place, and with another RAM.
fn come_as_another(ram: &OwnedFd, uffd: &Uffd, base: *mut u8, len: u64) {
    let socket = std::env::var("EVIL_SOCKET").unwrap();
    let name = std::env::var("EVIL_NAME").unwrap();
    let other = memfd(len);
    for (at, file, why) in [
        (base as u64 + PAGE_SIZE as u64, ram, "not where it was"),
        (base as u64, &other, "another than before"),
    ] {
        let good = Hello { parts: vec![part(at, len)], ..hello(&name, len) };
        let again = Message::Hello(Hello { reconnect: true, ..good });
        let said = say(Path::new(&socket), &again, &[file.as_fd(), uffd.as_fd()]).unwrap();
        assert!(said.contains(why), "{said}");
    }
}

/// Until somebody is there to refuse it.
fn come_anew(base: *mut u8, len: u64) {
    let of = |name: &str| std::env::var(name).unwrap();
    let parts = vec![part(base as u64, len)];
    let anew = Message::Hello(Hello { parts, ..hello(&of("EVIL_NAME"), len) });
    let other = memfd(len);
    loop {
        if let Some(why) = say(Path::new(&of("EVIL_SOCKET")), &anew, &[other.as_fd()]) {
            return println!("{why}");
        }
    }
}

fn ask_and_hear_nothing(
    connection: &Connection,
    ram: &OwnedFd,
    uffd: &Uffd,
    base: *mut u8,
    len: u64,
) -> ! {
    let socket = std::env::var("EVIL_SOCKET").unwrap();
    let name = std::env::var("EVIL_NAME").unwrap();
    let good = Hello { parts: vec![part(base as u64, len)], ..hello(&name, len) };
    let again = Message::Hello(Hello { reconnect: true, ..good });
    while told(connection).is_ok() {}
    loop {
        std::thread::sleep(Duration::from_millis(50));
        let Ok(connection) = Connection::connect(Path::new(&socket)) else { continue };
        if connection.send(&again, &[ram.as_fd(), uffd.as_fd()]).is_ok() {
            rustix::net::shutdown(&connection, rustix::net::Shutdown::Read).unwrap();
            // Until it is let go of.
            while connection.send(&Message::Managed, &[]).is_ok() {
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }
}

fn stay(mut connection: Connection, ram: &OwnedFd, uffd: &Uffd, base: *mut u8, len: u64) -> ! {
    loop {
        while told(&connection).is_ok() {}
        connection = come_again(ram, uffd, base, len);
    }
}

/// Asks to be let in again until it is.
fn come_again(ram: &OwnedFd, uffd: &Uffd, base: *mut u8, len: u64) -> Connection {
    let socket = std::env::var("EVIL_SOCKET").unwrap();
    let name = std::env::var("EVIL_NAME").unwrap();
    let good = Hello { parts: vec![part(base as u64, len)], ..hello(&name, len) };
    let again = Message::Hello(Hello { reconnect: true, ..good });
    loop {
        std::thread::sleep(Duration::from_millis(50));
        let Ok(next) = Connection::connect(Path::new(&socket)) else { continue };
        let asked = next.send(&again, &[ram.as_fd(), uffd.as_fd()]);
        if asked.is_ok() && matches!(next.recv(PATIENT), Ok((Message::Managed, _))) {
            return next;
        }
    }
}

/// What the manager makes of first words: its refusal; None if it only closes.
pub fn say(
    shim_socket: &Path,
    message: &Message,
    fds: &[std::os::fd::BorrowedFd<'_>],
) -> Option<String> {
    // One that was turned away because there were too many tries again.
    for _ in 0..200 {
        let Ok(connection) = Connection::connect(shim_socket) else { continue };
        if connection.send(message, fds).is_ok() {
            match connection.recv(PATIENT) {
                Ok((Message::Refuse { reason }, _)) => return Some(reason.as_str().to_owned()),
                Ok((other, _)) => panic!("{message:?} was answered by {other:?}"),
                Err(ConnectionError::Closed) => {}
                Err(e) => panic!("{message:?}: {e}"),
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    None
}
