//! Admission control (OSDI'02 s.6.2): what a VM is promised must be there before it starts.
//!
//! Promises are about memory that is not promised to others, not about memory that is free now:
//! what others hold beyond their guarantees can be reclaimed.

use std::fmt;

use ballast_units::Pages;

/// What powering on a VM promises it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promise {
    /// Guaranteed machine memory.
    pub min: Pages,
    /// Overhead memory.
    pub overhead: Pages,
    /// Swap space for the rest, so that its memory is preserved under any circumstances.
    pub swap: Pages,
}

impl Promise {
    /// min + overhead of machine memory, size - min of swap.
    pub fn of(min: Pages, size: Pages, overhead: Pages) -> Promise {
        Promise { min, overhead, swap: size.saturating_sub(min) }
    }

    /// Machine memory: min + overhead.
    pub fn memory(&self) -> Pages {
        Pages(self.min.0.saturating_add(self.overhead.0))
    }
}

/// Why a promise cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum Refusal {
    #[error("needs {}{}", Against(.need.memory(), "unreserved", *.unreserved, "free of promises"),
        Largest(.largest))]
    Memory { need: Promise, unreserved: Pages, largest: Option<(String, Pages)> },
    #[error("needs {} (its size less its min)",
        Against(.need.swap, "of swap space", *.swap_free, "free"))]
    Swap { need: Promise, swap_free: Pages },
}

/// Whether `need` can be promised, with `unreserved` machine pages promised to nobody and
/// `swap_free` pages of swap space reserved for nobody. `largest` names the VM with the largest
/// reservation, for the refusal.
///
/// # Errors
/// Machine memory is checked first; the refusal carries the numbers.
pub fn admit(
    unreserved: Pages,
    swap_free: Pages,
    need: &Promise,
    largest: Option<(String, Pages)>,
) -> Result<(), Refusal> {
    if need.memory() > unreserved {
        Err(Refusal::Memory { need: *need, unreserved, largest })
    } else if need.swap > swap_free {
        Err(Refusal::Swap { need: *need, swap_free })
    } else {
        Ok(())
    }
}

/// What is needed and what is there: "288 MiB" and "190 MiB"; in pages where rounding would hide the gap.
pub(crate) fn told_apart(need: Pages, have: Pages) -> (String, String) {
    let (needed, had) = (need.to_string(), have.to_string());
    if needed == had {
        (format!("{} pages", need.0), format!("{} pages", have.0))
    } else {
        (needed, had)
    }
}

/// "288 MiB unreserved, 190 MiB free of promises".
struct Against(Pages, &'static str, Pages, &'static str);

impl fmt::Display for Against {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Against(need, what, have, whose) = *self;
        let (need, have) = told_apart(need, have);
        write!(f, "{need} {what}, {have} {whose}")
    }
}

struct Largest<'a>(&'a Option<(String, Pages)>);

impl fmt::Display for Largest<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some((name, size)) => write!(f, "; largest reservation: {name}, {size}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn mib(n: u64) -> Pages {
        Pages::from_mib(n)
    }

    #[test]
    fn a_refusal_carries_the_numbers() {
        let need = Promise::of(mib(256), mib(512), mib(32));
        let refusal = admit(mib(190), mib(999), &need, Some(("db1".into(), mib(512)))).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "needs 288 MiB unreserved, 190 MiB free of promises; largest reservation: db1, 512 MiB"
        );
        let refusal = admit(mib(190), mib(999), &need, None).unwrap_err();
        assert_eq!(refusal.to_string(), "needs 288 MiB unreserved, 190 MiB free of promises");
        let refusal = admit(mib(288), mib(255), &need, None).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "needs 256 MiB of swap space, 255 MiB free (its size less its min)"
        );
        assert_eq!(admit(mib(288), mib(256), &need, None), Ok(()));
    }

    #[test]
    fn a_gap_of_one_page_is_visible() {
        let need = Promise::of(mib(256), mib(256), Pages(0));
        let refusal = admit(mib(256) - Pages(1), mib(0), &need, None).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "needs 256 MiB unreserved, 256 MiB free of promises"
                .replace("256 MiB u", "65536 pages u")
                .replace("256 MiB f", "65535 pages f")
        );
    }

    proptest! {
        /// However VMs come and go, what is promised never exceeds what there is.
        #[test]
        fn promises_never_exceed_memory_or_swap(
            memory in 0u64..10_000, swap in 0u64..10_000,
            events in proptest::collection::vec(
                (0u64..3_000, 0u64..3_000, 0u64..200, any::<bool>()), 0..60),
        ) {
            let mut running: Vec<Promise> = Vec::new();
            for (min, more, overhead, leave) in events {
                if leave {
                    running.pop();
                    continue;
                }
                let need = Promise::of(Pages(min), Pages(min + more), Pages(overhead));
                let promised: Pages = running.iter().map(Promise::memory).sum();
                let swapped: Pages = running.iter().map(|p| p.swap).sum();
                let admitted =
                    admit(Pages(memory) - promised, Pages(swap) - swapped, &need, None).is_ok();
                let fits = promised.0 + min + overhead <= memory && swapped.0 + more <= swap;
                prop_assert_eq!(admitted, fits);
                if admitted {
                    running.push(need);
                }
            }
        }
    }

    #[test]
    fn absurd_sizes_are_refused_and_not_overflowed() {
        let need = Promise::of(Pages(u64::MAX), Pages(u64::MAX), Pages(1));
        assert!(admit(Pages(u64::MAX - 1), Pages(0), &need, None).is_err());
    }
}
