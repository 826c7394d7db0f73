//! Progress for people, on standard output; a reader that went away is not an error.

use std::io::Write;

/// One line, at once.
pub fn line(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{text}");
    let _ = out.flush();
}

/// A step that may take a while, told before it begins.
pub fn step(text: &str) {
    line(&format!("==> {text}"));
}

/// A detail of the step before it.
pub fn detail(text: &str) {
    line(&format!("    {text}"));
}
