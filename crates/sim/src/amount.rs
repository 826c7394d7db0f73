//! Amounts as scenarios write them: sizes, parts of a VM's size, lengths of time.

use std::fmt;

use ballast_units::{Bytes, Pages};
use serde::Deserialize;

use crate::Millis;

/// "256M": pages, rounded up, at most 4 PiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Size(pub Pages);

impl TryFrom<String> for Size {
    type Error = String;
    fn try_from(text: String) -> Result<Size, String> {
        let bytes: Bytes = text.parse().map_err(|e| format!("{e}"))?;
        if bytes.0 > 1 << 52 {
            return Err(format!("'{text}' is above 4 PiB"));
        }
        Ok(Size(bytes.pages_ceil()))
    }
}

/// "64M", or "25%" of the VM's size.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(try_from = "String")]
pub enum Amount {
    /// So many, whatever the VM's size.
    Size(Pages),
    /// 0 to 1.
    Part(f64),
}

impl Amount {
    /// Of a VM of `size`, and no more than that.
    pub fn of(self, size: Pages) -> Pages {
        match self {
            Amount::Size(pages) => pages.min(size),
            Amount::Part(part) => Pages((size.0 as f64 * part).round() as u64),
        }
    }
}

impl TryFrom<String> for Amount {
    type Error = String;
    fn try_from(text: String) -> Result<Amount, String> {
        let Some(percent) = text.trim().strip_suffix('%') else {
            return Size::try_from(text).map(|size| Amount::Size(size.0));
        };
        Part::try_from(format!("{percent}%")).map(|part| Amount::Part(part.0))
    }
}

/// "25%": 0% to 100%, as 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(try_from = "String")]
pub struct Part(pub f64);

impl TryFrom<String> for Part {
    type Error = String;
    fn try_from(text: String) -> Result<Part, String> {
        let number = text.trim().strip_suffix('%').and_then(|t| t.trim().parse::<f64>().ok());
        match number {
            Some(percent) if (0.0..=100.0).contains(&percent) => Ok(Part(percent / 100.0)),
            _ => Err(format!("'{text}' is not a percentage from 0% to 100%")),
        }
    }
}

/// "500ms", "30s", "5m", "8h", "365d": at most 36,525 days.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub struct Length(pub Millis);

impl TryFrom<String> for Length {
    type Error = String;
    fn try_from(text: String) -> Result<Length, String> {
        let t = text.trim();
        let digits = t.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit = match &t[digits.len()..] {
            "ms" => 1.0,
            "s" => 1e3,
            "m" | "min" => 6e4,
            "h" => 3.6e6,
            "d" => 8.64e7,
            _ => f64::NAN,
        };
        match digits.trim().parse::<f64>() {
            Ok(n) if n >= 0.0 && n * unit <= 8.64e7 * 36_525.0 => Ok(Length((n * unit) as Millis)),
            _ => Err(format!("'{text}' is no length of time such as 500ms, 30s, 5m, 8h or 365d")),
        }
    }
}

impl fmt::Display for Length {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = self.0 as f64 / 1e3;
        let (value, unit) = match s {
            s if s >= 172_800.0 => (s / 86_400.0, "d"),
            s if s >= 7_200.0 => (s / 3_600.0, "h"),
            s if s >= 120.0 => (s / 60.0, "min"),
            s => (s, "s"),
        };
        let text = format!("{value:.1}");
        write!(f, "{} {unit}", text.strip_suffix(".0").unwrap_or(&text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_and_nonsense_is_not() {
        let size = Pages::from_mib(256);
        let amount = |t: &str| Amount::try_from(t.to_owned()).map(|a| a.of(size));
        assert_eq!(amount("64M"), Ok(Pages::from_mib(64)));
        assert_eq!(amount("25%"), Ok(Pages::from_mib(64)));
        assert_eq!(amount("1T"), Ok(size));
        for bad in ["101%", "-1%", "%", "x", "nan%", "12Q"] {
            assert!(amount(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn lengths_are_read_and_printed() {
        let ms = |t: &str| Length::try_from(t.to_owned()).map(|l| l.0);
        assert_eq!(ms("500ms"), Ok(500));
        assert_eq!(ms("1.5h"), Ok(5_400_000));
        assert_eq!(ms("365d"), Ok(31_536_000_000));
        for bad in ["", "5", "s", "-1s", "1y", "nans", "99999999d"] {
            assert!(ms(bad).is_err(), "{bad}");
        }
        assert_eq!(Length(90_000).to_string(), "90 s");
        assert_eq!(Length(5_400_000).to_string(), "90 min");
        assert_eq!(Length(31_536_000_000).to_string(), "365 d");
    }
}
