//! What the kernel tells through the fd.

use std::os::fd::{FromRawFd, OwnedFd};

use ballast_units::HostAddr;

use crate::abi;

/// One message. Addresses are in the process that created the userfaultfd; those of faults are exact
/// with `Features::EXACT_ADDRESS`, else rounded down to the page.
#[derive(Debug)]
pub enum Event {
    /// A page that is not there was touched.
    Missing {
        /// Exact, or that of the page: see above.
        addr: HostAddr,
        /// By a write; else by a read.
        write: bool,
    },
    /// A write-protected page was written.
    Protected {
        /// Exact, or that of the page: see above.
        addr: HostAddr,
    },
    /// A page was touched that is in the file, but not in the page table.
    Minor {
        /// Exact, or that of the page: see above.
        addr: HostAddr,
    },
    /// The process discarded pages: what is touched there next is missing.
    Remove {
        /// The first byte.
        start: HostAddr,
        /// One past the last.
        end: HostAddr,
    },
    /// The process unmapped pages. Nothing of them is registered any more.
    Unmap {
        /// The first byte.
        start: HostAddr,
        /// One past the last.
        end: HostAddr,
    },
    /// The process moved a mapping.
    Remap {
        /// Where it began.
        from: HostAddr,
        /// Where it begins now.
        to: HostAddr,
        /// Bytes that were moved.
        len: u64,
    },
    /// The process forked; the userfaultfd of the child.
    Fork(OwnedFd),
    /// A message this version does not know, by its `event` byte.
    Unknown(u8),
}

impl Event {
    /// Decodes one `struct uffd_msg`.
    ///
    /// # Safety
    /// The message was just read from a userfaultfd and is decoded once: a fork message carries a
    /// descriptor that the kernel installed in this process, which the event then owns.
    pub(crate) unsafe fn decode(msg: &[u8; abi::MSG_SIZE]) -> Event {
        let word = |i: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&msg[8 + 8 * i..16 + 8 * i]);
            u64::from_ne_bytes(bytes)
        };
        let addr = |i| HostAddr(word(i));
        match msg[0] {
            abi::EVENT_PAGEFAULT => {
                let flags = word(0);
                // The order matters: a write to a protected page carries WRITE as well.
                if flags & abi::PAGEFAULT_FLAG_WP != 0 {
                    Event::Protected { addr: addr(1) }
                } else if flags & abi::PAGEFAULT_FLAG_MINOR != 0 {
                    Event::Minor { addr: addr(1) }
                } else {
                    let write = flags & abi::PAGEFAULT_FLAG_WRITE != 0;
                    Event::Missing { addr: addr(1), write }
                }
            }
            abi::EVENT_REMOVE => Event::Remove { start: addr(0), end: addr(1) },
            abi::EVENT_UNMAP => Event::Unmap { start: addr(0), end: addr(1) },
            abi::EVENT_REMAP => Event::Remap { from: addr(0), to: addr(1), len: word(2) },
            // SAFETY: per this function's contract the descriptor is ours and nobody else's.
            abi::EVENT_FORK => Event::Fork(unsafe { OwnedFd::from_raw_fd(word(0) as u32 as i32) }),
            other => Event::Unknown(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn msg(event: u8, words: [u64; 3]) -> Event {
        assert_ne!(event, abi::EVENT_FORK, "these messages own no descriptor");
        let mut raw = [0; abi::MSG_SIZE];
        raw[0] = event;
        for (i, w) in words.iter().enumerate() {
            raw[8 + 8 * i..16 + 8 * i].copy_from_slice(&w.to_ne_bytes());
        }
        // SAFETY: not a fork message, so nothing is owned.
        unsafe { Event::decode(&raw) }
    }

    #[test]
    fn faults_are_told_apart_by_their_flags() {
        let fault = |flags| msg(abi::EVENT_PAGEFAULT, [flags, 0x7000, 7]);
        assert!(matches!(fault(0), Event::Missing { addr: HostAddr(0x7000), write: false }));
        assert!(matches!(fault(1), Event::Missing { write: true, .. }));
        assert!(matches!(fault(1 | 2), Event::Protected { addr: HostAddr(0x7000) }));
        assert!(matches!(fault(4), Event::Minor { addr: HostAddr(0x7000) }));
    }

    #[test]
    fn mapping_events_keep_their_ranges_and_new_ones_are_not_mistaken() {
        assert!(matches!(
            msg(abi::EVENT_REMOVE, [0x1000, 0x3000, 0]),
            Event::Remove { start: HostAddr(0x1000), end: HostAddr(0x3000) }
        ));
        assert!(matches!(
            msg(abi::EVENT_REMAP, [1, 2, 3]),
            Event::Remap { from: HostAddr(1), to: HostAddr(2), len: 3 }
        ));
        assert!(matches!(
            msg(abi::EVENT_UNMAP, [1, 2, 0]),
            Event::Unmap { start: HostAddr(1), end: HostAddr(2) }
        ));
        assert!(matches!(msg(0x42, [0; 3]), Event::Unknown(0x42)));
    }
}
