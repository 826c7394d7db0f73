//! Values of the command line and of the live view's prompt, from text.

use std::time::Duration;

use ballast_api::{BadSalt, Salt, VmSpec};
use ballast_policy::TaxRate;
use ballast_units::{Bytes, VM_NAME_RULE, good_pool_name, good_vm_name};

/// A VM's name: 1 to 64 of `[A-Za-z0-9._-]`, beginning with a letter or digit.
pub fn name(text: &str) -> Result<String, String> {
    if good_vm_name(text) { Ok(text.to_owned()) } else { Err(VM_NAME_RULE.to_owned()) }
}

/// A pool's name: names of pools joined by slashes, from the outside in.
pub fn pool(text: &str) -> Result<String, String> {
    if good_pool_name(text) {
        Ok(text.to_owned())
    } else {
        Err("a pool's name is of A-Z a-z 0-9 . _ - and begins with a letter or digit; prod/db is db \
             inside prod"
            .to_owned())
    }
}

/// What `share estimate` looks at: a process by its number, or a VM by its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    Pid(u32),
    Vm(String),
}

/// A number is a process, all else a VM.
pub fn target(text: &str) -> Result<Target, String> {
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return name(text).map(Target::Vm);
    }
    match text.parse() {
        Ok(0) | Err(_) => Err(format!("'{text}' is not a process number")),
        Ok(pid) => Ok(Target::Pid(pid)),
    }
}

/// The size of a new VM, in bytes: a multiple of 2 MiB, at least 16 MiB.
pub fn vm_size(text: &str) -> Result<Bytes, String> {
    let size: Bytes = text.parse().map_err(|e: ballast_units::ParseBytesError| e.to_string())?;
    let (least, step) = (VmSpec::LEAST_SIZE, VmSpec::SIZE_STEP);
    if size < least {
        Err(format!("a VM has at least {least}, not {size}"))
    } else if !size.0.is_multiple_of(step.0) {
        Err(format!("a VM's size is a multiple of {step}, which {} bytes is not", size.0))
    } else {
        Ok(size)
    }
}

/// Memory to plug into a VM, in bytes: a multiple of 2 MiB; 0: none.
pub fn hotplug_size(text: &str) -> Result<Bytes, String> {
    let size: Bytes = text.parse().map_err(|e: ballast_units::ParseBytesError| e.to_string())?;
    let step = VmSpec::SIZE_STEP;
    if size.0.is_multiple_of(step.0) {
        Ok(size)
    } else {
        Err(format!("what is plugged is a multiple of {step}, which {} bytes is not", size.0))
    }
}

/// A policy's name.
pub fn policy(text: &str) -> Result<ballast_policy::PolicyKind, String> {
    text.parse().map_err(|e: ballast_policy::UnknownPolicy| e.to_string())
}

/// "on" or "off".
pub fn switch(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("neither on nor off".to_owned()),
    }
}

/// A tax rate, 0 <= tax < 1 (OSDI'02 s.5.1; at 1 idle memory would have no price at all).
pub fn tax(text: &str) -> Result<f64, String> {
    let tax = text
        .trim()
        .parse::<f64>()
        .map_err(|_| format!("'{text}' is not a tax rate: expected a number such as 0.75"))?;
    let rate = TaxRate::new(tax)
        .map_err(|_| format!("a tax rate is at least 0 and below 1, not {tax}"))?;
    Ok(rate.get())
}

/// Shares: a whole number, at least 1.
pub fn shares(text: &str) -> Result<u32, String> {
    match text.trim().parse::<u32>() {
        Ok(0) => Err("there is at least 1 share".to_owned()),
        Ok(n) => Ok(n),
        Err(_) => {
            Err(format!("'{text}' is not a number of shares: expected 1 to {}, whole", u32::MAX))
        }
    }
}

/// A salt, which names a trust domain of page sharing.
pub fn salt(text: &str) -> Result<Salt, BadSalt> {
    Salt::try_from(text)
}

