//! What the kernel itself takes to allocate a large page: what a fault that is answered with one takes at least.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ballast_qemu::{Huge, ram_file};
use ballast_units::Bytes;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

const LARGE: usize = 2 << 20;
/// As many as a guest's memory has, and as much of it the host may not have had lately.
const PAGES: usize = 256;

/// Microseconds.
#[derive(Clone, Copy, Debug)]
pub struct Floor {
    pub p50_us: f64,
    pub p99_us: f64,
}

/// One after another, of a file as guests' RAM is.
pub fn large_pages() -> Result<Floor> {
    let size = PAGES * LARGE;
    let file = ram_file(Bytes(size as u64), Huge::Advise).context("a tmpfs with large pages")?;
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, at an address of the kernel's choice, and unmapped below; nobody else knows the file.
    let base = unsafe { mmap(std::ptr::null_mut(), size, prot, MapFlags::SHARED, &file, 0)? };
    let mut times = Vec::with_capacity(PAGES);
    for page in 0..PAGES {
        let at = base.wrapping_byte_add(page * LARGE);
        let begin = Instant::now();
        // SAFETY: inside the mapping, of which there is no reference.
        unsafe {
            madvise(at, LARGE, Advice::LinuxHugepage)?;
            madvise(at, LARGE, Advice::LinuxPopulateWrite)?;
        }
        times.push(begin.elapsed().as_secs_f64() * 1e6);
    }
    // SAFETY: as above.
    unsafe { munmap(base, size)? };
    times.sort_by(f64::total_cmp);
    let at = |part: f64| times.get((times.len() as f64 * part) as usize).copied();
    let floor = Floor { p50_us: at(0.5).unwrap_or(0.0), p99_us: at(0.99).unwrap_or(0.0) };
    ensure!(floor.p50_us > 0.0, "the kernel took no time");
    Ok(floor)
}
