//! Decoding token by token.

use crate::engine::EngineError;

use super::Tokenizer;

/// Turns tokens into text as they come. A character whose bytes are spread over several tokens is held back until it is
/// whole.
#[derive(Debug)]
pub struct TextStream {
    tokenizer: Tokenizer,
    /// Tokens from the last safe cut on: `tokens[..shown]` were given out, the rest is held back.
    tokens: Vec<u32>,
    shown: usize,
}

impl TextStream {
    pub(super) fn new(tokenizer: Tokenizer) -> TextStream {
        TextStream { tokenizer, tokens: Vec::new(), shown: 0 }
    }

    /// Takes a token and returns the text that is now certain; often one token's, sometimes nothing.
    ///
    /// # Errors
    /// [`EngineError::Tokenizer`].
    pub fn push(&mut self, token: u32) -> Result<String, EngineError> {
        self.tokens.push(token);
        // Decoded together with the tokens before: some decoders treat the first token of a text differently.
        let before = self.tokenizer.decode(&self.tokens[..self.shown])?;
        let now = self.tokenizer.decode(&self.tokens)?;
        if now.len() <= before.len() || now.ends_with('\u{fffd}') {
            return Ok(String::new());
        }
        let Some(new) = now.strip_prefix(&before) else { return Ok(String::new()) };
        let new = new.to_owned();
        self.tokens.drain(..self.shown);
        self.shown = self.tokens.len();
        Ok(new)
    }

    /// Ends the text: what was held back, U+FFFD for bytes that never became a character.
    ///
    /// # Errors
    /// [`EngineError::Tokenizer`].
    pub fn finish(self) -> Result<String, EngineError> {
        let before = self.tokenizer.decode(&self.tokens[..self.shown])?;
        let now = self.tokenizer.decode(&self.tokens)?;
        Ok(now.strip_prefix(&before).unwrap_or(&now).to_owned())
    }
}
