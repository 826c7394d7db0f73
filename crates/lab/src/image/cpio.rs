//! The "newc" cpio format that the kernel unpacks an initramfs from.
//!
//! Per entry: "070701", thirteen fields of eight hex digits, the name with its NUL padded to four
//! bytes, the data padded to four bytes. The last entry is named "TRAILER!!!".

use std::io::{self, Write};

const DIR: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const CHAR: u32 = 0o020_000;

/// Entries in the order in which they are added: a folder before what is in it.
pub struct Archive<W> {
    out: W,
    entries: u32,
}

impl<W: Write> Archive<W> {
    /// Nothing is written yet.
    pub fn new(out: W) -> Archive<W> {
        Archive { out, entries: 0 }
    }

    /// Mode 0755, as all of these root's.
    pub fn dir(&mut self, name: &str) -> io::Result<()> {
        self.entry(name, DIR | 0o755, (0, 0), &[])
    }

    /// Err: of `out`, or it is 4 GiB or more.
    pub fn file(&mut self, name: &str, mode: u32, data: &[u8]) -> io::Result<()> {
        self.entry(name, FILE | mode, (0, 0), data)
    }

    /// `device` is major and minor.
    pub fn char_device(&mut self, name: &str, mode: u32, device: (u32, u32)) -> io::Result<()> {
        self.entry(name, CHAR | mode, device, &[])
    }

    /// Ends the archive.
    pub fn finish(mut self) -> io::Result<W> {
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        Ok(self.out)
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), data: &[u8]) -> io::Result<()> {
        self.entries += 1;
        let size = u32::try_from(data.len())
            .map_err(|_| io::Error::other(format!("{name}: larger than a cpio archive holds")))?;
        let links = if mode & DIR == DIR { 2 } else { 1 };
        let fields = [
            self.entries,
            mode,
            0, // owner
            0, // group
            links,
            0, // time: none, so that equal inputs make equal archives
            size,
            0, // device of the file system
            0,
            device.0,
            device.1,
            name.len() as u32 + 1,
            0, // no checksum in this variant
        ];
        write!(self.out, "070701")?;
        for field in fields {
            write!(self.out, "{field:08X}")?;
        }
        self.out.write_all(name.as_bytes())?;
        self.out.write_all(&[0])?;
        self.pad(110 + name.len() + 1)?;
        self.out.write_all(data)?;
        self.pad(data.len())
    }

    fn pad(&mut self, written: usize) -> io::Result<()> {
        self.out.write_all(&[0; 3][..written.wrapping_neg() % 4])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_aligned_and_the_trailer_ends_them() {
        let mut a = Archive::new(Vec::new());
        a.dir("dev").unwrap();
        a.char_device("dev/console", 0o600, (5, 1)).unwrap();
        a.file("init", 0o755, b"hello").unwrap();
        let bytes = a.finish().unwrap();
        assert_eq!(bytes.len() % 4, 0);
        let text = String::from_utf8_lossy(&bytes);
        assert!(text.starts_with("07070100000001000041ED"));
        assert!(text.contains("TRAILER!!!"));
        let at = text.find("init").unwrap();
        assert_eq!(&text[at - 110..at - 104], "070701");
        assert_eq!(&bytes[at - 110 + 116..at - 110 + 121], b"hello");
    }

    /// The reference implementation reads it, where it is installed.
    #[test]
    fn gnu_cpio_lists_it() {
        let Ok(cpio) = crate::tools::find("cpio", "cpio") else {
            eprintln!("SKIPPED gnu_cpio_lists_it: cpio is not installed");
            return;
        };
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.cpio");
        let mut a = Archive::new(Vec::new());
        a.dir("d").unwrap();
        a.file("d/five", 0o644, b"12345").unwrap();
        a.file("d/four", 0o644, b"1234").unwrap();
        std::fs::write(&path, a.finish().unwrap()).unwrap();
        let out = crate::tools::run(
            std::process::Command::new(cpio).args(["-it", "--quiet", "-F"]).arg(&path),
        )
        .unwrap();
        assert_eq!(out, b"d\nd/five\nd/four\n");
    }
}
