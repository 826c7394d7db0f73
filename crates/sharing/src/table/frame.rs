//! The frames of the share table, 16 bytes each. A frame's place says which page it is about, so
//! neither kind needs a field for it.
//!
//! ```text
//!               8            4       2       2
//! shared  +------------+--------+-------+-------+
//!         |    hash    |  link  | refs  | flags |    place: store page
//!         +------------+--------+-------+-------+
//! hint    |    hash    |  link  |     flags     |    place: guest page
//!         +------------+--------+---------------+
//! ```
//!
//! A frame of zeros is an empty one.

use crate::hash::PageHash;
use crate::ids::{PageId, StorePage};
use crate::table::chunks::Slot;

/// The page that a frame is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Place {
    Shared(StorePage),
    Hint(PageId),
}

/// The next frame of a chain: 0 at its end, else twice the page's number, plus 1 for a hint frame
/// and 2 for a shared one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Link(u32);

impl Link {
    pub const END: Link = Link(0);

    /// None at the end.
    pub const fn place(self) -> Option<Place> {
        if self.0 == 0 {
            return None;
        }
        let code = self.0 - 1;
        // Both numbers are below their limits: the link was made from one.
        Some(if code & 1 == 1 {
            match StorePage::new((code >> 1) as u64) {
                Some(page) => Place::Shared(page),
                None => return None,
            }
        } else {
            match PageId::new(code >> 1) {
                Some(page) => Place::Hint(page),
                None => return None,
            }
        })
    }
}

impl From<Place> for Link {
    fn from(place: Place) -> Link {
        match place {
            Place::Hint(page) => Link((page.get() << 1) + 1),
            Place::Shared(page) => Link((page.get() << 1) + 2),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct SharedFrame {
    pub hash: PageHash,
    pub link: Link,
    /// `COUNTED_ELSEWHERE`: the overflow table has the count.
    pub refs: u16,
    /// `CHAINED`, or 0.
    pub flags: u16,
}

impl SharedFrame {
    /// In a chain, so its hash is known.
    pub const CHAINED: u16 = 1;
    /// In place of a count: it has no room here.
    pub const COUNTED_ELSEWHERE: u16 = u16::MAX;

    pub const fn is_chained(&self) -> bool {
        self.flags & Self::CHAINED != 0
    }
}

impl Slot for SharedFrame {
    const EMPTY: SharedFrame =
        SharedFrame { hash: PageHash(0), link: Link::END, refs: 0, flags: 0 };

    /// A frame without a reference does not exist.
    fn is_empty(&self) -> bool {
        self.refs == 0
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct HintFrame {
    pub hash: PageHash,
    pub link: Link,
    /// 0, or `THERE` with `CHAINED` or `INELIGIBLE`.
    pub flags: u32,
}

impl HintFrame {
    /// Not empty.
    const THERE: u32 = 1;
    /// In a chain, where it can be found.
    pub const CHAINED: u32 = 2;
    /// In no chain: a false match was seen with this hash.
    const INELIGIBLE: u32 = 4;

    /// Of a page that can be found once it is chained.
    pub const fn new(hash: PageHash) -> HintFrame {
        HintFrame { hash, link: Link::END, flags: Self::THERE }
    }
    /// Of a page that must not be found.
    pub const fn ineligible(hash: PageHash) -> HintFrame {
        HintFrame { hash, link: Link::END, flags: Self::THERE | Self::INELIGIBLE }
    }

    pub const fn is_chained(&self) -> bool {
        self.flags & Self::CHAINED != 0
    }
    pub const fn is_ineligible(&self) -> bool {
        self.flags & Self::INELIGIBLE != 0
    }
}

impl Slot for HintFrame {
    const EMPTY: HintFrame = HintFrame { hash: PageHash(0), link: Link::END, flags: 0 };

    fn is_empty(&self) -> bool {
        self.flags == 0
    }
}

const _: () = assert!(size_of::<SharedFrame>() == 16 && size_of::<HintFrame>() == 16);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_name_every_page_of_both_kinds() {
        assert_eq!(Link::END.place(), None);
        for n in [0, 1, 0x1234_5678, StorePage::LIMIT - 1] {
            let place = Place::Shared(StorePage::new(u64::from(n)).unwrap());
            assert_eq!(Link::from(place).place(), Some(place));
        }
        for n in [0, 1, 0x1234_5678, PageId::LIMIT - 1] {
            let place = Place::Hint(PageId::new(n).unwrap());
            assert_eq!(Link::from(place).place(), Some(place));
        }
    }
}
