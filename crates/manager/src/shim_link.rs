//! Batches to the shim of a VM, and their answers.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_pager::mappings::{Change, Kept, Mappings, Reconnected, RemapError, Remapper, Target};
use ballast_shim_proto::{Batch, Connection, ConnectionError, Hello, MAX_OPS, Message, Op, OpKind};
use ballast_units::{Bytes, HostAddr};
use rustix::net::{Shutdown, shutdown};

/// How long a shim may take for a batch before its VM's share thread turns to other things.
pub const ANSWER: Duration = Duration::from_secs(2);

/// The way to the shim of a paged VM leads over this connection from now on, if there was one: the conversation before
/// broke off, and the shim does nothing any more that was asked for in it. `greet` tells it that it is heard.
///
/// # Errors
/// Of `greet`, or somebody still waits for the VMM after [`ANSWER`]: all is as it was.
pub fn reconnect(
    mappings: &Mappings,
    (connection, hello): (&Arc<Connection>, &Hello),
    greet: impl FnOnce() -> Result<(), String>,
) -> Result<(), String> {
    let link = Box::new(ShimLink::new(connection.clone(), hello));
    match mappings.reconnect(link, ANSWER, greet)? {
        // Fixed: the shim is older, or there is no store to map from, and it can be asked to keep the RAM file alone.
        Reconnected::Connected | Reconnected::Fixed => Ok(()),
        Reconnected::Busy => Err("where its pages are is still being looked up".to_owned()),
    }
}

/// Batches to a shim, one at a time.
pub struct ShimLink {
    connection: Arc<Connection>,
    next: u64,
    /// A batch that was not answered in time, or whose answer cannot come any more.
    outstanding: Option<u64>,
    /// The conversation broke off.
    over: bool,
    maps_again: bool,
    keeps: bool,
    /// By which batch it was asked to keep the RAM file, and what it answered, however late.
    asked_to_keep: Option<u64>,
    kept: Option<Kept>,
}

impl ShimLink {
    /// To the shim that has said `hello`.
    pub fn new(connection: Arc<Connection>, hello: &Hello) -> ShimLink {
        let (maps_again, keeps) = (hello.maps_again(), hello.keeps());
        ShimLink {
            connection,
            next: 1,
            outstanding: None,
            over: false,
            maps_again,
            keeps,
            asked_to_keep: None,
            kept: None,
        }
    }

    /// Ends the conversation, so that the shim hears of it, too. It ends the batch that it is at, and comes again:
    /// only then may anybody look what that came to.
    fn end(&mut self) -> RemapError {
        self.over = true;
        let _ = shutdown(&self.connection, Shutdown::Both);
        RemapError::Gone
    }

    /// Waits for the answer to a batch: how many of its operations are done, and why no more.
    fn answer(&mut self, id: u64, patience: Duration) -> Result<(u32, i32), RemapError> {
        self.outstanding = Some(id);
        if self.over {
            return Err(RemapError::Gone);
        }
        // In all, however much else it says: another VM's thread may be waiting here.
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.connection.recv(Some(left)) {
                Ok((Message::BatchDone { id: answered, done, errno }, _)) if answered == id => {
                    self.outstanding = None;
                    self.note_kept(id, errno);
                    return Ok((done, errno));
                }
                // An answer that nobody waits for any more.
                Ok((Message::BatchDone { .. }, _)) if Instant::now() < deadline => {}
                Ok((Message::BatchDone { .. }, _)) | Err(ConnectionError::TimedOut(_)) => {
                    return Err(RemapError::Unanswered);
                }
                Ok((other, _)) => {
                    // As often as it likes, if it comes again each time.
                    tracing::debug!("a shim sent {} instead of an answer", other.name());
                    return Err(self.end());
                }
                Err(e) => {
                    tracing::debug!("a shim: {e}");
                    return Err(self.end());
                }
            }
        }
    }

    fn note_kept(&mut self, id: u64, errno: i32) {
        if self.asked_to_keep == Some(id) {
            self.kept = match errno {
                0 => Some(Kept::Kept),
                libc::EBUSY => Some(Kept::Sent),
                _ => None,
            };
        }
    }

    /// One batch, and its answer.
    fn ask(&mut self, ops: Vec<Op>, files: &[BorrowedFd<'_>]) -> Result<(), RemapError> {
        let settled = self.settled();
        if self.over {
            return Err(RemapError::Gone);
        }
        if !settled {
            return Err(RemapError::Stopped { done: 0, errno: libc::EAGAIN });
        }
        let id = self.next;
        self.next += 1;
        let count = ops.len();
        let batch =
            Batch::new(id, ops).map_err(|_| RemapError::Stopped { done: 0, errno: libc::E2BIG })?;
        let fds: Vec<BorrowedFd<'_>> = files.to_vec();
        // One patience for both halves: it may not even read.
        let begun = Instant::now();
        if let Err(e) = self.connection.send_within(ANSWER, &Message::Batch(batch), &fds) {
            // It has not got it.
            tracing::debug!("a shim: {e}");
            return Err(self.end());
        }
        match self.answer(id, ANSWER.saturating_sub(begun.elapsed()))? {
            (_, 0) => Ok(()),
            (done, errno) => Err(RemapError::Stopped { done: (done as usize).min(count), errno }),
        }
    }
}

