//! Text of any length that follows from a seed, a number and a generation.

use crate::page::mix;

#[derive(Clone, Copy)]
pub struct Content {
    pub seed: u64,
}

impl Content {
    /// Lower-case letters and line ends: as compressible as hexadecimal text, and no two alike.
    pub fn text(&self, number: u64, generation: u32, length: usize) -> Vec<u8> {
        let mut state = mix(self.seed ^ mix(number << 16 ^ u64::from(generation)));
        let mut text = Vec::with_capacity(length + 12);
        while text.len() < length {
            state = mix(state);
            text.extend((0..12).map(|n| b'a' + (state >> (n * 4) & 15) as u8));
            if state >> 60 == 0 {
                text.push(b'\n');
            }
        }
        text.truncate(length);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_reproducible_and_distinct() {
        let content = Content { seed: 4 };
        let text = content.text(7, 1, 1000);
        assert_eq!(text.len(), 1000);
        assert_eq!(text, content.text(7, 1, 1000));
        for other in [
            content.text(7, 2, 1000),
            content.text(8, 1, 1000),
            Content { seed: 5 }.text(7, 1, 1000),
        ] {
            assert_ne!(text[..32], other[..32]);
        }
        assert!(text.iter().all(|b| b.is_ascii_lowercase() || *b == b'\n'));
    }
}
