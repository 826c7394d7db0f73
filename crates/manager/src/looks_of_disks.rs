//! Looks at folders whose file systems may hang: nobody waits long for one, and nobody a second time for one that has
//! not answered since.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::Instant;

use crate::rooms::SILENT;
use crate::sync::lock;

/// Folders that a look went to which was waited for in vain, and has not come back.
static MUTE: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Whether its file system did not answer when it was looked at, and has not since.
pub fn is_mute(path: &Path) -> bool {
    lock(&MUTE).contains(path)
}

/// A look that is under way.
pub struct Look<T> {
    path: PathBuf,
    /// None: an earlier look has not come back.
    answer: Option<Receiver<T>>,
    begun: Instant,
}

/// Ends a look, however it ends.
struct Done(PathBuf);

impl Drop for Done {
    fn drop(&mut self) {
        lock(&MUTE).remove(&self.0);
    }
}

impl<T: Send + 'static> Look<T> {
    /// In a thread of its own, unless an earlier one has not come back.
    ///
    /// # Errors
    /// No thread.
    pub fn begin(
        path: &Path,
        look: impl FnOnce(&Path) -> T + Send + 'static,
    ) -> std::io::Result<Look<T>> {
        let begun = Instant::now();
        let path = path.to_owned();
        if is_mute(&path) {
            return Ok(Look { path, answer: None, begun });
        }
        let (told, answer) = channel();
        let folder = path.clone();
        let work = move || {
            let done = Done(folder);
            let _ = told.send(look(&done.0));
        };
        std::thread::Builder::new().name("disk-look".into()).spawn(work)?;
        Ok(Look { path, answer: Some(answer), begun })
    }

    /// None: it does not answer.
    pub fn wait(self) -> Option<T> {
        let answer = self.answer?;
        if let Ok(found) = answer.recv_timeout(SILENT.saturating_sub(self.begun.elapsed())) {
            return Some(found);
        }
        // Under the lock, which whoever comes back takes once it has answered.
        let mut mute = lock(&MUTE);
        match answer.try_recv() {
            Err(TryRecvError::Empty) => drop(mute.insert(self.path)),
            Err(TryRecvError::Disconnected) => {}
            Ok(found) => return Some(found),
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn who_does_not_answer_is_waited_for_once() {
        let path = Path::new("/what/hangs");
        let (go_on, hung) = channel::<()>();
        let first = Look::begin(path, move |_| hung.recv().is_err()).unwrap();
        // Begun before that was known, and waited for when it has come back, or afterwards.
        assert_eq!(first.wait(), None);
        let early = Look::begin(path, |_| true).unwrap();
        let begun = Instant::now();
        let second = Look::begin(path, |_| panic!("nobody looks where somebody hangs"));
        assert_eq!(second.unwrap().wait(), None::<bool>);
        assert!(begun.elapsed() < SILENT, "it was not waited for");
        // Others are looked at, and so is it when it has come back.
        assert_eq!(Look::begin(Path::new("/other"), |_| 7).unwrap().wait(), Some(7));
        drop(go_on);
        while is_mute(path) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!((early.wait(), is_mute(path)), (None, false));
        // One that panics has come back as well.
        let look = Look::<()>::begin(path, |_| panic!("as it should")).unwrap();
        assert_eq!((look.wait(), is_mute(path)), (None, false));
        assert_eq!(Look::begin(path, |_| 8).unwrap().wait(), Some(8));
    }
}
