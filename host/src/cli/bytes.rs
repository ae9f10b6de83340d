//! Amounts of bytes, as people write and read them.

/// Units and how many bytes each is.
const UNITS: [(&str, u64); 8] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];

/// Text that is no amount of bytes.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("found `{}`, expected a number of bytes, with a unit or without: 12GiB, 1.5GB, 800000000", kvmig_gate::parse::printable(.0))]
pub(super) struct ParseBytesError(String);

/// Reads `12GiB`, `1.5 GB` or `800000000`; letters of either case.
pub(super) fn parse(text: &str) -> Result<u64, ParseBytesError> {
    let wrong = || ParseBytesError(text.to_owned());
    let trimmed = text.trim();
    let digits = trimmed.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(digits);
    let unit = unit.trim_start();
    let factor = match unit {
        "" | "B" | "b" => 1,
        unit => UNITS
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(unit))
            .map(|(_, factor)| *factor)
            .ok_or_else(wrong)?,
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(factor).ok_or_else(wrong);
    }
    let bytes = number.parse::<f64>().map_err(|_| wrong())? * factor as f64;
    // Beyond 2^53 a fraction of a byte is nothing to be exact about; beyond all integers it is no amount.
    if bytes.is_finite() && bytes < u64::MAX as f64 { Ok(bytes as u64) } else { Err(wrong()) }
}

/// Three digits and a binary unit.
pub(super) fn shown(bytes: u64) -> String {
    let unit = UNITS[..4].iter().rev().find(|(_, factor)| bytes >= *factor);
    match unit {
        None => format!("{bytes} B"),
        Some((name, factor)) => {
            let amount = bytes as f64 / *factor as f64;
            let digits = if amount < 9.995 { 2 } else { usize::from(amount < 99.95) };
            format!("{amount:.digits$} {name}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{parse, shown};

    #[test]
    fn amounts() {
        for (text, bytes) in [
            ("0", 0),
            ("800000000", 800_000_000),
            ("12GiB", 12 << 30),
            ("12 gib", 12 << 30),
            ("1.5GB", 1_500_000_000),
            ("0.5KiB", 512),
            ("7B", 7),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for text in ["", "GiB", "-1", "1.2.3", "1 parsec", "20000000TiB", "99999999999999999999", "1e3", "NaN"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn three_digits() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1 << 20, "1.00 MiB"),
            (15 << 19, "7.50 MiB"),
            (100 << 20, "100 MiB"),
            (12 << 30, "12.0 GiB"),
        ] {
            assert_eq!(shown(bytes), text);
        }
    }
}
