//! What must hold of any bytes that a VMM sends over QMP, or a guest's agent. Called by the fuzzer, and here with a bounded
//! number of mutations.

use crate::agent;
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

/// Nothing panics, and what is told of a guest's answer is short, and text.
pub fn check_agent(bytes: &[u8]) {
    let told = agent::heard(bytes);
    assert!(told.len() < 600 && told.is_ascii() && !told.contains('\n'), "{told}");
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

    #[test]
    fn no_bytes_of_a_guest_do_harm() {
        super::mutate::run("agent_lines", 100_000, super::check_agent);
    }
}
