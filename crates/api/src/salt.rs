//! Salts: secrets that say with whom a VM may share pages.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Names a trust domain: VMs that were given equal salts may share pages with one another. Without
/// one, a VM shares inside itself alone.
///
/// Whoever knows it can have a VM put into the domain, so it is taken in and never shown: no view
/// holds it, and `Debug` hides it.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(value_type = String, pattern = "^[^\\p{Cc}]{1,256}$")]
pub struct Salt(Arc<str>);

/// What a salt must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a salt is 1 to {} bytes of text without control characters", Salt::LONGEST)]
pub struct BadSalt;

impl Salt {
    /// Bytes of UTF-8.
    pub const LONGEST: usize = 256;

    /// The text itself. Not for people.
    pub fn secret(&self) -> &str {
        &self.0
    }
}

impl TryFrom<&str> for Salt {
    type Error = BadSalt;
    fn try_from(text: &str) -> Result<Salt, BadSalt> {
        if (1..=Salt::LONGEST).contains(&text.len()) && !text.chars().any(char::is_control) {
            Ok(Salt(text.into()))
        } else {
            Err(BadSalt)
        }
    }
}

impl TryFrom<String> for Salt {
    type Error = BadSalt;
    fn try_from(text: String) -> Result<Salt, BadSalt> {
        Salt::try_from(text.as_str())
    }
}

impl From<Salt> for String {
    fn from(salt: Salt) -> String {
        salt.0.as_ref().to_owned()
    }
}

impl fmt::Debug for Salt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Salt(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{VmChange, VmSpec};

    #[test]
    fn a_salt_is_short_printable_text() {
        for good in ["a", "team blue", "ß", &"x".repeat(256)] {
            assert_eq!(Salt::try_from(good).unwrap().secret(), good);
        }
        for bad in ["", "a\n", "a\0b", "\u{1b}[2J", &"x".repeat(257), &"ß".repeat(129)] {
            assert_eq!(Salt::try_from(bad), Err(BadSalt), "{bad:?}");
        }
    }

    #[test]
    fn json_is_checked_and_debug_does_not_tell() {
        let spec = r#"{"name": "a", "max": 1, "kernel": "k", "salt": "blue"}"#;
        let spec: VmSpec = serde_json::from_str(spec).unwrap();
        assert_eq!(spec.salt.as_ref().map(Salt::secret), Some("blue"));
        assert!(!format!("{spec:?}").contains("blue"));
        let error = serde_json::from_str::<VmChange>(r#"{"salt": ""}"#).unwrap_err().to_string();
        assert!(error.contains("1 to 256 bytes"), "{error}");
        let change = VmChange { salt: spec.salt, ..VmChange::default() };
        assert_eq!(serde_json::to_string(&change).unwrap(), r#"{"salt":"blue"}"#);
        let clear = VmChange { no_salt: true, ..VmChange::default() };
        assert_eq!(serde_json::to_string(&clear).unwrap(), r#"{"no_salt":true}"#);
        assert_eq!(serde_json::from_str::<VmChange>(r#"{"no_salt":true}"#).unwrap(), clear);
    }
}
