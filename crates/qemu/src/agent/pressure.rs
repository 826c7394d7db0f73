//! What Linux tells of memory pressure (Documentation/accounting/psi.rst).

/// The parts of the last ten seconds in which tasks waited for memory, each from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryPressure {
    /// At least one task did.
    pub some: f64,
    /// All tasks that had anything to do did.
    pub full: f64,
}

impl MemoryPressure {
    /// From /proc/pressure/memory:
    ///
    /// ```text
    /// some avg10=1.53 avg60=0.87 avg300=0.32 total=5829384
    /// full avg10=0.91 avg60=0.52 avg300=0.19 total=3029182
    /// ```
    ///
    /// None if it is not that: both lines must be there, with averages from 0 to 100.
    pub fn parse(text: &[u8]) -> Option<MemoryPressure> {
        let text = std::str::from_utf8(text).ok()?;
        let average = |kind: &str| {
            let mut words = text
                .lines()
                .map(str::split_ascii_whitespace)
                .find_map(|mut words| (words.next() == Some(kind)).then_some(words))?;
            let percent: f64 = words.find_map(|w| w.strip_prefix("avg10="))?.parse().ok()?;
            (0.0..=100.0).contains(&percent).then_some(percent / 100.0)
        };
        Some(MemoryPressure { some: average("some")?, full: average("full")? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_two_lines_are_read() {
        let text = b"some avg10=1.50 avg60=0.87 avg300=0.32 total=5829384\n\
                     full avg10=0.25 avg60=0.52 avg300=0.19 total=3029182\n";
        let read = MemoryPressure::parse(text);
        assert_eq!(read, Some(MemoryPressure { some: 0.015, full: 0.0025 }));
    }

    #[test]
    fn anything_else_is_none() {
        for text in [
            "",
            "some avg10=1.0\n",
            "full avg10=1.0\n",
            "some avg10=\nfull avg10=1\n",
            "some avg10=NaN\nfull avg10=0\n",
            "some avg10=inf\nfull avg10=0\n",
            "some avg10=-1\nfull avg10=0\n",
            "some avg10=100.1\nfull avg10=0\n",
            "some avg60=1\nfull avg60=1\n",
            "somewhat avg10=1\nfuller avg10=1\n",
        ] {
            assert_eq!(MemoryPressure::parse(text.as_bytes()), None, "{text}");
        }
        assert_eq!(MemoryPressure::parse(&[0xff, 0xfe]), None);
    }
}
