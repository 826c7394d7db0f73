//! The prompt that changes one parameter of one VM.

use ballast_api::{Params, VmChange};
use ballast_units::{Bytes, ParseBytesError};

use crate::figures::size;
use crate::parse;

/// More than any value that is not an error.
const LONGEST: usize = 24;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field {
    Shares,
    Min,
    Max,
    Tax,
}

impl Field {
    pub fn name(self) -> &'static str {
        match self {
            Field::Shares => "shares",
            Field::Min => "min",
            Field::Max => "max",
            Field::Tax => "tax",
        }
    }

    /// The value in force.
    pub fn current(self, p: &Params) -> String {
        match self {
            Field::Shares => p.shares.to_string(),
            Field::Min => size(p.min),
            Field::Max => size(p.max),
            Field::Tax => p.tax.to_string(),
        }
    }

    pub fn example(self) -> &'static str {
        match self {
            Field::Shares => "5000",
            Field::Min => "64M",
            Field::Max => "192M",
            Field::Tax => "0.75",
        }
    }
}

#[derive(Clone, Debug)]
pub struct Edit {
    pub vm: String,
    pub field: Field,
    pub text: String,
    /// Why the last try was refused, by us or by the manager.
    pub error: Option<String>,
    /// What was sent, and is not answered yet.
    pub sent: Option<VmChange>,
}

impl Edit {
    pub fn new(vm: String, field: Field) -> Edit {
        Edit { vm, field, text: String::new(), error: None, sent: None }
    }

    pub fn type_char(&mut self, c: char) {
        if !c.is_control() && self.text.chars().count() < LONGEST {
            self.text.push(c);
            self.error = None;
        }
    }

    pub fn backspace(&mut self) {
        self.text.pop();
        self.error = None;
    }

    pub fn clear(&mut self) {
        self.text.clear();
        self.error = None;
    }

    /// The change that the text asks for, checked against the VM's parameters as last seen; the
    /// manager checks again.
    pub fn change(&self, p: &Params) -> Result<VmChange, String> {
        let text = self.text.trim();
        let bytes = || text.parse::<Bytes>().map_err(|e: ParseBytesError| e.to_string());
        let mut change = VmChange::default();
        match self.field {
            Field::Shares => change.shares = Some(parse::shares(text)?),
            Field::Tax => change.tax = Some(parse::tax(text)?),
            Field::Min => {
                let min = bytes()?;
                if min.0 > p.max {
                    return Err(format!("min {min} is above max {}", Bytes(p.max)));
                }
                change.min = Some(min.0);
            }
            Field::Max => {
                let max = bytes()?;
                if max.0 < p.min {
                    return Err(format!("max {max} is below min {}", Bytes(p.min)));
                }
                if max.0 > p.size {
                    return Err(format!("max {max} is above the VM's size {}", Bytes(p.size)));
                }
                change.max = Some(max.0);
            }
        }
        Ok(change)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARAMS: Params = Params {
        size: 256 << 20,
        min: 64 << 20,
        max: 256 << 20,
        shares: 2560,
        tax: 0.75,
        pool: None,
    };

    fn change(field: Field, text: &str) -> Result<VmChange, String> {
        let mut edit = Edit::new("a".to_owned(), field);
        text.chars().for_each(|c| edit.type_char(c));
        edit.change(&PARAMS)
    }

    #[test]
    fn each_field_changes_itself_alone() {
        let none = VmChange::default;
        assert_eq!(change(Field::Shares, "5"), Ok(VmChange { shares: Some(5), ..none() }));
        assert_eq!(change(Field::Min, "128M"), Ok(VmChange { min: Some(128 << 20), ..none() }));
        assert_eq!(change(Field::Max, "64m"), Ok(VmChange { max: Some(64 << 20), ..none() }));
        assert_eq!(change(Field::Tax, "0"), Ok(VmChange { tax: Some(0.0), ..none() }));
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_reason() {
        assert!(change(Field::Min, "512M").unwrap_err().contains("above max 256 MiB"));
        assert!(change(Field::Max, "32M").unwrap_err().contains("below min 64 MiB"));
        assert!(change(Field::Max, "1G").unwrap_err().contains("above the VM's size 256 MiB"));
        assert!(change(Field::Min, "12Q").unwrap_err().contains("'12Q'"));
        assert!(change(Field::Tax, "1").is_err());
        assert!(change(Field::Shares, "0").is_err());
    }

    #[test]
    fn the_text_cannot_grow_without_bound() {
        let mut edit = Edit::new("a".to_owned(), Field::Min);
        (0..1000).for_each(|_| edit.type_char('9'));
        edit.type_char('\u{1b}');
        assert_eq!(edit.text, "9".repeat(LONGEST));
    }
}
