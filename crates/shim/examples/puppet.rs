//! Stands in for a VMM in tests: maps memory the way QEMU does, then does what stdin says, one line
//! at a time, answering each with one line. Addresses are byte offsets in the mapping.

use std::ffi::CString;
use std::io::{BufRead, Write};
use std::process::Command;

const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// Reserves address space, then maps `fd` over it, as QEMU's ram_mmap does.
fn map_like_qemu(fd: i32, len: usize) -> Result<*mut u8, String> {
    // SAFETY: new mappings only; the second replaces the first, which nobody uses.
    unsafe {
        let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let reserved = libc::mmap(std::ptr::null_mut(), len, libc::PROT_NONE, private, -1, 0);
        let shared = libc::MAP_SHARED | libc::MAP_FIXED;
        match libc::mmap(reserved, len, RW, shared, fd, 0) {
            libc::MAP_FAILED => Err(std::io::Error::last_os_error().to_string()),
            at => Ok(at.cast()),
        }
    }
}

fn open_ram(path: &str, len: usize) -> Result<i32, String> {
    let name = CString::new(path).map_err(|e| e.to_string())?;
    // SAFETY: plain calls with a valid string.
    let fd = unsafe {
        match path {
            "memfd" => libc::memfd_create(c"memory-backend-memfd".as_ptr(), libc::MFD_CLOEXEC),
            _ => libc::open(name.as_ptr(), libc::O_RDWR | libc::O_CREAT | libc::O_CLOEXEC, 0o600),
        }
    };
    // SAFETY: as above.
    if fd < 0 || unsafe { libc::ftruncate(fd, len as i64) } < 0 {
        return Err(std::io::Error::last_os_error().to_string());
    }
    Ok(fd)
}

/// Descriptors of the kinds that must not be inherited.
fn telltale_fds() -> usize {
    let Ok(dir) = std::fs::read_dir("/proc/self/fd") else { return usize::MAX };
    dir.flatten()
        .filter_map(|e| std::fs::read_link(e.path()).ok())
        .filter(|l| {
            let l = l.to_string_lossy();
            l.contains("userfaultfd") || l.starts_with("socket:")
        })
        .count()
}

/// Of the environment that a program gets from here: how many variables are Ballast's, and how many there are.
fn exec() -> Result<String, String> {
    let env = Command::new("/usr/bin/env").output().map_err(|e| e.to_string())?;
    let env = String::from_utf8_lossy(&env.stdout).into_owned();
    let told = ["BALLAST_VM=", "BALLAST_SHIM_SOCKET=", "BALLAST_RAM_SIZE=", "LD_PRELOAD="];
    let ours = env.lines().filter(|l| told.iter().any(|t| l.starts_with(t)));
    Ok(format!("{} {}", ours.count(), env.lines().count()))
}

/// A child, which stays, and how many telltale descriptors it has.
fn fork() -> String {
    let mut pipe = [0; 2];
    // SAFETY: the array is the pipe's; the child of this threaded process uses only what
    // is allowed after a fork here: one malloc arena and /proc (a test can live with that).
    unsafe {
        libc::pipe(pipe.as_mut_ptr());
        match libc::fork() {
            0 => {
                let count = [telltale_fds().min(255) as u8];
                libc::write(pipe[1], count.as_ptr().cast(), 1);
                libc::pause();
                libc::_exit(0)
            }
            child => {
                let mut count = [255u8];
                libc::read(pipe[0], count.as_mut_ptr().cast(), 1);
                format!("{child} {}", count[0])
            }
        }
    }
}

/// Sends a duplicate of `fd` behind a word, after one of stdin, by sendmsg of the C library, as a VMM does; or by
/// sendmmsg, if `many`. Nobody receives it.
fn send(fd: i32, many: bool) -> Result<String, String> {
    let mut ends = [0; 2];
    let mut word = *b"word";
    let mut data = libc::iovec { iov_base: word.as_mut_ptr().cast(), iov_len: word.len() };
    // Aligned as a header has to be.
    let mut control = [0u64; 8];
    // SAFETY: all that the message points to lives until it is sent; there is room for two descriptors.
    let (sent, error) = unsafe {
        libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, ends.as_mut_ptr());
        let copy = libc::dup(fd);
        let mut msg: libc::msghdr = std::mem::zeroed();
        (msg.msg_iov, msg.msg_iovlen) = (&raw mut data, 1);
        msg.msg_control = control.as_mut_ptr().cast();
        msg.msg_controllen = libc::CMSG_SPACE(8) as usize;
        let header = libc::CMSG_FIRSTHDR(&raw const msg);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(8) as usize;
        let at = libc::CMSG_DATA(header).cast::<i32>();
        at.write_unaligned(0);
        at.add(1).write_unaligned(copy);
        let sent = if many {
            let mut one = libc::mmsghdr { msg_hdr: msg, msg_len: 0 };
            match libc::sendmmsg(ends[0], &raw mut one, 1, 0) {
                1 => one.msg_len as isize,
                _ => -1,
            }
        } else {
            libc::sendmsg(ends[0], &raw const msg, 0)
        };
        let error = std::io::Error::last_os_error();
        for fd in [copy, ends[0], ends[1]] {
            libc::close(fd);
        }
        (sent, error)
    };
    if sent == word.len() as isize { Ok("ok".to_owned()) } else { Err(error.to_string()) }
}

