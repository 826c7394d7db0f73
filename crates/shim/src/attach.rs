//! The opening: from a mapped RAM to a managed one, while the VMM waits in mmap.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use ballast_shim_proto::{Connection, ConnectionError, Hello, Message, Step, VERSION};
use ballast_uffd::{Features, HandshakeError, Modes, Uffd};

use crate::config::Config;
use crate::held::{self, Held};
use crate::ram::Ram;
use crate::serve::{self, Vm};

/// How long a manager may be away when a VM starts.
const UNREACHABLE: Duration = Duration::from_secs(5);
const RETRY: Duration = Duration::from_millis(200);
/// How long it may take to answer: it may first have to make room for the VM.
const ANSWER: Duration = Duration::from_secs(30);

pub const MODES: Modes = Modes::MISSING.union(Modes::WP);

/// What paging needs. WP_UNPOPULATED (6.4) matters for anonymous memory only, and is asked for where
/// there is one.
const NEEDED: Features = Features::PAGEFAULT_FLAG_WP
    .union(Features::EVENT_REMOVE)
    .union(Features::MISSING_SHMEM)
    .union(Features::EXACT_ADDRESS)
    .union(Features::WP_HUGETLBFS_SHMEM);

/// Why the VM is not managed.
pub enum Failure {
    /// Refused by the manager, or impossible here. It knows, and will do without.
    Unmanaged(String),
    /// Nobody there who knows.
    NoManager(String),
}

/// Why one attempt did not end well.
enum Attempt {
    Final(Failure),
    Again(String),
}

impl From<ConnectionError> for Attempt {
    fn from(e: ConnectionError) -> Attempt {
        Attempt::Again(e.to_string())
    }
}

/// Hands `ram`, a mapping of `fd`, over. On return the manager serves its faults, or it is
/// unregistered.
pub fn attach(config: &Config, ram: Ram, fd: c_int) -> Result<(), Failure> {
    // SAFETY: the VMM keeps its descriptor open while it is in mmap.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    let file = Held::open(&held::RAM_FILE, || file.try_clone_to_owned())
        .map_err(|e| Failure::NoManager(format!("duplicate of the RAM file: {e}")))?;
    let mut file = Some(file);
    let deadline = Instant::now() + UNREACHABLE;
    loop {
        let why = match attempt(config, ram, &mut file) {
            Ok(()) => return Ok(()),
            Err(Attempt::Final(failure)) => return Err(failure),
            Err(Attempt::Again(why)) => why,
        };
        if file.is_none() || Instant::now() >= deadline {
            return Err(Failure::NoManager(format!("{}: {why}", config.socket.display())));
        }
        thread::sleep(RETRY);
    }
}

/// A connection to the manager, noted before anyone else has its other end.
pub fn connect(config: &Config) -> io::Result<Held<Connection>> {
    let connection = Held::open(&held::SOCKET, Connection::unconnected)?;
    connection.connect_to(&config.socket)?;
    Ok(connection)
}

pub fn hello(config: &Config, ram: Ram, reconnect: bool) -> Message {
    Message::Hello(Hello {
        version: VERSION,
        reconnect,
        vm: config.vm.clone(),
        pid: std::process::id(),
        ram_addr: ram.addr,
        ram_len: ram.len,
        file_offset: ram.file_offset,
        page_size: rustix::param::page_size() as u32,
    })
}

