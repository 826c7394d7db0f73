//! Asynchronous page I/O: io_uring, or plain blocking calls where the kernel or a sandbox does not
//! offer it.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};

use super::SwapFile;
use super::inject::{Buffer, Injector, Op, done_as};

/// Between two tries of what the kernel takes nothing of for now.
const AGAIN: Duration = Duration::from_millis(1);
/// Such tries, one after the other, for which the end of a ring waits.
const TRIES: u32 = 10_000;

/// A finished operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// What the submitter called it.
    pub tag: u64,
    /// Bytes moved, or an errno.
    pub result: Result<u32, i32>,
}

enum Engine {
    Uring(Box<IoUring>),
    Blocking(VecDeque<Completion>),
    /// Tests: as an injector says; with each completion, when it is to be seen.
    Injected(Arc<dyn Injector>, Vec<(Instant, Completion)>),
}

/// Memory that an operation has been lent, and its length in bytes.
#[derive(Clone, Copy)]
enum Span {
    /// Written to a file.
    From(*const u8, u32),
    /// Read into.
    Into(*mut u8, u32),
}

impl Span {
    /// # Safety
    /// The memory is valid, and lent as its kind says, for as long as the answer lives.
    unsafe fn buffer<'a>(self) -> Buffer<'a> {
        match self {
            Span::From(at, len) => {
                // SAFETY: valid for reads as the caller guarantees.
                Buffer::From(unsafe { std::slice::from_raw_parts(at, len as usize) })
            }
            Span::Into(at, len) => {
                // SAFETY: valid for writes as the caller guarantees.
                Buffer::Into(unsafe { std::slice::from_raw_parts_mut(at, len as usize) })
            }
        }
    }
}

/// A queue of page I/O, used by one thread.
pub struct Ring {
    engine: Engine,
    depth: u32,
    in_flight: u32,
}

impl Ring {
    /// Room for `depth` operations at a time.
    pub fn new(depth: u32) -> Ring {
        let engine = match IoUring::new(depth) {
            Ok(ring) => Engine::Uring(Box::new(ring)),
            Err(e) => {
                tracing::warn!("no io_uring ({e}): swap I/O will block its thread");
                Engine::Blocking(VecDeque::new())
            }
        };
        Ring { engine, depth, in_flight: 0 }
    }

    /// One whose operations end as an injector says, if there is one.
    pub fn with(depth: u32, injector: Option<Arc<dyn Injector>>) -> Ring {
        match injector {
            None => Ring::new(depth),
            Some(injector) => {
                Ring { engine: Engine::Injected(injector, Vec::new()), depth, in_flight: 0 }
            }
        }
    }

