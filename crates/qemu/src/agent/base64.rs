//! Base 64 (RFC 4648), as far as it is read here.

/// The bytes that `text` stands for; None if it is not base 64, or stands for more than `most`.
pub fn decode(text: &str, most: usize) -> Option<Vec<u8>> {
    let bytes = text.as_bytes();
    if !bytes.len().is_multiple_of(4) || bytes.len() / 4 * 3 > most.next_multiple_of(3) {
        return None;
    }
    let padding = bytes.iter().rev().take(2).take_while(|&&b| b == b'=').count();
    let mut out = Vec::with_capacity(bytes.len() / 4 * 3);
    for (i, four) in bytes.chunks_exact(4).enumerate() {
        let is_last = (i + 1) * 4 == bytes.len();
        let mut bits = 0u32;
        for (k, &b) in four.iter().enumerate() {
            let padded = is_last && b == b'=' && k >= 4 - padding;
            bits = bits << 6 | if padded { 0 } else { value(b)? };
        }
        out.extend_from_slice(&bits.to_be_bytes()[1..]);
    }
    out.truncate(out.len() - padding);
    (out.len() <= most).then_some(out)
}

fn value(b: u8) -> Option<u32> {
    Some(u32::from(match b {
        b'A'..=b'Z' => b - b'A',
        b'a'..=b'z' => b - b'a' + 26,
        b'0'..=b'9' => b - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    }))
}

#[cfg(test)]
mod tests {
    use super::decode;

    #[test]
    fn the_examples_of_the_rfc_are_read() {
        for (text, bytes) in [
            ("", ""),
            ("Zg==", "f"),
            ("Zm8=", "fo"),
            ("Zm9v", "foo"),
            ("Zm9vYg==", "foob"),
            ("Zm9vYmE=", "fooba"),
            ("Zm9vYmFy", "foobar"),
        ] {
            assert_eq!(decode(text, 6).as_deref(), Some(bytes.as_bytes()), "{text}");
        }
        assert_eq!(decode("+/+/", 3), Some(vec![0xfb, 0xff, 0xbf]));
    }

    #[test]
    fn what_is_not_base_64_or_too_long_is_none() {
        for text in ["Z", "Zg=", "Zg===", "=g==", "Z===", "Zm9v====", "Zm=v", "Zm9 ", "Zm9\u{e9}"] {
            assert_eq!(decode(text, 100), None, "{text}");
        }
        assert_eq!(decode("Zm9vYmFy", 5), None);
    }
}
