//! Text that follows from a number: about one token a word for most vocabularies, two for the simulated engines'.

const CONSONANTS: &[u8] = b"bdfgklmnprstvz";
const VOWELS: &[u8] = b"aeiou";

/// So many words, the same for the same number.
pub fn words(number: u64, count: usize) -> String {
    let mut chance = fastrand::Rng::with_seed(number);
    let mut text = String::with_capacity(count * 5);
    for at in 0..count {
        if at > 0 {
            text.push(' ');
        }
        for _ in 0..chance.usize(1..=2) {
            text.push(CONSONANTS[chance.usize(..CONSONANTS.len())] as char);
            text.push(VOWELS[chance.usize(..VOWELS.len())] as char);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::words;

    #[test]
    fn a_number_gives_its_words_and_another_gives_others() {
        assert_eq!(words(5, 40), words(5, 40));
        assert_ne!(words(5, 40), words(6, 40));
        assert_eq!(words(5, 40).split(' ').count(), 40);
    }
}
