//! The files of a VM, and how they go: the one list of what is in its run folder.

use std::path::Path;

use crate::manager::Manager;
use crate::records::Record;

/// What the pager has of a VM, with what a manager that died had begun to write of it.
const PAGER: [&str; 5] = ["pmap", "stage", "compressed", "pmap.new", "stage.new"];
/// Of its VMM.
const SOCKETS: [&str; 2] = ["qmp.sock", "agent.sock"];

impl Manager {
    /// Removes what the pager has of a VM that has no page yet, or none any more. Answers what was there.
    pub(crate) fn remove_pages(&self, name: &str, record: Option<&Record>) -> Vec<&'static str> {
        let folder = self.folder_of(name);
        let removed = |file: &&str| std::fs::remove_file(folder.join(file)).is_ok();
        let there = PAGER.into_iter().filter(removed).collect();
        let recorded = record.and_then(|record| record.swap.as_deref());
        if let Err(e) = self.swap.remove(name, recorded) {
            tracing::warn!(vm = name, "removing its swap files: {e}");
        }
        there
    }

    /// Removes all that there was of a VM that has ended. Its logs stay, for people, until its name is used
    /// again.
    pub(crate) fn remove_all_but_logs(&self, name: &str, record: Option<&Record>) {
        self.remove_pages(name, record);
        let folder = self.folder_of(name);
        for socket in SOCKETS {
            let _ = std::fs::remove_file(folder.join(socket));
        }
        Record::remove(&folder);
        let _ = std::fs::remove_dir(&folder);
    }

    /// Removes all files of a VM that did not come to be.
    pub(crate) fn remove_files(&self, name: &str) {
        let folder = self.folder_of(name);
        let record = Record::load(&folder).ok().flatten();
        self.remove_pages(name, record.as_ref());
        if let Err(e) = missing_is_fine(std::fs::remove_dir_all(&folder)) {
            tracing::warn!(vm = name, "removing its files: {e}");
        }
    }

    /// The folder of a VM whose name was claimed, without the files that a former VM of that name
    /// may have left: the swap file survives a crash of the host, which the folder does not.
    pub(crate) fn fresh_folder(&self, name: &str) -> std::io::Result<()> {
        let folder = self.folder_of(name);
        let named = |path: &Path, result: std::io::Result<()>| {
            let told = |e: std::io::Error| {
                std::io::Error::new(e.kind(), format!("{}: {e}", path.display()))
            };
            missing_is_fine(result).map_err(told)
        };
        self.swap.remove(name, None)?;
        named(&folder, std::fs::remove_dir_all(&folder))?;
        named(&folder, std::fs::create_dir_all(&folder))
    }
}

fn missing_is_fine(result: std::io::Result<()>) -> std::io::Result<()> {
    match result {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
