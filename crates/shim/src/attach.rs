//! The opening: from a mapped RAM to a managed one, while the VMM waits in mmap.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use ballast_shim_proto::{
    Connection, ConnectionError, Hello, MOST_BACK, Message, Part, REFUSED_VERSION, Reason, Step,
};
use ballast_uffd::{Features, HandshakeError, Modes, NEEDED, Uffd};

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
    /// By a manager of before, which is to be spoken to in an older version.
    Older(String),
    /// The manager hung up.
    Left(String),
}

impl From<ConnectionError> for Attempt {
    fn from(e: ConnectionError) -> Attempt {
        match e {
            ConnectionError::Closed => Attempt::Left(e.to_string()),
            _ => Attempt::Again(e.to_string()),
        }
    }
}

/// The parts of the RAM, each with its file, in the order of their pages.
pub type Parts = Vec<(Ram, Held<OwnedFd>)>;

/// A duplicate of `fd`, of which `part` is a mapping that was just made.
///
/// # Errors
/// There is no descriptor left, or there are more parts than there may be.
pub fn duplicate(part: usize, fd: c_int) -> Result<Held<OwnedFd>, Failure> {
    // SAFETY: the VMM keeps its descriptor open while it is in mmap.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    let slot = held::RAM_FILES.get(part).ok_or_else(|| io::Error::from(io::ErrorKind::Other));
    slot.and_then(|slot| Held::open(slot, || file.try_clone_to_owned()))
        .map_err(|e| Failure::NoManager(format!("duplicate of the RAM file: {e}")))
}

/// Hands all parts of the RAM over. On return the manager serves their faults, or they are unregistered.
///
/// # Errors
/// There was no manager for as long as one is waited for, or it refused, or the kernel did.
pub fn attach(config: &Config, mut parts: Parts) -> Result<(), Failure> {
    let begun = Instant::now();
    // By managers that hung up: they were about to be replaced perhaps, and the next one may take as long as any.
    let mut held = Duration::ZERO;
    loop {
        let tried = Instant::now();
        let mut is_older = false;
        let why = match attempt(config, &mut parts) {
            Ok(()) => return Ok(()),
            Err(Attempt::Final(failure)) => return Err(failure),
            Err(Attempt::Again(why)) => why,
            Err(Attempt::Older(why)) => {
                is_older = true;
                why
            }
            Err(Attempt::Left(why)) => {
                held += tried.elapsed();
                why
            }
        };
        // One that is spoken to in another version is there.
        let is_late = !is_older && begun.elapsed() >= UNREACHABLE + held.min(ANSWER);
        if parts.is_empty() || is_late {
            return Err(Failure::NoManager(format!("{}: {why}", config.socket.display())));
        }
        if !is_older {
            // It may have been replaced.
            is_for_anybody();
        }
        thread::sleep(RETRY);
    }
}

/// A connection to the manager, noted before anyone else has its other end.
///
/// # Errors
/// No manager listens there, or there is no descriptor left.
pub fn connect(config: &Config) -> io::Result<Held<Connection>> {
    let connection = Held::open(&held::SOCKET, Connection::unconnected)?;
    connection.connect_to(&config.socket)?;
    Ok(connection)
}

pub fn hello(config: &Config, rams: impl Iterator<Item = Ram>, reconnect: bool) -> Message {
    let part = |ram: Ram| Part { addr: ram.addr, len: ram.len, file_offset: ram.file_offset };
    let parts: Vec<Part> = rams.map(part).collect();
    Message::Hello(Hello {
        version: version_for(parts.len()),
        reconnect,
        vm: config.vm.clone(),
        pid: std::process::id(),
        parts,
        page_size: rustix::param::page_size() as u32,
    })
}

/// A manager of before is there, by so many versions: it is spoken to as it understands.
static BACK: AtomicU32 = AtomicU32::new(0);

/// Whoever comes next may be a newer one.
pub fn is_for_anybody() {
    BACK.store(0, Ordering::Relaxed);
}

fn version_for(parts: usize) -> u32 {
    Hello::older_version_for(parts, BACK.load(Ordering::Relaxed))
}

/// Whether a manager refuses for the version that was spoken, and an older one can be: from now on that is.
pub fn is_for_version(reason: &Reason) -> bool {
    let older = |back| (back < MOST_BACK).then_some(back + 1);
    reason.as_str().starts_with(REFUSED_VERSION)
        && BACK.fetch_update(Ordering::Relaxed, Ordering::Relaxed, older).is_ok()
}

