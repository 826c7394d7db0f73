//! What must hold of any bytes that a VMM sends over QMP. Called by the fuzzer, and here with a bounded
//! number of mutations.

use crate::qmp::heard;

/// Nothing panics, and it does not matter in which pieces the bytes arrive.
pub fn check(bytes: &[u8]) {
    let whole = heard(&[bytes]);
    let (head, tail) = bytes.split_at(bytes.len() / 3);
    assert_eq!(heard(&[head, tail]), whole);
    if bytes.len() < 512 {
        let single: Vec<&[u8]> = bytes.chunks(1).collect();
        assert_eq!(heard(&single), whole);
    }
}

#[cfg(test)]
#[path = "../../../fuzz/mutate.rs"]
mod mutate;

#[cfg(test)]
mod tests {
    #[test]
    fn no_bytes_of_a_vmm_do_harm() {
        super::mutate::run("qmp_lines", 100_000, super::check);
    }
}
