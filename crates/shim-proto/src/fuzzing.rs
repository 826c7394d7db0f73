//! What must hold of any bytes that a peer sends. Called by the fuzzer, and here with a bounded number
//! of mutations.

use crate::Message;

/// Nothing panics, and what is accepted is exactly what this side would send.
pub fn check(bytes: &[u8]) {
    if let Ok(message) = Message::decode(bytes) {
        assert_eq!(message.encode(), bytes, "{message:?}");
        let (least, most) = message.descriptors();
        assert!(least <= most && most <= crate::MAX_FDS);
    }
}

#[cfg(test)]
#[path = "../../../fuzz/mutate.rs"]
mod mutate;

#[cfg(test)]
mod tests {
    #[test]
    fn no_bytes_of_a_peer_do_harm() {
        super::mutate::run("shim_message", 200_000, super::check);
    }
}
