//! Newtypes for every unit that Ballast counts in. All conversions between units live here.
//!
//! Pages are 4 KiB (x86-64 base pages) throughout.

#![warn(missing_docs)]

mod age;
mod fault_times;
mod name;
mod random;

pub use age::age;
pub use fault_times::{FAULT_BUCKETS, fault_bucket_end_us};
pub use name::{LONGEST_POOL_NAME, LONGEST_VM_NAME, VM_NAME_RULE, good_pool_name, good_vm_name};
pub use random::SplitMix64;

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Sub, SubAssign};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Bytes in one page.
pub const PAGE_SIZE: usize = 4096;
const PAGE: u64 = PAGE_SIZE as u64;

/// Guest "physical" page number: pages of a VM's RAM counted through all of its parts, from the start of the first (so holes of
/// the guest's physical map do not appear in it).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ppn(pub u64);

impl Ppn {
    /// Byte offset of the page in its VM's RAM, all parts one behind the other.
    pub const fn offset(self) -> u64 {
        self.0 * PAGE
    }
    /// As an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Ppn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ppn {:#x}", self.0)
    }
}

/// A page-sized slot of a VM's swap, counted through all of its files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SlotId(pub u64);

impl SlotId {
    /// Byte offset of the slot, where it is counted from the start of its own file.
    pub const fn offset(self) -> u64 {
        self.0 * PAGE
    }
}

/// An address in a VMM process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostAddr(pub u64);

impl HostAddr {
    /// The address `ppn` pages above `self`.
    pub const fn page(self, ppn: Ppn) -> HostAddr {
        HostAddr(self.0 + ppn.offset())
    }
    /// The page of a mapping that starts at `base` in which `self` lies; None below `base`.
    pub fn ppn_from(self, base: HostAddr) -> Option<Ppn> {
        self.0.checked_sub(base.0).map(|d| Ppn(d / PAGE))
    }
}

impl fmt::Display for HostAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// The manager's number for a VM, unique for the manager's lifetime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct VmId(pub u32);

impl fmt::Display for VmId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vm{}", self.0)
    }
}

macro_rules! quantity {
    ($name:ident) => {
        impl Add for $name {
            type Output = $name;
            fn add(self, o: $name) -> $name {
                $name(self.0 + o.0)
            }
        }
        impl Sub for $name {
            type Output = $name;
            fn sub(self, o: $name) -> $name {
                $name(self.0 - o.0)
            }
        }
        impl AddAssign for $name {
            fn add_assign(&mut self, o: $name) {
                self.0 += o.0;
            }
        }
        impl SubAssign for $name {
            fn sub_assign(&mut self, o: $name) {
                self.0 -= o.0;
            }
        }
        impl Sum for $name {
            fn sum<I: Iterator<Item = $name>>(iter: I) -> $name {
                $name(iter.map(|q| q.0).sum())
            }
        }
        impl $name {
            /// None.
            pub const ZERO: $name = $name(0);
            /// The difference, at least none.
            #[must_use]
            pub const fn saturating_sub(self, o: $name) -> $name {
                $name(self.0.saturating_sub(o.0))
            }
            /// Whether there are none.
            pub fn is_zero(self) -> bool {
                self.0 == 0
            }
        }
    };
}

/// A number of 4 KiB pages.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Pages(pub u64);
quantity!(Pages);

impl Pages {
    /// The same in bytes: of fewer than 2^52 pages.
    pub const fn bytes(self) -> Bytes {
        Bytes(self.0 * PAGE)
    }
    /// Mebibytes, for people.
    pub fn mib(self) -> f64 {
        self.bytes().mib()
    }
    /// So many MiB: below 2^56; what is above wraps.
    pub const fn from_mib(mib: u64) -> Pages {
        Pages(mib << 8)
    }
    /// What `self` is where `from` pages are `to`, rounded down; as many where these are equal, or `from` is nothing.
    #[must_use]
    pub fn scaled(self, to: Pages, from: Pages) -> Pages {
        if from == to || from.0 == 0 {
            return self;
        }
        let scaled = u128::from(self.0) * u128::from(to.0) / u128::from(from.0);
        Pages(u64::try_from(scaled).unwrap_or(u64::MAX))
    }
}

impl fmt::Display for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes().fmt(f)
    }
}

/// A number of bytes. In JSON: a plain integer. In configuration and on the command line: an
/// integer with an optional suffix K, M, G or T (powers of 1,024; "KiB" and the like too).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Bytes(pub u64);
quantity!(Bytes);

