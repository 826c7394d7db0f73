//! Threads that want all processors, as the guests of an overcommitted host do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// One for each processor, until dropped.
pub struct Hogs {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Hogs {
    /// They run from now on.
    pub fn start() -> Hogs {
        let over = Arc::new(AtomicBool::new(false));
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let hog = |_| {
            let over = over.clone();
            std::thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    std::hint::black_box((0..10_000u64).sum::<u64>());
                }
            })
        };
        Hogs { threads: (0..processors).map(hog).collect(), over }
    }
}

impl Drop for Hogs {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // It cannot panic.
            let _ = thread.join();
        }
    }
}
