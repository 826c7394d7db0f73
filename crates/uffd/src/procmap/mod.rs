//! What /proc tells about the mappings of a process: which file is where (`maps`), and which pages
//! of a private mapping are the process's own by now (`pagemap`).
//!
//! It needs no userfaultfd; it is here because it answers what a userfaultfd cannot: what became of
//! a page while nobody watched, and how far a batch of remaps came. Whoever reads maps, does it by this.
//!
//! | file | concept |
//! | --- | --- |
//! | `line` | one line of maps |
//! | `maps` | all mappings, or those of a range; how many there are, and may be |
//! | `query` | the same, asked for by address: from Linux 6.11 on |
//! | `pagemap` | what each page shows: the file, a copy, nothing |
//! | `marker` | how this kernel tells of the last, where it is write-protected |
//!
//! The kernel's documentation: `Documentation/filesystems/proc.rst`,
//! `Documentation/admin-guide/mm/pagemap.rst`.

mod line;
mod maps;
mod marker;
mod pagemap;
mod query;

pub use line::Vma;
pub use maps::{Mapped, Maps, each, each_file, each_from, max_map_count};
pub use pagemap::{Entry, Pagemap, Shown, sees_places};
