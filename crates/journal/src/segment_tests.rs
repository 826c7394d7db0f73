use super::*;
use crate::support::{chain, moment, snapshot, vm};

fn head(n: u64) -> Head {
    Head { moment: moment(n), names: vec![], outcomes: vec![] }
}

/// A segment of so many turns, and where each frame ends.
fn segment(turns: u64) -> (Vec<u8>, Vec<usize>) {
    let header = Header { host: "h".into(), ..Header::default() };
    let (mut encoder, mut bytes) = Encoder::new(header, 1000).unwrap();
    let mut ends = vec![bytes.len()];
    for n in 1..=turns {
        let vms: Vec<_> = (1..4).map(|id| vm(id, 90 + n, 20 * u64::from(id))).collect();
        let decision = chain(vec![snapshot("period", "high", 360, &vms)]).remove(0);
        bytes.extend(encoder.turn(&head(n), &encode(&decision).unwrap()).unwrap());
        ends.push(bytes.len());
    }
    (bytes, ends)
}

fn read(bytes: &[u8]) -> (u64, Option<SegmentError>) {
    let mut frames = match Frames::new(bytes) {
        Ok(frames) => frames,
        Err(e) => return (0, Some(e)),
    };
    let mut turns = 0;
    loop {
        match frames.next() {
            Ok(Some(Record::Turn(head, decision))) => {
                turns += 1;
                assert_eq!(head.moment, moment(turns));
                decision.decode().unwrap();
            }
            Ok(Some(Record::Again(_))) => panic!("nothing was repeated"),
            Ok(None) => return (turns, None),
            Err(e) => return (turns, Some(e)),
        }
    }
}

#[test]
fn a_segment_that_ends_anywhere_is_read_up_to_its_last_whole_record() {
    let (bytes, ends) = segment(6);
    for len in 0..=bytes.len() {
        let (turns, error) = read(&bytes[..len]);
        let whole = ends.iter().filter(|&&end| end <= len).count().saturating_sub(1) as u64;
        assert_eq!(turns, whole, "cut at {len}");
        match error {
            None => assert!(ends.contains(&len), "cut at {len}"),
            Some(SegmentError::NoHeader) => assert!(len < ends[0]),
            Some(SegmentError::Foreign) => panic!("cut at {len}: its magic is its own"),
            Some(SegmentError::Torn { at }) => assert_eq!(at as usize, ends[turns as usize]),
            Some(other) => panic!("cut at {len}: {other}"),
        }
    }
}

#[test]
fn a_damaged_byte_is_found_and_never_decoded() {
    let (bytes, ends) = segment(4);
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        let (turns, error) = read(&damaged);
        // The records before it are there, and it is not.
        let before = ends.iter().filter(|&&end| end <= at).count().saturating_sub(1) as u64;
        assert_eq!(turns, before, "byte {at}");
        assert!(error.is_some(), "byte {at}");
        // What a manager that was killed leaves is the last record, and no other.
        if (ends[0]..ends[3]).contains(&at) {
            assert!(!matches!(error, Some(SegmentError::Torn { .. })), "byte {at}: {error:?}");
        }
    }
}

#[test]
fn a_newer_version_is_told_from_anything_else() {
    let (mut bytes, _) = segment(1);
    bytes[8..12].copy_from_slice(&7u32.to_le_bytes());
    // However its header looks.
    for len in [12, 13, 20, bytes.len()] {
        assert!(matches!(read(&bytes[..len]).1, Some(SegmentError::Newer { found: 7 })), "{len}");
    }
    assert!(matches!(read(b"#!/bin/sh\n").1, Some(SegmentError::Foreign)));
}

#[test]
fn a_turn_that_changed_little_takes_little() {
    let (_, ends) = segment(30);
    let (first, last) = (ends[1] - ends[0], ends[30] - ends[29]);
    assert!(last * 4 < first, "{first} bytes, then {last}");
}

#[test]
fn the_window_follows_the_size_of_turns() {
    let window = |expected| Encoder::new(Header::default(), expected).unwrap().0.window;
    assert_eq!(window(0), 64 << 10);
    assert_eq!(window(4 << 20), 16 << 20);
    assert_eq!(window(1 << 40), 32 << 20);
    let (small, _) = Encoder::new(Header::default(), 1000).unwrap();
    assert!(small.fits(30 << 10) && !small.fits(40 << 10));
}

#[test]
fn no_more_repeats_are_read_than_are_ever_written() {
    let repeats = |moments: &[Moment]| {
        let (mut encoder, mut bytes) = Encoder::new(Header::default(), 1000).unwrap();
        bytes.extend(encoder.again(moments).unwrap());
        let mut frames = Frames::new(&bytes[..]).unwrap();
        frames.next().map(|record| match record {
            Some(Record::Again(moments)) => moments,
            _ => panic!("they are repeats"),
        })
    };
    // As far from one another as can be: no writer needs more bytes for them.
    let far = |n: u64| Moment { n: n << 63, at_ms: n << 62, up_ms: n << 61, took_us: u64::MAX };
    let most: Vec<Moment> = (0..MOST_REPEATS as u64).map(far).collect();
    assert_eq!(repeats(&most).unwrap(), most);
    // A few hundred bytes of a file that say a million.
    for many in [MOST_REPEATS + 1, 1 << 20] {
        match repeats(&vec![moment(1); many]) {
            Err(SegmentError::Damaged { what, .. }) => assert!(what.contains("repeats"), "{what}"),
            other => panic!("{many}: {:?}", other.map(|moments| moments.len())),
        }
    }
}
