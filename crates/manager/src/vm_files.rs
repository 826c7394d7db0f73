//! The files of a VM (`layout`), and how they go.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;

use ballast_pager::run_files;

use crate::layout::{AGENT_SOCKET, QMP_SOCKET};
use crate::manager::Manager;
use crate::records::Record;
use crate::rooms::SILENT;
use crate::sync::lock;

impl Manager {
    /// Removes what the pager has of a VM that has no page yet, or none any more. Answers what was there.
    pub(crate) fn remove_pages(&self, name: &str, record: Option<&Record>) -> Vec<&'static str> {
        let folder = self.folder_of(name);
        let removed = |file: &&str| std::fs::remove_file(folder.join(file)).is_ok();
        let there = run_files::ALL.into_iter().filter(removed).collect();
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
        self.remove_run_files(name);
    }

    /// The same, of what is in the run folder and no page of it.
    pub(crate) fn remove_run_files(&self, name: &str) {
        let folder = self.folder_of(name);
        for socket in [QMP_SOCKET, AGENT_SOCKET] {
            let _ = std::fs::remove_file(folder.join(socket));
        }
        Record::remove(&folder);
        let _ = std::fs::remove_dir(&folder);
    }

    /// `remove_all_but_logs`, where tasks of others run.
    pub(crate) async fn clear(self: &Arc<Self>, name: &str, record: Record) {
        let owner = name.to_owned();
        let work = move |manager: &Manager| {
            manager.remove_all_but_logs(&owner, Some(&record));
            Ok(())
        };
        if let Err(e) = self.with_files(work).await {
            tracing::error!(vm = name, "removing its files: {e}");
        }
    }

    /// The same of VMs that ended while no manager ran. Not waited for long: their file systems may hang, and others
    /// wait for this manager. Until it is done, nobody gets their names.
    pub(crate) fn clear_ended(self: &Arc<Self>, ended: Vec<Record>) {
        let (done, all_done) = channel::<()>();
        for record in ended {
            let name = record.name.clone();
            lock(&self.clearing).insert(name.clone());
            let (manager, done) = (self.clone(), done.clone());
            let clear = move || {
                manager.remove_all_but_logs(&record.name, Some(&record));
                lock(&manager.clearing).remove(&record.name);
                drop(done);
            };
            if let Err(e) = std::thread::Builder::new().name("clear".into()).spawn(clear) {
                tracing::error!(vm = name, "a thread that removes its files: {e}");
                lock(&self.clearing).remove(&name);
            }
        }
        drop(done);
        let _ = all_done.recv_timeout(SILENT);
    }

    /// Removes all files of a VM that did not come to be.
    pub(crate) async fn remove_files(self: &Arc<Self>, name: &str) {
        let owner = name.to_owned();
        let work = move |manager: &Manager| {
            let folder = manager.folder_of(&owner);
            let record = Record::load(&folder).ok().flatten();
            manager.remove_pages(&owner, record.as_ref());
            missing_is_fine(std::fs::remove_dir_all(&folder))
        };
        if let Err(e) = self.with_files(work).await {
            tracing::warn!(vm = name, "removing its files: {e}");
        }
    }

    /// The folder of a VM whose name was claimed, without the files, and the shared pages, that a former VM of that name
    /// may have left: the swap file survives a crash of the host, which the folder does not.
    ///
    /// # Errors
    /// Some of them cannot be removed, or the folder not be made.
    pub(crate) async fn fresh_folder(self: &Arc<Self>, name: &str) -> std::io::Result<()> {
        let owner = name.to_owned();
        let work = move |manager: &Manager| {
            let folder = manager.folder_of(&owner);
            let named = |path: &Path, result: std::io::Result<()>| {
                let told = |e: std::io::Error| {
                    std::io::Error::new(e.kind(), format!("{}: {e}", path.display()))
                };
                missing_is_fine(result).map_err(told)
            };
            manager.commons.retire(&owner).map_err(std::io::Error::other)?;
            // On a location that can only be read it stays. No file is made over another.
            if let Err(e) = manager.swap.remove(&owner, None) {
                tracing::warn!(vm = owner, "a swap file of a former VM: {e}");
            }
            named(&folder, std::fs::remove_dir_all(&folder))?;
            named(&folder, std::fs::create_dir_all(&folder))
        };
        self.with_files(work).await
    }

    /// A file system may hang: not on a thread that runs others' tasks too.
    async fn with_files(
        self: &Arc<Self>,
        work: impl FnOnce(&Manager) -> std::io::Result<()> + Send + 'static,
    ) -> std::io::Result<()> {
        let manager = self.clone();
        let done = tokio::task::spawn_blocking(move || work(&manager)).await;
        done.unwrap_or_else(|e| Err(std::io::Error::other(e)))
    }
}

fn missing_is_fine(result: std::io::Result<()>) -> std::io::Result<()> {
    match result {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use ballast_policy::Promise;
    use ballast_qemu::AccelChoice;
    use ballast_units::Pages;

    use super::*;
    use crate::manager::Pledge;
    use crate::vm::VmParams;

    async fn until(met: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(60);
        while !met() {
            assert!(Instant::now() < end);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// They are removed by name: those of another of that name would be.
    #[tokio::test]
    async fn the_name_of_a_vm_that_has_ended_is_nobodys_until_its_files_are_gone() {
        let dir = tempfile::tempdir().unwrap();
        let manager = crate::manager::tests::manager(dir.path());
        let saved = |name: &str| {
            let (folder, size) = (manager.folder_of(name), Pages(4));
            std::fs::create_dir_all(&folder).unwrap();
            let params = VmParams::resolve(&[], name, size.into(), Default::default()).unwrap();
            let (pid, accel) = (std::process::id(), AccelChoice::Kvm);
            let record = Record::new(name, None, params, size, Pages::ZERO, pid, &accel);
            record.save(&folder).unwrap();
            (folder, record)
        };
        let ((folder, record), (other, _)) = (saved("a"), saved("other"));
        let socket = folder.join(QMP_SOCKET);
        std::fs::write(&socket, "").unwrap();
        // While a record is being changed none is removed.
        let ((begun, has_begun), (release, released)) = (channel(), channel::<()>());
        let change = move |_: &mut Record| {
            begun.send(()).unwrap();
            let _ = released.recv();
        };
        let changes = std::thread::spawn(move || Record::update(&other, change));
        has_begun.recv().unwrap();
        let clears = manager.clone();
        let clears = std::thread::spawn(move || clears.clear_ended(vec![record]));
        // Just before its record.
        until(|| !socket.exists()).await;
        let promise = Promise { min: Pages(1), overhead: Pages::ZERO, swap: Pages::ZERO };
        let pledge = || Pledge { promise, pool: None, rebooted: None };
        let remains = manager.remains_of("a").unwrap();
        assert!(remains.contains("being removed"), "{remains}");
        assert_eq!(manager.take_name("a", pledge()).await.unwrap_err().message, remains);
        assert!(Record::path(&folder).exists());
        drop(release);
        assert_eq!(changes.join().unwrap(), Ok(true));
        clears.join().unwrap();
        until(|| manager.remains_of("a").is_none()).await;
        assert!(!folder.exists());
        manager.take_name("a", pledge()).await.unwrap();
    }
}
