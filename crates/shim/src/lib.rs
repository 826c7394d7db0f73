//! `libballast_shim.so`, for LD_PRELOAD: hands the RAM of a VMM (unmodified QEMU) over to ballastd.
//!
//! It waits for the VMM to map its guest's RAM, makes a userfaultfd for it, gives that to the manager,
//! and then does what the manager sends in batches: remapping, which only the process itself can do.
//! It holds no policy, and no state but the descriptors that keep the VM's memory defined while there
//! is no manager, and whether the RAM may be sent to others. Of guest RAM it has the kernel copy what goes home (MapHome), and touches nothing itself.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `BALLAST_VM` | the VM's name; unset: the shim does nothing at all, ever |
//! | `BALLAST_SHIM_SOCKET` | where the manager listens |
//! | `BALLAST_RAM_SIZE` | bytes of guest RAM: the mapping to look for; of several, in the order in which they are made, separated by commas |
//! | `BALLAST_OPTIONAL` | 1: without a manager go on unmanaged; default: exit 1 |
//!
//! They are for the process that is started with them, not for its children: the shim removes them,
//! and itself from LD_PRELOAD, at start. So they belong to the VMM itself, not to a script around it.
//!
//! | file | concept |
//! | --- | --- |
//! | `config` | the environment, read and scrubbed |
//! | `ram` | which mappings are the guest's RAM |
//! | `attach` | the opening of the conversation, inside the VMM's mmap |
//! | `serve` | the thread that does batches and finds the manager again |
//! | `batch` | how far a batch of operations comes |
//! | `remap` | the system calls of an operation |
//! | `alike` | what lets mappings of the RAM file merge |
//! | `placement` | on which NUMA nodes they are to lie |
//! | `held` | what children of a fork must not keep |
//! | `sent` | to whom the RAM file is sent |
//!
//! Protocol and failures: docs/design/shim-protocol.md.

mod alike;
mod attach;
mod batch;
mod config;
mod held;
mod placement;
mod ram;
mod remap;
mod sent;
mod serve;

use std::ffi::{c_int, c_void};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use config::{Config, Start};
use ram::Ram;

/// Not asked for, done, or given up: mmap and madvise are the kernel's.
const INACTIVE: u8 = 0;
/// The next mapping that qualifies is the RAM, or its next part.
const ARMED: u8 = 1;
/// A thread is handing the RAM over.
const ATTACHING: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(INACTIVE);
static CONFIG: OnceLock<Config> = OnceLock::new();
/// Parts of the RAM that were mapped and wait for the others. Only for who is attaching.
static FOUND: Mutex<attach::Parts> = Mutex::new(Vec::new());
/// How many.
static COUNT: AtomicUsize = AtomicUsize::new(0);

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = {
    extern "C" fn constructor() {
        // Nothing may unwind into the dynamic loader.
        let _ = catch_unwind(start);
    }
    constructor
};

fn start() {
    let config = match config::from_environment() {
        Start::Inactive => return,
        Start::Broken { what, optional } => return give_up(&what, optional),
        Start::Active(config) => config,
    };
    config::scrub_environment();
    if let Err(e) = held::install() {
        return give_up(&format!("pthread_atfork: {e}"), config.optional);
    }
    if CONFIG.set(config).is_ok() {
        STATE.store(ARMED, Ordering::Release);
    }
}

/// The VM is not managed: as asked for, or the end of the process, before its guest has started.
fn give_up(why: &str, optional: bool) {
    STATE.store(INACTIVE, Ordering::Release);
    if optional {
        say(&format!("{why}; going on unmanaged"));
    } else {
        say(why);
        // SAFETY: ends the process without running any of its code.
        unsafe { libc::_exit(1) };
    }
}

/// One line to the VMM's stderr. That may be closed; there is nobody else to tell.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "ballast-shim: {line}");
}

/// mmap(2), with a look at what was mapped.
///
/// # Safety
/// As of mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // The system call, not the next library's mmap: that may not be known yet this early, and finding
    // it may allocate, which may map.
    // SAFETY: the caller's arguments, passed on as they are.
    let mapped = unsafe { libc::syscall(libc::SYS_mmap, addr, len, prot, flags, fd, offset) };
    if mapped != -1 && STATE.load(Ordering::Acquire) == ARMED {
        // SAFETY: errno is this thread's own.
        let errno = unsafe { *libc::__errno_location() };
        let look = || mapped_one(mapped as u64, len, prot, flags, fd, offset);
        if catch_unwind(AssertUnwindSafe(look)).is_err() {
            let optional = CONFIG.get().is_some_and(|c| c.optional);
            give_up("internal error while handing the RAM over", optional);
        }
        // SAFETY: as above.
        unsafe { *libc::__errno_location() = errno };
    }
    mapped as *mut c_void
}

