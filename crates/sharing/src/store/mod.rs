//! The common pages of a domain: [`StorePages`] says which are free, [`StoreFile`] holds them.
//! The two are apart so that the first can be under a lock, and I/O outside it.
//!
//! Order: a page is taken in `StorePages`, then written, then mapped by VMMs. When nobody maps it
//! any more it is punched, and only then freed in `StorePages`: whoever is given it next may write
//! it at once.

mod file;
mod pages;

pub use file::{StoreError, StoreFile};
pub use pages::StorePages;
