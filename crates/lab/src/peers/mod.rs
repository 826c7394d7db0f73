//! What the kernel offers instead: a memory cgroup, swap on a file, on zram, through zswap. Used as
//! the peers of benchmarks and experiments; put back as it was, whatever happens.

pub mod cgroup;
mod keeper;
pub mod swap;

pub use keeper::{KeeperArgs, keep};
