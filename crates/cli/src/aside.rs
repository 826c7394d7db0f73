//! What is said on standard error, beside the answer. Whether anybody hears it changes nothing: where it cannot be
//! written, as when its reader has left, it is not said, and the command goes on or ends as it would.

use std::fmt::Display;
use std::io::Write;

/// One line.
pub fn line(text: impl Display) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// A part of a line that is written anew.
pub fn part(text: impl Display) {
    let _ = write!(std::io::stderr(), "{text}");
}
