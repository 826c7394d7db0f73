//! Locks.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A lock whose holder panicked guards data that every holder leaves consistent: the others go on.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
