//! Where segments are: a folder, of which this is the only one to know. Files are named by their
//! number, `0000000042.journal`: the order in which they were begun, whatever the clock said.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use crate::segment::{SegmentError, read_header};

/// A segment as it lies there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Its number: the order of segments.
    pub number: u64,
    /// Its length.
    pub bytes: u64,
    /// Written by a newer Ballast: it is neither read, nor counted, nor removed.
    pub newer: bool,
}

/// The seam to the disk; tests have one that fails.
pub trait Store {
    /// A segment that is being written.
    type Segment: Append;
    /// All segments, in their order.
    ///
    /// # Errors
    /// The disk's.
    fn list(&mut self) -> io::Result<Vec<Stored>>;
    /// A new, empty segment, for its owner alone.
    ///
    /// # Errors
    /// `AlreadyExists` when there is one of this number; the disk's.
    fn create(&mut self, number: u64) -> io::Result<Self::Segment>;
    /// # Errors
    /// The disk's.
    fn remove(&mut self, number: u64) -> io::Result<()>;
}

/// A segment that is being written.
pub trait Append {
    /// # Errors
    /// The disk's. What was written of the bytes is not known then.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Cuts off what is behind `len`.
    ///
    /// # Errors
    /// The disk's.
    fn cut(&mut self, len: u64) -> io::Result<()>;
}

/// A folder of segments.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// For the segments in this folder, which need not be there yet.
    pub fn new(path: impl Into<PathBuf>) -> Folder {
        Folder { path: path.into() }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn file(&self, number: u64) -> PathBuf {
        self.path.join(format!("{number:010}.{EXTENSION}"))
    }
}

const EXTENSION: &str = "journal";

/// The files of a folder that are named as segments are, in their order; none where there is no
/// folder.
///
/// # Errors
/// When the folder cannot be read.
pub fn segments_in(folder: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry?.path();
        // A pipe would be waited for.
        if path.extension().is_some_and(|e| e == EXTENSION)
            && std::fs::metadata(&path).is_ok_and(|meta| meta.is_file())
            && let Some(number) = path.file_stem().and_then(|s| s.to_str()?.parse().ok())
        {
            found.push((number, path));
        }
    }
    found.sort();
    Ok(found)
}

impl Store for Folder {
    type Segment = File;

    fn list(&mut self) -> io::Result<Vec<Stored>> {
        let mut all = Vec::new();
        for (number, path) in segments_in(&self.path)? {
            // One that another process removed meanwhile is not there.
            let Ok(mut file) = File::open(&path) else { continue };
            let bytes = file.metadata()?.len();
            let newer = matches!(read_header(&mut file), Err(SegmentError::Newer { .. }));
            all.push(Stored { number, bytes, newer });
        }
        Ok(all)
    }

    fn create(&mut self, number: u64) -> io::Result<File> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.path)?;
        File::options().append(true).create_new(true).mode(0o600).open(self.file(number))
    }

    fn remove(&mut self, number: u64) -> io::Result<()> {
        match std::fs::remove_file(self.file(number)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }
}

impl Append for File {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.write_all(bytes)
    }

    fn cut(&mut self, len: u64) -> io::Result<()> {
        self.set_len(len)
    }
}
