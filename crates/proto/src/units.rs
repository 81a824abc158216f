//! Sizes and durations as people write them: `2GiB`, `512M`, `10m`, `1m30s`.

/// Text that is no size, duration or CPU count.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is {} {what} ({example})", bad.word())]
pub struct UnitError {
    what: &'static str,
    text: String,
    example: &'static str,
    bad: Bad,
}

/// What is wrong with a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bad {
    /// It is none, or its unit is none.
    Form,
    /// It can't be counted in 64 bits, CPUs in 32.
    Large,
}

impl Bad {
    fn word(self) -> &'static str {
        match self {
            Bad::Form => "not a",
            Bad::Large => "too large for a",
        }
    }
}

fn error(what: &'static str, text: &str, example: &'static str) -> impl Fn(Bad) -> UnitError {
    move |bad| UnitError {
        what,
        text: text.chars().take(64).flat_map(char::escape_debug).collect(),
        example,
        bad,
    }
}

/// A size in bytes: a number and `B`, `K`, `KB`, `KiB`, `M` … `TiB`. `K`, `M`, `G`, `T` alone are powers of 1024, like the
/// cgroup files and docker's; `KB`, `MB`, … are powers of 1000.
pub fn parse_bytes(text: &str) -> Result<u64, UnitError> {
    let bad = error("size", text, "like 512MiB, 2GiB or 1048576");
    let (number, unit) = split(text.trim());
    let (base, power): (u64, u32) = match unit.to_ascii_lowercase().as_str() {
        // There is no part of a byte.
        "" | "b" if number.contains('.') => return Err(bad(Bad::Form)),
        "" | "b" => (1, 0),
        "k" | "kib" => (1024, 1),
        "m" | "mib" => (1024, 2),
        "g" | "gib" => (1024, 3),
        "t" | "tib" => (1024, 4),
        "kb" => (1000, 1),
        "mb" => (1000, 2),
        "gb" => (1000, 3),
        "tb" => (1000, 4),
        _ => return Err(bad(Bad::Form)),
    };
    scaled(number, base.pow(power)).map_err(bad)
}

/// A duration in milliseconds: numbers with `ms`, `s`, `m`, `h`, together as in `1h30m`; a bare number is seconds.
pub fn parse_millis(text: &str) -> Result<u64, UnitError> {
    let bad = error("duration", text, "like 90s, 10m or 1h30m");
    let mut rest = text.trim();
    let mut total = 0u64;
    if rest.is_empty() {
        return Err(bad(Bad::Form));
    }
    while !rest.is_empty() {
        let (number, tail) = split(rest);
        let unit_len = tail.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit_len);
        let factor = match unit {
            "ms" => 1,
            "s" => 1000,
            "" if rest.len() == text.trim().len() => 1000,
            "m" | "min" => 60_000,
            "h" => 3_600_000,
            _ => return Err(bad(Bad::Form)),
        };
        let part = scaled(number, factor).map_err(&bad)?;
        total = total.checked_add(part).ok_or_else(|| bad(Bad::Large))?;
        rest = tail;
    }
    Ok(total)
}

/// CPUs in thousandths: `2`, `0.5`, or `1500m` as Kubernetes writes it.
pub fn parse_cpu_milli(text: &str) -> Result<u32, UnitError> {
    let bad = error("number of CPUs", text, "like 2, 0.5 or 1500m");
    let (number, unit) = split(text.trim());
    let factor = match unit {
        "" => 1000,
        "m" => 1,
        _ => return Err(bad(Bad::Form)),
    };
    match scaled(number, factor).and_then(|milli| u32::try_from(milli).map_err(|_| Bad::Large)) {
        Ok(0) => Err(bad(Bad::Form)),
        milli => milli.map_err(bad),
    }
}

/// So many of something: `1 file`, `2 files`.
pub fn counted(count: u64, word: &str) -> String {
    format!("{count} {word}{}", if count == 1 { "" } else { "s" })
}

/// Bytes for people, in powers of 1024.
pub fn show_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if value < 10.0 { format!("{value:.1} {}", UNITS[unit]) } else { format!("{value:.0} {}", UNITS[unit]) }
}

/// A duration for people.
pub fn show_millis(millis: u64) -> String {
    match millis {
        0..1000 => format!("{millis} ms"),
        1000..60_000 => format!("{}.{} s", millis / 1000, millis % 1000 / 100),
        60_000..3_600_000 => format!("{}m{:02}s", millis / 60_000, millis / 1000 % 60),
        _ => format!("{}h{:02}m", millis / 3_600_000, millis / 60_000 % 60),
    }
}

