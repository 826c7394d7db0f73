//! What the programs of this folder refuse.

use std::process::Command;

use crate::files;

#[test]
fn fuzzing_without_an_end_is_refused() {
    for seconds in ["0", "00"] {
        // A seed alone is refused, too, but later: nothing is run, whatever comes of it.
        let mut test = Command::new(files::root().join("test"));
        let output = test.args(["--fuzz", seconds, "--seed", "1"]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("at least 1 second"), "{said}");
    }
}
