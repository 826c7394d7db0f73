//! The seam of swap I/O: a ring that was given an injector asks it before each operation what becomes of
//! it. Only tests give one.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

/// One operation, as it is submitted.
#[derive(Clone, Copy, Debug)]
pub struct Op<'a> {
    /// Of the swap file.
    pub path: &'a Path,
    /// Or a read.
    pub write: bool,
    /// In the file, bytes.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
}

/// What becomes of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Not done: it ends with this errno.
    pub errno: Option<i32>,
    /// Only so many bytes are moved.
    pub moved: Option<u32>,
    /// It says that all was moved, whatever was.
    pub lies: bool,
    /// It ends so much later.
    pub late: Duration,
}

/// Asked by the threads of VMs.
pub trait Injector: Send + Sync {
    /// Called once for each operation, by the thread that submits it.
    fn verdict(&self, op: &Op<'_>) -> Verdict;
}

/// Does an operation as a verdict says; the bytes that it moved.
pub(super) fn done_as(
    verdict: Verdict,
    file: &File,
    offset: u64,
    buffer: Buffer<'_>,
) -> Result<u32, i32> {
    if let Some(errno) = verdict.errno {
        return Err(errno);
    }
    let len = match &buffer {
        Buffer::From(bytes) => bytes.len(),
        Buffer::Into(bytes) => bytes.len(),
    };
    let most = verdict.moved.map_or(len, |moved| len.min(moved as usize));
    // O_DIRECT moves whole blocks of an aligned buffer.
    let result = match buffer {
        _ if most == 0 => Ok(0),
        Buffer::From(bytes) => rustix::io::pwrite(file, &bytes[..most], offset),
        Buffer::Into(bytes) => rustix::io::pread(file, &mut bytes[..most], offset),
    };
    match result {
        Ok(_) if verdict.lies => Ok(len as u32),
        Ok(n) => Ok(n as u32),
        Err(e) => Err(e.raw_os_error()),
    }
}

pub(super) enum Buffer<'a> {
    From(&'a [u8]),
    Into(&'a mut [u8]),
}