fn attempt(config: &Config, parts: &mut Parts) -> Result<(), Attempt> {
    let rams: Vec<Ram> = parts.iter().map(|(ram, _)| *ram).collect();
    let ours = version_for(rams.len());
    let connection = connect(config).map_err(|e| Attempt::Again(e.to_string()))?;
    let files: Vec<_> = parts.iter().map(|(_, file)| file.as_fd()).collect();
    connection.send(&hello(config, rams.iter().copied(), false), &files)?;
    let device = match connection.recv(Some(ANSWER))? {
        (Message::Welcome { version }, fds) if version == ours => first(fds)?,
        (Message::Welcome { version }, _) => {
            return Err(unmanaged(format!("the manager speaks version {version} of the protocol")));
        }
        (Message::Refuse { reason }, _) if is_for_version(&reason) => {
            return Err(Attempt::Older(reason.as_str().to_owned()));
        }
        (other, _) => return Err(unexpected(other)),
    };

    let (uffd, features, ioctls) = match register(&rams, device.as_fd()) {
        Ok(registered) => registered,
        Err((step, errno)) => return Err(failed(&connection, step, errno)),
    };
    drop(device);
    if let Err(errno) = rams.iter().try_for_each(|ram| dont_fork(*ram)) {
        let e = io::Error::from(errno);
        crate::say(&format!("madvise(MADV_DONTFORK): {e}: children of a fork see unmanaged RAM"));
    }
    // All that can fail is done before the manager relies on us: the thread waits for its work.
    let (start, started) = mpsc::sync_channel::<(Vm, Held<Connection>)>(1);
    if let Err(errno) = serve::spawn(started) {
        give_back(&uffd, &rams);
        return Err(failed(&connection, Step::Prepare, errno));
    }

    let ready = Message::Ready { features: features.bits(), ioctls };
    let answer =
        connection.send(&ready, &[uffd.as_fd()]).and_then(|()| connection.recv(Some(ANSWER)));
    match answer {
        Ok((Message::Managed, _)) => {}
        Ok((other, _)) => {
            give_back(&uffd, &rams);
            return Err(unexpected(other));
        }
        Err(e) => {
            give_back(&uffd, &rams);
            return Err(e.into());
        }
    }
    // Before the VMM goes on, and says how it wants its RAM.
    rams.iter().enumerate().for_each(|(n, ram)| held::keep(n, *ram));
    // The thread waits at the other end: this cannot fail while it lives, and it does nothing else.
    let _ = start.send((Vm::new(std::mem::take(parts), uffd), connection));
    Ok(())
}

/// A userfaultfd for all parts of the RAM, or the step that failed and its errno.
fn register(
    rams: &[Ram],
    device: BorrowedFd<'_>,
) -> Result<(Held<Uffd>, Features, u64), (Step, i32)> {
    let uffd = Held::open(&held::UFFD, || Uffd::from_device(device))
        .map_err(|e| (Step::Create, e.raw_os_error().unwrap_or(libc::EIO)))?;
    let mut features = NEEDED | Features::WP_UNPOPULATED;
    let mut agreed = uffd.handshake(features);
    if let Err(HandshakeError::Unsupported { .. }) = agreed {
        features = NEEDED;
        agreed = uffd.handshake(features);
    }
    agreed.map_err(|e| (Step::Handshake, e.errno()))?;
    let mut ioctls = u64::MAX;
    for (n, ram) in rams.iter().enumerate() {
        // SAFETY: guest RAM, of which this process holds no references (see `remap::map`).
        match unsafe { uffd.register(ram.addr, ram.len, MODES) } {
            Ok(of_part) => ioctls &= of_part.bits(),
            Err(e) => {
                give_back(&uffd, &rams[..n]);
                return Err((Step::Register, e.errno()));
            }
        }
    }
    Ok((uffd, features, ioctls))
}

/// Nobody touched the RAM yet, so it becomes ordinary memory again.
fn give_back(uffd: &Uffd, rams: &[Ram]) {
    for ram in rams {
        if let Err(e) = uffd.unregister(ram.addr, ram.len) {
            crate::say(&e.to_string());
        }
    }
}

/// A forked child does not get the RAM: its faults in it would be nobody's.
///
/// # Errors
/// As of madvise(2).
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
