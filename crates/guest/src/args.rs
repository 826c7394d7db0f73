//! `--name value` options. Every option must be known to the workload: [`Args::done`] refuses the
//! rest, so that a misspelt one does not silently leave a default in force.

use std::str::FromStr;
use std::time::Duration;

#[derive(Debug)]
pub struct Args {
    left: Vec<(String, String)>,
}

impl Args {
    pub fn parse(words: Vec<String>) -> Result<Args, String> {
        let mut left = Vec::new();
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let Some(name) = word.strip_prefix("--") else {
                return Err(format!("'{word}' is not an option (expected --name value)"));
            };
            let (name, value) = match name.split_once('=') {
                Some((n, v)) => (n.to_owned(), v.to_owned()),
                None => match words.next() {
                    Some(v) => (name.to_owned(), v),
                    None => return Err(format!("--{name} needs a value")),
                },
            };
            left.push((name, value));
        }
        Ok(Args { left })
    }

    pub fn text(&mut self, name: &str, default: &str) -> String {
        self.take(name).unwrap_or_else(|| default.to_owned())
    }

    pub fn number<T: FromStr>(&mut self, name: &str, default: T) -> Result<T, String> {
        match self.take(name) {
            None => Ok(default),
            Some(v) => v.parse().map_err(|_| format!("--{name} {v}: not a number it can take")),
        }
    }

    /// A number that must be at least `least`.
    pub fn at_least<T>(&mut self, name: &str, default: T, least: T) -> Result<T, String>
    where
        T: FromStr + PartialOrd + std::fmt::Display,
    {
        let value = self.number(name, default)?;
        if value < least {
            return Err(format!("--{name} {value}: must be at least {least}"));
        }
        Ok(value)
    }

    /// Seconds, with fractions, and an optional "s" behind them.
    pub fn seconds(&mut self, name: &str, default: f64) -> Result<Duration, String> {
        let text = self.take(name).unwrap_or_else(|| default.to_string());
        parse_seconds(&text).ok_or_else(|| format!("--{name} {text}: not a number of seconds"))
    }

    /// Refuses what no call above has taken.
    pub fn done(self) -> Result<(), String> {
        match self.left.first() {
            None => Ok(()),
            Some((name, _)) => Err(format!("unknown option --{name}")),
        }
    }

    fn take(&mut self, name: &str) -> Option<String> {
        let at = self.left.iter().position(|(n, _)| n == name)?;
        Some(self.left.remove(at).1)
    }
}

pub fn parse_seconds(text: &str) -> Option<Duration> {
    let value: f64 = text.strip_suffix('s').unwrap_or(text).parse().ok()?;
    Duration::try_from_secs_f64(value).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(words: &[&str]) -> Result<Args, String> {
        Args::parse(words.iter().map(|w| (*w).to_owned()).collect())
    }

    #[test]
    fn options_are_taken_once_and_the_rest_is_refused() {
        let mut a = args(&["--mb", "12", "--period=30s", "--typo", "1"]).unwrap();
        assert_eq!(a.number("mb", 1u64), Ok(12));
        assert_eq!(a.seconds("period", 1.0), Ok(Duration::from_secs(30)));
        assert_eq!(a.number("absent", 7u64), Ok(7));
        assert_eq!(a.done(), Err("unknown option --typo".to_owned()));
    }

    #[test]
    fn bad_words_are_refused() {
        assert!(args(&["mb", "1"]).is_err());
        assert!(args(&["--mb"]).is_err());
        assert!(args(&["--mb", "x"]).unwrap().number("mb", 1u64).is_err());
        assert!(args(&["--mb", "0"]).unwrap().at_least("mb", 1u64, 1).is_err());
        assert!(args(&["--s", "-1"]).unwrap().seconds("s", 1.0).is_err());
        assert!(args(&["--s", "NaN"]).unwrap().seconds("s", 1.0).is_err());
    }
}
