//! Files that a command writes: whole under their name, or not at all.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

/// A file on its way. What was there before stays until [`done`](Saved::done); dropped before that, nothing has
/// changed. A pipe or a device, another user's file, and one of several names are written to as it comes.
#[derive(Debug)]
pub struct Saved {
    file: BufWriter<File>,
    path: PathBuf,
    /// Beside it; none once it has its name, and of what is no regular file.
    beside: Option<PathBuf>,
}

impl Saved {
    /// # Errors
    /// When nothing can be written there.
    pub fn begin(path: &Path) -> io::Result<Saved> {
        let in_place = |path: &Path| {
            let file = BufWriter::new(File::create(path)?);
            Ok(Saved { file, path: path.to_owned(), beside: None })
        };
        // Through links: what they lead to is replaced, not they.
        let place = match followed(path) {
            Ok(place) => place,
            // A link to what is not there (any more), or has no name, as /dev/stdout may.
            Err(_) if path.is_symlink() => return in_place(path),
            Err(e) if e.kind() == io::ErrorKind::NotFound => path.to_owned(),
            Err(e) => return Err(e),
        };
        let before = match place.metadata() {
            Ok(about) if about.is_dir() => return Err(io::ErrorKind::IsADirectory.into()),
            // Of a pipe and a device there is nothing to be kept.
            Ok(about) if !about.is_file() => return in_place(&place),
            Ok(about) => Some(about),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Err(e),
        };
        let Some(name) = place.file_name() else { return Err(io::ErrorKind::InvalidInput.into()) };
        let (file, beside) = match beside(&place, name) {
            Ok(made) => made,
            // In a folder that is not ours, a file may be.
            Err(_) if before.is_some() => return in_place(&place),
            Err(e) => return Err(e),
        };
        let saved = Saved { file: BufWriter::new(file), path: place, beside: Some(beside) };
        let Some(before) = before else { return Ok(saved) };
        let own = saved.file.get_ref().metadata()?;
        // Whose it is, and by which other names it is known, would be lost.
        if (before.uid(), before.gid(), before.nlink()) != (own.uid(), own.gid(), 1) {
            return in_place(&saved.path);
        }
        saved.file.get_ref().set_permissions(before.permissions())?;
        Ok(saved)
    }

    /// It is whole: it gets its name.
    ///
    /// # Errors
    /// When what was written last cannot be, or the name cannot be given; what was there before stays.
    pub fn done(mut self) -> io::Result<()> {
        self.file.flush()?;
        if let Some(beside) = &self.beside {
            std::fs::rename(beside, &self.path)?;
        }
        self.beside = None;
        Ok(())
    }
}

impl Write for Saved {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for Saved {
    fn drop(&mut self) {
        if let Some(beside) = &self.beside {
            // A name nobody looks for stays at worst.
            let _ = std::fs::remove_file(beside);
        }
    }
}

/// Of open(2), on Linux: the file is found, and not opened.
const O_PATH: i32 = 0o10_000_000;

/// Where a path leads, as far as the kernel follows it: not through a link that another user has put into a folder of all
/// (fs.protected_symlinks), which reading links one by one would.
fn followed(path: &Path) -> io::Result<PathBuf> {
    let place = File::options().read(true).custom_flags(O_PATH).open(path)?;
    // The very file that was found: whoever changes a link now changes nothing.
    let name = std::fs::read_link(format!("/proc/self/fd/{}", place.as_raw_fd()))?;
    let (found, there) = (place.metadata()?, name.metadata());
    // One that was removed meanwhile has a name that says so, and a pipe has none.
    match there.is_ok_and(|there| (there.dev(), there.ino()) == (found.dev(), found.ino())) {
        true => Ok(name),
        false => Err(io::ErrorKind::NotFound.into()),
    }
}

/// A new file under a name that nobody else has.
fn beside(place: &Path, name: &OsStr) -> io::Result<(File, PathBuf)> {
    let mut last = io::ErrorKind::AlreadyExists.into();
    for n in 0..100 {
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}-{n}", std::process::id()));
        let path = place.with_file_name(hidden);
        match File::options().write(true).create_new(true).open(&path) {
            Ok(file) => return Ok((file, path)),
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => last = e,
            Err(e) => return Err(e),
        }
    }
    Err(last)
}

/// All of a file.
///
/// # Errors
/// As of [`Saved`].
pub fn save(path: &Path, text: &str) -> io::Result<()> {
    let mut file = Saved::begin(path)?;
    file.write_all(text.as_bytes())?;
    file.done()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    fn names(folder: &Path) -> Vec<OsString> {
        let mut names: Vec<_> =
            folder.read_dir().unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_was_there_stays_until_the_new_one_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.csv");
        save(&path, "old").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        let mut half = Saved::begin(&path).unwrap();
        half.write_all(b"new").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "old");
        drop(half);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(names(folder.path()), ["out.csv"]);
        save(&path, "new").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o640);
        assert_eq!(names(folder.path()), ["out.csv"]);
    }

    #[test]
    fn a_link_stays_one_and_a_pipe_is_written_to() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("out.csv"), folder.path().join("latest"));
        save(&path, "old").unwrap();
        symlink(&path, &link).unwrap();
        save(&link, "new").unwrap();
        assert!(link.symlink_metadata().unwrap().is_symlink());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
        // One that leads nowhere gets what it leads to, and of two names both have it.
        let nowhere = folder.path().join("nowhere");
        symlink(folder.path().join("later.csv"), &nowhere).unwrap();
        save(&nowhere, "there").unwrap();
        assert!(nowhere.is_symlink() && folder.path().join("later.csv").is_file());
        let other = folder.path().join("other.csv");
        std::fs::hard_link(&path, &other).unwrap();
        save(&path, "both").unwrap();
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "both");
        save(Path::new("/dev/null"), "gone").unwrap();
        // A pipe that has no name but that of its descriptor.
        let (mut reader, writer) = io::pipe().unwrap();
        let name = format!("/proc/self/fd/{}", writer.as_raw_fd());
        save(Path::new(&name), "through").unwrap();
        drop(writer);
        assert_eq!(io::read_to_string(&mut reader).unwrap(), "through");
        assert!(!Path::new("/dev/null").metadata().unwrap().is_file());
    }

    #[test]
    fn a_link_of_another_in_a_folder_of_all_is_not_followed() {
        let protects = std::fs::read_to_string("/proc/sys/fs/protected_symlinks");
        if !rustix::process::geteuid().is_root() || protects.is_ok_and(|p| p.trim() != "1") {
            return eprintln!("SKIPPED: not root, or fs.protected_symlinks is off");
        }
        let folder = tempfile::tempdir().unwrap();
        let all = std::fs::Permissions::from_mode(0o1777);
        std::fs::set_permissions(folder.path(), all).unwrap();
        let (secret, link) = (tempfile::NamedTempFile::new().unwrap(), folder.path().join("link"));
        std::fs::write(secret.path(), "as it was").unwrap();
        symlink(secret.path(), &link).unwrap();
        std::os::unix::fs::lchown(&link, Some(65534), None).unwrap();
        let refused = save(&link, "overwritten").unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(std::fs::read_to_string(secret.path()).unwrap(), "as it was");
    }

    #[test]
    fn where_nothing_can_be_written_nothing_is_left() {
        let folder = tempfile::tempdir().unwrap();
        assert!(save(folder.path(), "text").is_err());
        assert!(save(&folder.path().join("none/out.csv"), "text").is_err());
        assert!(save(&folder.path().join(".."), "text").is_err());
        assert!(names(folder.path()).is_empty());
    }
}
