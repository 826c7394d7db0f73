//! What the shim does, in the tests' own VMM: its mappings are changed by a thread that the manager
//! tells over a socket what to do. Both sides.

#![allow(dead_code, reason = "each test file uses its own part of this module")]

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use ballast_pager::guest_ram::GuestRam;
use ballast_pager::mappings::{Change, RemapError, Remapper, Target, View, ZERO_RUN};
use ballast_sharing::StoreFile;
use ballast_uffd::{Modes, UffdError};
use ballast_units::{Bytes, HostAddr};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, send, sendmsg,
};

use super::vmm::{Guest, Vmm};

const MOST: usize = 32;
/// Address, length, 0 for home, 2 for home again, or 1 for a file, its index, offset in it.
type Op = [u64; 5];

/// The manager's side.
pub struct Link {
    socket: OwnedFd,
    next: u64,
    outstanding: Option<u64>,
    patience: Duration,
}

impl Link {
    /// Waits until what a former manager asked for is done: changes are made in order.
    pub fn new(socket: OwnedFd, patience: Duration) -> Link {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let mut link = Link { socket, next: now.as_nanos() as u64, outstanding: None, patience };
        link.remap(&[], &[]).ok();
        while !link.settled() {
            std::thread::sleep(Duration::from_millis(1));
        }
        link
    }

    fn answer(&mut self, id: u64, patience: Duration) -> Result<(u64, u64), RemapError> {
        loop {
            let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
            let timeout = Timespec::try_from(patience).unwrap();
            if poll(&mut fds, Some(&timeout)) == Ok(0) {
                self.outstanding = Some(id);
                return Err(RemapError::Unanswered);
            }
            let mut words = [0u64; 3];
            // SAFETY: any bytes are numbers.
            let bytes = unsafe { words.align_to_mut::<u8>().1 };
            match rustix::io::read(&self.socket, bytes) {
                Ok(24) if words[0] == id => {
                    self.outstanding = None;
                    return Ok((words[1], words[2]));
                }
                Ok(24) => {}
                _ => {
                    self.outstanding = Some(id);
                    return Err(RemapError::Gone);
                }
            }
        }
    }
}

impl Remapper for Link {
    fn remap(&mut self, changes: &[Change], files: &[BorrowedFd<'_>]) -> Result<(), RemapError> {
        if !self.settled() {
            return Err(RemapError::Stopped { done: 0, errno: libc::EAGAIN });
        }
        let id = self.next;
        self.next += 1;
        let mut words = vec![id];
        for change in changes {
            let (kind, index, offset) = match change.to {
                Target::Home => (0, 0, 0),
                Target::HomeAgain => (2, 0, 0),
                Target::File { index, offset } => (1, u64::from(index), offset),
            };
            words.extend([change.addr.0, change.len.0, kind, index, offset]);
        }
        // SAFETY: numbers are bytes.
        let bytes = unsafe { words.align_to::<u8>().1 };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(files)));
        }
        let iov = [IoSlice::new(bytes)];
        if sendmsg(&self.socket, &iov, &mut control, SendFlags::NOSIGNAL).is_err() {
            return Err(RemapError::Gone);
        }
        match self.answer(id, self.patience)? {
            (_, 0) => Ok(()),
            (done, errno) => Err(RemapError::Stopped { done: done as usize, errno: errno as i32 }),
        }
    }

    fn settled(&mut self) -> bool {
        match self.outstanding {
            None => true,
            Some(id) => self.answer(id, Duration::ZERO).is_ok(),
        }
    }

    fn most(&self) -> usize {
        MOST
    }
}

/// Nobody answers any more: what came of the last change is not known.
pub struct Lost;

