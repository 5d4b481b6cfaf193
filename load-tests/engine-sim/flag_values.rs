//! How the values of flags are read, with messages that say what to write instead.

/// `8192`, or with vLLM's suffixes: k, m, g are powers of 1000 and K, M, G of 1024.
pub fn human_count(text: &str) -> Result<usize, String> {
    let (digits, factor) = match text.char_indices().last() {
        Some((at, 'k')) => (&text[..at], 1_000.0),
        Some((at, 'm')) => (&text[..at], 1e6),
        Some((at, 'g')) => (&text[..at], 1e9),
        Some((at, 'K')) => (&text[..at], 1024.0),
        Some((at, 'M')) => (&text[..at], 1024.0 * 1024.0),
        Some((at, 'G')) => (&text[..at], 1024.0 * 1024.0 * 1024.0),
        _ => {
            return text.parse().map_err(|_| {
                "give a whole number, or one with a suffix such as 32k or 32K".to_owned()
            });
        }
    };
    let number: f64 = digits
        .parse()
        .map_err(|_| "give a number before the suffix, as in 32k".to_owned())?;
    match number * factor {
        count if count >= 1.0 => Ok(count as usize),
        _ => Err("must be at least 1".to_owned()),
    }
}

/// A share.
pub fn fraction(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("give a number from 0 to 1".to_owned()),
    }
}

/// A time or a factor.
pub fn not_negative(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err("give a number that is 0 or more".to_owned()),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn counts_take_decimal_and_binary_suffixes() {
        assert_eq!(human_count("32k"), Ok(32_000));
        assert_eq!(human_count("32K"), Ok(32_768));
        assert_eq!(human_count("1.5k"), Ok(1_500));
        assert!(
            human_count("0k").is_err() && human_count("k").is_err() && human_count("-1").is_err()
        );
    }
}
