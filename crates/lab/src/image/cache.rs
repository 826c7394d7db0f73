//! The cache folder, held by one process at a time.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::say;

/// See the module.
pub struct Cache {
    /// It is there.
    pub dir: PathBuf,
    /// Locked for as long as this value lives.
    _lock: File,
}

impl Cache {
    /// Waits for another process that has it.
    pub fn open() -> Result<Cache> {
        Cache::at(match std::env::var_os("BALLAST_CACHE") {
            Some(dir) => PathBuf::from(dir),
            None => Path::new(&std::env::var_os("HOME").unwrap_or_else(|| "/root".into()))
                .join(".cache/ballast"),
        })
    }

    fn at(dir: PathBuf) -> Result<Cache> {
        let told = || format!("cache folder {}", dir.display());
        std::fs::create_dir_all(&dir).with_context(told)?;
        let lock = File::create(dir.join("lock")).with_context(told)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                say::detail(&format!("waiting for another run that has {}", told()));
                lock.lock().with_context(told)?;
            }
            Err(TryLockError::Error(e)) => return Err(e).with_context(told),
        }
        Ok(Cache { dir, _lock: lock })
    }

    /// Makes `name` in the cache: `make` fills a folder beside it, which is renamed when complete,
    /// so that what is in the cache is always whole.
    pub fn folder(&self, name: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        let path = self.dir.join(name);
        if path.is_dir() {
            return Ok(path);
        }
        let partial = tempfile::Builder::new()
            .prefix("partial-")
            .tempdir_in(&self.dir)
            .with_context(|| format!("cache folder {}", self.dir.display()))?;
        make(partial.path())?;
        std::fs::rename(partial.keep(), &path).with_context(|| path.display().to_string())?;
        Ok(path)
    }

    /// As [`Cache::folder`], for one file.
    pub fn file(&self, name: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        let path = self.dir.join(name);
        if path.is_file() {
            return Ok(path);
        }
        let partial = self.dir.join(format!("partial-{name}"));
        let made = make(&partial);
        if made.is_err() {
            let _ = std::fs::remove_file(&partial);
        }
        made?;
        std::fs::rename(&partial, &path).with_context(|| path.display().to_string())?;
        Ok(path)
    }
}

#[cfg(test)]
pub fn tests_cache(dir: &Path) -> Cache {
    Cache::at(dir.to_owned()).unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_failed_half_way_is_not_kept() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path().join("c")).unwrap();
        let failed = cache.folder("k", |p| {
            std::fs::write(p.join("half"), "x").unwrap();
            anyhow::bail!("no")
        });
        assert!(failed.is_err());
        assert!(
            cache
                .file("f", |p| Ok(std::fs::write(p, "x").and(Err(std::io::Error::other("no")))?))
                .is_err()
        );
        let left: Vec<_> =
            std::fs::read_dir(&cache.dir).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["lock"]);
        let made = cache.folder("k", |p| Ok(std::fs::write(p.join("whole"), "x")?)).unwrap();
        assert!(made.join("whole").is_file());
        assert_eq!(cache.folder("k", |_| anyhow::bail!("made twice")).unwrap(), made);
    }
}