fn number(text: &str) -> Result<usize, String> {
    text.parse().map_err(|e| format!("{text}: {e}"))
}

struct Puppet {
    base: *mut u8,
    len: usize,
    fd: i32,
}

impl Puppet {
    fn word(&self, offset: usize) -> Result<*mut u64, String> {
        if self.base.is_null() || !offset.is_multiple_of(8) || offset + 8 > self.len {
            return Err("no such word".to_owned());
        }
        // SAFETY: inside the mapping, as just checked.
        Ok(unsafe { self.base.add(offset) }.cast())
    }

    fn advise(&self, offset: &str, len: &str, advice: i32) -> Result<String, String> {
        let at = self.word(number(offset)?)?;
        // SAFETY: inside the mapping; its content is the caller's to lose.
        match unsafe { libc::madvise(at.cast(), number(len)?, advice) } {
            0 => Ok("ok".to_owned()),
            _ => Err(std::io::Error::last_os_error().to_string()),
        }
    }

    /// To node 0, as QEMU binds its RAM (`policy=bind`).
    fn bind(&self, offset: &str, len: &str) -> Result<String, String> {
        const MPOL_BIND: i64 = 2;
        let (at, len) = (self.word(number(offset)?)?, number(len)?);
        let nodes = [1u64, 0];
        let flags = 0i64;
        // SAFETY: inside the mapping; nothing is changed but where pages are to lie.
        match unsafe {
            libc::syscall(libc::SYS_mbind, at, len, MPOL_BIND, nodes.as_ptr(), 65i64, flags)
        } {
            0 => Ok("ok".to_owned()),
            _ => Err(std::io::Error::last_os_error().to_string()),
        }
    }

    /// Writes to the first `pages` pages in random order, and sees each time what was written last;
    /// until the word at `stop` is not zero. Answers with the number of writes.
    fn hammer(&self, pages: usize, stop: usize) -> Result<String, String> {
        let stop = self.word(stop)?;
        let mut written = Vec::new();
        for page in 0..pages {
            let at = self.word(page * 4096)?;
            // SAFETY: `word` checked it.
            written.push((at, unsafe { at.read_volatile() }));
        }
        let mut state = 88_172_645_463_325_252u64;
        let mut count = 0;
        // SAFETY: `word` checked it.
        while unsafe { stop.read_volatile() } == 0 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let page = state as usize % pages;
            let (at, last) = &mut written[page];
            // SAFETY: `word` checked it.
            let found = unsafe { at.read_volatile() };
            if found != *last {
                return Err(format!("page {page} has {found}, not {last}, after {count} writes"));
            }
            *last = state;
            // SAFETY: as above.
            unsafe { at.write_volatile(state) };
            count += 1;
        }
        Ok(count.to_string())
    }

    fn obey(&mut self, words: &[&str]) -> Result<String, String> {
        match *words {
            ["map", path, len] => {
                self.len = number(len)?;
                self.fd = open_ram(path, self.len)?;
                self.base = map_like_qemu(self.fd, self.len)?;
                Ok(format!("{}", self.base as usize))
            }
            // Another of its mappings is meant from now on.
            ["use", addr, len] => {
                self.len = number(len)?;
                self.base = number(addr)? as *mut u8;
                Ok("ok".to_owned())
            }
            ["map-again"] => Ok(format!("{}", map_like_qemu(self.fd, self.len)? as usize)),
            ["read", offset] => {
                let at = self.word(number(offset)?)?;
                // SAFETY: `word` checked it.
                Ok(unsafe { at.read_volatile() }.to_string())
            }
            ["write", offset, value] => {
                let at = self.word(number(offset)?)?;
                // SAFETY: `word` checked it.
                unsafe { at.write_volatile(number(value)? as u64) };
                Ok("ok".to_owned())
            }
            ["touch", offset, len] => {
                for page in (number(offset)?..number(offset)? + number(len)?).step_by(4096) {
                    // SAFETY: `word` checked it.
                    unsafe { self.word(page)?.read_volatile() };
                }
                Ok("ok".to_owned())
            }
            ["discard", offset, len] => self.advise(offset, len, libc::MADV_REMOVE),
            // As QEMU does it besides, when it takes pages of the RAM file from its guest.
            ["drop", offset, len] => self.advise(offset, len, libc::MADV_DONTNEED),
            ["dontdump", offset, len] => self.advise(offset, len, libc::MADV_DONTDUMP),
            ["hugepage", offset, len] => self.advise(offset, len, libc::MADV_HUGEPAGE),
            ["bind", offset, len] => self.bind(offset, len),
            ["hammer", pages, stop] => self.hammer(number(pages)?, number(stop)?),
            ["send"] => send(self.fd, false),
            ["send-many"] => send(self.fd, true),
            ["send-other"] => send(2, false),
            ["exec"] => exec(),
            ["fork"] => Ok(fork()),
            _ => Err("unknown command".to_owned()),
        }
    }
}

fn main() {
    let mut puppet = Puppet { base: std::ptr::null_mut(), len: 0, fd: -1 };
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        let answer = puppet.obey(&words).unwrap_or_else(|e| format!("error {e}"));
        let mut out = std::io::stdout();
        if writeln!(out, "{answer}").and_then(|()| out.flush()).is_err() {
            return;
        }
    }
}