/// A length of time up to a day: `30`, `0.5`, `500ms`, `30s`, `2m`, `1h`.
pub fn duration(text: &str) -> Result<Duration, String> {
    const DAY_S: f64 = 86_400.0;
    let syntax = || format!("'{text}' is not a time: expected a number with ms, s, m or h, as 30s");
    let trimmed = text.trim();
    let digits = trimmed.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let scale = match &trimmed[digits.len()..] {
        "" | "s" => 1.0,
        "ms" => 0.001,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err(syntax()),
    };
    let number: f64 = digits.trim().parse().map_err(|_| syntax())?;
    let seconds = number * scale;
    if !(0.0..=DAY_S).contains(&seconds) {
        return Err(format!("'{text}' is not between 0 and 24h"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// A part of the time, above 0 and below 1: `1%`, `0.01`.
pub fn risk(text: &str) -> Result<f64, String> {
    part(text).filter(|p| (1e-6..1.0).contains(p)).ok_or_else(|| {
        format!("'{text}' is not a part of the time: expected 0.0001% up to less than 100%, as 1%")
    })
}

/// A level of confidence: `95%`, `0.9`.
pub fn level(text: &str) -> Result<f64, String> {
    part(text)
        // A hundredth of 99.9 is a little more than 0.999.
        .filter(|p| (0.5..=0.999 + f64::EPSILON).contains(p))
        .ok_or_else(|| format!("'{text}' is not a level of confidence: expected 50% to 99.9%"))
}

fn part(text: &str) -> Option<f64> {
    let trimmed = text.trim();
    match trimmed.strip_suffix('%') {
        Some(percent) => percent.trim_end().parse::<f64>().ok().map(|p| p / 100.0),
        None => trimmed.parse().ok(),
    }
}

/// The live view's interval: 100 ms to an hour, so that the view cannot become a load.
pub fn interval(text: &str) -> Result<Duration, String> {
    let d = duration(text)?;
    if d < Duration::from_millis(100) || d > Duration::from_secs(3600) {
        return Err(format!("'{text}' is not between 100ms and 1h"));
    }
    Ok(d)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_api() {
        for good in ["a", "db-1.x_Y", "0", &"n".repeat(64)] {
            assert_eq!(name(good).as_deref(), Ok(good));
        }
        for bad in ["", "-a", ".a", "a b", "a/b", "ä", &"n".repeat(65)] {
            assert!(name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_number_is_a_process_and_all_else_a_name() {
        assert_eq!(target("4711"), Ok(Target::Pid(4711)));
        assert_eq!(target("web"), Ok(Target::Vm("web".to_owned())));
        assert_eq!(target("4a"), Ok(Target::Vm("4a".to_owned())));
        for bad in ["", "0", "4294967296", "-1", "a/b"] {
            assert!(target(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn taxes_outside_the_half_open_interval_are_refused() {
        assert_eq!(tax("0"), Ok(0.0));
        assert_eq!(tax("0.75"), Ok(0.75));
        for bad in ["1", "-0.1", "NaN", "inf", "75%", "", "x"] {
            assert!(tax(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_of_vms_have_a_floor_and_a_step() {
        assert_eq!(vm_size("16M"), Ok(Bytes::from_mib(16)));
        for bad in ["14M", "17M", "16777217", "12Q", "99999999T", ""] {
            assert!(vm_size(bad).is_err(), "{bad}");
        }
        assert_eq!(hotplug_size("0"), Ok(Bytes(0)));
        assert_eq!(hotplug_size("2M"), Ok(Bytes::from_mib(2)));
        for bad in ["3M", "1", "12Q", ""] {
            assert!(hotplug_size(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn levels_of_confidence_reach_up_to_999_in_a_thousand() {
        assert_eq!(level("0.999"), Ok(0.999));
        for good in ["50%", "99.9%", "95 %"] {
            assert!(level(good).is_ok(), "{good}");
        }
        for bad in ["49.9%", "99.91%", "100%"] {
            assert!(level(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn times_have_units_and_limits() {
        assert_eq!(duration("30"), Ok(Duration::from_secs(30)));
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(duration("0"), Ok(Duration::ZERO));
        for bad in ["", "s", "-1s", "1d", "NaN", "inf", "25h", "1e9", "3 x", "1é"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
        assert!(interval("0").is_err());
        assert!(interval("2h").is_err());
        assert_eq!((risk("1%"), risk("0.25")), (Ok(0.01), Ok(0.25)));
        for bad in ["0", "100%", "-1%", "NaN", "%", "1%%"] {
            assert!(risk(bad).is_err() && level(bad).is_err(), "{bad}");
        }
        assert!(shares("0").is_err() && shares("4294967296").is_err() && shares("-1").is_err());
    }
}
