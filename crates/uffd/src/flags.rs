//! Features, registration modes and per-range ioctls (`UFFD_FEATURE_*`, `UFFDIO_REGISTER_MODE_*`,
//! `_UFFDIO_*`). The numbers in parentheses are the Linux versions they came with.

bitflags::bitflags! {
    /// What the kernel can do, and what was asked of it in the handshake.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Features: u64 {
        /// Write-protect faults at all (5.7).
        const PAGEFAULT_FLAG_WP = 1 << 0;
        /// Follow forks of the process ([`crate::Event::Fork`]); needs CAP_SYS_PTRACE (4.11).
        const EVENT_FORK = 1 << 1;
        /// Tell of mremap(2) ([`crate::Event::Remap`]) (4.11).
        const EVENT_REMAP = 1 << 2;
        /// Tell of madvise(MADV_REMOVE, MADV_DONTNEED) and of holes punched through the mapping
        /// ([`crate::Event::Remove`]) (4.11).
        const EVENT_REMOVE = 1 << 3;
        /// Missing faults of hugetlbfs mappings (4.11).
        const MISSING_HUGETLBFS = 1 << 4;
        /// Missing faults of shared memory: tmpfs and memfd (4.11).
        const MISSING_SHMEM = 1 << 5;
        /// Tell of munmap(2) ([`crate::Event::Unmap`]) (4.11).
        const EVENT_UNMAP = 1 << 6;
        /// Send the thread that faults a SIGBUS in place of an event (4.14).
        const SIGBUS = 1 << 7;
        /// Fault messages name the thread that faulted (4.14); it is not decoded here.
        const THREAD_ID = 1 << 8;
        /// Minor faults of hugetlbfs mappings (5.13).
        const MINOR_HUGETLBFS = 1 << 9;
        /// Minor faults of shared memory (5.14).
        const MINOR_SHMEM = 1 << 10;
        /// Fault addresses are not rounded down to the page (5.18).
        const EXACT_ADDRESS = 1 << 11;
        /// Write protection of shared memory, not of anonymous memory only (5.19).
        const WP_HUGETLBFS_SHMEM = 1 << 12;
        /// Write protection of anonymous pages that are not there yet (6.4).
        const WP_UNPOPULATED = 1 << 13;
        /// Pages can be marked so that an access gets a SIGBUS (6.6).
        const POISON = 1 << 14;
        /// The kernel itself resolves write-protect faults: what was written is seen in pagemap (6.7).
        const WP_ASYNC = 1 << 15;
        /// Pages can be moved within the process in place of being copied (6.8).
        const MOVE = 1 << 16;
        const _ = !0;
    }

    /// Which faults of a range are delivered.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Modes: u64 {
        /// An access to a page that is not there ([`crate::Event::Missing`]).
        const MISSING = 1 << 0;
        /// A write to a write-protected page ([`crate::Event::Protected`]).
        const WP = 1 << 1;
        /// An access to a page that is in the file, but not in the page table ([`crate::Event::Minor`]).
        const MINOR = 1 << 2;
    }

    /// What may be done in a registered range: numbers of ioctls, a bit each.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Ioctls: u64 {
        /// [`crate::Uffd::wake`].
        const WAKE = 1 << 2;
        /// [`crate::Uffd::copy`].
        const COPY = 1 << 3;
        /// [`crate::Uffd::zeropage`].
        const ZEROPAGE = 1 << 4;
        /// UFFDIO_MOVE; not used here.
        const MOVE = 1 << 5;
        /// [`crate::Uffd::protect`], [`crate::Uffd::unprotect`].
        const WRITEPROTECT = 1 << 6;
        /// UFFDIO_CONTINUE, the answer to a minor fault; not used here.
        const CONTINUE = 1 << 7;
        /// UFFDIO_POISON; not used here.
        const POISON = 1 << 8;
        const _ = !0;
    }
}
