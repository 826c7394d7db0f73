//! Content-based page sharing (OSDI'02 s.4): what is needed to find equal pages and to keep the
//! one copy of them. It knows nothing of VMs' memory and has no threads: the pager decides when a
//! page is hashed, compared and shared.
//!
//! VMs that may share with one another form a *domain*. A domain has one [`Hasher`], one
//! [`ShareTable`], and one store: [`StorePages`] and [`StoreFile`].
//!
//! | file | what is there |
//! | --- | --- |
//! | `bitmap` | which numbers are taken, and runs of those that are not |
//! | `hash` | page contents to 64 bits; pages of zeros |
//! | `ids` | numbers of guest pages and store pages |
//! | `table/` | the share table: shared frames and hint frames of 16 bytes, in chains |
//! | `store/` | the common pages: which are free, and the file they are in |

#![warn(missing_docs)]

mod bitmap;
mod hash;
mod ids;
mod store;
mod table;

pub use bitmap::{Bitmap, Gap};
pub use hash::{Hasher, PageHash, is_zero};
pub use ids::{PageId, StorePage, StoreRun};
pub use store::{StoreError, StoreFile, StorePages};
pub use table::{Match, ShareTable, TableError, TableStats};
