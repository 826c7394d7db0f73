//! How much room the run folder has. It lies in memory: by default on `/run`, which many systems make a tenth of theirs.

use std::path::Path;

use ballast_api::RunDirView;
use ballast_units::Bytes;

/// What it should have, per cent of the guests' memory: a tenth for compressed pages by default, the rest for pmaps,
/// stages and logs.
const PERCENT: u64 = 12;

const FULL: &str =
    "when it is full, pages are swapped instead of compressed or shared, and guests wait";

/// None where the file system does not tell.
pub fn of(run_dir: &Path) -> Option<RunDirView> {
    let fs = rustix::fs::statvfs(run_dir).ok()?;
    let bytes = |blocks: u64| blocks.saturating_mul(fs.f_frsize);
    let (size, free) = (bytes(fs.f_blocks), bytes(fs.f_bavail));
    let note = (free < size / 10).then(|| format!("less than a tenth is free: {FULL}"));
    Some(RunDirView { path: run_dir.to_owned(), size, free, note })
}

/// What is wrong with the size of the run folder, and what to do about it; None if nothing is. Guests can have more
/// memory than `budget`, and share some of it: it is the least.
pub fn too_small(room: &RunDirView, budget: Bytes) -> Option<String> {
    let wanted = Bytes(budget.0 / 100 * PERCENT);
    (room.size < wanted.0).then(|| {
        format!(
            "run folder {}: its file system has {}, and should have {wanted} or more ({PERCENT}% of the budget of \
             {budget}): {FULL}; give it a \
             tmpfs of its own (docs/configuration.md, \"Room in the run folder\")",
            room.path.display(),
            Bytes(room.size),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_folder_of_less_than_12_per_cent_of_the_budget_is_too_small() {
        let room = |size| RunDirView { path: "/run/ballast".into(), size, free: size, note: None };
        let budget = Bytes(100 << 30);
        assert_eq!(too_small(&room(12 << 30), budget), None);
        let why = too_small(&room(10 << 30), budget).unwrap();
        for part in ["/run/ballast", "10 GiB", "12 GiB", "100 GiB", "12%", "tmpfs"] {
            assert!(why.contains(part), "{part} is not in: {why}");
        }
        assert!(!why.contains('\n') && !why.contains("  "), "{why}");
    }

    #[test]
    fn its_file_system_tells_size_and_free() {
        let room = of(Path::new("/dev/shm")).unwrap();
        assert!(0 < room.size && room.free <= room.size, "{room:?}");
        assert_eq!(room.note.is_some(), room.free < room.size / 10);
        assert_eq!(of(Path::new("/not there")), None);
    }
}
