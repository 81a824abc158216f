//! The nearest known word to one that isn't known, for hints.

/// Words that are longer than this are not compared.
const WORD_CHARS_MAX: usize = 64;

/// The known word that a mistyped one most likely means: at most a third of its letters away.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if word.chars().count() > WORD_CHARS_MAX {
        return None;
    }
    let word = word.to_lowercase();
    known
        .into_iter()
        .map(|candidate| (distance(&word, &candidate.to_lowercase()), candidate))
        .filter(|(distance, candidate)| *distance <= candidate.chars().count().max(3).div_ceil(3))
        .min()
        .map(|(_, candidate)| candidate)
}

/// Levenshtein's distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().take(WORD_CHARS_MAX).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typo_finds_its_word_and_nonsense_finds_none() {
        let known = ["setup", "checks", "source", "limits", "keep_going"];
        for (typo, want) in
            [("check", "checks"), ("sorce", "source"), ("keepgoing", "keep_going"), ("Limit", "limits")]
        {
            assert_eq!(nearest(typo, known), Some(want), "{typo}");
        }
        assert_eq!(nearest("zzzzzz", known), None);
        assert_eq!(nearest(&"x".repeat(100_000), known), None);
    }
}
