//! What the pager has of a VM in its run folder, beside swap files elsewhere.

/// See [`crate::pmap`].
pub const PMAP: &str = "pmap";
/// See [`crate::stage`].
pub const STAGE: &str = "stage";
/// See [`crate::tier`].
pub const COMPRESSED: &str = "compressed";
/// All that there may be: these, and what a manager that died had begun to make of them.
pub const ALL: [&str; 5] = [PMAP, STAGE, COMPRESSED, "pmap.new", "stage.new"];

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use crate::mapped_file::Fresh;

    #[test]
    fn what_is_begun_has_a_name_that_is_known() {
        let dir = tempfile::tempdir().unwrap();
        for file in [PMAP, STAGE] {
            let fresh = Fresh::beside(&dir.path().join(file)).unwrap();
            assert!(ALL.iter().any(|name| fresh.path().ends_with(name)), "{file}");
        }
    }
}
