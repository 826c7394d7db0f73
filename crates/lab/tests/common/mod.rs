//! What the tests of whole guests share.

use ballast_lab::image::{self, Image};
use ballast_lab::tools;

/// The sample guests' image; None, loudly, where QEMU, a kernel or one of the `programs` of this
/// build is missing and need not be there.
pub fn image_or_skip(test: &str, programs: &[&str]) -> Option<Image> {
    let found = tools::find("qemu-system-x86_64", "qemu-system-x86")
        .and_then(|_| programs.iter().try_for_each(|p| tools::sibling(p).map(drop)))
        .and_then(|()| image::prepare(None));
    match found {
        Ok(image) => Some(image),
        Err(why) if required() => {
            panic!("{test} must run here, but: {why:#}")
        }
        Err(why) => {
            eprintln!("SKIPPED {test}: {why:#}");
            None
        }
    }
}

/// Whether a test that cannot run fails.
#[allow(dead_code, reason = "each test program uses its part")]
pub fn required() -> bool {
    std::env::var_os("BALLAST_REQUIRE_PRIVILEGED").is_some_and(|v| v == "1")
}
