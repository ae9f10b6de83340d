//! Decoding as a stream of text.

use crate::engine::{EngineError, Model, Sampler, Sampling, TextStream};

/// Picks tokens and turns them into text, holding back bytes that are not yet whole characters.
pub(super) struct Answer<'m> {
    model: &'m Model,
    sampler: Sampler,
    stream: TextStream,
}

impl<'m> Answer<'m> {
    pub(super) fn new(model: &'m Model, sampling: Sampling) -> Answer<'m> {
        Answer { model, sampler: Sampler::new(sampling), stream: model.tokenizer().stream() }
    }

    /// The next token and what it adds to the text, or `None` where the text ends.
    pub(super) fn next(&mut self, logits: &[f32]) -> Result<Option<(u32, String)>, EngineError> {
        let token = self.sampler.next(logits);
        if self.model.is_eos(token) {
            return Ok(None);
        }
        Ok(Some((token, self.stream.push(token)?)))
    }

    /// What was held back at the end.
    pub(super) fn rest(self) -> Result<String, EngineError> {
        self.stream.finish()
    }
}
