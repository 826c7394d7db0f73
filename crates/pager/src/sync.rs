//! The atomics and locks that the page-state machine is built on: std's, or shuttle's where every
//! interleaving is explored.

#[cfg(not(feature = "shuttle"))]
pub(crate) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
};

#[cfg(feature = "shuttle")]
pub(crate) use shuttle::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
};

/// As `lock`, unless that would have to be waited for.
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    use std::sync::TryLockError::{Poisoned, WouldBlock};
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(Poisoned(e)) => Some(e.into_inner()),
        Err(WouldBlock) => None,
    }
}

/// A lock whose holder panicked still guards data that every critical section leaves consistent,
/// so the rest of the manager goes on.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
