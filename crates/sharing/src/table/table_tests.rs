//! The share table against its oracle, and what the oracle cannot see.

use std::hash::{BuildHasher, RandomState};
use std::ops::Range;

use ballast_units::{Bytes, PAGE_SIZE, Pages};
use proptest::prelude::*;

use super::frame::{Link, Place};
use super::oracle::{Both, Op, scatter};
use super::{Match, ShareTable, TableError};
use crate::hash::PageHash;
use crate::ids::{PageId, StorePage};

fn guest(n: u32) -> PageId {
    PageId::new(n).unwrap()
}
fn common(n: u32) -> StorePage {
    StorePage::new(n.into()).unwrap()
}

#[test]
fn what_is_brought_near_may_be_known_or_not_in_a_table_of_any_size() {
    let mut table = ShareTable::new();
    let hash = |n: u32| PageHash(u64::from(n).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    // Through several powers of two of buckets, and back.
    for n in 0..3000 {
        table.warm((0..64).map(|ahead| hash(n + ahead)));
        table.hint(guest(n), hash(n));
    }
    for n in 0..3000 {
        table.warm([hash(n), hash(n + 1)]);
        assert_eq!(table.find(hash(n)), Match::Hint(guest(n)));
        table.drop_hint(guest(n));
    }
    table.warm([]);
    table.check().unwrap();
}

/// Few hashes, so that chains are long; most of them in one bucket, whatever the buckets.
fn few_hashes(n: u64) -> PageHash {
    PageHash(if n < 5 { n << 32 | 0x77 } else { n })
}
/// Pages at the start, on both sides of the end of a chunk, and far away.
fn few_pages(n: u32) -> u32 {
    match n {
        0..24 => n,
        24..40 => 248 + (n - 24),
        _ => 50_000 + n,
    }
}
const PAGES: u32 = 48;
const HASHES: u64 = 8;

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let page = || (0..PAGES).prop_map(|n| guest(few_pages(n)));
    let shared = || (0..PAGES).prop_map(|n| common(few_pages(n)));
    let hash = || (0..HASHES).prop_map(few_hashes);
    let times = || prop_oneof![30 => 1u32..4, 1 => 65_530u32..65_540];
    let op = prop_oneof![
        12 => (page(), hash()).prop_map(|(p, h)| Op::Hint(p, h)),
        1 => (page(), 1u32..900, any::<u64>()).prop_map(|(p, n, s)| Op::HintMany(p, n, s)),
        6 => page().prop_map(Op::DropHint),
        3 => (page(), hash()).prop_map(|(p, h)| Op::MarkIneligible(p, h)),
        1 => (page(), prop_oneof![0u64..60, 0u64..1000, Just(u64::MAX)])
            .prop_map(|(p, n)| Op::Forget(p, n)),
        6 => (shared(), hash()).prop_map(|(p, h)| Op::Share(p, h)),
        6 => (shared(), times()).prop_map(|(p, n)| Op::Retain(p, n)),
        6 => (shared(), times()).prop_map(|(p, n)| Op::Release(p, n)),
        3 => shared().prop_map(Op::Adopt),
        3 => (shared(), hash()).prop_map(|(p, h)| Op::SetHash(p, h)),
    ];
    prop::collection::vec(op, 1..80)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Every answer and every invariant, after every operation.
    #[test]
    fn the_table_is_what_slow_maps_are(ops in ops()) {
        let mut both = Both::default();
        for op in ops {
            both.step(&op).map_err(TestCaseError::fail)?;
            both.compare().map_err(TestCaseError::fail)?;
            for page in (0..PAGES).map(|n| guest(few_pages(n))) {
                both.compare_page(page, few_hashes(0)).map_err(TestCaseError::fail)?;
            }
            for page in (0..PAGES).map(|n| common(few_pages(n))) {
                both.compare_common(page).map_err(TestCaseError::fail)?;
            }
            for hash in (0..HASHES).map(few_hashes) {
                both.compare_find(hash, guest(3)).map_err(TestCaseError::fail)?;
            }
        }
    }
}