fn attempt(config: &Config, ram: Ram, file: &mut Option<Held<OwnedFd>>) -> Result<(), Attempt> {
    let Some(ram_file) = file.as_ref() else {
        return Err(Attempt::Again("the RAM file is gone".to_owned()));
    };
    let connection = connect(config).map_err(|e| Attempt::Again(e.to_string()))?;
    connection.send(&hello(config, ram, false), &[ram_file.as_fd()])?;
    let device = match connection.recv(Some(ANSWER))? {
        (Message::Welcome { version: VERSION }, fds) => first(fds)?,
        (Message::Welcome { version }, _) => {
            return Err(unmanaged(format!("the manager speaks version {version} of the protocol")));
        }
        (other, _) => return Err(unexpected(other)),
    };

    let (uffd, features, ioctls) = match register(ram, device.as_fd()) {
        Ok(registered) => registered,
        Err((step, errno)) => return Err(failed(&connection, step, errno)),
    };
    drop(device);
    if let Err(errno) = dont_fork(ram) {
        let e = io::Error::from(errno);
        crate::say(&format!("madvise(MADV_DONTFORK): {e}: children of a fork see unmanaged RAM"));
    }
    // All that can fail is done before the manager relies on us: the thread waits for its work.
    let (start, started) = mpsc::sync_channel::<(Vm, Held<Connection>)>(1);
    if let Err(errno) = serve::spawn(started) {
        give_back(&uffd, ram);
        return Err(failed(&connection, Step::Prepare, errno));
    }

    let ready = Message::Ready { features: features.bits(), ioctls };
    let answer =
        connection.send(&ready, &[uffd.as_fd()]).and_then(|()| connection.recv(Some(ANSWER)));
    match answer {
        Ok((Message::Managed, _)) => {}
        Ok((other, _)) => {
            give_back(&uffd, ram);
            return Err(unexpected(other));
        }
        Err(e) => {
            give_back(&uffd, ram);
            return Err(e.into());
        }
    }
    let Some(file) = file.take() else {
        return Err(Attempt::Again("the RAM file is gone".to_owned()));
    };
    // Before the VMM goes on, and says how it wants its RAM.
    held::keep(ram);
    // The thread waits at the other end: this cannot fail while it lives, and it does nothing else.
    let _ = start.send((Vm::new(ram, uffd, file), connection));
    Ok(())
}

/// A userfaultfd for `ram`, or the step that failed and its errno.
fn register(ram: Ram, device: BorrowedFd<'_>) -> Result<(Held<Uffd>, Features, u64), (Step, i32)> {
    let uffd = Held::open(&held::UFFD, || Uffd::from_device(device))
        .map_err(|e| (Step::Create, e.raw_os_error().unwrap_or(libc::EIO)))?;
    let mut features = NEEDED | Features::WP_UNPOPULATED;
    let mut agreed = uffd.handshake(features);
    if let Err(HandshakeError::Unsupported { .. }) = agreed {
        features = NEEDED;
        agreed = uffd.handshake(features);
    }
    agreed.map_err(|e| (Step::Handshake, e.errno()))?;
    let ioctls =
        uffd.register(ram.addr, ram.len, MODES).map_err(|e| (Step::Register, e.errno()))?;
    Ok((uffd, features, ioctls.bits()))
}

/// Nobody touched the RAM yet, so it becomes ordinary memory again.
fn give_back(uffd: &Uffd, ram: Ram) {
    if let Err(e) = uffd.unregister(ram.addr, ram.len) {
        crate::say(&e.to_string());
    }
}

/// A forked child does not get the RAM: its faults in it would be nobody's.
pub fn dont_fork(ram: Ram) -> rustix::io::Result<()> {
    let addr = ram.addr.0 as *mut std::ffi::c_void;
    // SAFETY: advice on a mapping of this process that keeps its content.
    unsafe { rustix::mm::madvise(addr, ram.len.0 as usize, rustix::mm::Advice::LinuxDontFork) }
}

fn first(fds: Vec<OwnedFd>) -> Result<OwnedFd, Attempt> {
    fds.into_iter().next().ok_or_else(|| Attempt::Again("Welcome without a device".to_owned()))
}

fn unmanaged(why: String) -> Attempt {
    Attempt::Final(Failure::Unmanaged(why))
}

fn unexpected(message: Message) -> Attempt {
    match message {
        Message::Refuse { reason } => unmanaged(reason.as_str().to_owned()),
        other => Attempt::Again(format!("the manager answered with {}", other.name())),
    }
}

/// Tells the manager, too; it may add what it makes of it, but that changes nothing.
fn failed(connection: &Connection, step: Step, errno: i32) -> Attempt {
    let what = match step {
        Step::Create => "making a userfaultfd",
        Step::Handshake => "userfaultfd features (Linux 5.19 or newer is needed)",
        Step::Register => "registering the RAM (is it shared memory of a memfd or tmpfs?)",
        Step::Prepare => "preparing to serve",
    };
    if connection.send(&Message::Failed { step, errno }, &[]).is_ok() {
        let _ = connection.recv(Some(Duration::from_secs(1)));
    }
    unmanaged(format!("{what}: {}", io::Error::from_raw_os_error(errno)))
}
