//! Content-based page sharing (OSDI'02 s.4): VMs that may share with one another form a domain.
//!
//! | file | what is there |
//! | --- | --- |
//! | `domain` | a domain: its store, its share table, its members, and what it is charged |
//! | `examine` | pages of a VM are looked at, found equal to others, and moved into the store |
//! | `order` | which pages are looked at next |
//! | `passes` | when a VM is gone through again |
//! | `marks` | whether pages that were not written are passed over |
//! | `limit`, `control` | how fast, and what the operator says |

pub mod control;
mod domain;
pub mod examine;
pub mod limit;
pub(crate) mod marks;
pub mod order;
pub(crate) mod passes;

pub use domain::{Domain, DomainError, DomainStats};