impl Remapper for Lost {
    fn remap(&mut self, _: &[Change], _: &[BorrowedFd<'_>]) -> Result<(), RemapError> {
        Err(RemapError::Gone)
    }
    fn settled(&mut self) -> bool {
        false
    }
    fn most(&self) -> usize {
        MOST
    }
}

/// A way that is lost in the midst of a change, when so many have been made.
pub struct Breaking {
    link: Link,
    left: u64,
    lost: bool,
}

impl Breaking {
    /// Waits until what was asked for over a former one is done. Nobody else may read what comes from the socket.
    pub fn new(socket: OwnedFd, left: u64) -> Breaking {
        Breaking { link: Link::new(socket, Duration::from_millis(200)), left, lost: false }
    }
}

impl Remapper for Breaking {
    fn remap(&mut self, changes: &[Change], files: &[BorrowedFd<'_>]) -> Result<(), RemapError> {
        if self.lost {
            return Err(RemapError::Gone);
        }
        if self.left == 0 {
            // It is begun, or done, or neither.
            self.lost = true;
            self.link.patience = Duration::ZERO;
            let _ = self.link.remap(changes, files);
            return Err(RemapError::Gone);
        }
        self.left -= 1;
        self.link.remap(changes, files)
    }

    fn settled(&mut self) -> bool {
        !self.lost && self.link.settled()
    }

    fn most(&self) -> usize {
        MOST
    }
}

/// A VM's memory, whose mappings can be changed. `dir` has, or gets, the file of zeros.
pub fn connected(vmm: &Vmm, dir: &Path, store: &StoreFile) -> GuestRam {
    let path = dir.join("zeros");
    if !path.exists() {
        std::fs::write(&path, vec![0; ZERO_RUN.bytes().0 as usize]).unwrap();
    }
    let link = Link::new(vmm.link.try_clone().unwrap(), Duration::from_millis(200));
    let ram = vmm.guest_ram();
    let mappings = ram.mappings();
    mappings.connect(Box::new(link), vmm.pid, ram.identities().unwrap()).unwrap();
    mappings.set_store(View::new(store.read_only().unwrap()).unwrap());
    mappings.set_zeros(View::new(std::fs::File::open(path).unwrap().into()).unwrap());
    ram
}

/// The VMM's side: until the process ends.
pub fn serve(guest: &Guest) {
    let mut words = vec![0u64; 1 + MOST * 5];
    loop {
        // SAFETY: any bytes are numbers.
        let bytes = unsafe { words.align_to_mut::<u8>().1 };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut iov = [IoSliceMut::new(bytes)];
        let got = recvmsg(&guest.socket, &mut iov, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
        if got.bytes == 0 {
            // Nobody holds the other end any more.
            return;
        }
        let files: Vec<OwnedFd> = control
            .drain()
            .filter_map(|m| match m {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            })
            .flatten()
            .collect();
        let id = words[0];
        let ops = words[1..got.bytes / 8].as_chunks::<5>().0;
        let (mut done, mut errno) = (0, 0);
        for op in ops {
            let changed = change(guest, op, &files);
            done += u64::from(changed.is_ok());
            if let Err(e) = changed.and_then(|()| watch(guest, op)) {
                errno = e as u64;
                break;
            }
        }
        let answer = [id, done, errno];
        // SAFETY: numbers are bytes.
        let bytes = unsafe { answer.align_to::<u8>().1 };
        let _ = send(&guest.socket, bytes, SendFlags::NOSIGNAL);
    }
}

fn change(guest: &Guest, op: &Op, files: &[OwnedFd]) -> Result<(), i32> {
    let &[addr, len, kind, index, offset] = op;
    let (flags, file, offset) = if kind == 2 {
        let (ram, base, _) = guest.part(guest.page_at(addr));
        (MapFlags::SHARED, ram.as_fd(), addr - base as u64)
    } else if kind == 0 {
        let (ram, base, _) = guest.part(guest.page_at(addr));
        let offset = addr - base as u64;
        // SAFETY: inside the RAM; the kernel reads it.
        let n = unsafe {
            libc::pwrite(
                std::os::fd::AsRawFd::as_raw_fd(ram),
                addr as *const libc::c_void,
                len as usize,
                offset as libc::off_t,
            )
        };
        if n != len as isize {
            return Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO));
        }
        (MapFlags::SHARED, ram.as_fd(), offset)
    } else {
        (MapFlags::PRIVATE | MapFlags::NORESERVE, files[index as usize].as_fd(), offset)
    };
    // SAFETY: inside the RAM, which stays mapped.
    unsafe {
        rustix::mm::mmap(
            addr as *mut _,
            len as usize,
            ProtFlags::READ | ProtFlags::WRITE,
            flags | MapFlags::FIXED,
            file,
            offset,
        )
    }
    .map(drop)
    .map_err(rustix::io::Errno::raw_os_error)
}

/// A discard that no manager reads holds protection up; the next manager does it then.
fn watch(guest: &Guest, op: &Op) -> Result<(), i32> {
    let (addr, len, home) = (HostAddr(op[0]), Bytes(op[1]), op[2] != 1);
    // SAFETY: guest memory, to which no reference leads.
    unsafe { guest.uffd.register(addr, len, Modes::MISSING | Modes::WP) }.map_err(|e| e.errno())?;
    for _ in 0..100 {
        if home {
            return Ok(());
        }
        match guest.uffd.protect(addr, len) {
            Err(UffdError::Again) => std::thread::sleep(Duration::from_millis(1)),
            other => return other.map_err(|e| e.errno()),
        }
    }
    Err(libc::EAGAIN)
}
