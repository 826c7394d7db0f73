//! Text of a given width. Widths are counted in characters: what is shown here is ASCII or has
//! single-width glyphs.

/// Cut or filled up to `width`, to the left; a cut is marked.
pub fn left(text: &str, width: usize) -> String {
    let length = text.chars().count();
    if length <= width {
        return format!("{text:<width$}");
    }
    let kept: String = text.chars().take(width.saturating_sub(1)).collect();
    if width == 0 { kept } else { kept + "…" }
}

/// Filled up to `width`, to the right; longer text is cut.
pub fn right(text: &str, width: usize) -> String {
    if text.chars().count() > width { left(text, width) } else { format!("{text:>width$}") }
}

/// Broken at blanks into lines of at most `width`; longer words are cut in pieces. `indent` goes
/// before every line but the first.
pub fn wrap(text: &str, width: usize, indent: &str) -> Vec<String> {
    let width = width.max(indent.chars().count() + 1);
    let mut lines = Vec::new();
    let mut line = String::new();
    let mut length = 0;
    let mut fresh = true;
    for word in text.split_whitespace() {
        let mut word: Vec<char> = word.chars().collect();
        while !word.is_empty() {
            let gap = usize::from(!fresh);
            if length + gap + word.len() <= width {
                line.extend(std::iter::repeat_n(' ', gap));
                line.extend(&word);
                length += gap + word.len();
                word.clear();
            } else if fresh {
                let rest = word.split_off(width - length);
                line.extend(word);
                word = rest;
                length = width;
            } else {
                lines.push(std::mem::replace(&mut line, indent.to_owned()));
                length = indent.chars().count();
                fresh = true;
                continue;
            }
            fresh = false;
        }
    }
    lines.push(line);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_exactly_as_wide_as_asked() {
        assert_eq!(left("web", 5), "web  ");
        assert_eq!(left("database", 5), "data…");
        assert_eq!(left("x", 0), "");
        assert_eq!(right("12M", 5), "  12M");
        assert_eq!(right("123456", 5), "1234…");
    }

    #[test]
    fn wrapping_loses_no_character_and_keeps_the_width() {
        let text = "target 160 MiB because aVeryLongWordThatFitsNowhere ends here";
        for width in 1..70 {
            let lines = wrap(text, width, "  ");
            assert!(lines.iter().all(|l| l.chars().count() <= width.max(3)), "{width}: {lines:?}");
            let squeezed = |s: &str| s.split_whitespace().collect::<String>();
            assert_eq!(squeezed(&lines.concat()), squeezed(text), "{width}");
        }
        assert_eq!(wrap("a b c", 3, " "), ["a b", " c"]);
        assert_eq!(wrap("", 10, ""), [""]);
    }
}
