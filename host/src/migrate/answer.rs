//! Greedy decoding as a stream of text.

use crate::engine::{Model, StreamDecoder, greedy};

/// Picks tokens and turns them into text, holding back bytes that are not yet whole characters.
pub(super) struct Answer<'m> {
    model: &'m Model,
    decoder: StreamDecoder<'m>,
}

impl<'m> Answer<'m> {
    pub(super) fn new(model: &'m Model) -> Answer<'m> {
        Answer { model, decoder: model.tokenizer().stream() }
    }

    /// The next token, or `None` where the text ends.
    pub(super) fn next(&self, logits: &[f32]) -> Option<u32> {
        let token = greedy(logits);
        (!self.model.is_eos(token)).then_some(token)
    }

    /// What `token` adds to the text.
    pub(super) fn text(&mut self, token: u32) -> Option<String> {
        self.decoder.push(token)
    }

    /// What was held back at the end.
    pub(super) fn rest(&mut self) -> Option<String> {
        self.decoder.finish()
    }
}
