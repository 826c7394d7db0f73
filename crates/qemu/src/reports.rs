//! Guests that report free pages and count on getting them back as zeros.
//!
//! A guest that zeroes what it frees (Linux: `init_on_free=1`) does not zero it again when it is allocated, and reports
//! free pages only to a balloon that offers `page-poison` (Linux, drivers/virtio/virtio_balloon.c): what is reported
//! comes back as zeros then. A page that was shared does not keep that: where it was written, the guest sees a private copy
//! over the store's page, and when that copy is discarded, what was shared shows there again. So a VM gets its
//! balloon without `page-poison`, with which such a guest reports nothing, and one that was started otherwise shares
//! nothing.

use std::io;

use crate::bounded;

/// Whether a VMM's balloon lets its guest count on zeros, by its command line.
///
/// # Errors
/// There is no such process, or its command line has no end.
pub fn counts_on_zeros(pid: u32) -> io::Result<bool> {
    let line = bounded::command_line(pid)?;
    Ok(is_such(&line.split('\0').collect::<Vec<_>>()))
}

/// Of arguments: `virtio-balloon-pci,free-page-reporting=on`, also as JSON, and what `-global` and `-set` take. One that
/// sets page-poison counts for whatever another one says.
fn is_such(args: &[&str]) -> bool {
    let reports = |arg: &&str| is_on(arg, "free-page-reporting") == Some(true);
    let without = |arg: &&str| is_on(arg, "page-poison") == Some(false);
    let mut reporting = args.iter().filter(|arg| reports(arg)).peekable();
    let set = args.iter().any(|arg| is_on(arg, "page-poison") == Some(true));
    reporting.peek().is_some() && (set || !reporting.all(without))
}

/// What it says of a property; None: nothing. Without a value it is on, as QEMU has it.
fn is_on(arg: &str, property: &str) -> Option<bool> {
    let (before, after) = arg.rsplit_once(property)?;
    let value = after.trim_start_matches(['"', ' ', ':', '=']);
    let no = before.ends_with("no")
        || ["off", "false", "no", "n,"].iter().any(|off| value.starts_with(off));
    Some(!no && value != "n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_balloon_that_reports_and_offers_to_be_told_of_poison_is_such() {
        for on in [
            "virtio-balloon-pci,id=b,free-page-reporting=on",
            "virtio-balloon-pci,free-page-reporting=on,page-poison=on",
            "virtio-balloon-pci,free-page-reporting=yes,deflate-on-oom=off",
            "virtio-balloon-pci,free-page-reporting",
            "virtio-balloon-pci.free-page-reporting=on",
            r#"{"driver":"virtio-balloon-pci","id":"balloon0","free-page-reporting":true}"#,
            r#"{"driver": "virtio-balloon-pci", "page-poison": true, "free-page-reporting": true}"#,
        ] {
            assert!(is_such(&["-device", on]), "{on}");
        }
        for off in [
            "",
            "virtio-balloon-pci,id=b",
            "virtio-balloon-pci,free-page-reporting=off",
            "virtio-balloon-pci,free-page-reporting=n,id=b",
            "virtio-balloon-pci,free-page-reporting=n",
            "virtio-balloon-pci,nofree-page-reporting",
            "virtio-balloon-pci,free-page-reporting=on,page-poison=off",
            "virtio-balloon-pci,page-poison=false,free-page-reporting=on",
            r#"{"driver":"virtio-balloon-pci","free-page-reporting":false}"#,
            r#"{"driver":"virtio-balloon-pci","free-page-reporting":true,"page-poison":false}"#,
        ] {
            assert!(!is_such(&["-device", off]), "{off}");
        }
    }

    #[test]
    fn what_one_argument_sets_counts_for_the_others() {
        let off = "virtio-balloon-pci,id=bal,free-page-reporting=on,page-poison=off";
        assert!(!is_such(&["-device", off, "-set", "device.bal.deflate-on-oom=on"]));
        assert!(is_such(&["-device", off, "-set", "device.bal.page-poison=on"]));
        assert!(is_such(&["-device", off, "-device", "virtio-balloon-pci,free-page-reporting=on"]));
        let quiet = "virtio-balloon-pci,page-poison=on";
        assert!(!is_such(&["-device", quiet]), "it reports nothing");
        assert!(is_such(&["-device", quiet, "-set", "device.b.free-page-reporting=on"]));
    }

    #[test]
    fn a_process_that_is_not_there_is_an_error() {
        assert!(!counts_on_zeros(std::process::id()).unwrap());
        assert!(counts_on_zeros(u32::MAX).is_err());
    }
}
