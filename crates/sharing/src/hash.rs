//! Page contents to 64 bits.
//!
//! The hash only says where to look: pages are compared whole before they are shared. It is keyed
//! so that a guest which does not know the key cannot compute contents that collide, and so that
//! hashes of different domains have nothing to do with one another.

use ballast_units::PAGE_SIZE;
use twox_hash::XxHash3_64;

/// Hash of a page's contents, of one domain's [`Hasher`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageHash(pub u64);

/// XXH3-64 with a domain's key. Not a cryptographic hash: whoever finds collisions all the same
/// makes pages ineligible for sharing, and no more.
#[derive(Clone)]
pub struct Hasher {
    seed: u64,
}

impl Hasher {
    /// `secret` is the host's, of any length, the same for all domains; the same secret and name give
    /// the same hasher, so hashes hold across a restart of the manager.
    pub fn new(secret: &[u8], domain: &str) -> Hasher {
        // The length keeps (secret, domain) apart from any other split of the same bytes.
        let mut key = (secret.len() as u64).to_le_bytes().to_vec();
        key.extend_from_slice(secret);
        key.extend_from_slice(domain.as_bytes());
        Hasher { seed: XxHash3_64::oneshot(&key) }
    }

    /// The hash of a page's contents.
    pub fn page(&self, bytes: &[u8; PAGE_SIZE]) -> PageHash {
        PageHash(XxHash3_64::oneshot_with_seed(self.seed, bytes))
    }
}

impl std::fmt::Debug for Hasher {
    /// Without the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hasher").finish_non_exhaustive()
    }
}

/// Whether every byte is zero. Most pages that are not answer in their first 128 bytes.
pub fn is_zero(bytes: &[u8; PAGE_SIZE]) -> bool {
    let (blocks, _) = bytes.as_chunks::<128>();
    blocks.iter().all(|block| block.iter().fold(0, |all, byte| all | byte) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn equal_pages_hash_equally_and_any_bit_counts() {
        let hasher = Hasher::new(b"secret", "domain");
        let mut page = [0x5a; PAGE_SIZE];
        let mut seen = HashSet::from([hasher.page(&page)]);
        assert!(!seen.insert(Hasher::new(b"secret", "domain").page(&page)));
        for bit in 0..PAGE_SIZE * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert!(seen.insert(hasher.page(&page)), "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn each_secret_and_each_domain_has_hashes_of_its_own() {
        let page = [7; PAGE_SIZE];
        let keys: [(&[u8], &str); 5] =
            [(b"ab", "c"), (b"a", "bc"), (b"", "abc"), (b"abc", ""), (b"ab", "d")];
        let hashes = keys.map(|(secret, domain)| Hasher::new(secret, domain).page(&page));
        assert_eq!(HashSet::from(hashes).len(), keys.len());
    }

    #[test]
    fn the_key_is_not_printed() {
        let hasher = Hasher::new(b"secret", "domain");
        let printed = format!("{hasher:?}");
        assert!(printed.starts_with("Hasher") && !printed.contains(&hasher.seed.to_string()));
    }

    #[test]
    fn one_byte_anywhere_makes_a_page_not_zero() {
        let mut page = [0; PAGE_SIZE];
        assert!(is_zero(&page));
        for at in 0..PAGE_SIZE {
            page[at] = 1 << (at % 8);
            assert!(!is_zero(&page), "byte {at}");
            page[at] = 0;
        }
    }

    #[test]
    fn bytes_that_cancel_out_do_not_make_a_page_zero() {
        let mut page = [0; PAGE_SIZE];
        (page[1], page[9]) = (0x55, 0x55);
        assert!(!is_zero(&page), "their exclusive or is zero");
        (page[1], page[9]) = (0x55, 0xaa);
        assert!(!is_zero(&page), "they have no bit in common");
        (page[1], page[9]) = (0x80, 0x80);
        assert!(!is_zero(&page), "their sum is zero");
        assert!(!is_zero(&[0xff; PAGE_SIZE]));
    }
}
