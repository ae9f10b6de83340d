//! Names in a pair: short words that terminals, tables and policies can hold.

/// Characters of a name at most.
const LONGEST: usize = 64;

/// A text that is no name for a pair, a domain or a kind of mapper.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("found `{found}`, expected {}", Self::EXPECTED)]
pub struct NameError {
    /// The text, printable.
    pub found: String,
}

impl NameError {
    /// What a name is.
    pub const EXPECTED: &str = "1 to 64 letters, digits, `.`, `_` or `-`, the first a letter or digit";
}

/// Whether people, policies and the ledger can call something by this name.
///
/// # Errors
/// [`NameError`].
pub fn check_name(text: &str) -> Result<(), NameError> {
    let inner = |c: char| c.is_alphanumeric() || matches!(c, '.' | '_' | '-');
    let sound = text.starts_with(char::is_alphanumeric) && text.chars().all(inner) && text.chars().count() <= LONGEST;
    if sound { Ok(()) } else { Err(NameError { found: kvmig_gate::parse::printable(text) }) }
}

#[cfg(test)]
mod tests {
    use super::check_name;

    #[test]
    fn names() {
        for name in ["code", "medium-large", "code.calib", "fr_prosa", "прoза", "7b", &"x".repeat(64)] {
            assert_eq!(check_name(name), Ok(()));
        }
        for text in ["", "a b", "-x", ".x", "a/b", "a\u{1b}[2J", "a\n", "a\u{202e}b", "a`b", &"x".repeat(65)] {
            let error = check_name(text).unwrap_err().to_string();
            assert!(!error.contains(['\u{1b}', '\n', '\u{202e}']), "{error:?}");
        }
    }
}
