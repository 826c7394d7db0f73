//! Reference counts too large for 16 bits (OSDI'02 s.4.3).

use ballast_units::Bytes;

use crate::ids::StorePage;

/// Sorted by page. Each entry stands for 256 MiB of guest memory or more, so there are few.
#[derive(Default)]
pub(super) struct Overflow {
    counts: Vec<(StorePage, u64)>,
}

impl Overflow {
    /// 0 for a page that has no entry.
    pub fn get(&self, page: StorePage) -> u64 {
        self.at(page).map_or(0, |i| self.counts[i].1)
    }

    pub fn set(&mut self, page: StorePage, count: u64) {
        match self.at(page) {
            Ok(i) => self.counts[i].1 = count,
            Err(i) => self.counts.insert(i, (page, count)),
        }
    }

    pub fn remove(&mut self, page: StorePage) {
        if let Ok(i) = self.at(page) {
            self.counts.remove(i);
        }
    }

    fn at(&self, page: StorePage) -> Result<usize, usize> {
        self.counts.binary_search_by_key(&page, |entry| entry.0)
    }

    pub fn iter(&self) -> impl Iterator<Item = (StorePage, u64)> + '_ {
        self.counts.iter().copied()
    }

    /// What must hold.
    ///
    /// # Errors
    /// What does not.
    pub fn check(&self) -> Result<(), String> {
        match self.counts.windows(2).find(|two| two[0].0 >= two[1].0) {
            Some(two) => Err(format!("{} comes before {}", two[0].0, two[1].0)),
            None => Ok(()),
        }
    }

    /// Heap memory, as asked of the allocator.
    pub fn memory(&self) -> Bytes {
        Bytes((self.counts.capacity() * size_of::<(StorePage, u64)>()) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_kept_by_page_in_whatever_order_they_come() {
        let mut overflow = Overflow::default();
        let page = |n| StorePage::new(n).unwrap();
        for n in [5, 1, 9, 3, 7] {
            overflow.set(page(n), n * 100_000);
            overflow.check().unwrap();
        }
        overflow.set(page(3), 1);
        overflow.remove(page(9));
        overflow.remove(page(2));
        let found: Vec<u64> = [1, 3, 5, 7, 9].map(|n| overflow.get(page(n))).into();
        assert_eq!(found, [100_000, 1, 500_000, 700_000, 0]);
        overflow.check().unwrap();
        assert_eq!(overflow.memory(), Bytes(overflow.counts.capacity() as u64 * 16));
    }

    #[test]
    fn counts_out_of_order_or_twice_are_found() {
        let page = |n| StorePage::new(n).unwrap();
        for counts in [vec![(page(2), 9), (page(1), 9)], vec![(page(1), 9), (page(1), 9)]] {
            Overflow { counts }.check().unwrap_err();
        }
    }
}