/// A long walk over a table that fills, is scanned again, and empties, so that buckets come and go
/// by the thousand. Its seed is printed; BALLAST_SEED repeats it.
#[test]
fn a_long_walk_agrees_with_slow_maps() {
    let seed = std::env::var("BALLAST_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| RandomState::new().hash_one(0));
    println!("BALLAST_SEED={seed}");
    let mut state = seed;
    let mut below = |n: u64| {
        state = scatter(state);
        state % n
    };
    let mut both = Both::default();
    let mut most = 0;
    for round in 0..12 {
        // Alternately more comes than goes, and more goes than comes.
        let fills = round % 2 == 0;
        for _ in 0..10_000 {
            let page = guest(below(6000) as u32);
            let shared = common(below(2000) as u32);
            // Some hashes many have, many that few have.
            let kinds = if below(2) == 0 { 20 } else { 8000 };
            let hash = PageHash(scatter(below(kinds)));
            let op = match below(100) {
                0..40 if fills => Op::Hint(page, hash),
                0..5 => Op::Hint(page, hash),
                5..40 => Op::DropHint(page),
                40..43 => Op::MarkIneligible(page, hash),
                43 if !fills => Op::Forget(page, below(100)),
                43..55 if fills => Op::Share(shared, hash),
                43..65 => Op::Release(shared, 1 + below(3) as u32),
                65..80 if fills => Op::Retain(shared, 1),
                65..70 => Op::Adopt(shared),
                70..80 => Op::SetHash(shared, hash),
                80..82 => Op::Adopt(shared),
                82..85 => Op::SetHash(shared, hash),
                _ => Op::Hint(page, PageHash(scatter(u64::from(page.get())))),
            };
            both.step(&op).unwrap();
            both.compare_page(page, hash).unwrap();
            both.compare_common(shared).unwrap();
            if below(20) == 0 {
                both.compare_find(hash, page).unwrap();
            }
        }
        both.compare().unwrap();
        most = most.max(both.table.buckets.len());
    }
    assert!(most > 3000, "{most} buckets at most: the walk must make the table grow");
    both.step(&Op::Forget(guest(0), u64::MAX)).unwrap();
    for (page, refs) in both.table.shared_pages().collect::<Vec<_>>() {
        both.step(&Op::Release(page, refs as u32)).unwrap();
    }
    both.compare().unwrap();
    let left = both.table.memory_bytes();
    assert!(left < Bytes(1200), "{left} are left of an empty table: more than the first buckets");
}

const ALL: Range<u32> = 0..PageId::LIMIT;

#[test]
fn a_store_page_is_found_before_hints_whatever_came_first() {
    let mut table = ShareTable::new();
    let hash = PageHash(7);
    table.hint(guest(1), hash);
    assert_eq!(table.find(hash), Match::Hint(guest(1)));
    assert_eq!(table.find_other_among(hash, guest(1), ALL), Match::Nothing);
    assert_eq!(table.find_shared(hash), None);
    table.share(common(9), hash).unwrap();
    table.hint(guest(2), hash);
    assert_eq!(table.find(hash), Match::Shared(common(9)));
    assert_eq!(table.find_shared(hash), Some(common(9)));
    assert_eq!(table.find_shared(PageHash(8)), None);
    table.release(common(9)).unwrap();
    assert_eq!(table.find_other_among(hash, guest(1), ALL), Match::Hint(guest(2)));
    assert_eq!(table.find_other_among(hash, guest(5), 1..2), Match::Hint(guest(1)));
    assert_eq!(table.find_other_among(hash, guest(1), 0..2), Match::Nothing);
    table.check().unwrap();
}

#[test]
fn an_ineligible_page_is_so_until_its_contents_change() {
    let mut table = ShareTable::new();
    let (page, hash) = (guest(4), PageHash(7));
    table.hint(page, hash);
    table.mark_ineligible(page, hash);
    assert_eq!((table.find(hash), table.hinted(page)), (Match::Nothing, None));
    table.hint(page, hash);
    assert!(table.is_ineligible(page, hash), "a hint of the same contents does not undo it");
    assert_eq!(table.find(hash), Match::Nothing);
    assert!(!table.is_ineligible(page, PageHash(8)));
    table.hint(page, PageHash(8));
    assert_eq!(table.find(PageHash(8)), Match::Hint(page));
    assert!(!table.is_ineligible(page, hash), "the mark went with the contents");
    table.check().unwrap();
}

#[test]
fn mistakes_of_the_caller_are_refused_and_change_nothing() {
    let mut table = ShareTable::new();
    let page = common(3);
    assert_eq!(table.release(page), Err(TableError::NotShared(page)));
    assert_eq!(table.retain(page), Err(TableError::NotShared(page)));
    assert_eq!(table.set_hash(page, PageHash(1)), Err(TableError::NotShared(page)));
    table.share(page, PageHash(1)).unwrap();
    assert_eq!(table.share(page, PageHash(2)), Err(TableError::Shared(page)));
    assert_eq!(table.set_hash(page, PageHash(2)), Err(TableError::Hashed(page)));
    assert_eq!((table.refs(page), table.hash_of(page)), (1, Some(PageHash(1))));
    // A neighbour in the same chunk is as unshared as one far away.
    assert_eq!(table.release(common(4)), Err(TableError::NotShared(common(4))));
    assert_eq!(table.set_hash(common(4), PageHash(1)), Err(TableError::NotShared(common(4))));
    table.check().unwrap();
}

#[test]
fn counts_go_into_the_overflow_table_and_come_back() {
    let mut table = ShareTable::new();
    let page = common(0);
    table.share(page, PageHash(1)).unwrap();
    for refs in 2..=200_000 {
        assert_eq!(table.retain(page), Ok(refs));
    }
    table.check().unwrap();
    assert_eq!(table.stats().references, 200_000);
    for refs in (1..200_000).rev() {
        assert_eq!(table.release(page), Ok(refs));
        // Where a count goes from the one place to the other.
        if (65_530..65_540).contains(&refs) {
            table.check().unwrap();
        }
    }
    table.check().unwrap();
    assert_eq!(table.overflow.iter().count(), 0);
    assert_eq!(table.release(page), Ok(0));
    assert_eq!(table.find(PageHash(1)), Match::Nothing);
}

/// A hint, an ineligible page, a store page with a hint of its hash behind it, one without a hash, and
/// one with a large count.
fn some_of_each() -> ShareTable {
    let mut table = ShareTable::new();
    table.hint(guest(1), PageHash(1));
    table.mark_ineligible(guest(2), PageHash(2));
    table.share(common(1), PageHash(5)).unwrap();
    table.hint(guest(5), PageHash(5));
    table.adopt(common(2));
    table.share(common(3), PageHash(6)).unwrap();
    for _ in 1..70_000 {
        table.retain(common(3)).unwrap();
    }
    table
}

#[test]
fn the_check_finds_what_contradicts_the_invariants() {
    type Damage = (&'static str, fn(&mut ShareTable));
    let damages: [Damage; 18] = [
        ("has flags", |t| t.hints.get_mut(1).unwrap().flags = 1),
        ("is not hashed", |t| t.first_unhashed = 3),
        ("booked", |t| t.counts.shared += 1),
        ("booked", |t| t.counts.references += 1),
        ("booked", |t| t.counts.unhashed += 1),
        ("booked", |t| t.counts.hints += 1),
        ("booked", |t| t.counts.ineligible += 1),
        ("booked", |t| t.chained += 1),
        ("hint frames: ", |t| t.hints.get_mut(1).unwrap().flags = 0),
        ("shared frames: ", |t| t.shared.get_mut(1).unwrap().refs = 0),
        ("1 in its frame", |t| t.overflow.set(common(1), 70_000)),
        ("65534 in the overflow table", |t| {
            t.overflow.set(common(3), 65_534);
            t.counts.references -= 70_000 - 65_534;
        }),
        ("0 overflow entries", |t| {
            t.overflow.remove(common(3));
            t.counts.references -= 70_000;
        }),
        ("is reached twice", |t| t.hints.get_mut(1).unwrap().link = Place::Hint(guest(1)).into()),
        ("(there: false)", |t| t.hints.get_mut(1).unwrap().link = Place::Hint(guest(9)).into()),
        ("(there: true)", |t| {
            t.shared.get_mut(1).unwrap().flags = 0;
            (t.counts.unhashed, t.chained, t.first_unhashed) = (2, 3, 1);
        }),
        ("is in bucket", |t| t.hints.get_mut(1).unwrap().hash = PageHash(2)),
        ("frames reached", |t| t.buckets.set(1, Link::END)),
    ];
    for (found, damage) in damages {
        let mut table = some_of_each();
        table.check().unwrap();
        damage(&mut table);
        let error = table.check().unwrap_err();
        assert!(error.contains(found), "{found}: {error}");
    }
    let mut table = some_of_each();
    table.buckets.set(5, Place::Hint(guest(5)).into());
    table.hints.get_mut(5).unwrap().link = Place::Shared(common(1)).into();
    table.shared.get_mut(1).unwrap().link = Link::END;
    assert!(table.check().unwrap_err().contains("comes after a hint"));
}

/// As a manager does after a takeover: a few at a time, while some pages go and others come.
#[test]
fn pages_without_a_hash_are_hashed_a_few_at_a_time() {
    const N: u32 = 100_000;
    let mut table = ShareTable::new();
    for n in (0..N).rev() {
        assert_eq!(table.adopt(common(n)), 1);
    }
    assert_eq!(table.find(PageHash(0)), Match::Nothing);
    let mut hashed = 0;
    loop {
        let some: Vec<StorePage> = table.unhashed().take(4).collect();
        for page in &some {
            table.set_hash(*page, PageHash(page.get().into())).unwrap();
        }
        hashed += some.len() as u32;
        let Some(next) = table.unhashed().next() else { break };
        // The next one goes, and one comes that was not there, by its contents.
        assert_eq!(table.release(next), Ok(0));
        hashed += 1;
        table.share(next, PageHash(next.get().into())).unwrap();
        assert_eq!(table.release(common(0)), Ok(0));
        table.share(common(0), PageHash(0)).unwrap();
    }
    assert_eq!((hashed, table.stats().unhashed), (N, 0));
    assert_eq!(table.find(PageHash(77_777)), Match::Shared(common(77_777)));
    table.check().unwrap();
}

/// Pages of one content that could not be shared must not make a VM's leaving slow: without one
/// walk for all of a chain this takes minutes.
#[test]
fn a_range_of_equal_hints_is_forgotten_in_one_walk() {
    let mut table = ShareTable::new();
    const N: u32 = 300_000;
    for n in 0..N {
        table.hint(guest(n), PageHash(7));
    }
    table.hint(guest(N), PageHash(7));
    table.forget_pages(guest(0), Pages(N.into()));
    assert_eq!(table.find(PageHash(7)), Match::Hint(guest(N)));
    assert_eq!(table.stats().hints, 1);
    table.check().unwrap();
}

/// OSDI'02 s.4.3: less than 0.5 % of the memory that was scanned.
#[test]
fn metadata_is_below_half_a_percent_of_what_was_scanned() {
    for pages in [10_000, 200_000] {
        let limit = Bytes(pages * PAGE_SIZE as u64 / 200);
        let mut table = ShareTable::new();
        for n in 0..pages as u32 {
            table.hint(guest(n), PageHash(scatter(n.into())));
        }
        let memory = table.memory_bytes();
        println!("{pages} pages scanned: {} bytes, limit {}", memory.0, limit.0);
        assert!(memory < limit, "{memory} for {pages} pages");
        // Half of them equal the other half: nothing more is needed while they are shared.
        for n in 0..pages as u32 / 2 {
            table.drop_hint(guest(n * 2));
            table.drop_hint(guest(n * 2 + 1));
            table.share(common(n), PageHash(scatter((n * 2).into()))).unwrap();
            table.retain(common(n)).unwrap();
            assert!(table.memory_bytes() < limit);
        }
        table.check().unwrap();
        println!("half of them common: {} bytes", table.memory_bytes().0);
    }
}
