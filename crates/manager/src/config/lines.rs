//! In which line of a file a key is.

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
}
