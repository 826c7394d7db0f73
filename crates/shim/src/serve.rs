//! The thread that does batches, and finds a manager again when there is none.

use std::cell::OnceCell;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::{Duration, Instant};

use ballast_shim_proto::{Connection, ConnectionError, Message};
use ballast_uffd::Uffd;
use ballast_units::{Bytes, HostAddr};

use crate::alike::Alike;
use crate::config::Config;
use crate::held::Held;
use crate::ram::Ram;
use crate::{CONFIG, attach, batch};

const STACK: usize = 256 << 10;
const RECONNECT: Duration = Duration::from_millis(200);
const REFUSED: Duration = Duration::from_secs(1);
/// A manager that is replaced, or started again, is there before.
const LONG: Duration = Duration::from_secs(10);
/// By then the VMM has given its RAM the properties it wants, and the guest has not touched much.
const SETTLED: Duration = Duration::from_secs(1);

/// A part of the RAM.
pub struct Part {
    pub ram: Ram,
    /// The RAM file.
    pub file: Held<OwnedFd>,
    alike: OnceCell<Alike>,
}

/// What is kept for the life of the process.
pub struct Vm {
    parts: Vec<Part>,
    /// While this duplicate is open, pages that are not there are waited for, not read as zeros.
    pub uffd: Held<Uffd>,
}

impl Vm {
    pub fn new(parts: Vec<(Ram, Held<OwnedFd>)>, uffd: Held<Uffd>) -> Vm {
        let part = |(ram, file)| Part { ram, file, alike: OnceCell::new() };
        Vm { parts: parts.into_iter().map(part).collect(), uffd }
    }

    /// Where its parts are.
    pub fn rams(&self) -> impl Iterator<Item = Ram> {
        self.parts.iter().map(|part| part.ram)
    }

    /// The part in which all of a range lies.
    pub fn part(&self, addr: HostAddr, len: Bytes) -> Option<&Part> {
        self.parts.iter().find(|part| part.ram.contains(addr, len))
    }
}

impl Part {
    /// How the VMM maps it; found out once.
    pub fn alike(&self) -> &Alike {
        self.alike.get_or_init(|| Alike::of(self.ram))
    }
}

/// Starts the thread, which ends at once if nothing comes through `work`.
///
/// # Errors
/// An errno: no thread can be started.
pub fn spawn(work: Receiver<(Vm, Held<Connection>)>) -> Result<(), i32> {
    let serve = move || {
        if let (Ok((vm, connection)), Some(config)) = (work.recv(), CONFIG.get()) {
            serve(config, &vm, connection);
        }
    };
    let builder = thread::Builder::new().name("ballast-shim".to_owned()).stack_size(STACK);
    // The VMM's signals are for its own threads; a new thread inherits the mask.
    let before = block_signals();
    let spawned = builder.spawn(serve);
    restore_signals(&before);
    spawned.map(drop).map_err(|e| e.raw_os_error().unwrap_or(libc::EAGAIN))
}

fn serve(config: &Config, vm: &Vm, mut connection: Held<Connection>) -> ! {
    loop {
        // A panic ends a conversation, not the service: the VM's memory depends on it.
        let ended = catch_unwind(AssertUnwindSafe(|| converse(vm, &connection)));
        drop(connection);
        if let Ok(ConnectionError::Decode(e)) = ended {
            crate::say(&format!("VM '{}': {e}; connecting anew", config.vm));
        }
        connection = reconnect(config, vm);
    }
}

/// Does batches until the conversation ends, and returns why it did.
fn converse(vm: &Vm, connection: &Connection) -> ConnectionError {
    loop {
        let unseen = || vm.parts.iter().filter(|part| part.alike.get().is_none());
        let patience = unseen().next().map(|_| SETTLED);
        let (id, (done, errno)) = match connection.recv(patience) {
            Ok((Message::Batch(batch), fds)) => (batch.id, batch::run(vm, batch.ops(), &fds)),
            Ok((Message::Managed, _)) => continue,
            Ok(_) => return ConnectionError::Closed,
            Err(ConnectionError::TimedOut(_)) => {
                for part in unseen() {
                    part.alike();
                }
                continue;
            }
            Err(e) => match e.lost_batch() {
                // To connect anew would free the one that is missing, for the next to come to the same.
                Some(id) => {
                    say_full();
                    (id, (0, libc::EMFILE))
                }
                None => return e,
            },
        };
        if let Err(e) = connection.send(&Message::BatchDone { id, done, errno }, &[]) {
            return e;
        }
    }
}

/// Says once that the VMM has as many descriptors as it may.
fn say_full() {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        crate::say("the VMM has no descriptor left (RLIMIT_NOFILE): its pages are not shared");
    }
}

/// For as long as it takes: without a manager the guest waits at its next fault.
fn reconnect(config: &Config, vm: &Vm) -> Held<Connection> {
    let since = Instant::now();
    let mut refusal = None;
    let mut told = false;
    let mut is_older = false;
    loop {
        // A manager of before may have been replaced since it said that it is one.
        if !std::mem::take(&mut is_older) {
            attach::is_for_anybody();
        }
        thread::sleep(if refusal.is_some() { REFUSED } else { RECONNECT });
        let hello = attach::hello(config, vm.rams(), true);
        let connection = match attach::connect(config) {
            Ok(connection) => connection,
            // No manager for now; or something that whoever started it must put in order: it may not, it has no descriptor
            // left, or it does not see the socket any more (a root, or a mount, of its own).
            Err(e) => {
                let stays = e.kind() == std::io::ErrorKind::PermissionDenied
                    || matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE));
                if !told && (stays || since.elapsed() > LONG) {
                    told = true;
                    crate::say(&format!(
                        "VM '{}': {}: {e}; its guest waits, asking again",
                        config.vm,
                        config.socket.display()
                    ));
                }
                continue;
            }
        };
        let files = vm.parts.iter().map(|part| part.file.as_fd());
        let fds: Vec<_> = files.chain([vm.uffd.as_fd()]).collect();
        if connection.send(&hello, &fds).is_err() {
            continue;
        }
        // No limit: a manager that died closes, and one that rebuilds a large VM takes its time.
        match connection.recv(None) {
            Ok((Message::Managed, _)) => return connection,
            Ok((Message::Refuse { reason }, _)) if attach::is_for_version(&reason) => {
                is_older = true;
            }
            Ok((Message::Refuse { reason }, _)) => {
                if refusal.as_ref() != Some(&reason) {
                    crate::say(&format!(
                        "VM '{}': refused by the manager: {}; its pages stay, asking again",
                        config.vm,
                        reason.as_str()
                    ));
                }
                refusal = Some(reason);
            }
            _ => {}
        }
    }
}

fn block_signals() -> libc::sigset_t {
    // SAFETY: both sets are ours; all-zero is a valid one. Changes this thread's mask only.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        before
    }
}

fn restore_signals(before: &libc::sigset_t) {
    // SAFETY: a mask that this thread had.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut()) };
}
