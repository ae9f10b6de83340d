//! Whether two models read a text as the same tokens: without that, one's cache means nothing to the other.

use std::{fmt::Display, path::PathBuf};

use super::Tokenizer;

/// Two models that read a text as different tokens.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{}: {field}: found {found}, expected {expected} as in {}: only models of one tokenizer make a pair; use a sibling of the \
     source", file.display(), other.display()
)]
pub struct OtherTokenizer {
    /// The target's file.
    pub file: PathBuf,
    /// What differs.
    pub field: &'static str,
    /// What the target has.
    pub found: String,
    /// What the source has.
    pub expected: String,
    /// The source's file.
    pub other: PathBuf,
}

impl Tokenizer {
    /// Whether this tokenizer, the target's, makes of every text what the source's does: vocabulary, special tokens and cuts by
    /// their digest, and the tokens that a text starts with.
    ///
    /// # Errors
    /// [`OtherTokenizer`].
    pub fn check_sibling(&self, source: &Tokenizer) -> Result<(), OtherTokenizer> {
        let differs = |field, found: &dyn Display, expected: &dyn Display| OtherTokenizer {
            file: self.file.clone(),
            field,
            found: found.to_string(),
            expected: expected.to_string(),
            other: source.file.clone(),
        };
        if self.digest != source.digest {
            return Err(differs("tokenizer", &self.digest.short(), &source.digest.short()));
        }
        if self.start != source.start {
            let shown = |start: &[u32]| format!("tokens {start:?}");
            return Err(differs("start of a text (BOS)", &shown(&self.start), &shown(&source.start)));
        }
        Ok(())
    }
}
