//! Durations ("250ms", "15s", "24h", "7d") and sizes (bytes, or "1MiB") as people write them.

use std::time::Duration;

/// Longer ones are a slip, and could not be added to a point in time.
const DURATION_MAX: Duration = Duration::from_secs(10 * 365 * 86_400);

/// Parses a duration; the unit is required.
pub fn duration(text: &str) -> Option<Duration> {
    let (number, unit) = split(text)?;
    let seconds = match unit {
        "ms" => number / 1000.0,
        "s" => number,
        "m" => number * 60.0,
        "h" => number * 3600.0,
        "d" => number * 86_400.0,
        _ => return None,
    };
    Duration::try_from_secs_f64(seconds)
        .ok()
        .filter(|duration| *duration <= DURATION_MAX)
}

/// Parses a size in bytes; without a unit it is bytes.
pub fn size(text: &str) -> Option<u64> {
    let (number, unit) = split(text)?;
    let scale: u64 = match unit {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "KB" | "kB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        _ => return None,
    };
    let bytes = number * scale as f64;
    (bytes <= u64::MAX as f64).then_some(bytes as u64)
}

/// A day, as 2027-01-31 (its beginning), or a moment of UTC, as 2027-01-31T12:00:00Z, in Unix seconds.
pub fn moment(text: &str) -> Option<u64> {
    let (day, time) = text.split_once('T').unwrap_or((text, "00:00:00Z"));
    let digits = |text: &str, count: usize| {
        let plain = text.len() == count && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse::<u64>().ok().filter(|_| plain)
    };
    let day: Vec<&str> = day.split('-').collect();
    let [year, month, day] = day[..] else {
        return None;
    };
    let (year, month, day) = (digits(year, 4)?, digits(month, 2)?, digits(day, 2)?);
    let time: Vec<&str> = time.strip_suffix('Z')?.split(':').collect();
    let [hour, minute, second] = time[..] else {
        return None;
    };
    let (hour, minute, second) = (digits(hour, 2)?, digits(minute, 2)?, digits(second, 2)?);
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let february = if leap(year) { 29 } else { 28 };
    let lengths = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let length = *lengths.get(usize::try_from(month.checked_sub(1)?).ok()?)?;
    if year < 1970 || !(1..=length).contains(&day) || hour > 23 || minute > 59 || second > 59 {
        return None;
    }
    let years: u64 = (1970..year)
        .map(|year| if leap(year) { 366 } else { 365 })
        .sum();
    let months: u64 = lengths[..month as usize - 1].iter().sum();
    let days = years + months + day - 1;
    Some(((days * 24 + hour) * 60 + minute) * 60 + second)
}

fn split(text: &str) -> Option<(f64, &str)> {
    let text = text.trim();
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let number: f64 = text[..end].parse().ok()?;
    Some((number, text[end..].trim_start()))
}

/// The shortest way to write a duration that [`duration`] reads back.
pub fn show_duration(duration: Duration) -> String {
    let ms = duration.as_millis();
    for (unit, length) in [
        ("d", 86_400_000),
        ("h", 3_600_000),
        ("m", 60_000),
        ("s", 1000),
    ] {
        if ms > 0 && ms.is_multiple_of(length) {
            return format!("{}{unit}", ms / length);
        }
    }
    if ms == 0 {
        "0s".into()
    } else {
        format!("{ms}ms")
    }
}

/// The shortest way to write a size that [`size`] reads back.
pub fn show_size(bytes: u64) -> String {
    for (unit, length) in [("GiB", 1u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)] {
        if bytes > 0 && bytes.is_multiple_of(length) {
            return format!("{}{unit}", bytes / length);
        }
    }
    bytes.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_reads_back_and_nonsense_does_not_read() {
        for (text, ms) in [
            ("250ms", 250),
            ("15s", 15_000),
            ("90m", 5_400_000),
            ("24h", 86_400_000),
            ("7d", 604_800_000),
            ("1.5s", 1500),
            ("0s", 0),
        ] {
            let parsed = duration(text).unwrap();
            assert_eq!(parsed.as_millis(), ms, "{text}");
            assert_eq!(duration(&show_duration(parsed)), Some(parsed));
        }
        for text in [
            "15",
            "s",
            "-3s",
            "1w",
            "",
            "1.2.3s",
            "15 seconds",
            "99999999999999d",
        ] {
            assert_eq!(duration(text), None, "{text}");
        }
        assert_eq!(size("1MiB"), Some(1 << 20));
        assert_eq!(size("524288"), Some(524_288));
        assert_eq!(size("lots"), None);
        assert_eq!(show_size(32 << 20), "32MiB");
    }

    #[test]
    fn days_and_moments_are_read_and_slips_are_not() {
        for (text, seconds) in [
            ("1970-01-01", 0),
            ("2000-03-01", 951_868_800),
            ("2026-11-30", 1_795_996_800),
            ("2027-01-31T12:00:01Z", 1_801_396_801),
        ] {
            assert_eq!(moment(text), Some(seconds), "{text}");
        }
        for slip in [
            "",
            "2027-1-31",
            "2027-02-29",
            "2027-13-01",
            "2027-00-01",
            "2027-01-31T12:00:00",
            "2027-01-31T24:00:00Z",
            "31.01.2027",
            "2027-01-3l",
            "1969-12-31",
        ] {
            assert_eq!(moment(slip), None, "{slip}");
        }
    }
}