/// mmap64(2): the same on 64-bit systems, and the name that QEMU calls.
///
/// # Safety
/// As of mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    addr: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { mmap(addr, len, prot, flags, fd, offset) }
}

/// madvise(2), but for one advice: no large pages for the managed RAM. Where they are and are not is for the
/// manager to know: the kernel cannot free a part of one that somebody holds, and khugepaged, which makes such
/// of small pages for who asks, tells nobody. (Large pages that are there are mapped as such unasked.)
///
/// # Safety
/// As of madvise(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(addr: *mut c_void, len: usize, advice: c_int) -> c_int {
    if advice == libc::MADV_HUGEPAGE && held::is_kept(addr as u64, len as u64) {
        return 0;
    }
    // SAFETY: the caller's arguments, passed on as they are.
    unsafe { libc::syscall(libc::SYS_madvise, addr, len, advice) as c_int }
}

/// sendmsg(2), but for messages with the RAM file of a guest that is paged: EPERM.
///
/// # Safety
/// As of sendmsg(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, msg: *const libc::msghdr, flags: c_int) -> isize {
    // SAFETY: the caller's message, if there is one.
    let message = unsafe { msg.as_ref() };
    // SAFETY: the caller's arguments, passed on as they are.
    send(message.into_iter(), || unsafe {
        libc::syscall(libc::SYS_sendmsg, fd, msg, flags) as isize
    })
}

/// sendmmsg(2), the same.
///
/// # Safety
/// As of sendmmsg(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmmsg(
    fd: c_int,
    messages: *mut libc::mmsghdr,
    count: libc::c_uint,
    flags: c_int,
) -> c_int {
    let all = match messages.is_null() {
        true => &[],
        // SAFETY: the caller's messages; none more than the kernel looks at.
        false => unsafe {
            std::slice::from_raw_parts(messages, (count as usize).min(MOST_MESSAGES))
        },
    };
    let sent = send(all.iter().map(|one| &one.msg_hdr), || {
        // SAFETY: the caller's arguments, passed on as they are.
        unsafe { libc::syscall(libc::SYS_sendmmsg, fd, messages, count, flags) as isize }
    });
    sent as c_int
}

/// Of one sendmmsg (UIO_MAXIOV).
const MOST_MESSAGES: usize = 1024;

/// Sends, by `call`, what may be.
fn send<'a>(
    messages: impl Iterator<Item = &'a libc::msghdr>,
    call: impl FnOnce() -> isize,
) -> isize {
    // SAFETY: what they point to is valid as of sendmsg, by the promise of who called that.
    let begun = catch_unwind(AssertUnwindSafe(|| unsafe { sent::Sending::begin(messages) }));
    let Ok(Some(sending)) = begun else {
        // SAFETY: errno is this thread's own.
        unsafe { *libc::__errno_location() = libc::EPERM };
        return -1;
    };
    let done = call();
    // By atomics alone: errno stays the call's.
    sending.end(done >= 0);
    done
}

fn mapped_one(addr: u64, len: usize, prot: c_int, flags: c_int, fd: c_int, offset: i64) {
    let Some(config) = CONFIG.get() else { return };
    let count = COUNT.load(Ordering::Acquire);
    let Some(&size) = config.ram_sizes.get(count) else { return };
    // A manager that expects several has said how large each is.
    if config.ram_sizes.len() > 1 && len as u64 != size {
        return;
    }
    let Some(ram) = Ram::recognise(size, addr, len, prot, flags, fd, offset) else { return };
    let ours =
        STATE.compare_exchange(ARMED, ATTACHING, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    if !ours {
        return;
    }
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    if found.len() != count {
        // Another thread's mapping came in between: it has taken this one's place.
        return STATE.store(ARMED, Ordering::Release);
    }
    let attached = attach::duplicate(count, fd).and_then(|file| {
        found.push((ram, file));
        if found.len() < config.ram_sizes.len() {
            // The VMM says how it wants this one before it maps the next.
            held::keep(count, ram);
            COUNT.store(found.len(), Ordering::Release);
            return Ok(ARMED);
        }
        attach::attach(config, std::mem::take(&mut found)).map(|()| INACTIVE)
    });
    if attached.is_err() {
        found.clear();
        held::give_back();
    }
    match attached {
        Ok(state) => STATE.store(state, Ordering::Release),
        Err(attach::Failure::Unmanaged(why)) => {
            give_up(&format!("VM '{}' is not managed: {why}", config.vm), true);
        }
        Err(attach::Failure::NoManager(why)) => {
            give_up(&format!("VM '{}': no manager: {why}", config.vm), config.optional);
        }
    }
}
