use crate::files;

const LONGEST: usize = 800;

#[test]
fn no_file_is_longer_than_800_lines() {
    let mut long = Vec::new();
    for path in files::below(&files::root().join("crates")) {
        // What is no text has no lines.
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        let lines = text.lines().count();
        if lines > LONGEST {
            long.push(format!("{}: {lines} lines", path.display()));
        }
    }
    assert!(long.is_empty(), "over {LONGEST} lines:\n{}", long.join("\n"));
}
