//! The rules of this repository, as tests. Nothing else is in here.
//!
//! | file | rule |
//! | --- | --- |
//! | `layers` | which crate may depend on which, and what the policy may not touch |
//! | `documents` | what a document names is there |
//! | `maps` | what stands at the head of a file of its modules names all of them |
//! | `scripts` | what programs of this folder refuse |
//! | `service` | the service is what the documents say of it |
//! | `sizes` | no file is longer than one reads |
//! | `paths` | how code and paths are read |

#[cfg(test)]
mod documents;
#[cfg(test)]
mod layers;
#[cfg(test)]
mod maps;
#[cfg(test)]
mod paths;
#[cfg(test)]
mod scripts;
#[cfg(test)]
mod service;
#[cfg(test)]
mod sizes;

#[cfg(test)]
mod files {
    use std::path::{Path, PathBuf};

    /// The folder of the repository.
    pub fn root() -> &'static Path {
        Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap()
    }

    pub fn read(path: &Path) -> String {
        std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }

    /// All files below a folder, in order.
    pub fn below(folder: &Path) -> Vec<PathBuf> {
        let mut found = Vec::new();
        let entries = std::fs::read_dir(folder);
        for entry in entries.unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
            let path = entry.unwrap().path();
            if path.is_dir() {
                found.extend(below(&path));
            } else {
                found.push(path);
            }
        }
        found.sort();
        found
    }

    pub fn with_ending(folder: &Path, ending: &str) -> Vec<PathBuf> {
        let mut found = below(folder);
        found.retain(|path| path.extension().is_some_and(|e| e == ending));
        assert!(!found.is_empty(), "no .{ending} in {}", folder.display());
        found
    }
}
