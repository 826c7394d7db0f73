//! What must hold of any bytes that are found in a file of the run folder. Called by the fuzzer, and here
//! with a bounded number of mutations.

use std::path::Path;

use crate::pmap::Pmap;
use crate::stage::StageLayout;

/// Nothing panics, no more words are read than there are, and no header makes a stage of a size that
/// cannot be computed with.
pub fn check(bytes: &[u8]) {
    let mut words = 0;
    let path = Path::new("pmap");
    let read = Pmap::peek_bytes(path, bytes, |ppn, word| {
        assert_eq!(ppn.0, words);
        assert!(!format!("{word:?}").is_empty());
        words += 1;
    });
    assert!(words * 8 <= bytes.len() as u64);
    if read.is_ok() {
        assert!(bytes.starts_with(b"BLSTPMAP"));
    }
    if let Some(layout) = StageLayout::parse(bytes) {
        assert!(layout.file_pages().bytes().0 < 1 << 40);
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
#[path = "../../../fuzz/mutate.rs"]
mod mutate;

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    #[test]
    fn no_file_of_a_run_folder_does_harm() {
        super::mutate::run("pmap_header", 100_000, super::check);
    }
}