    /// Operations that were submitted and not reaped.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }
    /// Whether each operation holds up its submitter.
    pub fn is_blocking(&self) -> bool {
        matches!(self.engine, Engine::Blocking(_))
    }
    /// Whether the next one is to wait until some are reaped.
    pub fn is_full(&self) -> bool {
        self.in_flight >= self.depth
    }
    /// Readable when a completion waits; None where I/O blocks.
    pub fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.engine {
            // SAFETY: the descriptor lives as long as the ring, which self owns.
            Engine::Uring(ring) => Some(unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) }),
            Engine::Blocking(_) | Engine::Injected(..) => None,
        }
    }

    /// Queues a write; `submit` begins it.
    ///
    /// # Safety
    /// `len` bytes from `from` stay valid and unchanged until the completion `tag` is reaped.
    ///
    /// # Errors
    /// The queue is full, and the kernel takes nothing from it.
    pub unsafe fn write(
        &mut self,
        file: &SwapFile,
        from: *const u8,
        len: u32,
        offset: u64,
        tag: u64,
    ) -> std::io::Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.queue(file, Span::From(from, len), offset, tag) }
    }

    /// Queues a read; `submit` begins it.
    ///
    /// # Safety
    /// `len` bytes from `into` stay valid, and nobody else touches them, until the completion `tag`
    /// is reaped.
    ///
    /// # Errors
    /// The queue is full, and the kernel takes nothing from it.
    pub unsafe fn read(
        &mut self,
        file: &SwapFile,
        into: *mut u8,
        len: u32,
        offset: u64,
        tag: u64,
    ) -> std::io::Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.queue(file, Span::Into(into, len), offset, tag) }
    }

    /// # Safety
    /// As of [`write`](Self::write) or [`read`](Self::read), by the kind of span.
    unsafe fn queue(
        &mut self,
        file: &SwapFile,
        span: Span,
        offset: u64,
        tag: u64,
    ) -> std::io::Result<()> {
        match &mut self.engine {
            Engine::Uring(ring) => {
                let fd = types::Fd(file.file().as_raw_fd());
                let entry = match span {
                    Span::From(at, len) => opcode::Write::new(fd, at, len).offset(offset).build(),
                    Span::Into(at, len) => opcode::Read::new(fd, at, len).offset(offset).build(),
                };
                // SAFETY: the buffer is valid as the caller guarantees, the file outlives the ring's
                // operations because the submitter owns both.
                unsafe { push(ring, entry.user_data(tag))? };
            }
            Engine::Blocking(done) => {
                // SAFETY: valid as the caller guarantees; no longer lent when this returns.
                let result = match unsafe { span.buffer() } {
                    Buffer::From(bytes) => rustix::io::pwrite(file.file(), bytes, offset),
                    Buffer::Into(bytes) => rustix::io::pread(file.file(), bytes, offset),
                };
                done.push_back(completion(tag, result));
            }
            Engine::Injected(injector, done) => {
                let (write, len) = match span {
                    Span::From(_, len) => (true, len),
                    Span::Into(_, len) => (false, len),
                };
                let verdict = injector.verdict(&Op { path: file.path(), write, offset, len });
                // SAFETY: as above.
                let result = done_as(verdict, file.file(), offset, unsafe { span.buffer() });
                done.push((Instant::now() + verdict.late, Completion { tag, result }));
            }
        }
        self.in_flight += 1;
        Ok(())
    }

    /// Begins all that was queued, by one system call: the kernel hands what comes together on to the device
    /// together, and tells it once. What it does not take now goes with the next.
    pub fn submit(&mut self) {
        let Engine::Uring(ring) = &mut self.engine else { return };
        if !ring.submission().is_empty() {
            match ring.submit() {
                Err(e) if !is_transient(&e) => {
                    tracing::warn!("submitting swap I/O: {e}; tried again with the next");
                }
                _ => {}
            }
        }
    }

    /// Whether the kernel has not taken all that was queued: somebody must `reap` or `submit` soon.
    pub fn is_behind(&mut self) -> bool {
        match &mut self.engine {
            Engine::Uring(ring) => !ring.submission().is_empty(),
            Engine::Blocking(_) | Engine::Injected(..) => false,
        }
    }

    /// Collects what is finished; waits for at least one when `wait` and something is in flight, unless the kernel has
    /// no room for more at the moment.
    ///
    /// # Errors
    /// Of io_uring_enter, if nothing was finished and the same will not do soon. What is in flight stays so.
    pub fn reap(&mut self, wait: bool, out: &mut Vec<Completion>) -> std::io::Result<()> {
        if self.in_flight == 0 {
            return Ok(());
        }
        let before = out.len();
        match &mut self.engine {
            Engine::Uring(ring) => {
                // Looking at the queue costs no system call; one that was left full does.
                let entered = match wait || !ring.submission().is_empty() {
                    true => ring.submit_and_wait(usize::from(wait)).map(drop),
                    false => Ok(()),
                };
                // Whatever it says: what is finished makes room for what it does not take now.
                out.extend(ring.completion().map(|entry| Completion {
                    tag: entry.user_data(),
                    result: u32::try_from(entry.result()).map_err(|_| -entry.result()),
                }));
                let done = (out.len() - before) as u32;
                self.in_flight -= done;
                return after_entering(entered, done > 0, wait);
            }
            Engine::Blocking(done) => out.extend(done.drain(..)),
            Engine::Injected(_, done) => {
                if wait && let Some(first) = done.iter().map(|d| d.0).min() {
                    std::thread::sleep(first.saturating_duration_since(Instant::now()));
                }
                let now = Instant::now();
                out.extend(done.extract_if(.., |d| d.0 <= now).map(|d| d.1));
            }
        }
        self.in_flight -= (out.len() - before) as u32;
        Ok(())
    }
}

