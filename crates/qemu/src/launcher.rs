//! The thread that programs are started from, with descriptors of its own.
//!
//! A child has all descriptors of whoever starts it until its program is there, and closes them then. That can hang for good, in a file
//! that a stranger handed over (FUSE asks its server each time one is closed), or because the program lies on a disk that does not answer; and all that
//! it has open stays open as long: locks, and conversations that others wait to see end. So it is started by one who has none of them.

use std::io;
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, Sender, channel};

type Job = Box<dyn FnOnce() + Send>;

static LAUNCHER: OnceLock<Sender<Job>> = OnceLock::new();
/// Of who called `prepare`.
static SIGNALS: OnceLock<libc::sigset_t> = OnceLock::new();

/// Makes the thread. What is open now children of it have; what is opened later, none.
///
/// # Errors
/// There is no such thread: children are started as by anybody.
pub fn prepare() -> io::Result<()> {
    let (jobs, taken) = channel::<Job>();
    let (told, ready) = channel();
    let thread = move || {
        let _ = SIGNALS.set(block_signals());
        let own = unshare_files();
        let is_own = own.is_ok();
        let _ = told.send(own);
        if is_own {
            take(&taken);
        }
    };
    std::thread::Builder::new().name("launcher".into()).spawn(thread)?;
    ready.recv().map_err(io::Error::other)??;
    let _ = LAUNCHER.set(jobs);
    Ok(())
}

/// Each by a thread of its own, which begins with this one's descriptors: one that hangs holds up no other, nor by what it has opened.
fn take(jobs: &Receiver<Job>) {
    for job in jobs {
        let thread = std::thread::Builder::new().name("launch".into());
        let job = move || {
            if let Err(e) = unshare_files() {
                tracing::warn!(
                    "programs that are started together have one another's descriptors: {e}"
                );
            }
            job();
        };
        if let Err(e) = thread.spawn(job) {
            tracing::error!("a thread to start a program: {e}");
        }
    }
}

fn unshare_files() -> rustix::io::Result<()> {
    // SAFETY: this thread has just begun, and holds no descriptor by its number.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::FILES) }
}

/// Whoever answers a signal wakes the runtime, by a descriptor that is not here: it is another thread that is to take it. Answers what
/// was blocked before.
fn block_signals() -> libc::sigset_t {
    // SAFETY: both sets are this frame's own; a sigset_t may be all zeros, and is filled by the calls.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        before
    }
}

/// In a child of a job's, before its program is there: signals reach it as if anybody had started it.
pub(crate) fn restore_signals() {
    if let Some(before) = SIGNALS.get() {
        // SAFETY: the set is whole and stays; the call is async-signal-safe.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut()) };
    }
}

/// What `job` brings, done by one who has none of this process's descriptors but those that it began with. Without `prepare`,
/// who has all. It may not use any by its number, nor what does: whoever wakes a task of the runtime writes to one.
///
/// # Errors
/// It could not be done, or panicked.
pub async fn run<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    let Some(launcher) = LAUNCHER.get() else {
        return Ok(tokio::task::spawn_blocking(job).await?);
    };
    let wait = move || {
        let (done, result) = channel();
        let job = Box::new(move || drop(done.send(job())));
        launcher.send(job).map_err(|_| io::Error::other("there is no thread to start it"))?;
        result.recv().map_err(|_| io::Error::other("the thread that was to start it has ended"))
    };
    tokio::task::spawn_blocking(wait).await?
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn has_open(path: &Path) -> bool {
        let open = std::fs::read_dir("/proc/thread-self/fd").unwrap();
        open.flatten().any(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to == path))
    }

    #[tokio::test]
    async fn who_is_started_has_nothing_of_what_was_opened_since() {
        let dir = tempfile::tempdir().unwrap();
        let [before, since] = ["before", "since"].map(|name| dir.path().join(name));
        let _before = std::fs::File::create(&before).unwrap();
        prepare().unwrap();
        let _since = std::fs::File::create(&since).unwrap();
        assert!(has_open(&before) && has_open(&since));
        let seen = run(move || (has_open(&before), has_open(&since))).await.unwrap();
        assert_eq!(seen, (true, false));
        // A job that panics is its own end.
        assert!(run(|| assert!(LAUNCHER.get().is_none())).await.is_err());
        assert_eq!(run(|| 7).await.unwrap(), 7);
        // Of what another opens meanwhile it has nothing either.
        let theirs = dir.path().join("theirs");
        let (path, seen) = (theirs.clone(), theirs.clone());
        let (opened, goes_on) = channel();
        let (end, ends) = channel::<()>();
        let other = tokio::spawn(run(move || {
            let _file = std::fs::File::create(path).unwrap();
            let _ = opened.send(());
            let _ = ends.recv();
        }));
        tokio::task::spawn_blocking(move || goes_on.recv()).await.unwrap().unwrap();
        assert!(!run(move || has_open(&seen)).await.unwrap());
        drop(end);
        other.await.unwrap().unwrap();
        // No signal is taken by a job, and a program that it starts takes all.
        let blocked = |status: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
            u64::from_str_radix(line.trim(), 16).unwrap()
        };
        let of_job = run(|| std::fs::read_to_string("/proc/thread-self/status")).await.unwrap();
        let term = 1 << (libc::SIGTERM - 1);
        assert_ne!(blocked(&of_job.unwrap()) & term, 0);
        let of_child = run(|| {
            use std::os::unix::process::CommandExt as _;
            let mut child = std::process::Command::new("cat");
            // SAFETY: it makes one system call.
            unsafe {
                child.pre_exec(|| {
                    restore_signals();
                    Ok(())
                })
            };
            child.arg("/proc/self/status").output()
        });
        let said = of_child.await.unwrap().unwrap().stdout;
        assert_eq!(blocked(&String::from_utf8(said).unwrap()) & term, 0);
    }
}
