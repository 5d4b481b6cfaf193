//! Finds the key that was probably meant.

/// Edits beyond this make another word, not a slip.
const DISTANCE_MAX: usize = 3;

/// The known path that an unknown one was probably meant to be: the nearest sibling by spelling,
/// else the same key in another section.
pub fn nearest<'a>(unknown: &str, known: &'a [String]) -> Option<&'a str> {
    let generic = without_indices(unknown);
    let (section, key) = split(&generic);
    let sibling = known
        .iter()
        .filter(|path| split(path).0 == section)
        .map(|path| (distance(key, split(path).1), path))
        .filter(|(distance, path)| *distance <= DISTANCE_MAX.min(split(path).1.len() / 2))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, path)| path.as_str());
    sibling.or_else(|| {
        let mut elsewhere = known.iter().filter(|path| split(path).1 == key);
        elsewhere.next().map(String::as_str)
    })
}

fn without_indices(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    let mut inside = false;
    for c in path.chars() {
        match c {
            '[' => {
                inside = true;
                out.push_str("[]");
            }
            ']' => inside = false,
            c if !inside => out.push(c),
            _ => {}
        }
    }
    out
}

fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('.').unwrap_or(("", path))
}

/// Levenshtein distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_finds_its_sibling_and_a_misplaced_key_its_section() {
        let known: Vec<String> = [
            "server.port",
            "server.host",
            "response_cache.redis.url",
            "backends[].name",
        ]
        .map(String::from)
        .into();
        assert_eq!(nearest("server.prot", &known), Some("server.port"));
        assert_eq!(nearest("backends[3].nme", &known), Some("backends[].name"));
        assert_eq!(
            nearest("redis.url", &known),
            Some("response_cache.redis.url")
        );
        assert_eq!(nearest("server.colour", &known), None);
    }
}
