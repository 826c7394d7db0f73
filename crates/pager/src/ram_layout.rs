//! Where a VM's RAM is: one mapping of one file, or a few of them, whose pages are numbered one after the
//! other. Memory that is plugged while the guest runs is such a further part.

use std::ops::Range;

use ballast_units::{HostAddr, PAGE_SIZE, Pages, Ppn};

/// Parts of a VM's RAM at most.
pub const MAX_PARTS: usize = 4;
/// What is plugged comes in blocks of this size.
const PLUGGED: Pages = Pages::from_mib(2);

/// Where one part of a VM's RAM is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RamPart {
    /// Where the VMM mapped it.
    pub base: HostAddr,
    /// How large it is.
    pub len: Pages,
    /// Where in its file it begins.
    pub file_offset: u64,
}

impl RamPart {
    /// What comes from a VMM is checked before anything is computed from it.
    ///
    /// # Errors
    /// What cannot be.
    pub fn check(&self) -> Result<(), &'static str> {
        let page = PAGE_SIZE as u64;
        if self.len.is_zero() {
            return Err("it is empty");
        }
        if !self.base.0.is_multiple_of(page) || !self.file_offset.is_multiple_of(page) {
            return Err("it does not begin at a page boundary");
        }
        let bytes = self.len.0.checked_mul(page);
        let fits = |from: u64| {
            bytes.and_then(|n| from.checked_add(n)).is_some_and(|end| end <= i64::MAX as u64)
        };
        if fits(self.base.0) && fits(self.file_offset) {
            Ok(())
        } else {
            Err("its end is beyond the end of the address space or of any file")
        }
    }

    /// One past its last address.
    fn end(&self) -> HostAddr {
        self.base.page(Ppn(self.len.0))
    }

    /// Its pages that lie whole in `[start, end)` of the VMM, as first and one past the last.
    fn within(&self, start: HostAddr, end: HostAddr) -> (u64, u64) {
        let page = PAGE_SIZE as u64;
        let from = start.0.saturating_sub(self.base.0).div_ceil(page);
        (from, (end.0.saturating_sub(self.base.0) / page).min(self.len.0))
    }
}

/// Where a VM's RAM is: its parts, in the order of their pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RamLayout {
    /// Most VMs have this one alone.
    first: RamPart,
    /// The others, each with its first page.
    more: Vec<(Ppn, RamPart)>,
    len: Pages,
}

impl From<RamPart> for RamLayout {
    fn from(first: RamPart) -> RamLayout {
        RamLayout { first, more: Vec::new(), len: first.len }
    }
}

/// A page as one of its part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct At {
    /// Number of the part.
    pub part: usize,
    /// Where the VMM has the page.
    pub addr: HostAddr,
    /// Where its file has it.
    pub offset: u64,
    /// Pages from it on to the end of the part.
    pub left: u64,
}

