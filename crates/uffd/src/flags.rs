//! Features, registration modes and per-range ioctls (`UFFD_FEATURE_*`, `UFFDIO_REGISTER_MODE_*`).

bitflags::bitflags! {
    /// What the kernel can do, and what was asked of it in the handshake.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Features: u64 {
        /// Write-protect faults at all (5.7).
        const PAGEFAULT_FLAG_WP = 1 << 0;
        /// Follow forks of the process; needs CAP_SYS_PTRACE.
        const EVENT_FORK = 1 << 1;
        const EVENT_REMAP = 1 << 2;
        /// Tell of madvise(MADV_REMOVE, MADV_DONTNEED) and of holes punched through the mapping.
        const EVENT_REMOVE = 1 << 3;
        const MISSING_HUGETLBFS = 1 << 4;
        const MISSING_SHMEM = 1 << 5;
        const EVENT_UNMAP = 1 << 6;
        const SIGBUS = 1 << 7;
        const THREAD_ID = 1 << 8;
        const MINOR_HUGETLBFS = 1 << 9;
        const MINOR_SHMEM = 1 << 10;
        /// Fault addresses are not rounded down to the page (5.18).
        const EXACT_ADDRESS = 1 << 11;
        /// Write protection of shared memory, not of anonymous memory only (5.19).
        const WP_HUGETLBFS_SHMEM = 1 << 12;
        /// Write protection of anonymous pages that are not there yet (6.4).
        const WP_UNPOPULATED = 1 << 13;
        const POISON = 1 << 14;
        const WP_ASYNC = 1 << 15;
        const MOVE = 1 << 16;
        const _ = !0;
    }

    /// Which faults of a range are delivered.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Modes: u64 {
        const MISSING = 1 << 0;
        const WP = 1 << 1;
        const MINOR = 1 << 2;
    }

    /// What may be done in a registered range.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Ioctls: u64 {
        const WAKE = 1 << 2;
        const COPY = 1 << 3;
        const ZEROPAGE = 1 << 4;
        const MOVE = 1 << 5;
        const WRITEPROTECT = 1 << 6;
        const CONTINUE = 1 << 7;
        const POISON = 1 << 8;
        const _ = !0;
    }
}
