//! A table in a file: one row to a page, each checkable, with its generation kept beside the file.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::page::{Mark, PAGE, Page, WORDS};

/// Rows written with one call.
const BATCH: usize = 64;

pub struct Table {
    file: File,
    path: PathBuf,
    seed: u64,
    generations: Vec<u32>,
}

impl Table {
    /// Writes all rows; `told` hears how many are there.
    pub fn create(
        dir: &Path,
        rows: usize,
        seed: u64,
        mut told: impl FnMut(usize),
    ) -> Result<Table, String> {
        let path = dir.join("table");
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(true).open(&path);
        let file = file.map_err(|e| format!("{}: {e}", path.display()))?;
        let table = Table { file, path, seed, generations: vec![1; rows] };
        let mut page: Page = [0; WORDS];
        let mut bytes = Vec::with_capacity(BATCH * PAGE);
        for from in (0..rows).step_by(BATCH) {
            bytes.clear();
            let upto = (from + BATCH).min(rows);
            for row in from..upto {
                table.mark(row).fill_rows(&mut page);
                bytes.extend(page.iter().flat_map(|w| w.to_le_bytes()));
            }
            table.file.write_all_at(&bytes, (from * PAGE) as u64).map_err(|e| table.told(e))?;
            told(upto);
        }
        Ok(table)
    }

    fn told(&self, error: std::io::Error) -> String {
        format!("{}: {error}", self.path.display())
    }

    fn mark(&self, row: usize) -> Mark {
        Mark { seed: self.seed, index: row as u64, generation: self.generations[row] }
    }

    /// Reads a row and checks it. The outer error is of the file, the inner of the row.
    pub fn read(&self, row: usize) -> Result<Result<(), String>, String> {
        let mut bytes = [0; PAGE];
        self.file.read_exact_at(&mut bytes, (row * PAGE) as u64).map_err(|e| self.told(e))?;
        let mut page: Page = [0; WORDS];
        for (word, b) in page.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = b.try_into().map_or(0, u64::from_le_bytes);
        }
        Ok(self.mark(row).verify_rows(&page).map_or(Ok(()), Err))
    }

    /// Writes a row in a new generation.
    pub fn update(&mut self, row: usize) -> Result<(), String> {
        self.generations[row] = self.generations[row].wrapping_add(1).max(1);
        let mut page: Page = [0; WORDS];
        self.mark(row).fill_rows(&mut page);
        let mut bytes = [0; PAGE];
        for (b, word) in bytes.chunks_exact_mut(8).zip(&page) {
            b.copy_from_slice(&word.to_le_bytes());
        }
        self.file.write_all_at(&bytes, (row * PAGE) as u64).map_err(|e| self.told(e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_checked_and_damage_is_found() {
        let dir = std::env::temp_dir().join(format!("ballast-table-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let mut table = Table::create(&dir, 100, 5, |_| {}).unwrap();
        table.update(70).unwrap();
        (0..100).for_each(|row| table.read(row).unwrap().unwrap());
        table.file.write_all_at(&[1], 70 * PAGE as u64 + 900).unwrap();
        assert!(table.read(70).unwrap().unwrap_err().contains("page 70"));
        // A lost update.
        table.generations[3] += 1;
        assert!(table.read(3).unwrap().unwrap_err().contains("generation 1"));
        table.file.set_len(0).unwrap();
        assert!(table.read(1).is_err());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
