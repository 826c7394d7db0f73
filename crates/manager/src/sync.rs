//! Locks, and an end that is waited for.

use std::ops::Deref;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

/// A lock whose holder panicked guards data that every holder leaves consistent: the others go on.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether something has ended, for who does a thing over and over until then.
#[derive(Debug, Default)]
pub struct Ended {
    has: Mutex<bool>,
    told: Condvar,
}

impl Ended {
    /// Nothing takes it back.
    pub fn set(&self) {
        *lock(&self.has) = true;
        self.told.notify_all();
    }
    pub fn is_set(&self) -> bool {
        *lock(&self.has)
    }
    /// Returns after so long, or as soon as it has ended.
    pub fn rest(&self, time: Duration) {
        let waited = self.told.wait_timeout_while(lock(&self.has), time, |has| !*has);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }
}

/// What many look at, and its end takes away. The end waits for all who look, and who begins to look for an end that
/// waits: so a thread that looked twice at once would wait for itself, now and then. In builds with debug assertions it
/// panics, always.
#[derive(Debug)]
pub struct UntilTaken<T>(RwLock<Option<T>>);

impl<T> UntilTaken<T> {
    pub fn new(value: Option<T>) -> UntilTaken<T> {
        UntilTaken(RwLock::new(value))
    }
    /// None inside: it was taken, or never there.
    pub fn look(&self) -> Look<'_, T> {
        let once = Once::begin(std::ptr::from_ref(self).addr());
        Look { guard: self.0.read().unwrap_or_else(PoisonError::into_inner), _once: once }
    }
    /// Waits for all who look. Nobody finds it there afterwards.
    pub fn take(&self) -> Option<T> {
        let _once = Once::begin(std::ptr::from_ref(self).addr());
        self.0.write().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// A look at an [`UntilTaken`].
#[derive(Debug)]
pub struct Look<'a, T> {
    guard: RwLockReadGuard<'a, Option<T>>,
    _once: Once,
}

impl<T> Deref for Look<'_, T> {
    type Target = Option<T>;
    fn deref(&self) -> &Option<T> {
        &self.guard
    }
}

#[cfg(debug_assertions)]
thread_local! {
    /// What this thread looks at.
    static LOOKED_AT: std::cell::RefCell<Vec<usize>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// One thread's only look at what is at an address.
#[derive(Debug)]
struct Once {
    #[cfg(debug_assertions)]
    at: usize,
}

impl Once {
    #[cfg(debug_assertions)]
    fn begin(at: usize) -> Once {
        LOOKED_AT.with_borrow_mut(|all| {
            assert!(!all.contains(&at), "a thread looks twice at once at what may be taken away");
            all.push(at);
        });
        Once { at }
    }
    #[cfg(not(debug_assertions))]
    fn begin(_: usize) -> Once {
        Once {}
    }
}

#[cfg(debug_assertions)]
impl Drop for Once {
    fn drop(&mut self) {
        LOOKED_AT.with_borrow_mut(|all| all.retain(|at| *at != self.at));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_rests_is_woken_by_the_end() {
        let ended = Ended::default();
        ended.rest(Duration::from_millis(1));
        assert!(!ended.is_set());
        std::thread::scope(|scope| {
            let (rests, begun) = std::sync::mpsc::channel();
            let ended = &ended;
            scope.spawn(move || {
                rests.send(()).unwrap();
                // For good, if it is not woken.
                ended.rest(Duration::MAX);
            });
            begun.recv().unwrap();
            std::thread::sleep(Duration::from_millis(50));
            ended.set();
        });
        ended.rest(Duration::MAX);
        assert!(ended.is_set());
    }

    #[test]
    fn what_is_taken_is_seen_by_nobody() {
        let value = UntilTaken::new(Some(7));
        assert_eq!(*value.look(), Some(7));
        assert_eq!(value.take(), Some(7));
        assert_eq!(*value.look(), None);
        assert_eq!(value.take(), None);
    }

    #[test]
    fn one_look_after_another_and_at_one_beside_another() {
        let (a, b) = (UntilTaken::new(Some(1)), UntilTaken::new(Some(2)));
        let both = (a.look(), b.look());
        assert_eq!((*both.0, *both.1), (Some(1), Some(2)));
        drop(both);
        assert_eq!(*a.look(), Some(1));
        assert_eq!(a.take(), Some(1));
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "looks twice at once")]
    fn no_thread_looks_twice_at_once() {
        let value = UntilTaken::new(Some(7));
        assert_eq!((*value.look(), value.look().is_some()), (Some(7), true));
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "looks twice at once")]
    fn nobody_takes_what_it_looks_at() {
        let value = UntilTaken::new(Some(7));
        let _look = value.look();
        value.take();
    }

    #[test]
    fn other_threads_look_meanwhile() {
        let value = UntilTaken::new(Some(7));
        let _look = value.look();
        std::thread::scope(|scope| {
            assert_eq!(scope.spawn(|| *value.look()).join().unwrap(), Some(7));
        });
    }
}