impl Remapper for ShimLink {
    fn remap(&mut self, changes: &[Change], files: &[BorrowedFd<'_>]) -> Result<(), RemapError> {
        let ops = changes.iter().map(|change| {
            let (kind, file_offset, fd_index) = match change.to {
                Target::Home => (OpKind::MapHome, 0, 0),
                Target::HomeAgain => (OpKind::MapAgain, 0, 0),
                Target::File { index, offset } => (OpKind::MapStore, offset, index),
            };
            Op { kind, addr: change.addr, len: change.len, file_offset, fd_index }
        });
        self.ask(ops.collect(), files)
    }

    fn settled(&mut self) -> bool {
        match self.outstanding {
            None => true,
            Some(id) => self.answer(id, Duration::ZERO).is_ok(),
        }
    }

    fn most(&self) -> usize {
        MAX_OPS
    }

    fn maps_again(&self) -> bool {
        self.maps_again
    }

    fn keep(&mut self, addr: HostAddr, len: Bytes) -> Result<Kept, RemapError> {
        if !self.keeps {
            return Ok(Kept::Unable);
        }
        // It may have answered meanwhile.
        let settled = self.settled();
        if settled && self.kept.is_none() {
            let keep = Op { kind: OpKind::Keep, addr, len, file_offset: 0, fd_index: 0 };
            self.asked_to_keep = Some(self.next);
            let asked = self.ask(vec![keep], &[]);
            return self.kept.map_or_else(|| asked.map(|()| Kept::Unanswered), Ok);
        }
        self.kept.ok_or(RemapError::Unanswered)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_shim_proto::{ONE_PART, VmName};

    fn hello(version: u32) -> Hello {
        let vm = VmName::new("a").unwrap();
        Hello { version, reconnect: false, vm, pid: 1, parts: Vec::new(), page_size: 4096 }
    }

    #[test]
    fn a_ram_file_that_was_sent_is_told_from_one_that_is_kept_and_older_shims_are_not_asked() {
        let (ours, theirs) = Connection::pair().unwrap();
        let ours = Arc::new(ours);
        let mut older = ShimLink::new(ours.clone(), &hello(ONE_PART - 2));
        let mut link = ShimLink::new(ours, &hello(ONE_PART));
        let shim = std::thread::spawn(move || {
            for errno in [libc::EAGAIN, libc::EBUSY] {
                let (Message::Batch(batch), _) = theirs.recv(None).unwrap() else { panic!() };
                assert!(matches!(batch.ops(), [Op { kind: OpKind::Keep, .. }]));
                theirs.send(&Message::BatchDone { id: batch.id, done: 0, errno }, &[]).unwrap();
            }
        });
        let at = (HostAddr(4096), Bytes(4096));
        assert_eq!(older.keep(at.0, at.1), Ok(Kept::Unable));
        let sending = RemapError::Stopped { done: 0, errno: libc::EAGAIN };
        assert_eq!(link.keep(at.0, at.1), Err(sending));
        assert_eq!(link.keep(at.0, at.1), Ok(Kept::Sent));
        shim.join().unwrap();
        // It is not asked again.
        assert_eq!(link.keep(at.0, at.1), Ok(Kept::Sent));
    }

    fn change() -> Change {
        Change { addr: HostAddr(4096), len: Bytes(4096), to: Target::Home }
    }

    #[test]
    fn a_shim_that_is_late_is_waited_for_without_sending_more() {
        let (ours, theirs) = Connection::pair().unwrap();
        let mut link = ShimLink::new(Arc::new(ours), &hello(ONE_PART));
        let shim = std::thread::spawn(move || {
            let (Message::Batch(batch), _) = theirs.recv(None).unwrap() else { panic!("a batch") };
            (theirs, batch.id)
        });
        assert_eq!(link.remap(&[change()], &[]), Err(RemapError::Unanswered));
        let (theirs, id) = shim.join().unwrap();
        assert!(!link.settled());
        let again = link.remap(&[change()], &[]);
        assert_eq!(again, Err(RemapError::Stopped { done: 0, errno: libc::EAGAIN }));
        // Answers to what was never asked change nothing.
        theirs.send(&Message::BatchDone { id: id + 7, done: 1, errno: 0 }, &[]).unwrap();
        assert!(!link.settled());
        theirs.send(&Message::BatchDone { id, done: 1, errno: 0 }, &[]).unwrap();
        assert!(link.settled());
        drop(theirs);
        assert_eq!(link.remap(&[change()], &[]), Err(RemapError::Gone));
    }

    #[test]
    fn a_late_answer_whether_the_ram_file_is_kept_counts() {
        let (ours, theirs) = Connection::pair().unwrap();
        let mut link = ShimLink::new(Arc::new(ours), &hello(ONE_PART));
        let mut keep = || link.keep(HostAddr(4096), Bytes(4096));
        assert_eq!(keep(), Err(RemapError::Unanswered));
        assert_eq!(keep(), Err(RemapError::Unanswered));
        let (Message::Batch(batch), _) = theirs.recv(None).unwrap() else { panic!("a batch") };
        theirs.send(&Message::BatchDone { id: batch.id, done: 1, errno: 0 }, &[]).unwrap();
        assert_eq!(keep(), Ok(Kept::Kept));
        drop(theirs);
        assert_eq!(keep(), Ok(Kept::Kept));
    }

    #[test]
    fn nonsense_from_a_shim_is_an_error_and_not_a_crash() {
        let (ours, theirs) = Connection::pair().unwrap();
        let mut link = ShimLink::new(Arc::new(ours), &hello(ONE_PART));
        let shim = std::thread::spawn(move || {
            theirs.recv(None).unwrap();
            // More operations done than there were.
            theirs
                .send(&Message::BatchDone { id: 1, done: 900, errno: libc::ENOMEM }, &[])
                .unwrap();
            theirs.recv(None).unwrap();
            theirs.send(&Message::Managed, &[]).unwrap();
            theirs
        });
        let stopped = Err(RemapError::Stopped { done: 1, errno: libc::ENOMEM });
        assert_eq!(link.remap(&[change()], &[]), stopped);
        assert_eq!(link.remap(&[change()], &[]), Err(RemapError::Gone));
        let theirs = shim.join().unwrap();
        // It hears that it is to come again; until then nobody knows what it did last.
        assert!(matches!(theirs.recv(None), Err(ConnectionError::Closed)));
        assert_eq!(link.remap(&[change()], &[]), Err(RemapError::Gone));
        assert!(!link.settled());
    }

    #[test]
    fn what_a_shim_did_last_is_not_known_once_it_has_gone() {
        let (ours, theirs) = Connection::pair().unwrap();
        let mut link = ShimLink::new(Arc::new(ours), &hello(ONE_PART));
        let shim = std::thread::spawn(move || drop(theirs.recv(None).unwrap()));
        assert_eq!(link.remap(&[change()], &[]), Err(RemapError::Gone));
        shim.join().unwrap();
        assert!(!link.settled());
        // One that had answered has nothing under way.
        let (ours, theirs) = Connection::pair().unwrap();
        let mut link = ShimLink::new(Arc::new(ours), &hello(ONE_PART));
        drop(theirs);
        assert_eq!(link.remap(&[change()], &[]), Err(RemapError::Gone));
        assert!(link.settled());
    }
}
