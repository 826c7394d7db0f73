//! Where the chains begin: linear hashing, which grows and shrinks one bucket at a time, so no
//! operation ever waits for a rehash.
//!
//! With n buckets and 2^k the largest power of two not above n, hashes are taken modulo 2^(k+1),
//! and modulo 2^k where there is no such bucket yet. The next bucket to come is n; what belongs
//! in it is in bucket n - 2^k.

use ballast_units::Bytes;

use super::frame::Link;
use crate::hash::PageHash;

/// Buckets per chunk, and the fewest there are: 1 KiB.
const CHUNK: u32 = 256;

/// The first link of each chain.
#[allow(clippy::vec_box, reason = "growing must not copy the buckets there are")]
pub(super) struct Buckets {
    chunks: Vec<Box<[Link; CHUNK as usize]>>,
    len: u32,
}

impl Buckets {
    pub fn new() -> Buckets {
        Buckets { chunks: vec![Box::new([Link::END; CHUNK as usize])], len: CHUNK }
    }

    pub fn len(&self) -> u32 {
        self.len
    }

    /// The bucket of a hash.
    pub fn of(&self, hash: PageHash) -> u32 {
        let mask = self.len.next_power_of_two() - 1;
        let bucket = hash.0 as u32 & mask;
        if bucket < self.len { bucket } else { bucket & (mask >> 1) }
    }

    pub fn get(&self, bucket: u32) -> Link {
        self.chunks[(bucket / CHUNK) as usize][(bucket % CHUNK) as usize]
    }

    pub fn set(&mut self, bucket: u32, link: Link) {
        self.chunks[(bucket / CHUNK) as usize][(bucket % CHUNK) as usize] = link;
    }

    /// Whether so many chained frames call for another bucket: above five to four buckets, which
    /// keeps a full table of frames and buckets at 19.2 bytes per frame.
    pub fn too_few(&self, chained: u64) -> bool {
        chained * 4 > u64::from(self.len) * 5 && self.len < 1 << 31
    }

    /// Whether one bucket can go: fewer frames than buckets.
    pub fn too_many(&self, chained: u64) -> bool {
        chained < u64::from(self.len) && self.len > CHUNK
    }

    /// Adds a bucket, empty. Answers which one has what may belong in it, and its number.
    pub fn add(&mut self) -> (u32, u32) {
        let new = self.len;
        if (new / CHUNK) as usize == self.chunks.len() {
            self.chunks.push(Box::new([Link::END; CHUNK as usize]));
        }
        self.len += 1;
        (new - (1 << new.ilog2()), new)
    }

    /// The first links of those chains that are parted next: of about as many as `n` more frames call for.
    pub fn parted_next(&self, n: u32) -> impl Iterator<Item = Link> {
        let next = self.len..self.len.saturating_add(n / 5 * 4);
        next.map(|new| self.get(new - (1 << new.ilog2())))
    }

    /// Takes the last bucket away. Answers its chain, all of which belongs in other buckets now.
    pub fn remove(&mut self) -> Link {
        let last = self.len - 1;
        let chain = self.get(last);
        self.set(last, Link::END);
        self.len = last;
        if last.is_multiple_of(CHUNK) {
            self.chunks.truncate((last / CHUNK) as usize);
            if self.chunks.capacity() / 4 > self.chunks.len() {
                self.chunks.shrink_to(self.chunks.len() * 2);
            }
        }
        chain
    }

    /// Heap memory, as asked of the allocator.
    pub fn memory(&self) -> Bytes {
        let directory = self.chunks.capacity() * size_of::<Box<[Link; CHUNK as usize]>>();
        Bytes((self.chunks.len() * size_of::<[Link; CHUNK as usize]>() + directory) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::super::frame::Place;
    use super::*;
    use crate::ids::PageId;

    #[test]
    fn a_new_bucket_takes_only_from_the_one_it_is_said_to() {
        let mut buckets = Buckets::new();
        for _ in 0..2000 {
            let before: Vec<u32> = (0..4096).map(|h| buckets.of(PageHash(h))).collect();
            let (from, new) = buckets.add();
            for (h, before) in before.into_iter().enumerate() {
                let now = buckets.of(PageHash(h as u64));
                assert!(now < buckets.len());
                assert!(now == before || (before == from && now == new), "{h}: {before} {now}");
            }
        }
        for _ in 0..2000 {
            buckets.remove();
        }
        assert_eq!((buckets.len(), buckets.chunks.len()), (CHUNK, 1));
    }

    #[test]
    fn chains_that_are_parted_next_are_those_that_buckets_to_come_take_from() {
        let mut buckets = Buckets::new();
        // A link for each bucket, on both sides of a power of two.
        let link = |bucket: u32| Link::from(Place::Hint(PageId::new(bucket).unwrap()));
        (0..CHUNK).for_each(|bucket| buckets.set(bucket, link(bucket)));
        for _ in 0..700 {
            let next: Vec<Link> = buckets.parted_next(10).collect();
            let mut from = Vec::new();
            let len = buckets.len();
            for _ in 0..8 {
                let (parted, _) = buckets.add();
                from.push(buckets.get(parted));
            }
            assert!(next == from, "of {len} buckets");
            for _ in 0..7 {
                buckets.remove();
            }
            buckets.set(len, link(len));
        }
        assert!(buckets.len() > 900 && buckets.parted_next(1).next().is_none());
    }

    #[test]
    fn there_are_four_buckets_to_five_frames_and_no_fewer_frames_than_buckets() {
        let mut buckets = Buckets::new();
        assert_eq!([320, 321].map(|n| buckets.too_few(n)), [false, true]);
        assert_eq!([0, 256].map(|n| buckets.too_many(n)), [false; 2], "the first ones stay");
        buckets.add();
        assert_eq!([256, 257].map(|n| buckets.too_many(n)), [true, false]);
        let most = 1 << 31;
        for (len, grows) in [(most - 1, true), (most, false)] {
            let buckets = Buckets { chunks: Vec::new(), len };
            assert_eq!(buckets.too_few(u64::from(len) * 2), grows, "{len}");
        }
    }

    /// Memory for the directory is given back when three quarters of it are of no use.
    #[test]
    fn the_directory_shrinks_with_the_buckets() {
        let mut buckets = Buckets::new();
        while buckets.chunks.len() < 64 {
            buckets.add();
        }
        let mut shrunk = 0;
        while buckets.len() > CHUNK {
            let before = buckets.chunks.capacity();
            buckets.remove();
            let (len, after) = (buckets.chunks.len(), buckets.chunks.capacity());
            let expected = if before >= (len + 1) * 4 { len * 2 } else { before };
            assert_eq!(after, expected, "{len} chunks");
            shrunk += usize::from(after < before);
        }
        assert!(shrunk >= 3, "{shrunk}");
    }
}
