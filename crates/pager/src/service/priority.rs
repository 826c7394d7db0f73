//! How urgently the kernel is to run the threads of a paged VM.
//!
//! A guest that faults waits for two threads where under plain QEMU it would wait for none. On a host
//! whose cores are all busy, each could have to wait for the end of somebody's time slice (some
//! milliseconds). So the thread that serves faults asks for short slices, for which the kernel takes
//! the core away from threads with longer ones (Linux 6.12 and later), and for a better nice value,
//! which earlier kernels honour in part. It gains no more CPU time by that than the faults it serves
//! cost. So does the thread that evicts, less: the later it comes, the more memory must be kept free for
//! what guests take meanwhile. The thread that looks for equal pages has all the time in the world.

use std::time::Duration;

use rustix::io::Errno;

/// What a thread is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Urgency {
    /// A guest's processor stands still until it has run.
    Guest,
    /// Free memory is short until it has run: guests that fault would wait for it next.
    Host,
    /// Nobody waits for it.
    Nobody,
}

impl Urgency {
    /// Nice value, from -20 to 19.
    fn nice(self) -> i32 {
        match self {
            Urgency::Guest => -10,
            Urgency::Host => -5,
            // Not lower: pages that it holds for a moment may be faulted on.
            Urgency::Nobody => 5,
        }
    }

    /// The time slice asked for; None for the kernel's own. The kernel's least is 0.1 ms.
    fn slice(self) -> Option<Duration> {
        (self == Urgency::Guest).then_some(Duration::from_micros(100))
    }

    /// For the calling thread.
    ///
    /// # Errors
    /// PERM without CAP_SYS_NICE: the thread then runs as others do.
    pub fn apply(self) -> rustix::io::Result<()> {
        let attributes = libc::sched_attr {
            size: size_of::<libc::sched_attr>() as u32,
            sched_policy: libc::SCHED_OTHER as u32,
            sched_flags: 0,
            sched_nice: self.nice(),
            sched_priority: 0,
            sched_runtime: self.slice().map_or(0, |slice| slice.as_nanos() as u64),
            sched_deadline: 0,
            sched_period: 0,
        };
        const MYSELF: libc::pid_t = 0;
        const FLAGS: libc::c_uint = 0;
        // SAFETY: the kernel reads `size` bytes of a structure of its own layout, and changes nothing
        // but how it schedules this thread.
        let result =
            unsafe { libc::syscall(libc::SYS_sched_setattr, MYSELF, &raw const attributes, FLAGS) };
        if result < 0 {
            let error = std::io::Error::last_os_error();
            return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nice() -> i32 {
        // SAFETY: reads a number of this thread. -1 is an answer as well.
        unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) }
    }

    #[test]
    fn a_thread_gets_what_it_asks_for_where_it_may() {
        std::thread::spawn(|| {
            for urgency in [Urgency::Guest, Urgency::Host, Urgency::Nobody] {
                match urgency.apply() {
                    Ok(()) => assert_eq!(nice(), urgency.nice(), "{urgency:?}"),
                    Err(e) => assert_eq!(e, Errno::PERM),
                }
            }
        })
        .join()
        .unwrap();
    }
}
