//! One flat JSON object, built field by field.

use std::fmt::Write;

#[derive(Default)]
pub struct Object {
    text: String,
}

impl Object {
    pub fn new() -> Object {
        Object::default()
    }

    #[must_use]
    pub fn text(mut self, name: &str, value: &str) -> Object {
        self.name(name);
        self.quote(value);
        self
    }

    #[must_use]
    pub fn int(mut self, name: &str, value: impl Into<i128>) -> Object {
        self.name(name);
        // Writing to a String cannot fail.
        let _ = write!(self.text, "{}", value.into());
        self
    }

    /// A number with three decimals; null where JSON has no such number.
    #[must_use]
    pub fn num(mut self, name: &str, value: f64) -> Object {
        self.name(name);
        if value.is_finite() {
            let _ = write!(self.text, "{value:.3}");
        } else {
            self.text.push_str("null");
        }
        self
    }

    pub fn end(self) -> String {
        format!("{{{}}}", self.text)
    }

    fn name(&mut self, name: &str) {
        if !self.text.is_empty() {
            self.text.push(',');
        }
        self.quote(name);
        self.text.push(':');
    }

    fn quote(&mut self, value: &str) {
        self.text.push('"');
        for c in value.chars() {
            match c {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                c if (c as u32) < 0x20 => {
                    let _ = write!(self.text, "\\u{:04x}", c as u32);
                }
                c => self.text.push(c),
            }
        }
        self.text.push('"');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_joined_and_escaped() {
        let o = Object::new().text("a", "x\"\\\n").int("b", 3u64).num("c", 1.5);
        assert_eq!(o.end(), r#"{"a":"x\"\\\u000a","b":3,"c":1.500}"#);
        assert_eq!(Object::new().num("n", f64::NAN).end(), r#"{"n":null}"#);
        assert_eq!(Object::new().end(), "{}");
    }
}