/// A size as [`parse_bytes`] reads it back, in the largest unit that leaves no rest.
pub fn write_bytes(bytes: u64) -> String {
    let units = [("TiB", 1u64 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    written(bytes, &units).unwrap_or_else(|| format!("{bytes}B"))
}

/// A duration as [`parse_millis`] reads it back, in the largest unit that leaves no rest.
pub fn write_millis(millis: u64) -> String {
    let units = [("h", 3_600_000), ("m", 60_000), ("s", 1000)];
    written(millis, &units).unwrap_or_else(|| format!("{millis}ms"))
}

/// CPUs as [`parse_cpu_milli`] reads them back.
pub fn write_cpu_milli(milli: u64) -> String {
    let text = format!("{}.{:03}", milli / 1000, milli % 1000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn written(value: u64, units: &[(&str, u64)]) -> Option<String> {
    let (unit, factor) = units.iter().find(|(_, factor)| value > 0 && value.is_multiple_of(*factor))?;
    Some(format!("{}{unit}", value / factor))
}

fn split(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    (&text[..end], text[end..].trim_start())
}

/// `number` (digits, perhaps a point and at most 6 more) times `factor`, without floats.
fn scaled(number: &str, factor: u64) -> Result<u64, Bad> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if !digits(whole) || fraction.len() > 6 || (number.contains('.') && !digits(fraction)) {
        return Err(Bad::Form);
    }
    let whole = whole.parse::<u64>().ok().and_then(|whole| whole.checked_mul(factor)).ok_or(Bad::Large)?;
    if fraction.is_empty() {
        return Ok(whole);
    }
    let value = u128::from(fraction.parse::<u64>().map_err(|_| Bad::Form)?);
    let part = value * u128::from(factor) / 10u128.pow(fraction.len() as u32);
    whole.checked_add(u64::try_from(part).map_err(|_| Bad::Large)?).ok_or(Bad::Large)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        for (text, want) in [
            ("0", Some(0)),
            ("1048576", Some(1 << 20)),
            ("2GiB", Some(2 << 30)),
            ("2 GiB", Some(2 << 30)),
            ("1.5g", Some(3 << 29)),
            ("512M", Some(512 << 20)),
            ("10MB", Some(10_000_000)),
            ("", None),
            ("-1", None),
            ("2XiB", None),
            ("1.", None),
            ("99999999999TiB", None),
            ("1.2.3G", None),
            ("1.5", None),
            ("1.5B", None),
        ] {
            assert_eq!(parse_bytes(text).ok(), want, "{text}");
        }
    }

    #[test]
    fn what_is_too_large_is_no_nonsense() {
        for (error, want) in [
            (parse_bytes("99999999999TiB").unwrap_err(), "`99999999999TiB` is too large for a size ("),
            (
                parse_bytes("18446744073709551616").unwrap_err(),
                "`18446744073709551616` is too large for a size (",
            ),
            (parse_bytes("much").unwrap_err(), "`much` is not a size ("),
            (
                parse_millis("99999999999999999h").unwrap_err(),
                "`99999999999999999h` is too large for a duration (",
            ),
            (parse_cpu_milli("5000000").unwrap_err(), "`5000000` is too large for a number of CPUs ("),
            (parse_cpu_milli("-1").unwrap_err(), "`-1` is not a number of CPUs ("),
        ] {
            assert!(error.to_string().starts_with(want), "{error}");
        }
    }

    #[test]
    fn durations() {
        for (text, want) in [
            ("90", Some(90_000)),
            ("90s", Some(90_000)),
            ("10m", Some(600_000)),
            ("1h30m", Some(5_400_000)),
            ("250ms", Some(250)),
            ("0.5s", Some(500)),
            ("", None),
            ("m", None),
            ("1h30", None),
            ("10 parsecs", None),
            ("99999999999999999h", None),
        ] {
            assert_eq!(parse_millis(text).ok(), want, "{text}");
        }
    }

    #[test]
    fn cpus() {
        for (text, want) in
            [("2", Some(2000)), ("0.5", Some(500)), ("1500m", Some(1500)), ("0", None), ("x", None)]
        {
            assert_eq!(parse_cpu_milli(text).ok(), want, "{text}");
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        for (bytes, want) in
            [(0, "0B"), (1, "1B"), (1 << 20, "1MiB"), (3 << 29, "1536MiB"), ((32 << 20) + 1, "33554433B")]
        {
            assert_eq!(write_bytes(bytes), want);
            assert_eq!(parse_bytes(want).unwrap(), bytes);
        }
        for (millis, want) in [(0, "0ms"), (1, "1ms"), (90_000, "90s"), (3_600_000, "1h"), (5_400_000, "90m")]
        {
            assert_eq!(write_millis(millis), want);
            assert_eq!(parse_millis(want).unwrap(), millis);
        }
        for (milli, want) in [(1, "0.001"), (10, "0.01"), (1500, "1.5"), (2000, "2"), (10_000, "10")] {
            assert_eq!(write_cpu_milli(milli), want);
            assert_eq!(u64::from(parse_cpu_milli(want).unwrap()), milli);
        }
    }

    #[test]
    fn shown() {
        assert_eq!([0, 1, 2].map(|count| counted(count, "file")), ["0 files", "1 file", "2 files"]);
        assert_eq!(show_bytes(1023), "1023 B");
        assert_eq!(show_bytes(1536), "1.5 KiB");
        assert_eq!(show_bytes(2 << 30), "2.0 GiB");
        assert_eq!(show_bytes(u64::MAX), "16384 PiB");
        assert_eq!(show_millis(999), "999 ms");
        assert_eq!(show_millis(61_500), "1m01s");
    }
}
