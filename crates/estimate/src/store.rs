//! The files of common pages behind guest RAM.
//!
//! A page that is shared need not be in the page table of its VMM: it is found in the file, where to
//! read allocates nothing either.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use ballast_sharing::is_zero;
use ballast_units::{Bytes, PAGE_SIZE};

use crate::ram::{FileId, Part};

/// A file that is not longer may be the zeros which guests see where they have nothing.
const ZEROS: Bytes = Bytes::from_mib(4);

#[derive(Debug)]
pub(crate) struct Store {
    file: File,
    /// It holds nothing that a guest has.
    pub is_empty: bool,
}

impl Store {
    /// The stores behind `parts`, as far as they may be opened: it takes CAP_CHECKPOINT_RESTORE or
    /// CAP_SYS_ADMIN.
    pub fn open_all(pid: u32, parts: &[Part]) -> HashMap<FileId, Store> {
        let mut stores = HashMap::new();
        for part in parts {
            let Some(place) = part.store else { continue };
            if stores.contains_key(&place.file) {
                continue;
            }
            // A mapping that changed since has another name now; the next one may do.
            let link = format!("/proc/{pid}/map_files/{:x}-{:x}", part.start.0, part.end.0);
            match File::open(link) {
                Ok(file) => {
                    let is_empty = is_all_zero(&file).unwrap_or(false);
                    stores.insert(place.file, Store { file, is_empty });
                }
                Err(e) if e.kind() == io::ErrorKind::PermissionDenied => break,
                Err(_) => {}
            }
        }
        stores
    }

    /// The whole pages at `offset`, as many as there are, at most as fit.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn read<'a>(&self, offset: u64, buffer: &'a mut [u8]) -> io::Result<&'a [[u8; PAGE_SIZE]]> {
        let mut done = 0;
        while done < buffer.len() {
            match self.file.read_at(&mut buffer[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(length) => done += length,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        let (pages, _) = buffer[..done].as_chunks();
        Ok(pages)
    }
}

fn is_all_zero(file: &File) -> io::Result<bool> {
    let length = file.metadata()?.len();
    if length > ZEROS.0 {
        return Ok(false);
    }
    let mut page = [0; PAGE_SIZE];
    for offset in (0..length).step_by(PAGE_SIZE) {
        let read = file.read_at(&mut page, offset)?;
        page[read..].fill(0);
        if !is_zero(&page) {
            return Ok(false);
        }
    }
    Ok(true)
}