impl Drop for Ring {
    /// Buffers of operations in flight belong to others: they must not be freed under the kernel.
    fn drop(&mut self) {
        let (mut out, mut tries) = (Vec::new(), 0);
        while self.in_flight > 0 {
            out.clear();
            let error = match self.reap(true, &mut out) {
                Ok(()) if tries < TRIES => None,
                Ok(()) => Some(std::io::ErrorKind::WouldBlock.into()),
                Err(e) => Some(e),
            };
            tries = if out.is_empty() { tries + 1 } else { 0 };
            if let Some(e) = error {
                tracing::error!("waiting for {} swap operations: {e}", self.in_flight);
                break;
            }
        }
    }
}

/// Queues an entry. Once it is in the queue it counts as submitted whatever the kernel says later:
/// it goes with the next submission, and the buffer stays lent until its completion.
///
/// # Safety
/// As for `Ring::write` and `Ring::read`.
unsafe fn push(ring: &mut IoUring, entry: io_uring::squeue::Entry) -> std::io::Result<()> {
    // SAFETY: the entry's buffer and file are valid as the caller guarantees.
    while unsafe { ring.submission().push(&entry) }.is_err() {
        ring.submit()?;
    }
    Ok(())
}

/// What becomes of an answer to io_uring_enter, once what was `done` has been taken. Who would `wait` and cannot does not
/// try again at once.
fn after_entering(entered: std::io::Result<()>, done: bool, wait: bool) -> std::io::Result<()> {
    match entered {
        Err(e) if is_transient(&e) => {
            if wait && !done && e.raw_os_error() != Some(libc::EINTR) {
                std::thread::sleep(AGAIN);
            }
            Ok(())
        }
        // It is told again.
        Err(_) if done => Ok(()),
        other => other,
    }
}

/// Whether the same can be asked for again soon.
fn is_transient(e: &std::io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN))
}

