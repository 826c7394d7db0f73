use proptest::prelude::*;

use super::*;
use crate::ONE_PART;

fn hello() -> Hello {
    Hello {
        version: ONE_PART,
        reconnect: true,
        vm: VmName::new("web-1").unwrap(),
        pid: 77,
        parts: vec![Part {
            addr: HostAddr(0x7f00_0000_0000),
            len: Bytes::from_mib(256),
            file_offset: 0x1000,
        }],
        page_size: 4096,
    }
}

fn hello_of_two() -> Hello {
    let more = Part { addr: HostAddr(0x7e00_0000_0000), len: Bytes::from_mib(64), file_offset: 0 };
    Hello { version: VERSION, parts: vec![hello().parts[0], more], ..hello() }
}

/// The layout is a promise to other versions: pinned byte by byte.
#[test]
fn hello_is_laid_out_as_documented() {
    let bytes = Message::Hello(hello()).encode();
    assert_eq!(bytes.len(), 120);
    assert_eq!(&bytes[0..8], b"BLST\x01\0\0\0");
    assert_eq!(&bytes[8..16], &[6, 0, 0, 0, 1, 0, 0, 0]);
    assert_eq!(&bytes[16..24], &0x7f00_0000_0000u64.to_le_bytes());
    assert_eq!(&bytes[24..32], &(256u64 << 20).to_le_bytes());
    assert_eq!(&bytes[32..40], &0x1000u64.to_le_bytes());
    assert_eq!(&bytes[40..48], &[0, 16, 0, 0, 77, 0, 0, 0]);
    assert_eq!(&bytes[48..56], &[5, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(&bytes[56..61], b"web-1");
    assert!(bytes[61..].iter().all(|b| *b == 0));
}

#[test]
fn hello_of_several_parts_is_laid_out_as_documented() {
    let bytes = Message::Hello(hello_of_two()).encode();
    assert_eq!(bytes.len(), 192);
    assert_eq!(&bytes[8..16], &[7, 0, 0, 0, 1, 0, 0, 0]);
    assert_eq!(&bytes[16..24], &[0, 16, 0, 0, 77, 0, 0, 0]);
    assert_eq!(&bytes[24..32], &[5, 2, 0, 0, 0, 0, 0, 0]);
    assert_eq!(&bytes[32..37], b"web-1");
    assert!(bytes[37..96].iter().all(|b| *b == 0));
    assert_eq!(&bytes[96..104], &0x7f00_0000_0000u64.to_le_bytes());
    assert_eq!(&bytes[104..112], &(256u64 << 20).to_le_bytes());
    assert_eq!(&bytes[112..120], &0x1000u64.to_le_bytes());
    assert_eq!(&bytes[120..128], &0x7e00_0000_0000u64.to_le_bytes());
    assert!(bytes[144..].iter().all(|b| *b == 0));
    assert_eq!(Message::Hello(hello_of_two()).descriptors(), (3, 3));
    assert_eq!(Hello::version_for(1), 6);
    assert_eq!([0, 1, 2, 3].map(|back| Hello::older_version_for(1, back)), [6, 4, 2, 2]);
    assert_eq!([0, 1, 2, 3].map(|back| Hello::older_version_for(2, back)), [7, 5, 3, 3]);
}

#[test]
fn as_many_parts_as_there_may_be_and_no_others() {
    let good = Message::Hello(hello_of_two()).encode();
    for count in [0u8, 1, 5, 255] {
        let mut bytes = good.clone();
        bytes[25] = count;
        let refused = Err(DecodeError::Field { kind: HELLO, field: "parts" });
        assert_eq!(Message::decode(&bytes), refused, "{count} parts");
    }
    // What is beyond the parts that there are must be zero.
    let mut bytes = good.clone();
    bytes[191] = 1;
    assert_eq!(Message::decode(&bytes), Err(DecodeError::Field { kind: HELLO, field: "reserved" }));
    let cut = Message::decode(&good[..168]);
    assert_eq!(cut, Err(DecodeError::Length { kind: HELLO, len: 168 }));
    let most = Hello { parts: vec![hello().parts[0]; MAX_PARTS], ..hello_of_two() };
    let message = Message::Hello(most);
    assert_eq!(Message::decode(&message.encode()), Ok(message.clone()));
    assert_eq!(message.descriptors(), (crate::MAX_FDS, crate::MAX_FDS));
}

fn again() -> Op {
    Op { kind: OpKind::MapAgain, addr: HostAddr(0), len: Bytes(4096), file_offset: 0, fd_index: 0 }
}

#[test]
fn every_length_is_as_documented() {
    let op = again();
    for (message, len) in [
        (Message::Welcome { version: 1 }, 16),
        (Message::refuse("no"), 272),
        (Message::Ready { features: 1, ioctls: 2 }, 24),
        (Message::Failed { step: Step::Register, errno: 22 }, 16),
        (Message::Managed, 8),
        (Message::Batch(Batch::new(9, vec![op; 3]).unwrap()), 24 + 3 * 32),
        (Message::Batch(Batch::new(9, vec![op; MAX_OPS]).unwrap()), MAX_MESSAGE),
        (Message::BatchDone { id: 9, done: 3, errno: 12 }, 24),
    ] {
        assert_eq!(message.encode().len(), len, "{message:?}");
    }
}

#[test]
fn operations_that_no_manager_sends_are_none() {
    for kind in [0, 3, 4, 7] {
        let message = Message::Batch(Batch::new(9, vec![again()]).unwrap());
        let mut bytes = message.encode();
        assert_eq!(Message::decode(&bytes), Ok(message));
        bytes[24] = kind;
        let refused = DecodeError::Field { kind: 7, field: "op" };
        assert_eq!(Message::decode(&bytes), Err(refused), "{kind}");
    }
}

#[test]
fn a_newer_version_is_named_whatever_follows() {
    let mut bytes = Message::Hello(hello()).encode();
    for version in [0, 8] {
        bytes[8] = version;
        assert_eq!(Message::decode(&bytes), Err(DecodeError::Version(version.into())));
    }
    assert!(DecodeError::Version(8).to_string().starts_with(crate::REFUSED_VERSION));
    bytes.truncate(30);
    bytes.extend([0xff; 300]);
    assert_eq!(Message::decode(&bytes), Err(DecodeError::Version(8)));
}

/// As such a shim sends it: it runs in its VMM for as long as that does.
#[test]
fn a_shim_of_version_1_is_understood_and_not_sent_batches() {
    let mut bytes = b"BLST\x01\0\0\0\x01\0\0\0\x01\0\0\0".to_vec();
    bytes.extend(0x7f00_0000_0000u64.to_le_bytes());
    bytes.extend((256u64 << 20).to_le_bytes());
    bytes.extend(0x1000u64.to_le_bytes());
    bytes.extend([0, 16, 0, 0, 77, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]);
    bytes.extend(b"web-1");
    bytes.resize(120, 0);
    let old = Hello { version: 1, ..hello() };
    assert_eq!(Message::decode(&bytes), Ok(Message::Hello(old.clone())));
    assert!(!old.remaps() && hello().remaps());
    let keeps = |version| Hello { version, ..hello() }.keeps();
    assert_eq!([1, 4, 5, 6, 7].map(keeps), [false, false, false, true, true]);
}

#[test]
fn broken_messages_are_refused_with_the_reason() {
    let good = Message::Hello(hello()).encode();
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        Message::decode(&bytes)
    };
    let field = |field| Err(DecodeError::Field { kind: 1, field });
    assert_eq!(with(0, b'X'), Err(DecodeError::Magic));
    assert_eq!(with(4, 99), Err(DecodeError::Kind(99)));
    assert_eq!(with(6, 1), field("reserved"));
    assert_eq!(with(12, 3), field("flags"));
    assert_eq!(with(48, 65), field("name"));
    assert_eq!(with(48, 4), field("name"));
    assert_eq!(with(57, b'/'), field("name"));
    assert_eq!(Message::decode(&[]), Err(DecodeError::Magic));
    assert_eq!(Message::decode(&good[..119]), Err(DecodeError::Length { kind: 1, len: 119 }));
    let long = [&good[..], &[0]].concat();
    assert_eq!(Message::decode(&long), Err(DecodeError::Length { kind: 1, len: 121 }));

    let mut batch = Message::Batch(Batch::new(1, vec![]).unwrap()).encode();
    batch[16..18].copy_from_slice(&(MAX_OPS as u16 + 1).to_le_bytes());
    assert_eq!(Message::decode(&batch), Err(DecodeError::Field { kind: BATCH, field: "count" }));
    let mut refuse = Message::refuse("no").encode();
    refuse[16] = 0xff;
    assert_eq!(Message::decode(&refuse), Err(DecodeError::Field { kind: REFUSE, field: "reason" }));
    assert_eq!(Batch::new(0, vec![]).map(|b| b.ops().len()), Ok(0));
}

#[test]
fn long_reasons_are_cut_between_characters() {
    let reason = Reason::new(&"\u{20ac}".repeat(100));
    assert_eq!(reason.as_str(), "\u{20ac}".repeat(85));
    let message = Message::Refuse { reason };
    assert_eq!(Message::decode(&message.encode()), Ok(message));
}

fn any_message() -> impl Strategy<Value = Message> {
    let hello = (
        proptest::collection::vec(any::<[u64; 3]>(), 2..=MAX_PARTS),
        any::<[u32; 2]>(),
        OLDEST_VERSION..=VERSION,
        any::<bool>(),
        "[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
    )
        .prop_map(|(parts, [pid, page_size], version, reconnect, name)| {
            let count = if Hello::has_parts(version) { parts.len() } else { 1 };
            let part =
                |&[a, l, o]: &[u64; 3]| Part { addr: HostAddr(a), len: Bytes(l), file_offset: o };
            Message::Hello(Hello {
                version,
                reconnect,
                vm: VmName::new(&name).unwrap(),
                pid,
                parts: parts.iter().take(count).map(part).collect(),
                page_size,
            })
        });
    let op =
        (0..4usize, any::<[u64; 3]>(), any::<u8>()).prop_map(|(kind, [a, l, o], fd_index)| Op {
            kind: [OpKind::MapStore, OpKind::MapHome, OpKind::MapAgain, OpKind::Keep][kind],
            addr: HostAddr(a),
            len: Bytes(l),
            file_offset: o,
            fd_index,
        });
    prop_oneof![
        hello,
        any::<u32>().prop_map(|version| Message::Welcome { version }),
        any::<String>().prop_map(|text| Message::refuse(&text)),
        any::<[u64; 2]>().prop_map(|[features, ioctls]| Message::Ready { features, ioctls }),
        (1..=4u16, any::<i32>()).prop_map(|(step, errno)| Message::Failed {
            step: Step::from_wire(step).unwrap(),
            errno
        }),
        Just(Message::Managed),
        (any::<u64>(), proptest::collection::vec(op, 0..=MAX_OPS))
            .prop_map(|(id, ops)| Message::Batch(Batch::new(id, ops).unwrap())),
        (any::<u64>(), any::<u32>(), any::<i32>())
            .prop_map(|(id, done, errno)| Message::BatchDone { id, done, errno }),
    ]
}

proptest! {
    #[test]
    fn what_is_said_is_what_is_heard(message in any_message()) {
        prop_assert_eq!(Message::decode(&message.encode()), Ok(message));
    }

    /// Nothing panics, and nothing has two encodings.
    #[test]
    fn arbitrary_bytes_do_no_harm(
        kind in 0..12u16,
        body in proptest::collection::vec(any::<u8>(), 0..400),
        framed in any::<bool>(),
    ) {
        let mut bytes = Vec::new();
        if framed {
            bytes.extend(b"BLST");
            bytes.extend(kind.to_le_bytes());
            bytes.extend([0, 0]);
        }
        bytes.extend(body);
        if let Ok(message) = Message::decode(&bytes) {
            prop_assert_eq!(message.encode(), bytes);
        }
    }

    #[test]
    fn one_wrong_byte_is_refused_or_means_exactly_that(
        message in any_message(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let mut bytes = message.encode();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok(other) = Message::decode(&bytes) {
            prop_assert_eq!(other.encode(), bytes);
        }
    }

    #[test]
    fn a_cut_message_is_refused(message in any_message(), at in any::<prop::sample::Index>()) {
        let bytes = message.encode();
        prop_assert!(Message::decode(&bytes[..at.index(bytes.len())]).is_err());
    }
}
