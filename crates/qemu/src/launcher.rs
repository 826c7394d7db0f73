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

/// Makes the thread. What is open now children of it have; what is opened later, none.
///
/// # Errors
/// There is no such thread: children are started as by anybody.
pub fn prepare() -> io::Result<()> {
    let (jobs, taken) = channel::<Job>();
    let (told, ready) = channel();
    let thread = move || {
        // SAFETY: this thread has just begun, and holds no descriptor by its number.
        let own = unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::FILES) };
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

/// Each by a thread of its own, which has this one's descriptors: one that hangs holds up no other.
fn take(jobs: &Receiver<Job>) {
    for job in jobs {
        let thread = std::thread::Builder::new().name("launch".into());
        if let Err(e) = thread.spawn(job) {
            tracing::error!("a thread to start a program: {e}");
        }
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
    }
}