impl RamLayout {
    /// Of these parts.
    ///
    /// # Errors
    /// There is none, or too many; one cannot be, or overlaps another.
    pub fn new(parts: &[RamPart]) -> Result<RamLayout, &'static str> {
        let (first, more) = parts.split_first().ok_or("it has no parts")?;
        if parts.len() > MAX_PARTS {
            return Err("it has more than four parts");
        }
        parts.iter().try_for_each(RamPart::check)?;
        let mut layout = RamLayout::from(*first);
        for part in more {
            if layout.parts().any(|other| part.base < other.end() && other.base < part.end()) {
                return Err("its parts overlap");
            }
            layout.more.push((Ppn(layout.len.0), *part));
            layout.len += part.len;
        }
        Ok(layout)
    }

    /// Its parts, in the order of their pages.
    pub fn parts(&self) -> impl Iterator<Item = &RamPart> {
        std::iter::once(&self.first).chain(self.more.iter().map(|(_, part)| part))
    }

    /// Pages of all parts.
    pub fn len(&self) -> Pages {
        self.len
    }

    /// Whether it has no page, which cannot be.
    pub fn is_empty(&self) -> bool {
        self.len.is_zero()
    }

    /// See [`RamPart::check`]: of all parts.
    ///
    /// # Errors
    /// What cannot be.
    pub fn check(&self) -> Result<(), &'static str> {
        self.parts().try_for_each(RamPart::check)
    }

    /// The page in which an address of the VMM lies; None outside the RAM.
    pub fn ppn(&self, addr: HostAddr) -> Option<Ppn> {
        let in_part = |part: &RamPart| addr.ppn_from(part.base).filter(|p| p.0 < part.len.0);
        in_part(&self.first).or_else(|| {
            let mut more = self.more.iter();
            more.find_map(|(start, part)| in_part(part).map(|ppn| Ppn(start.0 + ppn.0)))
        })
    }

    /// The pages that lie whole in `[start, end)` of the VMM, as first and number, part by part.
    pub(crate) fn pages_within(
        &self,
        start: HostAddr,
        end: HostAddr,
    ) -> impl Iterator<Item = (Ppn, u64)> {
        let of = move |first: Ppn, part: &RamPart| {
            let (from, to) = part.within(start, end);
            (from < to).then(|| (Ppn(first.0 + from), to - from))
        };
        let more = self.more.iter().filter_map(move |(first, part)| of(*first, part));
        of(Ppn(0), &self.first).into_iter().chain(more)
    }

    /// The pages that its guest has if it has this one: what lies behind the first part is plugged in blocks.
    pub(crate) fn had_with(&self, ppn: Ppn) -> Range<u64> {
        let after = self.more.partition_point(|(start, _)| *start <= ppn);
        let Some((start, part)) = after.checked_sub(1).map(|n| &self.more[n]) else {
            return 0..self.first.len.0;
        };
        let block = start.0 + (ppn.0 - start.0) / PLUGGED.0 * PLUGGED.0;
        block..(block + PLUGGED.0).min(start.0 + part.len.0)
    }

    /// Where a page is.
    pub(crate) fn at(&self, ppn: Ppn) -> At {
        let of = |part, at: Ppn, in_part: &RamPart| At {
            part,
            addr: in_part.base.page(at),
            offset: in_part.file_offset + at.offset(),
            left: in_part.len.0.saturating_sub(at.0),
        };
        if ppn.0 < self.first.len.0 || self.more.is_empty() {
            return of(0, ppn, &self.first);
        }
        let after = self.more.partition_point(|(start, _)| *start <= ppn);
        let (start, part) = &self.more[after.max(1) - 1];
        of(after.max(1), Ppn(ppn.0 - start.0), part)
    }

    /// A run of pages as runs that lie in one part each.
    pub(crate) fn split(&self, first: Ppn, n: u64) -> impl Iterator<Item = (Ppn, u64)> {
        let (mut at, mut left) = (first, n);
        std::iter::from_fn(move || {
            let n = left.min(self.at(at).left.max(1));
            (n > 0).then(|| {
                let run = (at, n);
                (at, left) = (Ppn(at.0 + n), left - n);
                run
            })
        })
    }

    /// Whether all parts begin at a multiple of `pages`: by number, address, and offset in the file.
    pub(crate) fn is_aligned(&self, pages: Pages) -> bool {
        let unit = pages.bytes().0;
        let starts = self.more.iter().all(|(start, _)| start.0.is_multiple_of(pages.0));
        let at = |part: &RamPart| {
            part.base.0.is_multiple_of(unit) && part.file_offset.is_multiple_of(unit)
        };
        starts && self.parts().all(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = PAGE_SIZE as u64;

    fn part(base: u64, len: u64, file_offset: u64) -> RamPart {
        RamPart { base: HostAddr(base * PAGE), len: Pages(len), file_offset: file_offset * PAGE }
    }

    /// The second one lies before the first, the third beside the first.
    fn three() -> RamLayout {
        RamLayout::new(&[part(100, 10, 0), part(20, 4, 7), part(110, 6, 0)]).unwrap()
    }

    #[test]
    fn pages_are_numbered_part_after_part() {
        let layout = three();
        assert_eq!(layout.len(), Pages(20));
        let addr = |page: u64| HostAddr(page * PAGE + 17);
        let found = |page| layout.ppn(addr(page)).map(|ppn| ppn.0);
        assert_eq!(
            [99, 100, 109, 110, 115, 116].map(found),
            [None, Some(0), Some(9), Some(14), Some(19), None]
        );
        assert_eq!([19, 20, 23, 24].map(found), [None, Some(10), Some(13), None]);
        for ppn in 0..20 {
            let at = layout.at(Ppn(ppn));
            assert_eq!(layout.ppn(at.addr), Some(Ppn(ppn)), "{at:?}");
        }
        let at = layout.at(Ppn(11));
        assert_eq!((at.part, at.addr.0, at.offset, at.left), (1, 21 * PAGE, 8 * PAGE, 3));
        assert_eq!(layout.at(Ppn(14)).part, 2);
    }

    #[test]
    fn runs_are_cut_where_parts_end() {
        let layout = three();
        let cut = |first, n| layout.split(Ppn(first), n).map(|(p, n)| (p.0, n)).collect::<Vec<_>>();
        assert_eq!(cut(0, 10), [(0, 10)]);
        assert_eq!(cut(8, 8), [(8, 2), (10, 4), (14, 2)]);
        assert_eq!(cut(13, 1), [(13, 1)]);
        assert_eq!(cut(3, 0), []);
        let one = RamLayout::from(part(5, 10, 0));
        assert_eq!(one.split(Ppn(2), 5).collect::<Vec<_>>(), [(Ppn(2), 5)]);
    }

    #[test]
    fn of_what_is_plugged_a_guest_has_the_block_that_it_uses() {
        let layout = RamLayout::new(&[part(0, 700, 0), part(4096, 1300, 0)]).unwrap();
        let had = |page| layout.had_with(Ppn(page));
        assert_eq!([had(0), had(699)], [0..700, 0..700]);
        assert_eq!([had(700), had(1211), had(1212)], [700..1212, 700..1212, 1212..1724]);
        assert_eq!(had(1999), 1724..2000);
        assert_eq!(RamLayout::from(part(1, 9, 0)).had_with(Ppn(3)), 0..9);
    }

    #[test]
    fn a_range_of_the_vmm_is_of_every_part_that_it_covers() {
        let layout = three();
        let within = |from: u64, to: u64| {
            let range = layout.pages_within(HostAddr(from), HostAddr(to));
            range.map(|(p, n)| (p.0, n)).collect::<Vec<_>>()
        };
        assert_eq!(within(0, u64::MAX), [(0, 10), (10, 4), (14, 6)]);
        assert_eq!(within(108 * PAGE, 112 * PAGE), [(8, 2), (14, 2)]);
        assert_eq!(within(22 * PAGE, 50 * PAGE), [(12, 2)]);
        assert_eq!(within(22 * PAGE + 1, 24 * PAGE - 1), []);
        assert_eq!(within(50 * PAGE, 60 * PAGE), []);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let refused = |parts: &[RamPart]| RamLayout::new(parts).unwrap_err();
        assert_eq!(refused(&[]), "it has no parts");
        let apart: Vec<RamPart> = (0..5).map(|n| part(100 * n, 10, 0)).collect();
        assert_eq!(refused(&apart), "it has more than four parts");
        assert!(RamLayout::new(&apart[..4]).is_ok());
        for other in [part(100, 10, 0), part(95, 6, 0), part(109, 1, 0), part(90, 30, 0)] {
            assert_eq!(refused(&[part(100, 10, 0), other]), "its parts overlap", "{other:?}");
        }
        assert_eq!(refused(&[part(1, 1, 0), part(9, 0, 0)]), "it is empty");
        let good = part(9, 1, 3);
        for off in [
            RamPart { base: HostAddr(good.base.0 + 8), ..good },
            RamPart { file_offset: good.file_offset + 8, ..good },
        ] {
            assert_eq!(refused(&[part(1, 1, 0), off]), "it does not begin at a page boundary");
            // One of a former manager's was not looked at when it was made.
            assert!(RamLayout::from(off).check().is_err());
        }
        assert_eq!(RamLayout::from(good).check(), Ok(()));
        assert!(!RamLayout::from(good).is_empty() && RamLayout::from(part(9, 0, 0)).is_empty());
        let far = RamPart { base: HostAddr(u64::MAX - 4095), ..part(0, 1, 0) };
        assert!(refused(&[part(1, 1, 0), far]).contains("address space"));
    }

    #[test]
    fn large_pages_need_every_part_to_begin_where_one_does() {
        let parts = [part(512, 1024, 0), part(4096, 512, 512)];
        assert!(RamLayout::new(&parts).unwrap().is_aligned(Pages(512)));
        let cut = [RamPart { len: Pages(1000), ..parts[0] }, parts[1]];
        assert!(!RamLayout::new(&cut).unwrap().is_aligned(Pages(512)));
        let off = [parts[0], part(4096, 512, 3)];
        assert!(!RamLayout::new(&off).unwrap().is_aligned(Pages(512)));
    }
}
