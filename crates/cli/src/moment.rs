//! Moments: from the command line, and for people. Inside they are milliseconds since 1970.

use jiff::civil::Time;
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan as _, Zoned};

/// `-10m` (ago; s, m, h, d), `14:05` or `14:05:30` (the last such time here), or RFC 3339.
pub fn parse(text: &str) -> Result<u64, String> {
    let now = Timestamp::now().to_zoned(TimeZone::system());
    parse_at(text, &now)
}

fn parse_at(text: &str, now: &Zoned) -> Result<u64, String> {
    let text = text.trim();
    let wrong = || {
        format!("'{text}' is not a time: expected -10m, 14:05, or a date as 2026-03-01T14:05:00Z")
    };
    let moment = if let Some(ago) = text.strip_prefix('-') {
        let unit = ago.chars().last().ok_or_else(wrong)?;
        let number = ago.strip_suffix(unit).unwrap_or_default();
        let seconds = match unit {
            's' => 1.0,
            'm' => 60.0,
            'h' => 3600.0,
            'd' => 86_400.0,
            _ => return Err(wrong()),
        };
        let seconds = number.parse::<f64>().map_err(|_| wrong())? * seconds;
        // A thousand years.
        if !(0.0..3.2e10).contains(&seconds) {
            return Err(wrong());
        }
        let ms = (seconds * 1e3).round() as i64;
        now.timestamp().checked_sub(ms.milliseconds()).map_err(|_| wrong())?
    } else if let Ok(stamp) = text.parse::<Timestamp>() {
        stamp
    } else if !text.contains(['T', '-'])
        && let Ok(time) = text.parse::<Time>()
    {
        let today = now.with().time(time).build().map_err(|e| format!("'{text}': {e}"))?;
        let last = if today > *now { today.checked_sub(1.day()) } else { Ok(today) };
        last.map_err(|e| format!("'{text}': {e}"))?.timestamp()
    } else {
        return Err(wrong());
    };
    u64::try_from(moment.as_millisecond())
        .map_err(|_| format!("'{text}' is before 1970, and before any journal"))
}

/// "2026-03-01 14:05:07.250", in the time zone of whoever reads.
pub fn show(ms: u64) -> String {
    show_in(ms, TimeZone::system())
}

fn show_in(ms: u64, zone: TimeZone) -> String {
    let stamp = i64::try_from(ms).ok().and_then(|ms| Timestamp::from_millisecond(ms).ok());
    match stamp {
        Some(stamp) => stamp.to_zoned(zone).strftime("%Y-%m-%d %H:%M:%S%.3f").to_string(),
        None => format!("{ms} ms since 1970"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> Zoned {
        "2026-03-01T14:05:07.250+01:00[+01:00]".parse().unwrap()
    }

    fn ms(text: &str) -> u64 {
        text.parse::<Timestamp>().unwrap().as_millisecond() as u64
    }

    #[test]
    fn times_are_ago_of_the_day_or_dates() {
        let parse = |text| parse_at(text, &now());
        assert_eq!(parse("-10m"), Ok(ms("2026-03-01T12:55:07.250Z")));
        assert_eq!(parse("-1.5h"), Ok(ms("2026-03-01T11:35:07.250Z")));
        assert_eq!(parse("-2d"), Ok(ms("2026-02-27T13:05:07.250Z")));
        assert_eq!(parse("14:05"), Ok(ms("2026-03-01T13:05:00Z")));
        // It has not been today: yesterday's.
        assert_eq!(parse("14:05:30"), Ok(ms("2026-02-28T13:05:30Z")));
        assert_eq!(parse("2026-03-01T14:05:00+02:00"), Ok(ms("2026-03-01T12:05:00Z")));
        assert_eq!(parse("2026-03-01T14:05:00Z"), Ok(ms("2026-03-01T14:05:00Z")));
        for bad in
            ["", "-", "-m", "-10", "-10x", "--1m", "-1e99d", "25:00", "noon", "2026-03-01", "-é"]
        {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert!(parse("1969-01-01T00:00:00Z").unwrap_err().contains("before 1970"));
    }

    #[test]
    fn moments_are_shown_where_the_reader_is() {
        let zone = TimeZone::fixed(jiff::tz::offset(1));
        assert_eq!(
            show_in(ms("2026-03-01T13:05:07.250Z"), zone.clone()),
            "2026-03-01 14:05:07.250"
        );
        assert_eq!(show_in(u64::MAX, zone), format!("{} ms since 1970", u64::MAX));
    }
}
