//! What a VMM or its guest chose, as it may stand in a log, a record and a table.

/// The beginning of it, as one line of at most `most` bytes and three dots, without anything that a terminal obeys.
pub(crate) fn shown(bytes: &[u8], most: usize) -> String {
    let mut line = String::new();
    for c in String::from_utf8_lossy(&bytes[..bytes.len().min(most)]).chars() {
        let before = line.len();
        // Letters beyond ASCII are among those that change the direction of what stands around them.
        if c == ' ' || c.is_ascii_graphic() {
            line.push(c);
        } else {
            line.extend(c.escape_default());
        }
        if line.len() > most {
            line.truncate(before);
            return line + "...";
        }
    }
    if bytes.len() > most {
        line.push_str("...");
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_one_line_and_no_longer_than_it_may_be() {
        assert_eq!(shown("'/dev/sg3' is open: Ä".as_bytes(), 80), "'/dev/sg3' is open: \\u{c4}");
        assert_eq!(shown(b"a\nERROR b\x1b[2J", 80), "a\\nERROR b\\u{1b}[2J");
        let long = shown(&vec![b'x'; 1 << 20], 80);
        assert_eq!((long.len(), long.ends_with("x...")), (83, true));
        assert_eq!(shown(&[1; 20], 20), "\\u{1}\\u{1}\\u{1}\\u{1}...");
        // In the middle of a letter.
        assert_eq!(shown("aaÄ".as_bytes(), 3), "aa...");
    }
}
