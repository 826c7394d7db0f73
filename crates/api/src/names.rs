//! States and modes in words, for people: the words that they have in JSON.

use std::fmt;

use serde::Serialize;

use crate::{BalloonHealth, Mode, RunState, StateName};

macro_rules! as_in_json {
    ($($name:ty),*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.serialize(f)
            }
        }
    )*};
}

as_in_json!(BalloonHealth, Mode, RunState, StateName);

#[cfg(test)]
mod tests {
    use super::*;

    fn check<T: Serialize + fmt::Display>(all: &[T], words: &[&str]) {
        assert_eq!(all.len(), words.len());
        for (one, word) in all.iter().zip(words) {
            assert_eq!(one.to_string(), *word);
            assert_eq!(serde_json::to_value(one).unwrap(), *word);
        }
    }

    #[test]
    fn people_and_programs_are_told_the_same_words() {
        use BalloonHealth::{Healthy, Missing, Slow, Stuck};
        check(&[Missing, Healthy, Slow, Stuck], &["missing", "healthy", "slow", "stuck"]);
        use Mode::{BalloonOnly, Paged, Unmanaged};
        check(&[Paged, BalloonOnly, Unmanaged], &["paged", "balloon-only", "unmanaged"]);
        use RunState::{Paused, Running, Starting, Stopped, Stopping, Unreadable};
        check(
            &[Starting, Running, Paused, Unreadable, Stopping, Stopped],
            &["starting", "running", "paused", "unreadable", "stopping", "stopped"],
        );
        use StateName::{Hard, High, Low, Soft};
        check(&[High, Soft, Hard, Low], &["high", "soft", "hard", "low"]);
        // In columns, too.
        assert_eq!(format!("{:<6}|{:>6}", StateName::High, Mode::Paged), "high  | paged");
    }
}
