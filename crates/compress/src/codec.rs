//! The codecs. Each stored page says which one it was written by, so that a change of the
//! configuration changes nothing for pages that are there.
//!
//! ```text
//! 0       4      6      7      8
//! +-------+------+------+------+------------
//! |  sum  | len  | algo | zero | compressed
//! +-------+------+------+------+------------
//! ```
//!
//! `sum` covers what follows it: memory that was overwritten is told from a page.

use std::cell::RefCell;

use ballast_units::PAGE_SIZE;
use twox_hash::XxHash3_64;

/// Bytes before a page's compressed contents.
const HEADER: usize = 8;

/// How pages are compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// LZ4's block format: fast both ways.
    #[default]
    Lz4,
    /// Zstandard at its level 1: smaller, at several times the cost.
    Zstd,
}

impl Algorithm {
    const fn code(self) -> u8 {
        match self {
            Algorithm::Lz4 => 1,
            Algorithm::Zstd => 2,
        }
    }
}

/// The lowest of zstd's levels that is not one of its fast, weak ones.
const ZSTD_LEVEL: i32 = 1;

/// Bytes that are no page of ours: memory was overwritten, or the file is of something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a compressed page is damaged: {0}")]
pub struct Damaged(&'static str);

impl Damaged {
    /// Of bytes around the codec's own, which who keeps them has looked at.
    pub const fn because(what: &'static str) -> Damaged {
        Damaged(what)
    }
}

/// Compresses pages, with the room that it takes. One per thread.
pub struct Compressor {
    algorithm: Algorithm,
    lz4: lz4_flex::block::CompressTable,
    zstd: Option<zstd::bulk::Compressor<'static>>,
    out: Vec<u8>,
}

impl Compressor {
    /// Takes the memory that it will need, but for zstd's own, which comes with the first page.
    ///
    /// # Errors
    /// zstd does not take its level.
    pub fn new(algorithm: Algorithm) -> std::io::Result<Compressor> {
        let zstd = match algorithm {
            Algorithm::Lz4 => None,
            Algorithm::Zstd => Some(zstd::bulk::Compressor::new(ZSTD_LEVEL)?),
        };
        let room = lz4_flex::block::get_maximum_output_size(PAGE_SIZE)
            .max(zstd::zstd_safe::compress_bound(PAGE_SIZE));
        Ok(Compressor {
            algorithm,
            lz4: lz4_flex::block::CompressTable::small(),
            zstd,
            out: vec![0; HEADER + room],
        })
    }

    /// The page with its header, if that is at most `most` bytes; None if it does not compress so far.
    pub fn compress(&mut self, page: &[u8; PAGE_SIZE], most: usize) -> Option<&[u8]> {
        let room = &mut self.out[HEADER..];
        let len = match &mut self.zstd {
            None => lz4_flex::block::compress_into_with_table(page, room, &mut self.lz4).ok()?,
            Some(zstd) => zstd.compress_to_buffer(page, room).ok()?,
        };
        if HEADER + len > most {
            return None;
        }
        let all = &mut self.out[..HEADER + len];
        all[4..6].copy_from_slice(&(len as u16).to_le_bytes());
        all[6] = self.algorithm.code();
        all[7] = 0;
        let sum = XxHash3_64::oneshot(&all[4..]) as u32;
        all[..4].copy_from_slice(&sum.to_le_bytes());
        Some(all)
    }
}

thread_local! {
    static ZSTD: RefCell<Option<zstd::bulk::Decompressor<'static>>> = const { RefCell::new(None) };
}

/// The page that [`Compressor::compress`] made `bytes` of, by whichever algorithm; what follows it in
/// the slot is ignored.
///
/// # Errors
/// The bytes are not such a page, or were changed. `page` then holds nothing that may be used.
pub fn decompress(bytes: &[u8], page: &mut [u8; PAGE_SIZE]) -> Result<(), Damaged> {
    let header = bytes.get(..HEADER).ok_or(Damaged("no header"))?;
    let sum = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
    let len = usize::from(u16::from_le_bytes([header[4], header[5]]));
    let all = bytes.get(4..HEADER + len).ok_or(Damaged("longer than its slot"))?;
    if XxHash3_64::oneshot(all) as u32 != sum {
        return Err(Damaged("its checksum does not match"));
    }
    let body = &all[HEADER - 4..];
    let done = if header[6] == Algorithm::Lz4.code() {
        lz4_flex::block::decompress_into(body, page).map_err(|_| Damaged("not lz4"))?
    } else if header[6] == Algorithm::Zstd.code() {
        ZSTD.with_borrow_mut(|zstd| {
            let zstd = match zstd {
                Some(zstd) => zstd,
                None => zstd.insert(zstd::bulk::Decompressor::new().ok()?),
            };
            zstd.decompress_to_buffer(body, &mut page[..]).ok()
        })
        .ok_or(Damaged("not zstd"))?
    } else {
        return Err(Damaged("by an unknown algorithm"));
    };
    if done == PAGE_SIZE { Ok(()) } else { Err(Damaged("not a whole page")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn page(bytes: &[u8]) -> [u8; PAGE_SIZE] {
        std::array::from_fn(|i| bytes[i % bytes.len()])
    }

    proptest! {
        #[test]
        fn pages_come_back_as_they_were(
            bytes in prop::collection::vec(any::<u8>(), 1..PAGE_SIZE),
            zstd: bool,
        ) {
            let page = page(&bytes);
            let algorithm = if zstd { Algorithm::Zstd } else { Algorithm::Lz4 };
            let mut compressor = Compressor::new(algorithm).unwrap();
            let packed = compressor.compress(&page, usize::MAX).unwrap().to_vec();
            let mut back = [1; PAGE_SIZE];
            decompress(&packed, &mut back).unwrap();
            prop_assert!(back == page);
            // A compressor's tables are used again.
            let again = compressor.compress(&page, usize::MAX).unwrap();
            prop_assert!(again == packed);
        }

        /// Whatever is in the slot, it is a page that was stored there or an error.
        #[test]
        fn a_bit_that_flips_is_noticed(
            bytes in prop::collection::vec(any::<u8>(), 1..600),
            at: prop::sample::Index,
            bit in 0u8..8,
            zstd: bool,
        ) {
            let algorithm = if zstd { Algorithm::Zstd } else { Algorithm::Lz4 };
            let mut compressor = Compressor::new(algorithm).unwrap();
            let mut packed = compressor.compress(&page(&bytes), usize::MAX).unwrap().to_vec();
            let at = at.index(packed.len());
            packed[at] ^= 1 << bit;
            prop_assert!(decompress(&packed, &mut [0; PAGE_SIZE]).is_err());
        }

        #[test]
        fn bytes_of_anything_are_an_error_and_no_more(
            bytes in prop::collection::vec(any::<u8>(), 0..2048),
        ) {
            prop_assert!(decompress(&bytes, &mut [0; PAGE_SIZE]).is_err());
        }
    }

    #[test]
    fn what_does_not_fit_is_not_kept() {
        let mut compressor = Compressor::new(Algorithm::Lz4).unwrap();
        assert!(compressor.compress(&page(&[7]), 1024).is_some());
        let mut state = 1u64;
        let noise = std::array::from_fn(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as u8
        });
        assert!(compressor.compress(&noise, 2048).is_none());
    }
}
