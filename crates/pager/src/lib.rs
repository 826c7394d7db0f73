//! The pager: where every page of every guest is, and how it moves.
//!
//! | file | what is there |
//! | --- | --- |
//! | `word`, `pmap`, `sparse` | one 64-bit word per guest page, in a sparse file that outlives the manager |
//! | `memory/` | the page-state machine: fault, evict, discard, sample, recover; what is remembered of pages for who chooses |
//! | `backend`, `guest_ram`, `ram_layout` | the seam to guest memory, the real one, and where its parts are |
//! | `mappings`, `strict_commit` | how pages are mapped elsewhere, through the VM's shim, and where that could lose them |
//! | `file_memory` | memory of files: given, and taken back |
//! | `sync` | the atomics and locks that the page-state machine is built on |
//! | `mapped_file` | the manager's own files, mapped: none of them a guest's RAM |
//! | `ledger`, `host` | exact accounting of machine memory, and what else all VMs share |
//! | `awake` | the host's idle processors, kept from sleeping while guests wait |
//! | `advance` | what a VM holds that is yet to be taken over, booked meanwhile |
//! | `stage`, `tier`, `swap/` | the way out of memory, and where it leads: compressed pages, swap |
//! | `run_files` | what of it is in a VM's run folder |
//! | `worth` | how large the tier of compressed pages is to be |
//! | `service/` | the threads of a VM: fault service, reclaim |
//! | `sharing/` | domains: the store, the share table, and how equal pages are found |
//! | `replacement`, `clock` | which page goes; `simulated`, for their tests |
//! | `accesses` | which pages a VMM touches |

#![warn(missing_docs)]

mod accesses;
pub mod advance;
pub mod awake;
pub mod backend;
mod clock;
pub mod file_memory;
#[doc(hidden)]
pub mod fuzzing;
pub mod guest_ram;
pub mod host;
pub mod ledger;
mod mapped_file;
pub mod mappings;
pub mod memory;
pub mod pmap;
mod ram_layout;
mod replacement;
pub mod run_files;
pub mod service;
pub mod sharing;
#[cfg(all(test, not(feature = "shuttle")))]
mod simulated;
mod sparse;
pub mod stage;
mod strict_commit;
pub mod swap;
mod sync;
pub mod tier;
pub mod word;
mod worth;