impl Bytes {
    /// So many MiB: below 2^44; what is above wraps.
    pub const fn from_mib(mib: u64) -> Bytes {
        Bytes(mib << 20)
    }
    /// Whole pages that fit: rounded down.
    pub const fn pages(self) -> Pages {
        Pages(self.0 / PAGE)
    }
    /// Pages that hold all the bytes: rounded up.
    pub const fn pages_ceil(self) -> Pages {
        Pages(self.0.div_ceil(PAGE))
    }
    /// Mebibytes, for people.
    pub fn mib(self) -> f64 {
        self.0 as f64 / (1u64 << 20) as f64
    }
}

impl fmt::Display for Bytes {
    /// The largest unit that keeps three significant figures: "384 MiB", "1.50 GiB", "12.5 MiB".
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1024.0 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        let text = if value == value.trunc() || value >= 100.0 {
            format!("{value:.0} {}", UNITS[unit])
        } else if value >= 10.0 {
            format!("{value:.1} {}", UNITS[unit])
        } else {
            format!("{value:.2} {}", UNITS[unit])
        };
        f.pad(&text)
    }
}

/// What is wrong with the text of a size.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum ParseBytesError {
    #[error("'{0}' is not a size: expected a whole number with K, M, G or T, such as 256M")]
    Syntax(String),
    #[error("'{0}' is larger than this machine can count (16 EiB)")]
    TooLarge(String),
}

impl FromStr for Bytes {
    type Err = ParseBytesError;

    fn from_str(s: &str) -> Result<Bytes, ParseBytesError> {
        let syntax = || ParseBytesError::Syntax(s.to_owned());
        let text = s.trim();
        let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let number: u64 = match text[..digits].parse() {
            Ok(n) => n,
            Err(_) if digits > 0 => return Err(ParseBytesError::TooLarge(s.to_owned())),
            Err(_) => return Err(syntax()),
        };
        let shift = match text[digits..].trim().to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kb" | "kib" => 10,
            "m" | "mb" | "mib" => 20,
            "g" | "gb" | "gib" => 30,
            "t" | "tb" | "tib" => 40,
            _ => return Err(syntax()),
        };
        number
            .checked_shl(shift)
            .filter(|v| v >> shift == number)
            .map(Bytes)
            .ok_or_else(|| ParseBytesError::TooLarge(s.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse_with_suffixes_and_refuse_the_rest() {
        assert_eq!("256M".parse(), Ok(Bytes::from_mib(256)));
        assert_eq!("1 GiB".parse(), Ok(Bytes(1 << 30)));
        assert_eq!("4096".parse(), Ok(Bytes(4096)));
        assert!(matches!("12Q".parse::<Bytes>(), Err(ParseBytesError::Syntax(_))));
        assert!(matches!("".parse::<Bytes>(), Err(ParseBytesError::Syntax(_))));
        assert!(matches!("-1M".parse::<Bytes>(), Err(ParseBytesError::Syntax(_))));
        assert!(matches!("99999999T".parse::<Bytes>(), Err(ParseBytesError::TooLarge(_))));
        assert!(matches!(
            "99999999999999999999".parse::<Bytes>(),
            Err(ParseBytesError::TooLarge(_))
        ));
    }

    #[test]
    fn sizes_print_in_the_largest_fitting_unit() {
        assert_eq!(Bytes::from_mib(384).to_string(), "384 MiB");
        assert_eq!(Bytes(3 << 29).to_string(), "1.50 GiB");
        assert_eq!(Bytes(0).to_string(), "0 B");
        assert_eq!(Pages(1).to_string(), "4 KiB");
    }

    #[test]
    fn pages_are_scaled_without_overflow_and_by_nothing_not_at_all() {
        assert_eq!(Pages(10).scaled(Pages(1), Pages(3)), Pages(3));
        assert_eq!(Pages(10).scaled(Pages(0), Pages(3)), Pages(0));
        assert_eq!(Pages(10).scaled(Pages(7), Pages(0)), Pages(10));
        let most = Pages(u64::MAX);
        assert_eq!((most.scaled(most, most), most.scaled(most, Pages(1))), (most, most));
    }

    #[test]
    fn addresses_and_pages_convert_both_ways() {
        let base = HostAddr(0x7000_0000);
        assert_eq!(base.page(Ppn(3)).ppn_from(base), Some(Ppn(3)));
        assert_eq!(HostAddr(0x7000_0fff).ppn_from(base), Some(Ppn(0)));
        assert_eq!(HostAddr(0x6fff_ffff).ppn_from(base), None);
        assert_eq!(Bytes(4097).pages_ceil(), Pages(2));
        assert_eq!(Bytes(4097).pages(), Pages(1));
    }
}
