//! In which line of a file a key is, and which key is where.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// The line, from 1, of a key as errors name it (`sampling.period_s`, `vm[2].min`,
/// `pool."prod/db".min`), or of the table that it should be in.
pub(super) fn line_of(text: &str, key: &str) -> Option<usize> {
    let document = DeTable::parse(text).ok()?;
    let mut found = None;
    let mut table = document.get_ref();
    for part in parts(key) {
        let (name, index) = match part.rsplit_once('[') {
            Some((name, rest)) => (name, rest.trim_end_matches(']').parse::<usize>().ok()),
            None => (part, None),
        };
        let Some((at, value)) = table.iter().find(|(k, _)| k.get_ref().as_ref() == name) else {
            break;
        };
        let mut value: &Spanned<DeValue<'_>> = value;
        found = Some(at.span().start);
        if let (Some(index), DeValue::Array(items)) = (index, value.get_ref()) {
            let Some(item) = items.get(index) else { break };
            found = Some(item.span().start);
            value = item;
        }
        match value.get_ref() {
            DeValue::Table(inner) => table = inner,
            _ => break,
        }
    }
    found.map(|at| text[..at.min(text.len())].matches('\n').count() + 1)
}

/// The key, as errors name it, of the value that is written at `span`.
pub(super) fn key_at(text: &str, span: &Range<usize>) -> Option<String> {
    let document = DeTable::parse(text).ok()?;
    key_in_table(document.get_ref(), "", span)
}

fn key_in_table(table: &DeTable<'_>, path: &str, span: &Range<usize>) -> Option<String> {
    let dot = if path.is_empty() { "" } else { "." };
    table.iter().find_map(|(key, value)| {
        key_in(value, &format!("{path}{dot}{}", written(key.get_ref())), span)
    })
}

/// What is inside of a value comes first: a table without a header of its own may have the place of one in it.
fn key_in(value: &Spanned<DeValue<'_>>, path: &str, span: &Range<usize>) -> Option<String> {
    let inside = match value.get_ref() {
        DeValue::Table(table) => key_in_table(table, path, span),
        DeValue::Array(items) => items
            .iter()
            .enumerate()
            .find_map(|(i, item)| key_in(item, &format!("{path}[{i}]"), span)),
        _ => None,
    };
    inside.or_else(|| (value.span() == *span).then(|| path.to_owned()))
}

/// A part of a key, in quotes where it needs them.
fn written(part: &str) -> String {
    let bare = part.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-".contains(&b));
    if bare { part.to_owned() } else { format!("\"{part}\"") }
}

/// Split at the dots that are not quoted, without the quotes.
fn parts(key: &str) -> impl Iterator<Item = &str> {
    let mut quoted = false;
    key.split(move |c| {
        quoted ^= c == '"';
        c == '.' && !quoted
    })
    .map(|part| part.trim_matches('"'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_found_wherever_they_are_written() {
        let text = "tax = 0.5\n\n[sampling]\nsamples = 1\n\n[[vm]]\nname = \"a\"\n[[vm]]\n\
                    name = \"b\"\nmin = \"1G\"\n[pool.\"prod/db\"]\nmin = 1\n[pool]\nx.y = 2\n";
        for (key, line) in [
            ("tax", Some(1)),
            ("sampling.samples", Some(4)),
            ("sampling.period_s", Some(3)),
            ("vm[0].name", Some(7)),
            ("vm[1].min", Some(10)),
            ("vm[1].pool", Some(8)),
            ("pool.\"prod/db\".min", Some(12)),
            ("pool.x.y", Some(14)),
            ("budget", None),
        ] {
            assert_eq!(line_of(text, key), line, "{key}");
        }
    }

    #[test]
    fn values_are_found_by_their_places() {
        let text = "budget = 7\n[[vm]]\nname = 1\n[pool.\"prod/db\"]\nmin = 2\n[swap]\n\
                    location = [{ path = 3 }]\nx.y = 4\n";
        for (value, key) in [
            ("7", "budget"),
            ("1", "vm[0].name"),
            ("2", "pool.\"prod/db\".min"),
            ("3", "swap.location[0].path"),
            ("4", "swap.x.y"),
        ] {
            let at = text.find(value).unwrap();
            assert_eq!(key_at(text, &(at..at + 1)).as_deref(), Some(key));
        }
        assert_eq!(key_at(text, &(0..6)), None, "a key is no value");
        assert_eq!(key_at("budget = \n", &(9..10)), None);
    }
}