fn completion(tag: u64, result: rustix::io::Result<usize>) -> Completion {
    Completion { tag, result: result.map(|n| n as u32).map_err(|e| e.raw_os_error()) }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::mapped_file::Mapping;
    use ballast_units::{PAGE_SIZE, Pages};

    #[test]
    fn what_is_finished_is_collected_whatever_becomes_of_a_submission() {
        let dir = tempfile::tempdir().unwrap();
        let swap = SwapFile::create(&dir.path().join("s"), Pages(2)).unwrap();
        let memory = Mapping::anonymous(2 * PAGE_SIZE).unwrap();
        let mut ring = Ring::new(4);
        let Some(fd) = ring.poll_fd().map(|fd| fd.as_raw_fd()) else { return };
        let read = |ring: &mut Ring, n: u64| {
            // SAFETY: pages of a mapping that outlives the operations.
            unsafe {
                let into = memory.as_ptr().add(n as usize * PAGE_SIZE);
                ring.read(&swap, into, 4096, n * 4096, n).unwrap();
            }
        };
        read(&mut ring, 0);
        ring.submit();
        let Engine::Uring(queues) = &mut ring.engine else { unreachable!() };
        while queues.completion().is_empty() {
            std::thread::yield_now();
        }
        // From here on io_uring_enter fails, and the queues are there.
        let other = std::fs::File::open("/dev/null").unwrap();
        // SAFETY: nobody but this ring uses the descriptor, which it closes.
        assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), fd) }, fd);
        read(&mut ring, 1);
        let mut out = Vec::new();
        assert!(ring.is_behind() && ring.reap(false, &mut out).is_ok());
        assert_eq!(out, [Completion { tag: 0, result: Ok(4096) }]);
        assert!(ring.reap(false, &mut out).is_err());
        assert_eq!((out.len(), ring.in_flight()), (1, 1));
    }

    #[test]
    fn what_was_queued_has_ended_when_a_ring_ends() {
        use std::os::unix::fs::FileExt;
        let dir = tempfile::tempdir().unwrap();
        let swap = SwapFile::create(&dir.path().join("s"), Pages(1)).unwrap();
        let mut memory = Mapping::anonymous(2 * PAGE_SIZE).unwrap();
        memory.bytes_mut(0, PAGE_SIZE).fill(0x5a);
        swap.file().write_all_at(memory.bytes_mut(0, PAGE_SIZE), 0).unwrap();
        let mut ring = Ring::new(4);
        if ring.poll_fd().is_none() {
            return;
        }
        // SAFETY: a page of a mapping that outlives the ring.
        unsafe { ring.read(&swap, memory.as_ptr().add(PAGE_SIZE), 4096, 0, 7).unwrap() };
        assert!(ring.is_behind(), "it is not even submitted");
        drop(ring);
        assert!(memory.bytes_mut(PAGE_SIZE, PAGE_SIZE).iter().all(|&b| b == 0x5a));
    }

    #[test]
    fn what_the_kernel_has_no_room_for_is_tried_again_and_all_else_is_said() {
        let error = |errno| Err(std::io::Error::from_raw_os_error(errno));
        for transient in [libc::EAGAIN, libc::EBUSY, libc::EINTR] {
            for (done, wait) in [(false, false), (true, true), (false, true)] {
                assert!(after_entering(error(transient), done, wait).is_ok(), "{transient}");
            }
        }
        // Who waits for nothing does not come back at once.
        let begun = Instant::now();
        after_entering(error(libc::EAGAIN), false, true).unwrap();
        assert!(begun.elapsed() >= AGAIN);
        for wait in [false, true] {
            assert!(after_entering(error(libc::EBADFD), true, wait).is_ok());
            assert!(after_entering(error(libc::EBADFD), false, wait).is_err());
            assert!(after_entering(Ok(()), false, wait).is_ok());
        }
    }

    #[test]
    fn clusters_written_come_back_page_by_page_in_any_order() {
        let dir = tempfile::tempdir().unwrap();
        let swap = SwapFile::create(&dir.path().join("s"), Pages(64)).unwrap();
        for mut ring in [
            Ring::new(16),
            Ring { engine: Engine::Blocking(VecDeque::new()), depth: 16, in_flight: 0 },
        ] {
            let mut memory = Mapping::anonymous(64 * PAGE_SIZE).unwrap();
            for i in 0..32 {
                memory.bytes_mut(i * PAGE_SIZE, PAGE_SIZE).fill(i as u8 + 1);
            }
            let mut out = Vec::new();
            // SAFETY: the mapping outlives the ring's operations, reaped below.
            unsafe { ring.write(&swap, memory.as_ptr(), 32 * 4096, 8192, 77).unwrap() };
            while out.is_empty() {
                ring.reap(true, &mut out).unwrap();
            }
            assert_eq!(out, [Completion { tag: 77, result: Ok(32 * 4096) }]);
            out.clear();
            for i in 0..16u64 {
                // SAFETY: distinct pages of a mapping that outlives the operations.
                unsafe {
                    let into = memory.as_ptr().add((32 + i as usize) * PAGE_SIZE);
                    ring.read(&swap, into, 4096, 8192 + i * 4096, i).unwrap();
                }
            }
            assert!(ring.is_full());
            while ring.in_flight() > 0 {
                ring.reap(true, &mut out).unwrap();
            }
            assert_eq!(out.len(), 16);
            for i in 0..16 {
                assert!(
                    memory
                        .bytes_mut((32 + i) * PAGE_SIZE, PAGE_SIZE)
                        .iter()
                        .all(|&b| b == i as u8 + 1)
                );
            }
        }
    }
}
